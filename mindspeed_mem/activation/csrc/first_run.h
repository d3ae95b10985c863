// second_runs.py: the first run of a module that is to run again, where it has been tried, and changes nothing besides
// what it returns. All others are Python's.

#pragma once

#include "random.h"
#include "second_run.h"

#include <vector>

namespace hot {

inline struct TriedSlots {
  Slot modules{"_modules"}, verdicts{"_verdicts"}, programs{"_programs"};
} tried;

inline Name at_capture{"capture"};

// `trial.Known`, and of whom; without a verdict nothing else is there.
struct Known {
  Own of, flags, verdict, program;

  bool is_refused() const { return must(PyObject_IsTrue(PyTuple_GET_ITEM(verdict.get(), 0))) != 0; }
  bool draws() const { return PyTuple_GET_ITEM(verdict.get(), 2) == Py_True; }
  bool changes_something() const { return PyDict_GET_SIZE(PyTuple_GET_ITEM(verdict.get(), 1)) > 0; }
};

// `Trials.operator` and `TriedOperator.as_it_is`
inline Known known_of(PyObject* second_runs, PyObject* layer, PyObject* path, PyObject* module) {
  static Name trials("trials"), latest("latest"), flag("training");
  Known known;
  Own all = latest.of(trials.of(second_runs).get()), key = own(PyTuple_Pack(2, layer, path));
  Own reference = found_in(all.get(), key.get());
  if (!reference) return known;
  known.of = target_of(reference.get());
  if (!known.of) return known;
  PyObject* modules = tried.modules.get(known.of.get());
  if (is_empty(modules)) return known;
  PyObject* first = PyTuple_GET_ITEM(PyList_GET_ITEM(modules, 0), 0);
  if (target_of(first).get() != module) return known;  // another model's
  Own flags = own(PyList_New(0));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(modules); ++i) {
    PyObject* kind = PyList_GET_ITEM(modules, i);
    Own one = target_of(PyTuple_GET_ITEM(kind, 0));
    if (!is_of_kind(kind, one.get())) return known;
    must(PyList_Append(flags.get(), flag.of(one.get()).get()));
  }
  known.flags = own(PyList_AsTuple(flags.get()));
  known.verdict = found_in(tried.verdicts.get(known.of.get()), known.flags.get());
  known.program = found_in(tried.programs.get(known.of.get()), known.flags.get());
  return known;
}

// `SecondRuns._wanted`, of what the plan names; false also where there is something to be said.
inline bool is_wanted(PyObject* second_runs) {
  static Name hooked("hooked"), ran("_ran");
  return hooked.is_true(second_runs) && ran.of(second_runs).get() == Py_None && hooks_may_be() && may_save();
}

// The input of a second run that is this tensor: handle, whether it needs a gradient, attributes.
inline Own input_of(PyObject* saved, PyObject* tensor) {
  static Name slowly("hold_slowly");
  Own held = hold(saved, tensor);
  if (!held) held = slowly.call(saved, tensor);
  PyObject* wants_grad = THPVariable_Unpack(tensor).requires_grad() ? Py_True : Py_False;
  PyObject** attributes = _PyObject_GetDictPtr(tensor);
  const bool none = attributes == nullptr || *attributes == nullptr;
  Own copy = own(none ? PyDict_New() : PyDict_Copy(*attributes));
  return own(PyTuple_Pack(3, held.get(), wants_grad, copy.get()));
}

inline Own new_saves(PyObject* program) {
  Own self = make(engine.Saves);
  saves.program.set_borrowed(self.get(), program);
  for (const Slot* one : {&saves.slots, &saves.entered, &saves.seen}) one->set(self.get(), own(PyList_New(0)));
  for (const Slot* one : {&saves.entries, &saves.made, &saves.taken, &saves.firsts}) {
    one->set(self.get(), own(PyDict_New()));
  }
  for (const Slot* one : {&saves.again, &saves.nbytes}) one->set_number(self.get(), 0);
  saves.saver.set_borrowed(self.get(), Py_None);
  return self;
}

// `ModuleRerun`; `inputs`: those of `given`, which are the arguments taken apart.
inline Own new_rerun(PyObject* owner, PyObject* mover, PyObject* batch, PyObject* call_again, const Known& known,
                     PyObject* program, PyObject* inputs, PyObject* given) {
  static Name current_stream("current_stream");
  Own made = make(engine.ModuleRerun), backend = Own::of(mover_slots.backend.get(mover)), aliases = own(PyList_New(0));
  PyObject *self = made.get(), *moves_inputs = Py_False;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(inputs); ++i) {
    PyObject* held = PyTuple_GET_ITEM(PyList_GET_ITEM(inputs, i), 0);
    if (!handle.record.is_none(held)) moves_inputs = Py_True;
    must(PyList_Append(aliases.get(), handle.alias.get(held)));
  }
  module_rerun.layer.set_borrowed(self, PyTuple_GET_ITEM(owner, 0));
  module_rerun.op.set_borrowed(self, PyTuple_GET_ITEM(owner, 1));
  rerun.owner.set_borrowed(self, owner);
  rerun.mover.set_borrowed(self, mover);
  rerun.stream.set(self, at_one_stream.is_true(backend.get()) ? Own::of(micro_batch.home.get(batch))
                                                              : current_stream.call(backend.get()));
  rerun.moves_inputs.set_borrowed(self, moves_inputs);
  rerun.saved.set(self, new_saves(program));
  module_rerun.inputs.set_borrowed(self, inputs);
  second_run.why_not.set(self, own(PyUnicode_FromString("")));
  second_run.call.set_borrowed(self, call_again);
  second_run.settings.set(self, note(tried.modules.get(known.of.get())));
  second_run.given.set_borrowed(self, given);
  second_run.random.set(self, call(of_module(engine.random, at_capture), aliases.get()));
  second_run.around.set(self, own(PyTuple_Pack(2, autocast_of_now().get(), variables_of_now().get())));
  for (const Slot* one : {&second_run.state, &module_rerun.untried}) one->set_borrowed(self, Py_None);
  for (const Slot* one : {&second_run.places, &second_run.then, &second_run.noted, &module_rerun.outputs, &filled}) {
    one->set(self, own(PyList_New(0)));
  }
  for (const Slot* one : {&module_rerun.number, &module_rerun.entered_again, &second_run.noted_again, &remaining}) {
    one->set_number(self, 0);
  }
  return made;
}

// `SavedTensors.may_drop`, where nobody watches
inline bool may_drop(PyObject* saved, PyObject* where, PyObject* look) {
  static Name every("every_record");
  return position.watch.is_none(where) && observation.counting.is_none(look) && observation.stopwatch.is_none(look) &&
         !every.is_true(saved);
}

// `ModuleRerun.ends`
inline void ends_first(PyObject* self, bool draws) {
  static Name capture_as("capture_as"), look_closer("_same");
  PyObject* saved = rerun.saved.get(self);
  add_to(mover_slots.dropped.get(rerun.mover.get(self)), rerun.owner.get(self), saves.nbytes.number(saved));
  saves.made.set(saved, own(PyDict_New()));
  saves.saver.set_borrowed(saved, Py_None);
  saves.taken.set(saved, own(PyDict_New()));
  if (draws) return;
  Own then = Own::of(second_run.random.get(self));
  const bool by_tracker = Py_TYPE(then.get()) == &PyTuple_Type;  // a patch's own, which needs no list of devices
  Own now = by_tracker ? call(of_module(engine.random, at_capture))
                       : call(of_module(engine.random, capture_as), then.get());
  if (are_same(then.get(), now.get()) ||
      call(of_module(engine.random, look_closer), then.get(), now.get()).get() == Py_True) {
    second_run.random.set_borrowed(self, Py_None);  // it drew nothing
  }
}

// It runs for the first time now.
class RunsFirst {
 public:
  RunsFirst(PyObject* where, PyObject* self, bool is_known) : where_(where) {
    position.rerun.set_borrowed(where, self);
    position.known.set_borrowed(where, is_known ? Py_True : Py_False);
  }
  ~RunsFirst() {
    position.rerun.set_borrowed(where_, Py_None);
    position.known.set_borrowed(where_, Py_False);
  }
  RunsFirst(const RunsFirst&) = delete;

 private:
  PyObject* where_;
};

// What it makes again from here on, and that it does: `ModuleRerun.returns`, and what `SecondRuns.run` does after that.
inline void remember(PyObject* self, PyObject* path, PyObject* result, PyObject* batch, bool worked) {
  Own tensors = own(PyList_New(0));
  if (PyUnicode_GET_LENGTH(path) != 0) collect(result, tensors.get());  // what a whole layer returns stays
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors.get()); ++i) {
    must(PyList_Append(module_rerun.outputs.get(self), Py_None));
    returns_one(self, own(PyLong_FromSsize_t(i)).get(), PyList_GET_ITEM(tensors.get(), i), batch);
  }
  if (!worked) return;  // an expert may be without tokens
  Own reference = reference_to(self);
  Own entry = own(PyTuple_Pack(3, module_rerun.layer.get(self), path, reference.get()));
  must(PyList_Append(micro_batch.recomputed.get(batch), entry.get()));
}

// `SecondRuns.run` of a module
inline Own first_run(PyObject* self, PyObject* where, PyObject* second_runs, PyObject* owner, PyObject* original,
                     PyObject* module, PyObject* args, PyObject* kwargs, PyObject* tensors, const Known& known) {
  static Name mover("_mover"), changes_input("_changes_input"), ran("ran"), every("every_record");
  position.about_to_run.set_borrowed(where, owner);
  Own batch = Own::of(position.micro_batch.get(where)), saved = Own::of(operator_runs.saved.get(self)),
      look = Own::of(operator_runs.observation.get(self));
  std::vector<int64_t> versions;
  bool worked = is_empty(tensors);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); ++i) {
    const at::Tensor& one = THPVariable_Unpack(PyList_GET_ITEM(tensors, i));
    versions.push_back(version_of(one));
    worked = worked || one.numel() != 0;
  }
  Own inputs = own(PyList_New(0)), all = own(PyTuple_Pack(3, args, kwargs, Py_None));
  std::vector<PyObject*> taken;  // one tensor again: some ask whether query is key
  Own given = copied(all.get(), [&](PyObject* one) {
    if (!fast_tensors::is_tensor(one)) return Own();
    const auto before = std::find(taken.begin(), taken.end(), one);
    Own number = own(PyLong_FromSsize_t(before - taken.begin()));
    if (before == taken.end()) {
      must(PyList_Append(inputs.get(), input_of(saved.get(), one).get()));
      taken.push_back(one);
    }
    return call(slot_type, number.get());
  });
  const bool drops = known.program && may_drop(saved.get(), where, look.get());
  Own call_again = call(engine.partial, original, module), its_mover = mover.of(second_runs);
  Own again = new_rerun(owner, its_mover.get(), batch.get(), call_again.get(), known,
                        drops ? known.program.get() : Py_None, inputs.get(), given.get());
  PyObject *layer = PyTuple_GET_ITEM(owner, 0), *path = PyTuple_GET_ITEM(owner, 1);
  begin_run(self, where, layer, path, Py_False);
  module_rerun.number.set_borrowed(again.get(), micro_batch.count.get(batch.get()));
  Own result;
  {
    const RunsFirst now(where, again.get(), drops);
    result = result_of(original, module, args, kwargs);
  }
  ends_first(again.get(), known.draws());
  for (size_t i = 0; i < versions.size(); ++i) {
    if (version_of(THPVariable_Unpack(PyList_GET_ITEM(tensors, static_cast<Py_ssize_t>(i)))) != versions[i]) {
      changes_input.call(second_runs, again.get());
    }
  }
  PyObject* lasting = rerun.saved.get(again.get());
  const bool as_known = drops && PyList_GET_SIZE(saves.slots.get(lasting)) ==
                                     PyTuple_GET_SIZE(PyTuple_GET_ITEM(known.program.get(), 0));
  if (!as_known && !every.is_true(saved.get())) ran.call(known.of.get(), known.flags.get(), lasting);
  remember(again.get(), path, result.get(), batch.get(), worked);
  return result;
}

// `OperatorRuns._run_call` of a module that runs again; `tensors`: those among its arguments.
inline PyObject* run_first(PyObject* self, PyObject* where, PyObject* layer, PyObject* path, PyObject* original,
                           PyObject* module, PyObject* args, PyObject* kwargs, PyObject* tensors, const Known& known) {
  const long long depth = PyList_GET_SIZE(position.stack.get(where));
  if (position.micro_batch.is_none(where)) fail_assertion("an operator runs in no micro-batch");
  Own number = own(PyLong_FromLongLong(micro_batch.count.number(position.micro_batch.get(where)) + 1));
  Own second_runs = Own::of(operator_runs.second_runs.get(self)), owner = own(PyTuple_Pack(2, layer, path));
  Own result(guarded([&] {
    return first_run(self, where, second_runs.get(), owner.get(), original, module, args, kwargs, tensors, known)
        .release();
  }));
  if (!result) return abandon(self, depth);
  end_run(self, where, depth);
  sign(self, where, Own::of(position.course.get(where)).get(), number.get(), result.get());
  return result.release();
}

// `OperatorRuns._run_module`
inline PyObject* run_module(PyObject* self, PyObject* where, PyObject* layer, PyObject* path, PyObject* original,
                            PyObject* module, PyObject* args, PyObject* kwargs) {
  static Name slowly("_run_module_slowly"), enters("enters");
  Own rerunning = Own::of(position.rerun.get(where)), look = Own::of(operator_runs.observation.get(self));
  const bool inside = Py_TYPE(rerunning.get()) == engine.ModuleRerun;
  if (observation.counting.is_none(look.get()) && (inside || rerunning.get() == Py_None)) {
    if (inside) enters.call(rerunning.get(), path, args, kwargs);
    Own said = inside ? Own::of(Py_None) : said_of(self, layer, path);  // nothing inside runs again by itself
    if (said.get() == Py_None) return run_once(self, where, layer, path, original, module, args, kwargs);
    Own second_runs = Own::of(operator_runs.second_runs.get(self));
    if (said && is_wanted(second_runs.get())) {
      const Known known = known_of(second_runs.get(), layer, path, module);
      Own tensors = own(PyList_New(0));
      collect(args, tensors.get());
      collect(kwargs, tensors.get());
      if (known.verdict && !known.changes_something() && !are_managed(tensors.get())) {
        if (known.is_refused()) {
          tensors = Own();  // it may let go of what it takes
          return run_once(self, where, layer, path, original, module, args, kwargs);
        }
        return run_first(self, where, layer, path, original, module, args, kwargs, tensors.get(), known);
      }
    }
  }
  return slowly.call(self, layer, path, original, module, args, kwargs).release();
}

inline PyObject* operator_runs_run_module(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    takes(count, 6, "_run_module takes a layer, a path, a function, a module, arguments and keywords");
    return run_module(self, operator_runs.position.get(self), args[0], args[1], args[2], args[3], args[4], args[5]);
  });
}

}  // namespace hot
