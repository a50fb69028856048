// The fast path of a call: its group, whether the call is plain, how it runs, its result and its error.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <exception>
#include <functional>
#include <initializer_list>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings/gil_release.h"
#include "bindings/tensor.h"
#include "collectives/data_movement.h"
#include "collectives/reductions.h"
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

// Returns what `call` returns; if it throws, null with a Python error set.
template <class Call>
PyObject* or_python_error(const Call& call) {
    try {
        return call();
    } catch (nb::python_error& error) {
        error.restore();
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    } catch (const std::exception& error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
    }
    return nullptr;
}

// An entry of a module's table of functions.
template <auto Function>
constexpr PyMethodDef fast_method(const char* name) {
    PyObject* (*const call)(PyObject*, PyObject* const*, Py_ssize_t) = [](PyObject* self, PyObject* const* arguments,
                                                                          Py_ssize_t count) -> PyObject* {
        return or_python_error([&] { return Function(self, arguments, count); });
    };
    return {name, reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call)), METH_FASTCALL, nullptr};
}

// How the result's shape follows from the tensor's and a number.
enum class Shape {
    same,     // the tensor's; the number is not used
    joined,   // a dim so many times as long
    part,     // a dim divided by it
    rows,     // a dim of that size
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

// The fields of a `FastPath`, which is a tuple.
struct FastPathFields {
    enum Field : Py_ssize_t { communicator, timeout, engine, p2p, count };

    static nb::handle get(const nb::object& path, Field field) { return PyTuple_GET_ITEM(path.ptr(), field); }
};

// A call's group: the default group for None, which may be None. Null if it is to be found by the general path.
nb::object find_group(nb::handle group);
// The `FastPath` of backends/base.py of a group; null if it has none.
nb::object fast_path_of(nb::handle group);

// Whether the collectives of this context run when they are called, not at the end of a block of `coalesce`.
bool runs_at_once();

// The fast path of a group, or of the default group for None; nothing if the call is to take the general path.
std::optional<OpenFastPath> find_fast_path(nb::handle group, nb::handle timeout = nb::none());

// The value of an int; nothing for any other object, or if it is too large.
std::optional<std::int64_t> integer_of(nb::handle value);
// The value of an int that is not negative and fits an int; -1 for any other object.
int index_of(nb::handle value);
// The number of a reduce operation without a factor, else -1.
int number_of(nb::handle op);
// The counts of a list or tuple of ints, one for each rank; empty if the general path is to check them.
std::vector<std::size_t> counts_of(nb::handle counts, const Communicator& communicator);

// `out`, or a new tensor if that is None; None if the tensor is not plain or has no rows to join or divide, and null on
// an error.
nb::object out_or_new(nb::handle out, nb::handle tensor, Shape shape, std::size_t number = 0, std::size_t dim = 0);
// A new tensor of `shape` but for the size of `dim`, which is `rows`; null on an error.
nb::object new_tensor(std::uint8_t dtype, std::span<const std::int64_t> shape, std::size_t rows, std::size_t dim = 0);

// A new tensor of the shape and dtype of a plain tensor; null on an error.
nb::object new_like(nb::handle tensor);

using Fact = std::pair<const char*, PyObject*>;  // an argument of a call, for the error message

// Raises the public error that the engine's Python side makes of the exception being handled. `facts` are arguments of
// the call.
void raise_for(const OpenFastPath& path, const char* operation, nb::handle tensor, nb::handle out, nb::dict facts);
void raise_for(const OpenFastPath& path, const char* operation, nb::handle tensor, nb::handle out,
               std::initializer_list<Fact> facts);

// Runs `collective(context, deadline)`, one of collectives/, when the group's collectives before this one have ended.
template <class Collective>
void run_collective(const OpenFastPath& path, std::size_t size, const Collective& collective) {
    const std::uint64_t ticket = path.communicator->reserve();
    const GilRelease released(path.communicator->is_short(size) ? GilRelease::When::when_waiting
                                                                : GilRelease::When::at_once);
    path.communicator->run_in_turn(ticket, path.timeout, collective);
}

// Runs the collective that `pass_if_plain(out, go)` passes to `go`. Returns the result, or None if the call is not plain.
template <class PassIfPlain>
PyObject* run_fast(const OpenFastPath& path, const char* operation, nb::handle tensor, nb::object out,
                   std::initializer_list<Fact> facts, const PassIfPlain& pass_if_plain) {
    if (!out.is_valid()) return nullptr;
    if (out.is_none()) Py_RETURN_NONE;
    const auto go = [&](std::size_t size, const auto& collective) { run_collective(path, size, collective); };
    bool is_done = false;
    try {
        is_done = pass_if_plain(out, go);
    } catch (...) {
        raise_for(path, operation, tensor, out, facts);
        return nullptr;
    }
    if (!is_done) Py_RETURN_NONE;
    return mark_written(out.ptr()) ? out.release().ptr() : nullptr;
}

// [Note: plain calls]
// A call is plain if the engine can take its tensors and arguments as they are. Each `pass_..._if_plain` checks that,
// and if so passes its size in bytes and the collective to `go`, which runs it, starts it or keeps it. The collective
// captures addresses: the caller keeps the tensors alive.

inline bool has_no_factor(int op) {
    return op >= 0 && op < static_cast<int>(ReduceOp::premultiplied_sum);
}

// The fold of a reduce operation without a factor, by its number; nothing if the dtype has none.
inline std::optional<Reduction> reduction_of(DType dtype, int op) {
    if (!has_no_factor(op)) return std::nullopt;
    const Reduction reduction{.dtype = dtype, .op = static_cast<ReduceOp>(op)};
    if (find_fold(dtype, reduction.op, InstructionSet::baseline) == nullptr) return std::nullopt;
    return reduction;
}

struct Pair {
    TensorView source;
    TensorView out;
};

inline std::optional<Pair> view_pair(nb::handle tensor, nb::handle out) {
    const auto views = view_tensors(tensor.ptr(), out.ptr());
    if (!views || views->first.dtype != views->second.dtype) return std::nullopt;
    return Pair{views->first, views->second};
}

inline bool overlap(const Pair& pair) {
    const std::size_t size = size_of(pair.source.dtype);
    return pair.source.data < pair.out.data + pair.out.count * size &&
           pair.out.data < pair.source.data + pair.source.count * size;
}

inline std::size_t size_of_pair(const Pair& pair) {
    return std::max(pair.source.count, pair.out.count) * size_of(pair.source.dtype);
}

// Whether the shapes are equal except for a dim, which is `factor` times as long in `longer`, and the dims before it are
// 1, so that parts along it lie one after the other.
inline bool fits(std::span<const std::int64_t> longer, std::span<const std::int64_t> shorter, int factor, int dim = 0) {
    const auto at = static_cast<std::size_t>(dim);
    if (dim < 0 || at >= shorter.size() || longer.size() != shorter.size()) return false;
    const auto is_one = [](std::int64_t size) { return size == 1; };
    return longer[at] == factor * shorter[at] && std::all_of(longer.begin(), longer.begin() + dim, is_one) &&
           std::all_of(shorter.begin(), shorter.begin() + dim, is_one) &&
           std::equal(longer.begin() + dim + 1, longer.end(), shorter.begin() + dim + 1);
}

template <class Go>
bool pass_allreduce_if_plain(const std::optional<Pair>& pair, int op, const Go& go) {
    if (!pair || !std::ranges::equal(pair->source.shape, pair->out.shape)) return false;
    if (pair->source.data != pair->out.data && overlap(*pair)) return false;
    const auto found = reduction_of(pair->source.dtype, op);
    if (!found) return false;
    go(size_of_pair(*pair), [out = pair->out.data, source = pair->source.data, count = pair->source.count,
                             reduction = *found](Context& context, const Deadline& deadline) {
        allreduce(context, out, source, count, reduction, deadline);
    });
    return true;
}

// `addend` has the shape of both, and shares no memory with `out`.
template <class Go>
bool pass_allreduce_add_if_plain(const std::optional<Pair>& pair, const std::optional<TensorView>& addend,
                                 const Go& go) {
    if (!pair || !addend || pair->source.dtype != addend->dtype || overlap(*pair)) return false;
    if (!std::ranges::equal(pair->source.shape, pair->out.shape)) return false;
    if (!std::ranges::equal(pair->source.shape, addend->shape)) return false;
    if (!reduction_of(pair->source.dtype, static_cast<int>(ReduceOp::sum))) return false;
    go(size_of_pair(*pair),
       [out = pair->out.data, source = pair->source.data, count = pair->source.count, addend = addend->data,
        dtype = pair->source.dtype](Context& context, const Deadline& deadline) {
           allreduce_add(context, out, source, addend, count, dtype, deadline);
       });
    return true;
}

// Only the root has a result; elsewhere `pair->out` is not used.
template <class Go>
bool pass_reduce_if_plain(const Communicator& self, const std::optional<Pair>& pair, int op, int root, const Go& go) {
    if (!pair || root < 0 || root >= self.num_ranks()) return false;
    if (!std::ranges::equal(pair->source.shape, pair->out.shape)) return false;
    if (pair->source.data != pair->out.data && overlap(*pair)) return false;
    const auto found = reduction_of(pair->source.dtype, op);
    if (!found) return false;
    go(size_of_pair(*pair),
       [out = self.rank() == root ? pair->out.data : nullptr, source = pair->source.data, count = pair->source.count,
        root, reduction = *found](Context& context, const Deadline& deadline) {
           reduce(context, out, source, count, root, reduction, deadline);
       });
    return true;
}

template <class Go>
bool pass_broadcast_if_plain(const Communicator& self, const std::optional<Pair>& pair, int root, const Go& go) {
    if (!pair || root < 0 || root >= self.num_ranks()) return false;
    if (!std::ranges::equal(pair->source.shape, pair->out.shape)) return false;
    if (pair->source.data != pair->out.data && overlap(*pair)) return false;
    go(size_of_pair(*pair), [out = pair->out.data, source = pair->source.data, count = pair->out.count,
                             dtype = pair->out.dtype, root](Context& context, const Deadline& deadline) {
        broadcast(context, out, source, count, dtype, root, deadline);
    });
    return true;
}

template <class Go>
bool pass_all_gather_if_plain(const Communicator& self, nb::handle tensor, nb::handle out, int dim, const Go& go) {
    const auto pair = view_pair(tensor, out);
    if (!pair || !fits(pair->out.shape, pair->source.shape, self.num_ranks(), dim) || overlap(*pair)) return false;
    go(size_of_pair(*pair), [out = pair->out.data, source = pair->source.data, count = pair->source.count,
                             dtype = pair->source.dtype, dim](Context& context, const Deadline& deadline) {
        std::fill(context.counts.begin(), context.counts.end(), count);
        all_gather(context, out, source, context.counts, dtype, dim, deadline);
    });
    return true;
}

template <class Go>
bool pass_reduce_scatter_if_plain(const Communicator& self, nb::handle tensor, nb::handle out, int op, int dim,
                                  const Go& go) {
    const auto pair = view_pair(tensor, out);
    if (!pair || !fits(pair->source.shape, pair->out.shape, self.num_ranks(), dim) || overlap(*pair)) return false;
    const auto found = reduction_of(pair->source.dtype, op);
    if (!found) return false;
    go(size_of_pair(*pair), [out = pair->out.data, source = pair->source.data, count = pair->out.count,
                             reduction = *found, dim](Context& context, const Deadline& deadline) {
        std::fill(context.counts.begin(), context.counts.end(), count);
        reduce_scatter(context, out, source, context.counts, dim, reduction, deadline);
    });
    return true;
}

template <class Go>
bool pass_all_to_all_if_plain(const Communicator& self, nb::handle tensor, nb::handle out, const Go& go) {
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

// The parts of a call with one tensor for each rank.
struct PartViews {
    std::vector<const std::byte*> sources;
    std::vector<std::byte*> outs;
    std::size_t part;  // elements of each
    DType dtype;
};

// Whether an output overlaps another tensor.
inline bool any_overlap(std::span<const TensorView> outs, std::span<const TensorView> sources) {
    struct Range {
        const std::byte* start;
        const std::byte* end;
        bool is_out;
    };
    std::vector<Range> ranges;
    for (const bool is_out : {false, true})
        for (const TensorView& each : is_out ? outs : sources)
            if (each.count != 0) ranges.push_back({each.data, each.data + each.count * size_of(each.dtype), is_out});
    std::ranges::sort(ranges, std::less(), &Range::start);
    // In this order each needs to begin after the last output before it, an output after any tensor.
    const std::byte* end_of_any = nullptr;
    const std::byte* end_of_outs = nullptr;
    for (const Range& range : ranges) {
        if (range.start < (range.is_out ? end_of_any : end_of_outs)) return true;
        end_of_any = std::max(end_of_any, range.end);
        if (range.is_out) end_of_outs = std::max(end_of_outs, range.end);
    }
    return false;
}

// The parts of an all_to_all of lists; nothing unless all are plain and alike, and no output overlaps another tensor.
inline std::optional<PartViews> view_parts(std::span<const nb::object> tensors, std::span<const nb::object> outs) {
    std::vector<TensorView> sources, targets;
    for (const bool is_out : {false, true}) {
        for (const nb::object& tensor : is_out ? outs : tensors) {
            const auto view = view_tensor(tensor.ptr());
            if (!view) return std::nullopt;
            (is_out ? targets : sources).push_back(*view);
            if (view->dtype != sources[0].dtype || !std::ranges::equal(view->shape, sources[0].shape))
                return std::nullopt;
        }
    }
    if (any_overlap(targets, sources)) return std::nullopt;
    PartViews parts{.sources = {}, .outs = {}, .part = sources[0].count, .dtype = sources[0].dtype};
    for (const TensorView& view : sources) parts.sources.push_back(view.data);
    for (const TensorView& view : targets) parts.outs.push_back(view.data);
    return parts;
}

// Of a tensor; the sizes may be those of no tensor, from another process, and so multiply to any number.
inline std::size_t num_elements(std::span<const std::int64_t> shape) {
    return std::accumulate(shape.begin(), shape.end(), std::size_t{1}, [](std::size_t product, std::int64_t size) {
        return product * static_cast<std::size_t>(size);
    });
}
// The elements of a row: of all dims but the first.
inline std::size_t row_elements(std::span<const std::int64_t> shape) {
    return num_elements(shape.subspan(1));
}

// Rows of a tensor for each rank, and from each.
struct Rows {
    std::vector<std::size_t> sent;
    std::vector<std::size_t> received;

    // Whether they are all rows of `tensor`, and as many go to this rank as come from it.
    [[nodiscard]] bool fit(const TensorView& tensor, int rank) const {
        const auto own = static_cast<std::size_t>(rank);
        return !tensor.shape.empty() && sent[own] == received[own] &&
               static_cast<std::int64_t>(std::accumulate(sent.begin(), sent.end(), std::size_t{0})) == tensor.shape[0];
    }
};

template <class Go>
bool pass_uneven_all_to_all_if_plain(const Communicator& self, nb::handle tensor, nb::handle out, const Rows& rows,
                                     const Go& go) {
    const auto pair = view_pair(tensor, out);
    if (!pair || overlap(*pair) || !rows.fit(pair->source, self.rank()) || pair->out.shape.empty()) return false;
    const auto received = std::accumulate(rows.received.begin(), rows.received.end(), std::size_t{0});
    if (pair->out.shape[0] != static_cast<std::int64_t>(received)) return false;
    if (!std::ranges::equal(pair->source.shape.subspan(1), pair->out.shape.subspan(1))) return false;
    const std::size_t unit = row_elements(pair->source.shape);
    Rows counts = rows;
    for (auto* each : {&counts.sent, &counts.received})
        for (std::size_t& count : *each) count *= unit;
    go(size_of_pair(*pair), [out = pair->out.data, source = pair->source.data, counts = std::move(counts), unit,
                             dtype = pair->source.dtype](Context& context, const Deadline& deadline) {
        all_to_all(context, out, source, counts.sent, counts.received, unit, dtype, deadline);
    });
    return true;
}

}  // namespace ferrodist
