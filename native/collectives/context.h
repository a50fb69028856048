// The state that all collectives of a group work with.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <span>
#include <vector>

#include "base/deadline.h"
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
    shm::Arenas* arenas = nullptr;
    shm::PeerMemory peers = shm::PeerMemory(num_ranks);
    TransferMode transfer_mode = {};
    Clock::duration staging_time = {};  // of this call before `enter`, if it is measured
    shm::SharedCopy into_shared = {};   // for copies into slots and into peers' symmetric memory

    // Preallocated per-rank scratch arrays, so that no collective allocates.
    std::vector<const std::byte*> inputs = std::vector<const std::byte*>(static_cast<std::size_t>(num_ranks));
    std::vector<std::byte*> outputs = std::vector<std::byte*>(static_cast<std::size_t>(num_ranks));
    std::vector<double> factors = std::vector<double>(static_cast<std::size_t>(num_ranks));
    std::vector<std::size_t> counts = std::vector<std::size_t>(static_cast<std::size_t>(num_ranks));
    std::vector<std::size_t> starts = std::vector<std::size_t>(static_cast<std::size_t>(num_ranks) + 1);
    std::vector<std::size_t> other_starts = std::vector<std::size_t>(static_cast<std::size_t>(num_ranks) + 1);
};

// Computes the start of each part into `starts`, which begins with 0 and has an entry for the end.
inline void find_starts(std::span<const std::size_t> counts, std::vector<std::size_t>& starts) {
    std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
}

inline void copy_bytes(std::byte* out, const std::byte* source, std::size_t size) {
    if (size != 0) std::memcpy(out, source, size);
}

}  // namespace ferrodist
