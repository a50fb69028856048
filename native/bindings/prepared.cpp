#include "bindings/prepared.h"

#include <nanobind/stl/string.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/fast_call.h"
#include "bindings/fast_path.h"

namespace ferrodist {

using namespace nanobind::literals;

namespace {

PyObject* profiling_names = nullptr;  // dict of torch.autograd.profiler
PyObject* is_profiling = nullptr;     // name of the flag that is True while torch's profiler records

// The base of the public class.
struct Prepared {
    FastCollective run;
    nb::object tensor, out;
    nb::tuple rest;  // the arguments between the tensor and the group
    nb::object group, timeout;
    nb::object general;  // makes a call on the general path, and returns its result

    Prepared(const std::string& name, nb::object tensor, nb::tuple rest, nb::object group, nb::object out,
             nb::object timeout, nb::object general)
        : run(find_fast_collective(name)),
          tensor(std::move(tensor)),
          out(std::move(out)),
          rest(std::move(rest)),
          group(std::move(group)),
          timeout(std::move(timeout)),
          general(std::move(general)) {
        if (run == nullptr) throw std::invalid_argument("no fast collective is called " + name);
    }

    // The result of the fast path, None if the call is to take the general one, or null with a Python error set.
    [[nodiscard]] PyObject* run_fast() const {
        if (PyDict_GetItemWithError(profiling_names, is_profiling) != Py_False) Py_RETURN_NONE;
        const auto path = find_fast_path(group, timeout);
        if (!path) Py_RETURN_NONE;
        return run(*path, tensor, out, &PyTuple_GET_ITEM(rest.ptr(), 0));
    }
};

PyObject* call(PyObject* self, PyObject* arguments, PyObject* named) {
    if (PyTuple_GET_SIZE(arguments) != 0 || (named != nullptr && PyDict_GET_SIZE(named) != 0)) {
        PyErr_SetString(PyExc_TypeError,
                        "a prepared collective takes no arguments: prepare another one for another tensor");
        return nullptr;
    }
    try {
        const Prepared& prepared = *nb::inst_ptr<Prepared>(self);
        const nb::object kept_alive = nb::borrow(self);
        PyObject* result = prepared.run_fast();
        if (result != Py_None) return result;
        Py_DECREF(result);
        return PyObject_CallNoArgs(prepared.general.ptr());
    } catch (nb::python_error& error) {
        error.restore();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    const Prepared& prepared = *nb::inst_ptr<Prepared>(self);
    for (const nb::object* each :
         {&prepared.tensor, &prepared.out, &prepared.group, &prepared.timeout, &prepared.general})
        Py_VISIT(each->ptr());
    Py_VISIT(prepared.rest.ptr());
    return 0;
}

int clear(PyObject* self) {
    Prepared& prepared = *nb::inst_ptr<Prepared>(self);
    for (nb::object* each : {&prepared.tensor, &prepared.out, &prepared.group, &prepared.timeout, &prepared.general})
        *each = nb::none();
    return 0;
}

PyType_Slot prepared_slots[] = {{Py_tp_call, reinterpret_cast<void*>(call)},
                                {Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                                {Py_tp_clear, reinterpret_cast<void*>(clear)},
                                {0, nullptr}};

}  // namespace

void bind_prepared(nb::module_& m) {
    is_profiling = PyUnicode_InternFromString("_is_profiler_enabled");
    nb::class_<Prepared>(m, "Prepared", nb::type_slots(prepared_slots), "A collective and its arguments.")
        .def(nb::init<const std::string&, nb::object, nb::tuple, nb::object, nb::object, nb::object, nb::object>(),
             "name"_a, "tensor"_a, "rest"_a, "group"_a, "out"_a, "timeout"_a.none(), "general"_a)
        .def_prop_ro("result", [](const Prepared& self) { return self.out; }, "The tensor that each call returns.");
    m.def(
        "load_prepared", [](nb::dict names) { profiling_names = names.release().ptr(); }, "profiler"_a,
        "Set where prepared collectives find whether torch's profiler records.");
}

}  // namespace ferrodist
