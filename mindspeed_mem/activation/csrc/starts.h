// saved_tensors.py and rerun/module_rerun.py: what a recomputed operator starts from, what it returns, and how its
// second run makes that again. What is out of the ordinary goes on in Python.

#pragma once

#include "operators.h"
#include "saves.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <cstring>
#include <typeinfo>

namespace hot {

inline PyObject *no_owner = nullptr, *passed_on = nullptr;  // `micro_batch.NO_OWNER`, `PASSED_ON`

// Whether it is the node of a custom function. Torch does not export their type.
inline bool of_a_function(const torch::autograd::Node& node) {
  return std::strstr(typeid(node).name(), "autograd6PyNode") != nullptr;
}

// Whether it is the node of an alias of what an operator takes or returns.
inline bool is_passed_on(const torch::autograd::Node& node) {
  if (PyList_GET_SIZE(passed_on) == 0 || !of_a_function(node)) return false;
  return must(PySequence_Contains(passed_on, own(PyUnicode_FromString(node.name().c_str())).get())) != 0;
}

// `MicroBatch.owner_of`
inline Own owner_in(PyObject* batch, const at::Tensor& tensor) {
  const at::Tensor base = base_of(tensor);
  auto node = base.grad_fn();
  PyObject* running = micro_batch.running.get(batch);
  if (!node) {
    return Own::of(base.requires_grad() ? no_owner : must(PyList_GetItem(running, PyList_GET_SIZE(running) - 1)));
  }
  while (is_passed_on(*node)) {
    auto below = node->num_outputs() > 0 ? node->next_edge(0).function : nullptr;
    if (!below || dynamic_cast<torch::autograd::AccumulateGrad*>(below.get())) return Own::of(no_owner);  // a leaf
    node = std::move(below);
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

// `SavedTensors._make`, of a `SavedTensors`; empty: the storage had moved, and is saved again.
inline Own record_of_new(PyObject* self, PyObject* mover, PyObject* batch, PyObject* owner, PyObject* storage,
                         PyObject* marks, const at::Tensor& tensor) {
  static Name in_force("_in_force"), layers("num_layers"), add("add"), record_name("record");
  PyObject *layer = PyTuple_GET_ITEM(owner, 0), *op = PyTuple_GET_ITEM(owner, 1);
  Own maker = own(PyTuple_Pack(2, layer, op)), distance = own(PyLong_FromLong(0));
  const bool owned = number_of(layer) >= 0 && number_of(layer) < layers.number(in_force.of(self).get());
  Own counted = enter_storage(marks, tensor, owned, maker.get());
  if (!counted) return Own();
  Own made = new_record(mover, batch, owner, storage, counted.get(), tensor, distance.get());
  record.state.set_borrowed(made.get(), engine.KEPT);
  Own all = Own::of(mover_slots.known.get(mover));
  if (all.get() != Py_None) add.call(all.get(), made.get());
  record_name.set(marks, reference_to(made.get()).get());
  return made;
}

// `SavedTensors._hold_here`, where every storage has a record; empty: Python is to look at it.
inline Own hold_on_record(PyObject* self, PyObject* batch, PyObject* owner, PyObject* storage, PyObject* marks,
                          const at::Tensor& given) {
  static Name mover_name("_mover");
  Own mover = mover_name.of(self);
  if (has_several_streams(mover.get()) || !is_home(mover.get(), batch)) return Own();
  Own made = record_of_new(self, mover.get(), batch, owner, storage, marks, given);
  if (!made) return Own();
  record.distance.set_number(made.get(), STAYS);
  Own held = plain_handle(given);
  handle.record.set_borrowed(held.get(), made.get());
  must(PyList_Append(record.handles.get(made.get()), reference_to(held.get()).get()));
  return held;
}

// `PlanInForce.decision`
inline Own decision_on(PyObject* in_force, PyObject* layer, PyObject* op) {
  static Name known("_decisions"), slowly("decision");
  Own decisions = known.of(in_force), key = own(PyTuple_Pack(2, layer, op));
  Own found = found_in(decisions.get(), key.get());
  return found ? std::move(found) : slowly.call(in_force, layer, op);
}

// `SavedTensors.hold`; empty: Python is to look at it.
inline Own hold(PyObject* self, PyObject* tensor) {
  static Name where_name("_position"), type("_device_type"), in_force_name("_in_force"), plan_name("plan"),
      moves("swap_recompute_inputs"), every("every_record"), stays("stays"), is_static("static"),
      record_name("record"), made_by_name("made_by"), activations("activations"),
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
      (moves.is_true(plan.get()) && !stays.is_true(batch))) {
    return Own();
  }
  Own owner = owner_in(batch, given);
  PyObject *layer = PyTuple_GET_ITEM(owner.get(), 0), *op = PyTuple_GET_ITEM(owner.get(), 1);
  Own swap = decision_on(in_force.get(), layer, op);
  if (swap.get() != Py_None) {
    Own moved = activations.of(swap.get());
    if (!PyUnicode_Check(moved.get()) || PyUnicode_CompareWithASCIIString(moved.get(), "saved") != 0) return Own();
  }
  if (every.is_true(self)) return hold_on_record(self, batch, owner.get(), storage.get(), marks.get(), given);
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

// Whether an operator of this number, or one inside it, has made a tensor: `ModuleRerun.made`.
inline bool is_made_in(PyObject* rerunning, PyObject* owner) {
  return number_of(PyTuple_GET_ITEM(owner, 2)) >= module_rerun.number.number(rerunning);
}

// `ModuleRerun._returns_one`
inline void returns_one(PyObject* self, PyObject* index, PyObject* tensor, PyObject* batch) {
  static Name slowly("_returns_one_slowly"), is_static("static"), stays("stays"), record_name("record"),
      made_by_name("made_by");
  if (!fast_tensors::is_tensor(tensor)) {
    slowly.call(self, index, tensor, batch);
    return;
  }
  const at::Tensor& leaf = THPVariable_Unpack(tensor);
  if (leaf.layout() != c10::kStrided || leaf.is_nested() || leaf.is_inference()) return;
  const at::Tensor base = base_of(leaf);
  if (base.grad_fn() && !is_made_in(self, owner_in(batch, leaf).get())) return;
  Own python_base = own(THPVariable_Wrap(base));
  if (!fast_tensors::is_tensor(python_base.get())) {
    slowly.call(self, index, tensor, batch);
    return;
  }
  Own storage = storage_of(leaf), attributes = attributes_of(storage.get());
  Own marks = Own::of(marks_in(attributes.get()));
  if (marks) {
    if (is_static.is_true(marks.get()) || stays.is_true(marks.get())) return;
    Own reference = record_name.of(marks.get());
    Own known = reference.get() == Py_None ? Own() : target_of(reference.get());
    if (known && holds(record.version.get(known.get()), record.base.get(known.get()), leaf)) return;
  } else {
    marks = new_marks(attributes.get());
  }
  Own by = make(engine.MadeBy);
  made_by.rerun.set_borrowed(by.get(), self);
  made_by.slot.set_borrowed(by.get(), index);
  made_by.version.set_number(by.get(), leaf._version());
  made_by.base.set(by.get(), reference_to(python_base.get()));
  made_by_name.set(marks.get(), by.get());
}

// ModuleRerun._returns_one(index, tensor, micro_batch)
inline PyObject* module_rerun_returns_one(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    takes(count, 3, "_returns_one takes an index, a tensor and a micro-batch");
    returns_one(self, args[0], args[1], args[2]);
    return new_reference(Py_None);
  });
}

// SecondRuns.stays(result): what a layer returns stays.
inline PyObject* second_runs_stays(PyObject* self, PyObject* result) {
  return guarded([&] {
    static Name slowly("stays_slowly"), by_name("made_by"), stays("stays");
    Own tensors = own(PyList_New(0));
    collect(result, tensors.get());
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.get()); ++i) {
      PyObject* tensor = PyList_GET_ITEM(tensors.get(), i);
      if (!fast_tensors::is_tensor(tensor)) return slowly.call(self, result).release();  // it may be a DTensor
      const at::Tensor& leaf = THPVariable_Unpack(tensor);
      if (leaf.layout() != c10::kStrided) continue;
      Own storage = storage_of(leaf), attributes = attributes_of(storage.get());
      Own marks = Own::of(marks_in(attributes.get()));
      if (!marks) continue;
      Own by = by_name.of(marks.get());
      if (by.get() == Py_None) continue;
      stays.call(made_by.rerun.get(by.get()), made_by.slot.get(by.get()));
      by_name.set(marks.get(), Py_None);
    }
    return new_reference(Py_None);
  });
}

// empty_all(leaves): `module_rerun._empty`
inline PyObject* empty_all(PyObject*, PyObject* leaves) {
  return guarded([&] {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(leaves); ++i) {
      const at::Tensor& leaf = THPVariable_Unpack(PyList_GET_ITEM(leaves, i));
      if (leaf.is_inference() || leaf.is_nested()) continue;  // in no graph, and what has no empty kind
      if (leaf.layout() == c10::kStrided) {
        leaf.set_data(nothing_like(leaf));
      } else if (leaf.layout() == c10::kSparse) {
        leaf.set_data(at::empty({0}, leaf.options()));
      }
    }
    return new_reference(Py_None);
  });
}

// Whether one of these tensors is of memory that somebody else empties or writes over.
inline bool are_managed(PyObject* tensors) {
  static Name managed("managed");
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    const at::Tensor& one = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
    if (one.layout() != c10::kStrided || !one.has_storage()) continue;
    Own storage = storage_of(one), attributes = attributes_of(storage.get());
    Own marks = Own::of(marks_in(attributes.get()));
    if (marks && managed.is_true(marks.get())) return true;
  }
  return false;
}

// has_managed(given): whether a tensor among these is.
inline PyObject* has_managed(PyObject*, PyObject* given) {
  return guarded([&] {
    Own tensors = own(PyList_New(0));
    collect(given, tensors.get());
    return new_reference(are_managed(tensors.get()) ? Py_True : Py_False);
  });
}

// `module_rerun._autocast_now`
inline Own autocast_of_now() {
  Own kinds = call(engine.autocast_kinds);
  const Py_ssize_t count = PyTuple_GET_SIZE(kinds.get());
  Own found = own(PyList_New(count));
  PyObject* keeps = at::autocast::is_autocast_cache_enabled() ? Py_True : Py_False;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* kind = PyTuple_GET_ITEM(kinds.get(), i);
    const char* text = PyUnicode_AsUTF8(kind);
    if (text == nullptr) throw python_error();
    const c10::DeviceType type = c10::Device(text).type();
    PyObject* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(at::autocast::get_autocast_dtype(type)));
    PyObject* enabled = at::autocast::is_autocast_enabled(type) ? Py_True : Py_False;
    PyList_SET_ITEM(found.get(), i, must(PyTuple_Pack(4, kind, dtype, enabled, keeps)));
  }
  return found;
}

inline PyObject* autocast_now(PyObject*, PyObject*) {
  return guarded([] { return autocast_of_now().release(); });
}

}  // namespace hot
