// rerun/rng.py: whether anybody has drawn from the host's generator.

#pragma once

#include "objects.h"

#include <ATen/CPUGeneratorImpl.h>

#include <mutex>
#include <optional>
#include <torch/csrc/Generator.h>
#include <unordered_map>

namespace hot {

// All that decides what a generator of the host draws next.
class Drawn {
 public:
  Drawn() {
    at::Generator generator = at::detail::getDefaultCPUGenerator();
    const std::lock_guard<std::mutex> lock(generator.mutex());
    auto* of = at::check_generator<at::CPUGeneratorImpl>(generator);
    engine_ = of->engine().data();
    normal_ = of->next_float_normal_sample();
    normals_ = of->next_double_normal_sample();
  }
  bool operator==(const Drawn& other) const {
    const auto &one = engine_, &two = other.engine_;
    return one.left_ == two.left_ && one.next_ == two.next_ && one.seed_ == two.seed_ && one.seeded_ == two.seeded_ &&
           normal_ == other.normal_ && normals_ == other.normals_ && one.state_ == two.state_;
  }

 private:
  at::mt19937_data_pod engine_;
  std::optional<float> normal_;
  std::optional<double> normals_;
};

// rng.host_state(): the tensor that it returned the last time, if nobody has drawn since.
inline PyObject* host_state(PyObject*, PyObject*) {
  return guarded([&] {
    static std::optional<Drawn> then;
    static PyObject* tensor = nullptr;
    static Name fresh("get_rng_state");
    const Drawn now;
    if (then && *then == now) return new_reference(tensor);
    Own found = fresh.call(engine.torch);
    if (Drawn() == now) {  // no other thread has drawn meanwhile
      then = now;
      Py_XSETREF(tensor, new_reference(found.get()));
    }
    return found.release();
  });
}

// device_state(generator, fresh): the same of a device's generator, if its seed and offset can be asked for: they tell
// its state. ``fresh()`` returns a tensor.
inline PyObject* device_state(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    takes(count, 2, "device_state takes a generator and what returns its state");
    using Place = std::pair<uint64_t, uint64_t>;
    struct State {
      Place place;
      PyObject* tensor = nullptr;
    };
    static std::unordered_map<const c10::GeneratorImpl*, State> states;  // default generators live as long as this
    if (must(PyObject_IsInstance(args[0], THPGeneratorClass)) == 0) return call(args[1]).release();
    at::Generator generator = reinterpret_cast<THPGenerator*>(args[0])->cdata;
    const auto place = [&]() -> std::optional<Place> {
      const std::lock_guard<std::mutex> lock(generator.mutex());
      try {
        return Place(generator.current_seed(), generator.get_offset());
      } catch (const c10::Error&) {  // while a graph is captured, say
        return std::nullopt;
      }
    };
    const std::optional<Place> now = place();
    if (!now) return call(args[1]).release();
    State& then = states[generator.unsafeGetGeneratorImpl()];
    if (then.tensor != nullptr && then.place == *now) return new_reference(then.tensor);
    Own found = call(args[1]);
    if (place() == now) {  // no other thread has drawn meanwhile
      then.place = *now;
      Py_XSETREF(then.tensor, new_reference(found.get()));
    }
    return found.release();
  });
}

// Whether nobody has drawn between the two, which have the same containers.
inline bool are_same(PyObject* states, PyObject* others) {
  if (THPVariable_Check(states)) {
    if (states == others || !THPVariable_Check(others)) return states == others;
    // a tracker's that was forked, and not drawn from: whoever forks it puts another tensor there
    const at::Tensor &one = THPVariable_Unpack(states), &other = THPVariable_Unpack(others);
    return one.device().is_cpu() && other.device().is_cpu() && one.dtype() == other.dtype() && at::equal(one, other);
  }
  if (Py_TYPE(states) != Py_TYPE(others)) return false;
  if (PyTuple_Check(states)) {
    const Py_ssize_t count = PyTuple_GET_SIZE(states);
    if (PyTuple_GET_SIZE(others) != count) return false;
    for (Py_ssize_t i = 0; i < count; ++i) {
      if (!are_same(PyTuple_GET_ITEM(states, i), PyTuple_GET_ITEM(others, i))) return false;
    }
    return true;
  }
  if (!PyDict_CheckExact(states) || PyDict_GET_SIZE(states) != PyDict_GET_SIZE(others)) return false;
  PyObject *key = nullptr, *one = nullptr;
  for (Py_ssize_t at = 0; PyDict_Next(states, &at, &key, &one);) {
    PyObject* other = PyDict_GetItemWithError(others, key);
    if (other == nullptr && PyErr_Occurred()) throw python_error();
    if (other == nullptr || !are_same(one, other)) return false;
  }
  return true;
}

// same_states(states, others): False: it takes a closer look.
inline PyObject* same_states(PyObject*, PyObject* const* args, Py_ssize_t count) {
  return guarded([&]() -> PyObject* {
    takes(count, 2, "same_states takes two states");
    return new_reference(are_same(args[0], args[1]) ? Py_True : Py_False);
  });
}

}  // namespace hot
