// Whether what only moves is read in place, or goes by way of slots; see [Note: offers] in pipeline.h.
//
// [Note: reading]
// Which is faster depends on the processor, on where the system runs the ranks, and on the size. Two ranks that each
// took 4 MiB from the other, in us: 440 in place and 650 by way of slots on one processor; on another 950 and 630 where
// both had one cache. So rank 0 times both, and says with each call which way the next one of that kind goes. All ranks
// hear it in the same call, so all go the same way; where they don't, for the parts of an all_to_all differ in size,
// nothing is read in place. What such a call takes counts, too, for the way that rank 0 offered: so it offers again
// what leads to the faster one.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/two_way_autotuner.h"

namespace ferrodist {

enum class Operation : std::uint8_t;

class TransferMode {
public:
    static constexpr Way in_place = Way::first;
    static constexpr Way by_slots = Way::second;

    // Calls of one operation and of about the same size.
    using Kind = std::uint32_t;
    static constexpr std::size_t num_sizes = 13;  // each twice the one before
    static constexpr std::size_t num_kinds = 10 * num_sizes;  // for each operation

    static Kind kind_of(Operation operation, std::size_t read_size) {
        const auto size = static_cast<std::size_t>(std::bit_width(read_size));
        const std::size_t place = std::clamp(size, smallest, smallest + num_sizes - 1) - smallest;
        return static_cast<Kind>(static_cast<std::size_t>(operation) * num_sizes + place);
    }

    // Which way a call of a kind goes.
    [[nodiscard]] Way way_of(Kind kind) const { return ways_[kind]; }

    // What rank 0 says in a call: never 0.
    [[nodiscard]] std::uint64_t advise(Kind kind) {
        return kind << 2 | static_cast<std::uint64_t>(choices_[kind].next()) << 1 | 1;
    }
    // What all ranks do when they hear it. Of a rank of another program it may be anything.
    void follow(std::uint64_t advice) {
        if ((advice & 1) != 0 && advice >> 2 < num_kinds) ways_[advice >> 2] = static_cast<Way>(advice >> 1 & 1);
    }

    void took(Kind kind, Way way, double seconds, std::size_t size) { choices_[kind].took(way, seconds, size); }

private:
    static constexpr std::size_t smallest = 16;  // bits of the size of what is worth the question

    std::array<Way, num_kinds> ways_{};
    std::vector<TwoWayAutotuner> choices_ = std::vector<TwoWayAutotuner>(num_kinds, TwoWayAutotuner{1.1, 32});
};

}  // namespace ferrodist
