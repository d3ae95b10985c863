// What the engine does for each operator and each saved tensor, on the very objects that it has in Python; hot_path.py
// says what it takes the place of. What is out of the ordinary goes on there.

#include "wrappers.h"

namespace hot {
namespace {

PyCFunction fast(PyObject* (*function)(PyObject*, PyObject* const*, Py_ssize_t)) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

struct Method {
  const char* of;
  PyMethodDef definition;
};

// By class: methods that take the place of Python's.
Method methods[] = {
    {"Token", {"__del__", token_dies, METH_NOARGS, nullptr}},
    {"Token", {"__init__", token_begins, METH_VARARGS, nullptr}},
    {"Unseen", {"add", fast(unseen_adds), METH_FASTCALL, nullptr}},
    {"Handle", {"__init__", handle_begins, METH_VARARGS, nullptr}},
    {"Handle", {"__del__", handle_dies, METH_NOARGS, nullptr}},
    {"Handle", {"let_go", handle_lets_go, METH_NOARGS, nullptr}},
    {"Record", {"__del__", record_dies, METH_NOARGS, nullptr}},
    {"Record", {"leave", fast(record_leaves), METH_FASTCALL, nullptr}},
    {"Mover", {"load", mover_loads, METH_O, nullptr}},
    {"AcceleratorBackend", {"current_stream", backend_current_stream, METH_NOARGS, nullptr}},
    {"NativeEvent", {"__del__", event_dies, METH_NOARGS, nullptr}},
    {"Made", {"__del__", made_dies, METH_NOARGS, nullptr}},
    {"Rerun", {"fill", fast(rerun_fills), METH_FASTCALL, nullptr}},
    {"Rerun", {"run_again", rerun_runs_again, METH_NOARGS, nullptr}},
    {"ModuleRerun", {"remake", module_rerun_remakes, METH_NOARGS, nullptr}},
    {"ModuleRerun", {"refill", refill, METH_O, nullptr}},
    {"ModuleRerun", {"_fill", fast(module_rerun_fills), METH_FASTCALL, nullptr}},
    {"ModuleRerun", {"_returns_one", fast(module_rerun_returns_one), METH_FASTCALL, nullptr}},
    {"ModuleRerun", {"enters_again", fast(module_rerun_enters_again), METH_FASTCALL, nullptr}},
    {"Saver", {"__del__", saver_dies, METH_NOARGS, nullptr}},
    {"MicroBatch", {"operator_ended", micro_batch_operator_ended, METH_NOARGS, nullptr}},
    {"MicroBatch", {"copy_fresh", micro_batch_copies_fresh, METH_NOARGS, nullptr}},
    {"MicroBatch", {"switch", fast(micro_batch_switches), METH_FASTCALL, nullptr}},
    {"MicroBatch", {"saved_by", micro_batch_saved_by, METH_O, nullptr}},
    {"MicroBatch", {"dropped", micro_batch_dropped, METH_O, nullptr}},
    {"MicroBatch", {"unpacks", micro_batch_unpacks, METH_O, nullptr}},
    {"MicroBatch", {"backward_reaches", micro_batch_backward_reaches, METH_O, nullptr}},
    {"SecondRuns", {"stays", second_runs_stays, METH_O, nullptr}},
    {"SavedTensors", {"hold", saved_tensors_holds, METH_O, nullptr}},
    {"Tape", {"_note", fast(tape_notes), METH_FASTCALL, nullptr}},
    {"OperatorRuns", {"_start", fast(operator_runs_start), METH_FASTCALL, nullptr}},
    {"OperatorRuns", {"_leave", operator_runs_leave, METH_O, nullptr}},
    {"OperatorRuns", {"ended", operator_runs_ended, METH_O, nullptr}},
    {"OperatorRuns", {"_run_module", fast(operator_runs_run_module), METH_FASTCALL, nullptr}},
    {"OperatorRuns", {"_run_once", fast(operator_runs_run_once), METH_FASTCALL, nullptr}},
    {"OperatorRuns", {"_signature", fast(operator_runs_signature), METH_FASTCALL, nullptr}},
};

void find_slots(PyObject* classes) {
  const auto in = [&](const char* name, std::initializer_list<Slot*> slots) {
    PyObject* type = PyDict_GetItemString(classes, name);
    if (type == nullptr) {
      PyErr_SetString(PyExc_KeyError, name);
      throw python_error();
    }
    for (Slot* slot : slots) slot->find(type);
  };
  in("Position", {&position.stack, &position.micro_batch, &position.rerun, &position.course, &position.hooked,
                  &position.known, &position.watch, &position.about_to_run});
  in("Course",
     {&course.quiet, &course.inside, &course.again, &course.saves, &course.kept, &course.at, &course.index,
      &course.operators, &course.hooked, &course.signed_, &course.switches});
  in("OperatorRuns", {&operator_runs.position, &operator_runs.in_force, &operator_runs.saved, &operator_runs.second_runs,
                      &operator_runs.passes, &operator_runs.observation, &operator_runs.natives});
  in("Mover", {&mover_slots.backend, &mover_slots.slabs, &mover_slots.several, &mover_slots.streams, &mover_slots.moved,
               &mover_slots.dropped, &mover_slots.bytes_out, &mover_slots.bytes_in, &mover_slots.copies_out,
               &mover_slots.copies_in, &mover_slots.late, &mover_slots.staying, &mover_slots.known, &mover_slots.auto_,
               &mover_slots.timing, &mover_slots.lock, &mover_slots.compute});
  in("LateCopies", {&late_copies.nbytes, &late_copies.window, &late_copies.records});
  in("MicroBatch",
     {&micro_batch.mover, &micro_batch.late, &micro_batch.home, &micro_batch.home_key, &micro_batch.count, &micro_batch.forward_done,
      &micro_batch.bounds, &micro_batch.running, &micro_batch.fresh, &micro_batch.due, &micro_batch.tie,
      &micro_batch.moved, &micro_batch.saving, &micro_batch.alive, &micro_batch.native, &micro_batch.ahead,
      &micro_batch.queue, &micro_batch.cursor, &micro_batch.reached, &micro_batch.in_backward,
      &micro_batch.recomputed});
  in("Record",
     {&record.way_back, &record.micro_batch, &record.layer, &record.op, &record.number, &record.last_use,
      &record.distance, &record.nbytes, &record.state, &record.storage, &record.token, &record.handles,
      &record.version, &record.base, &record.slab, &record.source, &record.out_event, &record.buffer,
      &record.in_event, &record.stream, &record.others, &record.attributes});
  in("Handle", {&handle.alias, &handle.version, &handle.record, &handle.micro_batch, &handle.number, &handle.layout,
                &handle.own});
  in("Token", {&token.ledger, &token.nbytes, &token.owned, &token.moved, &token.entry});
  in("Counter", {&counter.now, &counter.peak});
  in("Unseen", {&unseen.kept});
  in("Stream", {&stream.native, &stream.key});
  in("NativeEvent", {&event.native, &event.happened, &event.awaited, &event.pool});
  in("Slab", {&slab.buffer, &slab.whole, &slab.nbytes, &slab.ready});
  in("Made", {&made.rerun, &made.micro_batch, &made.layout, &made.nbytes, &made.storage, &made.version, &made.base,
              &made.stream, &made.others, &made.attributes, &made.state, &made.tensor});
  in("Saver", {&saver.micro_batch, &saver.number});
  in("SavedSlot",
     {&saved_slot.made, &saved_slot.alias, &saved_slot.own, &saved_slot.layout, &saved_slot.saver});
  in("Saves", {&saves.program, &saves.slots, &saves.entered, &saves.made, &saves.saver, &saves.nbytes, &saves.taken,
               &saves.again, &saves.entries, &saves.seen, &saves.firsts});
  in("MadeBy", {&made_by.rerun, &made_by.slot, &made_by.version, &made_by.base});
  in("ModuleRerun", {&rerun.owner, &rerun.mover, &rerun.stream, &rerun.moves_inputs, &rerun.saved, &remaining,
                     &module_rerun.inputs, &module_rerun.layer, &module_rerun.op, &module_rerun.number,
                     &module_rerun.untried, &module_rerun.entered_again, &filled, &second_run.call, &second_run.state,
                     &second_run.settings, &second_run.given, &second_run.random, &second_run.around,
                     &second_run.places, &second_run.then, &module_rerun.outputs, &second_run.noted_again,
                     &second_run.noted, &second_run.why_not});
  in("TriedOperator", {&tried.modules, &tried.verdicts, &tried.programs});
  in("Observation", {&observation.stopwatch, &observation.counting});
}

// connect(classes, others): what the engine has, by name; returns {class: {method: what takes its place}}.
PyObject* connect(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    if (count != 2 || !PyDict_Check(args[0]) || !PyDict_Check(args[1])) {
      PyErr_SetString(PyExc_TypeError, "connect takes the engine's classes and what else it has, as dictionaries");
      return nullptr;
    }
    const auto take = [](PyObject* from, const char* name, PyObject** to) {
      PyObject* found = PyDict_GetItemString(from, name);
      if (found == nullptr) {
        PyErr_SetString(PyExc_KeyError, name);
        throw python_error();
      }
      Py_INCREF(found);
      Py_XSETREF(*to, found);
    };
    find_slots(args[0]);
    const std::pair<const char*, PyTypeObject**> types[] = {
        {"Record", &engine.Record},         {"Handle", &engine.Handle},       {"Token", &engine.Token},
        {"Marks", &engine.Marks},           {"Mover", &engine.Mover},         {"CpuBackend", &engine.CpuBackend},
        {"ModuleRerun", &engine.ModuleRerun}, {"SavedSlot", &engine.SavedSlot}, {"Made", &engine.Made},
        {"Saver", &engine.Saver},           {"MicroBatch", &engine.MicroBatch}, {"MadeBy", &engine.MadeBy},
        {"Tape", &engine.Tape},             {"NativeEvent", &engine.NativeEvent},
        {"AcceleratorBackend", &engine.AcceleratorBackend}, {"EvictingMover", &engine.EvictingMover},
        {"Backend", &engine.Backend},       {"Saves", &engine.Saves},
    };
    for (const auto& [name, to] : types) take(args[0], name, reinterpret_cast<PyObject**>(to));
    const std::pair<const char*, PyObject**> others[] = {
        {"DEVICE", &engine.DEVICE},
        {"COPYING", &engine.COPYING},
        {"HOST", &engine.HOST},
        {"LOADED", &engine.LOADED},
        {"KEPT", &engine.KEPT},
        {"DROPPED", &engine.DROPPED},
        {"REMADE", &engine.REMADE},
        {"LEDGER", &engine.LEDGER},
        {"APPLY", &engine.APPLY},
        {"UNTIMED", &engine.UNTIMED},
        {"DONE", &engine.DONE},
        {"NOTHING", &engine.NOTHING},
        {"NO_OPERATOR", &engine.NO_OPERATOR},
        {"NO_OWNER", &no_owner},
        {"PASSED_ON", &passed_on},
        {"own", &engine.own},
        {"native", &engine.native},
        {"says_when", &engine.says_when},
        {"told_to_stay", &engine.told_to_stay},
        {"as_saved", &engine.as_saved},
        {"reading", &engine.reading},
        {"partial", &engine.partial},
        {"random", &engine.random},
        {"torch", &engine.torch},
        {"autocast_kinds", &engine.autocast_kinds},
        {"Slot", &slot_type},
        {"heappush", &engine.heappush},
        {"heappop", &engine.heappop},
        {"inline_path", &engine.inline_path},
        {"MARKERS", &engine.MARKERS},
        {"UNKNOWN", &engine.UNKNOWN},
        {"under_checkpoint", &engine.under_checkpoint},
        {"top_hooks", &engine.top_hooks},
        {"compiler", &engine.compiler},
        {"under_way", &engine.under_way},
        {"TAG", &engine.TAG},
        {"set_by_others", &engine.set_by_others},
        {"empty", &engine.empty},
        {"second_runs", &engine.second_runs},
        {"nullcontext", &engine.nullcontext},
        {"OUT_AFTER_COMPUTE", &engine.OUT_AFTER_COMPUTE},
        {"OUT_AFTER_SLAB", &engine.OUT_AFTER_SLAB},
        {"RELEASE_AFTER_OUT", &engine.RELEASE_AFTER_OUT},
        {"IN_AFTER_COMPUTE", &engine.IN_AFTER_COMPUTE},
        {"COMPUTE_AFTER_IN", &engine.COMPUTE_AFTER_IN},
        {"RETIRE_AFTER_COPIES", &engine.RETIRE_AFTER_COPIES},
        {"PLAIN", &engine.PLAIN},
        {"UNKNOWN_SETTING", &engine.UNKNOWN_SETTING},
        {"ABSENT", &engine.ABSENT},
        {"settings_as_of", &engine.settings_as_of},
        {"enough", &enough},
        {"facts_of", &facts_of},
        {"as_it_drew", &as_it_drew},
        {"Ref", reinterpret_cast<PyObject**>(&ref_type)},
        {"Step", reinterpret_cast<PyObject**>(&step_type)},
        {"Entry", reinterpret_cast<PyObject**>(&engine.Entry)},
    };
    for (const auto& [name, to] : others) take(args[1], name, to);
    for (const auto& [name, to] : {std::pair<const char*, PyObject**>{"held", &engine.held},
                                   {"owned", &engine.owned},
                                   {"without", &engine.without}}) {
      Own found = own(PyObject_GetAttrString(engine.LEDGER, name));
      Py_XSETREF(*to, found.release());
    }
    Own made = own(PyDict_New());
    for (Method& one : methods) {
      PyObject* type = PyDict_GetItemString(args[0], one.of);
      if (type == nullptr) {
        PyErr_SetString(PyExc_KeyError, one.of);
        throw python_error();
      }
      Own key = own(PyTuple_Pack(2, type, own(PyUnicode_FromString(one.definition.ml_name)).get()));
      Own method = own(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type), &one.definition));
      must(PyDict_SetItem(made.get(), key.get(), method.get()));
    }
    return made.release();
  });
}

PyMethodDef functions[] = {
    {"connect", fast(connect), METH_FASTCALL, nullptr},
    {"hooks", fast(hooks), METH_FASTCALL, nullptr},
    {"use", use, METH_O, nullptr},
    {"runs", fast(runs), METH_FASTCALL, nullptr},
    {"begins", fast(begins), METH_FASTCALL, nullptr},
    {"ends", fast(ends), METH_FASTCALL, nullptr},
    {"autocast_now", autocast_now, METH_NOARGS, nullptr},
    {"hooks_are_ours_alone", regions_hooks_are_ours_alone, METH_NOARGS, nullptr},
    {"may_save", regions_may_save, METH_NOARGS, nullptr},
    {"all_as_saved", fast(all_as_saved), METH_FASTCALL, nullptr},
    {"empty_all", empty_all, METH_O, nullptr},
    {"has_managed", has_managed, METH_O, nullptr},
    {"host_state", host_state, METH_NOARGS, nullptr},
    {"device_state", fast(device_state), METH_FASTCALL, nullptr},
    {"same_states", fast(same_states), METH_FASTCALL, nullptr},
    {"marks_of", marks_of, METH_O, nullptr},
    {"tape_runs", fast(tape_runs), METH_FASTCALL, nullptr},
    {"tensors_in", tensors_in, METH_O, nullptr},
    {"split", fast(split), METH_FASTCALL, nullptr},
    {"note_settings", note_settings, METH_O, nullptr},
    {"join", fast(join), METH_FASTCALL, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "hot_path", nullptr, -1, functions, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace hot

PyMODINIT_FUNC PyInit_hot_path() {
  if (PyType_Ready(&hot::HooksType) < 0) return nullptr;
  return PyModule_Create(&hot::module);
}
