// Process groups: each operation is one piece of work of a stream, in which gloo works on the device's memory.
//
// Streams are chosen, and tensors kept, as NCCL does where this is CUDA: what is not asynchronous runs on the caller's
// stream, the rest on a stream of the group's own, and tensors stay until somebody has waited. As HCCL does on the NPU:
// everything runs on the group's stream, and tensors are noted for it by record_stream. Sends and receives outside a
// batch have a stream for each other rank. The host never waits, except for a barrier.
#pragma once

#include "tensors.h"

#include <ATen/core/ivalue.h>
#include <c10/core/StreamGuard.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace accelerator {

using Tensors = std::vector<Tensor>;
using WorkOfGloo = c10::intrusive_ptr<c10d::Work>;

inline Tensor as_host(const Tensor& t) { return on_host(flat(t)); }
inline Tensors as_host(const Tensors& tensors) {
  Tensors out;
  for (const auto& t : tensors) out.push_back(as_host(t));
  return out;
}

// How something of a group went.
struct Outcome {
  void fail(std::exception_ptr error) {
    std::lock_guard<std::mutex> lock(mutex);
    if (!error_) error_ = std::move(error);
  }
  std::exception_ptr error() {
    std::lock_guard<std::mutex> lock(mutex);
    return error_;
  }
  void raise() {
    if (auto failed = error()) std::rethrow_exception(failed);
  }

 private:
  std::mutex mutex;
  std::exception_ptr error_;
};

struct Operation {
  const char* what;
  Tensors reads, writes;
  bool async;
  std::function<WorkOfGloo()> start;  // on the stream's thread
  std::function<void()> end = {};     // there, when gloo has done its part
  int peer = -1;                      // the other rank of a send or receive
};

class DeviceWork final : public c10d::Work {
 public:
  DeviceWork(StreamThread* stream, std::shared_ptr<Point> done, std::shared_ptr<Outcome> outcome, Tensors kept, Tensors results,
             bool host_waits)
      : stream_(stream), done_(std::move(done)), outcome_(std::move(outcome)), kept_(std::move(kept)), results_(std::move(results)),
        host_waits_(host_waits) {}
  ~DeviceWork() override {  // nobody has waited
    for (const auto& t : kept_)
      allocator()->recordStream(t.storage().data_ptr(), as_torch(stream_->number));
  }
  bool isCompleted() override {
    if (!done_->reached()) return false;
    Submitting lock(submitting());
    join(host_clock(), done_->clock);
    return true;
  }
  bool isSuccess() const override { return !outcome_->error(); }
  std::exception_ptr exception() const override { return outcome_->error(); }
  std::vector<Tensor> result() override { return results_; }
  void synchronize() override {
    outcome_->raise();
    auto* waiting = current(stream_->device);
    {
      Submitting lock(submitting());
      if (waiting != stream_) waiting->wait_for(done_);
    }
    kept_.clear();
    if (host_waits_) {
      drain(waiting, "barrier");
      outcome_->raise();
    }
  }
  bool wait(std::chrono::milliseconds) override {
    synchronize();
    return true;
  }
  // It is complete at once; who waits for it makes his stream wait for ours.
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    const Device device(device_type(), stream_->device);
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<Device>{device});
    const auto number = streams().fresh(stream_->device);  // where nothing else comes before the future's event
    {
      Submitting lock(submitting());
      streams().at(stream_->device, number)->wait_for(done_);
    }
    c10::StreamGuard guard(as_torch(number));
    future->markCompleted(IValue(results_));
    return future;
  }

 private:
  using IValue = c10::IValue;
  c10::Stream as_torch(c10::StreamId number) const {
    return c10::Stream(c10::Stream::UNSAFE, Device(device_type(), stream_->device), number);
  }
  StreamThread* stream_;
  std::shared_ptr<Point> done_;
  std::shared_ptr<Outcome> outcome_;
  Tensors kept_, results_;
  bool host_waits_;
};

class Group final : public c10d::Backend {
 public:
  using Work = c10d::Work;
  using Handle = c10::intrusive_ptr<Work>;

  Group(c10::intrusive_ptr<c10d::Backend> gloo, std::string name, std::chrono::milliseconds timeout)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)), name_(std::move(name)),
        options_(c10::make_intrusive<Options>(name_, timeout)) {}
  ~Group() override {
    for (const auto& [key, stream] : own_) streams().give_back(stream);
  }
  const std::string getBackendName() const override { return name_; }
  // These came to torch later than others.
  c10::intrusive_ptr<Options> getBackendOptions() { return options_; }
  bool supportsCoalescing() const { return true; }
  void setTimeout(std::chrono::milliseconds timeout) { options_->timeout = timeout; }
  std::unordered_map<std::string, uint64_t> getMemoryStats() {
    return {{"timeout", static_cast<uint64_t>(options_->timeout.count())}};
  }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return submitted_; }

  void startCoalescing() override { batch_.emplace(); }
  Handle endCoalescing() override {
    auto batch = std::move(*std::exchange(batch_, std::nullopt));
    return batch.empty() ? Handle() : submit(std::move(batch));
  }

  Handle broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    const bool root = options.rootRank == getRank();
    return submit({{"broadcast", root ? tensors : Tensors(), root ? Tensors() : tensors, is_async(options),
                    [gloo = gloo_, host = as_host(tensors), options]() mutable { return gloo->broadcast(host, options); }}});
  }
  Handle allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return submit({all_reduced(tensors, options)});
  }
  Handle allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    std::vector<Operation> all;
    for (const auto& t : tensors) all.push_back(all_reduced({t}, options));
    return submit(std::move(all));
  }
  Handle reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    const bool root = options.rootRank == getRank();
    auto host = as_host(tensors);
    auto used = options;
    auto end = averaged(used, root ? host : Tensors());
    return submit({{"reduce", tensors, root ? tensors : Tensors(), is_async(options),
                    [gloo = gloo_, host, used, root]() mutable {
                      if (!root)  // gloo uses it for parts of the sum
                        for (auto& t : host) t = t.clone();
                      return gloo->reduce(host, used);
                    },
                    end}});
  }
  Handle allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    return submit({{"all_gather", inputs, outputs.at(0), is_async(options),
                    [gloo = gloo_, to = std::vector<Tensors>{as_host(outputs[0])}, from = as_host(inputs), options]() mutable {
                      return gloo->allgather(to, from, options);
                    }}});
  }
  Handle _allgather_base(Tensor& output, Tensor& input, const c10d::AllgatherOptions& options) override {
    return submit({all_gathered(output, input, options)});
  }
  Handle allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& options) override {
    std::vector<Operation> all;
    for (size_t i = 0; i < inputs.size(); ++i) all.push_back(all_gathered(outputs[i], inputs[i], options));
    return submit(std::move(all));
  }
  Handle gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& options) override {
    const bool root = options.rootRank == getRank();
    return submit({{"gather", inputs, root ? outputs.at(0) : Tensors(), is_async(options),
                    [gloo = gloo_, to = root ? std::vector<Tensors>{as_host(outputs[0])} : std::vector<Tensors>(),
                     from = as_host(inputs), options]() mutable { return gloo->gather(to, from, options); }}});
  }
  Handle scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& options) override {
    const bool root = options.rootRank == getRank();
    return submit({{"scatter", root ? inputs.at(0) : Tensors(), outputs, is_async(options),
                    [gloo = gloo_, to = as_host(outputs),
                     from = root ? std::vector<Tensors>{as_host(inputs[0])} : std::vector<Tensors>(),
                     options]() mutable { return gloo->scatter(to, from, options); }}});
  }
  Handle reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ReduceScatterOptions& options) override {
    auto used = options;
    auto to = as_host(outputs);
    auto end = averaged(used, to);
    return submit({{"reduce_scatter", inputs.at(0), outputs, is_async(options),
                    [gloo = gloo_, to, from = std::vector<Tensors>{as_host(inputs[0])}, used]() mutable {
                      return gloo->reduce_scatter(to, from, used);
                    },
                    end}});
  }
  Handle _reduce_scatter_base(Tensor& output, Tensor& input, const c10d::ReduceScatterOptions& options) override {
    return submit({reduce_scattered(output, input, options)});
  }
  Handle reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& options) override {
    std::vector<Operation> all;
    for (size_t i = 0; i < inputs.size(); ++i) all.push_back(reduce_scattered(outputs[i], inputs[i], options));
    return submit(std::move(all));
  }
  Handle alltoall_base(Tensor& output, Tensor& input, std::vector<int64_t>& to, std::vector<int64_t>& from,
                       const c10d::AllToAllOptions& options) override {
    return submit({{"all_to_all_single", {input}, {output}, is_async(options),
                    [gloo = gloo_, out = as_host(output), in = as_host(input), to, from, options]() mutable {
                      return gloo->alltoall_base(out, in, to, from, options);
                    }}});
  }
  Handle alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& options) override {
    const auto lengths = [](const Tensors& tensors) {
      std::vector<int64_t> out;
      for (const auto& t : tensors) out.push_back(t.numel());
      return out;
    };
    auto whole = std::make_shared<Tensor>();
    return submit({{"all_to_all", inputs, outputs, is_async(options),
                    [gloo = gloo_, whole, from = as_host(inputs), to = lengths(outputs), sizes = lengths(inputs), options]() mutable {
                      for (auto& t : from) t = t.flatten();
                      auto in = at::cat(from);
                      *whole = at::empty({std::accumulate(to.begin(), to.end(), int64_t{0})}, in.options());
                      return gloo->alltoall_base(*whole, in, to, sizes, options);
                    },
                    [whole, to = as_host(outputs), sizes = lengths(outputs)] {
                      const auto parts = whole->split_with_sizes(sizes);
                      for (size_t i = 0; i < to.size(); ++i) to[i].copy_(parts[i].view(to[i].sizes()));
                    }}});
  }
  Handle send(Tensors& tensors, int rank, int) override {
    return submit({{"send", tensors, {}, true,
                    [gloo = gloo_, host = as_host(tensors), rank, tag = tag()]() mutable { return gloo->send(host, rank, tag); },
                    {}, rank}});
  }
  Handle recv(Tensors& tensors, int rank, int) override {
    return submit({{"recv", {}, tensors, true,
                    [gloo = gloo_, host = as_host(tensors), rank, tag = tag()]() mutable { return gloo->recv(host, rank, tag); },
                    {}, rank}});
  }
  Handle barrier(const c10d::BarrierOptions& options) override {
    return submit({{"barrier", {}, {}, true, [gloo = gloo_] { return gloo->barrier(); }}}, true);
  }

 private:
  template <class Given>
  static bool is_async(const Given& options) {
    if constexpr (requires { options.asyncOp; })
      return options.asyncOp;
    else
      return true;
  }
  // gloo has no average.
  template <class Given>
  std::function<void()> averaged(Given& options, Tensors results) {
    if (options.reduceOp != c10d::ReduceOp::AVG) return {};
    options.reduceOp = c10d::ReduceOp::SUM;
    return [results = std::move(results), size = getSize()] {
      for (auto t : results) t.div_(size);
    };
  }
  Operation all_reduced(Tensors tensors, c10d::AllreduceOptions options) {
    auto host = as_host(tensors);
    auto end = averaged(options, host);
    return {"all_reduce", tensors, tensors, is_async(options),
            [gloo = gloo_, host, options]() mutable { return gloo->allreduce(host, options); }, end};
  }
  Operation all_gathered(Tensor output, Tensor input, c10d::AllgatherOptions options) {
    return {"all_gather_into_tensor", {input}, {output}, is_async(options),
            [gloo = gloo_, to = as_host(output), from = as_host(input), options]() mutable {
              return gloo->_allgather_base(to, from, options);
            }};
  }
  Operation reduce_scattered(Tensor output, Tensor input, c10d::ReduceScatterOptions options) {
    auto to = as_host(output);
    auto end = averaged(options, {to});
    return {"reduce_scatter_tensor", {input}, {output}, is_async(options),
            [gloo = gloo_, to, from = as_host(input), options]() mutable { return gloo->_reduce_scatter_base(to, from, options); },
            end};
  }
  int tag() const { return batch_ ? 1 : 0; }  // NCCL knows no tags, and has other connections for a batch

  // The group's stream, or the one for what goes to and comes from another rank.
  StreamThread* own(DeviceIndex device, int peer) {
    auto*& found = own_[{device, peer}];
    if (!found) found = streams().lend(device);
    return found;
  }

  Handle submit(std::vector<Operation> operations, bool host_waits = false) {
    if (batch_) {
      batch_->insert(batch_->end(), operations.begin(), operations.end());
      return c10::make_intrusive<Work>();  // the batch's is the one to wait for
    }
    outcome_->raise();  // of what was before: nobody can tell what the other ranks have
    DeviceIndex device = current_device;
    bool aside = !is_cuda();
    Tensors tensors, results;
    for (const auto& operation : operations) {
      tensors.insert(tensors.end(), operation.reads.begin(), operation.reads.end());
      tensors.insert(tensors.end(), operation.writes.begin(), operation.writes.end());
      results.insert(results.end(), operation.writes.begin(), operation.writes.end());
      aside = aside || operation.async;
    }
    for (const auto& t : tensors) {
      TORCH_CHECK(on_device(t), "Tensors must be on the device");
      TORCH_CHECK(t.is_non_overlapping_and_dense(), "Tensors must be contiguous");
      device = tensors[0].device().index();
      TORCH_CHECK(t.device().index() == device, "Tensors must be on one device");
    }
    Submitting lock(submitting());
    auto* caller = current(device);
    const int peer = operations.size() == 1 ? operations[0].peer : -1;
    auto* stream = aside ? own(device, peer) : caller;
    if (stream != caller) stream->wait_for(caller->point());
    for (auto& operation : operations) {
      for (const auto& t : std::exchange(operation.reads, {})) use(flat(t), false, stream, operation.what);
      for (const auto& t : std::exchange(operation.writes, {})) use(flat(t), true, stream, operation.what);
    }
    // A connection does one thing at a time, whichever streams it was asked on; that orders nothing else.
    auto outcome = std::make_shared<Outcome>();
    auto before = peer < 0 ? std::exchange(last_, std::make_shared<Point>()) : nullptr;
    auto over = peer < 0 ? last_ : nullptr;
    stream->submit([operations = std::move(operations), before, over, outcome, all = outcome_] {
      if (before) before->wait();
      try {
        all->raise();
        std::vector<WorkOfGloo> started;
        for (const auto& operation : operations) started.push_back(operation.start());
        for (const auto& work : started) work->wait();
        for (const auto& operation : operations)
          if (operation.end) operation.end();
      } catch (...) {
        outcome->fail(std::current_exception());
        all->fail(std::current_exception());
      }
      if (over) over->reach();
      outcome->raise();  // whoever waits for the stream hears of it, too
    });
    ++submitted_;
    if (stream == caller) tensors.clear();
    if (!is_cuda()) {
      for (const auto& t : std::exchange(tensors, {}))
        allocator()->recordStream(t.storage().data_ptr(),
                                  c10::Stream(c10::Stream::UNSAFE, Device(device_type(), device), stream->number));
    }
    return c10::make_intrusive<DeviceWork>(stream, stream->point(), outcome, std::move(tensors), std::move(results), host_waits);
  }

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const std::string name_;
  const c10::intrusive_ptr<Options> options_;
  std::map<std::pair<DeviceIndex, int>, StreamThread*> own_;
  std::optional<std::vector<Operation>> batch_;
  std::shared_ptr<Point> last_;  // the end of what was submitted last
  const std::shared_ptr<Outcome> outcome_ = std::make_shared<Outcome>();
  uint64_t submitted_ = 0;
};

// Give a process group that has gloo for the CPU our backend for the device.
inline void add_to_group(const c10::intrusive_ptr<c10d::ProcessGroup>& group, std::string name, int64_t milliseconds) {
  group->setBackend(device_type(), c10d::ProcessGroup::BackendType::CUSTOM,
                    c10::make_intrusive<Group>(group->getBackend(DeviceType::CPU), std::move(name), std::chrono::milliseconds(milliseconds)));
}

}  // namespace accelerator
