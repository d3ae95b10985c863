// Operators that matter to nobody, whose number alone is counted; all others are in runs.h.

#pragma once

#include "moves.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/SequenceNumber.h>
#include <ATen/TracerMode.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/PyInterpreter.h>

#include <type_traits>

namespace hot {

// What has been found for two objects, by their addresses: a few instructions, where a dictionary or a comparison of
// strings takes hundreds, several times for each operator.
class PairCache {
 public:
  // Borrowed; `find` returns a new reference.
  template <class Find>
  PyObject* of(PyObject* one, PyObject* other, Find&& find) {
    const auto place = reinterpret_cast<uintptr_t>(one) / 16 * 31 + reinterpret_cast<uintptr_t>(other) / 16;
    Entry& entry = entries_[place % SIZE];
    if (entry.one.get() != one || entry.other.get() != other) {
      Own found(must(find()));
      entry = Entry{Own::of(one), Own::of(other), std::move(found)};  // kept, so that no other has their addresses
    }
    return entry.found.get();
  }

 private:
  static constexpr uintptr_t SIZE = 1024;
  struct Entry {
    Own one, other, found;
  };
  Entry* const entries_ = new Entry[SIZE];  // never freed, as nobody knows the order in which a process ends
};

// `regions.inline_path`; borrowed.
inline PyObject* inline_path(PyObject* parent, PyObject* suffix) {
  static PairCache paths;
  return paths.of(parent, suffix, [&] { return call(engine.inline_path, parent, suffix).release(); });
}

enum Quiet { NOTHING_SAVED = 0, INSIDE = 1, AGAIN = 2, AHEAD = 4, ENTERS = 8, BITS = 4 };

// Its entry in the list of operators that nobody has to know of; nullptr: it is none.
inline PyObject* entry_at(PyObject* quiet, long long number, PyObject* layer, PyObject* path) {
  if (number >= PyList_GET_SIZE(quiet)) return nullptr;
  PyObject* found = PyList_GET_ITEM(quiet, number);
  if (found == Py_None || !same(PyTuple_GET_ITEM(found, 0), layer) || !same(PyTuple_GET_ITEM(found, 1), path)) {
    return nullptr;
  }
  return found;
}

// `MicroBatch.switch`
inline void switch_to(PyObject* of, PyObject* layer, PyObject* path) {
  Own bound = own(PyLong_FromUnsignedLongLong(at::sequence_number::peek()));
  must(PyList_Append(micro_batch.bounds.get(of), bound.get()));
  Own running = own(PyTuple_Pack(3, layer, path, micro_batch.count.get(of)));
  must(PyList_Append(micro_batch.running.get(of), running.get()));
}

inline PyObject* micro_batch_switches(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    takes(count, 3, "switch takes a layer, an operator and its number");
    Own bound = own(PyLong_FromUnsignedLongLong(at::sequence_number::peek()));
    must(PyList_Append(micro_batch.bounds.get(self), bound.get()));
    Own running = own(PyTuple_Pack(3, args[0], args[1], args[2]));
    must(PyList_Append(micro_batch.running.get(self), running.get()));
    return new_reference(Py_None);
  });
}

// An operator without a hook starts: returns its kind.
inline int start(PyObject* where, PyObject* batch, PyObject* of, PyObject* entry, long long number, int kind) {
  micro_batch.count.set_number(batch, number);
  must(PyList_Append(position.stack.get(where), entry));
  PyObject* count = micro_batch.count.get(batch);
  PyObject* kept = PyDict_GetItemWithError(course.kept.get(of), count);
  if (kept != nullptr) {
    add_unseen(micro_batch.native.get(batch), count, kept);
  } else if (PyErr_Occurred()) {
    throw python_error();
  }
  if (kind != NOTHING_SAVED) switch_to(batch, PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1));
  return micro_batch.ahead.is_none(batch) ? kind : kind | AHEAD;
}

// ---- the saved-tensor hooks in force. Asked and set without Python's functions, of which each takes a thousand
// instructions; before torch 2.7 these objects were others.
using DefaultHooks = at::SavedTensorDefaultHooks;

// What the innermost ones pack with; nullptr: there are none, or a compiler keeps them for later.
template <class Hooks = DefaultHooks>
Own top_pack() {
  const auto& now = Hooks::get_tls_state();
  using Pair = std::decay_t<decltype(now.stack.top())>;
  if constexpr (std::is_same_v<Pair, std::pair<c10::SafePyObject, c10::SafePyObject>>) {
    if (now.stack.empty() || now.is_tracing) return Own();
    return Own::of(now.stack.top().first.ptr(getPyInterpreter()));
  } else {
    Own found = call(engine.top_hooks, Py_False);
    return found.get() == Py_None ? Own() : Own::of(PyTuple_GET_ITEM(found.get(), 0));
  }
}

// These are the innermost ones from now on; throws a c10::Error where somebody has disabled hooks.
template <class Hooks = DefaultHooks>
void push_hooks(PyObject* pack, PyObject* unpack) {
  if constexpr (std::is_invocable_v<decltype(&Hooks::push_hooks), c10::SafePyObject, c10::SafePyObject>) {
    Hooks::lazy_initialize();
    Hooks::push_hooks(c10::SafePyObject(new_reference(pack), getPyInterpreter()),
                      c10::SafePyObject(new_reference(unpack), getPyInterpreter()));
  } else {
    Hooks::lazy_initialize();
    Hooks::push_hooks(new_reference(pack), new_reference(unpack));
  }
}

template <class Hooks = DefaultHooks>
void pop_hooks() {
  const auto popped = Hooks::pop_hooks();
  if constexpr (std::is_same_v<std::decay_t<decltype(popped.first)>, PyObject*>) {
    Py_DECREF(popped.first);
    Py_DECREF(popped.second);
  }
}

// ---- regions.py
inline bool hooks_may_be() { return DefaultHooks::is_enabled(); }

inline bool hooks_are_ours_alone() { return engine.top_hooks != Py_None && !top_pack() && hooks_may_be(); }

inline bool is_under_checkpoint() {
  static Name name("__module__");
  if (engine.top_hooks == Py_None) return call(engine.under_checkpoint).get() == Py_True;
  Own pack = top_pack();
  if (!pack) return false;
  Own home(PyObject_GetAttr(pack.get(), name.object()));
  if (!home) {
    if (!PyErr_ExceptionMatches(PyExc_AttributeError)) throw python_error();
    PyErr_Clear();
  }
  return home && PyUnicode_Check(home.get()) &&
         PyUnicode_CompareWithASCIIString(home.get(), "torch.utils.checkpoint") == 0;
}

// `regions.in_transform`. Asked for torch's stack of them, a thread is given one, which is copied for each of its nodes.
inline bool in_transform() {
  return c10::impl::tls_local_dispatch_key_set().included_.has(c10::DispatchKey::FuncTorchDynamicLayerFrontMode);
}

inline bool may_save() {
  if (!at::GradMode::is_enabled() || torch::autograd::get_current_graph_task_id() != -1) return false;
  return !in_transform() && !at::tracer::impl::is_dispatch_enabled() && !is_under_checkpoint();
}

inline PyObject* regions_hooks_are_ours_alone(PyObject*, PyObject*) {
  return guarded([] { return new_reference(hooks_are_ours_alone() ? Py_True : Py_False); });
}

inline PyObject* regions_may_save(PyObject*, PyObject*) {
  return guarded([] { return new_reference(may_save() ? Py_True : Py_False); });
}

inline PyObject* last_of(PyObject* list) { return PyList_GET_ITEM(list, PyList_GET_SIZE(list) - 1); }

// What runs at this place, as `Quiet` has it, and which of its operators nobody has to know of; nullptr: that is not
// known.
inline std::pair<int, PyObject*> quiet_at(PyObject* where) {
  PyObject *of = position.course.get(where), *rerunning = position.rerun.get(where);
  if (of == Py_None) return {NOTHING_SAVED, nullptr};
  if (rerunning != Py_None) return {AGAIN, position.known.get(where) == Py_True ? course.again.get(of) : nullptr};
  if (position.hooked.number(where) != 0) return {INSIDE, course.inside.get(of)};
  return {NOTHING_SAVED, course.quiet.get(of)};
}

// Whether it is an operator that nobody has to know of, which has started: what `leave` takes; -1: it is none, and
// nothing has happened.
inline long long enter(PyObject* where, PyObject* tag, PyObject* rerunning) {
  PyObject *stack = position.stack.get(where), *of = position.course.get(where);
  const auto [kind, quiet] = quiet_at(where);
  if (quiet == nullptr || is_empty(stack)) return -1;
  PyObject *layer = PyTuple_GET_ITEM(tag, 0), *path = PyTuple_GET_ITEM(tag, 1), *top = last_of(stack);
  PyObject* batch = position.micro_batch.get(where);
  const long long depth = PyList_GET_SIZE(stack), number = micro_batch.count.number(batch);
  int code = kind;
  if (same(PyTuple_GET_ITEM(top, 1), path) && same(PyTuple_GET_ITEM(top, 0), layer)) {
    // a subclass calling super: it is all of what runs already
    if (entry_at(quiet, number, layer, path) == nullptr) return -1;
  } else {
    PyObject* entry = entry_at(quiet, number + 1, layer, path);
    if (entry == nullptr) return -1;
    code = start(where, batch, of, entry, number + 1, kind);
  }
  if (kind == AGAIN) {
    PyObject* saving = rerun.saved.get(rerunning);
    PyObject* entered = saves.entered.get(saving);
    Own turn = own(PyLong_FromSsize_t(PyList_GET_SIZE(entered)));
    static Name entries("entries");
    Own expected = entries.of(saves.program.get(saving));
    if (must(PyDict_Contains(expected.get(), turn.get()))) {
      code |= ENTERS;
    } else {
      must(PyList_Append(entered, path));
    }
  }
  return (depth << BITS) | code;
}

inline void back_to(PyObject* batch, PyObject* stack) {
  PyObject* top = is_empty(stack) ? engine.NO_OPERATOR : last_of(stack);
  switch_to(batch, PyTuple_GET_ITEM(top, 0), PyTuple_GET_ITEM(top, 1));
}

inline void ended(PyObject* batch) {
  if (is_empty(micro_batch.fresh.get(batch)) && !something_is_due(batch)) {
    if (!LateCopies(Own::of(micro_batch.late.get(batch))).any()) return;
  }
  operator_ended(batch);
}

// Whether all has been done that is to be done when the operator ends.
inline bool leave(PyObject* where, long long code, PyObject* rerunning) {
  const long long depth = code >> BITS;
  if (position.rerun.get(where) != rerunning || position.hooked.number(where) > depth) return false;
  PyObject* stack = position.stack.get(where);
  if (PyList_GET_SIZE(stack) <= depth) return true;
  must(PyList_SetSlice(stack, depth, PyList_GET_SIZE(stack), nullptr));
  Own batch = Own::of(position.micro_batch.get(where));
  if ((code & (INSIDE | AGAIN)) != 0) back_to(batch.get(), stack);
  ended(batch.get());
  return true;
}

// Whether inline code of that name is an operator that nobody has to know of, which has started; 2: and a backward
// follows.
inline int mark_start(PyObject* where, PyObject* suffix) {
  PyObject* of = position.course.get(where);
  const auto [kind, quiet] = quiet_at(where);
  if (quiet == nullptr) return 0;
  PyObject* top = last_of(position.stack.get(where));
  PyObject *layer = PyTuple_GET_ITEM(top, 0), *parent = PyTuple_GET_ITEM(top, 1);
  PyObject *path = inline_path(parent, suffix), *batch = position.micro_batch.get(where);
  const long long number = micro_batch.count.number(batch);
  if (path == parent || same(path, parent)) return entry_at(quiet, number, layer, path) != nullptr;
  PyObject* entry = entry_at(quiet, number + 1, layer, path);
  if (entry == nullptr) return 0;
  return (start(where, batch, of, entry, number + 1, kind) & AHEAD) != 0 ? 2 : 1;
}

// Whether inline code of that name is the last part of a path.
inline bool ends_with(PyObject* path, PyObject* suffix) {
  PyObject* known = PyDict_GetItemWithError(engine.MARKERS, suffix);
  if (known == nullptr && PyErr_Occurred()) throw python_error();
  PyObject* name = known == nullptr ? suffix : known;
  if (!PyUnicode_Check(name)) return false;
  const Py_ssize_t before = PyUnicode_GET_LENGTH(path) - PyUnicode_GET_LENGTH(name);
  const bool last = before == 0 || (before > 0 && PyUnicode_READ_CHAR(path, before - 1) == '.');
  return last && must(static_cast<int>(PyUnicode_Tailmatch(path, name, 0, PY_SSIZE_T_MAX, 1))) != 0 &&
         PyUnicode_FindChar(name, '.', 0, PY_SSIZE_T_MAX, 1) < 0;
}

// Whether the innermost operator that runs is inline code of that name.
inline bool is_marked(PyObject* where, PyObject* suffix) {
  static PairCache answers;
  PyObject *top = last_of(position.stack.get(where)), *path = PyTuple_GET_ITEM(top, 1);
  if (PyTuple_GET_ITEM(top, 2) != Py_True) return false;
  return answers.of(path, suffix, [&] { return new_reference(ends_with(path, suffix) ? Py_True : Py_False); }) == Py_True;
}

// Whether such an operator has ended.
inline bool mark_stop(PyObject* where, PyObject* suffix) {
  PyObject *of = position.course.get(where), *rerunning = position.rerun.get(where);
  const bool looks = rerunning != Py_None || position.hooked.number(where) != 0;
  PyObject* stack = position.stack.get(where);
  PyObject* top = last_of(stack);
  if (PyTuple_GET_ITEM(top, 2) != Py_True) return true;  // no inline code is running
  if (of == Py_None || (looks && is_empty(course.again.get(of))) ||
      position.hooked.number(where) >= PyList_GET_SIZE(stack) ||
      (rerunning != Py_None && position.known.get(where) != Py_True)) {
    return false;
  }
  if (!is_marked(where, suffix)) return true;
  must(PyList_SetSlice(stack, PyList_GET_SIZE(stack) - 1, PyList_GET_SIZE(stack), nullptr));
  Own batch = Own::of(position.micro_batch.get(where));
  if (looks || course.switches.get(of) == Py_True) back_to(batch.get(), stack);
  ended(batch.get());
  return true;
}

}  // namespace hot
