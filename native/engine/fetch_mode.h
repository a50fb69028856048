// The choice of how a large message comes from a rank of this host: read in the sender's memory, or through the ring.
//
// [Note: fetching]
// Reading copies each byte once, by the receiver alone; through the ring both ranks copy, at the same time. Where both
// caches hold the message, or both ranks are busy with one in each direction, reading is faster: in us, of 512 KiB, 32
// and 64; of 8 MiB in both directions, 1430 and 2090. Of 8 MiB in one direction it took 1370 and 960. Which is faster
// depends on the processor, too, so a receiver times both.
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
        std::size_t kind = 0;
        Choice choice = in_place;
        Clock::time_point began;
    };

    // `is_sending`: whether this rank is sending to the other one, too.
    [[nodiscard]] Fetch begin(std::size_t size, bool is_sending) {
        const auto width = static_cast<std::size_t>(std::bit_width(size));
        const std::size_t kind = 2 * (std::clamp(width, least_width, most_width) - least_width) + (is_sending ? 1 : 0);
        return {.kind = kind, .choice = tuners_[kind].next(), .began = Clock::now()};
    }
    void end(const Fetch& fetch, std::size_t size) {
        const std::chrono::duration<double> time = Clock::now() - fetch.began;
        tuners_[fetch.kind].record(fetch.choice, time.count(), size);
    }

private:
    static constexpr std::size_t least_width = 18;  // bits of the size
    static constexpr std::size_t most_width = 30;

    std::vector<TwoWayAutotuner> tuners_ =
        std::vector<TwoWayAutotuner>(2 * (most_width - least_width + 1), TwoWayAutotuner{1.1, 32});
};

}  // namespace ferrodist
