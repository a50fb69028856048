// What the fast paths of blocking calls have in common: the group of a call, its arguments, its result and its error.
#pragma once

#include <nanobind/nanobind.h>

#include <exception>
#include <initializer_list>
#include <new>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings/gil_release.h"
#include "bindings/tensor.h"
#include "engine/communicator.h"

namespace ferrodist {

namespace nb = nanobind;

// [Note: raw functions]
// The blocking fast paths are functions of the C API: nanobind's take 50 ns longer, of the microsecond that a call
// takes. They look up what Python code would, and so must be given the objects to look in: these live as long as the
// process.

// Sets the objects; `empty_like` is torch's function, and `make_tensor(dtype, shape)` makes one of the dtype with a
// number of `DType`.
void set_lookup(nb::handle collector, nb::handle local_group, nb::handle process, nb::handle empty_like,
                nb::handle make_tensor);

// An entry of a module's table of functions.
template <auto Function>
constexpr PyMethodDef fast_method(const char* name) {
    PyObject* (*const call)(PyObject*, PyObject* const*, Py_ssize_t) = [](PyObject* self, PyObject* const* arguments,
                                                                          Py_ssize_t count) -> PyObject* {
        try {
            return Function(self, arguments, count);
        } catch (nb::python_error& error) {
            error.restore();
        } catch (const std::bad_alloc&) {
            PyErr_NoMemory();
        } catch (const std::exception& error) {
            PyErr_SetString(PyExc_RuntimeError, error.what());
        }
        return nullptr;
    };
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr};
}

// How the result's shape follows from the tensor's and a number.
enum class Shape {
    same,     // the tensor's; the number is not used
    joined,   // dim 0 so many times as long
    part,     // dim 0 divided by it
    rows,     // so many rows
    nothing,  // no elements, in one dim; the number is not used
};

// The communicator of a group whose calls can use the fast path, with its timeout and engine: a `FastPath` of
// backends/base.py, kept alive by `guard`.
struct OpenFastPath {
    nb::object guard;
    Communicator* communicator;
    double timeout;
    nb::handle engine;

    [[nodiscard]] std::size_t num_ranks() const { return static_cast<std::size_t>(communicator->num_ranks()); }
};

// A call's group: the default group for None, which may be None. Null if it is to be found by the general path.
nb::object find_group(nb::handle group);
// The `FastPath` of backends/base.py of a group; null if it has none.
nb::object fast_path_of(nb::handle group);

// Whether the collectives of this context run when they are called, not at the end of a block of `coalesce`.
bool runs_at_once();

// The fast path of a group, or of the default group for None; nothing if the call is to take the general path.
std::optional<OpenFastPath> find_fast_path(nb::handle group, nb::handle timeout = nb::none());

// The value of an int, or -1 for any other object.
int index_of(nb::handle value);
// The number of a reduce operation without a factor, else -1.
int number_of(nb::handle op);
// The counts of a list or tuple of ints, one for each rank; empty if the general path is to check them.
std::vector<std::size_t> counts_of(nb::handle counts, const Communicator& communicator);

// `out`, or a new tensor if that is None; None if the tensor is not plain or has no rows to join or divide, and null on
// an error.
nb::object result_of(nb::handle out, nb::handle tensor, Shape shape, std::size_t number = 0);
// A new tensor of `shape` but for its first size, `rows`; null on an error.
nb::object new_tensor(std::uint8_t dtype, std::span<const std::int64_t> shape, std::size_t rows);

// A new tensor of the shape and dtype of a plain tensor; null on an error.
nb::object new_like(nb::handle tensor);

using Fact = std::pair<const char*, PyObject*>;  // an argument of a call, for the error message

// Raises the public error that the engine's Python side makes of the exception being handled. `facts` are arguments of
// the call.
void raise_for(const OpenFastPath& path, const char* operation, nb::handle tensor, nb::handle out, nb::dict facts);
void raise_for(const OpenFastPath& path, const char* operation, nb::handle tensor, nb::handle out,
               std::initializer_list<Fact> facts);

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
    if (out.is_none()) Py_RETURN_NONE;
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

}  // namespace ferrodist
