// What the delegating allocators of CUDA and NPU share: a request that finds no memory asks for room and is made again.
#pragma once

#include <c10/util/Exception.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>

namespace mindspeed_mem {

// Bytes wanted -> bytes freed; 0 when no more can be freed. It comes from Python and takes the GIL itself.
using MakeRoom = int64_t (*)(int64_t);

// Not inline: the linker would make them one for all libraries of a process.
static std::atomic<MakeRoom> make_room{nullptr};
static std::atomic<int64_t> retries{0};
static thread_local bool making_room = false;

constexpr int kMostDoublings = 6;  // free memory is in pieces: each time more is asked for
constexpr int kMostAttempts = 64;

class MakingRoom {
 public:
  MakingRoom() { making_room = true; }
  ~MakingRoom() { making_room = false; }
};

// `request` has to give up every lock before it throws: whoever makes room waits for the GIL, and a thread that has the
// GIL may wait for that lock in order to free a tensor. The native allocators do so. `may_evict` is asked first: while a
// graph is captured, nothing can be copied away.
template <class Request, class MayEvict>
auto with_room(size_t nbytes, Request request, MayEvict may_evict) {
  for (int attempt = 0;; ++attempt) {
    try {
      return request();
    } catch (const c10::OutOfMemoryError&) {
      const MakeRoom ask = make_room.load();
      if (ask == nullptr || making_room || attempt == kMostAttempts || !may_evict()) throw;
      const MakingRoom guard;
      const auto wanted = static_cast<int64_t>(std::max<size_t>(nbytes, 1)) << std::min(attempt, kMostDoublings);
      if (ask(wanted) <= 0) throw;
      ++retries;
    }
  }
}

}  // namespace mindspeed_mem

// One method of an allocator that only passes on to `native_`.
#define PASS_ON(result, name, parameters, arguments) \
  result name parameters override { return native_->name arguments; }
#define PASS_ON_CONST(result, name, parameters, arguments) \
  result name parameters const override { return native_->name arguments; }

// What delegating.py calls. Everything else is hidden, so that the linker can leave out what nothing uses.
#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void delegating_make_room(mindspeed_mem::MakeRoom function) { mindspeed_mem::make_room = function; }
EXPORTED int64_t delegating_retries() { return mindspeed_mem::retries; }
