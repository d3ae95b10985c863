// rerun/tape.py: operations of inline code are noted, and run again; and what such code saves. What is out of the
// ordinary goes on in Python, which may begin anew: nothing is noted before all of it has been looked at.

#pragma once

#include "arguments.h"
#include "starts.h"

#include <vector>

namespace hot {

inline PyObject* facts_of = nullptr;    // `tape.facts_of`
inline PyObject* as_it_drew = nullptr;  // `tape._as_it_drew`
inline PyTypeObject *ref_type = nullptr, *step_type = nullptr;

// `tape._plain`, with memory of its own
inline bool is_memory(const at::Tensor& tensor) {
  return tensor.layout() == c10::kStrided && !tensor.is_conj() && !tensor.is_neg() && !tensor._is_zerotensor() &&
         !tensor.is_nested() && tensor.has_storage();
}

// The number on this tape of a storage with these marks; empty where it has none.
inline Own key_on_tape(PyObject* tape, PyObject* marks) {
  static Name name("tape");
  Own mine = name.of(marks);
  if (mine.get() == Py_None || target_of(PyTuple_GET_ITEM(mine.get(), 0)).get() != tape) return Own();
  return Own::of(PyTuple_GET_ITEM(mine.get(), 1));
}

// How far ahead what this operator has made is moved, if the operator that runs saves it; None: it stays.
inline Own distance_of(const Hooks* of, PyObject* layer, PyObject* op) {
  static Name distance("_distance");
  PyObject* running = last_of(position.stack.get(of->position));
  return distance.call(of->saved, layer, op, PyTuple_GET_ITEM(running, 0), PyTuple_GET_ITEM(running, 1));
}

// `SavedTensors._new_record` on a tape: the record, or None of what stays; empty: it is out of the ordinary.
inline Own begin_record(const Hooks* of, PyObject* tape, PyObject* storage, PyObject* marks, PyObject* batch,
                        const at::Tensor& tensor) {
  static Name is_static("static"), made("_made"), every("every_record"), record_name("record"),
      by_producer("by_producer_only"), in_force("_in_force"), layers("num_layers");
  if (is_static.is_true(marks) || tensor.storage().nbytes() == 0 || mover_slots.known.get(of->mover) != Py_None) return Own();
  Own key = key_on_tape(tape, marks), plan = in_force.of(of->saved);
  const bool made_here = key && must(PyDict_Contains(made.of(tape).get(), key.get())) == 1;
  Own owner = owner_in(batch, tensor), maker = own(PyTuple_GetSlice(owner.get(), 0, 2));
  PyObject *layer = PyTuple_GET_ITEM(maker.get(), 0), *op = PyTuple_GET_ITEM(maker.get(), 1);
  if (!made_here && (every.is_true(of->saved) || !by_producer.is_true(plan.get()) ||
                     distance_of(of, layer, op).get() != Py_None)) {
    return Own();
  }
  const bool owned = number_of(layer) >= 0 && number_of(layer) < layers.number(plan.get());
  Own counted = enter_storage(marks, tensor, owned, maker.get());
  if (!counted) return Own();
  if (!made_here) {
    keep_here(marks);
    return Own::of(Py_None);
  }
  Own distance = own(PyLong_FromLong(0));
  Own found = new_record(of->mover, batch, owner.get(), storage, counted.get(), tensor, distance.get());
  record.state.set_borrowed(found.get(), engine.KEPT);
  record_name.set(marks, reference_to(found.get()).get());
  return found;
}

// What inline code saves that runs again, as `SavedTensors.pack_slowly` keeps it; empty: it is out of the ordinary.
inline Own keep_on_tape(const Hooks* of, PyObject* tape, PyObject* tensor, PyObject* batch, bool by_function) {
  static Name stays("stays"), record_name("record"), by_name("made_by"), select("select");
  if (by_function || batch == Py_None || is_empty(position.stack.get(of->position)) || is_watched(of) ||
      has_several_streams(of->mover) || !on_home_stream(of, batch) ||
      !fast_tensors::is_plain(tensor, of->device_type)) {
    return Own();
  }
  const at::Tensor& given = THPVariable_Unpack(tensor);
  Own storage = storage_of(given), attributes = attributes_of(storage.get());
  Own marks = Own::of(marks_in(attributes.get())), number = Own::of(micro_batch.count.get(batch));
  if (!marks) return Own();
  if (stays.is_true(marks.get())) return new_handle(tensor, Py_None, batch, number.get());
  if (by_name.of(marks.get()).get() != Py_None) return Own();
  Own reference = record_name.of(marks.get());
  Own mine = reference.get() == Py_None ? Own() : target_of(reference.get());
  if (!mine) {
    mine = begin_record(of, tape, storage.get(), marks.get(), batch, given);
    if (!mine) return Own();
    if (mine.get() == Py_None) return new_handle(tensor, Py_None, batch, number.get());
  } else if (record.way_back.get(mine.get()) != of->mover || record.micro_batch.get(mine.get()) != batch ||
             record.state.get(mine.get()) != engine.KEPT ||
             !holds(record.version.get(mine.get()), record.base.get(mine.get()), given)) {
    return Own();
  }
  Own kept = handle_of(tensor, mine.get(), batch, number.get());
  if (record.distance.number(mine.get()) >= 0) {
    Own distance = distance_of(of, record.layer.get(mine.get()), record.op.get(mine.get()));
    // The tape may turn out to start from it: then it stays.
    if (distance.get() != Py_None) select.call(batch, mine.get(), distance.get(), Py_False);
  }
  return kept;
}

class TapeNote {
 public:
  explicit TapeNote(PyObject* tape)
      : tape_(tape), made_(names().made.of(tape)), type_(device_type(names().device_type.of(tape))) {}

  // False: Python is to look at it.
  bool note(PyObject* function, PyObject* args, PyObject* kwargs, PyObject* result, PyObject* random) {
    Own facts = call(facts_of, function);
    PyObject *refused = PyTuple_GET_ITEM(facts.get(), 0), *places = PyTuple_GET_ITEM(facts.get(), 2);
    if (PyUnicode_GET_LENGTH(refused) > 0 || (PyDict_GET_SIZE(kwargs) > 0 && has_generator(kwargs))) {
      return false;
    }
    Own outputs = own(PyList_New(0)), given = own(PyTuple_Pack(2, args, kwargs));
    collect(result, outputs.get());
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs.get()); ++i) {
      if (!is_memory(THPVariable_Unpack(PyList_GET_ITEM(outputs.get(), i)))) return false;
    }
    Own taken = copied(given.get(), [&](PyObject* one) {
      if (!THPVariable_Check(one)) return Own();
      Own slot = take(one);
      return slot ? std::move(slot) : Own::of(one);
    });
    if (unusual_) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(places); ++i) {
      if (!written(args, kwargs, PyTuple_GET_ITEM(places, i))) return false;
    }
    Own results = numbers_of(outputs.get());
    if (PySet_GET_SIZE(writes_.get()) > 0) {  // what only makes views needs no second run
      keep_blank(PyTuple_GET_ITEM(facts.get(), 1) == Py_True);
      Own step = own(step_type->tp_alloc(step_type, 7));
      Py_ssize_t at = 0;
      for (PyObject* part : {function, taken.get(), refs_.get(), reads_.get(), writes_.get(), results.get(), random}) {
        PyTuple_SET_ITEM(step.get(), at++, new_reference(part));
      }
      must(PyList_Append(names().steps.of(tape_).get(), step.get()));
    }
    return true;
  }

 private:
  struct Names {
    Name made{"_made"}, device_type{"_device_type"}, steps{"_steps"}, keys{"_keys"}, arguments{"_arguments"},
        blank{"_blank"}, tape{"tape"}, is_static{"static"}, managed{"managed"};
  };
  static Names& names() {
    static Names all;
    return all;
  }

  static bool has_generator(PyObject* kwargs) {
    static Name generator("generator");
    PyObject* found = PyDict_GetItemWithError(kwargs, generator.object());
    if (found == nullptr && PyErr_Occurred()) throw python_error();
    return found != nullptr && found != Py_None;
  }

  Own marks(PyObject* storage) {
    Own attributes = attributes_of(storage);
    PyObject* known = marks_in(attributes.get());
    return known != nullptr ? Own::of(known) : new_marks(attributes.get());
  }

  // `Tape._ref`: in the place of an argument; empty where it is kept as it is
  Own take(PyObject* one) {
    const at::Tensor& tensor = THPVariable_Unpack(one);
    if (!is_memory(tensor)) {
      unusual_ = unusual_ || !tensor.has_storage();
      return Own();
    }
    old_.push_back(tensor.storage().unsafeGetStorageImpl());
    if (!fast_tensors::is_tensor(one) || tensor.device().type() != type_) return Own();
    Own storage = storage_of(tensor), found = marks(storage.get());
    if (names().is_static.is_true(found.get())) return Own();
    unusual_ = unusual_ || names().managed.is_true(found.get());
    const long long known = names().keys.number(tape_);
    Own key = key_of(found.get());
    if (number_of(key.get()) > known) {
      must(PyDict_SetItem(names().arguments.of(tape_).get(), key.get(), one));
    }
    Own layout = layout_of(tensor), ref = own(ref_type->tp_alloc(ref_type, 5));
    PyTuple_SET_ITEM(ref.get(), 0, new_reference(key.get()));
    for (Py_ssize_t i = 0; i < 4; ++i) {
      PyTuple_SET_ITEM(ref.get(), i + 1, new_reference(PyTuple_GET_ITEM(layout.get(), i)));
    }
    must(PyList_Append(refs_.get(), ref.get()));
    must(PySet_Add(reads_.get(), key.get()));
    Own number = own(PyLong_FromSsize_t(PyList_GET_SIZE(refs_.get()) - 1));
    return call(slot_type, number.get());
  }

  Own known_key(PyObject* marks) { return key_on_tape(tape_, marks); }

  // `Tape._key`
  Own key_of(PyObject* marks) {
    if (Own known = known_key(marks)) return known;
    names().keys.add(tape_, 1);
    Own key = names().keys.of(tape_), reference = own(PyWeakref_NewRef(tape_, nullptr));
    Own mine = own(PyTuple_Pack(2, reference.get(), key.get()));
    names().tape.set(marks, mine.get());
    return key;
  }

  // One of the arguments that are written to, which it must have made.
  bool written(PyObject* args, PyObject* kwargs, PyObject* place) {
    const Py_ssize_t at = PyLong_AsSsize_t(PyTuple_GET_ITEM(place, 0));
    PyObject* value = at < PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, at)
                                                  : PyDict_GetItem(kwargs, PyTuple_GET_ITEM(place, 1));
    Own tensors = own(PyList_New(0));
    if (value != nullptr) collect(value, tensors.get());
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.get()); ++i) {
      const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(tensors.get(), i));
      if (!tensor.has_storage()) return false;
      Own storage = storage_of(tensor), key = known_key(marks(storage.get()).get());
      if (!key || must(PyDict_Contains(made_.get(), key.get())) == 0) return false;
      must(PySet_Add(writes_.get(), key.get()));
    }
    return true;
  }

  // Of what it returns: numbers, and None for an argument's memory.
  Own numbers_of(PyObject* outputs) {
    Own results = own(PyList_New(0));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(outputs); ++i) {
      const at::Tensor& tensor = THPVariable_Unpack(PyList_GET_ITEM(outputs, i));
      if (std::find(old_.begin(), old_.end(), tensor.storage().unsafeGetStorageImpl()) != old_.end()) {
        must(PyList_Append(results.get(), Py_None));
        continue;
      }
      Own storage = storage_of(tensor), key = key_of(marks(storage.get()).get());
      must(PyList_Append(results.get(), key.get()));
      if (must(PyDict_Contains(made_.get(), key.get())) == 0) {
        Own reference = own(PyWeakref_NewRef(storage.get(), nullptr));
        must(PyDict_SetItem(made_.get(), key.get(), reference.get()));
        must(PySet_Add(writes_.get(), key.get()));
      }
    }
    return results;
  }

  void keep_blank(bool blank) {
    Own before = names().blank.of(tape_);
    if (!blank && PySet_GET_SIZE(before.get()) == 0) return;
    Own now = own(blank ? PyNumber_Or(before.get(), writes_.get()) : PyNumber_Subtract(before.get(), writes_.get()));
    names().blank.set(tape_, now.get());
  }

  PyObject* tape_;
  Own made_, refs_ = own(PyList_New(0)), reads_ = own(PySet_New(nullptr)), writes_ = own(PySet_New(nullptr));
  const c10::DeviceType type_;
  c10::SmallVector<c10::StorageImpl*, 8> old_;
  bool unusual_ = false;
};

// Tape._note(function, args, kwargs, result, random)
inline PyObject* tape_notes(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    takes(count, 5, "_note takes a function, its arguments, what it returned, and a random state");
    if (!TapeNote(self).note(args[0], args[1], args[2], args[3], args[4])) {
      static Name slowly("_note_slowly");
      slowly.call(self, args[0], args[1], args[2], args[3], args[4]);
    }
    return new_reference(Py_None);
  });
}

// What `_run` needs to have no longer, by the step after which that is so.
inline std::vector<std::vector<PyObject*>> last_needed(PyObject* steps, PyObject* wanted, PyObject* last) {
  const Py_ssize_t count = PyList_GET_SIZE(steps);
  std::vector<std::vector<PyObject*>> unused(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    Own number = own(PyLong_FromSsize_t(i));
    for (const Py_ssize_t touched : {3, 4}) {  // reads, writes
      Own keys = own(PySequence_List(PyTuple_GET_ITEM(PyList_GET_ITEM(steps, i), touched)));
      for (Py_ssize_t k = 0; k < PyList_GET_SIZE(keys.get()); ++k) {
        must(PyDict_SetItem(last, PyList_GET_ITEM(keys.get(), k), number.get()));
      }
    }
  }
  PyObject *key = nullptr, *number = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(last, &at, &key, &number);) {
    if (must(PySet_Contains(wanted, key)) == 0) unused[number_of(number)].push_back(key);
  }
  return unused;
}

// tape._run(steps, wanted, there)
inline PyObject* tape_runs(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    takes(count, 3, "_run takes steps, what is wanted of them, and what is there");
    PyObject *steps = args[0], *there = args[2];
    Own last = own(PyDict_New());
    const auto unused = last_needed(steps, args[1], last.get());
    const at::AutoGradMode without_graph(false);
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(steps); ++i) {
      PyObject* step = PyList_GET_ITEM(steps, i);
      PyObject *function = PyTuple_GET_ITEM(step, 0), *refs = PyTuple_GET_ITEM(step, 2);
      PyObject *numbers = PyTuple_GET_ITEM(step, 5), *random = PyTuple_GET_ITEM(step, 6);
      Own outputs = own(PyList_New(0));
      {
        Own given = copied(PyTuple_GET_ITEM(step, 1), [&](PyObject* one) {
          if (reinterpret_cast<PyObject*>(Py_TYPE(one)) != slot_type) return Own();
          PyObject* ref = PyList_GET_ITEM(refs, number_of(PyTuple_GET_ITEM(one, 0)));
          Own storage = own(PyObject_GetItem(there, PyTuple_GET_ITEM(ref, 0)));
          Own layout = own(PyTuple_GetSlice(ref, 1, 5));
          return own(THPVariable_Wrap(laid_out(THPStorage_Unpack(storage.get()), layout.get())));
        });
        PyObject *positional = PyTuple_GET_ITEM(given.get(), 0), *named = PyTuple_GET_ITEM(given.get(), 1);
        Own result = random == Py_None ? own(PyObject_Call(function, positional, named))
                                       : call(as_it_drew, random, function, positional, named);
        collect(result.get(), outputs.get());
      }
      if (PyList_GET_SIZE(outputs.get()) != PyList_GET_SIZE(numbers)) {
        PyErr_Format(PyExc_ValueError, "%R has returned another number of tensors", function);
        return nullptr;
      }
      for (Py_ssize_t k = 0; k < PyList_GET_SIZE(numbers); ++k) {
        PyObject* number = PyList_GET_ITEM(numbers, k);
        if (number == Py_None) continue;
        Own storage = storage_of(THPVariable_Unpack(PyList_GET_ITEM(outputs.get(), k)));
        must(PyDict_SetItem(there, number, storage.get()));
      }
      outputs = Own();
      for (PyObject* key : unused[i]) {
        if (must(PyDict_Contains(there, key))) must(PyDict_DelItem(there, key));
      }
    }
    return new_reference(there);
  });
}

}  // namespace hot
