// rerun/module_rerun.py: an operator's second run where it finds all as the first one did: nothing was drawn, and
// modes, modules and whatever else may change are as they were. All others are Python's.

#pragma once

#include "hooks.h"
#include "refill.h"
#include "runs.h"
#include "settings.h"

#include <vector>

namespace hot {

inline struct SecondRunSlots {
  Slot call{"call"}, state{"state"}, settings{"settings"}, given{"_given"}, random{"_random"}, around{"_around"},
      places{"_places"}, then{"_then"}, noted{"noted"}, noted_again{"_noted_again"}, why_not{"why_not"};
} second_run;

// A list of the module that has `Rerun`.
inline PyObject* listed(Name& name) { return of_module(engine.second_runs, name); }

// Whether `torch.autocast` is as it was: as `module_rerun._autocast_now` has it.
inline bool is_autocast_as_in(PyObject* then) {
  PyObject* keeps = at::autocast::is_autocast_cache_enabled() ? Py_True : Py_False;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(then); ++i) {
    PyObject* one = PyList_GET_ITEM(then, i);
    const char* kind = PyUnicode_AsUTF8(PyTuple_GET_ITEM(one, 0));
    if (kind == nullptr) throw python_error();
    const c10::DeviceType type = c10::Device(kind).type();
    const auto* dtype = torch::getTHPDtype(at::autocast::get_autocast_dtype(type));
    PyObject* enabled = at::autocast::is_autocast_enabled(type) ? Py_True : Py_False;
    if (PyTuple_GET_ITEM(one, 1) != reinterpret_cast<const PyObject*>(dtype) || PyTuple_GET_ITEM(one, 2) != enabled ||
        PyTuple_GET_ITEM(one, 3) != keeps) {
      return false;
    }
  }
  return true;
}

// For any device.
inline bool is_autocast_on(PyObject* then) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(then); ++i) {
    if (PyTuple_GET_ITEM(PyList_GET_ITEM(then, i), 2) == Py_True) return true;
  }
  return false;
}

inline bool is_as_then(PyObject* self) {
  static Name readers("READERS");
  if (!second_run.random.is_none(self) || !second_run.state.is_none(self) || !module_rerun.untried.is_none(self) ||
      !is_empty(second_run.places.get(self)) || !is_empty(second_run.then.get(self)) || !is_empty(listed(readers)) ||
      has_several_streams(rerun.mover.get(self)) ||
      !is_autocast_as_in(PyTuple_GET_ITEM(second_run.around.get(self), 0))) {
    return false;
  }
  return PyList_CheckExact(second_run.settings.get(self));
}

// How many of these references are to something that is wanted.
inline long long count_wanted(PyObject* references, bool in_slots) {
  static Name state("state");
  long long found = 0;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(references); ++i) {
    PyObject* one = PyList_GET_ITEM(references, i);
    if (one == Py_None) continue;
    if (Own of = target_of(in_slots ? PyTuple_GET_ITEM(one, 0) : one)) {
      if (state.of(of.get()).get() == engine.DROPPED) ++found;
    }
  }
  return found;
}

// Whether what has been made again was written to since.
inline bool is_overwritten(PyObject* of) {
  return !record.buffer.is_none(of) &&
         THPVariable_Unpack(record.buffer.get(of))._version() != record.version.number(of);
}

// What it runs from, there again; empty where a tensor has been modified in place, or is none of those known here.
inline Own leaves_of(PyObject* self) {
  Own inputs = Own::of(module_rerun.inputs.get(self)), leaves = own(PyList_New(0));
  for (Py_ssize_t i = 0; inputs.get() != Py_None && i < PyList_GET_SIZE(inputs.get()); ++i) {
    PyObject *input = PyList_GET_ITEM(inputs.get(), i), *kept = PyTuple_GET_ITEM(input, 0);
    if (Py_TYPE(kept) != engine.Handle || handle.version.is_none(kept) ||
        THPVariable_Unpack(handle.alias.get(kept))._version() != handle.version.number(kept)) {
      return Own();
    }
    PyObject* of = handle.record.get(kept);
    if (of != Py_None && record.state.get(of) == engine.REMADE && is_overwritten(of)) return Own();
    Own content = content_of(kept), leaf = alias_of(THPVariable_Unpack(content.get()));
    PyObject* attributes = PyTuple_GET_ITEM(input, 2);
    if (PyDict_GET_SIZE(attributes) > 0) {
      must(PyDict_Update(own(PyObject_GenericGetDict(leaf.get(), nullptr)).get(), attributes));
    }
    if (PyTuple_GET_ITEM(input, 1) == Py_True) THPVariable_Unpack(leaf.get()).set_requires_grad(true);
    must(PyList_Append(leaves.get(), leaf.get()));
  }
  return leaves;
}

// Something that is undone at the end of a scope, whatever has happened there; if that fails, Python says so.
template <class Undo>
class Afterwards {
 public:
  explicit Afterwards(Undo undo) : undo_(std::move(undo)) {}
  ~Afterwards() {
    after_failing([&] {
      try {
        undo_();
      } catch (...) {
        if (PyErr_Occurred()) PyErr_WriteUnraisable(nullptr);
      }
    });
  }
  Afterwards(const Afterwards&) = delete;

 private:
  Undo undo_;
};

// Context variables with plain values, as `ModuleRerun` notes them.
inline Own variables_of_now() {
  Own now = own(PyContext_CopyCurrent()), plain = own(PyList_New(0));
  const Py_ssize_t count = PyObject_Size(now.get());
  if (count < 0) throw python_error();
  if (count == 0) return plain;
  Own items = own(PyMapping_Items(now.get()));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(items.get()); ++i) {
    PyObject* item = PyList_GET_ITEM(items.get(), i);
    if (is_plain(PyTuple_GET_ITEM(item, 1))) must(PyList_Append(plain.get(), item));
  }
  return plain;
}

// Within a context of its own, and with these hooks. Empty: all that was wanted was there before its end.
inline Own call_again(PyObject* self, PyObject* leaves) {
  static Name refill("refill"), no_backward("_no_backward");
  Own given = joined(second_run.given.get(self), leaves), context = own(PyContext_New());
  Own pack = refill.of(self), unpack = no_backward.of(self);
  const c10::AutoGradMode with_graph(true);
  const bool keeps_casts = at::autocast::is_autocast_cache_enabled();  // as `second_run.no_shared_casts`
  if (is_autocast_on(PyTuple_GET_ITEM(second_run.around.get(self), 0))) {
    at::autocast::set_autocast_cache_enabled(false);
  }
  const Afterwards with_casts([&] { at::autocast::set_autocast_cache_enabled(keeps_casts); });
  push_hooks(pack.get(), unpack.get());
  const Afterwards without_hooks([] { pop_hooks(); });
  must(PyContext_Enter(context.get()));
  const Afterwards outside([&] { must(PyContext_Exit(context.get())); });
  PyObject* variables = PyTuple_GET_ITEM(second_run.around.get(self), 1);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(variables); ++i) {
    PyObject* one = PyList_GET_ITEM(variables, i);
    own(PyContextVar_Set(PyTuple_GET_ITEM(one, 0), PyTuple_GET_ITEM(one, 1)));
  }
  PyObject* of = second_run.call.get(self);
  Own result(PyObject_Call(of, PyTuple_GET_ITEM(given.get(), 0), PyTuple_GET_ITEM(given.get(), 1)));
  if (!result) {
    if (!PyErr_ExceptionMatches(enough)) throw python_error();
    PyErr_Clear();
  }
  return result;
}

// `second_run.GUARDS`. Where something fails they are left without being told of it.
class Guarded {
 public:
  Guarded() = default;
  ~Guarded() {
    while (!entered_.empty()) after_failing([&] { leave_one(); });
  }
  Guarded(const Guarded&) = delete;
  void enter() {
    static Name name("GUARDS");
    Own guards = Own::of(listed(name));
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(guards.get()); ++i) enter(call(PyList_GET_ITEM(guards.get(), i)));
  }
  void enter(Own guard) {
    static Name begin("__enter__");
    begin.call(guard.get());
    entered_.push_back(std::move(guard));
  }
  void leave() {
    while (!entered_.empty()) leave_one();
  }

 private:
  void leave_one() {
    static Name leave("__exit__");
    Own last = std::move(entered_.back());
    entered_.pop_back();
    leave.call(last.get(), Py_None, Py_None, Py_None);
  }
  std::vector<Own> entered_;
};

inline void run_as_then(PyObject* self, PyObject* leaves) {
  static Name end_again("end_again");
  must(PyList_Append(engine.under_way, self));
  const Afterwards over([&] {
    const Py_ssize_t last = PyList_GET_SIZE(engine.under_way) - 1;
    must(PyList_SetSlice(engine.under_way, last, last + 1, nullptr));
    own(empty_all(nullptr, leaves));
  });
  Guarded guarded;
  guarded.enter();
  if (PyObject* noted = second_run.settings.get(self); !are_as_noted(noted)) {
    guarded.enter(call(engine.settings_as_of, noted));
  }
  const auto end = [&] {
    if (has_several_streams(rerun.mover.get(self))) end_again.call(rerun.mover.get(self));  // since it began
  };
  Own result;
  try {
    result = call_again(self, leaves);
  } catch (...) {
    after_failing(end);
    throw;
  }
  end();
  if (result) refill_outputs(self, result.get());
  guarded.leave();
}

// `ModuleRerun.remake`
inline void remake(PyObject* self, PyObject* leaves) {
  static Name differs("_differs");
  saves.again.set_number(rerun.saved.get(self), 0);
  module_rerun.entered_again.set_number(self, 0);
  second_run.noted_again.set_number(self, 0);
  filled.set(self, must(PyList_New(0)));
  {
    const Afterwards forgotten([&] { filled.set(self, must(PyList_New(0))); });
    run_as_then(self, leaves);
  }
  if (remaining.number(self) != 0) differs.call(self, Py_None, Py_None);
  module_rerun.inputs.set_borrowed(self, Py_None);
  second_run.settings.set(self, own(PyTuple_New(0)));
  second_run.given.set(self, own(Py_BuildValue("((){}O)", Py_None)));
}

inline PyObject* module_rerun_remakes(PyObject* self, PyObject*) {
  return guarded([&] {
    static Name slowly("remake_slowly");
    const long long wanted = count_wanted(saves.slots.get(rerun.saved.get(self)), true) +
                             count_wanted(module_rerun.outputs.get(self), false);
    if (wanted == 0) return new_reference(Py_None);
    Own leaves = is_as_then(self) ? leaves_of(self) : Own();
    if (!leaves) return slowly.call(self).release();
    remaining.set_number(self, wanted);
    remake(self, leaves.get());
    return new_reference(Py_None);
  });
}

// `Rerun.bring_back`; false: that is Python's, and nothing has been done.
inline bool bring_back_again(PyObject* self, PyObject* of) {
  if (Py_TYPE(self) != engine.ModuleRerun) return false;
  static Name run_again("run_again"), bring_back("bring_back"), await_second_run("await_second_run");
  if (record.state.get(of) == engine.DROPPED) {
    run_again.call(self);
    Own way_back = Own::of(record.way_back.get(of));
    if (way_back.get() != self) {  // memory ran out later in the second run, and it had to leave
      bring_back.call(way_back.get(), of);
      return true;
    }
  } else if (is_overwritten(of)) {
    return false;
  }
  PyObject* mover = rerun.mover.get(self);
  if (has_several_streams(mover)) await_second_run.call(mover, of);
  return true;
}

// `Rerun.run_again`
inline PyObject* rerun_runs_again(PyObject* self, PyObject*) {
  return guarded([&] {
    static Name slowly("run_again_slowly"), remake("remake"), counted("second_runs");
    Own mover = Own::of(rerun.mover.get(self)), backend = Own::of(mover_slots.backend.get(mover.get()));
    if (!is_ours(mover.get()) || mover_slots.timing.get(mover.get()) != engine.UNTIMED) return slowly.call(self).release();
    if (!at_one_stream.is_true(backend.get()) &&
        !(is_accelerator(backend.get()) && is_current(rerun.stream.get(self)))) {
      return slowly.call(self).release();
    }
    remake.call(self);
    add_to(counted.of(mover.get()).get(), rerun.owner.get(self), 1);
    return new_reference(Py_None);
  });
}

}  // namespace hot
