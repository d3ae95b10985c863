// Streams: a host thread each, that may lag; vector clocks that know what is ordered after what.
//
// Clocks are kept where work is submitted, so that what is found does not depend on the threads' timing. What the host
// has seen done comes before everything that it submits later.
#pragma once

#include "promises.h"

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/DispatchKeySet.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <thread>

namespace accelerator {

using c10::DeviceIndex;
using c10::StreamId;

constexpr int kDevices = 2;
constexpr int kSideStreams = 32;   // of a device; then they are handed out again
constexpr int kGroupStreams = 32;  // those of process groups, which nobody else gets
constexpr int kOfDevice = 1 + kSideStreams + kGroupStreams;
constexpr int kStreams = kDevices * kOfDevice;

// Held wherever work is submitted or memory changes hands; never while waiting for a stream.
inline std::recursive_mutex& submitting() {
  static auto* the = new std::recursive_mutex();
  return *the;
}
using Submitting = std::lock_guard<std::recursive_mutex>;

using Clock = std::vector<uint64_t>;  // by stream: how much of its work is ordered before
inline void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) into[i] = std::max(into[i], other[i]);
}
inline Clock& host_clock() {
  static auto* the = new Clock(kStreams, 0);
  return *the;
}

inline double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Microseconds before each piece of work: of default streams, of side streams, and up to how many more by chance.
struct Lags {
  std::atomic<int> compute{0}, side{0}, random{0};
  std::atomic<unsigned> seed{0};
};
inline Lags& lags() {
  static auto* the = new Lags();
  return *the;
}

// A point that is reached once, on a stream's thread or by the host.
class Point {
 public:
  explicit Point(Clock clock = Clock(kStreams, 0)) : clock(std::move(clock)) {}
  void reach() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      reached_ = true;
      seconds_ = seconds_now();
    }
    changed_.notify_all();
  }
  bool reached() {
    std::lock_guard<std::mutex> lock(mutex_);
    return reached_;
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return reached_; });
  }
  double seconds() {
    std::lock_guard<std::mutex> lock(mutex_);
    return seconds_;
  }
  const Clock clock;

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool reached_ = false;
  double seconds_ = 0;
};

class StreamThread {
 public:
  StreamThread(DeviceIndex device, int number, int index)
      : device(device), number(number), index(index), clock(kStreams, 0), chance_(index) {
    std::thread([this] { run(); }).detach();
  }
  const DeviceIndex device;
  const int number;  // 0: the device's default stream
  const int index;   // into clocks
  Clock clock;       // under `submitting`

  // One more piece of work; under `submitting`.
  uint64_t submit(std::function<void()> work) {
    join(clock, host_clock());
    {
      std::lock_guard<std::mutex> lock(mutex_);
      queue_.push_back(std::move(work));
      ++submitted_;
    }
    ready_.notify_one();
    return ++clock[index];
  }
  std::shared_ptr<Point> point() {
    join(clock, host_clock());
    auto point = std::make_shared<Point>(clock);
    submit([point] { point->reach(); });
    return point;
  }
  void wait_for(const std::shared_ptr<Point>& point) {
    join(clock, point->clock);
    submit([point] { point->wait(); });
  }
  bool idle() {
    std::lock_guard<std::mutex> lock(mutex_);
    return done_ == submitted_;
  }
  // The host waits for all that is submitted; not under `submitting`.
  void drain() {
    Clock seen;
    uint64_t until;
    {
      Submitting lock(submitting());
      seen = clock;
      std::lock_guard<std::mutex> inner(mutex_);
      until = submitted_;
    }
    {
      std::unique_lock<std::mutex> lock(mutex_);
      finished_.wait(lock, [&] { return done_ >= until; });
    }
    Submitting lock(submitting());
    join(host_clock(), seen);
  }

 private:
  void run() {
    c10::impl::ExcludeDispatchKeyGuard guard(
        c10::autograd_dispatch_keyset | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView));
    for (;;) {
      std::function<void()> work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        ready_.wait(lock, [&] { return !queue_.empty(); });
        work = std::move(queue_.front());
        queue_.pop_front();
      }
      lag();
      try {
        work();
      } catch (const c10::Error& error) {
        record().fault(std::string("on a stream: ") + error.what_without_backtrace());
      } catch (const std::exception& error) {
        record().fault(std::string("on a stream: ") + error.what());
      }
      work = nullptr;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        ++done_;
      }
      finished_.notify_all();
    }
  }
  void lag() {
    int wait = number ? lags().side : lags().compute;
    if (int most = lags().random) {
      if (seed_ != lags().seed) chance_.seed((seed_ = lags().seed) * kStreams + index);
      wait += static_cast<int>(chance_() % static_cast<unsigned>(most));
    }
    if (wait) std::this_thread::sleep_for(std::chrono::microseconds(wait));
  }

  std::mutex mutex_;
  std::condition_variable ready_, finished_;
  std::deque<std::function<void()>> queue_;
  uint64_t submitted_ = 0, done_ = 0;
  std::minstd_rand chance_;
  unsigned seed_ = 0;
};

// The streams of all devices, and what this thread has chosen as current.
class Streams {
 public:
  StreamThread* at(DeviceIndex device, StreamId number) {
    Submitting lock(submitting());
    auto*& found = made_[device][number];
    if (!found) found = new StreamThread(device, static_cast<int>(number), device * kOfDevice + static_cast<int>(number));
    return found;
  }
  StreamId fresh(DeviceIndex device) {
    Submitting lock(submitting());
    return 1 + handed_out_[device]++ % kSideStreams;
  }
  // One that is used by its group alone, until it is given back.
  StreamThread* lend(DeviceIndex device) {
    Submitting lock(submitting());
    for (int number = 1 + kSideStreams; number < kOfDevice; ++number)
      if (lent_[device].insert(number).second) return at(device, number);
    TORCH_CHECK(false, "accelerator: ", kGroupStreams, " process groups use a device already");
  }
  void give_back(StreamThread* stream) {
    Submitting lock(submitting());
    lent_[stream->device].erase(stream->number);
  }
  std::vector<StreamThread*> of(DeviceIndex device) {
    Submitting lock(submitting());
    std::vector<StreamThread*> all{at(device, 0)};
    for (int number = 1; number < kOfDevice; ++number)
      if (made_[device][number]) all.push_back(made_[device][number]);
    return all;
  }

 private:
  StreamThread* made_[kDevices][kOfDevice] = {};
  int handed_out_[kDevices] = {};
  std::set<int> lent_[kDevices];
};
inline Streams& streams() {
  static auto* the = new Streams();
  return *the;
}

inline thread_local DeviceIndex current_device = 0;
inline thread_local StreamId current_number[kDevices] = {};
inline StreamThread* current(DeviceIndex device) { return streams().at(device, current_number[device]); }

inline void raise_faults_of_streams() {
  if (auto faults = record().take_faults(); !faults.empty()) {
    std::string text = faults[0];
    for (size_t i = 1; i < faults.size(); ++i) text += "; " + faults[i];
    TORCH_CHECK(false, "accelerator: ", text);
  }
}
inline void drain(StreamThread* stream, const std::string& why) {
  host_waits(why);
  stream->drain();
  raise_faults_of_streams();
}
inline void drain_device(DeviceIndex device, const std::string& why, Raise where = Raise::kHere) {
  host_waits(why, where);
  for (auto* stream : streams().of(device)) stream->drain();
  if (where == Raise::kHere) raise_faults_of_streams();
}

}  // namespace accelerator
