// A CUDA allocator in front of torch's own: it passes everything on, and where torch's own finds no memory it asks for
// room and tries again. Driven by delegating.py.
//
// Blocks keep the native deleter, so that frees, statistics, snapshots, pools and graphs are the native allocator's.
// Written against the interface of torch 2.13, where it compiles; it has not been run on a GPU. A method with a default
// is passed on as well: a line that is missing below would be a silent change of behaviour.
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "delegating.h"

namespace {

namespace native = c10::cuda::CUDACachingAllocator;
using c10::DataPtr;
using c10::DeviceIndex;
using c10::MempoolId_t;
using Annotations = std::vector<std::pair<std::string, std::string>>;
using Pointers = std::unordered_set<void*>;
using SkippedActions = std::vector<std::string>;
using StreamFilter = std::function<bool(cudaStream_t)>;

bool may_evict() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() == c10::cuda::CaptureStatus::None;
}

class DelegatingAllocator final : public native::CUDAAllocator {
 public:
  explicit DelegatingAllocator(native::CUDAAllocator* allocator) : native_(allocator) {}
  // Never destroyed; and saying so keeps the base class's own methods out, which need symbols that nobody exports.
  ~DelegatingAllocator() override { std::abort(); }

  DataPtr allocate(size_t n) override {
    return mindspeed_mem::with_room(n, [&] { return native_->allocate(n); }, may_evict);
  }
  void* raw_alloc(size_t n) override {
    return mindspeed_mem::with_room(n, [&] { return native_->raw_alloc(n); }, may_evict);
  }
  void* raw_alloc_with_stream(size_t n, cudaStream_t stream) override {
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

  // CUDAAllocator, in the order of its declaration; getMemoryInfo has two results, and a macro splits at commas
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex d) override { return native_->getMemoryInfo(d); }
  PASS_ON(void, raw_delete, (void* p), (p))
  PASS_ON(void, init, (int count), (count))
  PASS_ON(double, getMemoryFraction, (DeviceIndex d), (d))
  PASS_ON(void, setMemoryFraction, (double f, DeviceIndex d), (f, d))
  PASS_ON(std::vector<native::StreamSegmentSize>, getExpandableSegmentSizes, (DeviceIndex d), (d))
  PASS_ON(void, enable, (bool on), (on))
  PASS_ON_CONST(bool, isEnabled, (), ())
  PASS_ON(void, cacheInfo, (DeviceIndex d, size_t* largest), (d, largest))
  PASS_ON(void*, getBaseAllocation, (void* p, size_t* n), (p, n))
  PASS_ON(void, recordStream, (const DataPtr& p, c10::cuda::CUDAStream s), (p, s))
  PASS_ON(native::SnapshotInfo, snapshot, (MempoolId_t pool, bool traces), (pool, traces))
  PASS_ON(void, beginAllocateToPool, (DeviceIndex d, MempoolId_t pool, StreamFilter f), (d, pool, std::move(f)))
  PASS_ON(void, endAllocateToPool, (DeviceIndex d, MempoolId_t pool), (d, pool))
  PASS_ON(void, markCaptureBegin, (DeviceIndex d), (d))
  PASS_ON(void, markCaptureEnd, (DeviceIndex d), (d))
  PASS_ON(void, releasePool, (DeviceIndex d, MempoolId_t pool), (d, pool))
  PASS_ON(int, getPoolUseCount, (DeviceIndex d, MempoolId_t pool), (d, pool))
  PASS_ON(void, createOrIncrefPool, (DeviceIndex d, MempoolId_t pool, std::shared_ptr<native::CUDAAllocator> a),
          (d, pool, std::move(a)))
  PASS_ON(void, setUseOnOOM, (DeviceIndex d, MempoolId_t pool, bool on), (d, pool, on))
  PASS_ON(void, setNoSplit, (DeviceIndex d, MempoolId_t pool), (d, pool))
  PASS_ON(bool, checkPoolLiveAllocations, (DeviceIndex d, MempoolId_t pool, const Pointers& live), (d, pool, live))
  PASS_ON(native::ShareableHandle, shareIpcHandle, (void* p), (p))
  PASS_ON(std::shared_ptr<void>, getIpcDevPtr, (std::string handle), (std::move(handle)))
  PASS_ON(bool, isHistoryEnabled, (), ())
  PASS_ON(std::shared_ptr<c10::GatheredContext>, getContextForPointer, (const void* p), (p))
  PASS_ON(void, recordHistory,
          (bool on, native::CreateContextFn make, size_t most, native::RecordContext when, bool clear,
           const SkippedActions& skip),
          (on, make, most, when, clear, skip))
  PASS_ON(void, recordAnnotation, (const Annotations& a), (a))
  PASS_ON(void, pushCompileContext, (std::string & context), (context))
  PASS_ON(void, popCompileContext, (), ())
  PASS_ON(void, setUserMetadata, (const std::string& text), (text))
  PASS_ON(std::string, getUserMetadata, (), ())
  PASS_ON(void, attachOutOfMemoryObserver, (native::OutOfMemoryObserver o), (std::move(o)))
  PASS_ON(void, attachOomRejectionObserver, (native::OomRejectionObserver o), (std::move(o)))
  PASS_ON(void, attachAllocatorTraceTracker, (native::AllocatorTraceTracker t), (std::move(t)))
  PASS_ON(void, enablePeerAccess, (DeviceIndex from, DeviceIndex to), (from, to))
  PASS_ON(cudaError_t, memcpyAsync,
          (void* to, int to_device, const void* from, int from_device, size_t n, cudaStream_t s, bool peers),
          (to, to_device, from, from_device, n, s, peers))
  PASS_ON(std::shared_ptr<native::AllocatorState>, getCheckpointState, (DeviceIndex d, MempoolId_t pool), (d, pool))
  PASS_ON(native::CheckpointDelta, setCheckpointPoolState,
          (DeviceIndex d, std::shared_ptr<native::AllocatorState> s), (d, std::move(s)))
  PASS_ON(DataPtr, allocateWithAddress, (size_t n, void* at), (n, at))
  PASS_ON(std::string, name, (), ())

  native::CUDAAllocator* const native_;
};

DelegatingAllocator* installed = nullptr;

void put(native::CUDAAllocator* allocator) {
  native::allocator.store(allocator);
  c10::SetAllocator(c10::DeviceType::CUDA, allocator, 1);  // above the priority of torch's own
}

}  // namespace

// After torch's own is initialised.
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
