// rerun/module_rerun.py: what a second run saves and returns takes the place of what the first one did.

#pragma once

#include "starts.h"

#include <algorithm>

namespace hot {

inline Slot remaining{"_remaining"}, filled{"_filled"};
inline PyObject* enough = nullptr;

// The same storage, made again: whether `one`, a `Made`, is what `tensor` is now, laid out as `layout` says.
inline bool fill(PyObject* self, PyObject* one, PyObject* layout, const at::Tensor& tensor) {
  Own found = layout_of(tensor);
  if (!same(found.get(), layout) ||
      static_cast<long long>(tensor.storage().nbytes()) != made.nbytes.number(one)) {
    return false;
  }
  made.tensor.set(one, same(layout, made.layout.get(one))
                           ? alias_of(tensor)
                           : own(THPVariable_Wrap(laid_out(tensor.storage(), made.layout.get(one)))));
  made.version.set_number(one, THPVariable_Unpack(made.tensor.get(one))._version());
  made.state.set_borrowed(one, engine.REMADE);
  enter_copy(tensor, made.nbytes.get(one), true, rerun.owner.get(self));
  if (!made.attributes.is_none(one)) {
    Own storage = storage_of(tensor), attributes = attributes_of(storage.get());
    must(PyDict_Update(attributes.get(), made.attributes.get(one)));
  }
  return true;
}

// `Rerun.fill`
inline void fill_record(PyObject* self, PyObject* of, PyObject* given) {
  static Name slowly("fill_slowly"), mark("mark"), saves("saves");
  if (Py_TYPE(of) != engine.Record || !fast_tensors::is_tensor(given)) {
    slowly.call(self, of, given);
    return;
  }
  PyObject* mover = rerun.mover.get(self);
  const at::Tensor& tensor = THPVariable_Unpack(given);
  record.buffer.set(of, alias_of(tensor));
  record.state.set_borrowed(of, engine.REMADE);
  record.version.set_number(of, tensor._version());
  Own base = own(THPVariable_Wrap(base_of(tensor)));
  record.base.set(of, reference_to(base.get()));
  Own nbytes = own(PyLong_FromUnsignedLongLong(tensor.storage().nbytes()));
  enter_copy(tensor, nbytes.get(), record.layer.number(of) >= 0, owner_of(of).get());
  if (!record.attributes.is_none(of)) mark.call(of, storage_of(tensor).get());
  if (has_several_streams(mover) || !is_home(mover, record.micro_batch.get(of))) {
    saves.call(mover, of, given, Py_True);
  }
}

inline PyObject* rerun_fills(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    takes(count, 2, "fill takes a record and a tensor");
    fill_record(self, args[0], args[1]);
    return new_reference(Py_None);
  });
}

// `ModuleRerun._fill`; `layout`: as which it lies there, or None.
inline void fill_wanted(PyObject* self, PyObject* of, PyObject* tensor, PyObject* layout) {
  static Name slowly("_fill_slowly");
  bool usual = Py_TYPE(of) == engine.Record && fast_tensors::is_tensor(tensor);
  Own storage;
  if (usual) {
    storage = storage_of(THPVariable_Unpack(tensor));
    PyObject* before = filled.get(self);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(before); ++i) {
      usual = usual && target_of(PyTuple_GET_ITEM(PyList_GET_ITEM(before, i), 0)).get() != storage.get();
    }
  }
  if (!usual) {
    slowly.call(self, of, tensor, layout);
    return;
  }
  remaining.set_number(self, remaining.number(self) - 1);
  Own now = reference_to(storage.get()), both = own(PyTuple_Pack(2, now.get(), record.storage.get(of)));
  must(PyList_Append(filled.get(self), both.get()));
  fill_record(self, of, tensor);
}

inline PyObject* module_rerun_fills(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 2 && count != 3) {
      PyErr_SetString(PyExc_TypeError, "_fill takes a record, a tensor and perhaps a layout");
      return nullptr;
    }
    fill_wanted(self, args[0], args[1], count == 3 ? args[2] : Py_None);
    return new_reference(Py_None);
  });
}

// `ModuleRerun._refill_outputs`
inline void refill_outputs(PyObject* self, PyObject* result) {
  static Name slowly("_refill_outputs");
  Own outputs = Own::of(module_rerun.outputs.get(self)), tensors = own(PyList_New(0));
  collect(result, tensors.get());
  const Py_ssize_t count = std::min(PyList_GET_SIZE(outputs.get()), PyList_GET_SIZE(tensors.get()));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (fast_tensors::is_tensor(PyList_GET_ITEM(tensors.get(), i))) continue;
    slowly.call(self, result);  // of a DTensor it takes a part
    return;
  }
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* reference = PyList_GET_ITEM(outputs.get(), i);
    Own one = reference == Py_None ? Own() : target_of(reference);
    if (one && record.state.get(one.get()) == engine.DROPPED) {
      fill_wanted(self, one.get(), PyList_GET_ITEM(tensors.get(), i), Py_None);
    }
  }
}

// Whether a record is what `tensor` is now, laid out as `layout` says: it has been made again.
inline bool refill_record(PyObject* self, PyObject* of, PyObject* layout, PyObject* tensor) {
  const at::Tensor& found = THPVariable_Unpack(tensor);
  if (!same(layout_of(found).get(), layout) ||
      static_cast<long long>(found.storage().nbytes()) != record.nbytes.number(of)) {
    return false;
  }
  fill_wanted(self, of, tensor, layout);
  return true;
}

// A `Made`, in the same way
inline bool refill_made(PyObject* self, PyObject* of, PyObject* layout, PyObject* tensor) {
  PyObject* mover = rerun.mover.get(self);
  if (has_several_streams(mover) || !is_home(mover, made.micro_batch.get(of)) ||
      !fill(self, of, layout, THPVariable_Unpack(tensor))) {
    return false;
  }
  remaining.set_number(self, remaining.number(self) - 1);
  return true;
}

// `ModuleRerun.refill`
inline PyObject* refill(PyObject* self, PyObject* tensor) {
  return guarded([&]() -> PyObject* {
    static Name slowly("refill_slowly");
    PyObject* first = rerun.saved.get(self);
    PyObject* slots = saves.slots.get(first);
    const long long index = saves.again.number(first);
    if (index < PyList_GET_SIZE(slots)) {
      PyObject* entry = PyList_GET_ITEM(slots, index);
      Own wanted = entry == Py_None ? Own() : target_of(PyTuple_GET_ITEM(entry, 0));
      const bool is_made = wanted && Py_TYPE(wanted.get()) == engine.Made;
      if (!wanted || (is_made ? made.state : record.state).get(wanted.get()) != engine.DROPPED) {
        saves.again.set_number(first, index + 1);
        return new_reference(Py_None);
      }
      if (fast_tensors::is_tensor(tensor) && THPVariable_Unpack(tensor).layout() == c10::kStrided &&
          (is_made ? refill_made : refill_record)(self, wanted.get(), PyTuple_GET_ITEM(entry, 1), tensor)) {
        saves.again.set_number(first, index + 1);
        if (remaining.number(self) != 0) return new_reference(Py_None);
        PyErr_SetNone(enough);
        return nullptr;
      }
    }
    return slowly.call(self, tensor).release();
  });
}

// `ModuleRerun.enters_again`: what an operator takes is there before it runs.
inline void enter_again(PyObject* self, PyObject* path, PyObject* args, PyObject* kwargs) {
  static Name is_there("_is_there");
  PyObject* first_run = rerun.saved.get(self);
  PyObject* entries = saves.entries.get(first_run);
  if (PyDict_GET_SIZE(entries) == 0 || !module_rerun.untried.is_none(self)) return;
  Own number = Own::of(module_rerun.entered_again.get(self));
  const long long at = number_of(number.get());
  module_rerun.entered_again.set_number(self, at + 1);
  Own wanted = Own::of(PyDict_GetItemWithError(entries, number.get()));
  if (!wanted) {
    if (PyErr_Occurred()) throw python_error();
    return;
  }
  if (!same(PyList_GET_ITEM(saves.entered.get(first_run), at), path)) return;
  Own given = own(PyTuple_Pack(2, args, kwargs)), tensors = own(PyList_New(0));
  collect(given.get(), tensors.get());
  PyObject* mover = rerun.mover.get(self);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(wanted.get()); ++i) {
    PyObject* entry = PyList_GET_ITEM(wanted.get(), i);
    const long long position = number_of(PyTuple_GET_ITEM(entry, 0)), first = number_of(PyTuple_GET_ITEM(entry, 1));
    Own tensor = own(PySequence_GetItem(tensors.get(), position));
    PyObject* slot = PyList_GET_ITEM(saves.slots.get(first_run), first);
    Own one = slot == Py_None ? Own() : target_of(PyTuple_GET_ITEM(slot, 0));
    if (!one) continue;
    if (Py_TYPE(one.get()) == engine.Made && fast_tensors::is_tensor(tensor.get()) && !has_several_streams(mover) &&
        is_home(mover, made.micro_batch.get(one.get()))) {
      if (made.state.get(one.get()) != engine.DROPPED) continue;
      const at::Tensor& taken = THPVariable_Unpack(tensor.get());
      if (taken.layout() == c10::kStrided && fill(self, one.get(), layout_of(taken).get(), taken)) {
        remaining.set_number(self, remaining.number(self) - 1);
        continue;
      }
    }
    is_there.call(self, PyTuple_GET_ITEM(entry, 1), tensor.get());
  }
  if (remaining.number(self) == 0) {
    PyErr_SetNone(enough);
    throw python_error();
  }
}

// ModuleRerun.enters_again(path, args, kwargs)
inline PyObject* module_rerun_enters_again(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    takes(count, 3, "enters_again takes a path, arguments and keywords");
    enter_again(self, args[0], args[1], args[2]);
    return new_reference(Py_None);
  });
}

}  // namespace hot
