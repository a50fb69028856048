// The state that all collectives of a group work with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/failure.h"
#include "collectives/transfer_mode.h"
#include "kernels/fold.h"
#include "transport/shm/arena.h"
#include "transport/shm/peer_memory.h"
#include "transport/shm/shared_copy.h"
#include "transport/fabric.h"

namespace ferrodist {

// The operations, numbered as on the Python side.
enum class Operation : std::uint8_t {
    barrier,
    allreduce,
    reduce,
    broadcast,
    all_gather,
    gather,
    scatter,
    reduce_scatter,
    all_to_all,
    share,
};

struct Context {
    Fabric& fabric;
    int rank;
    int num_ranks;
    InstructionSet instructions;
    std::uint64_t sequence = 0;    // collectives entered so far
    std::uint64_t segments = 0;    // segments staged so far, by all collectives together
    std::uint64_t known_done = 0;  // segments that all ranks are known to have completed
    shm::Arenas* arenas = nullptr;
    shm::PeerMemory peers = shm::PeerMemory(num_ranks);
    TransferMode transfer_mode = {};
    Clock::duration staging_time = {};  // of this call before `enter`, if it is measured
    shm::SharedCopy into_shared = {};   // for copies into slots and into peers' symmetric memory

    // Preallocated per-rank scratch arrays, so that no collective allocates.
    std::vector<const std::byte*> inputs = std::vector<const std::byte*>(static_cast<std::size_t>(num_ranks));
    std::vector<double> factors = std::vector<double>(static_cast<std::size_t>(num_ranks));
    std::vector<std::size_t> counts = std::vector<std::size_t>(static_cast<std::size_t>(num_ranks));
    std::vector<std::size_t> starts = std::vector<std::size_t>(static_cast<std::size_t>(num_ranks) + 1);
    std::vector<std::size_t> other_starts = std::vector<std::size_t>(static_cast<std::size_t>(num_ranks) + 1);

    [[nodiscard]] shm::Arrival& arrival_of(int r) const { return fabric.arrival(r, sequence); }
};

// Throws Failure{mismatch} with every rank's call and payload.
[[noreturn]] inline void throw_mismatch(const Context& context) {
    std::string lines;
    for (int each = 0; each < context.num_ranks; ++each) {
        const shm::Arrival& arrival = context.arrival_of(each);
        lines.append(reinterpret_cast<const char*>(&arrival.call), sizeof arrival.call);
        lines.append(reinterpret_cast<const char*>(arrival.payload.data()), arrival.payload.size());
    }
    throw Failure(FailureKind::mismatch, {}, std::move(lines));
}

// Throws unless all ranks made the same call in this collective.
inline void compare_calls(const Context& context) {
    const shm::Call& own = context.arrival_of(context.rank).call;
    for (int r = 0; r < context.num_ranks; ++r)
        if (!(context.arrival_of(r).call == own)) throw_mismatch(context);
}

// Writes this rank's call and returns the payload that is published with it, to be filled before `enter`.
inline std::byte* begin(Context& context, const shm::Call& call) {
    ++context.sequence;
    shm::Arrival& own = context.arrival_of(context.rank);
    own.call = call;
    return own.payload.data();
}

// Waits until every rank has made the same call.
inline void enter(Context& context, const Deadline& deadline) {
    context.fabric.arrive(context.sequence, deadline);
    compare_calls(context);
    context.known_done = context.segments;  // a rank that has arrived has completed all collectives before
}

// Computes the start of each part into `starts`, which begins with 0 and has an entry for the end.
inline void find_starts(std::span<const std::size_t> counts, std::vector<std::size_t>& starts) {
    std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
}

inline void copy_bytes(std::byte* out, const std::byte* source, std::size_t size) {
    if (size != 0) std::memcpy(out, source, size);
}

}  // namespace ferrodist
