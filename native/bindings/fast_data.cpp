#include "bindings/fast_data.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/fast_call.h"
#include "bindings/plain_calls.h"

namespace ferrodist {

namespace {

// [Note: calls of data]
// Each function takes the tensors of a method of torch's process group, root and op, and at last the group; and returns
// whether the call was done. What it gives to the engine is what torch_backend/collectives.py gives it for the same
// call, so that ranks on both paths meet: numbers of elements, and units of one element. It leaves to that module all
// lists of different sizes whose sizes must be compared, and tensors that overlap.

// An input or output: one tensor, or a list with one for each rank, whose elements follow each other.
class Elements {
public:
    // Nothing if they are not all plain tensors of one dtype.
    static std::optional<Elements> of(nb::handle given, std::size_t ranks) {
        Elements found;
        const bool is_list = PyList_CheckExact(given.ptr()) || PyTuple_CheckExact(given.ptr());
        const Py_ssize_t number = is_list ? PySequence_Fast_GET_SIZE(given.ptr()) : 1;
        if (is_list && static_cast<std::size_t>(number) != ranks) return std::nullopt;
        found.parts_.reserve(static_cast<std::size_t>(number));
        for (Py_ssize_t i = 0; i < number; ++i) {
            const nb::handle tensor = is_list ? nb::handle(PySequence_Fast_GET_ITEM(given.ptr(), i)) : given;
            const auto view = view_data(tensor.ptr());
            if (!view || (i > 0 && view->dtype != found.dtype())) return std::nullopt;
            found.parts_.push_back(*view);
            found.total_ += view->count;
            found.tensors_.push_back(nb::borrow(tensor));  // another thread may change the list
        }
        return found;
    }

    [[nodiscard]] std::size_t total() const { return total_; }
    [[nodiscard]] DType dtype() const { return parts_[0].dtype; }
    [[nodiscard]] const std::vector<TensorView>& parts() const { return parts_; }
    [[nodiscard]] nb::handle first() const { return tensors_[0]; }
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
    // Whether `part` is rank r's part of them, which one tensor has.
    [[nodiscard]] bool have_as_part(const TensorView& part, int r, std::size_t ranks) const {
        return parts_.size() == 1 && dtype() == part.dtype && total_ == ranks * part.count &&
               part.data == parts_[0].data + static_cast<std::size_t>(r) * part.count * size_of(part.dtype);
    }

    // The elements in one place: of several tensors a copy.
    [[nodiscard]] const std::byte* read() {
        std::byte* const all = memory();
        if (parts_.size() == 1) return all;
        std::byte* to = all;
        for (const TensorView& part : parts_) to = std::copy_n(part.data, part.count * size_of(part.dtype), to);
        return all;
    }
    // A place to write them to, from which `finish` copies them to several tensors.
    [[nodiscard]] std::byte* memory() {
        if (parts_.size() == 1) return parts_[0].data;
        if (!joined_) joined_ = std::make_unique_for_overwrite<std::byte[]>(total_ * size_of(dtype()));
        return joined_.get();
    }
    void finish() {
        const std::byte* from = joined_.get();
        if (from == nullptr) return;
        for (const TensorView& part : parts_) {
            std::copy_n(from, part.count * size_of(part.dtype), part.data);
            from += part.count * size_of(part.dtype);
        }
    }

private:
    std::vector<TensorView> parts_;
    std::vector<nb::object> tensors_;
    std::size_t total_ = 0;  // elements
    std::unique_ptr<std::byte[]> joined_;
};

// Runs a call with `total` elements. `facts` are for its error; so is `counts`, unless it is empty.
template <class Collective>
PyObject* run_data(const OpenFastPath& path, const char* operation, nb::handle tensor, DType dtype, std::size_t total,
                   const std::vector<std::size_t>& counts, std::initializer_list<Fact> facts,
                   const Collective& collective) {
    try {
        run(path, total * size_of(dtype), collective);
    } catch (...) {
        std::vector<Fact> all(facts);
        nb::list elements;
        for (const std::size_t count : counts) elements.append(count);
        if (!counts.empty()) all.emplace_back("counts", elements.ptr());
        // A result of the whole size, for there may be a list of parts.
        const std::int64_t shape[] = {static_cast<std::int64_t>(total)};
        const nb::object out = new_tensor(static_cast<std::uint8_t>(dtype), shape, total);
        if (out.is_valid()) raise_for(path, operation, tensor, out, all);
        return nullptr;
    }
    Py_RETURN_TRUE;
}

// A root that is a rank of the group, else -1.
int root_of(nb::handle root, const OpenFastPath& path) {
    const int index = index_of(root);
    return index < path.communicator->num_ranks() ? index : -1;
}

std::optional<Reduction> reduction_of(nb::handle op, DType dtype) {
    const int number = number_of(op);
    if (!has_no_factor(number)) return std::nullopt;
    const Reduction reduction{.dtype = dtype, .op = static_cast<ReduceOp>(number)};
    if (find_fold(dtype, reduction.op, InstructionSet::baseline) == nullptr) return std::nullopt;
    return reduction;
}

PyObject* fast_allreduce_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 3) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0], op = arguments[1];
    const auto path = find_fast_path(arguments[2]);
    const auto view = path ? view_data(tensor.ptr()) : std::nullopt;
    const auto reduction = view ? reduction_of(op, view->dtype) : std::nullopt;
    if (!reduction) Py_RETURN_FALSE;
    return run_data(*path, "allreduce", tensor, view->dtype, view->count, {}, {{"op", op.ptr()}},
                    [&](Context& context, const Deadline& deadline) {
                        allreduce(context, view->data, view->data, view->count, *reduction, deadline);
                    });
}

PyObject* fast_reduce_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0], op = arguments[2];
    const auto path = find_fast_path(arguments[3]);
    const auto view = path ? view_data(tensor.ptr()) : std::nullopt;
    const auto reduction = view ? reduction_of(op, view->dtype) : std::nullopt;
    const int root = reduction ? root_of(arguments[1], *path) : -1;
    if (root < 0) Py_RETURN_FALSE;
    std::byte* const out = path->communicator->rank() == root ? view->data : nullptr;
    return run_data(*path, "reduce", tensor, view->dtype, view->count, {}, {{"op", op.ptr()}, {"root", arguments[1]}},
                    [&](Context& context, const Deadline& deadline) {
                        reduce(context, out, view->data, view->count, root, *reduction, deadline);
                    });
}

PyObject* fast_broadcast_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 3) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0];
    const auto path = find_fast_path(arguments[2]);
    const auto view = path ? view_data(tensor.ptr()) : std::nullopt;
    const int root = view ? root_of(arguments[1], *path) : -1;
    if (root < 0) Py_RETURN_FALSE;
    return run_data(*path, "broadcast", tensor, view->dtype, view->count, {}, {{"root", arguments[1]}},
                    [&](Context& context, const Deadline& deadline) {
                        broadcast(context, view->data, view->count, view->dtype, root, deadline);
                    });
}

// Arguments: outputs, tensor, group; the same of the two below, with root.
PyObject* fast_all_gather_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 3) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[1];
    const auto path = find_fast_path(arguments[2]);
    const auto part = path ? view_data(tensor.ptr()) : std::nullopt;
    auto outs = part ? Elements::of(arguments[0], path->num_ranks()) : std::nullopt;
    if (!outs || !(outs->fit(*part, path->num_ranks()) ||
                   outs->have_as_part(*part, path->communicator->rank(), path->num_ranks())))
        Py_RETURN_FALSE;
    const std::vector<std::size_t> counts(path->num_ranks(), part->count);
    const nb::object dim = nb::int_(0);
    PyObject* const done =
        run_data(*path, "all_gather", tensor, part->dtype, outs->total(), counts, {{"dim", dim.ptr()}},
                 [&](Context& context, const Deadline& deadline) {
                     all_gather(context, outs->memory(), part->data, counts, part->dtype, 0, deadline);
                 });
    if (done != nullptr) outs->finish();
    return done;
}

PyObject* fast_gather_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[1];
    const auto path = find_fast_path(arguments[3]);
    const auto part = path ? view_data(tensor.ptr()) : std::nullopt;
    const int root = part ? root_of(arguments[2], *path) : -1;
    if (root < 0) Py_RETURN_FALSE;
    std::optional<Elements> outs;
    if (path->communicator->rank() == root) {
        outs = Elements::of(arguments[0], path->num_ranks());
        if (!outs || !outs->fit(*part, path->num_ranks())) Py_RETURN_FALSE;
    }
    const std::vector<std::size_t> counts(path->num_ranks(), part->count);
    PyObject* const done = run_data(
        *path, "gather", tensor, part->dtype, part->count * path->num_ranks(), counts, {{"root", arguments[2]}},
        [&](Context& context, const Deadline& deadline) {
            gather(context, outs ? outs->memory() : nullptr, part->data, counts, part->dtype, root, deadline);
        });
    if (done != nullptr && outs) outs->finish();
    return done;
}

// Arguments: tensor, inputs, root, group.
PyObject* fast_scatter_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0];
    const auto path = find_fast_path(arguments[3]);
    const auto part = path ? view_data(tensor.ptr()) : std::nullopt;
    const int root = part ? root_of(arguments[2], *path) : -1;
    if (root < 0) Py_RETURN_FALSE;
    std::optional<Elements> sources;
    if (path->communicator->rank() == root) {
        sources = Elements::of(arguments[1], path->num_ranks());
        if (!sources || !sources->fit(*part, path->num_ranks())) Py_RETURN_FALSE;
    }
    const std::vector<std::size_t> counts(path->num_ranks(), part->count);
    return run_data(*path, "scatter", tensor, part->dtype, part->count * path->num_ranks(), counts, {{"root", arguments[2]}},
                    [&](Context& context, const Deadline& deadline) {
                        scatter(context, part->data, sources ? sources->read() : nullptr, counts, part->dtype, root,
                                deadline);
                    });
}

// Arguments: tensor, inputs, op, group.
PyObject* fast_reduce_scatter_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0], op = arguments[2];
    const auto path = find_fast_path(arguments[3]);
    const auto part = path ? view_data(tensor.ptr()) : std::nullopt;
    const auto reduction = part ? reduction_of(op, part->dtype) : std::nullopt;
    std::optional<Elements> sources = reduction ? Elements::of(arguments[1], path->num_ranks()) : std::nullopt;
    if (!sources || !sources->fit(*part, path->num_ranks())) Py_RETURN_FALSE;
    const std::vector<std::size_t> counts(path->num_ranks(), part->count);
    const nb::object dim = nb::int_(0);
    return run_data(*path, "reduce_scatter", tensor, part->dtype, sources->total(), counts, {{"op", op.ptr()}, {"dim", dim.ptr()}},
                    [&](Context& context, const Deadline& deadline) {
                        reduce_scatter(context, part->data, sources->read(), counts, 0, *reduction, deadline);
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

PyObject* exchange(const OpenFastPath& path, const Elements& outs, const Elements& sources,
                   const std::vector<std::size_t>& received, const std::vector<std::size_t>& sent) {
    const auto own = static_cast<std::size_t>(path.communicator->rank());
    if (outs.dtype() != sources.dtype() || sent[own] != received[own]) Py_RETURN_FALSE;
    // Where each rank's part begins.
    const std::size_t size = size_of(outs.dtype());
    std::vector<const std::byte*> from;
    std::vector<std::byte*> to;
    for (std::size_t r = 0, before = 0; r < path.num_ranks(); before += sent[r++])
        from.push_back(sources.parts().size() > 1 ? sources.parts()[r].data : sources.parts()[0].data + before * size);
    for (std::size_t r = 0, before = 0; r < path.num_ranks(); before += received[r++])
        to.push_back(outs.parts().size() > 1 ? outs.parts()[r].data : outs.parts()[0].data + before * size);
    const nb::object unit = nb::int_(1);
    return run_data(path, "all_to_all", sources.first(), sources.dtype(), std::max(outs.total(), sources.total()), {},
                    {{"unit", unit.ptr()}}, [&](Context& context, const Deadline& deadline) {
                        if (outs.parts().size() == 1 && sources.parts().size() == 1)
                            all_to_all(context, to[0], from[0], sent, received, 1, outs.dtype(), deadline);
                        else
                            all_to_all(context, to, from, sent, received, 1, outs.dtype(), deadline);
                    });
}

// Arguments: output, input, output_splits, input_splits, group.
PyObject* fast_all_to_all_single_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_FALSE;
    const auto path = find_fast_path(arguments[4]);
    const auto outs = path ? Elements::of(arguments[0], 1) : std::nullopt;
    const auto sources = outs ? Elements::of(arguments[1], 1) : std::nullopt;
    if (!sources || overlap({sources->parts()[0], outs->parts()[0]})) Py_RETURN_FALSE;
    const auto received = split(outs->parts()[0], arguments[2], *path);
    const auto sent = split(sources->parts()[0], arguments[3], *path);
    if (received.empty() || sent.empty()) Py_RETURN_FALSE;
    return exchange(*path, *outs, *sources, received, sent);
}

// Arguments: outputs, inputs, group.
PyObject* fast_all_to_all_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 3) Py_RETURN_FALSE;
    const auto path = find_fast_path(arguments[2]);
    const auto outs = path ? Elements::of(arguments[0], path->num_ranks()) : std::nullopt;
    const auto sources = outs ? Elements::of(arguments[1], path->num_ranks()) : std::nullopt;
    if (!sources || outs->parts().size() != path->num_ranks() || sources->parts().size() != path->num_ranks() ||
        any_overlap(outs->parts(), sources->parts()))
        Py_RETURN_FALSE;
    return exchange(*path, *outs, *sources, outs->counts(), sources->counts());
}

}  // namespace

PyMethodDef data_functions[] = {
    fast_method<fast_allreduce_data>("fast_allreduce_data"),
    fast_method<fast_reduce_data>("fast_reduce_data"),
    fast_method<fast_broadcast_data>("fast_broadcast_data"),
    fast_method<fast_all_gather_data>("fast_all_gather_data"),
    fast_method<fast_gather_data>("fast_gather_data"),
    fast_method<fast_scatter_data>("fast_scatter_data"),
    fast_method<fast_reduce_scatter_data>("fast_reduce_scatter_data"),
    fast_method<fast_all_to_all_single_data>("fast_all_to_all_single_data"),
    fast_method<fast_all_to_all_data>("fast_all_to_all_data"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace ferrodist
