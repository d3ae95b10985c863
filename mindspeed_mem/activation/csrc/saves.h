// saved_tensors.py, storage/records.py and rerun/dropped.py: what autograd keeps instead of a tensor, where it is known
// what becomes of that; and how a second run makes it again. Everything else goes on in Python.

#pragma once

#include "arguments.h"
#include "moves.h"

namespace hot {

inline Name at_token("token");

// The two hooks of one `SavedTensors`.
struct Hooks {
  PyObject_HEAD
  PyObject *saved, *position, *mover, *observation;
  c10::DeviceType device_type;
  bool one_stream;
};

inline bool has_several_streams(PyObject* mover) { return !is_empty(mover_slots.several.get(mover)); }

// Whether the current stream is the one that a micro-batch began on.
inline bool is_home(PyObject* mover, PyObject* batch) {
  static Name stream_key("stream_key");
  Own backend = Own::of(mover_slots.backend.get(mover));
  if (at_one_stream.is_true(backend.get())) return true;
  if (is_accelerator(backend.get())) return is_current(micro_batch.home.get(batch));
  return same(stream_key.call(backend.get()).get(), micro_batch.home_key.get(batch));
}

inline bool on_home_stream(const Hooks* of, PyObject* batch) { return of->one_stream || is_home(of->mover, batch); }

// A tensor that shares memory and version counter with this one, and no graph. No mode is told of it.
inline Own alias_of(const at::Tensor& tensor) {
  const c10::impl::ExcludeDispatchKeyGuard without(c10::DispatchKey::Python);
  return own(THPVariable_Wrap(tensor.tensor_data()));
}

inline at::Tensor base_of(const at::Tensor& tensor) { return tensor.is_view() ? at::Tensor(tensor._base()) : tensor; }

inline Own reference_to(PyObject* object) { return own(PyWeakref_NewRef(object, nullptr)); }

// `records.version_of`
inline int64_t version_of(const at::Tensor& tensor) { return tensor.is_inference() ? 0 : tensor._version(); }

// `Record.holds`, and `Made.holds` where `base` may be None.
inline bool holds(PyObject* version, PyObject* base, const at::Tensor& tensor) {
  const int64_t now = tensor._version();
  if (now != number_of(version)) return false;
  if (now == 0) return true;
  Own known = base == Py_None ? Own() : target_of(base);
  return known && THPVariable_Check(known.get()) && THPVariable_Unpack(known.get()).is_same(base_of(tensor));
}

inline void begin_handle(PyObject* self, Own alias, Own version, PyObject* of, PyObject* batch) {
  handle.alias.set(self, std::move(alias));
  handle.version.set(self, std::move(version));
  handle.record.set_borrowed(self, of);
  handle.micro_batch.set_borrowed(self, batch);
  handle.layout.set_borrowed(self, Py_None);
  handle.own.set_borrowed(self, Py_None);
}

inline void begin_handle(PyObject* self, const at::Tensor& tensor, PyObject* of, PyObject* batch) {
  Own version = tensor.is_inference() ? Own::of(Py_None) : own(PyLong_FromLongLong(tensor._version()));
  begin_handle(self, alias_of(tensor), std::move(version), of, batch);
}

// `Handle`, of what is plain
inline Own new_handle(PyObject* tensor, PyObject* of, PyObject* batch, PyObject* number) {
  Own made = make(engine.Handle);
  begin_handle(made.get(), THPVariable_Unpack(tensor), of, batch);
  handle.number.set_borrowed(made.get(), number);
  saved_by(batch, number);
  return made;
}

// `Handle`, of what stays for good
inline Own plain_handle(const at::Tensor& tensor) {
  Own made = make(engine.Handle);
  begin_handle(made.get(), tensor, Py_None, Py_None);
  handle.number.set_number(made.get(), 0);
  return made;
}

// `records.native`
inline Own native_handle(PyObject* tensor) {
  if (!THPVariable_Check(tensor)) return call(engine.native, tensor);
  const at::Tensor& given = THPVariable_Unpack(tensor);
  if (!given.is_leaf()) return fast_tensors::is_tensor(tensor) ? plain_handle(given) : call(engine.native, tensor);
  Own made = make(engine.Handle);
  Own version = given.is_inference() ? Own::of(Py_None) : own(PyLong_FromLongLong(given._version()));
  begin_handle(made.get(), Own::of(tensor), std::move(version), Py_None, Py_None);
  handle.number.set_number(made.get(), 0);
  return made;
}

// Handle(tensor, record, micro_batch, number)
inline PyObject* handle_begins(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *tensor = nullptr, *of = Py_None, *batch = Py_None, *number = nullptr;
    if (!PyArg_ParseTuple(args, "O|OOO", &tensor, &of, &batch, &number)) return nullptr;
    static Name detach("detach"), version("_version");
    if (fast_tensors::is_tensor(tensor)) {
      begin_handle(self, THPVariable_Unpack(tensor), of, batch);
    } else {
      begin_handle(self, detach.call(tensor), version.of(tensor), of, batch);
    }
    handle.number.set(self, number == nullptr ? must(PyLong_FromLong(0)) : new_reference(number));
    if (batch != Py_None) {
      static Name slowly("saved_by");
      if (Py_TYPE(batch) == engine.MicroBatch) {
        saved_by(batch, handle.number.get(self));
      } else {
        slowly.call(batch, handle.number.get(self));
      }
    }
    return new_reference(Py_None);
  });
}

// `Record`, as `SavedTensors._keep_as_known` makes it.
inline Own new_record(PyObject* mover, PyObject* batch, PyObject* owner, PyObject* storage, PyObject* counted,
                      const at::Tensor& tensor, PyObject* distance) {
  Own made = make(engine.Record);
  PyObject* self = made.get();
  record.way_back.set_borrowed(self, mover);
  record.micro_batch.set_borrowed(self, batch);
  record.layer.set_borrowed(self, PyTuple_GET_ITEM(owner, 0));
  record.op.set_borrowed(self, PyTuple_GET_ITEM(owner, 1));
  record.number.set_borrowed(self, PyTuple_GET_ITEM(owner, 2));
  record.last_use.set_borrowed(self, PyTuple_GET_ITEM(owner, 2));
  record.distance.set_borrowed(self, distance);
  record.nbytes.set_borrowed(self, token.nbytes.get(counted));
  record.state.set_borrowed(self, engine.DEVICE);
  record.storage.set(self, reference_to(storage));
  record.token.set_borrowed(self, counted);
  record.handles.set(self, must(PyList_New(0)));
  record.version.set_number(self, tensor._version());
  if (tensor._version() == 0) {
    record.base.set_borrowed(self, Py_None);  // nobody asks
  } else {
    Own base = own(THPVariable_Wrap(base_of(tensor)));
    record.base.set(self, reference_to(base.get()));
  }
  for (const Slot* one : {&record.slab, &record.source, &record.buffer, &record.out_event, &record.in_event,
                          &record.attributes}) {
    one->set_borrowed(self, Py_None);
  }
  record.stream.set_borrowed(self, micro_batch.home.get(batch));
  record.others.set(self, must(PyTuple_New(0)));
  return made;
}

inline Own handle_of(PyObject* tensor, PyObject* of, PyObject* batch, PyObject* number) {
  Own made = new_handle(tensor, of, batch, number), reference = reference_to(made.get());
  must(PyList_Append(record.handles.get(of), reference.get()));
  if (number_of(number) > record.last_use.number(of)) record.last_use.set_borrowed(of, number);
  return made;
}

// `own_tensors.stays_itself`; the flag of the tensor's own says whether anything can accumulate there.
inline bool stays_itself(const at::Tensor& tensor) {
  if (!tensor.requires_grad() || !tensor.is_leaf()) return false;
  return !tensor.is_view() || torch::autograd::impl::get_autograd_meta(tensor)->requires_grad_;
}

inline bool told_to_stay(PyObject* tensor) {
  PyObject** attributes = _PyObject_GetDictPtr(tensor);
  if (attributes == nullptr || *attributes == nullptr || PyDict_GET_SIZE(*attributes) == 0) return false;
  return must(PyObject_IsTrue(call(engine.told_to_stay, tensor).get()));
}

// `SavedTensors._keep_as_known`; empty: it is not as expected.
inline Own keep_as_known(Hooks* of, PyObject* tensor, PyObject* save, PyObject* batch, bool by_function) {
  static Name record_name("record"), token_name("token");
  if (has_several_streams(of->mover) || !on_home_stream(of, batch)) return Own();
  if (!fast_tensors::is_plain(tensor, of->device_type)) return Own();
  const at::Tensor& given = THPVariable_Unpack(tensor);
  Own number_now = Own::of(micro_batch.count.get(batch));
  PyObject* number = number_now.get();
  Own storage = storage_of(given), attributes = attributes_of(storage.get());
  PyObject* marks = marks_in(attributes.get());
  if (marks == nullptr) {
    PyObject* nbytes = PyTuple_GET_ITEM(save, 3);
    if (static_cast<long long>(given.storage().nbytes()) != number_of(nbytes)) return Own();
    if (by_function && (stays_itself(given) || told_to_stay(tensor))) return Own();
    Own made_marks = new_marks(attributes.get());
    Own counted = new_token(nbytes, PyTuple_GET_ITEM(save, 2) == Py_True, false, PyTuple_GET_ITEM(save, 1));
    token_name.set(made_marks.get(), counted.get());
    Own made = new_record(of->mover, batch, PyTuple_GET_ITEM(save, 0), storage.get(), counted.get(), given,
                          PyTuple_GET_ITEM(save, 4));
    Own reference = reference_to(made.get());
    record_name.set(made_marks.get(), reference.get());
    Own kept = handle_of(tensor, made.get(), batch, number);
    must(PyList_Append(micro_batch.fresh.get(batch), reference.get()));
    if (record.number.number(made.get()) < number_of(number)) copy_fresh(batch);
    return kept;
  }
  Own reference = record_name.of(marks);
  Own known = reference.get() == Py_None ? Own() : target_of(reference.get());
  if (!known || record.micro_batch.get(known.get()) != batch || record.way_back.get(known.get()) != of->mover) {
    return Own();
  }
  PyObject* state = record.state.get(known.get());
  if (state != engine.DEVICE && state != engine.COPYING && state != engine.HOST) return Own();
  if (!holds(record.version.get(known.get()), record.base.get(known.get()), given)) return Own();
  if (by_function && stays_itself(given)) return Own();
  Own kept = handle_of(tensor, known.get(), batch, number);
  if (record.state.get(known.get()) == engine.HOST) let_go(kept.get());
  return kept;
}

inline struct ModuleRerunSlots {
  Slot inputs{"inputs"}, outputs{"outputs"}, layer{"layer"}, op{"op"}, number{"number"}, untried{"untried"},
      entered_again{"_entered_again"};
} module_rerun;

// `Rerun.used_at`
inline void used_at(PyObject* rerunning, PyObject* number) {
  static Name slowly("used_at");
  if (Py_TYPE(rerunning) != engine.ModuleRerun) {
    slowly.call(rerunning, number);
    return;
  }
  Own inputs = Own::of(module_rerun.inputs.get(rerunning));
  for (Py_ssize_t i = 0; inputs.get() != Py_None && i < PyList_GET_SIZE(inputs.get()); ++i) {
    Own of = Own::of(handle.record.get(PyTuple_GET_ITEM(PyList_GET_ITEM(inputs.get(), i), 0)));
    if (of.get() == Py_None || number_of(number) < record.last_use.number(of.get())) continue;
    record.last_use.set_borrowed(of.get(), number);  // `Record.used_at`
    if (record.state.get(of.get()) == engine.DROPPED) used_at(Own::of(record.way_back.get(of.get())).get(), number);
  }
}

// ---- what a recomputed operator makes for backward alone

// What an operator inside takes as `entry` says is saved as this number.
inline void enters_at(PyObject* self, PyObject* entry, PyObject* number) {
  Own none = own(PyList_New(0)), place = own(PyTuple_Pack(2, PyTuple_GET_ITEM(entry, 2), number));
  PyObject* known = must(PyDict_SetDefault(saves.entries.get(self), PyTuple_GET_ITEM(entry, 1), none.get()));
  must(PyList_Append(known, place.get()));
}

// `Saves._was_taken`
inline void was_taken(PyObject* self, PyObject* number, PyObject* storage, const at::Tensor& tensor) {
  Own taken = found_in(saves.taken.get(self), number);
  if (!taken || target_of(PyTuple_GET_ITEM(taken.get(), 0)).get() != storage ||
      !holds(PyTuple_GET_ITEM(taken.get(), 3), PyTuple_GET_ITEM(taken.get(), 4), tensor)) {
    return;
  }
  enters_at(self, taken.get(), number);
}

// `Made`
inline Own new_made(PyObject* rerunning, PyObject* batch, PyObject* storage, PyObject* attributes,
                    const at::Tensor& tensor, PyObject* layout, PyObject* marks) {
  Own nbytes = own(PyLong_FromUnsignedLongLong(tensor.storage().nbytes()));
  Own counted = new_token(nbytes.get(), true, false, rerun.owner.get(rerunning));
  token.moved.set_borrowed(counted.get(), Py_True);  // while it happens to be there
  at_token.set(marks, counted.get());
  Own self = make(engine.Made);
  made.rerun.set_borrowed(self.get(), rerunning);
  made.micro_batch.set_borrowed(self.get(), batch);
  made.layout.set_borrowed(self.get(), layout);
  made.nbytes.set(self.get(), std::move(nbytes));
  made.storage.set(self.get(), reference_to(storage));
  made.version.set_number(self.get(), tensor._version());
  made.base.set_borrowed(self.get(), Py_None);
  if (tensor._version() != 0) {
    Own base = own(THPVariable_Wrap(base_of(tensor)));
    made.base.set(self.get(), reference_to(base.get()));
  }
  made.stream.set_borrowed(self.get(), rerun.stream.get(rerunning));
  made.others.set(self.get(), must(PyTuple_New(0)));
  made.attributes.set_borrowed(self.get(), Py_None);
  if (PyDict_GET_SIZE(attributes) > 1) made.attributes.set(self.get(), call(engine.set_by_others, storage));
  made.state.set_borrowed(self.get(), engine.DROPPED);
  made.tensor.set_borrowed(self.get(), Py_None);
  return self;
}

inline bool is_untouched(PyObject* marks) {
  static Name made_by("made_by"), stays("stays"), is_static("static");
  return at_token.of(marks).get() == Py_None && made_by.of(marks).get() == Py_None && !stays.is_true(marks) &&
         !is_static.is_true(marks);
}

// `Saves.drops`; empty: it needs a record.
inline Own drops(Hooks* of, PyObject* rerunning, PyObject* tensor, PyObject* batch, bool by_function) {
  PyObject* self = rerun.saved.get(rerunning);
  PyObject *slots = saves.slots.get(self), *known = PyTuple_GET_ITEM(saves.program.get(self), 0);
  const Py_ssize_t turn = PyList_GET_SIZE(slots);
  if (turn >= PyTuple_GET_SIZE(known) || !fast_tensors::is_tensor(tensor)) return Own();
  PyObject* first = PyTuple_GET_ITEM(known, turn);
  const long long first_turn = number_of(first);
  if (first_turn < 0 || has_several_streams(of->mover) || !on_home_stream(of, batch)) return Own();
  const at::Tensor& given = THPVariable_Unpack(tensor);
  if (given.layout() != c10::kStrided || given.is_nested() || (by_function && stays_itself(given))) return Own();
  Own storage = storage_of(given), layout = layout_of(given), mine;
  PyObject* all = saves.made.get(self);
  if (first_turn != turn) mine = Own::of(PyDict_GetItemWithError(all, first));
  if (mine) {
    Own there = target_of(made.storage.get(mine.get()));
    if (there.get() != storage.get() ||
        !holds(made.version.get(mine.get()), made.base.get(mine.get()), given) ||
        !(same(layout.get(), made.layout.get(mine.get())) || fast_tensors::is_plain(tensor, given.device().type()))) {
      return Own();
    }
    must(PyList_Append(slots, Py_None));
  } else {
    if (PyErr_Occurred()) throw python_error();
    if (first_turn != turn) return Own();
    Own attributes = attributes_of(storage.get());
    Own marks = Own::of(marks_in(attributes.get()));
    if (!marks) {
      marks = new_marks(attributes.get());
    } else if (!is_untouched(marks.get())) {
      return Own();
    }
    mine = new_made(rerunning, batch, storage.get(), attributes.get(), given, layout.get(), marks.get());
    must(PyDict_SetItem(all, first, mine.get()));
    saves.nbytes.set_number(self, saves.nbytes.number(self) + made.nbytes.number(mine.get()));
    Own reference = reference_to(mine.get()), entry = own(PyTuple_Pack(2, reference.get(), layout.get()));
    must(PyList_Append(slots, entry.get()));
    was_taken(self, first, storage.get(), given);
  }
  PyObject* count = micro_batch.count.get(batch);
  Own saving = Own::of(saves.saver.get(self));
  if (saving.get() == Py_None || !same(saver.number.get(saving.get()), count)) {
    saving = make(engine.Saver);
    saver.micro_batch.set_borrowed(saving.get(), batch);
    saver.number.set_borrowed(saving.get(), count);
    saved_by(batch, count);
    saves.saver.set_borrowed(self, saving.get());
    if (rerun.moves_inputs.get(rerunning) == Py_True) used_at(rerunning, count);
  }
  Own kept = make(engine.SavedSlot);
  const bool as_first = same(layout.get(), made.layout.get(mine.get()));
  saved_slot.made.set(kept.get(), std::move(mine));
  saved_slot.alias.set_borrowed(kept.get(), engine.NOTHING);
  saved_slot.own.set_borrowed(kept.get(), Py_None);
  saved_slot.layout.set(kept.get(), as_first ? Own::of(Py_None) : std::move(layout));
  saved_slot.saver.set(kept.get(), std::move(saving));
  return kept;
}

inline PyObject* made_dies(PyObject* self, PyObject*) {
  return guarded([&] {
    PyObject* nbytes = made.nbytes.maybe(self);
    if (nbytes != nullptr && !is_ending()) count(engine.without, -number_of(nbytes));
    return new_reference(Py_None);
  });
}

inline PyObject* saver_dies(PyObject* self, PyObject*) {
  return guarded([&] {
    dropped(saver.micro_batch.get(self), saver.number.get(self));
    return new_reference(Py_None);
  });
}

// ---- what is saved beside that: weights, and what another operator saves of what it has made
inline struct MadeBySlots {
  Slot rerun{"rerun"}, slot{"slot"}, version{"_version"}, base{"_base"};
} made_by;

inline bool is_watched(const Hooks* of) {
  return !position.watch.is_none(of->position) || !observation.counting.is_none(of->observation) ||
         !observation.stopwatch.is_none(of->observation);
}

// `Ledger.enter`: the token of a tensor's storage, whose marks these are; empty: it had moved, and is saved again.
inline Own enter_storage(PyObject* marks, const at::Tensor& tensor, bool is_owned, PyObject* owner) {
  Own counted = at_token.of(marks);
  if (counted.get() != Py_None) return token.moved.get(counted.get()) == Py_True ? Own() : std::move(counted);
  Own nbytes = own(PyLong_FromUnsignedLongLong(tensor.storage().nbytes()));
  counted = new_token(nbytes.get(), is_owned, false, owner);
  at_token.set(marks, counted.get());
  return counted;
}

// `Saves.enters`, where it is known which arguments are saved later
inline void enters_known(PyObject* self, PyObject* path, PyObject* args, PyObject* kwargs) {
  static Name entries("entries");
  PyObject* entered = saves.entered.get(self);
  Own number = own(PyLong_FromSsize_t(PyList_GET_SIZE(entered))), tensors = own(PyList_New(0));
  Own wanted = found_in(entries.of(saves.program.get(self)).get(), number.get());
  must(PyList_Append(entered, path));
  collect(args, tensors.get());
  collect(kwargs, tensors.get());
  for (Py_ssize_t i = 0; wanted && i < PyList_GET_SIZE(wanted.get()); ++i) {
    PyObject* place = PyList_GET_ITEM(wanted.get(), i);
    const long long at = number_of(PyTuple_GET_ITEM(place, 0));
    if (at >= PyList_GET_SIZE(tensors.get())) continue;
    const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors.get(), at));
    if (tensor.layout() != c10::kStrided || tensor.is_nested() || tensor.is_inference()) continue;
    Own storage = storage_of(tensor), entry = own(engine.Entry->tp_alloc(engine.Entry, 5));
    PyTuple_SET_ITEM(entry.get(), 0, reference_to(storage.get()).release());
    PyTuple_SET_ITEM(entry.get(), 1, new_reference(number.get()));
    PyTuple_SET_ITEM(entry.get(), 2, new_reference(PyTuple_GET_ITEM(place, 0)));
    PyTuple_SET_ITEM(entry.get(), 3, must(PyLong_FromLongLong(tensor._version())));
    Own base = tensor._version() == 0 ? Own() : own(THPVariable_Wrap(base_of(tensor)));
    PyTuple_SET_ITEM(entry.get(), 4, base ? reference_to(base.get()).release() : new_reference(Py_None));
    must(PyDict_SetItem(saves.taken.get(self), PyTuple_GET_ITEM(place, 1), entry.get()));
  }
}

// `Rerun.can_run`
inline bool can_run(PyObject* rerunning) {
  static Name can_run("can_run");
  if (Py_TYPE(rerunning) == engine.ModuleRerun) return !module_rerun.inputs.is_none(rerunning);
  return can_run.call(rerunning).get() == Py_True;
}

// `Rerun.take`, of a record that is still there
inline void take(PyObject* rerunning, PyObject* of) {
  leave(of, engine.DROPPED, rerunning);
  add_to(mover_slots.dropped.get(rerun.mover.get(rerunning)), rerun.owner.get(rerunning), record.nbytes.number(of));
}

// `Rerun.makes`
inline void makes(PyObject* rerunning, PyObject* slot, PyObject* of) {
  static Name slowly("makes");
  if (Py_TYPE(rerunning) == engine.ModuleRerun) {
    must(PyList_SetItem(module_rerun.outputs.get(rerunning), number_of(slot), reference_to(of).release()));
  } else {
    slowly.call(rerunning, slot, of);
  }
}

}  // namespace hot
