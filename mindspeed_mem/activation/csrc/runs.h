// operator_runs.py: operators that somebody has to know of.

#pragma once

#include "operators.h"
#include "saves.h"

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/dynamo/compiled_autograd.h>

namespace hot {

// Of an `OperatorRuns`.
inline bool recomputes(PyObject* self) {
  static Name name("recomputes");
  return name.is_true(operator_runs.in_force.get(self));
}

// What `PlanInForce.recompute` has said: None of an operator that does not run again; empty: nobody has asked yet.
inline Own said_of(PyObject* self, PyObject* layer, PyObject* path) {
  static Name said("_recompute");
  if (!recomputes(self)) return Own::of(Py_None);
  Own answers = said.of(operator_runs.in_force.get(self)), key = own(PyTuple_Pack(2, layer, path));
  return found_in(answers.get(), key.get());
}
inline Own hooks_of(PyObject* self) {
  static Name name("hooks");
  return name.of(operator_runs.saved.get(self));
}

// Whoever measures times is told what runs.
inline void tell_stopwatch(PyObject* self, PyObject* layer, PyObject* path) {
  PyObject* watch = observation.stopwatch.get(operator_runs.observation.get(self));
  if (watch == Py_None) return;
  static Name switches("switch");
  switches.call(watch, layer, path);
}

// `OperatorRuns._by_course`
inline void by_course(PyObject* self, PyObject* where, PyObject* batch, PyObject* layer, PyObject* path) {
  static Name depart("depart"), hooked("hooked");
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
      depart.call(operator_runs.natives.get(self));
    }
  }
  if (position.hooked.number(where) != 0 || !hooked.is_true(operator_runs.second_runs.get(self)) ||
      !hooks_are_ours_alone()) {
    return;
  }
  // not under a checkpoint, whose hooks must stay innermost, nor where somebody has disabled hooks: it runs natively
  Own hooks = hooks_of(self);
  push_hooks(PyTuple_GET_ITEM(hooks.get(), 0), PyTuple_GET_ITEM(hooks.get(), 1));
  position.hooked.set_number(where, PyList_GET_SIZE(position.stack.get(where)));
}

// `OperatorRuns._start`
inline void begin_run(PyObject* self, PyObject* where, PyObject* layer, PyObject* path, PyObject* marker) {
  static Name starts("starts"), reaches("forward_reaches");
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
  if (!micro_batch.ahead.is_none(batch.get())) reaches.call(operator_runs.passes.get(self), batch.get());
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
  if (top_pack().get() == PyTuple_GET_ITEM(hooks_of(self).get(), 0)) {
    pop_hooks();
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
      stop_tape.call(operator_runs.second_runs.get(self), own(PyLong_FromLongLong(depth)).get());
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

// The same, of a module, or of what is a call by itself: then `module` is nullptr.
inline Own result_of(PyObject* original, PyObject* module, PyObject* args, PyObject* kwargs) {
  return own(module == nullptr ? PyObject_Call(original, args, kwargs) : call_with(original, module, args, kwargs));
}

// Says before the node of an operator's result runs that its backward begins; what `register_prehook` makes for that
// takes ten times as long.
class BackwardBegins : public torch::autograd::FunctionPreHook {
 public:
  BackwardBegins(PyObject* batch, PyObject* number) : batch_(Own::of(batch)), number_(Own::of(number)) {}
  ~BackwardBegins() override {
    if (!Py_IsInitialized()) {
      batch_.release();
      number_.release();
      return;
    }
    const pybind11::gil_scoped_acquire here;
    batch_ = Own();
    number_ = Own();
  }
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& gradients) override {
    const pybind11::gil_scoped_acquire here;
    try {
      unpacks(batch_.get(), number_.get());
    } catch (python_error& raised) {
      raised.persist();
      throw;
    }
    return gradients;
  }
  // Where backward is compiled, as a hook in Python. Which of these torch asks depends on its version.
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) const { add_to(args); }
  void compiled_args(torch::dynamo::autograd::CompiledNodeArgs& args) { add_to(args); }

 private:
  void add_to(torch::dynamo::autograd::CompiledNodeArgs& args) const {
    const pybind11::gil_scoped_acquire here;
    Own hook = call(engine.says_when, batch_.get(), number_.get());
    args.add_pre_hook(c10::SafePyObject(hook.release(), getPyInterpreter()));
  }
  Own batch_, number_;
};

// `OperatorRuns._sign_at`, where the course says so; `of`: the course, or None.
inline void sign(PyObject* self, PyObject* where, PyObject* of, PyObject* number, PyObject* result) {
  static Name covered("covered");
  if (of == Py_None || must(PySet_Contains(course.signed_.get(of), number)) == 0) return;
  const bool several = (PyTuple_Check(result) || PyList_Check(result)) && PySequence_Fast_GET_SIZE(result) > 0;
  PyObject *output = several ? PySequence_Fast_GET_ITEM(result, 0) : result, *batch = position.micro_batch.get(where);
  if (!THPVariable_Check(output) || batch == Py_None || !covered.is_true(operator_runs.in_force.get(self))) return;
  const auto node = THPVariable_Unpack(output).grad_fn();
  if (node) node->add_pre_hook(std::make_unique<BackwardBegins>(batch, number));
}

// `OperatorRuns._run_within`
inline PyObject* run_within(PyObject* self, PyObject* where, PyObject* original, PyObject* module, PyObject* args,
                            PyObject* kwargs) {
  static Name returns("returns");
  if (!position.watch.is_none(where)) returns.call(Own::of(position.watch.get(where)).get());
  PyObject* batch = position.micro_batch.get(where);
  Own number = batch == Py_None ? own(PyLong_FromLong(0)) : Own::of(micro_batch.count.get(batch));
  Own of = Own::of(position.course.get(where)), result = result_of(original, module, args, kwargs);
  sign(self, where, of.get(), number.get(), result.get());
  return result.release();
}

// `OperatorRuns._run_once`; `module`: the first argument of ``original``, or nullptr.
inline PyObject* run_once(PyObject* self, PyObject* where, PyObject* layer, PyObject* path, PyObject* original,
                          PyObject* module, PyObject* args, PyObject* kwargs) {
  PyObject* stack = position.stack.get(where);
  const long long depth = PyList_GET_SIZE(stack);
  if (depth != 0 && same(PyTuple_GET_ITEM(last_of(stack), 1), path) &&
      same(PyTuple_GET_ITEM(last_of(stack), 0), layer)) {
    // a subclass calling super, or a marker of the same name
    return run_within(self, where, original, module, args, kwargs);
  }
  if (position.micro_batch.is_none(where)) fail_assertion("an operator runs in no micro-batch");
  Own number = own(PyLong_FromLongLong(micro_batch.count.number(position.micro_batch.get(where)) + 1));
  Own result(guarded([&] {
    begin_run(self, where, layer, path, Py_False);
    return result_of(original, module, args, kwargs).release();
  }));
  if (!result) return abandon(self, depth);
  end_run(self, where, depth);
  sign(self, where, Own::of(position.course.get(where)).get(), number.get(), result.get());
  return result.release();
}

// ---- the same as methods
inline PyObject* operator_runs_start(PyObject* self, PyObject* const* args, Py_ssize_t) {
  return guarded([&] {
    begin_run(self, operator_runs.position.get(self), args[0], args[1], args[2]);
    return new_reference(Py_None);
  });
}

inline PyObject* operator_runs_leave(PyObject* self, PyObject* depth) {
  return guarded([&] {
    leave_run(self, operator_runs.position.get(self), number_of(depth));
    return new_reference(Py_None);
  });
}

inline PyObject* operator_runs_ended(PyObject* self, PyObject* depth) {
  return guarded([&] {
    end_run(self, operator_runs.position.get(self), number_of(depth));
    return new_reference(Py_None);
  });
}

inline PyObject* operator_runs_run_once(PyObject* self, PyObject* const* args, Py_ssize_t) {
  return guarded([&] {
    return run_once(self, operator_runs.position.get(self), args[0], args[1], args[2], nullptr, args[3], args[4]);
  });
}

inline void add_to_signature(PyObject* self, PyObject* signature, PyObject* tensor) {
  if (tensor == Py_None || !THPVariable_Check(tensor)) return;  // most are None, of which it would ask its type
  static Name shape("shape"), shapes_in("_shapes_in"), dtype("dtype"), held("_held_by_others");
  const at::Tensor& of = THPVariable_Unpack(tensor);
  const bool strided = of.layout() == c10::kStrided, nested = strided && of.is_nested();
  const bool plain = strided && !nested && fast_tensors::is_tensor(tensor);
  const auto size = [&] { return nested ? shapes_in.call(self, tensor) : shape.of(tensor); };
  must(PyList_Append(signature, (plain ? tuple_of(of.sizes(), &THPSizeType) : size()).get()));
  Own kind = plain ? Own::of(reinterpret_cast<PyObject*>(torch::getTHPDtype(of.scalar_type()))) : dtype.of(tensor);
  must(PyList_Append(signature, kind.get()));
  must(PyList_Append(signature, of.requires_grad() ? Py_True : Py_False));
  if (!plain || of.grad_fn()) return;  // others may have several storages, or none
  if (of.requires_grad()) {
    held.call(self, tensor);
  } else {
    Own storage = storage_of(of), attributes = attributes_of(storage.get());
    PyObject* known = marks_in(attributes.get());
    keep_here((known == nullptr ? new_marks(attributes.get()) : Own::of(known)).get());
  }
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

}  // namespace hot
