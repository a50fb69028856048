// Allreduce of large tensors between hosts of several ranks each, in two levels that fold in rank order all the same.
//
// [Note: chain]
// Where host h has the L ranks from h * L on, a fold in rank order is one that goes from host to host. Rank j of each host
// has slice j of every segment: it folds the slices of its host's ranks, which lie in shared memory, onto what rank j of
// the host before has folded, and hands that on to rank j of the next host. The last host has the result, which goes back
// the same way, and through shared memory to the ranks of each host. Each host sends at most two tensors, one each way,
// whatever L; with each rank sending to each (`fold_in_parts`) it sends L * (p - L) / p of them twice. Segments follow one
// another through the chain, so that all of it works at the same time.
//
// What travels up the chain is not rounded: small floats, which are folded in float32, don't go this way.
//
// [Note: chain slots]
// A segment's partial fold, and then its result, lie in the rank's own slot, at its own slice, which it doesn't stage. The
// slot of segment m is written anew for m + 3. By then the partial fold of m has been sent, for the result that came back
// was made of it; and the result of m has been sent on, for what comes from the host before (or, on the first host, from
// this rank itself) for m + 3 is sent after the result of m + 1 was taken. What the neighbours sent of m has been read
// before this rank sent its own partial fold, or result, of m + 1. Ranks of the same host say when they are done.
#pragma once

#include <cstddef>

#include "collectives/reduction.h"

namespace ferrodist {

// The same answer on all ranks.
bool can_fold_in_chain(const Fabric& fabric, const Reduction& reduction);

// The call has begun.
void fold_in_chain(Context& context, ReductionFolder& folder, std::byte* out, const std::byte* source, std::size_t count,
                   const Reduction& reduction, const Deadline& deadline);

}  // namespace ferrodist
