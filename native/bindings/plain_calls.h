// Plain calls of collectives: whether the engine can take tensors and arguments as they are, and what it runs then. The
// same for blocking and for started calls.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "bindings/tensor.h"
#include "collectives/data_movement.h"
#include "collectives/reductions.h"
#include "engine/communicator.h"

namespace ferrodist {

namespace nb = nanobind;

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

// Whether the shapes are equal except for the first dim, which is `factor` times as long in `longer`.
inline bool fits(std::span<const std::int64_t> longer, std::span<const std::int64_t> shorter, int factor) {
    return !shorter.empty() && longer.size() == shorter.size() && longer[0] == factor * shorter[0] &&
           std::equal(longer.begin() + 1, longer.end(), shorter.begin() + 1);
}

// Each checks whether a call is plain; if so, passes its size in bytes and the collective to `go`. The collective
// captures addresses: the caller keeps the tensors alive.

template <class Go>
bool run_allreduce_if_plain(const std::optional<Pair>& pair, int op, const Go& go) {
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
bool run_allreduce_add_if_plain(const std::optional<Pair>& pair, const std::optional<TensorView>& addend,
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
bool run_reduce_if_plain(const Communicator& self, const std::optional<Pair>& pair, int op, int root, const Go& go) {
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
bool run_broadcast_if_plain(const Communicator& self, const std::optional<Pair>& pair, int root, const Go& go) {
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
    if (!pair || !fits(pair->source.shape, pair->out.shape, self.num_ranks()) || overlap(*pair)) return false;
    const auto found = reduction_of(pair->source.dtype, op);
    if (!found) return false;
    go(size_of_pair(*pair), [out = pair->out.data, source = pair->source.data, count = pair->out.count,
                             reduction = *found](Context& context, const Deadline& deadline) {
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

// The elements of a row: of all dims but the first.
inline std::size_t row_elements(std::span<const std::int64_t> shape) {
    return static_cast<std::size_t>(
        std::accumulate(shape.begin() + 1, shape.end(), std::int64_t{1}, std::multiplies<>()));
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
bool run_uneven_all_to_all_if_plain(const Communicator& self, nb::handle tensor, nb::handle out, const Rows& rows,
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
