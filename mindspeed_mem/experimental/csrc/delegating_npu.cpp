// An NPU allocator in front of torch_npu's own, as delegating_cuda.cpp is one in front of torch's: it passes everything
// on, and where torch_npu's own finds no memory it asks for room and tries again. Driven by delegating.py.
//
// Written against the interface of torch_npu 2.13, where it compiles; it has not been run on an NPU. A method with a
// default is passed on as well: a line that is missing below would be a silent change of behaviour.
#include <torch_npu/csrc/core/npu/NPUCachingAllocator.h>

#include "delegating.h"

namespace {

namespace native = c10_npu::NPUCachingAllocator;
using c10::DataPtr;
using c10::DeviceIndex;
using c10_npu::MempoolId_t;
using Communicator = std::shared_ptr<c10d_npu::HCCLComm>;
using Pointers = std::unordered_set<void*>;
using StreamFilter = std::function<bool(aclrtStream)>;

bool may_evict() {
  return c10_npu::currentStreamCaptureStatusMayInitCtx() == c10_npu::CaptureStatus::None;
}

class DelegatingAllocator final : public native::NPUAllocator {
 public:
  explicit DelegatingAllocator(native::NPUAllocator* allocator) : native_(allocator) {}
  // Never destroyed; and saying so keeps the base class's own methods out, which need symbols that nobody exports.
  ~DelegatingAllocator() override { std::abort(); }

  DataPtr allocate(size_t n) override {
    return mindspeed_mem::with_room(n, [&] { return native_->allocate(n); }, may_evict);
  }
  DataPtr allocate_with_aligned(size_t n, size_t aligned) const override {
    return mindspeed_mem::with_room(n, [&] { return native_->allocate_with_aligned(n, aligned); }, may_evict);
  }
  void* raw_alloc(size_t n) override {
    return mindspeed_mem::with_room(n, [&] { return native_->raw_alloc(n); }, may_evict);
  }
  void* raw_alloc_with_stream(size_t n, aclrtStream stream) override {
    return mindspeed_mem::with_room(n, [&] { return native_->raw_alloc_with_stream(n, stream); }, may_evict);
  }

  // c10::Allocator
  PASS_ON_CONST(bool, is_simple_data_ptr, (const DataPtr& p), (p))
  PASS_ON_CONST(c10::DeleterFnPtr, raw_deleter, (), ())
  PASS_ON_CONST(void, copy_data, (void* to, const void* from, size_t n), (to, from, n))

  // c10::DeviceAllocator
  PASS_ON(bool, initialized, (), ())
  PASS_ON(void, emptyCache, (MempoolId_t pool), (pool))
  PASS_ON(void, recordStream, (const DataPtr& p, c10::Stream s), (p, s))
  PASS_ON(c10::CachingDeviceAllocator::DeviceStats, getDeviceStats, (DeviceIndex d), (d))
  PASS_ON(void, resetAccumulatedStats, (DeviceIndex d), (d))
  PASS_ON(void, resetPeakStats, (DeviceIndex d), (d))

  // NPUAllocator, in the order of its declaration; getMemoryInfo has two results, and a macro splits at commas
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override { return native_->getMemoryInfo(d); }
  PASS_ON(void, raw_delete, (void* p), (p))
  PASS_ON(void, init, (int count), (count))
  PASS_ON(double, getMemoryFraction, (int d), (d))
  PASS_ON(void, setMemoryFraction, (double f, int d), (f, d))
  PASS_ON(void, emptyCacheImpl, (bool check, bool physical), (check, physical))
  PASS_ON(void, emptyCache, (bool check), (check))
  PASS_ON(void, emptyVirtAddrCache, (bool check), (check))
  PASS_ON(void, cacheInfo, (int d, size_t* total, size_t* largest), (d, total, largest))
  PASS_ON(void*, getBaseAllocation, (void* p, size_t* n), (p, n))
  PASS_ON(void, recordStream, (const DataPtr& p, c10_npu::NPUStream s), (p, s))
  PASS_ON(void, eraseStream, (const DataPtr& p, c10_npu::NPUStream s), (p, s))
  PASS_ON(void, eraseStreamWithBlockPtr, (void* block, c10_npu::NPUStream s, void* work), (block, s, work))
  PASS_ON(void*, getBlockPtr, (const DataPtr& p), (p))
  PASS_ON(void, recordHcclWorkForBlock, (void* block, void* work), (block, work))
  PASS_ON(native::SnapshotInfo, snapshot, (MempoolId_t pool), (pool))
  PASS_ON(void, beginAllocateToPool, (DeviceIndex d, MempoolId_t pool, StreamFilter f), (d, pool, std::move(f)))
  PASS_ON(void, endAllocateToPool, (DeviceIndex d, MempoolId_t pool), (d, pool))
  PASS_ON(void, releasePool, (DeviceIndex d, MempoolId_t pool), (d, pool))
  PASS_ON(int, getPoolUseCount, (DeviceIndex d, MempoolId_t pool), (d, pool))
  PASS_ON(void, setUseOnOOM, (DeviceIndex d, MempoolId_t pool, bool on), (d, pool, on))
  PASS_ON(void, setNoSplit, (DeviceIndex d, MempoolId_t pool), (d, pool))
  PASS_ON(bool, hasCapturesUnderway, (DeviceIndex d), (d))
  PASS_ON(void, markCaptureBegin, (DeviceIndex d), (d))
  PASS_ON(void, markCaptureEnd, (DeviceIndex d), (d))
  PASS_ON(void, FreeDeviceCachedMemory, (int d), (d))
  PASS_ON(std::string, name, (), ())
  PASS_ON(bool, checkPoolLiveAllocations, (DeviceIndex d, MempoolId_t pool, const Pointers& live), (d, pool, live))
  PASS_ON(native::ShareableHandle, shareIpcHandle, (void* p), (p))
  PASS_ON(std::shared_ptr<void>, getIpcDevPtr, (std::string handle), (std::move(handle)))
  PASS_ON(bool, isHistoryEnabled, (), ())
  PASS_ON(void, recordHistory, (bool on, native::CreateContextFn make, size_t most, native::RecordContext when),
          (on, make, most, when))
  PASS_ON(void, attachOutOfMemoryObserver, (native::OutOfMemoryObserver o), (std::move(o)))
  PASS_ON(void, attachOomRejectionObserver, (native::OomRejectionObserver o), (std::move(o)))
  PASS_ON(bool, checkUceInMemPool, (int d), (d))
  PASS_ON(bool, checkBlockIsSafe, (const DataPtr& p), (p))
  PASS_ON(void, markAllBlockUnsafe, (int d), (d))
  PASS_ON(void, updateBlockToSafe, (const DataPtr& p), (p))
  PASS_ON(void, cleanEvent, (), ())
  PASS_ON(void, buildServerMemMapForHccl, (int d, Communicator c), (d, std::move(c)))
  PASS_ON(std::shared_ptr<native::AllocatorState>, getCheckpointState, (DeviceIndex d, MempoolId_t pool), (d, pool))
  PASS_ON(native::CheckpointDelta, setCheckpointPoolState,
          (DeviceIndex d, std::shared_ptr<native::AllocatorState> s), (d, std::move(s)))
  PASS_ON(void, attachAllocatorTraceTracker, (native::AllocatorTraceTracker t), (std::move(t)))
  PASS_ON(void, createOrIncrefPool, (DeviceIndex d, MempoolId_t pool, std::shared_ptr<native::NPUAllocator> a),
          (d, pool, std::move(a)))

  native::NPUAllocator* const native_;
};

DelegatingAllocator* installed = nullptr;

void put(native::NPUAllocator* allocator) {
  native::allocator.store(allocator);
  c10::SetAllocator(c10::DeviceType::PrivateUse1, allocator, 1);  // above the priority of torch_npu's own
}

}  // namespace

// After torch_npu's own is initialised.
EXPORTED void delegating_install() {
  if (installed != nullptr) return;
  installed = new DelegatingAllocator(native::get());  // never destroyed: a thread may be inside
  put(installed);
}

EXPORTED void delegating_remove() {
  if (installed == nullptr) return;
  if (native::get() == installed) put(installed->native_);
  installed = nullptr;
}
