// storage/mover.py: copies of records between device and host. On a CPU they have happened when a call returns, and
// nothing is waited for; on an accelerator they are made on its side streams. Elsewhere (where copies are timed, where
// a model has several compute streams) they are Python's.

#pragma once

#include "records.h"
#include "streams.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <chrono>
#include <cstring>
#include <optional>

namespace hot {

inline Name at_one_stream("one_stream");

// The error that Python has been told of, kept while something else runs.
class KeptError {
 public:
  KeptError() { PyErr_Fetch(&type_, &value_, &trace_); }
  ~KeptError() { PyErr_Restore(type_, value_, trace_); }
  KeptError(const KeptError&) = delete;

 private:
  PyObject *type_ = nullptr, *value_ = nullptr, *trace_ = nullptr;
};

// What is put right where something has failed: the error that has come first is the one to tell of.
template <class Repair>
void after_failing(Repair&& repair) {
  const KeptError error;
  try {
    repair();
  } catch (...) {
    PyErr_Clear();
  }
}

// Other threads may run in Python meanwhile.
class WithoutGil {
 public:
  WithoutGil() : state_(PyEval_SaveThread()) {}
  ~WithoutGil() { PyEval_RestoreThread(state_); }
  WithoutGil(const WithoutGil&) = delete;

 private:
  PyThreadState* state_;
};

// `CpuBackend.copy` and `AcceleratorBackend.copy`, uint8 [nbytes] to uint8 [nbytes]; on the current stream.
inline void copy_bytes(const at::Tensor& target, const at::Tensor& source) {
  constexpr size_t large = 1 << 16;
  TORCH_CHECK(target.nbytes() == source.nbytes(), "copy: target has ", target.nbytes(), " bytes, source ",
              source.nbytes());
  if (target.is_cpu() && source.is_cpu() && source.nbytes() < large) {
    std::memcpy(target.data_ptr(), source.const_data_ptr(), source.nbytes());
    return;
  }
  const WithoutGil meanwhile;
  const at::AutoDispatchBelowADInplaceOrView below;  // no version counter changes
  target.copy_(source, true);
}

// storage/late_copies.py
class LateCopies {
 public:
  explicit LateCopies(Own late) : late_(std::move(late)) {}

  bool any() const { return late_copies.nbytes.number(late_.get()) != 0; }
  bool too_much() const { return late_copies.nbytes.number(late_.get()) > late_copies.window.number(late_.get()); }
  void add(PyObject* of) const {
    PyObject* known = late_copies.records.get(late_.get());
    Own id = own(PyLong_FromVoidPtr(of));
    if (must(PyDict_Contains(known, id.get())) == 1) return;
    Own reference = own(PyWeakref_NewRef(of, nullptr));
    must(PyDict_SetItem(known, id.get(), reference.get()));
    late_copies.nbytes.add(late_.get(), record.nbytes.number(of));
  }
  void drop(PyObject* of) const {
    PyObject* known = late_copies.records.get(late_.get());
    if (PyDict_GET_SIZE(known) == 0) return;
    Own id = own(PyLong_FromVoidPtr(of));
    if (must(PyDict_Contains(known, id.get())) == 0) return;
    must(PyDict_DelItem(known, id.get()));
    late_copies.nbytes.add(late_.get(), -record.nbytes.number(of));
  }
  // Empty where there is none, or it is about to be dropped by whoever found it dead.
  Own oldest() const {
    Py_ssize_t at = 0;
    PyObject *id = nullptr, *reference = nullptr;
    return PyDict_Next(late_copies.records.get(late_.get()), &at, &id, &reference) ? target_of(reference) : Own();
  }

 private:
  Own late_;
};

// Who moves records, as one call needs it.
class Moving {
 public:
  explicit Moving(PyObject* mover)
      : mover(mover), backend(Own::of(mover_slots.backend.get(mover))), cpu(Py_TYPE(backend.get()) == engine.CpuBackend),
        late(Own::of(mover_slots.late.get(mover))), lock_(Own::of(mover_slots.lock.get(mover))) {
    static Name acquire("acquire");
    acquire.call(lock_.get());
  }
  ~Moving() {
    static Name release("release");
    if (copying_.count() > 0) add_seconds();
    const KeptError error;
    Py_XDECREF(PyObject_CallMethodNoArgs(lock_.get(), release.object()));
  }
  Moving(const Moving&) = delete;

  // Whether what is done here is all that is to be done.
  bool is_plain() const {
    return mover_slots.timing.get(mover) == engine.UNTIMED && (cpu || is_accelerator(backend.get()));
  }
  // Whether copies can be started here, too.
  bool can_copy() const {
    return is_plain() && (cpu || (mover_slots.streams.get(mover) != Py_None && mover_slots.compute.get(mover) == Py_None));
  }
  // The one that copies go out on (0), or come in on (1).
  Own side_stream(Py_ssize_t which) const { return Own::of(PyTuple_GET_ITEM(mover_slots.streams.get(mover), which)); }
  Own record_event(PyObject* on) const { return cpu ? Own::of(engine.DONE) : hot::record_event(backend.get(), on); }
  void wait_for(PyObject* on, PyObject* of, PyObject* reason) const {
    if (!cpu) hot::wait_for(backend.get(), on, of, reason);
  }
  bool has_happened(PyObject* of) const { return cpu || hot::has_happened(backend.get(), of); }

  void copy(PyObject* target, PyObject* source) {
    const auto begin = std::chrono::steady_clock::now();
    copy_bytes(THPVariable_Unpack(target), THPVariable_Unpack(source));
    if (cpu) copying_ += std::chrono::steady_clock::now() - begin;
  }

  PyObject* mover;
  Own backend;
  const bool cpu;
  LateCopies late;

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

// `Mover._copies_on`; nothing on a CPU.
class OnSideStream {
 public:
  OnSideStream(const Moving& moving, PyObject* side, PyObject* compute) : mover_(moving.mover) {
    if (moving.cpu) return;
    stream_.emplace(native_of(side));
    mover_slots.compute.set_borrowed(mover_, compute);
  }
  ~OnSideStream() {
    if (!stream_) return;
    const KeptError error;
    mover_slots.compute.set_borrowed(mover_, Py_None);
  }
  OnSideStream(const OnSideStream&) = delete;

 private:
  PyObject* mover_;
  std::optional<c10::StreamGuard> stream_;
};

// Whether it starts copies and lets go of memory as `Mover` does; an `EvictingMover` has its own way back.
inline bool is_ours(PyObject* mover) {
  return Py_TYPE(mover) == engine.Mover || Py_TYPE(mover) == engine.EvictingMover;
}

// `Counter[key] += more`
inline void add_to(PyObject* counts, PyObject* key, long long more) {
  PyObject* before = PyDict_GetItemWithError(counts, key);
  if (before == nullptr && PyErr_Occurred()) throw python_error();
  Own sum = own(PyLong_FromLongLong((before == nullptr ? 0 : number_of(before)) + more));
  must(PyDict_SetItem(counts, key, sum.get()));
}

// Whether a host buffer is as large as what it is for: `Backend.host_bytes`.
inline bool buffers_are_exact(PyObject* backend) {
  static PyTypeObject* last = nullptr;  // never let go of: its address tells it apart
  static bool found;
  if (Py_TYPE(backend) != last) {
    found = has_as_it_is(Py_TYPE(backend), engine.Backend, "host_bytes");
    Py_INCREF(last = Py_TYPE(backend));
  }
  return found;
}

// `HostSlabs.take` where an idle slab of that size is there; else that itself. None: there is no room.
inline Own take_slab(const Moving& moving, PyObject* slabs, PyObject* nbytes) {
  static Name idle_name("_idle"), lent_name("_lent"), in_use("bytes_in_use"), peak("peak_in_use"), popleft("popleft"),
      take("take");
  if (!buffers_are_exact(moving.backend.get())) return take.call(slabs, nbytes);
  Own idle = idle_name.of(slabs);
  PyObject* fitting = PyDict_GetItemWithError(idle.get(), nbytes);
  if (fitting == nullptr && PyErr_Occurred()) throw python_error();
  if (fitting == nullptr || PyObject_Size(fitting) == 0) return take.call(slabs, nbytes);
  Own taken = popleft.call(fitting), lent = lent_name.of(slabs);
  slab.buffer.set_borrowed(taken.get(), slab.whole.get(taken.get()));
  Own id = own(PyLong_FromVoidPtr(taken.get()));
  must(PyDict_SetItem(lent.get(), id.get(), taken.get()));
  const long long used = in_use.number(slabs) + number_of(nbytes);
  Own total = own(PyLong_FromLongLong(used));
  in_use.set(slabs, total.get());
  if (used > peak.number(slabs)) peak.set(slabs, total.get());
  if (!slab.ready.is_none(taken.get()) && moving.has_happened(slab.ready.get(taken.get()))) {
    slab.ready.set_borrowed(taken.get(), Py_None);
  }
  return taken;
}

// `HostSlabs.give`
inline void give_slab(PyObject* slabs, PyObject* given, PyObject* ready) {
  static Name idle_name("_idle"), lent_name("_lent"), in_use("bytes_in_use"), append("append"), give("give");
  Own idle = idle_name.of(slabs), lent = lent_name.of(slabs), id = own(PyLong_FromVoidPtr(given));
  PyObject* nbytes = slab.nbytes.get(given);
  PyObject* fitting = PyDict_GetItemWithError(idle.get(), nbytes);
  if (fitting != nullptr && PyDict_Contains(lent.get(), id.get()) == 1) {
    must(PyDict_DelItem(lent.get(), id.get()));
    slab.ready.set_borrowed(given, ready);
    in_use.add(slabs, -number_of(nbytes));
    append.call(fitting, given);
    return;
  }
  PyErr_Clear();
  give.call(slabs, given, ready);
}

// `Mover._give_back`
inline void give_back(const Moving& moving, PyObject* of, PyObject* ready) {
  Own slabs = Own::of(mover_slots.slabs.get(moving.mover)), given = Own::of(record.slab.get(of));
  if (given.get() == Py_None) fail_assertion("what has left has no slab");
  give_slab(slabs.get(), given.get(), ready);
  record.slab.set_borrowed(of, Py_None);
}

// The storage of a record while it has all its bytes: `Record.whole`; empty where it has been taken away.
inline Own whole_storage(PyObject* of) {
  Own storage = target_of(record.storage.get(of));
  if (storage && static_cast<long long>(THPStorage_Unpack(storage.get()).nbytes()) != record.nbytes.number(of)) {
    return Own();
  }
  return storage;
}

// `Mover._send`
inline void send(Moving& moving, PyObject* of, PyObject* storage, Own taken, PyObject* side) {
  PyObject* ready = slab.ready.get(taken.get());
  if (ready != Py_None) moving.wait_for(side, ready, engine.OUT_AFTER_SLAB);
  Own source = own(THPVariable_Wrap(
      fast_tensors::view_of(THPStorage_Unpack(storage), at::kByte, {record.nbytes.number(of)}, {1}, 0)));
  moving.copy(slab.buffer.get(taken.get()), source.get());
  record.source.set(of, std::move(source));
  record.slab.set(of, std::move(taken));
  record.state.set_borrowed(of, engine.COPYING);
  mover_slots.bytes_out.add(moving.mover, record.nbytes.number(of));
  mover_slots.copies_out.add(moving.mover, 1);
}

// `Mover._send_all`
inline void send_all(Moving& moving, PyObject* records, PyObject* side, PyObject* compute, PyObject* sent) {
  static Name no_room("no_room"), limit("limit_bytes");
  Own slabs = Own::of(mover_slots.slabs.get(moving.mover));
  bool waited = false;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(records); ++i) {
    PyObject* one = PyList_GET_ITEM(records, i);
    Own storage = whole_storage(one);
    if (!storage) {
      record.state.set_borrowed(one, engine.KEPT);  // emptied by whoever manages it
      continue;
    }
    Own taken = take_slab(moving, slabs.get(), record.nbytes.get(one));
    if (taken.get() == Py_None) {
      Own stays = Own::of(mover_slots.staying.get(moving.mover)), most = limit.of(slabs.get());
      no_room.call(stays.get(), one, most.get());
      continue;
    }
    try {
      if (!waited && !moving.cpu) {
        Own ready = moving.record_event(compute);
        moving.wait_for(side, ready.get(), engine.OUT_AFTER_COMPUTE);
      }
      waited = true;
      send(moving, one, storage.get(), Own::of(taken.get()), side);
    } catch (...) {
      after_failing([&] {
        record.state.set_borrowed(one, engine.KEPT);
        give_slab(slabs.get(), taken.get(), slab.ready.get(taken.get()));
      });
      throw;
    }
    must(PyList_Append(sent, one));
  }
}

// The current stream, if all of these records are of that; else None.
inline Own stream_of_all(const Moving& moving, PyObject* records) {
  Own found = Own::of(record.stream.get(PyList_GET_ITEM(records, 0)));
  if (moving.cpu) return found;  // there is but one
  for (Py_ssize_t i = 1; i < PyList_GET_SIZE(records); ++i) {
    if (record.stream.get(PyList_GET_ITEM(records, i)) != found.get()) return Own::of(Py_None);
  }
  return is_current(found.get()) ? std::move(found) : Own::of(Py_None);
}

// Whether another stream than its own has saved one of them.
inline bool saved_elsewhere(PyObject* records) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(records); ++i) {
    if (PyTuple_GET_SIZE(record.others.get(PyList_GET_ITEM(records, i))) != 0) return true;
  }
  return false;
}

// `Mover.copy_out` of some; false: that is Python's, and nothing has been done.
inline bool copy_out(Moving& moving, PyObject* records) {
  if (!moving.can_copy()) return false;
  Own compute = stream_of_all(moving, records), side;
  if (compute.get() == Py_None || saved_elsewhere(records)) return false;
  if (!moving.cpu) side = moving.side_stream(0);
  Own sent = own(PyList_New(0));  // kept alive: until there is an event, nobody may give their slabs back
  const auto end = [&] {
    if (is_empty(sent.get())) return;
    Own done = moving.record_event(side.get());
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(sent.get()); ++i) {
      record.out_event.set_borrowed(PyList_GET_ITEM(sent.get(), i), done.get());
    }
  };
  const OnSideStream meanwhile(moving, side.get(), compute.get());
  try {
    send_all(moving, records, side.get(), compute.get(), sent.get());
  } catch (...) {
    after_failing(end);
    throw;
  }
  end();
  return true;
}

inline void copy_out(PyObject* mover, PyObject* records) {
  static Name slowly("copy_out");
  if (is_ours(mover)) {
    Moving moving(mover);
    if (copy_out(moving, records)) return;
  }
  slowly.call(mover, records);
}

// `Mover.release`
inline bool release(const Moving& moving, PyObject* of, bool copied) {
  static Name cancel("cancel");
  if (record.state.get(of) != engine.COPYING) return false;
  if (!whole_storage(of)) {
    cancel.call(moving.mover, of);
    return false;
  }
  if (!copied) moving.wait_for(record.stream.get(of), record.out_event.get(of), engine.RELEASE_AFTER_OUT);
  moving.late.drop(of);
  record.source.set_borrowed(of, Py_None);
  leave(of, engine.HOST, moving.mover);
  Own counts = Own::of(mover_slots.moved.get(moving.mover)), key = owner_of(of);
  add_to(counts.get(), key.get(), record.nbytes.number(of));
  return true;
}

// `Mover.release_when_copied`
inline void release_when_copied(PyObject* mover, PyObject* of) {
  static Name slowly("release_when_copied");
  if (is_ours(mover)) {
    const Moving moving(mover);
    if (moving.is_plain()) {
      if (record.state.get(of) != engine.COPYING) return;
      if (!moving.late.any() && moving.has_happened(record.out_event.get(of))) {
        release(moving, of, true);
      } else {
        moving.late.add(of);
      }
      return;
    }
  }
  slowly.call(mover, of);
}

// `Mover.release_late`
inline void release_late(PyObject* mover) {
  static Name slowly("release_late");
  if (!LateCopies(Own::of(mover_slots.late.get(mover))).any()) return;
  if (is_ours(mover)) {
    const Moving moving(mover);
    if (moving.is_plain()) {
      while (Own one = moving.late.oldest()) {
        const bool copied = moving.has_happened(record.out_event.get(one.get()));
        if (!copied && !moving.late.too_much()) return;
        if (!release(moving, one.get(), copied)) moving.late.drop(one.get());
      }
      return;
    }
  }
  slowly.call(mover);
}

// `Mover._fetch`: [begin, end) of records, which one operator made.
inline void fetch(Moving& moving, PyObject* records, Py_ssize_t begin, Py_ssize_t end, PyObject* side,
                  PyObject* compute) {
  Own none = own(PyTuple_New(0));
  Py_ssize_t copied = begin;
  const auto finish = [&] {
    if (copied == begin) return;
    Own done = moving.record_event(side);
    for (Py_ssize_t i = begin; i < copied; ++i) {
      PyObject* one = PyList_GET_ITEM(records, i);
      record.in_event.set_borrowed(one, done.get());
      give_back(moving, one, done.get());
      mover_slots.bytes_in.add(moving.mover, record.nbytes.number(one));
      mover_slots.copies_in.add(moving.mover, 1);
    }
  };
  try {
    for (; copied < end; ++copied) {
      PyObject *one = PyList_GET_ITEM(records, copied), *lent = record.slab.get(one);
      if (lent == Py_None) fail_assertion("what is on the host has no slab");
      moving.copy(record.buffer.get(one), slab.buffer.get(lent));
      record.stream.set_borrowed(one, compute);
      record.others.set_borrowed(one, none.get());
      record.state.set_borrowed(one, engine.LOADED);
    }
  } catch (...) {
    after_failing(finish);
    throw;
  }
  finish();
}

// `Backend.empty`
inline at::Tensor empty_bytes(int64_t nbytes, at::Device device) {
  std::optional<WithoutGil> meanwhile;
  if (!device.is_cpu()) meanwhile.emplace();  // the driver may be asked
  return at::empty({nbytes}, at::TensorOptions().dtype(at::kByte).device(device));
}

inline void fetch_all(Moving& moving, PyObject* records, PyObject* side, PyObject* compute) {
  static Name mark("mark");
  const at::Device device = moving.cpu ? at::Device(at::kCPU) : current_device(native_of(side).device_type());
  const Py_ssize_t size = PyList_GET_SIZE(records);
  for (Py_ssize_t i = 0; i < size; ++i) {
    PyObject *one = PyList_GET_ITEM(records, i), *nbytes = record.nbytes.get(one);
    const at::Tensor buffer = empty_bytes(number_of(nbytes), device);
    record.buffer.set(one, must(THPVariable_Wrap(buffer)));
    Own owner = owner_of(one);
    enter_copy(buffer, nbytes, record.layer.number(one) >= 0, owner.get());
    if (!record.attributes.is_none(one)) {
      Own storage = storage_of(buffer);
      mark.call(one, storage.get());
    }
  }
  if (!moving.cpu) {  // after the allocations: the buffers' previous users are on compute
    Own ready = moving.record_event(compute);
    moving.wait_for(side, ready.get(), engine.IN_AFTER_COMPUTE);
  }
  const OnSideStream meanwhile(moving, side, compute);
  for (Py_ssize_t begin = 0, end = 0; begin < size; begin = end) {
    PyObject* first = PyList_GET_ITEM(records, begin);
    const auto same_owner = [&](PyObject* one) {
      return same(record.layer.get(one), record.layer.get(first)) && same(record.op.get(one), record.op.get(first));
    };
    while (end < size && same_owner(PyList_GET_ITEM(records, end))) ++end;
    fetch(moving, records, begin, end, side, compute);
  }
}

// `Mover.load`; false: that is Python's, and no copy has been started.
inline bool load(Moving& moving, PyObject* records) {
  if (!moving.can_copy()) return false;
  Own wanted = own(PyList_New(0)), side;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(records); ++i) {
    PyObject* one = PyList_GET_ITEM(records, i);
    if (record.state.get(one) == engine.HOST) {
      must(PyList_Append(wanted.get(), one));
    } else {
      moving.late.drop(one);
    }
  }
  if (is_empty(wanted.get())) return true;
  Own compute = stream_of_all(moving, wanted.get());
  if (compute.get() == Py_None) return false;
  if (!moving.cpu) side = moving.side_stream(1);
  try {
    fetch_all(moving, wanted.get(), side.get(), compute.get());
  } catch (...) {  // there was no memory, or a copy failed
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(wanted.get()); ++i) {
      PyObject* one = PyList_GET_ITEM(wanted.get(), i);
      const KeptError error;
      if (record.state.get(one) == engine.HOST) record.buffer.set_borrowed(one, Py_None);
    }
    throw;
  }
  return true;
}

inline void load_or_slowly(PyObject* mover, PyObject* records) {
  static Name slowly("load_slowly");
  {
    Moving moving(mover);
    if (load(moving, records)) return;
  }
  slowly.call(mover, records);
}

inline void load(PyObject* mover, PyObject* records) {
  static Name its_own("load");
  if (Py_TYPE(mover) == engine.Mover) {
    load_or_slowly(mover, records);
  } else {
    its_own.call(mover, records);
  }
}

inline PyObject* mover_loads(PyObject* self, PyObject* records) {
  return guarded([&] {
    load_or_slowly(self, own(PySequence_List(records)).get());
    return new_reference(Py_None);
  });
}

// Whether nobody wants to know how long copies are waited for: not `AutoDistances.searching`.
inline bool is_settled(PyObject* automatic) {
  static Name settled("settled"), distances("_distances");
  return automatic == Py_None || settled.is_true(automatic) || PyDict_GET_SIZE(distances.of(automatic).get()) == 0;
}

// Whether nobody wants to know of copies back: `EvictingMover.copying`.
inline bool is_unwatched(PyObject* mover) {
  static Name copying("copying");
  return Py_TYPE(mover) == engine.Mover || copying.of(mover).get() == engine.nullcontext;
}

// `Mover.bring_back`
inline void bring_back(PyObject* mover, PyObject* of) {
  static Name slowly("bring_back");
  if (is_ours(mover) && is_unwatched(mover) && record.state.get(of) == engine.LOADED &&
      mover_slots.timing.get(mover) == engine.UNTIMED) {
    Own backend = Own::of(mover_slots.backend.get(mover));
    if (is_settled(mover_slots.auto_.get(mover))) {
      if (Py_TYPE(backend.get()) == engine.CpuBackend) return;
      if (is_accelerator(backend.get()) && is_current(record.stream.get(of))) {
        wait_for(backend.get(), record.stream.get(of), record.in_event.get(of), engine.COMPUTE_AFTER_IN);
        return;
      }
    }
  }
  slowly.call(mover, of);
}

// `Mover.forget`, of what has left; false: that is Python's, and nothing has been done.
inline bool forget(const Moving& moving, PyObject* of) {
  PyObject* state = record.state.get(of);
  if (!moving.is_plain() || (state != engine.LOADED && state != engine.HOST)) return false;
  moving.late.drop(of);
  if (state == engine.HOST) give_back(moving, of, record.out_event.get(of));
  count(engine.without, -record.nbytes.number(of));
  if (state == engine.HOST || record.buffer.is_none(of) || record.in_event.is_none(of)) return true;
  moving.wait_for(record.stream.get(of), record.in_event.get(of), engine.RETIRE_AFTER_COPIES);
  return true;
}

}  // namespace hot
