// The choice of how a large message comes from a rank of this host: read in the sender's memory, or through the ring.
//
// [Note: fetching]
// Reading copies each byte once, by the receiver alone; through the ring both ranks copy, at the same time. Where both
// ranks have a message for each other, both are busy anyway, and reading is faster: of 8 MiB, 910 us and 1550. They must
// agree, too: the time of one that takes the ring while the other reads says nothing. In one direction it depends on the
// size and the processor (in us, of 512 KiB, 32 and 64; of 8 MiB, 1370 and 960), so a receiver times both.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/deadline.h"
#include "base/two_way_autotuner.h"

namespace ferrodist {

// For one thread at a time.
class FetchMode {
public:
    static constexpr Choice in_place = Choice::first;
    static constexpr Choice through_ring = Choice::second;

    // One message: how it comes, and since when.
    struct Fetch {
        std::size_t width = 0;  // bits of its size, within the limits below
        Choice choice = in_place;
        Clock::time_point began;
    };

    // For a message from a rank to which this one sends nothing.
    [[nodiscard]] Fetch begin(std::size_t size) {
        const std::size_t width = std::clamp(static_cast<std::size_t>(std::bit_width(size)), least_width, most_width);
        return {.width = width, .choice = tuners_[width - least_width].next(), .began = Clock::now()};
    }
    void end(const Fetch& fetch, std::size_t size) {
        const std::chrono::duration<double> time = Clock::now() - fetch.began;
        tuners_[fetch.width - least_width].record(fetch.choice, time.count(), size);
    }

private:
    static constexpr std::size_t least_width = 18;
    static constexpr std::size_t most_width = 30;

    std::vector<TwoWayAutotuner> tuners_ =
        std::vector<TwoWayAutotuner>(most_width - least_width + 1, TwoWayAutotuner{1.1, 32});
};

}  // namespace ferrodist
