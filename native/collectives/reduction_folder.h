// What the algorithms of a reduction share: the fold of all ranks' arrays, and the division of a segment into chunks.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>

#include "collectives/context.h"
#include "collectives/reductions.h"
#include "collectives/sizes.h"

namespace ferrodist {

// Block size for folds into two destinations: the block is copied while it is in the first-level cache.
inline constexpr std::size_t copied_bytes = 16 * 1024;

// Folds all ranks' arrays in rank order. After `Fabric::enter` it knows every rank's factor.
class ReductionFolder {
public:
    ReductionFolder(Context& context, const Reduction& reduction)
        : context_(context),
          is_premultiplied_(reduction.op == ReduceOp::premultiplied_sum),
          is_mean_(reduction.op == ReduceOp::mean),
          fold_(find_fold(reduction.dtype, reduction.op, context.instructions)) {
        if (fold_ == nullptr) throw Failure(FailureKind::unsupported, {});
    }

    // Folds one array per rank: `at(r)` is the address of rank r's.
    template <class At>
    void fold(std::byte* out, std::size_t count, const At& at) {
        for (int r = 0; r < context_.num_ranks; ++r) context_.inputs[static_cast<std::size_t>(r)] = at(r);
        fold_(out, context_.inputs.data(), context_.inputs.size(), count, factors());
    }

    // Rank r's factor; after `Fabric::enter`.
    [[nodiscard]] double factor_of(int r) const {
        double factor = 1.0;
        if (is_premultiplied_) std::memcpy(&factor, context_.fabric.arrival(r).payload.data(), sizeof factor);
        return factor;
    }

    // The same into shared memory, and into `out` unless that is null.
    template <class At>
    void fold_into_shared(std::byte* shared, std::byte* out, std::size_t count, std::size_t element_size,
                          const At& at) {
        alignas(chunk_alignment) std::array<std::byte, copied_bytes> room;
        const std::size_t block = copied_bytes / element_size;
        for (std::size_t start = 0; start < count; start += block) {
            const std::size_t size = std::min(block, count - start);
            const std::size_t offset = start * element_size;
            std::byte* target = out != nullptr ? out + offset : room.data();
            fold(target, size, [&](int r) { return at(r) + offset; });
            context_.into_shared.copy(shared + offset, target, size * element_size);
        }
    }

private:
    const double* factors() {
        if ((is_premultiplied_ || is_mean_) && !has_factors_) {
            for (int r = 0; r < context_.num_ranks; ++r) context_.factors[static_cast<std::size_t>(r)] = factor_of(r);
            if (is_mean_) context_.factors[0] = context_.num_ranks;
            has_factors_ = true;
        }
        return context_.factors.data();
    }

    Context& context_;
    bool is_premultiplied_;
    bool is_mean_;
    Fold fold_;
    bool has_factors_ = false;
};

// The chunks of one segment, one for each rank to fold: of equal size and aligned, except for the last ones.
struct Chunks {
    std::size_t count;  // elements of the segment
    std::size_t chunk;  // elements per chunk

    [[nodiscard]] std::size_t begin_of(int rank) const {
        return std::min(count, static_cast<std::size_t>(rank) * chunk);
    }
    [[nodiscard]] std::size_t size_of(int rank) const { return begin_of(rank + 1) - begin_of(rank); }
};

inline Chunks divide(std::size_t count, int num_ranks, std::size_t element_size) {
    const std::size_t unit = std::max<std::size_t>(chunk_alignment / element_size, 1);
    const auto ranks = static_cast<std::size_t>(num_ranks);
    const std::size_t even = (count + ranks - 1) / ranks;
    return {.count = count, .chunk = (even + unit - 1) / unit * unit};
}

}  // namespace ferrodist
