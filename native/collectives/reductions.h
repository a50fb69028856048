// allreduce, reduce and reduce_scatter. All of them fold in rank order, on whichever rank.
#pragma once

#include <cstddef>
#include <span>

#include "collectives/context.h"

namespace ferrodist {

struct Reduction {
    DType dtype;
    ReduceOp op;
    double factor = 1.0;  // this rank's factor, for a premultiplied sum

    // Bytes that the factor takes at the front of a call's payload.
    [[nodiscard]] std::size_t factor_bytes() const { return op == ReduceOp::premultiplied_sum ? sizeof factor : 0; }
};

// Folds `count` elements of all ranks' `source` into all ranks' `out`, which may be `source`.
void allreduce(Context& context, std::byte* out, const std::byte* source, std::size_t count, const Reduction& reduction,
               const Deadline& deadline);

// The sum over all ranks, and `addend` added to it, each rank's own; rounded between the two, as by two calls. `out` is
// not `addend`.
void allreduce_add(Context& context, std::byte* out, const std::byte* source, const std::byte* addend,
                   std::size_t count, DType dtype, const Deadline& deadline);

// Folds into the root's `out`; it is not read elsewhere.
void reduce(Context& context, std::byte* out, const std::byte* source, std::size_t count, int root,
            const Reduction& reduction, const Deadline& deadline);

// Folds part r of all ranks' `source`, of `counts[r]` elements, into rank r's `out`, which may be that part.
void reduce_scatter(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts,
                    int dim, const Reduction& reduction, const Deadline& deadline);

}  // namespace ferrodist
