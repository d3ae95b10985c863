// saved_tensors.py: what autograd keeps where a storage has a record, since it may have to leave when memory runs out,
// or an operator that runs again has made it. What is looked at while it is counted or measured is Python's.

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
  static Name smallest("smallest"), slowly("select");
  if (record.nbytes.number(one) < smallest.number(mover_slots.staying.get(mover))) {
    slowly.call(batch, one, distance);
    return;
  }
  record.distance.set_borrowed(one, distance);
  record.state.set_borrowed(one, engine.DEVICE);
  must(PyList_Append(micro_batch.fresh.get(batch), reference_to(one).get()));
  if (record.number.number(one) < micro_batch.count.number(batch)) copy_fresh(batch);
}

// What another operator saves of which a recomputed one can make it again, as `SavedTensors._keep_plain` keeps it;
// empty: it is out of the ordinary.
inline Own keep_remade(Hooks* of, PyObject* tensor, PyObject* batch, bool by_function) {
  static Name by_name("made_by"), record_name("record"), stays("stays");
  if (batch == Py_None || is_watched(of) || has_several_streams(of->mover) || !on_home_stream(of, batch)) return Own();
  if (!fast_tensors::is_plain(tensor, of->device_type)) return Own();
  const at::Tensor& given = THPVariable_Unpack(tensor);
  if (by_function && (stays_itself(given) || told_to_stay(tensor))) return Own();
  Own storage = storage_of(given), attributes = attributes_of(storage.get());
  Own marks = Own::of(marks_in(attributes.get()));
  if (!marks || stays.is_true(marks.get()) || record_name.of(marks.get()).get() != Py_None) return Own();
  Own by = by_name.of(marks.get());
  if (by.get() == Py_None) return Own();
  Own maker = Own::of(made_by.rerun.get(by.get()));
  PyObject* mine = maker.get();
  if (!can_run(mine) || !holds(made_by.version.get(by.get()), made_by.base.get(by.get()), given)) return Own();
  Own owner =
      own(PyTuple_Pack(3, module_rerun.layer.get(mine), module_rerun.op.get(mine), module_rerun.number.get(mine)));
  Own made = record_of_new(of->saved, of->mover, batch, owner.get(), storage.get(), marks.get(), given);
  if (!made) return Own();
  take(mine, made.get());
  makes(mine, made_by.slot.get(by.get()), made.get());
  PyObject* number = micro_batch.count.get(batch);
  if (number_of(number) >= record.last_use.number(made.get()) && rerun.moves_inputs.get(mine) == Py_True) {
    used_at(mine, number);  // as `Record.used_at`
  }
  Own kept = handle_of(tensor, made.get(), batch, number);
  let_go(kept.get());
  return kept;
}

// `ModuleRerun.saves`; `one`: nothing where there is no record.
inline void note_saved(PyObject* rerunning, PyObject* one, PyObject* storage, PyObject* marks,
                       const at::Tensor& tensor) {
  static Name entry_name("entry");
  PyObject* self = rerun.saved.get(rerunning);
  PyObject *slots = saves.slots.get(self), *seen = saves.seen.get(self);
  if (one == nullptr || record.way_back.get(one) != rerunning) {  // it has not made that
    must(PyList_Append(seen, own(PyLong_FromLong(-1)).get()));
    must(PyList_Append(slots, Py_None));
    return;
  }
  Own number = own(PyLong_FromSsize_t(PyList_GET_SIZE(slots))), id = own(PyLong_FromVoidPtr(one));
  must(PyList_Append(seen, must(PyDict_SetDefault(saves.firsts.get(self), id.get(), number.get()))));
  if (!is_empty(record.handles.get(one))) {
    must(PyList_Append(slots, Py_None));
    return;
  }
  Own layout = layout_of(tensor), reference = reference_to(one);
  must(PyList_Append(slots, own(PyTuple_Pack(2, reference.get(), layout.get())).get()));
  was_taken(self, number.get(), storage, tensor);
  Own entry = entry_name.of(marks);
  if (saves.program.is_none(self) && entry.get() != Py_None &&
      target_of(PyTuple_GET_ITEM(entry.get(), 0)).get() == rerunning &&
      holds(PyTuple_GET_ITEM(entry.get(), 3), PyTuple_GET_ITEM(entry.get(), 4), tensor)) {
    enters_at(self, entry.get(), number.get());
  }
}

// `SavedTensors._new_record`, of which something is kept on a record; empty: it is out of the ordinary.
inline Own first_record(const Hooks* of, PyObject* rerunning, bool every, PyObject* batch, PyObject* storage,
                        PyObject* marks, const at::Tensor& tensor) {
  if (tensor.storage().nbytes() == 0) return Own();
  Own owner = owner_in(batch, tensor);
  const bool made_here = rerunning != Py_None && is_made_in(rerunning, owner.get());
  if (!made_here && !every) return Own();
  Own made = record_of_new(of->saved, of->mover, batch, owner.get(), storage, marks, tensor);
  if (made && made_here) take(rerunning, made.get());
  return made;
}

// Whether it is still what a record has, which belongs to nobody but this micro-batch, and the operator that runs.
inline bool is_of_here(const Hooks* of, PyObject* one, PyObject* rerunning, PyObject* batch, const at::Tensor& tensor) {
  if (Py_TYPE(one) != engine.Record || record.micro_batch.get(one) != batch ||
      !holds(record.version.get(one), record.base.get(one), tensor)) {
    return false;
  }
  PyObject *way_back = record.way_back.get(one), *stack = position.stack.get(of->position);
  return way_back == of->mover ||
         (way_back == rerunning && record.state.get(one) == engine.DROPPED && !is_empty(stack) &&
          same(record.layer.get(one), PyTuple_GET_ITEM(last_of(stack), 0)));
}

// `SavedTensors._keep`, but of what a tape sees; `rerunning`: the operator that is to run again, or None. Empty: it is
// out of the ordinary.
inline Own keep_on_record(Hooks* of, PyObject* tensor, PyObject* batch, bool by_function, PyObject* rerunning) {
  static Name every_name("every_record"), stays("stays"), is_static("static"), record_name("record"),
      by_name("made_by");
  const bool again = rerunning != Py_None;
  if (batch == Py_None || is_watched(of) || !THPVariable_Check(tensor)) return Own();
  const bool every = every_name.is_true(of->saved);
  if (!(again ? module_rerun.untried.is_none(rerunning) : every) || has_several_streams(of->mover) ||
      !on_home_stream(of, batch)) {
    return Own();
  }
  const at::Tensor& given = THPVariable_Unpack(tensor);
  if (!fast_tensors::is_plain(tensor, of->device_type)) {  // weights, and what is on another device
    if (!fast_tensors::is_tensor(tensor) && !stays_itself(given)) return Own();
    if (again) note_saved(rerunning, nullptr, nullptr, nullptr, given);
    return native_handle(tensor);
  }
  if (by_function && (stays_itself(given) || told_to_stay(tensor))) return Own();
  Own storage = storage_of(given), attributes = attributes_of(storage.get());
  Own marks = Own::of(marks_in(attributes.get()));
  Own number = Own::of(micro_batch.count.get(batch)), one;
  if (marks) {
    if (stays.is_true(marks.get())) {
      if (again) note_saved(rerunning, nullptr, nullptr, nullptr, given);
      return new_handle(tensor, Py_None, batch, number.get());
    }
    if (is_static.is_true(marks.get()) || by_name.of(marks.get()).get() != Py_None) return Own();
    Own reference = record_name.of(marks.get());
    if (reference.get() != Py_None) one = target_of(reference.get());
  } else {
    marks = new_marks(attributes.get());
  }
  if (!one) {
    one = first_record(of, rerunning, every, batch, storage.get(), marks.get(), given);
    if (!one) return Own();
  } else if (!is_of_here(of, one.get(), rerunning, batch, given)) {
    return Own();
  }
  if (again) note_saved(rerunning, one.get(), storage.get(), marks.get(), given);
  PyObject* state = record.state.get(one.get());
  if (state == engine.DROPPED && number_of(number.get()) >= record.last_use.number(one.get()) &&
      rerun.moves_inputs.get(rerunning) == Py_True) {
    used_at(rerunning, number.get());  // as `Record.used_at`
  }
  Own kept = handle_of(tensor, one.get(), batch, number.get());
  if (state == engine.KEPT) {
    if (record.distance.number(one.get()) != STAYS) {
      Own distance = distance_of_record(of, one.get(), batch);
      if (distance.get() != Py_None) select(of->mover, batch, one.get(), distance.get());
    }
  } else if (state == engine.HOST || state == engine.LOADED || state == engine.DROPPED) {
    let_go(kept.get());
  }
  return kept;
}

}  // namespace hot
