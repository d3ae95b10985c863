// saved_tensors.py and rerun/module_rerun.py: what a recomputed operator starts from, what it returns, and how its
// second run makes that again. What is out of the ordinary goes on in Python.

#pragma once

#include "operators.h"
#include "saves.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function.h>

namespace hot {

inline PyObject* no_owner = nullptr;  // `micro_batch.NO_OWNER`
inline Slot filled{"_filled"};        // of a `ModuleRerun`

// `MicroBatch.owner_of`
inline Own owner_in(PyObject* batch, const at::Tensor& tensor) {
  const at::Tensor base = base_of(tensor);
  const auto node = base.grad_fn();
  PyObject* running = micro_batch.running.get(batch);
  if (!node) {
    return Own::of(base.requires_grad() ? no_owner : must(PyList_GetItem(running, PyList_GET_SIZE(running) - 1)));
  }
  const auto made = static_cast<long long>(node->sequence_nr());
  PyObject* bounds = micro_batch.bounds.get(batch);
  Py_ssize_t low = 0, high = PyList_GET_SIZE(bounds);
  while (low < high) {
    const Py_ssize_t middle = (low + high) / 2;
    if (made < number_of(PyList_GET_ITEM(bounds, middle))) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  return Own::of(low > 0 ? must(PyList_GetItem(running, low - 1)) : no_owner);
}

// `SavedTensors.hold`; empty: Python is to look at it.
inline Own hold(PyObject* self, PyObject* tensor) {
  static Name where_name("_position"), type("_device_type"), in_force_name("_in_force"), plan_name("plan"),
      moves("swap_recompute_inputs"), every("every_record"), stays("stays"), is_static("static"),
      record_name("record"), made_by_name("made_by"), decision("decision"), activations("activations"),
      layers("num_layers");
  Own where = where_name.of(self);
  if (!position.watch.is_none(where.get()) || !fast_tensors::is_plain(tensor, device_type(type.of(self)))) return Own();
  const at::Tensor& given = THPVariable_Unpack(tensor);
  Own storage = storage_of(given), attributes = attributes_of(storage.get());
  Own marks = Own::of(marks_in(attributes.get()));
  if (!marks) marks = new_marks(attributes.get());
  if (stays.is_true(marks.get()) || is_static.is_true(marks.get())) return plain_handle(given);
  PyObject* batch = position.micro_batch.get(where.get());
  Own in_force = in_force_name.of(self), plan = plan_name.of(in_force.get());
  if (batch == Py_None || plan.get() == Py_None || given.storage().nbytes() == 0 ||
      record_name.of(marks.get()).get() != Py_None || made_by_name.of(marks.get()).get() != Py_None ||
      every.is_true(self) || (moves.is_true(plan.get()) && !stays.is_true(batch))) {
    return Own();
  }
  Own owner = owner_in(batch, given);
  PyObject *layer = PyTuple_GET_ITEM(owner.get(), 0), *op = PyTuple_GET_ITEM(owner.get(), 1);
  Own swap = decision.call(in_force.get(), layer, op);
  if (swap.get() != Py_None) {
    Own moved = activations.of(swap.get());
    if (!PyUnicode_Check(moved.get()) || PyUnicode_CompareWithASCIIString(moved.get(), "saved") != 0) return Own();
  }
  Own maker = own(PyTuple_Pack(2, layer, op));
  const bool owned = number_of(layer) >= 0 && number_of(layer) < layers.number(in_force.get());
  if (!enter_storage(marks.get(), given, owned, maker.get())) return Own();
  keep_here(marks.get());
  return plain_handle(given);
}

inline PyObject* saved_tensors_holds(PyObject* self, PyObject* tensor) {
  return guarded([&] {
    static Name slowly("hold_slowly");
    Own held = hold(self, tensor);
    return (held ? std::move(held) : slowly.call(self, tensor)).release();
  });
}

// ModuleRerun._returns_one(index, tensor, micro_batch)
inline PyObject* module_rerun_returns_one(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    static Name slowly("_returns_one_slowly"), is_static("static"), stays("stays"), record_name("record"),
        made_by_name("made_by");
    takes(count, 3, "_returns_one takes an index, a tensor and a micro-batch");
    PyObject *index = args[0], *batch = args[2];
    if (!fast_tensors::is_tensor(args[1])) return slowly.call(self, index, args[1], batch).release();
    const at::Tensor& leaf = THPVariable_Unpack(args[1]);
    if (leaf.layout() != c10::kStrided) return new_reference(Py_None);
    const at::Tensor base = base_of(leaf);
    if (base.grad_fn()) {
      Own owner = owner_in(batch, leaf);
      if (number_of(PyTuple_GET_ITEM(owner.get(), 2)) < module_rerun.number.number(self)) return new_reference(Py_None);
    }
    Own storage = storage_of(leaf), attributes = attributes_of(storage.get());
    Own marks = Own::of(marks_in(attributes.get()));
    if (marks) {
      if (is_static.is_true(marks.get()) || stays.is_true(marks.get())) return new_reference(Py_None);
      Own reference = record_name.of(marks.get());
      Own known = reference.get() == Py_None ? Own() : target_of(reference.get());
      if (known && holds(record.version.get(known.get()), record.base.get(known.get()), leaf)) {
        return new_reference(Py_None);
      }
    } else {
      marks = new_marks(attributes.get());
    }
    Own by = make(engine.MadeBy), python_base = own(THPVariable_Wrap(base));
    made_by.rerun.set_borrowed(by.get(), self);
    made_by.slot.set_borrowed(by.get(), index);
    made_by.version.set_number(by.get(), leaf._version());
    made_by.base.set(by.get(), reference_to(python_base.get()));
    made_by_name.set(marks.get(), by.get());
    return new_reference(Py_None);
  });
}

// ModuleRerun._fill(record, tensor, layout=None)
inline PyObject* module_rerun_fills(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    static Name slowly("_fill_slowly");
    if (count != 2 && count != 3) {
      PyErr_SetString(PyExc_TypeError, "_fill takes a record, a tensor and perhaps a layout");
      return nullptr;
    }
    PyObject *of = args[0], *tensor = args[1];
    bool usual = Py_TYPE(of) == engine.Record && fast_tensors::is_tensor(tensor);
    Own storage;
    if (usual) {
      storage = storage_of(THPVariable_Unpack(tensor));
      PyObject* before = filled.get(self);
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(before); ++i) {
        usual = usual && target_of(PyList_GET_ITEM(before, i)).get() != storage.get();
      }
    }
    if (!usual) return slowly.call(self, of, tensor, count == 3 ? args[2] : Py_None).release();
    remaining.set_number(self, remaining.number(self) - 1);
    must(PyList_Append(filled.get(self), reference_to(storage.get()).get()));
    static Name fill("fill");
    return fill.call(self, of, tensor).release();
  });
}

// empty_all(leaves): `module_rerun._empty`
inline PyObject* empty_all(PyObject*, PyObject* leaves) {
  return guarded([&] {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leaves); ++i) {
      const at::Tensor& leaf = THPVariable_Unpack(PyList_GET_ITEM(leaves, i));
      const bool strided = leaf.layout() == c10::kStrided;
      leaf.set_data(strided ? nothing_like(leaf) : at::empty({0}, leaf.options()));
    }
    return new_reference(Py_None);
  });
}

// has_managed(given): whether a tensor among these is of memory that somebody else empties or writes over.
inline PyObject* has_managed(PyObject*, PyObject* given) {
  return guarded([&] {
    static Name managed("managed");
    Own tensors = own(PyList_New(0));
    collect(given, tensors.get());
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.get()); ++i) {
      const at::Tensor& one = THPVariable_Unpack(PyList_GET_ITEM(tensors.get(), i));
      if (one.layout() != c10::kStrided || !one.has_storage()) continue;
      Own storage = storage_of(one), attributes = attributes_of(storage.get());
      PyObject* marks = marks_in(attributes.get());
      if (marks != nullptr && managed.is_true(Own::of(marks).get())) return new_reference(Py_True);
    }
    return new_reference(Py_False);
  });
}

// autocast_now(kinds): `module_rerun._autocast_now`, of these types of devices.
inline PyObject* autocast_now(PyObject*, PyObject* kinds) {
  return guarded([&] {
    const Py_ssize_t count = PyTuple_GET_SIZE(kinds);
    Own found = own(PyList_New(count));
    PyObject* keeps = at::autocast::is_autocast_cache_enabled() ? Py_True : Py_False;
    for (Py_ssize_t i = 0; i < count; ++i) {
      PyObject* kind = PyTuple_GET_ITEM(kinds, i);
      const char* text = PyUnicode_AsUTF8(kind);
      if (text == nullptr) throw python_error();
      const c10::DeviceType type = c10::Device(text).type();
      PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(at::autocast::get_autocast_dtype(type)));
      PyObject* enabled = at::autocast::is_autocast_enabled(type) ? Py_True : Py_False;
      PyList_SET_ITEM(found.get(), i, must(PyTuple_Pack(4, kind, dtype, enabled, keeps)));
    }
    return found.release();
  });
}

}  // namespace hot
