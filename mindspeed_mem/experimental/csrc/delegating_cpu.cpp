// A CPU allocator in front of the one in force: where that finds no memory, it asks for room and tries again. On a CPU
// with a memory limit (limited_cpu.cpp) it is what the allocators of CUDA and NPU are there. Driven by delegating.py.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include "delegating.h"

namespace {

class DelegatingAllocator final : public c10::Allocator {
 public:
  explicit DelegatingAllocator(c10::Allocator* allocator) : native_(allocator) {}

  c10::DataPtr allocate(size_t n) override {
    return mindspeed_mem::with_room(n, [&] { return native_->allocate(n); }, [] { return true; });
  }
  PASS_ON_CONST(bool, is_simple_data_ptr, (const c10::DataPtr& p), (p))
  PASS_ON_CONST(c10::DeleterFnPtr, raw_deleter, (), ())
  PASS_ON_CONST(void, copy_data, (void* to, const void* from, size_t n), (to, from, n))

  c10::Allocator* const native_;
};

DelegatingAllocator* installed = nullptr;
constexpr uint8_t kPriority = 100;  // that of limited_cpu.cpp: the last of equals wins

}  // namespace

EXPORTED void delegating_install() {
  if (installed != nullptr) return;
  installed = new DelegatingAllocator(c10::GetCPUAllocator());  // never destroyed: a thread may be inside
  c10::SetCPUAllocator(installed, kPriority);
}

EXPORTED void delegating_remove() {
  if (installed == nullptr) return;
  if (c10::GetCPUAllocator() == installed) c10::SetCPUAllocator(installed->native_, kPriority);
  installed = nullptr;
}
