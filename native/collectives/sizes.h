// Choice of algorithm and segment sizes. All ranks must reach the same result, so it depends only on the call and the
// group's layout.
#pragma once

#include <algorithm>
#include <cstddef>

#include "transport/shm/group_memory.h"

namespace ferrodist {

// Bytes of a vector register, and of a cache line: the alignment of a segment's chunks.
inline constexpr std::size_t chunk_alignment = 64;

// Up to this size every rank folds the whole: one wait in all. Above it each rank folds a chunk: two waits, less work.
inline std::size_t one_shot_bytes(const shm::Layout& layout) {
    std::size_t size = 4 * 1024;
    if (layout.num_ranks == 2) {
        size = 16 * 1024;
    } else if (layout.num_ranks <= 4) {
        size = 8 * 1024;
    }
    return std::min(size, layout.slot_bytes);
}

// From this size on ordinary memory of another rank is read directly, where that is possible: one copy and a system
// call instead of two copies. But all then wait for the last reader, which costs more where ranks share processors.
inline std::size_t least_read_bytes(const shm::Layout& layout) {
    return (layout.is_oversubscribed ? 512 : 32) * std::size_t{1024};
}

// Maximum size for direct reads from a rank that is idle meanwhile: through slots one rank copies in what another copies
// out. Two ranks, broadcast in place of 256 KiB: 11 us directly and 18 through slots; 1 MiB: 130 and 62.
inline constexpr std::size_t most_read_from_idle_bytes = 512 * 1024;

// The segment size of a transfer of `size` bytes: large enough to be worth its flags, small enough to stay in the cache
// and to let the ranks work side by side.
inline std::size_t segment_bytes(std::size_t size, const shm::Layout& layout) {
    constexpr std::size_t smallest = 64 * 1024;
    if (layout.is_oversubscribed) return layout.slot_bytes;
    return std::clamp(size / 4, std::min(smallest, layout.slot_bytes), layout.slot_bytes);
}

// The segment size of a reduce of two ranks, of which the root folds the other's whole tensor. One rank stages while the
// other folds: 1 MiB took 99 us, in segments of 256 KiB 117, and 180 where both folded half of it.
inline std::size_t root_fold_segment_bytes(const shm::Layout& layout) {
    return layout.is_oversubscribed ? layout.slot_bytes : std::min<std::size_t>(128 * 1024, layout.slot_bytes);
}

// The segment size between two ranks on two hosts. Few enough bytes that both have sent theirs before either reads
// much: larger segments wait in the connection's buffer until the kernel sends them. Under TCP BBR 1 MiB took 290 us
// with this size, and 700 to 800 in segments of 256 KiB; under Reno 290 and 280, and 340 in segments of 64 KiB.
inline std::size_t partner_segment_bytes(const shm::Layout& layout) {
    return std::min<std::size_t>(128 * 1024, layout.slot_bytes);
}

// The number of elements of `element_size` that fit into `bytes`, in whole units of `chunk_alignment` bytes but at
// least one.
inline std::size_t elements_in(std::size_t bytes, std::size_t element_size) {
    const std::size_t aligned = bytes / chunk_alignment * chunk_alignment;
    return std::max<std::size_t>(aligned / element_size, 1);
}

}  // namespace ferrodist
