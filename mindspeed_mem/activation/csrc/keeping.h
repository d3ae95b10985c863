// saved_tensors.py: what autograd keeps where every storage has a record, since it may have to leave when memory runs
// out. What recomputed operators save, and what is looked at while it is counted or measured, is Python's.

#pragma once

#include "starts.h"

namespace hot {

// `SavedTensors._distance`
inline Own distance_of_record(Hooks* of, PyObject* one, PyObject* batch) {
  static Name in_force_name("_in_force"), of_produced("of_produced"), everything("everything"), slowly("_distance"),
      stays("stays");
  Own in_force = in_force_name.of(of->saved), known = of_produced.of(in_force.get());
  Own maker = own(PyTuple_Pack(2, record.layer.get(one), record.op.get(one)));
  PyObject* found = PyDict_GetItemWithError(known.get(), maker.get());
  if (found == nullptr && PyErr_Occurred()) throw python_error();
  if (found == nullptr || (found == Py_None && everything.is_true(in_force.get())) || stays.is_true(batch)) {
    PyObject* stack = position.stack.get(of->position);
    Own top = Own::of(must(PyList_GetItem(stack, PyList_GET_SIZE(stack) - 1)));
    return slowly.call(of->saved, record.layer.get(one), record.op.get(one), PyTuple_GET_ITEM(top.get(), 0),
                       PyTuple_GET_ITEM(top.get(), 1));
  }
  return Own::of(found);
}

// `MicroBatch.select`
inline void select(PyObject* mover, PyObject* batch, PyObject* one, PyObject* distance) {
  static Name staying("staying"), smallest("smallest"), slowly("select");
  if (record.nbytes.number(one) < smallest.number(staying.of(mover).get())) {
    slowly.call(batch, one, distance);
    return;
  }
  record.distance.set_borrowed(one, distance);
  record.state.set_borrowed(one, engine.DEVICE);
  must(PyList_Append(micro_batch.fresh.get(batch), reference_to(one).get()));
  if (record.number.number(one) < micro_batch.count.number(batch)) copy_fresh(batch);
}

// `SavedTensors._new_record` and `_make`; empty: the storage had moved, and is saved again.
inline Own record_of_new(Hooks* of, PyObject* batch, PyObject* storage, PyObject* marks, const at::Tensor& tensor) {
  static Name in_force("_in_force"), layers("num_layers"), known("known"), add("add"), record_name("record");
  Own owner = owner_in(batch, tensor);
  PyObject *layer = PyTuple_GET_ITEM(owner.get(), 0), *op = PyTuple_GET_ITEM(owner.get(), 1);
  Own maker = own(PyTuple_Pack(2, layer, op));
  const bool owned = number_of(layer) >= 0 && number_of(layer) < layers.number(in_force.of(of->saved).get());
  Own counted = enter_storage(marks, tensor, owned, maker.get());
  if (!counted) return Own();
  Own none = own(PyLong_FromLong(0));
  Own made = new_record(of->mover, batch, owner.get(), storage, counted.get(), tensor, none.get());
  record.state.set_borrowed(made.get(), engine.KEPT);
  Own all = known.of(of->mover);
  if (all.get() != Py_None) add.call(all.get(), made.get());
  record_name.set(marks, reference_to(made.get()).get());
  return made;
}

// `SavedTensors._keep`, outside of all that runs again; empty: it is out of the ordinary.
inline Own keep_on_record(Hooks* of, PyObject* tensor, PyObject* batch, bool by_function) {
  static Name every("every_record"), stays("stays"), is_static("static"), record_name("record"), by_name("made_by");
  if (batch == Py_None || is_watched(of) || !THPVariable_Check(tensor) || !every.is_true(of->saved) ||
      has_several_streams(of->mover) || !on_home_stream(of, batch)) {
    return Own();
  }
  const at::Tensor& given = THPVariable_Unpack(tensor);
  if (!fast_tensors::is_plain(tensor, of->device_type)) {  // weights, and what is on another device
    return fast_tensors::is_tensor(tensor) || stays_itself(given) ? native_handle(tensor) : Own();
  }
  if (by_function && (stays_itself(given) || told_to_stay(tensor))) return Own();
  Own storage = storage_of(given), attributes = attributes_of(storage.get());
  Own marks = Own::of(marks_in(attributes.get()));
  Own number = Own::of(micro_batch.count.get(batch)), one;
  if (marks) {
    if (stays.is_true(marks.get())) return new_handle(tensor, Py_None, batch, number.get());
    if (is_static.is_true(marks.get()) || by_name.of(marks.get()).get() != Py_None) return Own();
    Own reference = record_name.of(marks.get());
    if (reference.get() != Py_None) one = target_of(reference.get());
  } else {
    marks = new_marks(attributes.get());
  }
  if (!one) {
    if (given.storage().nbytes() == 0) return Own();
    one = record_of_new(of, batch, storage.get(), marks.get(), given);
    if (!one) return Own();
  } else if (Py_TYPE(one.get()) != engine.Record || record.micro_batch.get(one.get()) != batch ||
             record.way_back.get(one.get()) != of->mover ||
             !holds(record.version.get(one.get()), record.base.get(one.get()), given)) {
    return Own();
  }
  Own kept = handle_of(tensor, one.get(), batch, number.get());
  PyObject* state = record.state.get(one.get());
  if (state == engine.KEPT) {
    constexpr long long kStays = -1;  // records.STAYS
    if (record.distance.number(one.get()) != kStays) {
      Own distance = distance_of_record(of, one.get(), batch);
      if (distance.get() != Py_None) select(of->mover, batch, one.get(), distance.get());
    }
  } else if (state == engine.HOST || state == engine.LOADED) {
    let_go(kept.get());
  }
  return kept;
}

}  // namespace hot
