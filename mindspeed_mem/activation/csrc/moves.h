// storage/micro_batch.py and storage/mover.py: what leaves, what comes back, and when. On a CPU, whose copies have
// happened when a call returns, nothing is waited for; elsewhere streams and events are the backend's, in Python.

#pragma once

#include "ledger.h"

#include <array>
#include <chrono>
#include <cstring>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Size.h>
#include <torch/csrc/autograd/graph_task.h>

namespace hot {

inline Name at_streams("_streams"), at_begin("_begin"), at_lock("_lock"), at_backend("backend"), at_slabs("slabs"),
    at_late("late"), at_nbytes("nbytes"), at_timing("timing"), at_moved("moved"), at_several("several"), at_auto("auto"),
    at_bytes_out("bytes_out"), at_copies_out("copies_out"), at_bytes_in("bytes_in"), at_copies_in("copies_in"),
    at_current_stream("current_stream"), at_record("record"), at_done("done"),
    at_copy("copy"), at_empty("empty"), at_add("add"), at_drop("drop"), at_take("take"), at_give("give"),
    at_acquire("acquire"), at_release("release"), at_popleft("popleft"), at_append("append"), at_get("get"),
    at_wait("wait"), at_cancel("cancel"), at_one_stream("one_stream"), at_token("token"), at_forget("forget");

// The error that Python has been told of, kept while something else runs.
class KeptError {
 public:
  KeptError() { PyErr_Fetch(&type_, &value_, &trace_); }
  ~KeptError() { PyErr_Restore(type_, value_, trace_); }
  KeptError(const KeptError&) = delete;

 private:
  PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

// Other threads may run in Python meanwhile.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// Both are uint8 [nbytes], on the host. What is large is copied as torch copies it: by all its threads.
inline void copy_bytes(PyObject* target, const at::Tensor& source) {
  constexpr size_t large = 1 << 16;
  const at::Tensor to = THPVariable_Unpack(target).variable_data();  // a version counter of its own
  TORCH_CHECK(to.nbytes() == source.nbytes(), "copy: target has ", to.nbytes(), " bytes, source ", source.nbytes());
  if (source.nbytes() < large) {
    std::memcpy(to.data_ptr(), source.const_data_ptr(), source.nbytes());
  } else {
    const WithoutGil meanwhile;
    to.copy_(source);
  }
}

// Who moves records, as one call needs it.
class Moving {
 public:
  explicit Moving(PyObject* mover)
      : mover(mover), backend(at_backend.of(mover)), late(at_late.of(mover)), timing(at_timing.of(mover)),
        cpu(Py_TYPE(backend.get()) == engine.CpuBackend), lock_(at_lock.of(mover)) {
    at_acquire.call(lock_.get());
  }
  ~Moving() {
    if (copying_.count() > 0) add_seconds();
    const KeptError error;
    Py_XDECREF(PyObject_CallMethodNoArgs(lock_.get(), at_release.object()));
  }
  Moving(const Moving&) = delete;

  bool plain() const { return timing.get() == engine.UNTIMED; }
  // Nothing can be late: copies block.
  bool at_once() const { return cpu && plain(); }
  bool has_late() { return at_nbytes.number(late.get()) != 0; }
  // `CpuBackend.copy`
  void copy(PyObject* target, const at::Tensor& source) {
    const auto begin = std::chrono::steady_clock::now();
    copy_bytes(target, source);
    copying_ += std::chrono::steady_clock::now() - begin;
  }

  PyObject* mover;
  Own backend, late, timing;
  const bool cpu;

 private:
  void add_seconds() noexcept {
    static Name seconds("_copy_seconds");
    const KeptError error;
    try {
      Own sum = own(PyFloat_FromDouble(PyFloat_AsDouble(seconds.of(backend.get()).get()) + copying_.count()));
      seconds.set(backend.get(), sum.get());
    } catch (...) {
      PyErr_Clear();
    }
  }

  Own lock_;
  std::chrono::duration<double> copying_{0};
};

inline bool is_ours(PyObject* mover) { return Py_TYPE(mover) == engine.Mover; }

inline Own tuple_of(c10::IntArrayRef numbers, PyTypeObject* type) {
  Own made = own(type->tp_alloc(type, static_cast<Py_ssize_t>(numbers.size())));
  for (size_t i = 0; i < numbers.size(); ++i) {
    PyTuple_SET_ITEM(made.get(), static_cast<Py_ssize_t>(i), must(PyLong_FromLongLong(numbers[i])));
  }
  return made;
}

// `layout_of`
inline Own layout_of(const at::Tensor& tensor) {
  Own dtype = Own::of(reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())));
  Own size = tuple_of(tensor.sizes(), &THPSizeType), stride = tuple_of(tensor.strides(), &PyTuple_Type);
  Own offset = own(PyLong_FromLongLong(tensor.storage_offset()));
  return own(PyTuple_Pack(4, dtype.get(), size.get(), stride.get(), offset.get()));
}

// A tensor that lies in `storage` as `layout` says.
inline at::Tensor laid_out(const c10::Storage& storage, PyObject* layout) {
  const auto numbers = [](PyObject* tuple) {
    c10::SmallVector<int64_t, 6> found;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) found.push_back(number_of(PyTuple_GET_ITEM(tuple, i)));
    return found;
  };
  const auto type = reinterpret_cast<THPDtype*>(PyTuple_GET_ITEM(layout, 0))->scalar_type;
  return fast_tensors::view_of(storage, type, numbers(PyTuple_GET_ITEM(layout, 1)),
                               numbers(PyTuple_GET_ITEM(layout, 2)), number_of(PyTuple_GET_ITEM(layout, 3)));
}

// `fast_tensors.empty`
inline at::Tensor nothing_like(const at::Tensor& tensor) {
  // on the host; never freed, as nobody knows the order in which a process ends
  static auto* const known = new std::array<at::Tensor, static_cast<size_t>(at::ScalarType::NumOptions)>();
  if (tensor.device().is_cpu()) {
    at::Tensor& found = (*known)[static_cast<size_t>(tensor.scalar_type())];
    if (!found.defined()) found = at::empty({0}, at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU));
    return found;
  }
  Own dtype = Own::of(reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type())));
  Own device = own(THPDevice_New(tensor.device()));
  return THPVariable_Unpack(call(engine.empty, dtype.get(), device.get()).get());
}

// `Handle.let_go`
inline void let_go(PyObject* of) {
  const at::Tensor& alias = THPVariable_Unpack(handle.alias.get(of));
  handle.layout.set(of, layout_of(alias));
  alias.set_data(nothing_like(alias));
}

inline PyObject* handle_lets_go(PyObject* self, PyObject*) {
  return guarded([&] {
    let_go(self);
    return new_reference(Py_None);
  });
}

// `Record.leave`
inline void leave(PyObject* of, PyObject* state, PyObject* way_back) {
  PyObject* counted = record.token.get(of);
  if (counted == Py_None) fail_assertion("it has left already");
  token.moved.set_borrowed(counted, Py_True);
  if (Own storage = target_of(record.storage.get(of))) {
    Own attributes = attributes_of(storage.get());
    if (PyDict_GET_SIZE(attributes.get()) > 1) record.attributes.set(of, call(engine.set_by_others, storage.get()));
  }
  PyObject* handles = record.handles.get(of);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(handles); ++i) {
    if (Own one = target_of(PyList_GET_ITEM(handles, i))) let_go(one.get());
  }
  record.token.set_borrowed(of, Py_None);
  record.state.set_borrowed(of, state);
  record.way_back.set_borrowed(of, way_back);
}

inline PyObject* record_leaves(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    takes(count, 2, "leave takes a state and a way back");
    leave(self, args[0], args[1]);
    return new_reference(Py_None);
  });
}

inline Own owner_of(PyObject* of) { return own(PyTuple_Pack(2, record.layer.get(of), record.op.get(of))); }

// `Counter[key] += more`
inline void add_to(PyObject* counts, PyObject* key, long long more) {
  PyObject* before = PyDict_GetItemWithError(counts, key);
  if (before == nullptr && PyErr_Occurred()) throw python_error();
  Own sum = own(PyLong_FromLongLong((before == nullptr ? 0 : number_of(before)) + more));
  must(PyDict_SetItem(counts, key, sum.get()));
}

// `HostSlabs.take` where an idle slab of that size is there; else that itself. None: there is no room.
inline Own take_slab(const Moving& moving, PyObject* slabs, PyObject* nbytes) {
  static Name idle_name("_idle"), lent_name("_lent"), in_use("bytes_in_use"), peak("peak_in_use");
  if (moving.cpu) {
    Own idle = idle_name.of(slabs);
    PyObject* fitting = PyDict_GetItemWithError(idle.get(), nbytes);
    if (fitting == nullptr && PyErr_Occurred()) throw python_error();
    if (fitting != nullptr && PyObject_Size(fitting) > 0) {
      Own taken = at_popleft.call(fitting), lent = lent_name.of(slabs);
      slab.buffer.set_borrowed(taken.get(), slab.whole.get(taken.get()));
      slab.ready.set_borrowed(taken.get(), Py_None);
      Own id = own(PyLong_FromVoidPtr(taken.get()));
      must(PyDict_SetItem(lent.get(), id.get(), taken.get()));
      const long long used = in_use.number(slabs) + number_of(nbytes);
      Own total = own(PyLong_FromLongLong(used));
      in_use.set(slabs, total.get());
      if (used > peak.number(slabs)) peak.set(slabs, total.get());
      return taken;
    }
  }
  return at_take.call(slabs, nbytes);
}

// `HostSlabs.give`
inline void give_slab(const Moving& moving, PyObject* slabs, PyObject* given, PyObject* event) {
  static Name idle_name("_idle"), lent_name("_lent"), in_use("bytes_in_use");
  if (moving.cpu) {
    Own idle = idle_name.of(slabs), lent = lent_name.of(slabs), id = own(PyLong_FromVoidPtr(given));
    PyObject* nbytes = slab.nbytes.get(given);
    PyObject* fitting = PyDict_GetItemWithError(idle.get(), nbytes);
    if (fitting != nullptr && PyDict_Contains(lent.get(), id.get()) == 1) {
      must(PyDict_DelItem(lent.get(), id.get()));
      slab.ready.set_borrowed(given, event);
      in_use.add(slabs, -number_of(nbytes));
      at_append.call(fitting, given);
      return;
    }
    PyErr_Clear();
  }
  at_give.call(slabs, given, event);
}

// `Mover._give_back`
inline void give_back(const Moving& moving, PyObject* of, PyObject* event) {
  Own slabs = at_slabs.of(moving.mover), given = Own::of(record.slab.get(of));
  give_slab(moving, slabs.get(), given.get(), event);
  record.slab.set_borrowed(of, Py_None);
}

// `Mover.copy_out`, on a CPU.
inline void copy_out(Moving& moving, PyObject* records) {
  static Name staying("staying"), no_room("no_room"), limit("limit_bytes");
  Own slabs = at_slabs.of(moving.mover);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(records); ++i) {
    PyObject* one = PyList_GET_ITEM(records, i);
    Own storage = target_of(record.storage.get(one));
    const long long nbytes = record.nbytes.number(one);
    if (!storage || static_cast<long long>(THPStorage_Unpack(storage.get()).nbytes()) != nbytes) {
      record.state.set_borrowed(one, engine.KEPT);  // emptied by whoever manages it
      continue;
    }
    Own taken = take_slab(moving, slabs.get(), record.nbytes.get(one));
    if (taken.get() == Py_None) {
      Own stays = staying.of(moving.mover), most = limit.of(slabs.get());
      no_room.call(stays.get(), one, most.get());
      continue;
    }
    try {
      const at::Tensor source = fast_tensors::view_of(THPStorage_Unpack(storage.get()), at::kByte, {nbytes}, {1}, 0);
      moving.copy(slab.buffer.get(taken.get()), source);
      record.source.set(one, must(THPVariable_Wrap(source)));
    } catch (...) {
      const KeptError error;
      record.state.set_borrowed(one, engine.KEPT);
      try {
        give_slab(moving, slabs.get(), taken.get(), slab.ready.get(taken.get()));
      } catch (...) {
        PyErr_Clear();
      }
      throw;
    }
    record.slab.set(one, std::move(taken));
    record.state.set_borrowed(one, engine.COPYING);
    record.out_event.set_borrowed(one, engine.DONE);
    at_bytes_out.add(moving.mover, nbytes);
    at_copies_out.add(moving.mover, 1);
  }
}

// `Mover.release`, on a CPU.
inline bool release(Moving& moving, PyObject* of) {
  if (record.state.get(of) != engine.COPYING) return false;
  {
    Own storage = target_of(record.storage.get(of));
    if (!storage ||
        static_cast<long long>(THPStorage_Unpack(storage.get()).nbytes()) != record.nbytes.number(of)) {
      at_cancel.call(moving.mover, of);
      return false;
    }
  }
  if (moving.has_late()) at_drop.call(moving.late.get(), of);
  record.source.set_borrowed(of, Py_None);
  leave(of, engine.HOST, moving.mover);
  Own counts = at_moved.of(moving.mover), key = owner_of(of);
  add_to(counts.get(), key.get(), record.nbytes.number(of));
  return true;
}

// `MicroBatch.copy_fresh`
inline void copy_fresh(PyObject* of) {
  Own fresh = Own::of(micro_batch.fresh.get(of));
  if (is_empty(fresh.get())) return;
  micro_batch.fresh.set(of, must(PyList_New(0)));
  Own records = own(PyList_New(0));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(fresh.get()); ++i) {
    Own one = target_of(PyList_GET_ITEM(fresh.get(), i));
    if (one && record.state.get(one.get()) == engine.DEVICE) must(PyList_Append(records.get(), one.get()));
  }
  if (is_empty(records.get())) return;
  PyObject* mover = micro_batch.mover.get(of);
  bool done = false;
  if (is_ours(mover)) {
    Moving moving(mover);
    if (moving.at_once()) {
      copy_out(moving, records.get());
      done = true;
    }
  }
  if (!done) {
    static Name slowly("copy_out");
    slowly.call(mover, records.get());
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(records.get()); ++i) {
    PyObject* one = PyList_GET_ITEM(records.get(), i);
    if (record.state.get(one) != engine.COPYING) continue;
    const long long at = record.number.number(one) + record.distance.number(one);
    const long long now = micro_batch.count.number(of);
    Own due = own(PyLong_FromLongLong(at > now ? at : now)), tie = own(PyIter_Next(micro_batch.tie.get(of)));
    Own reference = own(PyWeakref_NewRef(one, nullptr));
    Own entry = own(PyTuple_Pack(3, due.get(), tie.get(), reference.get()));
    call(engine.heappush, micro_batch.due.get(of), entry.get());
  }
}

// `MicroBatch.release_due`, of what is due once operator `until` has run.
inline void release_due(PyObject* of, long long until) {
  PyObject *due = micro_batch.due.get(of), *mover = micro_batch.mover.get(of), *moved = micro_batch.moved.get(of);
  static Name release_when_copied("release_when_copied"), release_late("release_late");
  const bool ours = is_ours(mover);
  while (!is_empty(due) && number_of(PyTuple_GET_ITEM(PyList_GET_ITEM(due, 0), 0)) <= until) {
    Own entry = call(engine.heappop, due);
    Own one = target_of(PyTuple_GET_ITEM(entry.get(), 2));
    if (!one) continue;
    bool done = false;
    if (ours) {
      Moving moving(mover);
      if (moving.at_once() && !moving.has_late()) {
        release(moving, one.get());
        done = true;
      }
    }
    if (!done) release_when_copied.call(mover, one.get());
    Own id = own(PyLong_FromVoidPtr(one.get()));
    must(PyDict_SetItem(moved, id.get(), PyTuple_GET_ITEM(entry.get(), 2)));
  }
  Own late = at_late.of(mover);
  if (at_nbytes.number(late.get()) != 0) release_late.call(mover);
}

inline bool something_is_due(PyObject* of) {
  PyObject* due = micro_batch.due.get(of);
  return !is_empty(due) &&
         number_of(PyTuple_GET_ITEM(PyList_GET_ITEM(due, 0), 0)) <= micro_batch.count.number(of);
}

// `MicroBatch.operator_ended`
inline void operator_ended(PyObject* of) {
  if (!is_empty(micro_batch.fresh.get(of))) copy_fresh(of);
  release_due(of, micro_batch.count.number(of));
}

inline PyObject* micro_batch_operator_ended(PyObject* self, PyObject*) {
  return guarded([&] {
    operator_ended(self);
    return new_reference(Py_None);
  });
}

inline PyObject* micro_batch_copies_fresh(PyObject* self, PyObject*) {
  return guarded([&] {
    copy_fresh(self);
    return new_reference(Py_None);
  });
}

// `Mover.load`, on a CPU.
inline void load(Moving& moving, PyObject* records) {
  static Name mark("mark");
  Own wanted = own(PyList_New(0)), sequence = own(PySequence_Fast(records, "records"));
  const bool late = moving.has_late();
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(sequence.get()); ++i) {
    PyObject* one = PySequence_Fast_GET_ITEM(sequence.get(), i);
    if (record.state.get(one) == engine.HOST) {
      must(PyList_Append(wanted.get(), one));
    } else if (late) {
      at_drop.call(moving.late.get(), one);
    }
  }
  if (is_empty(wanted.get())) return;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(wanted.get()); ++i) {
    PyObject* one = PyList_GET_ITEM(wanted.get(), i);
    PyObject* nbytes = record.nbytes.get(one);
    const at::Tensor buffer = at::empty({number_of(nbytes)}, at::TensorOptions().dtype(at::kByte).device(at::kCPU));
    record.buffer.set(one, must(THPVariable_Wrap(buffer)));
    Own owner = owner_of(one);
    enter_copy(buffer, nbytes, record.layer.number(one) >= 0, owner.get());
    if (!record.attributes.is_none(one)) {
      Own storage = storage_of(buffer);
      mark.call(one, storage.get());
    }
  }
  Own compute = at_current_stream.call(moving.backend.get()), none = own(PyTuple_New(0));
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(wanted.get()); ++i) {
    PyObject *one = PyList_GET_ITEM(wanted.get(), i), *lent = record.slab.get(one);
    if (lent == Py_None) fail_assertion("what is on the host has no slab");
    record.stream.set_borrowed(one, compute.get());
    record.others.set_borrowed(one, none.get());
    moving.copy(record.buffer.get(one), THPVariable_Unpack(slab.buffer.get(lent)));
    record.in_event.set_borrowed(one, engine.DONE);
    record.state.set_borrowed(one, engine.LOADED);
    give_back(moving, one, engine.DONE);
    at_bytes_in.add(moving.mover, record.nbytes.number(one));
    at_copies_in.add(moving.mover, 1);
  }
}

// `MicroBatch.backward_reaches`
inline void backward_reaches(PyObject* of, long long number) {
  static Name slowly("load"), release_late("release_late"), reaches("backward_reaches"), queue_up("queue_up");
  if (number >= micro_batch.reached.number(of)) return;
  micro_batch.reached.set_number(of, number);
  drop_unseen(micro_batch.native.get(of), number);
  if (micro_batch.queue.is_none(of)) queue_up.call(of);
  Own queue = Own::of(micro_batch.queue.get(of));
  long long start = micro_batch.cursor.number(of), cursor = start;
  const long long size = PyList_GET_SIZE(queue.get());
  while (cursor < size && number_of(PyTuple_GET_ITEM(PyList_GET_ITEM(queue.get(), cursor), 0)) >= number) ++cursor;
  PyObject* mover = micro_batch.mover.get(of);
  if (cursor > start) {
    micro_batch.cursor.set_number(of, cursor);
    Own records = own(PyList_New(0));
    for (; start < cursor; ++start) {
      if (Own one = target_of(PyTuple_GET_ITEM(PyList_GET_ITEM(queue.get(), start), 1))) {
        must(PyList_Append(records.get(), one.get()));
      }
    }
    bool done = false;
    if (is_ours(mover)) {
      Moving moving(mover);
      if (moving.at_once()) {
        load(moving, records.get());
        done = true;
      }
    }
    if (!done) slowly.call(mover, records.get());
  }
  Own ahead = Own::of(micro_batch.ahead.get(of));
  if (ahead.get() != Py_None && ahead.get() != of) {
    Own there = own(PyLong_FromLongLong(micro_batch.count.number(ahead.get()) + number));
    reaches.call(ahead.get(), there.get());
  }
  Own late = at_late.of(mover);
  if (at_nbytes.number(late.get()) != 0) release_late.call(mover);
}

inline PyObject* micro_batch_backward_reaches(PyObject* self, PyObject* number) {
  return guarded([&] {
    backward_reaches(self, number_of(number));
    return new_reference(Py_None);
  });
}

// `MicroBatch.saved_by`
inline void saved_by(PyObject* of, PyObject* number) {
  PyObject* alive = micro_batch.alive.get(of);
  PyObject* before = PyDict_GetItemWithError(alive, number);
  if (before == nullptr) {
    if (PyErr_Occurred()) throw python_error();
    must(PyList_Append(micro_batch.saving.get(of), number));
  }
  Own now = own(PyLong_FromLongLong(before == nullptr ? 1 : number_of(before) + 1));
  must(PyDict_SetItem(alive, number, now.get()));
}

// `MicroBatch.backward_below`
inline void backward_below(PyObject* of, PyObject* number) {
  PyObject* saving = micro_batch.saving.get(of);
  const long long below = number_of(number);
  Py_ssize_t low = 0, high = PyList_GET_SIZE(saving);
  while (low < high) {
    const Py_ssize_t middle = (low + high) / 2;
    if (number_of(PyList_GET_ITEM(saving, middle)) < below) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  backward_reaches(of, low > 0 ? number_of(PyList_GET_ITEM(saving, low - 1)) + 1 : 1);
}

// `MicroBatch.dropped`
inline void dropped(PyObject* of, PyObject* number) {
  PyObject* alive = micro_batch.alive.get(of);
  PyObject* before = PyDict_GetItemWithError(alive, number);
  if (before == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, number);
    throw python_error();
  }
  const long long left = number_of(before) - 1;
  Own now = own(PyLong_FromLongLong(left));
  must(PyDict_SetItem(alive, number, now.get()));
  if (left != 0 || number_of(number) != micro_batch.in_backward.number(of) ||
      torch::autograd::get_current_graph_task_id() == -1) {
    return;
  }
  backward_below(of, number);
}

// `MicroBatch.unpacks`
inline void unpacks(PyObject* of, PyObject* number) {
  static Name finish_forward("finish_forward");
  if (micro_batch.forward_done.get(of) != Py_True) finish_forward.call(of);  // no schedule told us
  if (number_of(number) >= micro_batch.in_backward.number(of)) return;
  micro_batch.in_backward.set_borrowed(of, number);
  backward_reaches(of, number_of(number));
}

inline PyObject* micro_batch_unpacks(PyObject* self, PyObject* number) {
  return guarded([&] {
    unpacks(self, number);
    return new_reference(Py_None);
  });
}

inline PyObject* micro_batch_saved_by(PyObject* self, PyObject* number) {
  return guarded([&] {
    saved_by(self, number);
    return new_reference(Py_None);
  });
}

inline PyObject* micro_batch_dropped(PyObject* self, PyObject* number) {
  return guarded([&] {
    dropped(self, number);
    return new_reference(Py_None);
  });
}

// `Mover.bring_back`
inline void bring_back(PyObject* mover, PyObject* of) {
  static Name slowly("bring_back");
  if (is_ours(mover)) {
    static Name settled("settled");
    Own backend = at_backend.of(mover), timing = at_timing.of(mover), automatic = at_auto.of(mover);
    const bool measured = automatic.get() != Py_None && !settled.is_true(automatic.get());
    if (Py_TYPE(backend.get()) == engine.CpuBackend && timing.get() == engine.UNTIMED && !measured) {
      if (record.state.get(of) == engine.LOADED) return;
    }
  }
  slowly.call(mover, of);
}

inline bool is_ending() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// `Record.__del__`
inline PyObject* record_dies(PyObject* self, PyObject*) {
  return guarded([&] {
    PyObject* way_back = record.way_back.maybe(self);
    if (way_back == nullptr || is_ending()) return new_reference(Py_None);
    if (is_ours(way_back)) {
      PyObject* state = record.state.get(self);
      if (state == engine.KEPT || state == engine.DEVICE) return new_reference(Py_None);
      Moving moving(way_back);
      if (moving.at_once() && (state == engine.LOADED || state == engine.HOST)) {
        if (moving.has_late()) at_drop.call(moving.late.get(), self);
        if (state == engine.HOST) give_back(moving, self, record.out_event.get(self));
        count(engine.without, -record.nbytes.number(self));
        return new_reference(Py_None);
      }
    }
    at_forget.call(way_back, self);
    return new_reference(Py_None);
  });
}

// `Handle.__del__`
inline PyObject* handle_dies(PyObject* self, PyObject*) {
  return guarded([&] {
    PyObject* of = handle.micro_batch.maybe(self);
    if (of == nullptr || of == Py_None) return new_reference(Py_None);
    Own kept = Own::of(of);
    handle.alias.set(self, nullptr);  // what this frees makes room for what is copied back now
    handle.record.set(self, nullptr);
    if (Py_TYPE(of) == engine.MicroBatch) {
      dropped(of, handle.number.get(self));
    } else {
      static Name slowly("dropped");
      slowly.call(of, handle.number.get(self));
    }
    return new_reference(Py_None);
  });
}

}  // namespace hot
