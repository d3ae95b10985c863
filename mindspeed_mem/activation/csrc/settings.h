// rerun/settings.py: what modules are set to, and whether they still are.

#pragma once

#include "runs.h"

namespace hot {

inline bool is_plain(PyObject* value) {
  PyTypeObject* type = Py_TYPE(value);
  return value == Py_None || type == &PyBool_Type || type == &PyLong_Type || type == &PyUnicode_Type ||
         must(PySet_Contains(engine.PLAIN, reinterpret_cast<PyObject*>(type))) != 0;
}

inline bool is_setting(PyObject* value) {
  if (!PyList_CheckExact(value) && !PyTuple_CheckExact(value)) return is_plain(value);
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
    if (!is_plain(PySequence_Fast_GET_ITEM(value, i))) return false;
  }
  return true;
}

// A `settings.Kind`.
inline PyObject* names_of(PyObject* kind) { return PyTuple_GET_ITEM(kind, 1); }
inline bool is_with_tensors(PyObject* kind) { return PyTuple_GET_ITEM(kind, 2) == Py_True; }
inline bool has_its_attributes(PyObject* kind, PyObject* attributes) {
  PyObject *names = PyTuple_GET_ITEM(kind, 3), *name = nullptr, *value = nullptr;
  if (PyDict_GET_SIZE(attributes) != PyTuple_GET_SIZE(names)) return false;
  Py_ssize_t index = 0;
  for (Py_ssize_t at = 0; PyDict_Next(attributes, &at, &name, &value);) {
    if (PyTuple_GET_ITEM(names, index++) != name) return false;
  }
  return true;
}

inline Own noted_value(PyObject* value) {
  if (value != engine.ABSENT && !is_setting(value)) return Own::of(engine.UNKNOWN_SETTING);
  // what others append to a list is none of this
  return PyList_CheckExact(value) ? own(PyList_GetSlice(value, 0, PyList_GET_SIZE(value))) : Own::of(value);
}

// A module's parameters and buffers; none where these are not to be looked at, or no dictionaries.
struct TensorPlaces {
  explicit TensorPlaces(PyObject* attributes) {
    static Name parameters("_parameters"), buffers("_buffers");
    if (attributes == nullptr) return;
    places[0] = found_in(attributes, parameters.object());
    places[1] = found_in(attributes, buffers.object());
    if (!places[0] || !places[1] || !PyDict_Check(places[0].get()) || !PyDict_Check(places[1].get())) return;
    size = PyDict_GET_SIZE(places[0].get()) + PyDict_GET_SIZE(places[1].get());
  }
  template <class Body>
  void each(Body&& body) const {
    if (size == 0) return;
    Py_ssize_t index = 0;
    for (const Own& place : places) {
      PyObject *name = nullptr, *tensor = nullptr;
      for (Py_ssize_t at = 0; PyDict_Next(place.get(), &at, &name, &tensor);) body(index++, name, tensor);
    }
  }
  Own places[2];
  Py_ssize_t size = 0;
};

inline Own attributes_of_module(PyObject* module) { return own(PyObject_GenericGetDict(module, nullptr)); }

inline PyObject* wants_gradient(PyObject* tensor) {
  return THPVariable_Check(tensor) && THPVariable_Unpack(tensor).requires_grad() ? Py_True : Py_False;
}

inline bool has_its_modules(PyObject* kind, PyObject* attributes) {
  static Name modules("_modules");
  PyObject* ids = PyTuple_GET_ITEM(kind, 4);
  if (ids == Py_None) return true;
  Own children = found_in(attributes, modules.object());
  if (!children || !PyDict_Check(children.get())) return false;
  if (PyDict_GET_SIZE(children.get()) != PyTuple_GET_SIZE(ids)) return false;
  PyObject *name = nullptr, *child = nullptr;
  Py_ssize_t index = 0;
  for (Py_ssize_t at = 0; PyDict_Next(children.get(), &at, &name, &child);) {
    if (PyLong_AsVoidPtr(PyTuple_GET_ITEM(ids, index++)) != child) return false;
  }
  return true;
}

// Whether a module is alive, with the attributes and modules that it had when it was asked what to note.
inline bool is_of_kind(PyObject* kind, PyObject* module) {
  if (module == nullptr) return false;
  Own attributes = attributes_of_module(module);
  return has_its_attributes(kind, attributes.get()) && has_its_modules(kind, attributes.get());
}

// `settings.note`, of modules that are all of their kinds.
inline Own note(PyObject* kinds) {
  static Name training("training");
  Own noted = own(PyList_New(0));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(kinds); ++i) {
    PyObject *kind = PyList_GET_ITEM(kinds, i), *names = names_of(kind);
    Own module = target_of(PyTuple_GET_ITEM(kind, 0));
    if (!module) continue;
    Own attributes = attributes_of_module(module.get()), values = own(PyTuple_New(PyTuple_GET_SIZE(names)));
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(names); ++j) {
      Own value = found_in(attributes.get(), PyTuple_GET_ITEM(names, j));
      PyTuple_SET_ITEM(values.get(), j, noted_value(value ? value.get() : engine.ABSENT).release());
    }
    const TensorPlaces present(is_with_tensors(kind) ? attributes.get() : nullptr);
    Own of_tensors = own(PyTuple_New(present.size)), tensors = own(PyTuple_New(present.size)),
        wanted = own(PyTuple_New(present.size));
    present.each([&](Py_ssize_t index, PyObject* name, PyObject* tensor) {
      PyTuple_SET_ITEM(of_tensors.get(), index, new_reference(name));
      PyTuple_SET_ITEM(tensors.get(), index, new_reference(tensor));
      PyTuple_SET_ITEM(wanted.get(), index, new_reference(wants_gradient(tensor)));
    });
    Own in_training = training.of(module.get());
    Own one = own(PyTuple_Pack(7, module.get(), kind, in_training.get(), values.get(), of_tensors.get(), tensors.get(),
                               wanted.get()));
    must(PyList_Append(noted.get(), one.get()));
  }
  return noted;
}

inline bool is_same_plain(PyObject* now, PyObject* then) {
  if (now == then) return true;
  if (Py_TYPE(now) != Py_TYPE(then) || must(PyObject_RichCompareBool(now, then, Py_EQ)) == 0) return false;
  Own one = own(PyObject_Repr(now)), other = own(PyObject_Repr(then));  // 0.0 equals -0.0
  return must(PyObject_RichCompareBool(one.get(), other.get(), Py_EQ)) != 0;
}

inline bool is_set_to(PyObject* now, PyObject* then) {
  if (now == then || then == engine.UNKNOWN_SETTING) return true;
  if (Py_TYPE(now) != Py_TYPE(then) || !is_setting(now)) return false;
  if (!PyList_CheckExact(now) && !PyTuple_CheckExact(now)) return is_same_plain(now, then);
  if (PySequence_Fast_GET_SIZE(now) != PySequence_Fast_GET_SIZE(then)) return false;
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(now); ++i) {
    if (!is_same_plain(PySequence_Fast_GET_ITEM(now, i), PySequence_Fast_GET_ITEM(then, i))) return false;
  }
  return true;
}

// `settings.are`, and whether there is nothing to do for `settings.as_of`.
inline bool are_as_noted(PyObject* noted) {
  static Name training("training");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(noted); ++i) {
    PyObject *one = PyList_GET_ITEM(noted, i), *module = PyTuple_GET_ITEM(one, 0), *kind = PyTuple_GET_ITEM(one, 1);
    PyObject *names = names_of(kind), *values = PyTuple_GET_ITEM(one, 3), *of_tensors = PyTuple_GET_ITEM(one, 4);
    PyObject *tensors = PyTuple_GET_ITEM(one, 5), *wanted = PyTuple_GET_ITEM(one, 6);
    if (training.of(module).get() != PyTuple_GET_ITEM(one, 2)) return false;
    Own attributes = attributes_of_module(module);
    if (!has_its_attributes(kind, attributes.get()) || !has_its_modules(kind, attributes.get())) return false;
    for (Py_ssize_t j = 0; j < PyTuple_GET_SIZE(names); ++j) {
      Own now = found_in(attributes.get(), PyTuple_GET_ITEM(names, j));
      if (!is_set_to(now ? now.get() : engine.ABSENT, PyTuple_GET_ITEM(values, j))) return false;
    }
    if (PyTuple_GET_SIZE(of_tensors) == 0) continue;
    const TensorPlaces present(attributes.get());
    if (present.size != PyTuple_GET_SIZE(tensors)) return false;
    bool same = true;
    present.each([&](Py_ssize_t index, PyObject* name, PyObject* tensor) {
      same = same && name == PyTuple_GET_ITEM(of_tensors, index) && tensor == PyTuple_GET_ITEM(tensors, index) &&
             wants_gradient(tensor) == PyTuple_GET_ITEM(wanted, index);
    });
    if (!same) return false;
  }
  return true;
}

inline PyObject* note_settings(PyObject*, PyObject* kinds) {
  return guarded([&]() -> PyObject* {
    if (!PyList_CheckExact(kinds)) {
      PyErr_SetString(PyExc_TypeError, "note_settings takes what kinds_of returns");
      return nullptr;
    }
    return note(kinds).release();
  });
}

}  // namespace hot
