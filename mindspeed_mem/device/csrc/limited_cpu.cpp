// A CPU allocator that counts, and that raises OutOfMemoryError beyond a limit. Driven by limited_cpu.py.
// c10 headers only, so that a plain compiler builds it in seconds.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <cstring>

namespace {

std::atomic<int64_t> allocated{0}, peak{0}, refused{0}, limit{-1};
// What gloo's threads copy for a collective is the library's own, as NCCL's and HCCL's buffers are on a device. They
// run beside the model: a refusal there could neither be foreseen nor repeated.
bool of_gloo() {
  char name[16] = "";
  return pthread_getname_np(pthread_self(), name, sizeof name) == 0 && std::strncmp(name, "pt_gloo", 7) == 0;
}

thread_local int on_host = of_gloo() ? 1 : 0;
c10::Allocator* before = nullptr;

// In front of each block stand the bytes counted for it. A context of its own would be the obvious place, but oneDNN
// insists that a block's context is its address. 64 bytes keep the alignment that torch asks for.
constexpr size_t kHeader = 64;

void release(void* data) {
  if (data == nullptr) return;
  char* block = static_cast<char*>(data) - kHeader;
  allocated -= *reinterpret_cast<int64_t*>(block);
  c10::free_cpu(block);
}

void count(int64_t n) {
  int64_t now = allocated;
  do {
    const int64_t most = limit;
    if (most >= 0 && now + n > most) {
      ++refused;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "limited CPU memory: out of memory. Tried to allocate ", n,
                       " bytes; ", now, " of ", most, " bytes are in use");
    }
  } while (!allocated.compare_exchange_weak(now, now + n));
  int64_t highest = peak;
  while (now + n > highest && !peak.compare_exchange_weak(highest, now + n)) {
  }
}

struct LimitedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (n == 0) return {nullptr, nullptr, &release, cpu};
    const int64_t counted = on_host == 0 ? static_cast<int64_t>(n) : 0;
    if (counted != 0) count(counted);
    char* block = nullptr;
    try {
      block = static_cast<char*>(c10::alloc_cpu(n + kHeader));
    } catch (...) {
      allocated -= counted;
      throw;
    }
    *reinterpret_cast<int64_t*>(block) = counted;
    return {block + kHeader, block + kHeader, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { default_copy_data(to, from, n); }
};

// Never destroyed: at the end of the process other threads may still allocate.
LimitedAllocator& limited = *new LimitedAllocator;
constexpr uint8_t kPriority = 100;  // above whatever torch set; the last of equals wins

}  // namespace

extern "C" {

void limited_cpu_install() {
  if (before != nullptr) return;
  before = c10::GetCPUAllocator();
  c10::SetCPUAllocator(&limited, kPriority);
}

// Blocks handed out so far keep their deleter: they go on counting until they are freed.
void limited_cpu_uninstall() {
  if (before == nullptr) return;
  c10::SetCPUAllocator(before, kPriority);
  before = nullptr;
}

void limited_cpu_set_limit(int64_t n) { limit = n; }
void limited_cpu_on_host(int change) { on_host += change; }  // of the calling thread
void limited_cpu_reset_peak() { peak = allocated.load(); }
int64_t limited_cpu_allocated() { return allocated; }
int64_t limited_cpu_peak() { return peak; }
int64_t limited_cpu_refused() { return refused; }
}
