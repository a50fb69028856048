#include "bindings/fast_data.h"

#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/fast_call.h"
#include "bindings/plain_calls.h"
#include "bindings/started.h"

namespace ferrodist {

namespace {

// [Note: calls of data]
// Each function takes the tensors of a method of torch's process group, root and op, then the group, and at last whether
// to start the call. It returns True when the call was done, False if the general path is to make it, and for a started
// call a tuple: its `Started`, and for the error the operation, a tensor, and the other fields of a `CollectiveOp`.
//
// What a call gives to the engine is what torch_backend/collectives.py gives it for the same call, so that ranks on both
// paths meet: numbers of elements, and units of one element. Lists of different sizes, which ranks must compare first,
// and tensors that overlap are left to that module.

// A tensor, or a list or tuple of tensors as a tuple of its own: another thread may change the list.
nb::object own(nb::handle given) {
    if (!PyList_CheckExact(given.ptr()) && !PyTuple_CheckExact(given.ptr())) return nb::borrow(given);
    return nb::steal(PySequence_Tuple(given.ptr()));
}

// An input or output: one tensor, or a tuple with one for each rank, whose elements follow each other. Whoever holds it
// keeps the tensors.
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

    // Calls `use(address)` with the elements in one place: of several tensors a copy.
    template <class Use>
    void read(const Use& use) const {
        if (parts_.size() == 1) return use(static_cast<const std::byte*>(parts_[0].data));
        const auto joined = make_room();
        std::byte* to = joined.get();
        for (const TensorView& part : parts_) to = std::copy_n(part.data, part.count * size_of(part.dtype), to);
        use(static_cast<const std::byte*>(joined.get()));
    }
    // Calls `use(address)` with a place to write them to: for several tensors they are copied from there.
    template <class Use>
    void write(const Use& use) const {
        if (parts_.size() == 1) return use(parts_[0].data);
        const auto joined = make_room();
        use(joined.get());
        const std::byte* from = joined.get();
        for (const TensorView& part : parts_) {
            std::copy_n(from, part.count * size_of(part.dtype), part.data);
            from += part.count * size_of(part.dtype);
        }
    }

private:
    void add(const TensorView& part) {
        parts_.push_back(part);
        total_ += part.count;
    }
    [[nodiscard]] std::unique_ptr<std::byte[]> make_room() const {
        return std::make_unique_for_overwrite<std::byte[]>(total_ * size_of(dtype()));
    }

    std::vector<TensorView> parts_;
    std::size_t total_ = 0;  // elements
};

// A call of one of the functions below.
struct DataCall {
    DataCall(OpenFastPath group_path, const char* name, nb::handle for_error, std::size_t size, nb::handle one,
             nb::handle other, nb::handle starts)
        : path(std::move(group_path)),
          operation(name),
          tensor(for_error),
          bytes(size),
          tensors{nb::borrow(one), nb::borrow(other)},
          is_started(starts.ptr() == Py_True) {}

    OpenFastPath path;
    const char* operation;
    nb::handle tensor;                  // for the error
    std::size_t bytes;                  // that it moves
    std::array<nb::object, 2> tensors;  // that it reads and writes
    bool is_started;
};

// Makes a call, or starts it. `facts` are for its error, with `counts` unless that is empty.
template <class Collective>
PyObject* make_call(const DataCall& call, std::initializer_list<Fact> facts, const std::vector<std::size_t>& counts,
                    Collective collective) {
    const auto all_facts = [&] {
        nb::dict all;
        for (const auto& [name, value] : facts) all[name] = nb::borrow(value);
        nb::list elements;
        for (const std::size_t count : counts) elements.append(count);
        if (!counts.empty()) all["counts"] = elements;
        return all;
    };
    if (call.is_started) {
        auto started = std::make_unique<Started>(*call.path.communicator, call.tensors[0], call.tensors[1]);
        started->starter(call.path.timeout)(call.bytes, std::move(collective));
        return nb::make_tuple(std::move(started), call.operation, call.tensor, all_facts()).release().ptr();
    }
    try {
        run(call.path, call.bytes, collective);
    } catch (...) {
        raise_for(call.path, call.operation, call.tensor, nb::none(), all_facts());
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

// Arguments: tensor, op, group.
PyObject* fast_allreduce_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0], op = arguments[1];
    auto path = find_fast_path(arguments[2]);
    const auto view = path ? view_data(tensor.ptr()) : std::nullopt;
    const auto reduction = view ? reduction_of(op, view->dtype) : std::nullopt;
    if (!reduction) Py_RETURN_FALSE;
    return make_call(DataCall(std::move(*path), "allreduce", tensor, view->count * size_of(view->dtype), tensor,
                              nb::handle(), arguments[3]),
                     {{"op", op.ptr()}}, {},
                     [data = view->data, elements = view->count, reduction = *reduction](Context& context,
                                                                                         const Deadline& deadline) {
                         allreduce(context, data, data, elements, reduction, deadline);
                     });
}

// Arguments: tensor, root, op, group.
PyObject* fast_reduce_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0], op = arguments[2];
    auto path = find_fast_path(arguments[3]);
    const auto view = path ? view_data(tensor.ptr()) : std::nullopt;
    const auto reduction = view ? reduction_of(op, view->dtype) : std::nullopt;
    const int root = reduction ? root_of(arguments[1], *path) : -1;
    if (root < 0) Py_RETURN_FALSE;
    std::byte* const out = path->communicator->rank() == root ? view->data : nullptr;
    return make_call(DataCall(std::move(*path), "reduce", tensor, view->count * size_of(view->dtype), tensor,
                              nb::handle(), arguments[4]),
                     {{"op", op.ptr()}, {"root", arguments[1]}}, {},
                     [out, source = view->data, elements = view->count, root, reduction = *reduction](
                         Context& context, const Deadline& deadline) {
                         reduce(context, out, source, elements, root, reduction, deadline);
                     });
}

// Arguments: tensor, root, group.
PyObject* fast_broadcast_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0];
    auto path = find_fast_path(arguments[2]);
    const auto view = path ? view_data(tensor.ptr()) : std::nullopt;
    const int root = view ? root_of(arguments[1], *path) : -1;
    if (root < 0) Py_RETURN_FALSE;
    return make_call(
        DataCall(std::move(*path), "broadcast", tensor, view->count * size_of(view->dtype), tensor, nb::handle(),
                 arguments[3]),
        {{"root", arguments[1]}}, {},
        [data = view->data, elements = view->count, dtype = view->dtype, root](
            Context& context, const Deadline& deadline) { broadcast(context, data, elements, dtype, root, deadline); });
}

// Arguments: outputs, tensor, group.
PyObject* fast_all_gather_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[1];
    auto path = find_fast_path(arguments[2]);
    const auto part = path ? view_data(tensor.ptr()) : std::nullopt;
    if (!part) Py_RETURN_FALSE;
    const std::size_t ranks = path->num_ranks();
    const nb::object outputs = own(arguments[0]);
    auto outs = Elements::of(outputs, ranks);
    if (!outs || !(outs->fit(*part, ranks) || outs->have_as_part(*part, path->communicator->rank(), ranks)))
        Py_RETURN_FALSE;
    const std::vector<std::size_t> counts(ranks, part->count);
    const nb::object dim = nb::int_(0);
    return make_call(
        DataCall(std::move(*path), "all_gather", tensor, outs->total() * size_of(part->dtype), tensor, outputs,
                 arguments[3]),
        {{"dim", dim.ptr()}}, counts,
        [outs = std::move(*outs), source = part->data, dtype = part->dtype, counts](Context& context,
                                                                                    const Deadline& deadline) {
            outs.write([&](std::byte* out) { all_gather(context, out, source, counts, dtype, 0, deadline); });
        });
}

// Arguments: outputs, tensor, root, group.
PyObject* fast_gather_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[1];
    auto path = find_fast_path(arguments[3]);
    const auto part = path ? view_data(tensor.ptr()) : std::nullopt;
    const int root = part ? root_of(arguments[2], *path) : -1;
    if (root < 0) Py_RETURN_FALSE;
    const std::size_t ranks = path->num_ranks();
    nb::object outputs;
    std::optional<Elements> outs;
    if (path->communicator->rank() == root) {
        outputs = own(arguments[0]);
        outs = Elements::of(outputs, ranks);
        if (!outs || !outs->fit(*part, ranks)) Py_RETURN_FALSE;
    }
    const std::vector<std::size_t> counts(ranks, part->count);
    return make_call(DataCall(std::move(*path), "gather", tensor, ranks * part->count * size_of(part->dtype), tensor,
                              outputs, arguments[4]),
                     {{"root", arguments[2]}}, counts,
                     [outs = std::move(outs), source = part->data, dtype = part->dtype, counts, root](
                         Context& context, const Deadline& deadline) {
                         const auto move = [&](std::byte* out) {
                             gather(context, out, source, counts, dtype, root, deadline);
                         };
                         if (outs)
                             outs->write(move);
                         else
                             move(nullptr);
                     });
}

// Arguments: tensor, inputs, root, group.
PyObject* fast_scatter_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0];
    auto path = find_fast_path(arguments[3]);
    const auto part = path ? view_data(tensor.ptr()) : std::nullopt;
    const int root = part ? root_of(arguments[2], *path) : -1;
    if (root < 0) Py_RETURN_FALSE;
    const std::size_t ranks = path->num_ranks();
    nb::object inputs;
    std::optional<Elements> sources;
    if (path->communicator->rank() == root) {
        inputs = own(arguments[1]);
        sources = Elements::of(inputs, ranks);
        if (!sources || !sources->fit(*part, ranks)) Py_RETURN_FALSE;
    }
    const std::vector<std::size_t> counts(ranks, part->count);
    return make_call(DataCall(std::move(*path), "scatter", tensor, ranks * part->count * size_of(part->dtype), tensor,
                              inputs, arguments[4]),
                     {{"root", arguments[2]}}, counts,
                     [sources = std::move(sources), out = part->data, dtype = part->dtype, counts, root](
                         Context& context, const Deadline& deadline) {
                         const auto move = [&](const std::byte* source) {
                             scatter(context, out, source, counts, dtype, root, deadline);
                         };
                         if (sources)
                             sources->read(move);
                         else
                             move(nullptr);
                     });
}

// Arguments: tensor, inputs, op, group.
PyObject* fast_reduce_scatter_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_FALSE;
    const nb::handle tensor = arguments[0], op = arguments[2];
    auto path = find_fast_path(arguments[3]);
    const auto part = path ? view_data(tensor.ptr()) : std::nullopt;
    const auto reduction = part ? reduction_of(op, part->dtype) : std::nullopt;
    if (!reduction) Py_RETURN_FALSE;
    const std::size_t ranks = path->num_ranks();
    const nb::object inputs = own(arguments[1]);
    auto sources = Elements::of(inputs, ranks);
    if (!sources || !sources->fit(*part, ranks)) Py_RETURN_FALSE;
    const std::vector<std::size_t> counts(ranks, part->count);
    const nb::object dim = nb::int_(0);
    return make_call(DataCall(std::move(*path), "reduce_scatter", tensor, sources->total() * size_of(part->dtype),
                              tensor, inputs, arguments[4]),
                     {{"op", op.ptr()}, {"dim", dim.ptr()}}, counts,
                     [sources = std::move(*sources), out = part->data, counts, reduction = *reduction](
                         Context& context, const Deadline& deadline) {
                         sources.read([&](const std::byte* source) {
                             reduce_scatter(context, out, source, counts, 0, reduction, deadline);
                         });
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
PyObject* exchange(OpenFastPath path, nb::object outputs, nb::object inputs, const Elements& outs,
                   const Elements& sources, std::vector<std::size_t> received, std::vector<std::size_t> sent,
                   nb::handle starts) {
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
    const nb::object first = are_lists ? nb::borrow(PyTuple_GET_ITEM(inputs.ptr(), 0)) : inputs;
    return make_call(
        DataCall(std::move(path), "all_to_all", first, std::max(outs.total(), sources.total()) * size, inputs, outputs,
                 starts),
        {{"unit", unit.ptr()}}, {},
        [from = std::move(from), to = std::move(to), sent = std::move(sent), received = std::move(received),
         dtype = outs.dtype(), are_lists](Context& context, const Deadline& deadline) {
            if (are_lists)
                all_to_all(context, to, from, sent, received, 1, dtype, deadline);
            else
                all_to_all(context, to[0], from[0], sent, received, 1, dtype, deadline);
        });
}

// Arguments: output, input, output_splits, input_splits, group.
PyObject* fast_all_to_all_single_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_FALSE;
    auto path = find_fast_path(arguments[4]);
    if (!path || PyTuple_CheckExact(arguments[0]) || PyTuple_CheckExact(arguments[1])) Py_RETURN_FALSE;
    const auto outs = Elements::of(arguments[0], 1);
    const auto sources = outs ? Elements::of(arguments[1], 1) : std::nullopt;
    if (!sources || overlap({sources->parts()[0], outs->parts()[0]})) Py_RETURN_FALSE;
    auto received = split(outs->parts()[0], arguments[2], *path);
    auto sent = split(sources->parts()[0], arguments[3], *path);
    if (received.empty() || sent.empty()) Py_RETURN_FALSE;
    return exchange(std::move(*path), nb::borrow(arguments[0]), nb::borrow(arguments[1]), *outs, *sources,
                    std::move(received), std::move(sent), arguments[5]);
}

// Arguments: outputs, inputs, group.
PyObject* fast_all_to_all_data(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_FALSE;
    auto path = find_fast_path(arguments[2]);
    const nb::object outputs = own(arguments[0]), inputs = own(arguments[1]);
    if (!path || !PyTuple_CheckExact(outputs.ptr()) || !PyTuple_CheckExact(inputs.ptr())) Py_RETURN_FALSE;
    const auto outs = Elements::of(outputs, path->num_ranks());
    const auto sources = outs ? Elements::of(inputs, path->num_ranks()) : std::nullopt;
    if (!sources || any_overlap(outs->parts(), sources->parts())) Py_RETURN_FALSE;
    return exchange(std::move(*path), outputs, inputs, *outs, *sources, outs->counts(), sources->counts(),
                    arguments[3]);
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
