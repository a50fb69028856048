#include "bindings/prepared.h"

#include <nanobind/stl/string.h>

#include <array>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "bindings/fast_call.h"

namespace ferrodist {

using namespace nanobind::literals;

namespace {

PyObject* profiling_names = nullptr;  // dict of torch.autograd.profiler
PyObject* is_profiling = nullptr;     // name of the flag that is True while torch's profiler records

// What the engine runs for two tensors, and what they were like then.
struct Plan {
    OpenFastPath path;
    TensorSnapshot source, out;
    std::size_t size = 0;  // bytes
    std::function<void(Context&, const Deadline&)> collective;
};

// A call to prepare; `rest` are its arguments between the tensor and the group.
struct Call {
    const Communicator& communicator;
    nb::handle tensor, out;
    const nb::tuple& rest;
};

struct Kind {
    const char* name;
    std::array<const char*, 2> facts;  // names of the call's `rest`, for the error
    bool (*plan_if_plain)(const Call& call, Plan& plan);
};

auto into(Plan& plan) {
    return [&plan](std::size_t size, auto collective) {
        plan.size = size;
        plan.collective = std::move(collective);
    };
}

constexpr Kind kinds[] = {
    {"allreduce",
     {"op"},
     [](const Call& call, Plan& plan) {
         return pass_allreduce_if_plain(view_pair(call.tensor, call.out), number_of(call.rest[0]), into(plan));
     }},
    {"broadcast",
     {"root"},
     [](const Call& call, Plan& plan) {
         return pass_broadcast_if_plain(call.communicator, view_pair(call.tensor, call.out), index_of(call.rest[0]),
                                        into(plan));
     }},
    {"all_gather",
     {"dim"},
     [](const Call& call, Plan& plan) {
         return pass_all_gather_if_plain(call.communicator, call.tensor, call.out, index_of(call.rest[0]), into(plan));
     }},
    {"reduce_scatter",
     {"op", "dim"},
     [](const Call& call, Plan& plan) {
         return pass_reduce_scatter_if_plain(call.communicator, call.tensor, call.out, number_of(call.rest[0]),
                                             index_of(call.rest[1]), into(plan));
     }},
    {"all_to_all",
     {},
     [](const Call& call, Plan& plan) {
         return pass_all_to_all_if_plain(call.communicator, call.tensor, call.out, into(plan));
     }},
};

const Kind& kind_of(const std::string& name) {
    for (const Kind& kind : kinds)
        if (name == kind.name) return kind;
    throw std::invalid_argument("no collective that can be prepared is called " + name);
}

// A collective and its arguments; the base of the public class.
class Prepared {
public:
    Prepared(const std::string& name, nb::object tensor, nb::tuple rest, nb::object group, nb::object out,
             nb::object timeout, nb::object general)
        : kind_(kind_of(name)),
          tensor_(std::move(tensor)),
          out_(std::move(out)),
          written_(nb::make_tuple(out_)),
          rest_(std::move(rest)),
          group_(std::move(group)),
          timeout_(std::move(timeout)),
          general_(std::move(general)) {}

    [[nodiscard]] const nb::object& out() const { return out_; }

    // Returns the result, or null with a Python error set. The caller keeps this object alive, whose members only `clear`
    // changes; the plan may be another thread's by then.
    PyObject* run() {
        const bool is_recorded = PyDict_GetItemWithError(profiling_names, is_profiling) != Py_False;
        const auto plan = is_recorded ? nullptr : find_plan();
        if (!plan) return PyObject_CallNoArgs(general_.ptr());
        try {
            run_collective(plan->path, plan->size, plan->collective);
        } catch (...) {
            nb::dict facts;
            for (std::size_t i = 0; i < nb::len(rest_); ++i) facts[kind_.facts[i]] = rest_[i];
            raise_for(plan->path, kind_.name, tensor_, out_, facts);
            return nullptr;
        }
        return mark_written(out_.ptr(), written_.ptr()) ? nb::object(out_).release().ptr() : nullptr;
    }

    int traverse(visitproc visit, void* arg) const {
        for (const nb::object* each : {&tensor_, &out_, &written_, &group_, &timeout_, &general_})
            Py_VISIT(each->ptr());
        Py_VISIT(rest_.ptr());
        return 0;
    }
    void clear() {
        for (nb::object* each : {&tensor_, &out_, &written_, &group_, &timeout_, &general_}) *each = nb::none();
    }

private:
    // The plan of the last call if it still holds, else a new one; null if the call is to take the general path.
    std::shared_ptr<const Plan> find_plan() {
        if (plan_ && fast_path_of(group_).is(plan_->path.guard) && runs_at_once() && is_plain_here() &&
            plan_->source.is_of(tensor_.ptr()) && plan_->out.is_of(out_.ptr()))
            return plan_;
        plan_ = nullptr;
        const auto path = find_fast_path(group_, timeout_);
        if (!path) return nullptr;
        auto source = TensorSnapshot::of(tensor_.ptr()), out = TensorSnapshot::of(out_.ptr());
        if (!source || !out) return nullptr;
        auto plan = std::make_shared<Plan>(*path, std::move(*source), std::move(*out));
        if (!kind_.plan_if_plain({*path->communicator, tensor_, out_, rest_}, *plan)) return nullptr;
        return plan_ = std::move(plan);
    }

    const Kind& kind_;
    nb::object tensor_, out_;
    nb::object written_;  // a tuple of `out_`
    nb::tuple rest_;      // the arguments between the tensor and the group
    nb::object group_, timeout_;
    nb::object general_;  // makes a call on the general path, and returns its result
    std::shared_ptr<const Plan> plan_;
};

PyObject* call(PyObject* self, PyObject* arguments, PyObject* named) {
    if (PyTuple_GET_SIZE(arguments) != 0 || (named != nullptr && PyDict_GET_SIZE(named) != 0)) {
        PyErr_SetString(PyExc_TypeError,
                        "a prepared collective takes no arguments: prepare another one for another tensor");
        return nullptr;
    }
    if (!nb::inst_ready(self)) {
        PyErr_SetString(PyExc_TypeError, "this prepared collective has not been initialized: `prepare_...` makes them");
        return nullptr;
    }
    return or_python_error([&] { return nb::inst_ptr<Prepared>(self)->run(); });
}

int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    return nb::inst_ready(self) ? nb::inst_ptr<Prepared>(self)->traverse(visit, arg) : 0;
}

int clear(PyObject* self) {
    if (nb::inst_ready(self)) nb::inst_ptr<Prepared>(self)->clear();
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
        .def_prop_ro("result", &Prepared::out, "The tensor that each call returns.");
    m.def(
        "load_prepared", [](nb::dict names) { profiling_names = names.release().ptr(); }, "profiler"_a,
        "Set where prepared collectives find whether torch's profiler records.");
}

}  // namespace ferrodist
