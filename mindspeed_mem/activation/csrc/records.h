// storage/records.py: how a saved tensor lies in its storage, and how a record's memory is let go of.

#pragma once

#include "ledger.h"

#include <array>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Size.h>
#include <unordered_map>

namespace hot {

constexpr long long STAYS = -1;  // as in records.py

inline Own tuple_of(c10::IntArrayRef numbers, PyTypeObject* type) {
  Own made = own(type->tp_alloc(type, static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyTuple_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), must(PyLong_FromLongLong(numbers[i])));
  }
  return made;
}

inline Own new_layout(const at::Tensor& tensor) {
  Own dtype = Own::of(reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())));
  Own size = tuple_of(tensor.sizes(), &THPSizeType), stride = tuple_of(tensor.strides(), &PyTuple_Type);
  Own offset = own(PyLong_FromLongLong(tensor.storage_offset()));
  return own(PyTuple_Pack(4, dtype.get(), size.get(), stride.get(), offset.get()));
}

// `layout_of`. A model has few, which are asked for again in each layer: the last ones are kept.
inline Own layout_of(const at::Tensor& tensor) {
  struct Known {
    bool is_of(const at::Tensor& one) const {
      return layout && type == one.scalar_type() && offset == one.storage_offset() && one.sizes().equals(size) &&
             one.strides().equals(stride);
    }
    at::ScalarType type;
    int64_t offset;
    c10::SmallVector<int64_t, 6> size, stride;
    Own layout;
  };
  constexpr size_t most = 256;
  static Known* const known = new Known[most];  // never freed, as nobody knows the order in which a process ends
  auto place = static_cast<size_t>(tensor.scalar_type()) + 31 * static_cast<size_t>(tensor.storage_offset());
  for (const int64_t one : tensor.sizes()) place = 31 * place + static_cast<size_t>(one);
  for (const int64_t one : tensor.strides()) place = 31 * place + static_cast<size_t>(one);
  Known& found = known[(place ^ (place >> 16)) % most];
  if (!found.is_of(tensor)) {
    Own made = new_layout(tensor);
    found = Known{tensor.scalar_type(), tensor.storage_offset(), c10::SmallVector<int64_t, 6>(tensor.sizes()),
                  c10::SmallVector<int64_t, 6>(tensor.strides()), std::move(made)};
  }
  return Own::of(found.layout.get());
}

// A tensor that lies in `storage` as `layout` says.
inline at::Tensor laid_out(const c10::Storage& storage, PyObject* layout) {
  const auto numbers = [](PyObject* tuple) {
    c10::SmallVector<int64_t, 6> found;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) found.push_back(number_of(PyTuple_GET_ITEM(tuple, i)));
    return found;
  };
  const auto type = reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(layout, 0))->scalar_type;
  return fast_tensors::view_of(storage, type, numbers(PyTuple_GET_ITEM(layout, 1)),
                               numbers(PyTuple_GET_ITEM(layout, 2)), number_of(PyTuple_GET_ITEM(layout, 3)));
}

// `fast_tensors.empty`
inline at::Tensor nothing_like(const at::Tensor& tensor) {
  using OfDevice = std::array<at::Tensor, static_cast<size_t>(at::ScalarType::NumOptions)>;
  // never freed, as nobody knows the order in which a process ends
  static auto* const known = new std::unordered_map<c10::Device, OfDevice>();
  at::Tensor& found = (*known)[tensor.device()][static_cast<size_t>(tensor.scalar_type())];
  if (!found.defined()) {
    Own dtype = Own::of(reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())));
    Own device = own(THPDevice_New(tensor.device()));
    found = THPVariable_Unpack(call(engine.empty, dtype.get(), device.get()).get());
  }
  return found;
}

// `Handle.let_go`
inline void let_go(PyObject* of) {
  const at::Tensor& alias = THPVariable_Unpack(handle.alias.get(of));
  handle.layout.set(of, layout_of(alias));
  alias.set_data(nothing_like(alias));
}

inline PyObject* handle_lets_go(PyObject* self, PyObject*) {
  return guarded([&] {
    let_go(self);
    return new_reference(Py_None);
  });
}

// `Record.leave`
inline void leave(PyObject* of, PyObject* state, PyObject* way_back) {
  PyObject* counted = record.token.get(of);
  if (counted == Py_None) fail_assertion("it has left already");
  token.moved.set_borrowed(counted, Py_True);
  if (Own storage = target_of(record.storage.get(of))) {
    Own attributes = attributes_of(storage.get());
    if (PyDict_GET_SIZE(attributes.get()) > 1) record.attributes.set(of, call(engine.set_by_others, storage.get()));
  }
  PyObject* handles = record.handles.get(of);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(handles); ++i) {
    if (Own one = target_of(PyList_GET_ITEM(handles, i))) let_go(one.get());
  }
  record.token.set_borrowed(of, Py_None);
  record.state.set_borrowed(of, state);
  record.way_back.set_borrowed(of, way_back);
}

inline PyObject* record_leaves(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    takes(count, 2, "leave takes a state and a way back");
    leave(self, args[0], args[1]);
    return new_reference(Py_None);
  });
}

inline Own owner_of(PyObject* of) { return own(PyTuple_Pack(2, record.layer.get(of), record.op.get(of))); }

}  // namespace hot
