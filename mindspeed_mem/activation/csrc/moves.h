// storage/micro_batch.py: what leaves, what comes back, and when.

#pragma once

#include "copies.h"

#include <torch/csrc/autograd/graph_task.h>

namespace hot {

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
  copy_out(micro_batch.mover.get(of), records.get());
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
  while (!is_empty(due) && number_of(PyTuple_GET_ITEM(PyList_GET_ITEM(due, 0), 0)) <= until) {
    Own entry = call(engine.heappop, due);
    Own one = target_of(PyTuple_GET_ITEM(entry.get(), 2));
    if (!one) continue;
    release_when_copied(mover, one.get());
    Own id = own(PyLong_FromVoidPtr(one.get()));
    must(PyDict_SetItem(moved, id.get(), PyTuple_GET_ITEM(entry.get(), 2)));
  }
  release_late(mover);
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

// `MicroBatch.backward_reaches`
inline void backward_reaches(PyObject* of, long long number) {
  static Name reaches("backward_reaches"), queue_up("queue_up");
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
    load(mover, records.get());
  }
  Own ahead = Own::of(micro_batch.ahead.get(of));
  if (ahead.get() != Py_None && ahead.get() != of) {
    Own there = own(PyLong_FromLongLong(micro_batch.count.number(ahead.get()) + number));
    reaches.call(ahead.get(), there.get());
  }
  release_late(mover);
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
    static Name forget_slowly("forget");
    PyObject* way_back = record.way_back.maybe(self);
    if (way_back == nullptr || is_ending()) return new_reference(Py_None);
    if (Py_TYPE(way_back) == engine.ModuleRerun || Py_TYPE(way_back) == engine.Tape) {  // `Rerun.forget`
      count(engine.without, -record.nbytes.number(self));
      return new_reference(Py_None);
    }
    if (is_ours(way_back)) {
      PyObject* state = record.state.get(self);
      if (state == engine.KEPT || state == engine.DEVICE) return new_reference(Py_None);
      const Moving moving(way_back);
      if (forget(moving, self)) return new_reference(Py_None);
    }
    forget_slowly.call(way_back, self);
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
