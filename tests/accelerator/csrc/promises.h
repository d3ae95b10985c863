// What the device counts, what it forbids, and how it says so.
#pragma once

#include <c10/util/Exception.h>

#include <atomic>
#include <map>
#include <mutex>
#include <string>
#include <vector>

namespace accelerator {

// Counters by name, and faults that could not be raised where they happened (on a stream's thread, or in a destructor).
class Record {
 public:
  void count(const std::string& what, int64_t n = 1) {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_[what] += n;
  }
  void fault(const std::string& what) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (faults_.size() < 100) faults_.push_back(what);
  }
  std::map<std::string, int64_t> counters() {
    std::lock_guard<std::mutex> lock(mutex_);
    return counters_;
  }
  void reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    counters_.clear();
  }
  std::vector<std::string> take_faults() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::exchange(faults_, {});
  }
  // While code has promised not to do such things, doing one raises.
  std::atomic<bool> promised{false};

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> counters_;
  std::vector<std::string> faults_;
};

inline Record& record() {
  static auto* the = new Record();
  return *the;
}

enum class Raise { kHere, kLater };

inline void forbidden(const char* kind, const std::string& what, Raise where = Raise::kHere) {
  record().count(kind);
  record().count(std::string(kind) + ": " + what);
  if (!record().promised) return;
  const std::string text = std::string(kind) + " where none was promised: " + what;
  if (where == Raise::kLater) return record().fault(text);
  TORCH_CHECK(false, text);
}
inline void host_waits(const std::string& what, Raise where = Raise::kHere) { forbidden("host synchronisation", what, where); }

}  // namespace accelerator
