// Device memory that the CPU cannot read, its caching allocator, and pinned host memory.
#pragma once

#include "streams.h"

#include <c10/core/Allocator.h>
#include <c10/core/CachingDeviceAllocator.h>

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <set>

namespace accelerator {

using c10::Device;
using c10::DeviceType;

// "cuda": torch's own device type, which a CPU build of torch leaves empty; otherwise the one for other people's devices.
inline bool is_cuda() {
  static const bool the = [] {
    const char* kind = std::getenv("ACCELERATOR_KIND");
    return kind && std::string(kind) == "cuda";
  }();
  return the;
}
inline DeviceType device_type() { return is_cuda() ? DeviceType::CUDA : DeviceType::PrivateUse1; }

// ---- who used what: found by clocks, at submission

struct Use {
  char *low, *high;
  int stream;
  uint64_t moment;
  bool writes;
  const char* what;  // an operator's name, which stays
};

// The uses of some memory that later ones must be ordered after.
class Uses {
 public:
  // Raises when an unordered one overlaps.
  void add(Use use, const Clock& clock) {
    forget_seen();
    for (const auto& earlier : uses_)
      if (earlier.low < use.high && use.low < earlier.high && (earlier.writes || use.writes)) check(earlier, clock, use);
    std::erase_if(uses_, [&](const Use& earlier) {
      const bool covered = use.low <= earlier.low && earlier.high <= use.high;
      return covered && (use.writes || (!earlier.writes && earlier.stream == use.stream));
    });
    uses_.push_back(std::move(use));
  }
  // Why memory of these uses cannot be handed out to a stream of this clock; empty: it can.
  std::string unordered(const Clock& clock) {
    forget_seen();
    for (const auto& use : uses_)
      if (clock[use.stream] < use.moment) return std::string(use.writes ? "written by " : "read by ") + use.what;
    return "";
  }
  // The allocator has seen that `clock` is past.
  void forget(const Clock& clock) {
    std::erase_if(uses_, [&](const Use& use) { return clock[use.stream] >= use.moment; });
  }
  void clear() { uses_.clear(); }
  Uses within(const char* low, const char* high) const {
    Uses part;
    for (const auto& use : uses_)
      if (use.low < high && low < use.high) part.uses_.push_back(use);
    return part;
  }
  void take(const Uses& other) { uses_.insert(uses_.end(), other.uses_.begin(), other.uses_.end()); }

 private:
  void forget_seen() { forget(host_clock()); }
  static void check(const Use& earlier, const Clock& clock, const Use& use) {
    if (earlier.stream == use.stream || clock[earlier.stream] >= earlier.moment) return;
    record().count("races");
    TORCH_CHECK(false, "accelerator: race: ", use.what, use.writes ? " writes" : " reads", " memory that ", earlier.what,
                " on stream ", earlier.stream, earlier.writes ? " writes" : " reads",
                "; nothing orders the one after the other (stream ", use.stream, " has to wait for an event)");
  }
  std::vector<Use> uses_;
};

// ---- pages

class Pages {  // of one device, mapped twice: as the device's, which nobody on the CPU may touch, and as ours
 public:
  explicit Pages(DeviceIndex device) : device(device) {
    const char* gib = std::getenv("ACCELERATOR_GIB");
    size = static_cast<size_t>((gib ? std::atof(gib) : 2.0) * (1ull << 30)) & ~4095ull;
    const int file = memfd_create("accelerator", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, static_cast<off_t>(size)) == 0, "accelerator: no memory file");
    ours_ = map(file, PROT_READ | PROT_WRITE);
    base = map(file, PROT_NONE);
    free_[0] = size;
  }
  const DeviceIndex device;
  char* base;
  size_t size;
  bool holds(const void* p) const { return p >= base && p < base + size; }
  char* ours(const void* p) const { return ours_ + (static_cast<const char*>(p) - base); }

  char* take(size_t bytes) {  // whole pages
    for (auto it = free_.begin(); it != free_.end(); ++it) {
      if (it->second < bytes) continue;
      const auto [offset, length] = *it;
      free_.erase(it);
      if (length > bytes) free_[offset + bytes] = length - bytes;
      return base + offset;
    }
    return nullptr;
  }
  void give(char* p, size_t bytes) {
    auto it = free_.emplace(p - base, bytes).first;
    if (auto next = std::next(it); next != free_.end() && it->first + it->second == next->first) {
      it->second += next->second;
      free_.erase(next);
    }
    if (it == free_.begin()) return;
    if (auto before = std::prev(it); before->first + before->second == it->first) {
      before->second += it->second;
      free_.erase(it);
    }
  }

 private:
  char* map(int file, int protection) const {
    void* p = mmap(nullptr, size, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(p != MAP_FAILED, "accelerator: cannot map ", size, " bytes");
    return static_cast<char*>(p);
  }
  char* ours_;
  std::map<size_t, size_t> free_;  // offset -> length
};
inline Pages& pages(DeviceIndex device) {
  static Pages* the[kDevices] = {new Pages(0), new Pages(1)};
  return *the[device];
}
inline DeviceIndex device_of(const void* p) {
  for (DeviceIndex device = 0; device < kDevices; ++device)
    if (pages(device).holds(p)) return device;
  return -1;
}
inline char* ours(const void* p) {
  const auto device = device_of(p);
  TORCH_CHECK(device >= 0, "accelerator: host memory was given where device memory is needed");
  return pages(device).ours(p);
}

// ---- the caching allocator

struct Block {  // a piece of a segment, which is what the driver gave
  char* low;
  size_t bytes;
  DeviceIndex device;
  int stream;  // the number of the stream whose pool it belongs to
  bool small, in_use = false;
  Block *before = nullptr, *after = nullptr;  // neighbours in the segment
  std::set<int> also_used_on{};
  Uses uses{};
};

// Each stream has pools of its own; freed memory is handed out again, to the same stream, at once; it is then poisoned.
class CachingAllocator final : public c10::DeviceAllocator {
 public:
  struct Figures {
    int64_t allocated = 0, peak = 0, reserved = 0, peak_reserved = 0, retries = 0, out_of_memory = 0, limit = 0, blocks = 0;
  };
  CachingAllocator() {
    for (DeviceIndex device = 0; device < kDevices; ++device) figures_[device].limit = static_cast<int64_t>(pages(device).size);
  }

  c10::DataPtr allocate(size_t bytes) override {
    const Device device(device_type(), current_device);
    if (!bytes) return {nullptr, nullptr, &free_block, device};
    char* p = take(bytes, current_device);
    return {p, p, &free_block, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_block; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    char *target = ours(to), *source = ours(from);
    Submitting lock(submitting());
    current(device_of(to))->submit([=] { std::memmove(target, source, bytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override { give_back(current_device, "empty_cache"); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Submitting lock(submitting());
    record().count("record_stream");
    if (Block* block = block_of(data.get())) block->also_used_on.insert(static_cast<int>(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto figures = this->figures(device);
    stats.allocated_bytes[0].current = figures.allocated;
    stats.allocated_bytes[0].peak = figures.peak;
    stats.reserved_bytes[0].current = figures.reserved;
    stats.reserved_bytes[0].peak = figures.peak_reserved;
    stats.num_alloc_retries = figures.retries;
    stats.num_ooms = figures.out_of_memory;
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex device) override {
    Submitting lock(submitting());
    figures_[device].retries = figures_[device].out_of_memory = 0;
  }
  void resetPeakStats(DeviceIndex device) override {
    Submitting lock(submitting());
    figures_[device].peak = figures_[device].allocated;
    figures_[device].peak_reserved = figures_[device].reserved;
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {pages(device).size - static_cast<size_t>(figures(device).reserved), pages(device).size};
  }

  Figures figures(DeviceIndex device) {
    Submitting lock(submitting());
    return figures_[device];
  }
  void set_limit(DeviceIndex device, int64_t bytes) {
    Submitting lock(submitting());
    figures_[device].limit = bytes;
  }
  // Raises if freed memory is not yet its stream's to hand out again.
  void check_freed() {
    Submitting lock(submitting());
    collect();
    for (const auto& [key, pool] : pools_)
      for (Block* block : pool) {
        const std::string who = block->uses.unordered(streams().at(block->device, block->stream)->clock);
        TORCH_CHECK(who.empty(), "accelerator: race: freed memory may be handed out again that is still ", who);
      }
  }
  // The block that this address lies in, if it is in use.
  Block* block_of(const void* p) {
    auto it = in_use_.upper_bound(static_cast<const char*>(p));
    if (it == in_use_.begin()) return nullptr;
    Block* block = std::prev(it)->second;
    return p < block->low + block->bytes ? block : nullptr;
  }

 private:
  // Smaller than torch's for CUDA, as the tests' models are; the same steps.
  static constexpr size_t kRound = 512, kSmall = 4 << 10, kSmallSegment = 32 << 10, kLargeRound = 8 << 10;
  using Key = std::tuple<DeviceIndex, int, bool>;
  struct BySize {
    bool operator()(const Block* a, const Block* b) const {
      return std::tie(a->bytes, a->low) < std::tie(b->bytes, b->low);
    }
  };
  struct Pending {
    Block* block;
    std::vector<std::shared_ptr<Point>> points;
  };

  char* take(size_t asked, DeviceIndex device) {
    const size_t bytes = (asked + kRound - 1) / kRound * kRound;
    const bool small = bytes <= kSmall;
    for (int attempt = 0;; ++attempt) {
      {
        Submitting lock(submitting());
        auto* stream = current(device);
        collect();
        Block* block = find(device, stream->number, small, bytes);
        if (!block) block = segment(device, stream->number, small, bytes);
        if (block) return hand_out(block, bytes, stream);
        auto& figures = figures_[device];
        if (attempt == 1) {
          ++figures.out_of_memory;
          TORCH_CHECK_WITH(OutOfMemoryError, false, is_cuda() ? "CUDA" : "NPU", " out of memory. Tried to allocate ", bytes,
                           " bytes. Device ", int(device), " has a limit of ", figures.limit, " bytes, of which ",
                           figures.allocated, " are allocated and ", figures.reserved - figures.allocated, " kept.");
        }
        ++figures.retries;
      }
      give_back(device, "the allocator gives back what it keeps");
    }
  }
  Block* find(DeviceIndex device, int stream, bool small, size_t bytes) {
    auto& pool = pools_[{device, stream, small}];
    Block wanted{nullptr, bytes, device, stream, small};
    auto it = pool.lower_bound(&wanted);
    if (it == pool.end()) return nullptr;
    Block* block = *it;
    pool.erase(it);
    return block;
  }
  Block* segment(DeviceIndex device, int stream, bool small, size_t bytes) {
    const size_t size = small ? kSmallSegment : (bytes + kLargeRound - 1) / kLargeRound * kLargeRound;
    auto& figures = figures_[device];
    if (figures.reserved + static_cast<int64_t>(size) > figures.limit) return nullptr;
    char* p = pages(device).take(size);
    if (!p) return nullptr;
    try {
      forbidden("driver allocation", std::to_string(size) + " bytes");
    } catch (...) {
      pages(device).give(p, size);
      throw;
    }
    figures.reserved += static_cast<int64_t>(size);
    figures.peak_reserved = std::max(figures.peak_reserved, figures.reserved);
    return new Block{p, size, device, stream, small};
  }
  char* hand_out(Block* block, size_t bytes, StreamThread* stream) {
    if (block->bytes >= bytes + (block->small ? kRound : kLargeRound)) {
      auto* rest = new Block{block->low + bytes, block->bytes - bytes, block->device, block->stream, block->small};
      rest->before = block;
      rest->after = block->after;
      if (rest->after) rest->after->before = rest;
      block->after = rest;
      rest->uses = block->uses.within(rest->low, rest->low + rest->bytes);
      block->bytes = bytes;
      block->uses = block->uses.within(block->low, block->low + bytes);
      pools_[{block->device, block->stream, block->small}].insert(rest);
    }
    join(stream->clock, host_clock());
    const std::string who = block->uses.unordered(stream->clock);
    block->uses.clear();
    block->in_use = true;
    in_use_[block->low] = block;
    auto& figures = figures_[block->device];
    figures.allocated += static_cast<int64_t>(block->bytes);
    figures.peak = std::max(figures.peak, figures.allocated);
    ++figures.blocks;
    char* target = pages(block->device).ours(block->low);
    const size_t size = block->bytes;
    stream->submit([target, size] { std::memset(target, 0xFF, size); });
    if (!who.empty()) {
      record().count("races");
      release(block);
      TORCH_CHECK(false, "accelerator: race: freed memory is handed out again that is still ", who,
                  "; it was freed without record_stream, or before its own stream waited");
    }
    return block->low;
  }
  static void free_block(void* p);
  void release(Block* block) {  // under `submitting`
    in_use_.erase(block->low);
    block->in_use = false;
    auto& figures = figures_[block->device];
    figures.allocated -= static_cast<int64_t>(block->bytes);
    --figures.blocks;
    block->also_used_on.erase(block->stream);
    if (block->also_used_on.empty()) return into_pool(block);
    Pending pending{block, {}};
    for (int number : block->also_used_on) pending.points.push_back(streams().at(block->device, number)->point());
    block->also_used_on.clear();
    pending_.push_back(std::move(pending));
  }
  void collect() {  // what other streams were said to use, and have done with
    for (size_t i = 0; i < pending_.size();) {
      bool done = true;
      for (auto& point : pending_[i].points) done = done && point->reached();
      if (!done) {
        ++i;
        continue;
      }
      for (auto& point : pending_[i].points) pending_[i].block->uses.forget(point->clock);
      into_pool(pending_[i].block);
      pending_.erase(pending_.begin() + static_cast<long>(i));
    }
  }
  void into_pool(Block* block) {
    auto& pool = pools_[{block->device, block->stream, block->small}];
    const auto merge = [&](Block* left, Block* right) {
      left->bytes += right->bytes;
      left->after = right->after;
      if (left->after) left->after->before = left;
      left->uses.take(right->uses);
      delete right;
      return left;
    };
    if (block->before && pool.erase(block->before)) block = merge(block->before, block);
    if (block->after && pool.erase(block->after)) block = merge(block, block->after);
    pool.insert(block);
  }
  void give_back(DeviceIndex device, const char* why) {  // not under `submitting`
    drain_device(device, why);
    Submitting lock(submitting());
    collect();
    for (auto& [key, pool] : pools_) {
      if (std::get<0>(key) != device) continue;
      for (auto it = pool.begin(); it != pool.end();) {
        Block* block = *it;
        if (block->before || block->after) {
          ++it;
          continue;
        }
        it = pool.erase(it);
        figures_[device].reserved -= static_cast<int64_t>(block->bytes);
        pages(device).give(block->low, block->bytes);
        delete block;
      }
    }
  }

  std::map<Key, std::set<Block*, BySize>> pools_;
  std::map<const char*, Block*> in_use_;
  std::vector<Pending> pending_;
  Figures figures_[kDevices];
};
inline CachingAllocator* allocator() {
  static auto* the = new CachingAllocator();
  return the;
}
inline void CachingAllocator::free_block(void* p) {
  if (!p) return;
  Submitting lock(submitting());
  Block* block = allocator()->block_of(p);
  if (!block || block->low != p) return record().fault("memory was freed that is not allocated");
  allocator()->release(block);
}

// ---- pinned host memory

struct Pinned {
  char* low;
  size_t bytes;
  std::atomic<int> copies{0};  // submitted, not done
  Uses uses;                   // under `submitting`
};
class PinnedMemory {
 public:
  std::shared_ptr<Pinned> at(const void* p) {
    Submitting lock(submitting());
    auto it = ranges_.upper_bound(static_cast<const char*>(p));
    if (it == ranges_.begin()) return nullptr;
    auto& range = std::prev(it)->second;
    return p < range->low + range->bytes ? range : nullptr;
  }
  void pin(void* p, size_t bytes) {
    auto range = std::make_shared<Pinned>();
    range->low = static_cast<char*>(p);
    range->bytes = bytes;
    Submitting lock(submitting());
    ranges_[range->low] = range;
    held += static_cast<int64_t>(bytes);
  }
  void unpin(void* p) {
    Submitting lock(submitting());
    auto it = ranges_.find(static_cast<char*>(p));
    if (it == ranges_.end()) return record().fault("host memory was unregistered that is not registered");
    if (it->second->copies) record().fault("pinned host memory was freed while a copy still uses it");
    held -= static_cast<int64_t>(it->second->bytes);
    ranges_.erase(it);
  }
  std::atomic<int64_t> held{0}, limit{std::numeric_limits<int64_t>::max()};

 private:
  std::map<const char*, std::shared_ptr<Pinned>> ranges_;
};
inline PinnedMemory& pinned_memory() {
  static auto* the = new PinnedMemory();
  return *the;
}
// torch's own: sizes rounded up to powers of two; what is freed waits for its copies.
struct PinnedAllocator final : c10::Allocator {
  static size_t rounded(size_t bytes) {
    size_t power = 512;
    while (power < bytes) power <<= 1;
    return power;
  }
  static void free_buffer(void* p) {
    auto range = pinned_memory().at(p);
    if (!range) return;
    while (range->copies) std::this_thread::yield();
    pinned_memory().unpin(p);
    std::free(p);
  }
  c10::DataPtr allocate(size_t bytes) override {
    const size_t size = rounded(bytes);
    forbidden("pinned allocation", std::to_string(size) + " bytes");
    TORCH_CHECK(pinned_memory().held + static_cast<int64_t>(size) <= pinned_memory().limit,
                "accelerator: host memory cannot be pinned: the limit of ", pinned_memory().limit.load(), " bytes is reached");
    void* p = nullptr;
    TORCH_CHECK(posix_memalign(&p, 4096, size) == 0, "accelerator: no host memory");
    pinned_memory().pin(p, size);
    return {p, p, &free_buffer, Device(DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_buffer; }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
inline PinnedAllocator* pinned_allocator() {
  static auto* the = new PinnedAllocator();
  return the;
}

}  // namespace accelerator
