// What torch asks a device for: random generators, streams and events, hooks.
#pragma once

#include "memory.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace accelerator {

using at::Tensor;

inline c10::DispatchKeySet keys() {
  return c10::DispatchKeySet(is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1);
}

// ---- random numbers: a seed and how far it has been used, 16 bytes, as CUDA's

class Generator final : public c10::GeneratorImpl {
  struct State {
    uint64_t seed = c10::default_rng_seed_val, offset = 0;
  };

 public:
  explicit Generator(DeviceIndex device, std::shared_ptr<State> state = std::make_shared<State>())
      : GeneratorImpl(Device(device_type(), device), keys()), state_(std::move(state)) {}
  void set_current_seed(uint64_t seed) override {
    *state_ = {seed, 0};
    seeded_ = true;
  }
  uint64_t current_seed() const override { return state_->seed; }
  void set_offset(uint64_t offset) override {
    state_->offset = offset;
    seeded_ = true;
  }
  uint64_t get_offset() const override { return state_->offset; }
  uint64_t seed() override {
    set_current_seed(c10::detail::getNonDeterministicRandom(true));
    return state_->seed;
  }
  void set_state(const c10::TensorImpl& state) override {
    TORCH_CHECK(state.numel() == 16 && state.device().is_cpu(), "accelerator: a generator's state is uint8[16] on the host");
    const auto* words = static_cast<const uint64_t*>(state.data());
    *state_ = {words[0], words[1]};
    seeded_ = true;
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    auto state = at::detail::empty_cpu({16}, at::kByte, std::nullopt, at::kCPU, std::nullopt, std::nullopt);
    auto* words = static_cast<uint64_t*>(state.mutable_data_ptr());
    words[0] = state_->seed;
    words[1] = state_->offset;
    return state.getIntrusivePtr();
  }
  // Another one of the same state, as CUDA's: what is set there is set here, but for `reset_rnn_state`.
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override {
    return c10::make_intrusive<Generator>(device_.index(), state_);
  }
  // Whether it was set since it was asked last: torch's cuDNN cells draw a new seed for their dropout then.
  bool reset_rnn_state() { return std::exchange(seeded_, false); }
  // For one operator: a generator of its own, so that it does not matter when the operator runs.
  at::Generator draw() {
    std::lock_guard<std::mutex> lock(mutex_);
    return at::make_generator<at::CPUGeneratorImpl>(
        (state_->seed * 0x9E3779B97F4A7C15ull) ^ (++state_->offset * 0xBF58476D1CE4E5B9ull));
  }

 private:
  Generator* clone_impl() const override { return new Generator(device_.index(), std::make_shared<State>(*state_)); }
  std::shared_ptr<State> state_;
  bool seeded_ = true;
};
inline const at::Generator& default_generator(DeviceIndex device) {
  static const at::Generator the[kDevices] = {at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return the[device < 0 ? current_device : device];
}

// ---- streams, events, devices

class Guard final : public c10::impl::DeviceGuardImplInterface {
  using Stream = c10::Stream;
  struct Event {
    std::shared_ptr<Point> point;
  };
  static Stream stream(DeviceIndex device, StreamId number) {
    return Stream(Stream::UNSAFE, Device(device_type(), device), number);
  }
  static StreamThread* thread(const Stream& s) { return streams().at(s.device_index(), s.id()); }
  static DeviceIndex index(Device device) { return device.has_index() ? device.index() : current_device; }
  static std::shared_ptr<Point> point(void* event) { return event ? static_cast<Event*>(event)->point : nullptr; }

 public:
  DeviceType type() const override { return device_type(); }
  Device exchangeDevice(Device device) const override {
    const Device before = getDevice();
    setDevice(device);
    return before;
  }
  Device getDevice() const override { return {device_type(), current_device}; }
  void setDevice(Device device) const override {
    TORCH_CHECK(index(device) >= 0 && index(device) < kDevices, "accelerator: no device ", device);
    current_device = index(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { current_device = index(device); }
  Stream getStream(Device device) const override { return stream(index(device), current_number[index(device)]); }
  Stream getDefaultStream(Device device) const override { return stream(index(device), 0); }
  Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  Stream getNewStream(Device device, int) const override { return stream(index(device), streams().fresh(index(device))); }
  Stream exchangeStream(Stream s) const override {
    const Stream before = getStream(s.device());
    current_number[s.device_index()] = s.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    Submitting lock(submitting());
    static_cast<Event*>(*event)->point = thread(s)->point();
  }
  void block(void* event, const Stream& s) const override {
    if (!point(event)) return;
    Submitting lock(submitting());
    thread(s)->wait_for(point(event));
  }
  bool queryEvent(void* event) const override {
    const auto at = point(event);
    if (at && !at->reached()) return false;
    Submitting lock(submitting());
    if (at) join(host_clock(), at->clock);
    return true;
  }
  bool queryStream(const Stream& s) const override {
    Submitting lock(submitting());
    if (!thread(s)->idle()) return false;
    join(host_clock(), thread(s)->clock);
    return true;
  }
  void synchronizeStream(const Stream& s) const override { drain(thread(s), "stream.synchronize"); }
  void synchronizeEvent(void* event) const override {
    const auto at = point(event);
    if (!at) return;
    host_waits("event.synchronize");
    at->wait();
    queryEvent(event);
    raise_faults_of_streams();
  }
  void synchronizeDevice(const DeviceIndex device) const override { drain_device(device, "device.synchronize"); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& s) const override { allocator()->recordStream(data, s); }
  double elapsedTime(void* begin, void* end, const DeviceIndex) const override {
    TORCH_CHECK(queryEvent(begin) && queryEvent(end), "accelerator: elapsed_time of events that have not happened");
    return (point(end)->seconds() - point(begin)->seconds()) * 1e3;
  }
};

// ---- hooks: the same answers for both device types

inline void resize_storage(c10::StorageImpl* storage, size_t bytes) {
  if (!bytes) {
    storage->set_data_ptr_noswap({nullptr, storage->device()});
    storage->set_nbytes(size_t{0});
    return;
  }
  auto fresh = allocator()->allocate(bytes);
  const size_t kept = std::min(bytes, storage->nbytes());
  if (storage->data() && kept) allocator()->copy_data(fresh.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(fresh));
  storage->set_nbytes(bytes);
}

template <class Interface>
class Hooks : public Interface {
 public:
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  void init() const override {}
  const at::Generator& getDefaultGenerator(DeviceIndex device) const override { return default_generator(device); }
  at::Generator getNewGenerator(DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device : device);
  }
  Device getDeviceFromPtr(void* p) const override { return {device_type(), device_of(p)}; }
  bool isPinnedPtr(const void* p) const override { return pinned_memory().at(p) != nullptr; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return pinned_allocator(); }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(DeviceIndex device) const override { current_device = device; }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return std::exchange(current_device, device); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? current_device : std::exchange(current_device, device);
  }
};
class PrivateUse1Hooks final : public Hooks<at::PrivateUse1HooksInterface> {
 public:
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage.unsafeGetStorageImpl(), bytes);
  }
};
class CudaHooks final : public Hooks<at::CUDAHooksInterface> {
 public:
  explicit CudaHooks(at::CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  DeviceIndex current_device() const override { return accelerator::current_device; }
  c10::Allocator* getCUDADeviceAllocator() const override { return allocator(); }
  int getNumGPUs() const override { return kDevices; }
  void deviceSynchronize(DeviceIndex device) const override { drain_device(device, "device.synchronize"); }
};

}  // namespace accelerator
