// An accelerator made of host threads and host memory, for tests: as torch's CUDA device in a CPU build of torch, or as
// its PrivateUse1 device, which torch_npu is, too. ACCELERATOR_KIND (cuda, npu) says which when the library is loaded.
//
// Every operator runs by one fallback: its results' shapes come from meta tensors, its work is submitted to the current
// stream and done there by the CPU's kernel on the same memory. What needs an answer first makes the host wait.

#include "process_group.h"
#include "runtime.h"

#include <ATen/Context.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/autocast_mode.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_local_scalar_dense.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/ones_like.h>
#include <torch/library.h>

namespace accelerator {
namespace {

using c10::IValue;
using torch::jit::Stack;

Tensor map_tensor(const Tensor& t, const std::function<Tensor(const Tensor&)>& f) { return t.defined() ? f(t) : t; }
IValue map_tensors(const IValue& value, const std::function<Tensor(const Tensor&)>& f) {
  if (value.isTensor()) return map_tensor(value.toTensor(), f);
  if (value.isTensorList()) {
    c10::List<Tensor> out;
    for (const Tensor& t : value.toTensorList()) out.push_back(map_tensor(t, f));
    return out;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<Tensor>> out;
    for (const std::optional<Tensor>& t : value.toOptionalTensorList())
      out.push_back(t ? std::optional<Tensor>(map_tensor(*t, f)) : std::nullopt);
    return out;
  }
  return value;
}

Tensor view_of(const Tensor& base, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset, caffe2::TypeMeta dtype) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), dtype);
  view.unsafeGetTensorImpl()->set_storage_offset(offset);
  view.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return view;
}
Tensor like(const Tensor& meta) {
  return at::detail::empty_strided_generic(meta.sizes(), meta.strides(), allocator(), keys(), meta.scalar_type());
}

// ---- one call of an operator

// What meta tensors have said of a call: many of their kernels are in Python.
struct Shapes {
  bool known;
  std::vector<Tensor> metas;
  std::vector<IValue> results;

  static std::optional<Shapes> of(const std::string& call) {
    std::lock_guard<std::mutex> lock(mutex());
    const auto found = all().find(call);
    return found == all().end() ? std::nullopt : std::optional<Shapes>(found->second);
  }
  static void keep(const std::string& call, const Shapes& shapes) {
    std::lock_guard<std::mutex> lock(mutex());
    if (all().size() == 10000) all().clear();
    all().emplace(call, shapes);
  }

 private:
  static std::unordered_map<std::string, Shapes>& all() {
    static auto* the = new std::unordered_map<std::string, Shapes>();
    return *the;
  }
  static std::mutex& mutex() {
    static auto* the = new std::mutex();
    return *the;
  }
};

class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), schema_(op.schema()), name_(schema_.name().c_str()), args_(stack->end() - static_cast<long>(schema_.arguments().size()), stack->end()) {
    for (size_t i = 0; i < args_.size(); ++i) {
      const auto* alias = schema_.arguments()[i].alias_info();
      map_tensors(args_[i], [&](const Tensor& t) {
        if (on_device(t)) {
          device_tensors_.push_back(t);
          written_.push_back(alias && alias->isWrite());
        } else if (t.device().is_cpu() && t.dim()) {
          host_tensor_ = true;
        }
        return t;
      });
      if (schema_.arguments()[i].name() == "generator") generator_ = static_cast<int>(i);
    }
    device_ = device_tensors_.empty() ? current_device : device_tensors_[0].device().index();
    for (const auto& t : device_tensors_)
      TORCH_CHECK(t.device().index() == device_, "Expected all tensors to be on the same device, but ", name_, " got ",
                  t.device(), " and ", device_tensors_[0].device());
    TORCH_CHECK(!host_tensor_ || takes_indices_of_the_host(),
                "Expected all tensors to be on the same device, but ", name_, " got a CPU tensor besides ",
                Device(device_type(), device_));
  }

  std::vector<IValue> run() {
    at::AutoDispatchBelowADInplaceOrView below;
    raise_refused();
    draw();
    if (!host_tensor_ && shapes()) return later();
    return now();
  }

  // The runtime remembers a refused call and blames the next kernel for it.
  static std::string& refused() {
    static auto* the = new std::string();
    return *the;
  }

 private:
  bool takes_indices_of_the_host() const {
    const std::string_view name = name_;
    return name == "aten::index" || name == "aten::index_put_" || name == "aten::_index_put_impl_";
  }
  static void raise_refused() {
    Submitting lock(submitting());
    if (const auto text = std::exchange(refused(), ""); !text.empty()) TORCH_CHECK(false, text);
  }
  void draw() {
    random_ = op_.hasTag(at::Tag::nondeterministic_seeded);
    if (generator_ < 0 || !random_) return;
    IValue& given = args_[static_cast<size_t>(generator_)];
    given = (given.isNone() ? default_generator(device_) : given.toGenerator()).get<Generator>()->draw();
  }
  std::vector<IValue> with_device(Device device) const {
    auto args = args_;
    for (auto& arg : args)
      if (arg.isDevice()) arg = device;
    return args;
  }
  // What comes out, as meta tensors; false where the operator has to run to know.
  bool shapes() {
    if (random_ && generator_ < 0) return false;
    bool plain = true;  // writes to what it gets and makes nothing: no need to ask
    for (const auto& result : schema_.returns()) plain = plain && result.alias_info() && result.alias_info()->isWrite();
    for (const auto& arg : schema_.arguments()) plain = plain && !arg.is_out();
    if (plain) {
      for (const auto& result : schema_.returns()) meta_results_.push_back(written_argument(result));
      return true;
    }
    const auto call = description();
    if (const auto before = call ? Shapes::of(*call) : std::nullopt) {
      metas_ = before->metas;
      meta_results_ = before->results;
      return before->known;
    }
    const bool known = by_meta_tensors();
    if (call) Shapes::keep(*call, {known, metas_, meta_results_});
    return known;
  }
  bool by_meta_tensors() {
    try {
      std::unordered_map<c10::TensorImpl*, Tensor> same;
      auto args = with_device(at::kMeta);
      for (auto& arg : args)
        arg = map_tensors(arg, [&](const Tensor& t) {
          if (!on_device(t)) return t;
          Tensor& meta = same[t.unsafeGetTensorImpl()];
          if (!meta.defined()) meta = at::detail::empty_strided_meta(t.sizes(), t.strides(), t.scalar_type());
          metas_.push_back(meta);
          return meta;
        });
      if (generator_ >= 0) args[static_cast<size_t>(generator_)] = IValue();
      Stack stack(args.begin(), args.end());
      op_.callBoxed(stack);
      meta_results_.assign(stack.begin(), stack.end());
      if (std::string_view(name_) == "aten::native_layer_norm") as_the_hosts_layer_norm();
      return true;
    } catch (const std::exception&) {  // of torch, or of a meta kernel in Python
      metas_.clear();
      return false;
    }
  }
  // All that an operator's meta tensors depend on; none where that is not known, or where they are written to.
  std::optional<std::string> description() const {
    if (schema_.name().rfind("aten::", 0) != 0 || std::count(written_.begin(), written_.end(), true)) return std::nullopt;
    std::string text = schema_.name() + "." + schema_.overload_name();
    add(text, static_cast<int64_t>(at::get_default_dtype_as_scalartype()));
    for (size_t i = 0; i < args_.size(); ++i)
      if (static_cast<int>(i) != generator_ && !describe(args_[i], text)) return std::nullopt;
    return text;
  }
  static void add(std::string& text, int64_t number) { text.append(reinterpret_cast<const char*>(&number), sizeof(number)); }
  bool describe(const IValue& value, std::string& text) const {
    text += value.tagKind();
    if (value.isTensor()) {
      const Tensor& t = value.toTensor();
      if (!t.defined()) return true;
      add(text, static_cast<int64_t>(t.scalar_type()));
      if (!on_device(t)) return !t.dim() && t.unsafeGetTensorImpl()->is_wrapped_number();
      for (size_t d = 0; d < device_tensors_.size(); ++d)
        if (device_tensors_[d].is_same(t)) {
          add(text, static_cast<int64_t>(d));
          break;
        }
      add(text, t.dim());
      for (const int64_t n : t.sizes()) add(text, n);
      for (const int64_t n : t.strides()) add(text, n);
    } else if (value.isList()) {
      add(text, static_cast<int64_t>(value.toListRef().size()));
      for (const IValue& one : value.toListRef())
        if (!describe(one, text)) return false;
    } else if (value.isDouble()) {
      const double number = value.toDouble();
      text.append(reinterpret_cast<const char*>(&number), sizeof(number));
    } else if (value.isString()) {
      add(text, static_cast<int64_t>(value.toStringRef().size()));
      text += value.toStringRef();
    } else if (value.isInt() || value.isBool()) {
      add(text, value.isInt() ? value.toInt() : value.toBool());
    } else {
      return value.isNone() || value.isDevice();
    }
    return true;
  }
  // Mean and deviation of half-precision input: the host's kernels have them in another type than meta tensors say.
  void as_the_hosts_layer_norm() {
    const auto input = args_[0].toTensor(), weight = args_[2].isNone() ? input : args_[2].toTensor();
    for (size_t i : {1, 2})
      meta_results_[i] = meta_results_[i].toTensor().to(weight.scalar_type() == input.scalar_type() ? input.scalar_type() : at::kFloat);
  }
  IValue written_argument(const c10::Argument& result) const {
    for (size_t k = 0; k < args_.size(); ++k) {
      const auto* alias = schema_.arguments()[k].alias_info();
      if (alias && alias->isWrite() && alias->beforeSets() == result.alias_info()->beforeSets()) return args_[k];
    }
    TORCH_CHECK(false, "accelerator: ", name_, " returns what it was not given");
  }
  // The result that shares memory with an argument; none where it is new.
  std::optional<IValue> aliased(size_t i, const IValue& out, const std::vector<Tensor>& stand_ins) const {
    const auto* alias = schema_.returns()[i].alias_info();
    if (!alias) return std::nullopt;
    if (alias->isWrite()) return written_argument(schema_.returns()[i]);
    for (size_t k = 0; k < args_.size(); ++k) {
      const auto* other = schema_.arguments()[k].alias_info();
      if (!other || other->beforeSets() != alias->beforeSets() || !args_[k].isTensor()) continue;
      const Tensor base = args_[k].toTensor();
      Tensor stand_in;
      for (size_t d = 0; d < device_tensors_.size(); ++d)
        if (device_tensors_[d].is_same(base)) stand_in = stand_ins[d];
      return map_tensors(out, [&](const Tensor& o) {
        const auto item = static_cast<int64_t>(o.element_size());
        const int64_t moved = o.device().is_meta()
            ? o.storage_offset() * item
            : static_cast<const char*>(o.const_data_ptr()) - static_cast<const char*>(stand_in.const_data_ptr());
        const int64_t start = base.storage_offset() * static_cast<int64_t>(base.element_size()) + moved;
        return view_of(base, o.sizes(), o.strides(), start / item, o.dtype());
      });
    }
    return std::nullopt;
  }
  // out= arguments take the size that the operator gives them.
  void resize_outputs(const std::vector<Tensor>& stand_ins) {
    for (size_t d = 0; d < stand_ins.size(); ++d)
      if (device_tensors_[d].sizes() != stand_ins[d].sizes()) device_tensors_[d].resize_(stand_ins[d].sizes());
  }

  std::vector<IValue> later() {
    record().count("operators");
    resize_outputs(metas_);
    std::vector<IValue> results;
    std::vector<std::vector<Flat>> fresh;  // by result: where the new tensors go
    for (size_t i = 0; i < meta_results_.size(); ++i) {
      fresh.emplace_back();
      if (metas_.empty() && schema_.returns()[i].alias_info()) {
        results.push_back(meta_results_[i]);
      } else if (auto shared = aliased(i, meta_results_[i], metas_)) {
        results.push_back(*shared);
      } else {
        results.push_back(map_tensors(meta_results_[i], [&](const Tensor& meta) {
          Tensor made = like(meta);
          fresh.back().push_back(flat(made));
          return made;
        }));
      }
    }
    const bool looks = !only_views();
    if (!looks) return results;
    std::vector<Flat> flats;
    for (const auto& t : device_tensors_) flats.push_back(flat(t));
    // Each tensor becomes a place: of device memory by number, of the host (a number that waits in no memory) by value.
    auto held = with_device(at::kCPU);
    for (auto& arg : held)
      arg = map_tensors(arg, [](const Tensor& t) { return on_device(t) ? placeholder() : t.clone(); });
    Submitting lock(submitting());
    auto* stream = current(device_);
    for (size_t d = 0; d < flats.size(); ++d) use(flats[d], written_[d], stream, name_);
    for (const auto& places : fresh)
      for (const auto& place : places) use(place, true, stream, name_);
    stream->submit([op = op_, name = name_, held, flats, fresh] {
      Stack stack;
      size_t next = 0;
      for (const auto& arg : held)
        stack.push_back(map_tensors(arg, [&](const Tensor& t) { return is_placeholder(t) ? on_host(flats[next++]) : t; }));
      try {
        op.callBoxed(stack);
      } catch (const c10::Error& error) {
        TORCH_CHECK(false, name, ": ", error.what_without_backtrace());
      }
      for (size_t i = 0; i < fresh.size(); ++i) {
        size_t k = 0;
        if (!fresh[i].empty())
          map_tensors(stack[i], [&](const Tensor& o) { return on_host(fresh[i][k++]).copy_(o); });
      }
    });
    return results;
  }
  // Views touch no memory.
  bool only_views() const {
    for (const auto& result : schema_.returns())
      if (!result.alias_info() || result.alias_info()->isWrite()) return false;
    return !schema_.returns().empty();
  }
  static const Tensor& placeholder() {
    static const Tensor the = at::detail::empty_cpu({0}, at::kByte, std::nullopt, at::kCPU, std::nullopt, std::nullopt);
    return the;
  }
  static bool is_placeholder(const Tensor& t) { return t.is_same(placeholder()); }

  std::vector<IValue> now() {
    auto* stream = current(device_);
    std::vector<Tensor> stand_ins;
    {
      Submitting lock(submitting());
      for (size_t d = 0; d < device_tensors_.size(); ++d) use(flat(device_tensors_[d]), written_[d], stream, name_);
      stream->submit([] {});
    }
    drain(stream, std::string("operator ") + name_);
    auto args = with_device(at::kCPU);
    for (auto& arg : args)
      arg = map_tensors(arg, [&](const Tensor& t) {
        if (!on_device(t)) return t;
        stand_ins.push_back(on_host(flat(t)));
        return stand_ins.back();
      });
    auto& cpu = const_cast<at::Generator&>(at::detail::getDefaultCPUGenerator());
    Tensor before;
    if (random_ && generator_ < 0) {
      before = cpu.get_state();
      cpu.set_state(default_generator(device_).get<Generator>()->draw().get_state());
    }
    Stack stack(args.begin(), args.end());
    op_.callBoxed(stack);
    if (before.defined()) cpu.set_state(before);
    std::vector<IValue> results, outs(stack.begin(), stack.end());
    std::vector<std::pair<Flat, Tensor>> copies;
    for (size_t d = 0; d < device_tensors_.size(); ++d)
      if (device_tensors_[d].sizes() != stand_ins[d].sizes()) {
        device_tensors_[d].resize_(stand_ins[d].sizes());
        copies.emplace_back(flat(device_tensors_[d]), stand_ins[d]);
      }
    for (size_t i = 0; i < outs.size(); ++i) {
      if (auto shared = aliased(i, outs[i], stand_ins)) {
        results.push_back(*shared);
        continue;
      }
      results.push_back(map_tensors(outs[i], [&](const Tensor& o) {
        Tensor made = like(o);
        copies.emplace_back(flat(made), o);
        return made;
      }));
    }
    Submitting lock(submitting());
    for (const auto& copy : copies) use(copy.first, true, stream, name_);
    stream->submit([copies] {
      for (const auto& [to, from] : copies) on_host(to).copy_(from);
    });
    return results;
  }

  const c10::OperatorHandle op_;
  const c10::FunctionSchema& schema_;
  const char* name_;
  std::vector<IValue> args_;
  std::vector<Tensor> device_tensors_, metas_;
  std::vector<bool> written_;
  std::vector<IValue> meta_results_;
  DeviceIndex device_ = 0;
  int generator_ = -1;
  bool host_tensor_ = false, random_ = false;
};

void fallback(const c10::OperatorHandle& op, Stack* stack) {
  auto results = Call(op, stack).run();
  torch::jit::drop(*stack, op.schema().arguments().size());
  for (auto& result : results) stack->push_back(std::move(result));
}

// ---- operators that are about memory

Tensor empty_memory_format(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                           std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::DeviceGuard guard(device.value_or(Device(device_type(), current_device)));
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), allocator(), keys(), c10::dtype_or_default(dtype), format);
}
Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(device.value_or(Device(device_type(), current_device)));
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), allocator(), keys(),
                                           c10::dtype_or_default(dtype));
}
Tensor as_strided(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return view_of(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride),
                 offset ? offset->expect_int() : self.storage_offset(), self.dtype());
}
Tensor reshape_alias(const Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return as_strided(self, size, stride, std::nullopt);
}
Tensor view(const Tensor& self, c10::SymIntArrayRef size) {
  const auto sizes = at::infer_size_dv(C10_AS_INTARRAYREF_SLOW(size), self.numel());
  const auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides, "view size is not compatible with input tensor's size and stride");
  return view_of(self, sizes, *strides, self.storage_offset(), self.dtype());
}
const Tensor& resize(const Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  if (self.sizes() == sizes) return self;
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  const size_t needed = static_cast<size_t>(self.storage_offset() + self.numel()) * self.element_size();
  if (self.numel() && needed > self.storage().nbytes()) {
    c10::DeviceGuard guard(self.device());
    resize_storage(self.storage().unsafeGetStorageImpl(), needed);
  }
  return self;
}
Tensor& set_storage_offset(Tensor& self, c10::Storage storage, c10::SymInt offset, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset.expect_int());
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size), strides = C10_AS_INTARRAYREF_SLOW(stride);
  if (strides.empty() && !sizes.empty())
    impl->set_sizes_contiguous(sizes);
  else
    impl->set_sizes_and_strides(sizes, strides);
  return self;
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_storage_offset(source.storage_offset());
  impl->set_sizes_and_strides(source.sizes(), source.strides());
  return self;
}
Tensor& set_storage(Tensor& self, c10::Storage storage) {
  const auto items = static_cast<int64_t>(storage.nbytes() / self.element_size());
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(0);
  impl->set_sizes_contiguous({items});
  return self;
}
Tensor& set_nothing(Tensor& self) {
  return set_storage(self, c10::Storage(c10::Storage::use_byte_size_t(), 0, allocator()->allocate(0), allocator(), true));
}

Tensor& copy(Tensor& target, const Tensor& given, bool non_blocking) {
  if (!target.numel()) return target;
  static const char *device_copy = "copy on the device", *out = "copy to the host", *in = "copy to the device";
  Tensor source = given;
  if (on_device(source) && on_device(target)) {
    if (source.sizes() != target.sizes()) source = source.expand_as(target);
    const auto from = flat(source), to = flat(target);
    Submitting lock(submitting());
    auto* stream = current(source.device().index());
    use(from, false, stream, device_copy);
    use(to, true, stream, device_copy);
    if (source.device() != target.device()) {  // as torch does: both devices' streams are ordered around it
      auto* other = current(target.device().index());
      stream->wait_for(other->point());
      stream->submit([=] { on_host(to).copy_(on_host(from)); });
      other->wait_for(stream->point());
      return target;
    }
    stream->submit([=] { on_host(to).copy_(on_host(from)); });
    return target;
  }
  const bool leaves = on_device(source);
  const char* what = leaves ? out : in;
  record().count(std::string("bytes, ") + what, static_cast<int64_t>(source.nbytes()));
  const Tensor& host = leaves ? target : source;
  auto* stream = current((leaves ? source : target).device().index());
  const auto pinned = pinned_memory().at(host.const_data_ptr());
  const bool direct = source.dtype() == target.dtype() && source.sizes() == target.sizes() && host.is_non_overlapping_and_dense();
  if (non_blocking && pinned && direct) {
    record().count(what);
    const auto device_side = flat(leaves ? source : target);
    Flat host_side{nullptr, nullptr, host.sizes().vec(), host.strides().vec(), host.scalar_type(),
                   static_cast<char*>(const_cast<void*>(host.const_data_ptr()))};
    Submitting lock(submitting());
    join(stream->clock, host_clock());
    use(device_side, !leaves, stream, what);
    pinned->uses.add({host_side.data, host_side.data + host.nbytes(), stream->index, stream->clock[stream->index] + 1, leaves, what},
                     stream->clock);
    ++pinned->copies;
    stream->submit([=] {
      if (leaves)
        on_host(host_side).copy_(on_host(device_side));
      else
        on_host(device_side).copy_(on_host(host_side));
      --pinned->copies;
    });
    return target;
  }
  const char* why = !non_blocking ? ", blocking" : !pinned ? ", to or from memory that is not pinned" : ", which converts";
  // A copy in that may be late takes its source at once, as torch stages what is not pinned.
  if (!leaves && non_blocking) {
    record().count(std::string("staged ") + what);
    if (!pinned) host_waits(std::string(what) + why);
    Tensor staged = source.expand_as(target).to(target.scalar_type()).clone();
    const auto to = flat(target);
    Submitting lock(submitting());
    use(to, true, stream, what);
    stream->submit([=] { on_host(to).copy_(staged); });
    return target;
  }
  {
    Submitting lock(submitting());
    use(flat(leaves ? source : target), !leaves, stream, what);
    stream->submit([] {});
  }
  drain(stream, std::string(what) + why);
  const auto device_side = flat(leaves ? source : target);
  if (leaves)
    target.copy_(on_host(device_side));
  else
    on_host(device_side).copy_(source);
  return target;
}
at::Scalar item(const Tensor& self) {
  const auto f = flat(self);
  auto* stream = current(self.device().index());
  {
    Submitting lock(submitting());
    use(f, false, stream, ".item()");
    stream->submit([] {});
  }
  drain(stream, ".item()");
  return at::_local_scalar_dense(on_host(f));
}
void record_stream(Tensor& self, c10::Stream stream) { allocator()->recordStream(self.storage().data_ptr(), stream); }
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::ones_like(input, input.options().dtype(at::kBool))};
  const Tensor mask = at::empty_like(input, input.options().dtype(at::kBool)).bernoulli_(1 - p);
  return {input.mul(mask).mul(p == 1 ? 0.0 : 1.0 / (1 - p)), mask};
}
int64_t attention_by_math(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                          std::optional<double>, bool) {
  return 0;
}

// ---- what Python asks this library for, as operators: without pybind and Python's headers

std::mutex gates_mutex;
std::map<int64_t, std::shared_ptr<Point>> gates;
int64_t new_gate() {  // work may wait for the host, as it does for a collective of the network
  static int64_t next = 0;
  std::lock_guard<std::mutex> lock(gates_mutex);
  gates[++next] = std::make_shared<Point>();
  return next;
}
void wait_at_gate(int64_t gate) {
  std::shared_ptr<Point> point;
  {
    std::lock_guard<std::mutex> lock(gates_mutex);
    point = gates.at(gate);
  }
  Submitting lock(submitting());
  current(current_device)->wait_for(point);
}
void open_gate(int64_t gate) {
  std::lock_guard<std::mutex> lock(gates_mutex);
  gates.at(gate)->reach();
  gates.erase(gate);
}
c10::Dict<std::string, int64_t> memory_figures(int64_t device) {
  const auto figures = allocator()->figures(static_cast<DeviceIndex>(device));
  c10::Dict<std::string, int64_t> out;
  out.insert("allocated", figures.allocated);
  out.insert("peak", figures.peak);
  out.insert("reserved", figures.reserved);
  out.insert("peak_reserved", figures.peak_reserved);
  out.insert("retries", figures.retries);
  out.insert("out_of_memory", figures.out_of_memory);
  out.insert("limit", figures.limit);
  out.insert("blocks", figures.blocks);
  out.insert("total", static_cast<int64_t>(pages(static_cast<DeviceIndex>(device)).size));
  return out;
}
c10::Dict<std::string, int64_t> counters() {
  c10::Dict<std::string, int64_t> out;
  for (const auto& [name, n] : record().counters()) out.insert(name, n);
  return out;
}
int64_t host_register(int64_t address, int64_t bytes) {
  auto& memory = pinned_memory();
  forbidden("pinned allocation", std::to_string(bytes) + " bytes registered");
  if (memory.held + bytes > memory.limit) {
    Submitting lock(submitting());
    Call::refused() = "CUDA error: out of memory (of a call that was refused earlier)";
    return 2;  // cudaErrorMemoryAllocation
  }
  memory.pin(reinterpret_cast<void*>(address), static_cast<size_t>(bytes));
  return 0;
}
void set_lags(int64_t compute, int64_t side, int64_t random, int64_t seed) {
  lags().compute = static_cast<int>(compute);
  lags().side = static_cast<int>(side);
  lags().seed = static_cast<unsigned>(seed);
  lags().random = static_cast<int>(random);
}

// ---- registration: which device type it is, is known only now

struct Registration {
  torch::Library all, operators, autocast, lower_precision, own;
  c10::impl::DeviceGuardImplRegistrar guard;

  Registration()
      : all(torch::Library::IMPL, "_", key(), __FILE__, __LINE__),
        operators(torch::Library::IMPL, "aten", key(), __FILE__, __LINE__),
        autocast(torch::Library::IMPL, "_", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__),
        lower_precision(torch::Library::IMPL, "aten", c10::DispatchKey::AutocastPrivateUse1, __FILE__, __LINE__),
        own(torch::Library::DEF, "accelerator", std::nullopt, __FILE__, __LINE__),
        guard(device_type(), new Guard()) {
    c10::SetAllocator(device_type(), allocator());
    if (is_cuda()) {
      at::CUDAHooksRegistry()->Register(
          "CUDAHooks", [](at::CUDAHooksArgs args) -> std::unique_ptr<at::CUDAHooksInterface> { return std::make_unique<CudaHooks>(args); });
      at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_by_math);
    } else {
      at::RegisterPrivateUse1HooksInterface(new PrivateUse1Hooks());
    }
    all.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
    if (!is_cuda()) {  // CUDA's are in every build of torch
      autocast.fallback(torch::CppFunction::makeFallthrough());
      // As torch_npu answers, which torch itself would not of such a device: ``data`` may move between it and the host.
      operators.impl("_has_compatible_shallow_copy_type", [](const Tensor& self, const Tensor& from) {
        return (self.is_cpu() || on_device(self)) && (from.is_cpu() || on_device(from));
      });
      torch::Library& m = lower_precision;
      KERNEL_PRIVATEUSEONE(linear, lower_precision_fp)
      KERNEL_PRIVATEUSEONE(matmul, lower_precision_fp)
      KERNEL_PRIVATEUSEONE(mm, lower_precision_fp)
      KERNEL_PRIVATEUSEONE(bmm, lower_precision_fp)
      KERNEL_PRIVATEUSEONE(addmm, lower_precision_fp)
      KERNEL_PRIVATEUSEONE(baddbmm, lower_precision_fp)
    }
    // Else it would be put together from others, while its backward expects what the host's kernel gives.
    operators.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
    operators.impl("empty.memory_format", TORCH_FN(empty_memory_format));
    operators.impl("empty_strided", TORCH_FN(empty_strided));
    operators.impl("as_strided", TORCH_FN(as_strided));
    operators.impl("_reshape_alias", TORCH_FN(reshape_alias));
    operators.impl("view", TORCH_FN(view));
    operators.impl("resize_", TORCH_FN(resize));
    operators.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
    operators.impl("set_.source_Tensor", TORCH_FN(set_tensor));
    operators.impl("set_.source_Storage", TORCH_FN(set_storage));
    operators.impl("set_", TORCH_FN(set_nothing));
    operators.impl("copy_", TORCH_FN(copy));
    operators.impl("_local_scalar_dense", TORCH_FN(item));
    operators.impl("record_stream", TORCH_FN(record_stream));
    operators.impl("native_dropout", TORCH_FN(native_dropout));

    // Before, torch says of no memory that it is pinned.
    own.def("initialise() -> ()", [] { at::globalContext().lazyInitDevice(device_type()); });
    own.def("set_lags(int compute, int side, int random, int seed) -> ()", TORCH_FN(set_lags));
    own.def("counters() -> Dict(str, int)", TORCH_FN(counters));
    own.def("reset_counters() -> ()", [] { record().reset(); });
    own.def("faults() -> str[]", [] { return record().take_faults(); });
    own.def("promise(bool on) -> ()", [](bool on) { record().promised = on; });
    own.def("memory_figures(int device) -> Dict(str, int)", TORCH_FN(memory_figures));
    own.def("reset_peak(int device) -> ()", [](int64_t d) { allocator()->resetPeakStats(static_cast<DeviceIndex>(d)); });
    own.def("set_limit(int device, int bytes) -> ()", [](int64_t d, int64_t n) { allocator()->set_limit(static_cast<DeviceIndex>(d), n); });
    own.def("check_freed() -> ()", [] { allocator()->check_freed(); });
    own.def("empty_cache() -> ()", [] { allocator()->emptyCache(); });
    own.def("default_generator(int device) -> Generator?", [](int64_t d) { return default_generator(static_cast<DeviceIndex>(d)); });
    own.def("reset_rnn_state(int device) -> bool", [](int64_t d) {
      return default_generator(static_cast<DeviceIndex>(d)).get<Generator>()->reset_rnn_state();
    });
    own.def("host_register(int address, int bytes) -> int", TORCH_FN(host_register));
    own.def("host_unregister(int address) -> ()", [](int64_t p) { pinned_memory().unpin(reinterpret_cast<void*>(p)); });
    own.def("limit_pinned(int bytes) -> ()", [](int64_t n) { pinned_memory().limit = n; });
    own.def("new_gate() -> int", TORCH_FN(new_gate));
    own.def("wait_at_gate(int gate) -> ()", TORCH_FN(wait_at_gate));
    own.def("open_gate(int gate) -> ()", TORCH_FN(open_gate));
    own.def("resize_storage(Tensor(a!) whole, int bytes) -> ()", [](Tensor whole, int64_t n) {
      c10::DeviceGuard device(whole.device());
      resize_storage(whole.storage().unsafeGetStorageImpl(), static_cast<size_t>(n));
    });
    own.def("add_to_group(__torch__.torch.classes.c10d.ProcessGroup group, str name, int milliseconds) -> ()", TORCH_FN(add_to_group));
  }
  static c10::DispatchKey key() { return is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::PrivateUse1; }
};
const auto* registration = new Registration();

}  // namespace
}  // namespace accelerator
