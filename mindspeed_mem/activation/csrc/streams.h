// device/accelerator.py: streams and events of an accelerator, of whatever kind: torch's guards know its streams, and
// events are the objects of its module in Python.

#pragma once

#include "objects.h"

#include <c10/core/StreamGuard.h>
#include <torch/csrc/Stream.h>

namespace hot {

inline struct StreamSlots {
  Slot native{"native"}, key{"key"};
} stream;

inline struct EventSlots {
  Slot native{"native"}, happened{"happened"}, awaited{"awaited"}, pool{"_pool"};
} event;

// Whether a class has this method as its base has it.
inline bool has_as_it_is(PyTypeObject* type, PyTypeObject* base, const char* name) {
  Own its = own(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name));
  Own ours = own(PyObject_GetAttrString(reinterpret_cast<PyObject*>(base), name));
  return its.get() == ours.get();
}

inline bool is_native(PyObject* of) {
  return PyType_IsSubtype(Py_TYPE(of), reinterpret_cast<PyTypeObject*>(THPStreamClass)) != 0;
}

// Whether it is one whose streams torch's guards know, and whose own methods are those that are written here once more.
inline bool is_accelerator(PyObject* backend) {
  static PyTypeObject* last = nullptr;  // never let go of: its address tells it apart
  static bool found;
  if (Py_TYPE(backend) == last) return found;
  bool known = PyType_IsSubtype(Py_TYPE(backend), engine.AcceleratorBackend) != 0;
  for (const char* name :
       {"_record", "copy", "copies_on", "current_stream", "done", "empty", "new_stream", "record", "wait"}) {
    known = known && has_as_it_is(Py_TYPE(backend), engine.AcceleratorBackend, name);
  }
  if (known) {
    static Name current_stream("current_stream");
    known = is_native(stream.native.get(current_stream.call(backend).get()));
  }
  found = known;
  Py_INCREF(last = Py_TYPE(backend));
  return found;
}

inline c10::Stream native_of(PyObject* of) {
  PyObject* native = stream.native.get(of);
  if (!is_native(native)) {
    PyErr_Format(PyExc_TypeError, "%R is no stream of torch's", native);
    throw python_error();
  }
  const auto* known = reinterpret_cast<THPStream*>(native);
  return c10::Stream::unpack3(known->stream_id, static_cast<c10::DeviceIndex>(known->device_index),
                              static_cast<c10::DeviceType>(known->device_type));
}

inline c10::Device current_device(c10::DeviceType type) { return c10::impl::getDeviceGuardImpl(type)->getDevice(); }

// An accelerator's stream.
inline bool is_current(PyObject* of) {
  const c10::Stream native = native_of(of);
  const auto* guards = c10::impl::getDeviceGuardImpl(native.device_type());
  return guards->getStream(guards->getDevice()) == native;
}

// `AcceleratorBackend.current_stream`
inline PyObject* backend_current_stream(PyObject* self, PyObject*) {
  return guarded([&] {
    static Name known_name("_current_streams"), type_name("type"), slowly("current_stream_slowly");
    Own type = type_name.of(self), known = known_name.of(self);
    const c10::DeviceType kind = device_type(Own::of(type.get()));
    const c10::Stream now = c10::impl::getDeviceGuardImpl(kind)->getStream(current_device(kind));
    Own key = own(Py_BuildValue("LLL", static_cast<long long>(now.id()), static_cast<long long>(now.device_index()),
                                static_cast<long long>(now.device_type())));
    PyObject* found = PyDict_GetItemWithError(known.get(), key.get());
    if (found == nullptr && PyErr_Occurred()) throw python_error();
    return found != nullptr ? new_reference(found) : slowly.call(self).release();
  });
}

// `AcceleratorBackend.record`
inline Own record_event(PyObject* backend, PyObject* on) {
  static Name events("_events"), device("device"), pop("pop"), at_record("record");
  PyObject* native = stream.native.get(on);
  Own pools = events.of(backend), where = device.of(native), key = own(PyTuple_Pack(2, where.get(), Py_False));
  PyObject* known = PyDict_GetItemWithError(pools.get(), key.get());
  if (known == nullptr && PyErr_Occurred()) throw python_error();
  if (known == nullptr || PyObject_Size(known) == 0) return at_record.call(backend, on);
  Own pool = Own::of(known), taken = pop.call(pool.get());
  at_record.call(taken.get(), native);
  Own made = make(engine.NativeEvent);
  event.native.set(made.get(), std::move(taken));
  event.happened.set_borrowed(made.get(), Py_False);
  event.awaited.set_borrowed(made.get(), Py_False);
  event.pool.set(made.get(), std::move(pool));
  return made;
}

// `NativeEvent.__del__`
inline PyObject* event_dies(PyObject* self, PyObject*) {
  return guarded([&] {
    static Name append("append");
    PyObject *pool = event.pool.maybe(self), *native = event.native.maybe(self);
    if (pool != nullptr && native != nullptr) append.call(pool, native);
    return new_reference(Py_None);
  });
}

// `AcceleratorBackend.done`
inline bool has_happened(PyObject* backend, PyObject* of) {
  static Name query("query"), done("done");
  if (Py_TYPE(of) != engine.NativeEvent) return must(PyObject_IsTrue(done.call(backend, of).get())) != 0;
  if (event.happened.get(of) == Py_True) return true;
  Own answer = query.call(event.native.get(of));
  if (must(PyObject_IsTrue(answer.get())) == 0) return false;
  event.happened.set_borrowed(of, Py_True);
  return true;
}

// `AcceleratorBackend.wait`
inline void wait_for(PyObject* backend, PyObject* on, PyObject* of, PyObject* reason) {
  static Name wait("wait");
  if (Py_TYPE(of) == engine.NativeEvent &&
      (event.happened.get(of) == Py_True || same(event.awaited.get(of), stream.key.get(on)))) {
    return;
  }
  wait.call(backend, on, of, reason);
}

}  // namespace hot
