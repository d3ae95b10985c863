// Lets the allocator of a device, whichever it is, ask for room where it finds no memory, and try again. Driven by
// delegating.py.
//
// c10::Allocator's `allocate` is what torch and torch_npu make tensors and most workspaces by, and the same in all their
// releases; the interfaces of their own allocators (50 methods and more) change with each, torch_npu's even between the
// posts of one. So no allocator is put in front: in the native one's table of virtual methods, this one entry is changed.
#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <c10/util/Exception.h>

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace {

// Bytes wanted, and what the error says -> bytes freed; 0 when no more can be freed. It comes from Python and takes the
// GIL itself.
using MakeRoom = int64_t (*)(int64_t, const char*);
using Allocate = c10::DataPtr (*)(c10::Allocator*, size_t);  // as the C++ ABI calls the method

std::atomic<MakeRoom> make_room{nullptr};
std::atomic<int64_t> retries{0};
thread_local bool making_room = false;

constexpr int kMostDoublings = 6;  // free memory is in pieces: each time more is asked for
constexpr int kMostAttempts = 64;

class MakingRoom {
 public:
  MakingRoom() { making_room = true; }
  ~MakingRoom() { making_room = false; }
};

constexpr int kMostDevices = 4;
struct Changed {
  void** entry = nullptr;
  Allocate native = nullptr;
};
Changed changed[kMostDevices];

// A device's own, so that a method knows which native one it stands for.
template <int number>
c10::DataPtr allocate(c10::Allocator* self, size_t nbytes) {
  // The native one gives up every lock before it throws: whoever makes room waits for the GIL, and a thread that has the
  // GIL may wait for that lock in order to free a tensor.
  for (int attempt = 0;; ++attempt) {
    try {
      return changed[number].native(self, nbytes);
    } catch (const c10::OutOfMemoryError& error) {
      const MakeRoom ask = make_room.load();
      if (ask == nullptr || making_room || attempt == kMostAttempts) throw;
      const MakingRoom guard;
      const auto wanted = static_cast<int64_t>(std::max<size_t>(nbytes, 1)) << std::min(attempt, kMostDoublings);
      if (ask(wanted, error.what()) <= 0) throw;
      ++retries;
    }
  }
}

constexpr Allocate kAllocate[kMostDevices] = {allocate<0>, allocate<1>, allocate<2>, allocate<3>};

// Where `allocate` stands in the table of methods, from how the Itanium ABI stores a pointer to a virtual method.
size_t place() {
  const auto method = &c10::Allocator::allocate;
  struct {
    uintptr_t pointer, adjustment;
  } stored;
  static_assert(sizeof stored == sizeof method);
  std::memcpy(&stored, &method, sizeof stored);
#if defined(__aarch64__)
  return stored.pointer / sizeof(void*);
#else
  return (stored.pointer - 1) / sizeof(void*);
#endif
}

bool make_writable(void** entry) {
  const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  void* const begin = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(entry) / page * page);
  return mprotect(begin, page, PROT_READ | PROT_WRITE) == 0;  // an entry is aligned: it lies in one page
}

void store(void** entry, Allocate method) {  // others may be reading it
  __atomic_store_n(entry, reinterpret_cast<void*>(method), __ATOMIC_SEQ_CST);
}

}  // namespace

// What delegating.py calls. Everything else is hidden: several builds may be in one process.
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void delegating_make_room(MakeRoom function) { make_room = function; }
EXPORTED int64_t delegating_retries() { return retries; }

// After the native allocator of `device` is initialised. Returns a number for delegating_remove, -1 where it cannot be.
EXPORTED int delegating_install(const char* device) {
  c10::Allocator* const native = c10::GetAllocator(c10::Device(device).type());
  void** const entry = *reinterpret_cast<void***>(native) + place();
  for (int number = 0; number < kMostDevices; ++number) {
    Changed& one = changed[number];
    if (one.entry != nullptr && one.entry != entry) continue;
    if (*entry == reinterpret_cast<void*>(kAllocate[number])) return number;
    if (!make_writable(entry)) return -1;
    one = {entry, reinterpret_cast<Allocate>(*entry)};  // kept for ever: a thread may be inside
    store(entry, kAllocate[number]);
    return number;
  }
  return -1;
}

EXPORTED void delegating_remove(int number) {
  const Changed& one = changed[number];
  if (*one.entry == reinterpret_cast<void*>(kAllocate[number])) store(one.entry, one.native);
}
