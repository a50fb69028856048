#include "bindings/fast_call.h"

#include <algorithm>
#include <array>
#include <limits>
#include <numeric>

#include "bindings/failures.h"
#include "bindings/p2p_arguments.h"

namespace ferrodist {

namespace {

struct Lookup {
    PyObject* collector = nullptr;    // context variable: not None inside `coalesce`
    PyObject* local_group = nullptr;  // context variable: the default group of this context, or None
    PyObject* process = nullptr;      // its `group` is the default group of the process, or None
    PyObject* empty_like = nullptr;
    PyObject* make_tensor = nullptr;
    PyObject* new_empty_name = PyUnicode_InternFromString("new_empty");
    PyObject* group_name = PyUnicode_InternFromString("group");
    PyObject* fast_path_name = PyUnicode_InternFromString("fast_path");
    PyObject* number_name = PyUnicode_InternFromString("number");
};
const Lookup* lookup = nullptr;

constexpr std::size_t most_sizes = 16;  // dims of a result

nb::object attribute(nb::handle object, PyObject* name) {
    PyObject* found = PyObject_GetAttr(object.ptr(), name);
    if (found == nullptr) PyErr_Clear();  // the general path reports that it is missing
    return nb::steal(found);
}

nb::object value_of(PyObject* variable) {
    PyObject* value = nullptr;
    if (PyContextVar_Get(variable, nullptr, &value) < 0) PyErr_Clear();
    return nb::steal(value);
}

nb::object allocate(std::uint8_t dtype, std::span<const std::int64_t> shape, std::size_t rows, std::size_t dim) {
    const nb::object number = nb::int_(dtype);
    const nb::object sizes = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(shape.size())));
    if (!sizes.is_valid()) return {};
    for (std::size_t each = 0; each < shape.size(); ++each) {
        const auto size = each == dim ? static_cast<std::int64_t>(rows) : shape[each];
        PyTuple_SET_ITEM(sizes.ptr(), static_cast<Py_ssize_t>(each), PyLong_FromLongLong(size));
    }
    PyObject* arguments[] = {number.ptr(), sizes.ptr()};
    return nb::steal(PyObject_Vectorcall(lookup->make_tensor, arguments, 2, nullptr));
}

}  // namespace

void set_lookup(nb::handle collector, nb::handle local_group, nb::handle process, nb::handle empty_like,
                nb::handle make_tensor) {
    static Lookup found;
    found.collector = collector.inc_ref().ptr();
    found.local_group = local_group.inc_ref().ptr();
    found.process = process.inc_ref().ptr();
    found.make_tensor = make_tensor.inc_ref().ptr();
    found.empty_like = empty_like.inc_ref().ptr();
    lookup = &found;
}

nb::object find_group(nb::handle group) {
    if (lookup == nullptr) return {};
    if (!group.is_none()) return nb::borrow(group);
    nb::object chosen = value_of(lookup->local_group);
    return chosen.is_valid() && !chosen.is_none() ? chosen : attribute(lookup->process, lookup->group_name);
}

nb::object fast_path_of(nb::handle group) {
    nb::object path = attribute(group, lookup->fast_path_name);
    return path.is_valid() && PyTuple_Check(path.ptr()) && PyTuple_GET_SIZE(path.ptr()) == FastPathFields::count
               ? path
               : nb::object();
}

bool runs_at_once() {
    if (lookup == nullptr) return false;
    const nb::object collector = value_of(lookup->collector);
    return collector.is_valid() && collector.is_none();
}

std::optional<OpenFastPath> find_fast_path(nb::handle group, nb::handle timeout) {
    if (!runs_at_once()) return std::nullopt;
    const nb::object chosen = find_group(group);
    if (!chosen.is_valid()) return std::nullopt;
    nb::object path = fast_path_of(chosen);
    if (!path.is_valid()) return std::nullopt;
    const nb::handle communicator = FastPathFields::get(path, FastPathFields::communicator);
    if (!nb::isinstance<Communicator>(communicator)) return std::nullopt;
    const auto seconds = seconds_of(timeout.is_none() ? FastPathFields::get(path, FastPathFields::timeout) : timeout);
    if (!seconds) return std::nullopt;
    const nb::handle engine = FastPathFields::get(path, FastPathFields::engine);
    return OpenFastPath{std::move(path), nb::inst_ptr<Communicator>(communicator), *seconds, engine};
}

std::optional<std::int64_t> integer_of(nb::handle value) {
    if (!PyLong_CheckExact(value.ptr())) return std::nullopt;
    const long long found = PyLong_AsLongLong(value.ptr());
    if (found == -1 && PyErr_Occurred() != nullptr) {
        PyErr_Clear();
        return std::nullopt;
    }
    return found;
}

int index_of(nb::handle value) {
    const std::int64_t index = integer_of(value).value_or(-1);
    return index < 0 || index > std::numeric_limits<int>::max() ? -1 : static_cast<int>(index);
}

int number_of(nb::handle op) {
    static nb::handle last_op;  // most calls use the same op; retained, so that no other object can have its address
    static int last_number = -1;
    if (op.is(last_op)) return last_number;
    const nb::object number = attribute(op, lookup->number_name);
    const int index = number.is_valid() ? index_of(number) : -1;
    if (index >= 0) {
        last_number = index;
        const nb::object before = nb::steal(std::exchange(last_op, op.inc_ref()));  // destroying it may run any code
    }
    return index;
}

std::vector<std::size_t> counts_of(nb::handle counts, const Communicator& communicator) {
    if (!PyList_CheckExact(counts.ptr()) && !PyTuple_CheckExact(counts.ptr())) return {};
    if (PySequence_Fast_GET_SIZE(counts.ptr()) != communicator.num_ranks()) return {};
    std::vector<std::size_t> found;
    found.reserve(static_cast<std::size_t>(communicator.num_ranks()));
    for (int r = 0; r < communicator.num_ranks(); ++r) {
        const int count = index_of(PySequence_Fast_GET_ITEM(counts.ptr(), r));
        if (count < 0) return {};
        found.push_back(static_cast<std::size_t>(count));
    }
    return found;
}

namespace {

// `tensor.new_empty(*shape)`, but for the size of `dim`: torch takes sizes as arguments in 0.4 us less than a tuple.
nb::object new_empty(nb::handle tensor, std::span<const std::int64_t> shape, std::size_t dim, std::int64_t size) {
    std::array<PyObject*, 1 + most_sizes> arguments = {tensor.ptr()};
    std::size_t count = 1;
    for (std::size_t each = 0; each < shape.size(); ++each)
        arguments[count++] = PyLong_FromLongLong(each == dim ? size : shape[each]);
    nb::object made;
    if (std::all_of(arguments.begin(), arguments.begin() + count, [](PyObject* each) { return each != nullptr; }))
        made = nb::steal(PyObject_VectorcallMethod(lookup->new_empty_name, arguments.data(), count, nullptr));
    for (std::size_t i = 1; i < count; ++i) Py_XDECREF(arguments[i]);
    return made;
}

}  // namespace

nb::object out_or_new(nb::handle out, nb::handle tensor, Shape shape, std::size_t number, std::size_t dim) {
    if (!out.is_none()) return nb::borrow(out);
    const auto view = view_tensor(tensor.ptr());
    if (!view) return nb::none();
    if (shape == Shape::same) return new_like(tensor);
    if (shape == Shape::nothing) return new_empty(tensor, std::array<std::int64_t, 1>{}, 0, 0);
    if (dim >= view->shape.size() || view->shape.size() > most_sizes) return nb::none();
    const auto factor = static_cast<std::int64_t>(number);
    std::int64_t rows = view->shape[dim];
    if (shape == Shape::part && rows % factor != 0) return nb::none();
    if (shape == Shape::joined) rows *= factor;
    if (shape == Shape::part) rows /= factor;
    if (shape == Shape::rows) rows = factor;
    return new_empty(tensor, view->shape, dim, rows);
}

nb::object new_like(nb::handle tensor) {
    return nb::steal(PyObject_CallOneArg(lookup->empty_like, tensor.ptr()));
}

// Tensors of one shape after another are made as one like the other, in half the time: of small ones, one is kept.
nb::object new_tensor(std::uint8_t dtype, std::span<const std::int64_t> shape, std::size_t rows, std::size_t dim) {
    constexpr std::uint64_t most_elements = 1024;
    static std::vector<std::int64_t> last_shape;
    static std::uint8_t last_dtype = num_dtypes;
    static nb::handle model;  // of the last shape and dtype, once there were two in a row
    std::vector<std::int64_t> wanted(shape.begin(), shape.end());
    if (dim < wanted.size()) wanted[dim] = static_cast<std::int64_t>(rows);
    // Unsigned: the sizes may be those of no tensor, from another process.
    const auto count = std::accumulate(wanted.begin(), wanted.end(), std::uint64_t{1}, [](auto product, auto size) {
        return product * static_cast<std::uint64_t>(size);
    });
    if (count > most_elements) return allocate(dtype, shape, rows, dim);
    const bool is_known = dtype == last_dtype && wanted == last_shape;
    if (is_known && model.is_valid()) return new_like(model);
    nb::object made = allocate(dtype, shape, rows, dim);
    if (!made.is_valid()) return made;
    const bool is_model = is_known && view_tensor(made.ptr());  // not one that a mode of torch's has made
    nb::object result = is_model ? new_like(made) : made;
    const nb::object before = nb::steal(std::exchange(model, is_model ? made.release() : nb::handle()));
    last_dtype = dtype;
    last_shape = std::move(wanted);
    return result;
}

void raise_for(const OpenFastPath& path, const char* operation, nb::handle tensor, nb::handle out, nb::dict facts) {
    try {
        const nb::object failure = current_python_exception();
        facts["timeout"] = path.timeout;
        const nb::object error = path.engine.attr("call_error")(failure, operation, tensor, out, **facts);
        PyException_SetCause(error.ptr(), nullptr);  // its text is in the error; this suppresses the context, too
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    } catch (nb::python_error& error) {
        error.restore();
    }
}

void raise_for(const OpenFastPath& path, const char* operation, nb::handle tensor, nb::handle out,
               std::initializer_list<Fact> facts) {
    nb::dict named;
    for (const auto& [name, value] : facts) named[name] = nb::borrow(value);
    raise_for(path, operation, tensor, out, std::move(named));
}

}  // namespace ferrodist
