// saved_tensors.py: the two hooks.

#pragma once

#include "keeping.h"
#include "tape.h"

#include <frameobject.h>
#include <torch/csrc/autograd/function.h>

namespace hot {

// Whether a custom function packs what it saves: the code that called the hook.
inline bool by_a_function() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return false;
  Own code(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  return code.get() == engine.APPLY;
}

// Whether a custom function has made it.
inline bool made_by_a_function(const at::Tensor& tensor) {
  const auto node = tensor.grad_fn();
  return node && of_a_function(*node);
}

// `own_tensors.own`, where a custom function saves it.
inline Own with_own(PyObject* kept, PyObject* tensor, bool by_function) {
  if (!by_function) return Own::of(kept);
  const at::Tensor& given = THPVariable_Unpack(tensor);
  if (made_by_a_function(given)) return call(engine.own, kept, tensor);  // its own result, perhaps
  const bool is_handle = Py_TYPE(kept) == engine.Handle;
  const Slot& alias = is_handle ? handle.alias : saved_slot.alias;
  if (stays_itself(given)) alias.set_borrowed(kept, tensor);
  const bool itself = alias.get(kept) == tensor;
  Own attributes = own(itself ? PyDict_New() : PyObject_GenericGetDict(tensor, nullptr));
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  (is_handle ? handle.own : saved_slot.own).set(kept, own(PyTuple_Pack(2, type, attributes.get())));
  return Own::of(kept);
}

// `SavedTensors.pack`
inline PyObject* pack(PyObject* hooks, PyObject* tensor) {
  return guarded([&]() -> PyObject* {
    static Name slowly("pack_slowly");
    auto* of = reinterpret_cast<Hooks*>(hooks);
    const bool by_function = by_a_function();
    Own rerun_now = Own::of(position.rerun.get(of->position));
    Own batch_now = Own::of(position.micro_batch.get(of->position));
    PyObject *rerunning = rerun_now.get(), *batch = batch_now.get();
    if (rerunning == Py_None) {
      Own course_now = Own::of(position.course.get(of->position));
      PyObject* known = course_now.get();
      if (known != Py_None && batch != Py_None) {
        PyObject* number = micro_batch.count.get(batch);
        if (!same(number, course.at.get(known))) {
          course.at.set_borrowed(known, number);
          course.index.set_number(known, 0);
        }
        const long long index = course.index.number(known);
        course.index.set_number(known, index + 1);
        PyObject* expected = PyDict_GetItemWithError(course.saves.get(known), number);
        if (expected == nullptr && PyErr_Occurred()) throw python_error();
        PyObject* save = expected != nullptr && index < PyTuple_GET_SIZE(expected)
                             ? PyTuple_GET_ITEM(expected, index)
                             : Py_True;
        if (save == Py_False && by_function) {
          Own kept = native_handle(tensor);
          return with_own(kept.get(), tensor, true).release();
        }
        if (save == Py_False && THPVariable_Check(tensor)) {
          const at::Tensor& given = THPVariable_Unpack(tensor);
          Own alias = given.is_leaf() ? Own::of(tensor) : own(THPVariable_Wrap(given.detach()));
          Own version = own(PyLong_FromLongLong(given._version()));
          return must(PyTuple_Pack(2, alias.get(), version.get()));
        }
        if (save != Py_True) {
          if (Own kept = keep_as_known(of, tensor, save, batch, by_function)) {
            return with_own(kept.get(), tensor, by_function).release();
          }
        }
      }
      if (Own kept = keep_remade(of, tensor, batch, by_function)) {
        return with_own(kept.get(), tensor, by_function).release();
      }
      if (Own kept = keep_on_record(of, tensor, batch, by_function, Py_None)) {
        return with_own(kept.get(), tensor, by_function).release();
      }
    } else if (Py_TYPE(rerunning) == engine.ModuleRerun) {
      if (!saves.program.is_none(rerun.saved.get(rerunning))) {
        if (Own kept = drops(of, rerunning, tensor, batch, by_function)) {
          return with_own(kept.get(), tensor, by_function).release();
        }
      }
      if (Own kept = keep_on_record(of, tensor, batch, by_function, rerunning)) {
        return with_own(kept.get(), tensor, by_function).release();
      }
    } else if (Py_TYPE(rerunning) == engine.Tape) {
      if (Own kept = keep_on_tape(of, rerunning, tensor, batch, by_function)) return kept.release();
    }
    return slowly.call(of->saved, tensor, by_function ? Py_True : Py_False).release();
  });
}

// `own_tensors.unpacked`
inline void unpacked(PyObject* kept) {
  static Name name("handles");
  Own handles = name.of(engine.reading);
  if (handles.get() != Py_None) must(PyList_Append(handles.get(), kept));
}

// `own_tensors.as_saved`
inline Own as_saved(PyObject* tensor, PyObject* kept) {
  const bool is_handle = Py_TYPE(kept) == engine.Handle;
  if (!is_handle && Py_TYPE(kept) != engine.SavedSlot) return call(engine.as_saved, tensor, kept);
  PyObject *alias = (is_handle ? handle.alias : saved_slot.alias).get(kept);
  PyObject* its_own = (is_handle ? handle.own : saved_slot.own).get(kept);
  const at::Tensor& held = THPVariable_Unpack(alias);
  if (held.requires_grad() && held.is_leaf()) return Own::of(alias);  // then it is what was saved
  if (its_own == Py_None) fail_assertion("no custom function saved it");
  if (PyTuple_GET_SIZE(its_own) > 2) {
    if (Own same_one = target_of(PyTuple_GET_ITEM(its_own, 2))) return same_one;
  }
  PyObject *kind = PyTuple_GET_ITEM(its_own, 0), *attributes = PyTuple_GET_ITEM(its_own, 1);
  if (kind != Py_None && kind != reinterpret_cast<PyObject*>(Py_TYPE(tensor))) {
    return call(engine.as_saved, tensor, kept);
  }
  Own found = Own::of(tensor);
  const at::Tensor& unpacked = THPVariable_Unpack(tensor);
  if (unpacked.requires_grad() && unpacked.is_leaf()) {  // what was saved only claimed to
    const at::AutoGradMode without_graph(false);
    found = own(THPVariable_Wrap(unpacked.view_as(unpacked)));
  }
  if (PyDict_GET_SIZE(attributes) > 0) {
    must(PyDict_Update(own(PyObject_GenericGetDict(found.get(), nullptr)).get(), attributes));
  }
  if (!unpacked.grad_fn()) {  // as long as somebody has it, the next reading finds what was done to it
    Own read = own(PyWeakref_NewRef(found.get(), nullptr));
    (is_handle ? handle.own : saved_slot.own).set(kept, own(PyTuple_Pack(3, kind, attributes, read.get())));
  }
  return found;
}

// own_tensors.all_as_saved(tensors, handles)
inline PyObject* all_as_saved(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&] {
    takes(count, 2, "all_as_saved takes tensors and handles");
    PyObject *tensors = args[0], *handles = args[1];
    const Py_ssize_t size = PyTuple_GET_SIZE(tensors);
    Own found = own(PyTuple_New(size));
    Py_ssize_t at = 0;
    for (Py_ssize_t i = 0; i < size; ++i) at += PyTuple_GET_ITEM(tensors, i) != Py_None;
    if (at != PyList_GET_SIZE(handles)) return new_reference(tensors);  // somebody else's hooks
    at = 0;
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* one = PyTuple_GET_ITEM(tensors, i);
      Own saved = one == Py_None ? Own::of(one) : as_saved(one, PyList_GET_ITEM(handles, at++));
      PyTuple_SET_ITEM(found.get(), i, saved.release());
    }
    return found.release();
  });
}

inline Own unpacked_slot(Hooks* of, PyObject* kept) {
  static Name run_again("run_again");
  PyObject *self = saved_slot.made.get(kept), *rerunning = made.rerun.get(self);
  if (!is_empty(position.stack.get(of->position)) || has_several_streams(rerun.mover.get(rerunning))) return Own();
  PyObject* saving = saved_slot.saver.get(kept);
  unpacks(saver.micro_batch.get(saving), saver.number.get(saving));
  if (made.state.get(self) == engine.DROPPED) {
    run_again.call(rerunning);
    if (has_several_streams(rerun.mover.get(rerunning))) return Own();  // now it is there, and is waited for in Python
  }
  PyObject* again = made.tensor.get(self);
  if (again == Py_None || THPVariable_Unpack(again)._version() != made.version.number(self)) return Own();
  PyObject* layout = saved_slot.layout.get(kept);
  Own found = layout == Py_None ? Own::of(again)
                                : own(THPVariable_Wrap(laid_out(THPVariable_Unpack(again).storage(), layout)));
  if (!saved_slot.own.is_none(kept)) {
    saved_slot.alias.set_borrowed(kept, found.get());
    unpacked(kept);
  }
  return found;
}

inline bool bring_back_again(PyObject* self, PyObject* of);  // second_run.h

// `Handle.bring_back`, of a tensor that has not been modified in place.
inline Own content_of(PyObject* kept) {
  Own layout = Own::of(handle.layout.get(kept)), known = Own::of(handle.record.get(kept));
  if (layout.get() == Py_None) {
    if (known.get() == Py_None) return Own::of(handle.alias.get(kept));
    return alias_of(THPVariable_Unpack(handle.alias.get(kept)));
  }
  Own way_back = Own::of(record.way_back.get(known.get()));
  if (is_ours(way_back.get())) {
    bring_back(way_back.get(), known.get());
  } else if (!bring_back_again(way_back.get(), known.get())) {
    static Name brings_back("bring_back");
    brings_back.call(way_back.get(), known.get());
  }
  Own buffer = Own::of(record.buffer.get(known.get()));
  if (buffer.get() == Py_None) fail_assertion("nothing was brought back");
  return own(THPVariable_Wrap(laid_out(THPVariable_Unpack(buffer.get()).storage(), layout.get())));
}

inline Own unpacked_handle(Hooks* of, PyObject* kept) {
  PyObject* batch = handle.micro_batch.get(kept);
  static Name reads("_reads");  // for the gradient of a weight that is put off
  if (!observation.stopwatch.is_none(of->observation) || reads.of(of->saved).get() != Py_None) return Own();
  if (!is_empty(position.stack.get(of->position)) && !position.rerun.is_none(of->position)) return Own();
  const at::Tensor& alias = THPVariable_Unpack(handle.alias.get(kept));
  if (handle.version.is_none(kept) || alias._version() != handle.version.number(kept)) return Own();
  if (batch != Py_None && is_empty(position.stack.get(of->position))) unpacks(batch, handle.number.get(kept));
  Own found = content_of(kept);
  if (!handle.own.is_none(kept)) unpacked(kept);
  return found;
}

// `SavedTensors.unpack`
inline PyObject* unpack(PyObject* hooks, PyObject* kept) {
  return guarded([&]() -> PyObject* {
    static Name slowly("unpack");
    auto* of = reinterpret_cast<Hooks*>(hooks);
    Own found;
    if (PyTuple_CheckExact(kept)) {
      PyObject* tensor = PyTuple_GET_ITEM(kept, 0);
      if (THPVariable_Unpack(tensor)._version() == number_of(PyTuple_GET_ITEM(kept, 1))) found = Own::of(tensor);
    } else if (Py_TYPE(kept) == engine.SavedSlot) {
      found = unpacked_slot(of, kept);
    } else if (Py_TYPE(kept) == engine.Handle) {
      found = unpacked_handle(of, kept);
    }
    return found ? found.release() : slowly.call(of->saved, kept).release();
  });
}

inline int hooks_traverse(PyObject* self, visitproc visit, void* arg) {
  auto* of = reinterpret_cast<Hooks*>(self);
  Py_VISIT(of->saved);
  Py_VISIT(of->position);
  Py_VISIT(of->mover);
  Py_VISIT(of->observation);
  return 0;
}

inline int hooks_clear(PyObject* self) {
  auto* of = reinterpret_cast<Hooks*>(self);
  Py_CLEAR(of->saved);
  Py_CLEAR(of->position);
  Py_CLEAR(of->mover);
  Py_CLEAR(of->observation);
  return 0;
}

inline void hooks_dealloc(PyObject* self) {
  PyObject_GC_UnTrack(self);
  hooks_clear(self);
  Py_TYPE(self)->tp_free(self);
}

inline PyMethodDef hooks_methods[] = {
    {"pack", pack, METH_O, nullptr},
    {"unpack", unpack, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

inline PyTypeObject HooksType = [] {
  PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};
  type.tp_name = "hot_path.Hooks";
  type.tp_basicsize = sizeof(Hooks);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC;
  type.tp_dealloc = hooks_dealloc;
  type.tp_traverse = hooks_traverse;
  type.tp_clear = hooks_clear;
  type.tp_methods = hooks_methods;
  return type;
}();

// hooks(saved, position, mover, observation, device_type): (pack, unpack)
inline PyObject* hooks(PyObject*, PyObject* const* args, Py_ssize_t) {
  return guarded([&] {
    Own backend = Own::of(mover_slots.backend.get(args[2]));
    const c10::DeviceType type = device_type(Own::of(args[4]));
    const bool one_stream = at_one_stream.is_true(backend.get());
    Own made = own(HooksType.tp_alloc(&HooksType, 0));
    auto* of = reinterpret_cast<Hooks*>(made.get());
    of->saved = new_reference(args[0]);
    of->position = new_reference(args[1]);
    of->mover = new_reference(args[2]);
    of->observation = new_reference(args[3]);
    of->device_type = type;
    of->one_stream = one_stream;
    Own pack = own(PyObject_GetAttrString(made.get(), "pack"));
    Own unpack = own(PyObject_GetAttrString(made.get(), "unpack"));
    return must(PyTuple_Pack(2, pack.get(), unpack.get()));
  });
}

}  // namespace hot
