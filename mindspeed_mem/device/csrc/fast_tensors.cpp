// What the engine does with each saved tensor, without torch's parsing of Python arguments and its dispatcher; see
// fast_tensors.py, which has the same in Python.

#include <Python.h>

#include <ATen/ATen.h>
#include <c10/core/TensorImpl.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

namespace {

bool sizes_of(PyObject* given, c10::SmallVector<int64_t, 6>& found) {
  if (!PyTuple_Check(given)) {
    PyErr_SetString(PyExc_TypeError, "sizes and strides: give tuples of integers");
    return false;
  }
  const Py_ssize_t count = PyTuple_GET_SIZE(given);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const long long one = PyLong_AsLongLong(PyTuple_GET_ITEM(given, i));
    if (one == -1 && PyErr_Occurred()) return false;
    found.push_back(one);
  }
  return true;
}

// No subclass, nor a parameter.
bool is_tensor(PyObject* given) { return reinterpret_cast<PyObject*>(Py_TYPE(given)) == THPVariableClass; }

// view_of(storage, dtype, size, stride, offset)
PyObject* view_of(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 5 || !THPStorage_Check(args[0]) || !THPDtype_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "view_of takes a storage, a dtype, a size, a stride and an offset");
    return nullptr;
  }
  c10::SmallVector<int64_t, 6> size, stride;
  if (!sizes_of(args[2], size) || !sizes_of(args[3], stride)) return nullptr;
  const long long offset = PyLong_AsLongLong(args[4]);
  if (offset == -1 && PyErr_Occurred()) return nullptr;
  c10::Storage storage = THPStorage_Unpack(args[0]);
  const auto type = reinterpret_cast<THPDtype*>(args[1])->scalar_type;
  const auto device = storage.device();
  if (device.is_cpu() || device.is_cuda()) {
    const c10::DispatchKeySet keys(c10::computeDispatchKey(type, c10::nullopt, device));
    const auto meta = c10::scalarTypeToTypeMeta(type);
    auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), keys, meta);
    made.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset);
    return THPVariable_Wrap(std::move(made));
  }
  // others may have tensors of their own kind
  auto made = at::empty({0}, at::TensorOptions().dtype(type).device(device));
  made.set_(storage, offset, size, stride);
  return THPVariable_Wrap(std::move(made));
  END_HANDLE_TH_ERRORS
}

// is_plain(tensor, device_type)
PyObject* is_plain(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  static PyObject* last = nullptr;
  static c10::DeviceType wanted = c10::DeviceType::CPU;
  if (count != 2 || !PyUnicode_Check(args[1])) {
    PyErr_SetString(PyExc_TypeError, "is_plain takes a tensor and the type of a device");
    return nullptr;
  }
  if (last != args[1]) {
    const char* name = PyUnicode_AsUTF8(args[1]);
    if (name == nullptr) return nullptr;
    wanted = c10::Device(name).type();
    Py_INCREF(args[1]);
    Py_XDECREF(last);
    last = args[1];
  }
  if (!is_tensor(args[0])) Py_RETURN_FALSE;
  const at::Tensor& tensor = THPVariable_Unpack(args[0]);
  if (tensor.layout() != c10::kStrided || tensor.device().type() != wanted || tensor.is_conj() || tensor.is_neg() ||
      tensor.is_nested()) {
    Py_RETURN_FALSE;
  }
  if (tensor.is_view()) {  // aten's linear saves ``weight.t()``, an ordinary tensor
    PyObject* base = THPVariable_Wrap(tensor._base());
    if (base == nullptr) return nullptr;
    const bool exact = is_tensor(base);
    Py_DECREF(base);
    if (!exact) Py_RETURN_FALSE;
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"view_of", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(view_of)), METH_FASTCALL, nullptr},
    {"is_plain", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(is_plain)), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "fast_tensors", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit_fast_tensors() { return PyModule_Create(&module); }
