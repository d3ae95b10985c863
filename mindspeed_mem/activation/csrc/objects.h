// The engine's Python objects as C++ sees them. They are Python's own (position.py, course.py, storage/), with
// `__slots__`, whose places in memory are looked up once: there is no second copy of any state.

#pragma once

#include "fast_tensors.h"

#include <structmember.h>

#include <utility>

namespace hot {

// A reference that is let go of at the end of a scope.
class Own {
 public:
  Own() = default;
  explicit Own(PyObject* owned) : object_(owned) {}
  Own(Own&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
  Own& operator=(Own&& other) noexcept {
    std::swap(object_, other.object_);
    return *this;
  }
  Own(const Own&) = delete;
  Own& operator=(const Own&) = delete;
  ~Own() { Py_XDECREF(object_); }

  static Own of(PyObject* borrowed) {
    Py_XINCREF(borrowed);
    return Own(borrowed);
  }
  PyObject* get() const { return object_; }
  PyObject* release() { return std::exchange(object_, nullptr); }
  explicit operator bool() const { return object_ != nullptr; }

 private:
  PyObject* object_ = nullptr;
};

// What a call of Python's C interface returned; throws where it has failed.
inline PyObject* must(PyObject* returned) {
  if (returned == nullptr) throw python_error();
  return returned;
}
inline int must(int returned) {
  if (returned < 0) throw python_error();
  return returned;
}
inline Own own(PyObject* returned) { return Own(must(returned)); }

[[noreturn]] inline void fail_assertion(const char* what) {
  PyErr_SetString(PyExc_AssertionError, what);
  throw python_error();
}

template <class Body>
PyObject* guarded(Body&& body) {
  HANDLE_TH_ERRORS
  return body();
  END_HANDLE_TH_ERRORS
}

// What a function of so many arguments says where it was given another number.
inline void takes(Py_ssize_t given, Py_ssize_t wanted, const char* what) {
  if (given == wanted) return;
  PyErr_SetString(PyExc_TypeError, what);
  throw python_error();
}

inline PyObject* new_reference(PyObject* borrowed) {
  Py_INCREF(borrowed);
  return borrowed;
}

inline long long number_of(PyObject* object) {
  const long long found = PyLong_AsLongLong(object);
  if (found == -1 && PyErr_Occurred()) throw python_error();
  return found;
}

// What a weak reference is of; empty where that is gone.
inline Own target_of(PyObject* reference) {
#if PY_VERSION_HEX >= 0x030D0000
  PyObject* found = nullptr;
  must(PyWeakref_GetRef(reference, &found));
  return Own(found);
#else
  PyObject* found = must(PyWeakref_GetObject(reference));
  return found == Py_None ? Own() : Own::of(found);
#endif
}

// By the name that a backend gives it.
inline c10::DeviceType device_type(Own name) {
  static PyObject* last = nullptr;  // never let go of: its address tells it apart
  static c10::DeviceType type;
  if (name.get() != last) {
    const char* text = PyUnicode_AsUTF8(name.get());
    if (text == nullptr) throw python_error();
    type = c10::Device(text).type();
    last = name.release();
  }
  return type;
}

// One of an object's `__slots__`.
class Slot {
 public:
  explicit Slot(const char* name) : name(name) {}

  // Borrowed; never nothing where the object has been made as its class makes it.
  PyObject* get(PyObject* of) const {
    PyObject* found = *place(of);
    if (found == nullptr) {
      PyErr_SetString(PyExc_AttributeError, name);
      throw python_error();
    }
    return found;
  }
  PyObject* maybe(PyObject* of) const { return *place(of); }
  void set(PyObject* of, PyObject* owned) const {
    PyObject** at = place(of);
    PyObject* before = *at;
    *at = owned;
    Py_XDECREF(before);
  }
  void set(PyObject* of, Own owned) const { set(of, owned.release()); }
  void set_borrowed(PyObject* of, PyObject* borrowed) const { set(of, new_reference(borrowed)); }
  long long number(PyObject* of) const { return number_of(get(of)); }
  void set_number(PyObject* of, long long value) const { set(of, must(PyLong_FromLongLong(value))); }
  void add(PyObject* of, long long more) const { set_number(of, number(of) + more); }
  bool is_none(PyObject* of) const { return get(of) == Py_None; }

  void find(PyObject* type) {
    Own descriptor = own(PyObject_GetAttrString(type, name));
    if (Py_TYPE(descriptor.get()) != &PyMemberDescr_Type) {
      PyErr_Format(PyExc_TypeError, "%s of %R is no slot", name, type);
      throw python_error();
    }
    offset_ = reinterpret_cast<PyMemberDescrObject*>(descriptor.get())->d_member->offset;
  }

  const char* name;

 private:
  PyObject** place(PyObject* of) const {
    return reinterpret_cast<PyObject**>(reinterpret_cast<char*>(of) + offset_);
  }
  Py_ssize_t offset_ = 0;
};

// The name of an attribute of an object without slots, or of a method.
class Name {
 public:
  explicit Name(const char* text) : text_(text) {}
  PyObject* object() {
    if (object_ == nullptr) object_ = must(PyUnicode_InternFromString(text_));
    return object_;
  }
  Own of(PyObject* holder) { return own(PyObject_GetAttr(holder, object())); }
  void set(PyObject* holder, PyObject* value) { must(PyObject_SetAttr(holder, object(), value)); }
  long long number(PyObject* holder) { return number_of(of(holder).get()); }
  bool is_true(PyObject* holder) { return must(PyObject_IsTrue(of(holder).get())); }
  void add(PyObject* holder, long long more) {
    Own sum = own(PyLong_FromLongLong(number(holder) + more));
    set(holder, sum.get());
  }
  // Calls the method of this name.
  template <class... Arguments>
  Own call(PyObject* holder, Arguments... arguments) {
    PyObject* given[] = {holder, arguments...};
    return own(PyObject_VectorcallMethod(object(), given, sizeof...(Arguments) + 1, nullptr));
  }

 private:
  const char* text_;
  PyObject* object_ = nullptr;
};

// What a dictionary has there; empty where it has nothing.
inline Own found_in(PyObject* dictionary, PyObject* key) {
  PyObject* found = PyDict_GetItemWithError(dictionary, key);
  if (found == nullptr && PyErr_Occurred()) throw python_error();
  return Own::of(found);
}

template <class... Arguments>
Own call(PyObject* callable, Arguments... arguments) {
  PyObject* given[] = {arguments..., nullptr};
  return own(PyObject_Vectorcall(callable, given, sizeof...(Arguments), nullptr));
}

inline struct PositionSlots {
  Slot stack{"stack"}, micro_batch{"micro_batch"}, rerun{"rerun"}, course{"course"}, hooked{"hooked"}, known{"known"},
      watch{"watch"}, about_to_run{"about_to_run"};
} position;

inline struct CourseSlots {
  Slot quiet{"quiet"}, inside{"inside"}, again{"again"}, saves{"saves"}, kept{"kept"}, at{"at"}, index{"index"},
      operators{"operators"}, hooked{"hooked"}, signed_{"signed"}, switches{"switches"};
} course;

inline struct OperatorRunsSlots {
  Slot position{"_position"}, in_force{"_in_force"}, saved{"_saved"}, second_runs{"_second_runs"}, passes{"_passes"},
      observation{"_observation"}, natives{"_natives"};
} operator_runs;

inline struct MoverSlots {
  Slot backend{"backend"}, slabs{"slabs"}, several{"several"}, streams{"_streams"}, moved{"moved"}, dropped{"dropped"},
      bytes_out{"bytes_out"}, bytes_in{"bytes_in"}, copies_out{"copies_out"}, copies_in{"copies_in"}, late{"late"},
      staying{"staying"}, known{"known"}, auto_{"auto"}, timing{"timing"}, lock{"_lock"}, compute{"_compute"};
} mover_slots;

inline struct LateCopiesSlots {
  Slot nbytes{"nbytes"}, window{"window"}, records{"_records"};
} late_copies;

inline struct ObservationSlots {
  Slot stopwatch{"stopwatch"}, counting{"counting"};
} observation;

inline struct MicroBatchSlots {
  Slot mover{"mover"}, late{"late"}, home{"home"}, home_key{"home_key"}, count{"count"}, forward_done{"forward_done"},
      bounds{"bounds"}, running{"running"}, fresh{"fresh"}, due{"due"}, tie{"_tie"}, moved{"moved"},
      saving{"_saving"}, alive{"_alive"}, native{"native"}, ahead{"ahead"}, queue{"_queue"}, cursor{"_cursor"},
      reached{"_reached"}, in_backward{"in_backward"}, recomputed{"recomputed"};
} micro_batch;

inline struct RecordSlots {
  Slot way_back{"way_back"}, micro_batch{"micro_batch"}, layer{"layer"}, op{"op"}, number{"number"},
      last_use{"last_use"}, distance{"distance"}, nbytes{"nbytes"}, state{"state"}, storage{"storage"}, token{"token"},
      handles{"handles"}, version{"version"}, base{"base"}, slab{"slab"}, source{"source"}, out_event{"out_event"},
      buffer{"buffer"}, in_event{"in_event"}, stream{"stream"}, others{"others"}, attributes{"attributes"};
} record;

inline struct HandleSlots {
  Slot alias{"alias"}, version{"version"}, record{"record"}, micro_batch{"micro_batch"}, number{"number"},
      layout{"layout"}, own{"own"};
} handle;

inline struct TokenSlots {
  Slot ledger{"ledger"}, nbytes{"nbytes"}, owned{"owned"}, moved{"moved"}, entry{"entry"};
} token;

inline struct CounterSlots {
  Slot now{"now"}, peak{"peak"};
} counter;

inline struct UnseenSlots {
  Slot kept{"kept"};
} unseen;

inline struct SlabSlots {
  Slot buffer{"buffer"}, whole{"whole"}, nbytes{"nbytes"}, ready{"ready"};
} slab;

inline struct MadeSlots {
  Slot rerun{"rerun"}, micro_batch{"micro_batch"}, layout{"layout"}, nbytes{"nbytes"}, storage{"storage"},
      version{"version"}, base{"base"}, stream{"stream"}, others{"others"}, attributes{"attributes"}, state{"state"},
      tensor{"tensor"};
} made;

inline struct SaverSlots {
  Slot micro_batch{"micro_batch"}, number{"number"};
} saver;

inline struct SavedSlotSlots {
  Slot made{"made"}, alias{"alias"}, own{"own"}, layout{"layout"}, saver{"saver"};
} saved_slot;

inline struct SavesSlots {
  Slot program{"program"}, slots{"slots"}, entered{"entered"}, made{"_made"}, saver{"_saver"}, nbytes{"_nbytes"},
      taken{"_taken"}, again{"again"}, entries{"entries"}, seen{"_seen"}, firsts{"_firsts"};
} saves;

inline struct RerunSlots {
  Slot owner{"owner"}, mover{"mover"}, stream{"stream"}, moves_inputs{"moves_inputs"}, saved{"saved"};
} rerun;

// Classes, functions and constants of the engine, by the names that hot_path.py hands them over with.
inline struct Engine {
  PyTypeObject *Record = nullptr, *Handle = nullptr, *Token = nullptr, *Marks = nullptr, *Mover = nullptr,
               *CpuBackend = nullptr, *ModuleRerun = nullptr, *SavedSlot = nullptr, *Made = nullptr, *Saver = nullptr,
               *MicroBatch = nullptr, *MadeBy = nullptr, *Tape = nullptr, *AcceleratorBackend = nullptr,
               *NativeEvent = nullptr, *EvictingMover = nullptr, *Backend = nullptr, *Saves = nullptr, *Entry = nullptr;
  PyObject *DEVICE = nullptr, *COPYING = nullptr, *HOST = nullptr, *LOADED = nullptr, *KEPT = nullptr,
           *DROPPED = nullptr, *REMADE = nullptr, *LEDGER = nullptr, *APPLY = nullptr, *UNTIMED = nullptr,
           *DONE = nullptr, *NOTHING = nullptr, *NO_OPERATOR = nullptr, *TAG = nullptr;
  PyObject *compiler = nullptr, *under_way = nullptr, *UNKNOWN = nullptr,
           *top_hooks = nullptr,
           *under_checkpoint = nullptr, *torch = nullptr;
  PyObject *own = nullptr, *native = nullptr, *says_when = nullptr, *told_to_stay = nullptr, *as_saved = nullptr, *reading = nullptr,
           *partial = nullptr, *random = nullptr, *autocast_kinds = nullptr, *PLAIN = nullptr,
           *UNKNOWN_SETTING = nullptr, *ABSENT = nullptr, *settings_as_of = nullptr, *heappush = nullptr,
           *heappop = nullptr, *inline_path = nullptr, *MARKERS = nullptr, *set_by_others = nullptr, *empty = nullptr,
           *second_runs = nullptr, *nullcontext = nullptr;
  // why something waits
  PyObject *OUT_AFTER_COMPUTE = nullptr, *OUT_AFTER_SLAB = nullptr, *RELEASE_AFTER_OUT = nullptr,
           *IN_AFTER_COMPUTE = nullptr, *COMPUTE_AFTER_IN = nullptr, *RETIRE_AFTER_COPIES = nullptr;
  PyObject *held = nullptr, *owned = nullptr, *without = nullptr;  // the ledger's counters
} engine;

// What a module has, without asking its type.
inline PyObject* of_module(PyObject* module, Name& name) {
  PyObject* found = PyDict_GetItemWithError(PyModule_GetDict(module), name.object());
  if (found == nullptr) {
    if (!PyErr_Occurred()) PyErr_SetObject(PyExc_AttributeError, name.object());
    throw python_error();
  }
  return found;
}

inline PyObject* marks_name() {
  static Name name("_mindspeed_mem");
  return name.object();
}

// An object of such a class, whose slots are to be set: its `__init__` does not run.
inline Own make(PyTypeObject* type) { return own(type->tp_alloc(type, 0)); }

inline bool is_empty(PyObject* list) { return PyList_GET_SIZE(list) == 0; }

inline bool same(PyObject* one, PyObject* other) {
  return one == other || must(PyObject_RichCompareBool(one, other, Py_EQ));
}

}  // namespace hot
