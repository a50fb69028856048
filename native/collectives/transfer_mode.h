// The choice of transfer mode per kind of call: direct reads of peers' memory, or staging through slots; see [Note:
// offers] in exchange.h.
//
// [Note: reading]
// Which mode is faster depends on the processor, on where the system runs the ranks, and on the size. Two ranks that
// each read 4 MiB from the other, in us: 440 directly and 650 staged on one processor; on another 950 and 630 where
// both shared one cache. So rank 0 times both, and with each call it announces the mode of the next call of that kind.
// All ranks receive it in the same call, so all use the same mode; where ranks disagree, because the parts of an
// all_to_all differ in size, nothing is read directly. The time of such a call also counts for the mode that rank 0
// offered: so rank 0 again offers the mode that leads to the faster outcome.
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
    static constexpr Choice direct_read = Choice::first;
    static constexpr Choice staged_copy = Choice::second;

    // A kind: calls of one operation and of about the same size.
    using Kind = std::uint32_t;
    static constexpr std::size_t num_sizes = 13;              // each twice the one before
    static constexpr std::size_t num_kinds = 10 * num_sizes;  // for each operation

    static Kind kind_of(Operation operation, std::size_t read_size) {
        const auto size = static_cast<std::size_t>(std::bit_width(read_size));
        const std::size_t size_index = std::clamp(size, smallest, smallest + num_sizes - 1) - smallest;
        return static_cast<Kind>(static_cast<std::size_t>(operation) * num_sizes + size_index);
    }

    // The mode of a call of this kind.
    [[nodiscard]] Choice choice_for(Kind kind) const { return choices_[kind]; }

    // Rank 0's announcement in a call: never 0.
    [[nodiscard]] std::uint64_t advise(Kind kind) {
        return kind << 2 | static_cast<std::uint64_t>(tuners_[kind].next()) << 1 | 1;
    }
    // Applies rank 0's announcement. It comes from another process and may hold any value.
    void follow(std::uint64_t advice) {
        if ((advice & 1) != 0 && advice >> 2 < num_kinds) choices_[advice >> 2] = static_cast<Choice>(advice >> 1 & 1);
    }

    void record(Kind kind, Choice choice, double seconds, std::size_t size) {
        tuners_[kind].record(choice, seconds, size);
    }

private:
    static constexpr std::size_t smallest = 16;  // bit width of the smallest autotuned size

    std::array<Choice, num_kinds> choices_{};
    std::vector<TwoWayAutotuner> tuners_ = std::vector<TwoWayAutotuner>(num_kinds, TwoWayAutotuner{1.1, 32});
};

}  // namespace ferrodist
