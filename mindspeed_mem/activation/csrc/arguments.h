// rerun/arguments.py: nested arguments taken apart into their tensors and the rest, and put together again.

#pragma once

#include "objects.h"

namespace hot {

inline PyObject* slot_type = nullptr;  // `arguments.Slot`

inline bool is_named_tuple(PyObject* value) {
  static Name fields("_fields");
  return PyTuple_Check(value) && must(PyObject_HasAttr(value, fields.object()) ? 1 : 0) == 1;
}

// As deep as Python goes.
class Deeper {
 public:
  Deeper() {
    if (Py_EnterRecursiveCall(" in nested arguments") != 0) throw python_error();
  }
  ~Deeper() { Py_LeaveRecursiveCall(); }
  Deeper(const Deeper&) = delete;
};

inline void collect(PyObject* value, PyObject* into) {
  const Deeper one;
  if (THPVariable_Check(value)) {
    must(PyList_Append(into, value));
  } else if (PyTuple_Check(value)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(value); ++i) collect(PyTuple_GET_ITEM(value, i), into);
  } else if (PyList_Check(value)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) collect(PyList_GET_ITEM(value, i), into);
  } else if (PyDict_CheckExact(value)) {
    PyObject *key = nullptr, *item = nullptr;
    Py_ssize_t at = 0;
    while (PyDict_Next(value, &at, &key, &item)) collect(item, into);
  }
}

// tensors_in(value)
inline PyObject* tensors_in(PyObject*, PyObject* value) {
  return guarded([&] {
    Own found = own(PyList_New(0));
    collect(value, found.get());
    return found.release();
  });
}

// A copy of `value` in which `leaf(one)` (empty: it stays) is in the place of what is no container.
template <class Leaf>
Own copied(PyObject* value, Leaf&& leaf) {
  const Deeper one;
  if (Own found = leaf(value)) return found;
  if (PyTuple_CheckExact(value) || is_named_tuple(value)) {
    const Py_ssize_t count = PyTuple_GET_SIZE(value);
    Own made = own(PyTuple_New(count));
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyTuple_SET_ITEM(made.get(), i, copied(PyTuple_GET_ITEM(value, i), leaf).release());
    }
    if (PyTuple_CheckExact(value)) return made;
    return own(PyObject_Call(reinterpret_cast<PyObject*>(Py_TYPE(value)), made.get(), nullptr));
  }
  if (PyList_CheckExact(value)) {
    Own made = own(PyList_New(0));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(value); ++i) {
      Own item = Own::of(PyList_GET_ITEM(value, i)), other = copied(item.get(), leaf);
      must(PyList_Append(made.get(), other.get()));
    }
    return made;
  }
  if (PyDict_CheckExact(value)) {
    Own made = own(PyDict_New()), given = own(PyDict_Copy(value));
    PyObject *key = nullptr, *item = nullptr;
    Py_ssize_t at = 0;
    while (PyDict_Next(given.get(), &at, &key, &item)) {
      Own other = copied(item, leaf);
      must(PyDict_SetItem(made.get(), key, other.get()));
    }
    return made;
  }
  return Own::of(value);
}

// split(value, take, taken)
inline PyObject* split(PyObject*, PyObject* const* args, Py_ssize_t) {
  return guarded([&] {
    PyObject *take = args[1], *taken = args[2];
    return copied(args[0], [&](PyObject* one) {
             if (!THPVariable_Check(one)) return Own();
             Own found = call(take, one);
             if (found.get() == Py_None) return Own::of(one);
             if (reinterpret_cast<PyObject*>(Py_TYPE(found.get())) == slot_type) return found;
             must(PyList_Append(taken, found.get()));
             Own number = own(PyLong_FromSsize_t(PyList_GET_SIZE(taken) - 1));
             return call(slot_type, number.get());
           })
        .release();
  });
}

inline Own joined(PyObject* value, PyObject* tensors) {
  return copied(value, [&](PyObject* one) {
    if (reinterpret_cast<PyObject*>(Py_TYPE(one)) != slot_type) return Own();
    return own(PyObject_GetItem(tensors, PyTuple_GET_ITEM(one, 0)));
  });
}

// join(value, tensors)
inline PyObject* join(PyObject*, PyObject* const* args, Py_ssize_t) {
  return guarded([&] { return joined(args[0], args[1]).release(); });
}

}  // namespace hot
