// storage/ledger.py and storage/marks.py: what is counted, and what lies on storages.

#pragma once

#include "objects.h"

namespace hot {

inline void count(PyObject* of, long long more) {
  const long long now = counter.now.number(of) + more;
  counter.now.set_number(of, now);
  if (more > 0 && now > counter.peak.number(of)) counter.peak.set_borrowed(of, counter.now.get(of));
}

// `Token`: counted from now on. `owned`, `moved`: True or False.
inline void enter(PyObject* self, PyObject* ledger, PyObject* nbytes, PyObject* owned, PyObject* moved) {
  static Name held_name("held"), owned_name("owned"), without_name("without");
  token.ledger.set_borrowed(self, ledger);
  token.nbytes.set_borrowed(self, nbytes);
  token.owned.set_borrowed(self, owned);
  token.moved.set_borrowed(self, moved);
  token.entry.set_borrowed(self, Py_None);
  const long long bytes = number_of(nbytes);
  if (ledger == engine.LEDGER) {
    count(engine.held, bytes);
    if (owned == Py_True) count(engine.owned, bytes);
    if (moved != Py_True) count(engine.without, bytes);
  } else {
    count(held_name.of(ledger).get(), bytes);
    if (owned == Py_True) count(owned_name.of(ledger).get(), bytes);
    if (moved != Py_True) count(without_name.of(ledger).get(), bytes);
  }
}

// `Ledger.token`: one that lives on a storage. `is_owned`, `was_moved`: as `Token` has them; `owner`: layer, operator.
inline Own new_token(PyObject* nbytes, bool is_owned, bool was_moved, PyObject* owner) {
  static Name of("token");
  Own kind = of.of(engine.LEDGER);
  PyObject *owned = is_owned ? Py_True : Py_False, *moved = was_moved ? Py_True : Py_False;
  if (kind.get() != reinterpret_cast<PyObject*>(engine.Token)) {  // somebody writes down what enters
    return call(kind.get(), engine.LEDGER, nbytes, owned, moved, owner);
  }
  Own made = make(engine.Token);
  enter(made.get(), engine.LEDGER, nbytes, owned, moved);
  return made;
}

// Token(ledger, nbytes, owned, moved, owner)
inline PyObject* token_begins(PyObject* self, PyObject* args) {
  return guarded([&]() -> PyObject* {
    PyObject *ledger = nullptr, *nbytes = nullptr, *owned = nullptr, *moved = Py_False, *owner = nullptr;
    if (!PyArg_ParseTuple(args, "OOO|OO", &ledger, &nbytes, &owned, &moved, &owner)) return nullptr;
    const auto truth = [](PyObject* one) { return must(PyObject_IsTrue(one)) != 0 ? Py_True : Py_False; };
    enter(self, ledger, nbytes, truth(owned), truth(moved));
    return new_reference(Py_None);
  });
}

// `Token.__del__`
inline PyObject* token_dies(PyObject* self, PyObject*) {
  return guarded([&] {
    if (token.ledger.get(self) != engine.LEDGER) {
      static Name slowly("leave");
      return slowly.call(self).release();
    }
    const long long bytes = token.nbytes.number(self);
    count(engine.held, -bytes);
    if (token.owned.get(self) == Py_True) count(engine.owned, -bytes);
    if (token.moved.get(self) != Py_True) count(engine.without, -bytes);
    return new_reference(Py_None);
  });
}

// `Unseen.add`
inline void add_unseen(PyObject* self, PyObject* number, PyObject* kept) {
  Own entry = own(PyTuple_Pack(2, number, kept));
  must(PyList_Append(unseen.kept.get(self), entry.get()));
  const long long mine = number_of(PyTuple_GET_ITEM(kept, 0)), others = number_of(PyTuple_GET_ITEM(kept, 1));
  count(engine.without, mine + others);
  count(engine.held, mine + others);
  count(engine.owned, mine);
}

inline PyObject* unseen_adds(PyObject* self, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    takes(count, 2, "add takes a number and what is kept");
    add_unseen(self, args[0], args[1]);
    return new_reference(Py_None);
  });
}

// `Unseen.drop`
inline void drop_unseen(PyObject* self, long long above) {
  PyObject* list = unseen.kept.get(self);
  while (!is_empty(list)) {
    const Py_ssize_t last = PyList_GET_SIZE(list) - 1;
    Own entry = Own::of(PyList_GET_ITEM(list, last));
    if (number_of(PyTuple_GET_ITEM(entry.get(), 0)) <= above) break;
    must(PyList_SetSlice(list, last, last + 1, nullptr));
    PyObject* kept = PyTuple_GET_ITEM(entry.get(), 1);
    const long long mine = number_of(PyTuple_GET_ITEM(kept, 0)), others = number_of(PyTuple_GET_ITEM(kept, 1));
    count(engine.owned, -mine);
    count(engine.held, -mine - others);
    count(engine.without, -mine - others);
  }
}

// The Python object of a tensor's storage.
inline Own storage_of(const at::Tensor& tensor) { return own(THPStorage_Wrap(tensor.storage())); }

// Its attributes.
inline Own attributes_of(PyObject* storage) { return own(PyObject_GenericGetDict(storage, nullptr)); }

// Its marks, borrowed; nullptr where there are none.
inline PyObject* marks_in(PyObject* attributes) {
  PyObject* found = PyDict_GetItemWithError(attributes, marks_name());
  if (found == nullptr && PyErr_Occurred()) throw python_error();
  return found;
}

inline Own new_marks(PyObject* attributes) {
  Own made = own(PyObject_CallNoArgs(reinterpret_cast<PyObject*>(engine.Marks)));
  must(PyDict_SetItem(attributes, marks_name(), made.get()));
  return made;
}

// `Marks.keep`
inline void keep_here(PyObject* marks) {
  static Name stays("stays"), record("record");
  stays.set(marks, Py_True);
  record.set(marks, Py_None);
}

// `marks.of`
inline PyObject* marks_of(PyObject*, PyObject* storage) {
  return guarded([&] {
    Own attributes = attributes_of(storage);
    PyObject* found = marks_in(attributes.get());
    return found != nullptr ? new_reference(found) : new_marks(attributes.get()).release();
  });
}

// `Ledger.enter_copy`, of a storage that activations were copied back into.
inline void enter_copy(const at::Tensor& buffer, PyObject* nbytes, bool is_owned, PyObject* owner) {
  static Name token_name("token");
  Own storage = storage_of(buffer), attributes = attributes_of(storage.get());
  PyObject* known = marks_in(attributes.get());
  Own marks = known == nullptr ? new_marks(attributes.get()) : Own::of(known);
  Own counted = new_token(nbytes, is_owned, true, owner);
  token_name.set(marks.get(), counted.get());
}

}  // namespace hot
