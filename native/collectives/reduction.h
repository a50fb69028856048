// Shared parts of the reductions: a fold with every rank's factor, and the division of a segment between ranks.
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

// A reduction in progress: its fold and, after `enter`, every rank's factor.
class ReductionFolder {
public:
    ReductionFolder(Context& context, const Reduction& reduction)
        : context_(context),
          is_premultiplied_(reduction.op == ReduceOp::premultiplied_sum),
          is_mean_(reduction.op == ReduceOp::mean),
          fold_(find_fold(reduction.dtype, reduction.op, context.instructions)) {
        if (fold_ == nullptr) throw Failure(FailureKind::unsupported, {});
    }

    // Bytes of a call's payload that the factor takes.
    [[nodiscard]] std::size_t factor_bytes() const { return is_premultiplied_ ? sizeof(double) : 0; }

    void begin_call(const shm::Call& call, const Reduction& reduction) {
        payload_ = begin(context_, call);
        if (is_premultiplied_) std::memcpy(payload_, &reduction.factor, sizeof(double));
    }

    // The part of this rank's payload that follows the factor.
    [[nodiscard]] std::byte* payload() const { return payload_ + factor_bytes(); }

    // Folds one array per rank: `at(r)` is the address of rank r's.
    template <class At>
    void fold(std::byte* out, std::size_t count, const At& at) {
        for (int r = 0; r < context_.num_ranks; ++r) context_.inputs[static_cast<std::size_t>(r)] = at(r);
        fold_(out, context_.inputs.data(), context_.inputs.size(), count, factors());
    }

    // After `enter`: rank r's factor.
    [[nodiscard]] double factor_of(int r) const {
        double factor = 1.0;
        if (is_premultiplied_) std::memcpy(&factor, context_.arrival_of(r).payload.data(), sizeof factor);
        return factor;
    }

    // The same into shared memory, and into `out` unless that is null.
    template <class At>
    void fold_into_shared(std::byte* shared, std::byte* out, std::size_t count, std::size_t element_size,
                          const At& at) {
        alignas(part_alignment) std::array<std::byte, copied_bytes> room;
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
    std::byte* payload_ = nullptr;
};

// The parts of one segment that the ranks fold: of equal size and aligned, except for the last ones.
struct Parts {
    std::size_t count;  // elements of the segment
    std::size_t part;   // elements per part

    [[nodiscard]] std::size_t begin_of(int rank) const {
        return std::min(count, static_cast<std::size_t>(rank) * part);
    }
    [[nodiscard]] std::size_t size_of(int rank) const { return begin_of(rank + 1) - begin_of(rank); }
};

inline Parts divide(std::size_t count, int num_ranks, std::size_t element_size) {
    const std::size_t unit = std::max<std::size_t>(part_alignment / element_size, 1);
    const auto ranks = static_cast<std::size_t>(num_ranks);
    const std::size_t even = (count + ranks - 1) / ranks;
    return {.count = count, .part = (even + unit - 1) / unit * unit};
}

}  // namespace ferrodist
