// Two-level allreduce of large tensors between hosts of several ranks each. It folds in rank order like every other
// algorithm.
//
// [Note: chain]
// Where host h has the L ranks from h * L on, a fold in rank order goes from host to host. Rank j of each host has
// chunk j of every segment: it folds the chunks of its host's ranks, which are in shared memory, onto the partial
// result of rank j of the previous host, and sends that on to rank j of the next host. The last host has the result,
// which returns along the chain, and through shared memory to the ranks of each host. Each host sends at most two
// tensors, one in each direction, for any L; if each rank sends to each (`fold_in_chunks`), it sends L * (p - L) / p of
// them twice. Segments are pipelined through the chain, so that all of it works at the same time.
//
// Partial results in the chain are not rounded: small floats, which are folded in float32, do not use it.
//
// [Note: chain slots]
// A segment's partial fold, and then its result, are in the rank's own slot, in its own chunk, which it does not stage.
// The slot of segment m is reused for m + 3. By then the partial fold of m has been sent, for the result that came back
// was computed from it; and the result of m has been forwarded, for what comes from the previous host (or, on the first
// host, from this rank itself) for m + 3 is sent after the result of m + 1 was received. What the neighbours sent of m
// has been read before this rank sent its own partial fold, or result, of m + 1. Ranks of the same host signal `done`.
#pragma once

#include <cstddef>

#include "collectives/reduction_folder.h"

namespace ferrodist {

// Whether the chain algorithm applies. The same answer on all ranks.
bool can_fold_in_chain(const Fabric& fabric, const Reduction& reduction);

// Runs the allreduce; `begin` has been called.
void fold_in_chain(Context& context, ReductionFolder& folder, std::byte* out, const std::byte* source,
                   std::size_t count, const Reduction& reduction, const Deadline& deadline);

}  // namespace ferrodist
