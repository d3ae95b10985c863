// What wrappers.py calls around every operator.

#pragma once

#include "first_run.h"

namespace hot {

// The engine in use, if any, and its parts.
struct Now {
  Own engine, position, operators;
};
inline Now& now = *new Now;  // never freed, as nobody knows the order in which a process ends

// use(engine): from now on it is this one; None: there is none.
inline PyObject* use(PyObject*, PyObject* given) {
  return guarded([&] {
    static Name place("position"), operators("operators");
    const bool none = given == Py_None;
    now.position = none ? Own() : place.of(given);
    now.operators = none ? Own() : operators.of(given);
    now.engine = none ? Own() : Own::of(given);
    return new_reference(Py_None);
  });
}

// Where it is in its model, and who runs its operators; empty where there is none, or a compiler looks on.
struct InUse {
  InUse() {
    static Name compiling("_is_compiling_flag");
    if (!now.engine || of_module(engine.compiler, compiling) == Py_True) return;
    where = Own::of(now.position.get());
    operators = Own::of(now.operators.get());
  }
  explicit operator bool() const { return static_cast<bool>(where); }
  // Whether a layer runs for the first time.
  bool in_layer() const {
    return where && is_empty(engine.under_way) && !is_empty(position.stack.get(where.get()));
  }

  Own where, operators;
};

inline void tell_ahead(const InUse& in_use) {
  static Name reaches("forward_reaches");
  reaches.call(operator_runs.passes.get(in_use.operators.get()), position.micro_batch.get(in_use.where.get()));
}

// runs(original, module, args, kwargs): `forward` of a module that may be an operator.
inline PyObject* runs(PyObject*, PyObject* const* given, Py_ssize_t) {
  return guarded([&]() -> PyObject* {
    PyObject *original = given[0], *module = given[1], *args = given[2], *kwargs = given[3];
    const InUse in_use;
    if (!in_use) return call_with(original, module, args, kwargs);
    Own attributes = own(PyObject_GenericGetDict(module, nullptr));
    Own place = Own::of(PyDict_GetItemWithError(attributes.get(), engine.TAG));
    if (!place) {
      if (PyErr_Occurred()) throw python_error();
      return call_with(original, module, args, kwargs);
    }
    PyObject *where = in_use.where.get(), *operators = in_use.operators.get();
    const bool inside = !is_empty(engine.under_way) || !is_empty(position.stack.get(where));
    if (inside && in_transform()) return call_with(original, module, args, kwargs);
    if (!is_empty(engine.under_way)) {
      Own running = Own::of(last_of(engine.under_way));
      enter_again(running.get(), PyTuple_GET_ITEM(place.get(), 1), args, kwargs);
      return call_with(original, module, args, kwargs);
    }
    Own rerunning = Own::of(position.rerun.get(where));
    const long long code = enter(where, place.get(), rerunning.get());
    if (code < 0) {
      static Name run("run");
      if (is_empty(position.stack.get(where))) {
        return run.call(operators, original, module, args, kwargs).release();
      }
      PyObject *layer = PyTuple_GET_ITEM(place.get(), 0), *path = PyTuple_GET_ITEM(place.get(), 1);
      return run_module(operators, where, layer, path, original, module, args, kwargs);
    }
    if ((code & AHEAD) != 0) tell_ahead(in_use);
    if ((code & ENTERS) != 0) {
      enters_known(rerun.saved.get(rerunning.get()), PyTuple_GET_ITEM(place.get(), 1), args, kwargs);
    }
    Own result(call_with(original, module, args, kwargs));
    if (!result) return abandon(operators, code >> BITS);
    if (!leave(where, code, rerunning.get())) end_run(operators, where, code >> BITS);
    return result.release();
  });
}

// `OperatorRuns.mark_start`, of an operator that somebody has to know of.
inline void begin_mark(PyObject* self, PyObject* where, PyObject* suffix) {
  static Name start_tape("start_tape");
  Own top = Own::of(last_of(position.stack.get(where)));
  PyObject* layer = PyTuple_GET_ITEM(top.get(), 0);
  Own path = Own::of(inline_path(PyTuple_GET_ITEM(top.get(), 1), suffix));
  begin_run(self, where, layer, path.get(), Py_True);
  if (position.rerun.is_none(where) && said_of(self, layer, path.get()).get() != Py_None) {
    start_tape.call(operator_runs.second_runs.get(self), layer, path.get());
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
    if (message == Py_None && suffix != Py_None) {
      const InUse in_use;
      if (in_use.in_layer()) {
        const int started = mark_start(in_use.where.get(), suffix);
        if (started == 0) begin_mark(in_use.operators.get(), in_use.where.get(), suffix);
        if (started == 2) tell_ahead(in_use);
      }
    }
    return mark(args[0], args[1], args[2], message, suffix);
  });
}

// ends(original, names, caller, message, suffix): inline code of the name ``suffix`` does.
inline PyObject* ends(PyObject*, PyObject* const* args, Py_ssize_t) {
  return guarded([&] {
    PyObject *message = args[3], *suffix = args[4];
    if (message == Py_None && suffix != Py_None) {
      const InUse in_use;
      if (in_use.in_layer() && !mark_stop(in_use.where.get(), suffix)) {
        end_mark(in_use.operators.get(), in_use.where.get(), suffix);
      }
    }
    return mark(args[0], args[1], args[2], message, suffix);
  });
}

}  // namespace hot
