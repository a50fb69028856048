// Allreduce and broadcast of large tensors along a chain of hosts. An allreduce folds in rank order like every other
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
//
// [Note: chain of a broadcast]
// On each host one rank, the one with the root's index on its host, relays: it receives each segment from the host
// nearer to the root, puts it into its slot, from which the other ranks of its host read it, and sends it on to the host
// beyond. So the tensor goes once from each host to the next, in both directions from the root's; where the root sends it to every rank (`exchange`), it
// goes (p - L) times. And a segment takes h - 1 messages and as many answers, where in `exchange` each rank tells every
// rank of other hosts that it has nothing to send. A relay's answer (`done`) says that a segment has left the slots of
// the rank before.
#pragma once

#include <cstddef>

#include "collectives/exchange.h"
#include "collectives/reduction_folder.h"

namespace ferrodist {

// Whether the chain algorithm applies. The same answer on all ranks.
bool can_fold_in_chain(const Fabric& fabric, const Reduction& reduction);

// Runs the allreduce; `begin` has been called.
void fold_in_chain(Context& context, ReductionFolder& folder, std::byte* out, const std::byte* source,
                   std::size_t count, const Reduction& reduction, const Deadline& deadline);

// Whether a broadcast of `size` bytes goes along the chain. The same answer on all ranks.
bool can_broadcast_in_chain(const Fabric& fabric, std::size_t size);

// Runs the broadcast; `begin` has been called.
void broadcast_in_chain(Context& context, std::byte* out, const std::byte* source, const Segmentation& segmentation,
                        int root, const Deadline& deadline);

}  // namespace ferrodist
