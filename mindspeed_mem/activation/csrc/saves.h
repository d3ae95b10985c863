// saved_tensors.py, storage/records.py and rerun/dropped.py: what autograd keeps instead of a tensor, where it is known
// what becomes of that. Everything else goes on in Python.

#pragma once

#include "moves.h"

#include <frameobject.h>
#include <torch/csrc/autograd/function.h>

#include <typeinfo>

namespace hot {

// The two hooks of one `SavedTensors`.
struct Hooks {
  PyObject_HEAD
  PyObject *saved, *position, *mover, *observation;
  c10::DeviceType device_type;
  bool one_stream;
};

// Whether a custom function packs what it saves: the code that called the hook.
inline bool by_a_function() {
  PyFrameObject* frame = PyEval_GetFrame();
  if (frame == nullptr) return false;
  Own code(reinterpret_cast<PyObject*>(PyFrame_GetCode(frame)));
  return code.get() == engine.APPLY;
}

inline bool on_home_stream(const Hooks* of, PyObject* batch) {
  if (of->one_stream) return true;
  static Name stream_key("stream_key");
  Own backend = at_backend.of(of->mover), key = stream_key.call(backend.get());
  return same(key.get(), micro_batch.home_key.get(batch));
}

inline bool has_several_streams(PyObject* mover) { return PyObject_Size(at_several.of(mover).get()) > 0; }

// A tensor that shares memory and version counter with this one, and no graph.
inline Own alias_of(const at::Tensor& tensor) { return own(THPVariable_Wrap(tensor.tensor_data())); }

inline at::Tensor base_of(const at::Tensor& tensor) { return tensor.is_view() ? at::Tensor(tensor._base()) : tensor; }

inline Own reference_to(PyObject* object) { return own(PyWeakref_NewRef(object, nullptr)); }

// `Record.holds`, and `Made.holds` where `base` may be None.
inline bool holds(PyObject* version, PyObject* base, const at::Tensor& tensor) {
  const int64_t now = tensor._version();
  if (now != number_of(version)) return false;
  if (now == 0) return true;
  Own known = base == Py_None ? Own() : target_of(base);
  return known && THPVariable_Check(known.get()) && THPVariable_Unpack(known.get()).is_same(base_of(tensor));
}

inline void begin_handle(PyObject* self, const at::Tensor& tensor, PyObject* of, PyObject* batch) {
  handle.alias.set(self, alias_of(tensor));
  handle.version.set_number(self, tensor._version());
  handle.record.set_borrowed(self, of);
  handle.micro_batch.set_borrowed(self, batch);
  handle.layout.set_borrowed(self, Py_None);
  handle.own.set_borrowed(self, Py_None);
}

// `Handle`, of what is plain
inline Own new_handle(PyObject* tensor, PyObject* of, PyObject* batch, PyObject* number) {
  Own made = make(engine.Handle);
  begin_handle(made.get(), THPVariable_Unpack(tensor), of, batch);
  handle.number.set_borrowed(made.get(), number);
  saved_by(batch, number);
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
      handle.alias.set(self, detach.call(tensor));
      handle.version.set(self, version.of(tensor));
      handle.record.set_borrowed(self, of);
      handle.micro_batch.set_borrowed(self, batch);
      handle.layout.set_borrowed(self, Py_None);
      handle.own.set_borrowed(self, Py_None);
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

inline bool stays_itself(const at::Tensor& tensor) { return tensor.requires_grad() && tensor.is_leaf(); }

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

// ---- what a recomputed operator makes for backward alone

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
  static Name was_taken("_was_taken"), used_at("used_at");
  PyObject* self = rerun.saved.get(rerunning);
  PyObject *slots = saves.slots.get(self), *known = PyTuple_GET_ITEM(saves.program.get(self), 0);
  const Py_ssize_t turn = PyList_GET_SIZE(slots);
  if (turn >= PyTuple_GET_SIZE(known) || !fast_tensors::is_tensor(tensor)) return Own();
  PyObject* first = PyTuple_GET_ITEM(known, turn);
  const long long first_turn = number_of(first);
  if (first_turn < 0 || has_several_streams(of->mover) || !on_home_stream(of, batch)) return Own();
  const at::Tensor& given = THPVariable_Unpack(tensor);
  if (given.layout() != c10::kStrided) return Own();
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
    if (first_turn != turn || (by_function && stays_itself(given))) return Own();
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
    if (must(PyDict_Contains(saves.taken.get(self), first))) was_taken.call(self, first, storage.get(), tensor);
  }
  PyObject* count = micro_batch.count.get(batch);
  Own saving = Own::of(saves.saver.get(self));
  if (saving.get() == Py_None || !same(saver.number.get(saving.get()), count)) {
    saving = make(engine.Saver);
    saver.micro_batch.set_borrowed(saving.get(), batch);
    saver.number.set_borrowed(saving.get(), count);
    saved_by(batch, count);
    saves.saver.set_borrowed(self, saving.get());
    if (rerun.moves_inputs.get(rerunning) == Py_True) used_at.call(rerunning, count);
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

// ---- the hooks
// Whether a custom function has made it. Torch does not export the type of their nodes.
inline bool made_by_a_function(const at::Tensor& tensor) {
  const auto node = tensor.grad_fn();
  if (!node) return false;
  const auto& made_it = *node;
  return std::strstr(typeid(made_it).name(), "autograd6PyNode") != nullptr;
}

inline Own with_own(PyObject* kept, PyObject* tensor, bool by_function) {
  if (!by_function) return Own::of(kept);
  const at::Tensor& given = THPVariable_Unpack(tensor);
  const bool itself = Py_TYPE(kept) == engine.Handle && handle.alias.get(kept) == tensor;
  if (itself || stays_itself(given) || made_by_a_function(given)) {
    return call(engine.own, kept, tensor);  // its own result, perhaps
  }
  Own attributes = own(PyObject_GenericGetDict(tensor, nullptr));
  PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(tensor));
  Own mine = own(PyTuple_Pack(2, type, attributes.get()));
  (Py_TYPE(kept) == engine.SavedSlot ? saved_slot.own : handle.own).set(kept, std::move(mine));
  return Own::of(kept);
}

// `SavedTensors.pack`
inline PyObject* pack(PyObject* hooks, PyObject* tensor) {
  return guarded([&]() -> PyObject* {
    static Name slowly("pack_slowly");
    auto* of = reinterpret_cast<Hooks*>(hooks);
    const bool by_function = by_a_function();
    Own rerun_now = Own::of(position.rerun.get(of->position)), batch_now = Own::of(position.micro_batch.get(of->position));
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
          Own kept = call(engine.native, tensor);
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
    } else if (Py_TYPE(rerunning) == engine.ModuleRerun && !saves.program.is_none(rerun.saved.get(rerunning))) {
      if (Own kept = drops(of, rerunning, tensor, batch, by_function)) {
        return with_own(kept.get(), tensor, by_function).release();
      }
    }
    return slowly.call(of->saved, tensor, by_function ? Py_True : Py_False).release();
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
    call(engine.unpacked, kept);
  }
  return found;
}

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
  } else {
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
  if (!handle.own.is_none(kept)) call(engine.unpacked, kept);
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
    Own backend = at_backend.of(args[2]);
    const char* device_type = PyUnicode_AsUTF8(args[4]);
    if (device_type == nullptr) throw python_error();
    const c10::DeviceType type = c10::Device(device_type).type();
    const bool one_stream = at_one_stream.is_true(backend.get());
    Own made = own(HooksType.tp_alloc(&HooksType, 0));
    auto* of = reinterpret_cast<Hooks*>(made.get());
    of->saved = new_reference(args[0]);
    of->position = new_reference(args[1]);
    of->mover = new_reference(args[2]);
    of->observation = new_reference(args[3]);
    of->device_type = type;
    of->one_stream = one_stream;
    Own pack = own(PyObject_GetAttrString(made.get(), "pack")), unpack = own(PyObject_GetAttrString(made.get(), "unpack"));
    return must(PyTuple_Pack(2, pack.get(), unpack.get()));
  });
}

// ---- a second run
inline Slot remaining{"_remaining"};
inline PyObject* enough = nullptr;

// The same storage, made again: whether `one`, a `Made`, is what `tensor` is now, laid out as `layout` says.
inline bool fill(PyObject* self, PyObject* one, PyObject* layout, const at::Tensor& tensor) {
  Own found = layout_of(tensor);
  if (!same(found.get(), layout) ||
      static_cast<long long>(tensor.storage().nbytes()) != made.nbytes.number(one)) {
    return false;
  }
  made.tensor.set(one, same(layout, made.layout.get(one))
                           ? alias_of(tensor)
                           : own(THPVariable_Wrap(laid_out(tensor.storage(), made.layout.get(one)))));
  made.version.set_number(one, THPVariable_Unpack(made.tensor.get(one))._version());
  made.state.set_borrowed(one, engine.REMADE);
  enter_copy(tensor, made.nbytes.get(one), true, rerun.owner.get(self));
  if (!made.attributes.is_none(one)) {
    Own storage = storage_of(tensor), attributes = attributes_of(storage.get());
    must(PyDict_Update(attributes.get(), made.attributes.get(one)));
  }
  return true;
}

// `ModuleRerun.refill`
inline PyObject* refill(PyObject* self, PyObject* tensor) {
  return guarded([&]() -> PyObject* {
    static Name slowly("refill_slowly");
    PyObject* first = rerun.saved.get(self);
    PyObject* slots = saves.slots.get(first);
    const long long index = saves.again.number(first);
    if (index < PyList_GET_SIZE(slots)) {
      PyObject* entry = PyList_GET_ITEM(slots, index);
      Own wanted = entry == Py_None ? Own() : target_of(PyTuple_GET_ITEM(entry, 0));
      const bool is_made = wanted && Py_TYPE(wanted.get()) == engine.Made;
      if (!wanted || (is_made && made.state.get(wanted.get()) != engine.DROPPED)) {
        saves.again.set_number(first, index + 1);
        return new_reference(Py_None);
      }
      PyObject* mover = rerun.mover.get(self);
      if (is_made && fast_tensors::is_tensor(tensor) && THPVariable_Unpack(tensor).layout() == c10::kStrided &&
          !has_several_streams(mover) && at_one_stream.is_true(at_backend.of(mover).get()) &&
          fill(self, wanted.get(), PyTuple_GET_ITEM(entry, 1), THPVariable_Unpack(tensor))) {
        const long long left = remaining.number(self) - 1;
        remaining.set_number(self, left);
        saves.again.set_number(first, index + 1);
        if (left != 0) return new_reference(Py_None);
        PyErr_SetNone(enough);
        return nullptr;
      }
    }
    return slowly.call(self, tensor).release();
  });
}

}  // namespace hot
