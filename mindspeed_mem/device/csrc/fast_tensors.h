// Tensors without torch's parsing of Python arguments and its dispatcher: what fast_tensors.cpp and the engine's own
// functions in C++ share.

#pragma once

#include <Python.h>

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

namespace fast_tensors {

// No subclass, nor a parameter.
inline bool is_tensor(PyObject* given) { return reinterpret_cast<PyObject*>(Py_TYPE(given)) == THPVariableClass; }

// A tensor that lies so in `storage`, which grows where it is too small for that, as with `Tensor.set_`.
inline at::Tensor view_of(c10::Storage storage, at::ScalarType type, c10::IntArrayRef size, c10::IntArrayRef stride,
                          int64_t offset) {
  const auto device = storage.device();
  const size_t item = c10::elementSize(type);
  const bool fits = at::detail::computeStorageNbytes(size, stride, item, offset) <= storage.nbytes();
  if (fits && (device.is_cpu() || device.is_cuda())) {
    const c10::DispatchKeySet keys(c10::computeDispatchKey(type, c10::nullopt, device));
    const auto meta = c10::scalarTypeToTypeMeta(type);
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, meta);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
    return made;
  }
  // other devices may have tensors of their own kind
  auto made = at::empty({0}, at::TensorOptions().dtype(type).device(device));
  made.set_(std::move(storage), offset, size, stride);
  return made;
}

// Whether `given` is an ordinary tensor on such a device: no subclass, nor a view of one, of no other layout, and with
// a version counter.
inline bool is_plain(PyObject* given, c10::DeviceType wanted) {
  if (!is_tensor(given)) return false;
  const at::Tensor& tensor = THPVariable_Unpack(given);
  if (tensor.layout() != c10::kStrided || tensor.device().type() != wanted || tensor.is_conj() || tensor.is_neg() ||
      tensor._is_zerotensor() || tensor.is_nested() || tensor.is_inference()) {
    return false;
  }
  if (!tensor.is_view()) return true;
  PyObject* base = THPVariable_Wrap(tensor._base());  // aten's linear saves ``weight.t()``, an ordinary tensor
  if (base == nullptr) throw python_error();
  const bool exact = is_tensor(base);
  Py_DECREF(base);
  return exact;
}

}  // namespace fast_tensors
