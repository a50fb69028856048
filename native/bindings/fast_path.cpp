#include "bindings/fast_path.h"

#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <array>
#include <initializer_list>
#include <functional>
#include <limits>
#include <memory>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/fresh_memory.h"
#include "bindings/failures.h"
#include "bindings/gil_release.h"
#include "bindings/tensor.h"
#include "collectives/data_movement.h"
#include "collectives/reductions.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist {

namespace {

bool has_no_factor(int op) {
    return op >= 0 && op < static_cast<int>(ReduceOp::premultiplied_sum);
}

struct Pair {
    TensorView source;
    TensorView out;
};

std::optional<Pair> view_pair(nb::handle tensor, nb::handle out) {
    const auto views = view_tensors(tensor.ptr(), out.ptr());
    if (!views || views->first.dtype != views->second.dtype) return std::nullopt;
    return Pair{views->first, views->second};
}

bool overlap(const Pair& pair) {
    const std::size_t size = size_of(pair.source.dtype);
    return pair.source.data < pair.out.data + pair.out.count * size &&
           pair.out.data < pair.source.data + pair.source.count * size;
}

std::size_t size_of_pair(const Pair& pair) {
    return std::max(pair.source.count, pair.out.count) * size_of(pair.source.dtype);
}

// Whether the shapes are equal except for the first dim, which is `factor` times as long in `longer`.
bool fits(std::span<const std::int64_t> longer, std::span<const std::int64_t> shorter, int factor) {
    return !shorter.empty() && longer.size() == shorter.size() && longer[0] == factor * shorter[0] &&
           std::equal(longer.begin() + 1, longer.end(), shorter.begin() + 1);
}

// Each checks whether a call is plain; if so, passes its size in bytes and the collective to `go`. The collective
// captures addresses: the caller keeps the tensors alive.

template <class Go>
bool run_allreduce_if_plain(const std::optional<Pair>& pair, int op, const Go& go) {
    if (!pair || !has_no_factor(op) || !std::ranges::equal(pair->source.shape, pair->out.shape)) return false;
    if (pair->source.data != pair->out.data && overlap(*pair)) return false;
    const Reduction reduction{.dtype = pair->source.dtype, .op = static_cast<ReduceOp>(op)};
    if (find_fold(reduction.dtype, reduction.op, InstructionSet::baseline) == nullptr) return false;
    go(size_of_pair(*pair), [out = pair->out.data, source = pair->source.data, count = pair->source.count, reduction](
                                Context& context, const Deadline& deadline) {
        allreduce(context, out, source, count, reduction, deadline);
    });
    return true;
}

// Only the root has a result; elsewhere `out` is not used.
template <class Go>
bool run_reduce_if_plain(const Communicator& self, nb::handle tensor, nb::handle out, int op, int root, const Go& go) {
    if (root < 0 || root >= self.num_ranks() || !has_no_factor(op)) return false;
    const bool is_root = self.rank() == root;
    const auto pair = view_pair(tensor, is_root ? out : tensor);
    if (!pair || !std::ranges::equal(pair->source.shape, pair->out.shape)) return false;
    if (pair->source.data != pair->out.data && overlap(*pair)) return false;
    const Reduction reduction{.dtype = pair->source.dtype, .op = static_cast<ReduceOp>(op)};
    if (find_fold(reduction.dtype, reduction.op, InstructionSet::baseline) == nullptr) return false;
    go(size_of_pair(*pair), [out = is_root ? pair->out.data : nullptr, source = pair->source.data,
                             count = pair->source.count, root, reduction](Context& context, const Deadline& deadline) {
        reduce(context, out, source, count, root, reduction, deadline);
    });
    return true;
}

template <class Go>
bool run_broadcast_if_plain(const Communicator& self, nb::handle tensor, nb::handle out, int root, const Go& go) {
    const auto pair = view_pair(tensor, out);
    if (!pair || root < 0 || root >= self.num_ranks()) return false;
    if (!std::ranges::equal(pair->source.shape, pair->out.shape)) return false;
    if (pair->source.data != pair->out.data && overlap(*pair)) return false;
    // The engine reads the root's elements where it writes the others': in `out`.
    const bool copies = self.rank() == root && pair->source.data != pair->out.data;
    go(size_of_pair(*pair), [out = pair->out.data, source = copies ? pair->source.data : nullptr,
                             count = pair->out.count, dtype = pair->out.dtype, root](Context& context,
                                                                                     const Deadline& deadline) {
        if (source != nullptr) {
            expect_writes(out, count * size_of(dtype));
            copy_bytes(out, source, count * size_of(dtype));
        }
        broadcast(context, out, count, dtype, root, deadline);
    });
    return true;
}

template <class Go>
bool run_all_gather_if_plain(const Communicator& self, nb::handle tensor, nb::handle out, const Go& go) {
    const auto pair = view_pair(tensor, out);
    if (!pair || !fits(pair->out.shape, pair->source.shape, self.num_ranks()) || overlap(*pair)) return false;
    go(size_of_pair(*pair), [out = pair->out.data, source = pair->source.data, count = pair->source.count,
                             dtype = pair->source.dtype](Context& context, const Deadline& deadline) {
        std::fill(context.counts.begin(), context.counts.end(), count);
        all_gather(context, out, source, context.counts, dtype, 0, deadline);
    });
    return true;
}

template <class Go>
bool run_reduce_scatter_if_plain(const Communicator& self, nb::handle tensor, nb::handle out, int op, const Go& go) {
    const auto pair = view_pair(tensor, out);
    if (!pair || !has_no_factor(op) || !fits(pair->source.shape, pair->out.shape, self.num_ranks()) || overlap(*pair))
        return false;
    const Reduction reduction{.dtype = pair->source.dtype, .op = static_cast<ReduceOp>(op)};
    if (find_fold(reduction.dtype, reduction.op, InstructionSet::baseline) == nullptr) return false;
    go(size_of_pair(*pair), [out = pair->out.data, source = pair->source.data, count = pair->out.count, reduction](
                                Context& context, const Deadline& deadline) {
        std::fill(context.counts.begin(), context.counts.end(), count);
        reduce_scatter(context, out, source, context.counts, 0, reduction, deadline);
    });
    return true;
}

template <class Go>
bool run_all_to_all_if_plain(const Communicator& self, nb::handle tensor, nb::handle out, const Go& go) {
    const auto pair = view_pair(tensor, out);
    const auto ranks = static_cast<std::size_t>(self.num_ranks());
    if (!pair || !fits(pair->out.shape, pair->source.shape, 1) || overlap(*pair)) return false;
    if (static_cast<std::size_t>(pair->source.shape[0]) % ranks != 0) return false;
    go(size_of_pair(*pair), [out = pair->out.data, source = pair->source.data, part = pair->source.count / ranks,
                             dtype = pair->source.dtype](Context& context, const Deadline& deadline) {
        std::fill(context.counts.begin(), context.counts.end(), part);
        all_to_all(context, out, source, context.counts, context.counts, part, dtype, deadline);
    });
    return true;
}

// Rows of a tensor for each rank, and from each.
struct Rows {
    std::vector<std::size_t> sent;
    std::vector<std::size_t> received;
};

template <class Go>
bool run_uneven_all_to_all_if_plain(const Communicator& self, nb::handle tensor, nb::handle out, const Rows& rows,
                                    const Go& go) {
    const auto pair = view_pair(tensor, out);
    if (!pair || overlap(*pair) || pair->source.shape.empty() || pair->out.shape.empty()) return false;
    const auto row_shape = pair->source.shape.subspan(1);
    if (!std::ranges::equal(row_shape, pair->out.shape.subspan(1))) return false;
    const auto total = [](const std::vector<std::size_t>& counts) {
        return static_cast<std::int64_t>(std::accumulate(counts.begin(), counts.end(), std::size_t{0}));
    };
    const auto own = static_cast<std::size_t>(self.rank());
    if (total(rows.sent) != pair->source.shape[0] || total(rows.received) != pair->out.shape[0]) return false;
    if (rows.sent[own] != rows.received[own]) return false;
    const auto unit = static_cast<std::size_t>(
        std::accumulate(row_shape.begin(), row_shape.end(), std::int64_t{1}, std::multiplies<>()));
    Rows counts = rows;
    for (auto* each : {&counts.sent, &counts.received})
        for (std::size_t& count : *each) count *= unit;
    go(size_of_pair(*pair), [out = pair->out.data, source = pair->source.data, counts = std::move(counts), unit,
                             dtype = pair->source.dtype](Context& context, const Deadline& deadline) {
        all_to_all(context, out, source, counts.sent, counts.received, unit, dtype, deadline);
    });
    return true;
}

// [Note: raw functions]
// The blocking fast paths are functions of the C API: nanobind's take 50 ns longer, of the microsecond that a call
// takes. They look up what Python code would, and so must be given the objects to look in: these live as long as the
// process.
struct Lookup {
    PyObject* collector = nullptr;    // context variable: not None inside `coalesce`
    PyObject* local_group = nullptr;  // context variable: the default group of this context, or None
    PyObject* process = nullptr;      // its `group` is the default group of the process, or None
    std::array<PyObject*, 4> makers{};
    PyObject* group_name = PyUnicode_InternFromString("group");
    PyObject* fast_path_name = PyUnicode_InternFromString("fast_path");
    PyObject* number_name = PyUnicode_InternFromString("number");
};
const Lookup* lookup = nullptr;

// How the result's shape follows from the tensor's and a number: indexes of `Lookup::makers`.
enum Shape : std::size_t {
    same,    // the tensor's; the number is not used
    joined,  // dim 0 so many times as long
    part,    // dim 0 divided by it
    rows,    // so many rows
};

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

// The communicator of a group whose calls can use the fast path, with its timeout and engine: a `FastPath` of
// backends/base.py, kept alive by `guard`.
struct OpenFastPath {
    nb::object guard;
    Communicator* communicator;
    double timeout;
    nb::handle engine;
};

// The value of `timeout`, in seconds, or `standard` for None; negative if the general path is to check it.
double seconds_of(nb::handle timeout, double standard) {
    if (timeout.is_none()) return standard;
    double seconds = -1.0;
    if (PyFloat_CheckExact(timeout.ptr())) seconds = PyFloat_AS_DOUBLE(timeout.ptr());
    if (PyLong_CheckExact(timeout.ptr())) seconds = PyLong_AsDouble(timeout.ptr());
    if (PyErr_Occurred() != nullptr) PyErr_Clear();  // an int too large for a double
    return seconds >= 0.0 ? seconds : -1.0;          // NaN is not either
}

std::optional<OpenFastPath> find_fast_path(nb::handle group, nb::handle timeout = nb::none()) {
    if (lookup == nullptr) return std::nullopt;
    const nb::object collector = value_of(lookup->collector);
    if (!collector.is_valid() || !collector.is_none()) return std::nullopt;
    nb::object chosen = nb::borrow(group);
    if (group.is_none()) {
        chosen = value_of(lookup->local_group);
        if (!chosen.is_valid() || chosen.is_none()) chosen = attribute(lookup->process, lookup->group_name);
        if (!chosen.is_valid()) return std::nullopt;
    }
    nb::object path = attribute(chosen, lookup->fast_path_name);
    if (!path.is_valid() || !PyTuple_Check(path.ptr()) || PyTuple_GET_SIZE(path.ptr()) != 4) return std::nullopt;
    const nb::handle communicator = PyTuple_GET_ITEM(path.ptr(), 0);
    if (!nb::isinstance<Communicator>(communicator)) return std::nullopt;
    const double seconds = seconds_of(timeout, PyFloat_AsDouble(PyTuple_GET_ITEM(path.ptr(), 1)));
    if (seconds < 0.0) return std::nullopt;
    const nb::handle engine = PyTuple_GET_ITEM(path.ptr(), 2);
    return OpenFastPath{std::move(path), nb::inst_ptr<Communicator>(communicator), seconds, engine};
}

// The value of an int, or -1 for any other object.
int index_of(nb::handle value) {
    if (!PyLong_CheckExact(value.ptr())) return -1;
    const long index = PyLong_AsLong(value.ptr());
    if (index == -1) PyErr_Clear();  // too large for a long: as invalid as a negative one
    return index < 0 || index > std::numeric_limits<int>::max() ? -1 : static_cast<int>(index);
}

// The number of a reduce operation without a factor, else -1.
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

// The counts of a list or tuple of ints, one for each rank; empty if the general path is to check them.
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

// `out`, or a new tensor if that is None; None if the tensor is not plain, and null on an error.
nb::object result_of(nb::handle out, nb::handle tensor, Shape shape, std::size_t number) {
    if (!out.is_none()) return nb::borrow(out);
    const nb::object count = nb::int_(number);
    PyObject* arguments[] = {tensor.ptr(), count.ptr()};
    return nb::steal(PyObject_Vectorcall(lookup->makers[shape], arguments, 2, nullptr));
}

std::size_t num_ranks_of(const OpenFastPath& path) {
    return static_cast<std::size_t>(path.communicator->num_ranks());
}

using Fact = std::pair<const char*, PyObject*>;  // an argument of a call, for the error message

// Raises the public error that the engine's Python side makes of the exception being handled.
void raise_for(const OpenFastPath& path, const char* operation, nb::handle tensor, nb::handle out,
               std::initializer_list<Fact> facts) {
    try {
        const nb::object failure = current_python_exception();
        nb::dict named;
        for (const auto& [name, value] : facts) named[name] = nb::borrow(value);
        named["timeout"] = path.timeout;
        const nb::object error = path.engine.attr("call_error")(failure, operation, tensor, out, **named);
        PyException_SetCause(error.ptr(), nullptr);  // its text is in the error; this suppresses the context, too
        PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), error.ptr());
    } catch (nb::python_error& error) {
        error.restore();
    }
}

template <class Collective>
void run(const OpenFastPath& path, std::size_t size, const Collective& collective) {
    const std::uint64_t ticket = path.communicator->reserve();
    const GilRelease released(path.communicator->is_short(size) ? GilRelease::When::when_waiting
                                                                : GilRelease::When::at_once);
    path.communicator->run(ticket, path.timeout, collective);
}

// Runs a collective if `check(go)` allows the fast path. Returns the result, or None if it does not.
template <class Check>
PyObject* run_fast(const OpenFastPath& path, const char* operation, nb::handle tensor, nb::object out,
                   std::initializer_list<Fact> facts, const Check& check) {
    if (!out.is_valid()) return nullptr;
    const auto go = [&](std::size_t size, const auto& collective) { run(path, size, collective); };
    bool is_done = false;
    try {
        is_done = check(out, go);
    } catch (...) {
        raise_for(path, operation, tensor, out, facts);
        return nullptr;
    }
    if (!is_done) Py_RETURN_NONE;
    return mark_written(out.ptr()) ? out.release().ptr() : nullptr;
}

// The functions that Python calls. Each takes the arguments of its public namesake, all by position; tensor first, and
// group, out and timeout last.

PyObject* fast_allreduce(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], op = arguments[1], group = arguments[2], out = arguments[3];
    const auto path = find_fast_path(group, arguments[4]);
    if (!path) Py_RETURN_NONE;
    return run_fast(*path, "allreduce", tensor, result_of(out, tensor, same, 0), {{"op", op.ptr()}},
                    [&](nb::handle result, const auto& go) {
                        return run_allreduce_if_plain(view_pair(tensor, result), number_of(op), go);
                    });
}

// In place, untracked by autograd, like a call on `tensor.data` without creating that, which takes 0.2 us. Returns
// whether it was done.
PyObject* fast_allreduce_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 3) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0], op = arguments[1], group = arguments[2];
    const auto path = find_fast_path(group);
    const auto view = path ? view_data(tensor.ptr()) : std::nullopt;
    if (!view) Py_RETURN_FALSE;
    try {
        const auto go = [&](std::size_t size, const auto& collective) { run(*path, size, collective); };
        return PyBool_FromLong(run_allreduce_if_plain(Pair{*view, *view}, number_of(op), go));
    } catch (...) {
        raise_for(*path, "allreduce", tensor, tensor, {{"op", op.ptr()}});
        return nullptr;
    }
}

PyObject* fast_reduce(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], root = arguments[1], op = arguments[2], group = arguments[3],
                     out = arguments[4];
    const auto path = find_fast_path(group, arguments[5]);
    if (!path) Py_RETURN_NONE;
    const bool is_root = index_of(root) == path->communicator->rank();
    if (!is_root && !out.is_none()) Py_RETURN_NONE;  // the general path refuses it
    return run_fast(*path, "reduce", tensor,
                    is_root ? result_of(out, tensor, same, 0) : result_of(out, tensor, rows, 0),
                    {{"op", op.ptr()}, {"root", root.ptr()}}, [&](nb::handle result, const auto& go) {
                        return run_reduce_if_plain(*path->communicator, tensor, result, number_of(op), index_of(root),
                                                   go);
                    });
}

PyObject* fast_broadcast(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], root = arguments[1], group = arguments[2], out = arguments[3];
    const auto path = find_fast_path(group, arguments[4]);
    if (!path) Py_RETURN_NONE;
    return run_fast(*path, "broadcast", tensor, result_of(out, tensor, same, 0), {{"root", root.ptr()}},
                    [&](nb::handle result, const auto& go) {
                        return run_broadcast_if_plain(*path->communicator, tensor, result, index_of(root), go);
                    });
}

PyObject* fast_all_gather(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], dim = arguments[1], group = arguments[2], out = arguments[3];
    const auto path = index_of(dim) == 0 ? find_fast_path(group, arguments[4]) : std::nullopt;
    if (!path) Py_RETURN_NONE;
    return run_fast(*path, "all_gather", tensor, result_of(out, tensor, joined, num_ranks_of(*path)),
                    {{"dim", dim.ptr()}}, [&](nb::handle result, const auto& go) {
                        return run_all_gather_if_plain(*path->communicator, tensor, result, go);
                    });
}

PyObject* fast_reduce_scatter(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], op = arguments[1], dim = arguments[2], group = arguments[3],
                     out = arguments[4];
    const auto path = index_of(dim) == 0 ? find_fast_path(group, arguments[5]) : std::nullopt;
    if (!path) Py_RETURN_NONE;
    return run_fast(*path, "reduce_scatter", tensor, result_of(out, tensor, part, num_ranks_of(*path)),
                    {{"op", op.ptr()}, {"dim", dim.ptr()}}, [&](nb::handle result, const auto& go) {
                        return run_reduce_scatter_if_plain(*path->communicator, tensor, result, number_of(op), go);
                    });
}

PyObject* fast_all_to_all(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], group = arguments[1], out = arguments[2];
    const auto path = find_fast_path(group, arguments[3]);
    if (!path) Py_RETURN_NONE;
    return run_fast(*path, "all_to_all", tensor, result_of(out, tensor, same, 0), {},
                    [&](nb::handle result, const auto& go) {
                        return run_all_to_all_if_plain(*path->communicator, tensor, result, go);
                    });
}

PyObject* fast_all_to_all_single_uneven(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], group = arguments[3], out = arguments[4];
    const auto path = find_fast_path(group, arguments[5]);
    if (!path) Py_RETURN_NONE;
    const Rows rows{.sent = counts_of(arguments[1], *path->communicator),
                    .received = counts_of(arguments[2], *path->communicator)};
    if (rows.sent.empty() || rows.received.empty()) Py_RETURN_NONE;
    const std::size_t total = std::accumulate(rows.received.begin(), rows.received.end(), std::size_t{0});
    return run_fast(*path, "all_to_all", tensor, result_of(out, tensor, Shape::rows, total),
                    {{"sent_rows", arguments[1]}},
                    [&](nb::handle result, const auto& go) {
                        return run_uneven_all_to_all_if_plain(*path->communicator, tensor, result, rows, go);
                    });
}

// Returns whether it was done.
PyObject* fast_barrier(PyObject*, PyObject* group) {
    const auto path = find_fast_path(group);
    if (!path) Py_RETURN_FALSE;
    try {
        run(*path, 0, barrier);
    } catch (...) {
        raise_for(*path, "barrier", nb::none(), nb::none(), {});
        return nullptr;
    }
    Py_RETURN_TRUE;
}

template <class Function>
constexpr PyMethodDef method(const char* name, Function* function) {
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function)), METH_FASTCALL, nullptr};
}

PyMethodDef fast_functions[] = {
    method("fast_allreduce", fast_allreduce),
    method("fast_allreduce_data", fast_allreduce_data),
    method("fast_reduce", fast_reduce),
    method("fast_broadcast", fast_broadcast),
    method("fast_all_gather", fast_all_gather),
    method("fast_reduce_scatter", fast_reduce_scatter),
    method("fast_all_to_all", fast_all_to_all),
    method("fast_all_to_all_single_uneven", fast_all_to_all_single_uneven),
    {"fast_barrier", fast_barrier, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// A started collective, with the tensors whose addresses the engine has. If it is destroyed before the collective has
// ended, the engine retains them. All of this runs with the GIL: nothing can come in between.
class Started {
public:
    Started(Communicator& communicator, nb::handle tensor, nb::handle out)
        : communicator_(communicator), self_(nb::find(communicator)), tensors_{nb::borrow(tensor), nb::borrow(out)} {}
    Started(const Started&) = delete;
    Started& operator=(const Started&) = delete;
    ~Started() {
        if (!pending_ || pending_->is_done()) return;
        auto* tensors = new std::array<nb::object, 2>(std::move(tensors_));
        communicator_.retain(std::move(pending_), std::shared_ptr<void>(tensors, [](void* object) {
                                 delete static_cast<std::array<nb::object, 2>*>(object);
                             }));
    }

    auto starter(double timeout) {
        return [this, timeout](std::size_t size, const auto& collective) {
            communicator_.free_retained();
            pending_ = communicator_.start(timeout, size, collective);
        };
    }
    [[nodiscard]] bool is_started() const noexcept { return pending_ != nullptr; }
    [[nodiscard]] bool is_done() const noexcept { return pending_->is_done(); }
    bool wait(double timeout) {
        if (pending_->is_done()) {
            communicator_.free_retained();
            return pending_->wait(timeout);
        }
        const GilRelease released;
        return communicator_.wait(*pending_, timeout);
    }

private:
    Communicator& communicator_;
    nb::object self_;  // keeps this object alive
    std::array<nb::object, 2> tensors_;
    std::shared_ptr<Pending> pending_;
};

// Starts a collective if `check(go)` allows the fast path; else returns null.
template <class Check>
std::unique_ptr<Started> start(Communicator& self, nb::handle tensor, nb::handle out, double timeout,
                               const Check& check) {
    auto started = std::make_unique<Started>(self, tensor, out);
    check(started->starter(timeout));
    return started->is_started() ? std::move(started) : nullptr;
}

}  // namespace

void bind_fast_path(nb::module_& m, nb::class_<Communicator>& communicator) {
    if (PyModule_AddFunctions(m.ptr(), fast_functions) < 0) throw nb::python_error();
    m.def(
        "load_fast_paths",
        [](nb::handle collector, nb::handle local_group, nb::handle process, nb::handle make_same,
           nb::handle make_joined, nb::handle make_part, nb::handle make_rows) {
            static Lookup found;
            for (const nb::handle each : {collector, local_group, process, make_same, make_joined, make_part, make_rows})
                each.inc_ref();
            found.collector = collector.ptr();
            found.local_group = local_group.ptr();
            found.process = process.ptr();
            found.makers = {make_same.ptr(), make_joined.ptr(), make_part.ptr(), make_rows.ptr()};
            lookup = &found;
        },
        "collector"_a, "local_group"_a, "process"_a, "make_same"_a, "make_joined"_a, "make_part"_a, "make_rows"_a,
        "Set where the fast paths find the default group, and the functions that make their results.");
    nb::class_<Started>(m, "Started", "A started collective.")
        .def("is_done", &Started::is_done)
        .def("wait", &Started::wait, "timeout"_a, "Block until it has ended; False after `timeout` seconds.");
    communicator
        .def(
            "start_allreduce",
            [](Communicator& self, nb::handle tensor, nb::handle out, int op, double timeout) {
                return start(self, tensor, out, timeout,
                             [&](const auto& go) { return run_allreduce_if_plain(view_pair(tensor, out), op, go); });
            },
            "tensor"_a.none(), "out"_a.none(), "op"_a, "timeout"_a)
        .def(
            "start_broadcast",
            [](Communicator& self, nb::handle tensor, nb::handle out, int root, double timeout) {
                return start(self, tensor, out, timeout,
                             [&](const auto& go) { return run_broadcast_if_plain(self, tensor, out, root, go); });
            },
            "tensor"_a.none(), "out"_a.none(), "root"_a, "timeout"_a)
        .def(
            "start_all_gather",
            [](Communicator& self, nb::handle tensor, nb::handle out, double timeout) {
                return start(self, tensor, out, timeout,
                             [&](const auto& go) { return run_all_gather_if_plain(self, tensor, out, go); });
            },
            "tensor"_a.none(), "out"_a.none(), "timeout"_a)
        .def(
            "start_reduce_scatter",
            [](Communicator& self, nb::handle tensor, nb::handle out, int op, double timeout) {
                return start(self, tensor, out, timeout,
                             [&](const auto& go) { return run_reduce_scatter_if_plain(self, tensor, out, op, go); });
            },
            "tensor"_a.none(), "out"_a.none(), "op"_a, "timeout"_a)
        .def(
            "start_all_to_all",
            [](Communicator& self, nb::handle tensor, nb::handle out, double timeout) {
                return start(self, tensor, out, timeout,
                             [&](const auto& go) { return run_all_to_all_if_plain(self, tensor, out, go); });
            },
            "tensor"_a.none(), "out"_a.none(), "timeout"_a);
}

}  // namespace ferrodist
