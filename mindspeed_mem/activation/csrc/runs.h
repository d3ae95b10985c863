// operator_runs.py: operators that somebody has to know of; and what wrappers.py calls around every operator.

#pragma once

#include "operators.h"
#include "saves.h"

namespace hot {

inline Name at_position{"position"}, at_operators{"operators"}, at_passes{"passes"};

// Of an `OperatorRuns`.
inline Own place_in(PyObject* self) {
  static Name name("_position");
  return name.of(self);
}
inline Own second_runs_of(PyObject* self) {
  static Name name("_second_runs");
  return name.of(self);
}
inline Own observed(PyObject* self) {
  static Name name("_observation");
  return name.of(self);
}
inline Own plan_of(PyObject* self) {
  static Name name("_in_force");
  return name.of(self);
}
inline bool recomputes(PyObject* self) {
  static Name name("recomputes");
  return name.is_true(plan_of(self).get());
}

// Whether an operator may have to run again: not where `PlanInForce.recompute` has said that it has not.
inline bool may_run_again(PyObject* self, PyObject* layer, PyObject* path) {
  static Name said("_recompute");
  if (!recomputes(self)) return false;
  Own answers = said.of(plan_of(self).get()), key = own(PyTuple_Pack(2, layer, path));
  PyObject* answer = PyDict_GetItemWithError(answers.get(), key.get());
  if (answer == nullptr && PyErr_Occurred()) throw python_error();
  return answer != Py_None;
}
inline Own hooks_of(PyObject* self) {
  static Name saved("_saved"), name("hooks");
  return name.of(saved.of(self).get());
}

// Whoever measures times is told what runs.
inline void tell_stopwatch(PyObject* self, PyObject* layer, PyObject* path) {
  Own look = observed(self);
  PyObject* watch = observation.stopwatch.get(look.get());
  if (watch == Py_None) return;
  static Name switches("switch");
  switches.call(watch, layer, path);
}

// `OperatorRuns._by_course`
inline void by_course(PyObject* self, PyObject* where, PyObject* batch, PyObject* layer, PyObject* path) {
  static Name depart("depart"), natives("_natives"), hooked("hooked");
  PyObject *of = position.course.get(where), *count = micro_batch.count.get(batch);
  if (of != engine.UNKNOWN) {
    const long long number = number_of(count);
    PyObject* operators = course.operators.get(of);
    PyObject* expected = number < PyList_GET_SIZE(operators) ? PyList_GET_ITEM(operators, number) : nullptr;
    if (expected != nullptr && same(PyTuple_GET_ITEM(expected, 0), layer) &&
        same(PyTuple_GET_ITEM(expected, 1), path)) {
      PyObject* kept = PyDict_GetItemWithError(course.kept.get(of), count);
      if (kept != nullptr) add_unseen(micro_batch.native.get(batch), count, kept);
      if (kept == nullptr && PyErr_Occurred()) throw python_error();
      if (must(PySet_Contains(course.signed_.get(of), count))) {
        must(PyList_Append(micro_batch.saving.get(batch), count));  // `MicroBatch.signs`
      }
      if (PyList_GET_ITEM(course.hooked.get(of), number) != Py_True) return;
    } else {
      depart.call(natives.of(self).get());
    }
  }
  if (position.hooked.number(where) != 0 || !hooked.is_true(second_runs_of(self).get()) ||
      call(engine.hooks_are_ours_alone).get() != Py_True) {
    return;
  }
  // Under a checkpoint, whose hooks must stay innermost, or where somebody has disabled hooks: run natively.
  Own hooks = hooks_of(self);
  Own pushed(PyObject_CallObject(engine.push_hooks, hooks.get()));
  if (pushed) {
    position.hooked.set_number(where, PyList_GET_SIZE(position.stack.get(where)));
  } else if (PyErr_ExceptionMatches(PyExc_RuntimeError)) {
    PyErr_Clear();
  } else {
    throw python_error();
  }
}

// `OperatorRuns._start`
inline void begin_run(PyObject* self, PyObject* where, PyObject* layer, PyObject* path, PyObject* marker) {
  static Name starts("starts"), reaches("forward_reaches"), passes("_passes");
  Own batch = Own::of(position.micro_batch.get(where));
  if (batch.get() == Py_None) fail_assertion("an operator runs in no micro-batch");
  micro_batch.count.set_number(batch.get(), micro_batch.count.number(batch.get()) + 1);
  Own running = own(PyTuple_Pack(3, layer, path, marker));
  must(PyList_Append(position.stack.get(where), running.get()));
  if (!position.course.is_none(where)) {
    by_course(self, where, batch.get(), layer, path);
  } else if (!position.watch.is_none(where)) {
    starts.call(position.watch.get(where), layer, path, marker);
  }
  if (PyUnicode_GET_LENGTH(path) == 0 || position.course.is_none(where) || position.hooked.number(where) != 0 ||
      recomputes(self)) {
    switch_to(batch.get(), layer, path);
  }
  tell_stopwatch(self, layer, path);
  if (!micro_batch.ahead.is_none(batch.get())) reaches.call(passes.of(self).get(), batch.get());
}

// `OperatorRuns._leave`
inline void leave_run(PyObject* self, PyObject* where, long long depth) {
  static Name stops("stops");
  PyObject* stack = position.stack.get(where);
  if (depth < PyList_GET_SIZE(stack)) must(PyList_SetSlice(stack, depth, PyList_GET_SIZE(stack), nullptr));
  if (!position.watch.is_none(where)) {
    stops.call(position.watch.get(where), own(PyLong_FromLongLong(depth)).get());
  }
  if (position.hooked.number(where) <= depth) return;
  Own top = call(engine.top_hooks, Py_False);
  if (top.get() != Py_None && PyTuple_GET_ITEM(top.get(), 0) == PyTuple_GET_ITEM(hooks_of(self).get(), 0)) {
    call(engine.pop_hooks);
    position.hooked.set_number(where, 0);
  }
}

// `OperatorRuns.ended`
inline void end_run(PyObject* self, PyObject* where, long long depth) {
  static Name stop_tape("stop_tape");
  PyObject* stack = position.stack.get(where);
  Own batch = Own::of(position.micro_batch.get(where));
  if (batch.get() == Py_None) fail_assertion("an operator ends in no micro-batch");
  if (!position.course.is_none(where) && position.hooked.number(where) == 0 && !recomputes(self)) {
    // Nobody asks which operator runs: there is no hook, and no second run takes what it makes.
    if (depth < PyList_GET_SIZE(stack)) must(PyList_SetSlice(stack, depth, PyList_GET_SIZE(stack), nullptr));
  } else {
    if (!position.rerun.is_none(where)) {
      stop_tape.call(second_runs_of(self).get(), own(PyLong_FromLongLong(depth)).get());
    }
    leave_run(self, where, depth);
    back_to(batch.get(), stack);
    Own top = Own::of(is_empty(stack) ? engine.NO_OPERATOR : last_of(stack));
    tell_stopwatch(self, PyTuple_GET_ITEM(top.get(), 0), PyTuple_GET_ITEM(top.get(), 1));
  }
  ended(batch.get());
}

// What an operator has raised goes on, once what runs above ``depth`` has been left.
inline PyObject* abandon(PyObject* self, long long depth) {
  static Name abandoned("abandoned");
  PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (trace != nullptr) PyException_SetTraceback(value, trace);
  Own raised(type), what(value), from(trace);
  try {
    abandoned.call(self, own(PyLong_FromLongLong(depth)).get());
    PyErr_Restore(raised.release(), what.release(), from.release());
  } catch (python_error&) {  // what was raised first is its context
    PyObject *newer = nullptr, *now = nullptr, *at = nullptr;
    PyErr_Fetch(&newer, &now, &at);
    PyErr_NormalizeException(&newer, &now, &at);
    PyException_SetContext(now, what.release());
    PyErr_Restore(newer, now, at);
  }
  return nullptr;
}

// A call with a module before its other arguments.
inline PyObject* call_with(PyObject* original, PyObject* module, PyObject* args, PyObject* kwargs) {
  const Py_ssize_t count = PyTuple_GET_SIZE(args);
  c10::SmallVector<PyObject*, 8> given{module};
  for (Py_ssize_t i = 0; i < count; ++i) given.push_back(PyTuple_GET_ITEM(args, i));
  return PyObject_VectorcallDict(original, given.data(), given.size(), kwargs);
}

// `OperatorRuns._run_once`; `module`: the first argument of ``original``, or nullptr.
inline PyObject* run_once(PyObject* self, PyObject* where, PyObject* layer, PyObject* path, PyObject* original,
                          PyObject* module, PyObject* args, PyObject* kwargs) {
  static Name within("_run_within"), sign_at("_sign_at");
  PyObject* stack = position.stack.get(where);
  const long long depth = PyList_GET_SIZE(stack);
  if (depth != 0 && same(PyTuple_GET_ITEM(last_of(stack), 1), path) &&
      same(PyTuple_GET_ITEM(last_of(stack), 0), layer)) {
    // a subclass calling super, or a marker of the same name
    if (module == nullptr) return within.call(self, original, args, kwargs).release();
    Own first = own(PyTuple_Pack(1, module)), all = own(PySequence_Concat(first.get(), args));
    return within.call(self, original, all.get(), kwargs).release();
  }
  if (position.micro_batch.is_none(where)) fail_assertion("an operator runs in no micro-batch");
  Own number = own(PyLong_FromLongLong(micro_batch.count.number(position.micro_batch.get(where)) + 1));
  Own result;
  try {
    begin_run(self, where, layer, path, Py_False);
    result = Own(module == nullptr ? PyObject_Call(original, args, kwargs) : call_with(original, module, args, kwargs));
  } catch (python_error& raised) {
    raised.restore();
  }
  if (!result) return abandon(self, depth);
  end_run(self, where, depth);
  PyObject* of = position.course.get(where);
  if (of != Py_None && must(PySet_Contains(course.signed_.get(of), number.get()))) {
    sign_at.call(self, result.get(), number.get());
  }
  return result.release();
}

// ---- the same as methods
inline PyObject* operator_runs_start(PyObject* self, PyObject* const* args, Py_ssize_t) {
  return guarded([&] {
    begin_run(self, place_in(self).get(), args[0], args[1], args[2]);
    return new_reference(Py_None);
  });
}

inline PyObject* operator_runs_leave(PyObject* self, PyObject* depth) {
  return guarded([&] {
    leave_run(self, place_in(self).get(), number_of(depth));
    return new_reference(Py_None);
  });
}

inline PyObject* operator_runs_ended(PyObject* self, PyObject* depth) {
  return guarded([&] {
    end_run(self, place_in(self).get(), number_of(depth));
    return new_reference(Py_None);
  });
}

inline PyObject* operator_runs_run_once(PyObject* self, PyObject* const* args, Py_ssize_t) {
  return guarded([&] {
    return run_once(self, place_in(self).get(), args[0], args[1], args[2], nullptr, args[3], args[4]);
  });
}

inline void add_to_signature(PyObject* self, PyObject* signature, PyObject* tensor) {
  if (!THPVariable_Check(tensor)) return;
  static Name shape("shape"), dtype("dtype"), held("_held_by_others");
  for (Name* one : {&shape, &dtype}) must(PyList_Append(signature, one->of(tensor).get()));
  const at::Tensor& of = THPVariable_Unpack(tensor);
  must(PyList_Append(signature, of.requires_grad() ? Py_True : Py_False));
  if (Py_TYPE(tensor) == reinterpret_cast<PyTypeObject*>(THPVariableClass) && !of.grad_fn()) held.call(self, tensor);
}

// _signature(training, args, kwargs): what decides what a layer saves.
inline PyObject* operator_runs_signature(PyObject* self, PyObject* const* args, Py_ssize_t) {
  return guarded([&] {
    Own found = own(PyList_New(0));
    must(PyList_Append(found.get(), args[0]));
    const auto look = [&](PyObject* value) {
      if (PyTuple_Check(value) || PyList_Check(value)) {
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); ++i) {
          add_to_signature(self, found.get(), PySequence_Fast_GET_ITEM(value, i));
        }
      } else {
        add_to_signature(self, found.get(), value);
      }
    };
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) look(PyTuple_GET_ITEM(args[1], i));
    PyObject *name = nullptr, *value = nullptr;
    for (Py_ssize_t i = 0; PyDict_Next(args[2], &i, &name, &value);) look(value);
    return must(PyList_AsTuple(found.get()));
  });
}

// ---- what wrappers.py calls

// What a module has, without asking its type.
inline PyObject* of_module(PyObject* module, Name& name) {
  PyObject* found = PyDict_GetItemWithError(PyModule_GetDict(module), name.object());
  if (found == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, name.object());
    throw python_error();
  }
  return found;
}

// The engine in use, unless a compiler looks on.
inline Own engine_in_use() {
  static Name in_use("in_use"), compiling("_is_compiling_flag");
  PyObject* found = of_module(engine.engines, in_use);
  return found == Py_None || of_module(engine.compiler, compiling) == Py_True ? Own() : Own::of(found);
}

inline void tell_ahead(PyObject* in_use, PyObject* where) {
  static Name reaches("forward_reaches");
  Own passes = at_passes.of(in_use);
  reaches.call(passes.get(), position.micro_batch.get(where));
}

// runs(original, module, args, kwargs): `forward` of a module that may be an operator.
inline PyObject* runs(PyObject*, PyObject* const* given, Py_ssize_t) {
  return guarded([&]() -> PyObject* {
    PyObject *original = given[0], *module = given[1], *args = given[2], *kwargs = given[3];
    Own in_use = engine_in_use();
    if (!in_use) return call_with(original, module, args, kwargs);
    Own attributes = own(PyObject_GenericGetDict(module, nullptr));
    Own place = Own::of(PyDict_GetItemWithError(attributes.get(), engine.TAG));
    if (!place) {
      if (PyErr_Occurred()) throw python_error();
      return call_with(original, module, args, kwargs);
    }
    if (!is_empty(engine.under_way)) {
      Own running = Own::of(last_of(engine.under_way));
      enter_again(running.get(), PyTuple_GET_ITEM(place.get(), 1), args, kwargs);
      return call_with(original, module, args, kwargs);
    }
    Own where = at_position.of(in_use.get()), operators = at_operators.of(in_use.get());
    Own rerunning = Own::of(position.rerun.get(where.get()));
    const long long code = enter(where.get(), place.get(), rerunning.get());
    if (code < 0) {
      static Name run("run");
      PyObject *layer = PyTuple_GET_ITEM(place.get(), 0), *path = PyTuple_GET_ITEM(place.get(), 1);
      if (is_empty(position.stack.get(where.get())) || rerunning.get() != Py_None ||
          may_run_again(operators.get(), layer, path) ||
          !observation.counting.is_none(observed(operators.get()).get())) {
        return run.call(operators.get(), original, module, args, kwargs).release();
      }
      return run_once(operators.get(), where.get(), layer, path, original, module, args, kwargs);
    }
    if ((code & AHEAD) != 0) tell_ahead(in_use.get(), where.get());
    if ((code & ENTERS) != 0) {
      static Name enters("enters");
      enters.call(rerun.saved.get(rerunning.get()), rerunning.get(), PyTuple_GET_ITEM(place.get(), 1), args, kwargs);
    }
    Own result(call_with(original, module, args, kwargs));
    if (!result) return abandon(operators.get(), code >> BITS);
    if (!leave(where.get(), code, rerunning.get())) end_run(operators.get(), where.get(), code >> BITS);
    return result.release();
  });
}

// Where inline code is in a layer that runs for the first time; empty where it is not.
inline Own place_of_mark(PyObject* in_use) {
  if (in_use == nullptr || !is_empty(engine.under_way)) return Own();
  Own where = at_position.of(in_use);
  return is_empty(position.stack.get(where.get())) ? Own() : std::move(where);
}

// `OperatorRuns.mark_start`, of an operator that somebody has to know of.
inline void begin_mark(PyObject* self, PyObject* where, PyObject* suffix) {
  static Name start_tape("start_tape");
  Own top = Own::of(last_of(position.stack.get(where)));
  PyObject* layer = PyTuple_GET_ITEM(top.get(), 0);
  Own path = call(engine.inline_path, PyTuple_GET_ITEM(top.get(), 1), suffix);
  begin_run(self, where, layer, path.get(), Py_True);
  if (position.rerun.is_none(where) && may_run_again(self, layer, path.get())) {
    start_tape.call(second_runs_of(self).get(), layer, path.get());
  }
}

// `OperatorRuns.mark_stop`
inline void end_mark(PyObject* self, PyObject* where, PyObject* suffix) {
  if (is_marked(where, suffix)) end_run(self, where, PyList_GET_SIZE(position.stack.get(where)) - 1);
}

// The marker itself: `original(msg, suffix)`. Where its ranges are off it would do nothing, and is not called.
inline PyObject* mark(PyObject* original, PyObject* names, PyObject* caller, PyObject* message, PyObject* suffix) {
  static Name switched("_nvtx_enabled");
  PyObject* enabled = PyDict_GetItemWithError(names, switched.object());
  if (enabled == nullptr && PyErr_Occurred()) throw python_error();
  if (enabled == Py_False) return new_reference(Py_None);
  if (message == Py_None && enabled != nullptr && must(PyObject_IsTrue(enabled))) {
    Own named = call(caller);
    return call(original, named.get(), suffix).release();
  }
  return call(original, message, suffix).release();
}

// begins(original, names, caller, message, suffix): inline code of the name ``suffix`` does.
inline PyObject* begins(PyObject*, PyObject* const* args, Py_ssize_t) {
  return guarded([&] {
    PyObject *message = args[3], *suffix = args[4];
    Own in_use = message == Py_None && suffix != Py_None ? engine_in_use() : Own();
    Own where = place_of_mark(in_use.get());
    if (where) {
      const int started = mark_start(where.get(), suffix);
      if (started == 0) begin_mark(at_operators.of(in_use.get()).get(), where.get(), suffix);
      if (started == 2) tell_ahead(in_use.get(), where.get());
    }
    return mark(args[0], args[1], args[2], message, suffix);
  });
}

// ends(original, names, caller, message, suffix): inline code of the name ``suffix`` does.
inline PyObject* ends(PyObject*, PyObject* const* args, Py_ssize_t) {
  return guarded([&] {
    PyObject *message = args[3], *suffix = args[4];
    Own in_use = message == Py_None && suffix != Py_None ? engine_in_use() : Own();
    Own where = place_of_mark(in_use.get());
    if (where && !mark_stop(where.get(), suffix, in_use.get())) {
      end_mark(at_operators.of(in_use.get()).get(), where.get(), suffix);
    }
    return mark(args[0], args[1], args[2], message, suffix);
  });
}

}  // namespace hot
