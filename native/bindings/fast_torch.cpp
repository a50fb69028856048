#include "bindings/fast_torch.h"

#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings/fast_call.h"
#include "bindings/started.h"

namespace ferrodist {

namespace {

// [Note: calls of torch.distributed]
// Each function takes the tensors of a method of torch's process group, root and op, then the group, and at last
// whether to start the call. It returns True when the call was done, False if the general path is to make it, and for
// a started call a tuple: its `Started`, and for the error the operation, a tensor, and other fields of a
// `CollectiveOp`.
//
// What a call gives to the engine is what torch_backend/general_calls.py gives it for the same call, so that the ranks
// may take different paths: numbers of elements, and units of one element. Lists of different sizes, which ranks must
// compare first, and tensors that overlap are left to that module.

// A tensor, or a list or tuple of tensors as a tuple of its own: another thread may change the list.
nb::object as_tuple(nb::handle given) {
    if (!PyList_CheckExact(given.ptr()) && !PyTuple_CheckExact(given.ptr())) return nb::borrow(given);
    return nb::steal(PySequence_Tuple(given.ptr()));
}

// The same with aliases of the tensors.
nb::object aliases_of(nb::handle tensors) {
    if (!tensors.is_valid()) return {};
    if (!PyTuple_CheckExact(tensors.ptr())) {
        nb::object alias = nb::steal(alias_of(tensors.ptr()));
        if (!alias.is_valid()) throw nb::python_error();
        return alias;
    }
    nb::list aliases;
    for (const nb::handle tensor : nb::borrow<nb::tuple>(tensors)) aliases.append(aliases_of(tensor));
    return aliases;
}

// An input or output: one tensor, or a tuple with one for each rank, whose elements follow each other. Its holder keeps
// the tensors alive.
class Elements {
public:
    // Nothing if they are not all plain tensors of one dtype.
    static std::optional<Elements> of(nb::handle given, std::size_t ranks) {
        Elements found;
        if (!PyTuple_CheckExact(given.ptr())) {
            const auto view = view_data(given.ptr());
            if (!view) return std::nullopt;
            found.add(*view);
            return found;
        }
        if (static_cast<std::size_t>(PyTuple_GET_SIZE(given.ptr())) != ranks) return std::nullopt;
        found.parts_.reserve(ranks);
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given.ptr()); ++i) {
            const auto view = view_data(PyTuple_GET_ITEM(given.ptr(), i));
            if (!view || (i > 0 && view->dtype != found.dtype())) return std::nullopt;
            found.add(*view);
        }
        return found;
    }

    [[nodiscard]] std::size_t total() const { return total_; }
    [[nodiscard]] DType dtype() const { return parts_[0].dtype; }
    [[nodiscard]] const std::vector<TensorView>& parts() const { return parts_; }
    [[nodiscard]] std::vector<std::size_t> counts() const {
        std::vector<std::size_t> counts;
        for (const TensorView& part : parts_) counts.push_back(part.count);
        return counts;
    }

    // Whether they have elements like `part`'s for each rank, and don't overlap it.
    [[nodiscard]] bool fit(const TensorView& part, std::size_t ranks) const {
        const auto fits = [&](const TensorView& each) {
            return (parts_.size() == 1 || each.count == part.count) && !overlap({part, each});
        };
        return dtype() == part.dtype && total_ == ranks * part.count && std::ranges::all_of(parts_, fits);
    }
    // Whether `part` is rank r's part of one tensor.
    [[nodiscard]] bool have_as_part(const TensorView& part, int r, std::size_t ranks) const {
        return parts_.size() == 1 && dtype() == part.dtype && total_ == ranks * part.count &&
               part.data == parts_[0].data + static_cast<std::size_t>(r) * part.count * size_of(part.dtype);
    }

    // Whether each has memory of its own: then the order in which they are written does not matter.
    [[nodiscard]] bool are_apart() const {
        for (std::size_t i = 1; i < parts_.size(); ++i)
            for (std::size_t j = 0; j < i; ++j)
                if (overlap({parts_[i], parts_[j]})) return false;
        return true;
    }

    // Makes room for the elements of several tensors in one place. False if there is no memory, or if they are so large
    // that torch copies them faster, with several threads.
    [[nodiscard]] bool make_room() {
        constexpr std::size_t most_bytes = 1024 * 1024;
        if (parts_.size() == 1) return true;
        const std::size_t bytes = total_ * size_of(dtype());
        if (bytes <= most_bytes) room_ = std::shared_ptr<std::byte[]>(new (std::nothrow) std::byte[bytes]);
        return room_ != nullptr;
    }
    // The elements in one place: of several tensors a copy.
    [[nodiscard]] const std::byte* read() const {
        if (parts_.size() == 1) return parts_[0].data;
        std::byte* to = room_.get();
        for (const TensorView& part : parts_) to = std::copy_n(part.data, part.count * size_of(part.dtype), to);
        return room_.get();
    }
    // Passes the place of one tensor to `call`, or those of several.
    template <class Call>
    void pass(const Call& call) const {
        if (parts_.size() == 1) return call(parts_[0].data);
        std::vector<std::byte*> places;
        for (const TensorView& part : parts_) places.push_back(part.data);
        call(std::span<std::byte* const>(places));
    }

private:
    void add(const TensorView& part) {
        parts_.push_back(part);
        total_ += part.count;
    }
    std::vector<TensorView> parts_;
    std::size_t total_ = 0;  // elements
    std::shared_ptr<std::byte[]> room_;
};

// A call of one of the functions below.
struct TorchCall {
    OpenFastPath path;
    const char* operation;
    nb::handle tensor;  // for the error
    bool is_async;
    std::array<nb::handle, 2> tensors;                 // that it reads and writes; a started call keeps them alive
    std::initializer_list<Fact> facts;                 // for the error
    const std::vector<std::size_t>* counts = nullptr;  // the same, if given
};

nb::dict facts_of(const TorchCall& call) {
    nb::dict all;
    for (const auto& [name, value] : call.facts) all[name] = nb::borrow(value);
    if (call.counts == nullptr) return all;
    nb::list elements;
    for (const std::size_t count : *call.counts) elements.append(count);
    all["counts"] = elements;
    return all;
}

// Runs or starts the collective that `pass_if_plain(go)` passes to `go`, if the call is plain.
template <class PassIfPlain>
PyObject* run_or_start(const TorchCall& call, const PassIfPlain& pass_if_plain) {
    if (call.is_async) {
        auto started = std::make_unique<Started>(*call.path.communicator, aliases_of(call.tensors[0]),
                                                 aliases_of(call.tensors[1]));
        if (!pass_if_plain(started->starter(call.path.timeout))) Py_RETURN_FALSE;
        return nb::make_tuple(std::move(started), call.operation, call.tensor, facts_of(call)).release().ptr();
    }
    try {
        return PyBool_FromLong(pass_if_plain(
            [&](std::size_t size, const auto& collective) { run_collective(call.path, size, collective); }));
    } catch (...) {
        raise_for(call.path, call.operation, call.tensor, nb::none(), facts_of(call));
        return nullptr;
    }
}

// A root that is a rank of the group, else -1.
int root_of(nb::handle root, const OpenFastPath& path) {
    const int index = index_of(root);
    return index < path.communicator->num_ranks() ? index : -1;
}

// Arguments: tensor, op, group, whether to start it.
PyObject* fast_torch_allreduce(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0], op = arguments[1];
    const auto path = find_fast_path(arguments[2]);
    const auto view = path ? view_data(tensor.ptr()) : std::nullopt;
    if (!view) Py_RETURN_FALSE;
    return run_or_start({*path, "allreduce", tensor, arguments[3] == Py_True, {tensor}, {{"op", op.ptr()}}},
                        [&](const auto& go) { return pass_allreduce_if_plain(Pair{*view, *view}, number_of(op), go); });
}

// Arguments: tensor, root, op, group, whether to start it.
PyObject* fast_torch_reduce(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0], root = arguments[1], op = arguments[2];
    const auto path = find_fast_path(arguments[3]);
    const auto view = path ? view_data(tensor.ptr()) : std::nullopt;
    if (!view) Py_RETURN_FALSE;
    return run_or_start(
        {*path, "reduce", tensor, arguments[4] == Py_True, {tensor}, {{"op", op.ptr()}, {"root", root.ptr()}}},
        [&](const auto& go) {
            return pass_reduce_if_plain(*path->communicator, Pair{*view, *view}, number_of(op), index_of(root), go);
        });
}

// Arguments: tensor, root, group, whether to start it.
PyObject* fast_torch_broadcast(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0], root = arguments[1];
    const auto path = find_fast_path(arguments[2]);
    const auto view = path ? view_data(tensor.ptr()) : std::nullopt;
    if (!view) Py_RETURN_FALSE;
    return run_or_start({*path, "broadcast", tensor, arguments[3] == Py_True, {tensor}, {{"root", root.ptr()}}},
                        [&](const auto& go) {
                            return pass_broadcast_if_plain(*path->communicator, Pair{*view, *view}, index_of(root), go);
                        });
}

constexpr std::byte* nowhere = nullptr;  // where a rank has no parts

// A tensor that is a rank's part, and the tensors with all ranks' parts.
struct Parts {
    TensorView part;
    std::optional<Elements> all;      // nothing on a rank that has none
    std::vector<std::size_t> counts;  // elements of each part
    nb::object tensors;               // of `all`

    [[nodiscard]] std::size_t bytes() const { return counts.size() * part.count * size_of(part.dtype); }

    // Nothing unless the tensors are plain and fit together. `has_all` says whether this rank has all parts.
    static std::optional<Parts> of(const OpenFastPath& path, nb::handle tensor, nb::handle given, bool has_all) {
        const auto part = view_data(tensor.ptr());
        if (!part) return std::nullopt;
        const std::size_t ranks = path.num_ranks();
        Parts found{.part = *part, .all = {}, .counts = std::vector<std::size_t>(ranks, part->count), .tensors = {}};
        if (!has_all) return found;
        found.tensors = as_tuple(given);
        found.all = Elements::of(found.tensors, ranks);
        if (!found.all) return std::nullopt;
        return found;
    }
    [[nodiscard]] bool fit() const { return !all || all->fit(part, counts.size()); }
};

// Arguments: outputs, tensor, group, whether to start it.
PyObject* fast_torch_all_gather(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[1];
    const auto path = find_fast_path(arguments[2]);
    const auto parts = path ? Parts::of(*path, tensor, arguments[0], true) : std::nullopt;
    if (!parts) Py_RETURN_FALSE;
    const bool is_in_place = parts->all->have_as_part(parts->part, path->communicator->rank(), path->num_ranks());
    if (!is_in_place && (!parts->fit() || !parts->all->are_apart())) Py_RETURN_FALSE;
    const nb::object dim = nb::int_(0);
    return run_or_start({*path,
                         "all_gather",
                         tensor,
                         arguments[3] == Py_True,
                         {tensor, parts->tensors},
                         {{"dim", dim.ptr()}},
                         &parts->counts},
                        [&](const auto& go) {
                            go(parts->bytes(), [outs = *parts->all, part = parts->part, counts = parts->counts](
                                                   Context& context, const Deadline& deadline) {
                                outs.pass([&](const auto& places) {
                                    all_gather(context, places, part.data, counts, part.dtype, 0, deadline);
                                });
                            });
                            return true;
                        });
}

// Arguments: outputs, tensor, root, group, whether to start it.
PyObject* fast_torch_gather(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[1];
    const auto path = find_fast_path(arguments[3]);
    const int root = path ? root_of(arguments[2], *path) : -1;
    if (root < 0) Py_RETURN_FALSE;
    const auto parts = Parts::of(*path, tensor, arguments[0], path->communicator->rank() == root);
    if (!parts || !parts->fit() || (parts->all && !parts->all->are_apart())) Py_RETURN_FALSE;
    return run_or_start({*path,
                         "gather",
                         tensor,
                         arguments[4] == Py_True,
                         {tensor, parts->tensors},
                         {{"root", arguments[2]}},
                         &parts->counts},
                        [&](const auto& go) {
                            go(parts->bytes(), [outs = parts->all, part = parts->part, counts = parts->counts, root](
                                                   Context& context, const Deadline& deadline) {
                                const auto gather_to = [&](const auto& places) {
                                    gather(context, places, part.data, counts, part.dtype, root, deadline);
                                };
                                outs ? outs->pass(gather_to) : gather_to(nowhere);
                            });
                            return true;
                        });
}

// Arguments: tensor, inputs, root, group, whether to start it.
PyObject* fast_torch_scatter(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0];
    const auto path = find_fast_path(arguments[3]);
    const int root = path ? root_of(arguments[2], *path) : -1;
    if (root < 0) Py_RETURN_FALSE;
    const auto parts = Parts::of(*path, tensor, arguments[1], path->communicator->rank() == root);
    if (!parts || !parts->fit()) Py_RETURN_FALSE;
    return run_or_start({*path,
                         "scatter",
                         tensor,
                         arguments[4] == Py_True,
                         {tensor, parts->tensors},
                         {{"root", arguments[2]}},
                         &parts->counts},
                        [&](const auto& go) {
                            go(parts->bytes(), [sources = parts->all, part = parts->part, counts = parts->counts, root](
                                                   Context& context, const Deadline& deadline) {
                                const auto scatter_from = [&](const auto& places) {
                                    scatter(context, part.data, places, counts, part.dtype, root, deadline);
                                };
                                sources ? sources->pass(scatter_from) : scatter_from(nowhere);
                            });
                            return true;
                        });
}

// Arguments: tensor, inputs, op, group, whether to start it.
PyObject* fast_torch_reduce_scatter(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0], op = arguments[2];
    const auto path = find_fast_path(arguments[3]);
    auto parts = path ? Parts::of(*path, tensor, arguments[1], true) : std::nullopt;
    const auto found = parts ? reduction_of(parts->part.dtype, number_of(op)) : std::nullopt;
    if (!found || !parts->fit() || !parts->all->make_room()) Py_RETURN_FALSE;
    const nb::object dim = nb::int_(0);
    return run_or_start({*path,
                         "reduce_scatter",
                         tensor,
                         arguments[4] == Py_True,
                         {tensor, parts->tensors},
                         {{"op", op.ptr()}, {"dim", dim.ptr()}},
                         &parts->counts},
                        [&](const auto& go) {
                            go(parts->bytes(), [sources = *parts->all, out = parts->part.data, counts = parts->counts,
                                                reduction = *found](Context& context, const Deadline& deadline) {
                                reduce_scatter(context, out, sources.read(), counts, 0, reduction, deadline);
                            });
                            return true;
                        });
}

// The elements that go to each rank, or come from it: so many rows of `tensor`, of dim 0, or an even share if `splits`
// is empty. Empty unless they are all of its rows.
std::vector<std::size_t> split(const TensorView& tensor, nb::handle splits, const OpenFastPath& path) {
    if (tensor.shape.empty() || !PyList_CheckExact(splits.ptr())) return {};
    const std::size_t ranks = path.num_ranks();
    const auto rows = static_cast<std::size_t>(tensor.shape[0]);
    std::vector<std::size_t> counts(ranks, rows / ranks);
    if (PyList_GET_SIZE(splits.ptr()) != 0) counts = counts_of(splits, *path.communicator);
    if (counts.empty() || std::accumulate(counts.begin(), counts.end(), std::size_t{0}) != rows) return {};
    for (std::size_t& count : counts) count *= row_elements(tensor.shape);
    return counts;
}

// An exchange of parts, as many elements as `sent` and `received` say.
PyObject* exchange(const OpenFastPath& path, nb::handle outputs, nb::handle inputs, const Elements& outs,
                   const Elements& sources, const std::vector<std::size_t>& received,
                   const std::vector<std::size_t>& sent, bool is_async) {
    const auto own_rank = static_cast<std::size_t>(path.communicator->rank());
    if (outs.dtype() != sources.dtype() || sent[own_rank] != received[own_rank]) Py_RETURN_FALSE;
    const std::size_t size = size_of(outs.dtype());
    // Where each rank's part begins.
    std::vector<const std::byte*> from;
    std::vector<std::byte*> to;
    const bool are_lists = PyTuple_CheckExact(outputs.ptr());
    for (std::size_t r = 0, before = 0; r < path.num_ranks(); before += sent[r++])
        from.push_back(are_lists ? sources.parts()[r].data : sources.parts()[0].data + before * size);
    for (std::size_t r = 0, before = 0; r < path.num_ranks(); before += received[r++])
        to.push_back(are_lists ? outs.parts()[r].data : outs.parts()[0].data + before * size);
    const nb::object unit = nb::int_(1);
    const nb::handle first = are_lists ? nb::handle(PyTuple_GET_ITEM(inputs.ptr(), 0)) : inputs;
    return run_or_start(
        {path, "all_to_all", first, is_async, {inputs, outputs}, {{"unit", unit.ptr()}}}, [&](const auto& go) {
            go(std::max(outs.total(), sources.total()) * size,
               [from, to, sent, received, dtype = outs.dtype(), are_lists](Context& context, const Deadline& deadline) {
                   if (are_lists)
                       all_to_all(context, to, from, sent, received, 1, dtype, deadline);
                   else
                       all_to_all(context, to[0], from[0], sent, received, 1, dtype, deadline);
               });
            return true;
        });
}

// Arguments: output, input, output_splits, input_splits, group, whether to start it.
PyObject* fast_torch_all_to_all_single(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_FALSE;
    const auto path = find_fast_path(arguments[4]);
    if (!path || PyTuple_CheckExact(arguments[0]) || PyTuple_CheckExact(arguments[1])) Py_RETURN_FALSE;
    const auto outs = Elements::of(arguments[0], 1);
    const auto sources = outs ? Elements::of(arguments[1], 1) : std::nullopt;
    if (!sources || overlap({sources->parts()[0], outs->parts()[0]})) Py_RETURN_FALSE;
    const auto received = split(outs->parts()[0], arguments[2], *path);
    const auto sent = split(sources->parts()[0], arguments[3], *path);
    if (received.empty() || sent.empty()) Py_RETURN_FALSE;
    return exchange(*path, arguments[0], arguments[1], *outs, *sources, received, sent, arguments[5] == Py_True);
}

// Arguments: outputs, inputs, group, whether to start it.
PyObject* fast_torch_all_to_all(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    const auto path = find_fast_path(arguments[2]);
    const nb::object outputs = as_tuple(arguments[0]), inputs = as_tuple(arguments[1]);
    if (!path || !PyTuple_CheckExact(outputs.ptr()) || !PyTuple_CheckExact(inputs.ptr())) Py_RETURN_FALSE;
    const auto outs = Elements::of(outputs, path->num_ranks());
    const auto sources = outs ? Elements::of(inputs, path->num_ranks()) : std::nullopt;
    if (!sources || any_overlap(outs->parts(), sources->parts())) Py_RETURN_FALSE;
    return exchange(*path, outputs, inputs, *outs, *sources, outs->counts(), sources->counts(),
                    arguments[3] == Py_True);
}

}  // namespace

PyMethodDef torch_functions[] = {
    fast_method<fast_torch_allreduce>("fast_torch_allreduce"),
    fast_method<fast_torch_reduce>("fast_torch_reduce"),
    fast_method<fast_torch_broadcast>("fast_torch_broadcast"),
    fast_method<fast_torch_all_gather>("fast_torch_all_gather"),
    fast_method<fast_torch_gather>("fast_torch_gather"),
    fast_method<fast_torch_scatter>("fast_torch_scatter"),
    fast_method<fast_torch_reduce_scatter>("fast_torch_reduce_scatter"),
    fast_method<fast_torch_all_to_all_single>("fast_torch_all_to_all_single"),
    fast_method<fast_torch_all_to_all>("fast_torch_all_to_all"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace ferrodist
