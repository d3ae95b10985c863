// What the engine does with each saved tensor, in C++; see fast_tensors.py, which has the same in Python.

#include "fast_tensors.h"

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
  const auto type = reinterpret_cast<THPDtype*>(args[1])->scalar_type;
  return THPVariable_Wrap(fast_tensors::view_of(THPStorage_Unpack(args[0]), type, size, stride, offset));
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
  return PyBool_FromLong(fast_tensors::is_plain(args[0], wanted));
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
