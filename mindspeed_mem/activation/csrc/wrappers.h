// What wrappers.py calls around every operator.

#pragma once

#include "first_run.h"

namespace hot {

inline Name at_position{"position"}, at_operators{"operators"}, at_passes{"passes"};

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
    Own where = at_position.of(in_use.get());
    const bool inside = !is_empty(engine.under_way) || !is_empty(position.stack.get(where.get()));
    if (inside && in_transform()) return call_with(original, module, args, kwargs);
    if (!is_empty(engine.under_way)) {
      Own running = Own::of(last_of(engine.under_way));
      enter_again(running.get(), PyTuple_GET_ITEM(place.get(), 1), args, kwargs);
      return call_with(original, module, args, kwargs);
    }
    Own operators = at_operators.of(in_use.get()), rerunning = Own::of(position.rerun.get(where.get()));
    const long long code = enter(where.get(), place.get(), rerunning.get());
    if (code < 0) {
      static Name run("run");
      if (is_empty(position.stack.get(where.get()))) {
        return run.call(operators.get(), original, module, args, kwargs).release();
      }
      PyObject *layer = PyTuple_GET_ITEM(place.get(), 0), *path = PyTuple_GET_ITEM(place.get(), 1);
      return run_module(operators.get(), where.get(), layer, path, original, module, args, kwargs);
    }
    if ((code & AHEAD) != 0) tell_ahead(in_use.get(), where.get());
    if ((code & ENTERS) != 0) {
      enters_known(rerun.saved.get(rerunning.get()), PyTuple_GET_ITEM(place.get(), 1), args, kwargs);
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
  if (position.rerun.is_none(where) && said_of(self, layer, path.get()).get() != Py_None) {
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
