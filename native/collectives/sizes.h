// Which way a collective goes, and how large its segments are. All ranks must come to the same answer, so it depends on
// the call and the group's layout alone.
#pragma once

#include <algorithm>
#include <cstddef>

#include "transport/shm/segment.h"

namespace ferrodist {

// Bytes of a vector register, and of a cache line: parts of a segment start at multiples.
inline constexpr std::size_t part_alignment = 64;

// Up to here every rank folds the whole by itself: one wait in all. Above, each folds a part: two waits, less work.
inline std::size_t one_shot_bytes(const shm::Layout& layout) {
    std::size_t size = 4 * 1024;
    if (layout.num_ranks == 2) {
        size = 16 * 1024;
    } else if (layout.num_ranks <= 4) {
        size = 8 * 1024;
    }
    return std::min(size, layout.slot_bytes);
}

// From here on what another rank has in ordinary memory is read in place, where it can be: one copy and a system call in
// place of two copies. But all then wait for the last reader, which costs more where ranks share processors.
inline std::size_t least_read_bytes(const shm::Layout& layout) {
    return (layout.is_oversubscribed ? 512 : 32) * std::size_t{1024};
}

// Beyond this, where all read from one rank, or one from all, the others would stand idle: with slots one copies in what
// another copies out. Two ranks, broadcast of 256 KiB: 11 us in place and 18 by way of slots; 1 MiB: 130 and 62.
inline constexpr std::size_t most_read_from_one_bytes = 512 * 1024;

// Segments of a transfer of `size` bytes: large enough to be worth their flags, small enough to stay in the cache and
// to let the ranks work side by side.
inline std::size_t segment_bytes(std::size_t size, const shm::Layout& layout) {
    constexpr std::size_t smallest = 64 * 1024;
    if (layout.is_oversubscribed) return layout.slot_bytes;
    return std::clamp(size / 4, std::min(smallest, layout.slot_bytes), layout.slot_bytes);
}

// The same between two ranks on two hosts. Few enough bytes that both have sent theirs before either reads much: larger
// segments wait in the connection's buffer, and leave when the kernel gets to it. Under TCP BBR 1 MiB took 290 us this
// way, and 700 to 800 in segments of 256 KiB; under Reno 290 and 280, and 340 in segments of 64 KiB.
inline std::size_t partner_segment_bytes(const shm::Layout& layout) {
    return std::min<std::size_t>(128 * 1024, layout.slot_bytes);
}

// Elements of `element_size` that fit `bytes`, in whole units of `part_alignment` bytes but at least one.
inline std::size_t elements_in(std::size_t bytes, std::size_t element_size) {
    const std::size_t aligned = bytes / part_alignment * part_alignment;
    return std::max<std::size_t>(aligned / element_size, 1);
}

}  // namespace ferrodist
