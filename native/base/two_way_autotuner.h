// Which of two ways is gone, from how long each has taken.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace ferrodist {

enum class Way : unsigned char { first, second };

constexpr Way other(Way way) {
    return way == Way::first ? Way::second : Way::first;
}

class TwoWayAutotuner {
public:
    // The second way is gone where it has been `least_gain` times as fast; one time in `trial_period` the other one than the
    // better is gone, for both are to be known.
    constexpr TwoWayAutotuner(double least_gain, unsigned trial_period) : least_gain_(least_gain), trial_period_(trial_period) {}

    [[nodiscard]] Way better() const noexcept {
        return recent_[0].best() > least_gain_ * recent_[1].best() ? Way::second : Way::first;
    }

    [[nodiscard]] Way next() noexcept {
        return ++num_asked_ % trial_period_ == 0 ? other(better()) : better();
    }

    // Takes note of `size` bytes that went a way.
    void took(Way way, double seconds, std::size_t size) noexcept {
        Recent& recent = recent_[static_cast<std::size_t>(way)];
        recent.seconds_a_byte[recent.next++ % recent.seconds_a_byte.size()] = seconds / static_cast<double>(size);
    }

private:
    // The best of the last few counts: whoever is stopped in the middle takes longer, and nobody is faster by accident.
    struct Recent {
        std::array<double, 4> seconds_a_byte{};  // 0 before it is known, so it is tried
        unsigned next = 0;

        [[nodiscard]] double best() const noexcept { return *std::ranges::min_element(seconds_a_byte); }
    };

    double least_gain_;
    unsigned trial_period_;
    unsigned num_asked_ = 0;
    std::array<Recent, 2> recent_;
};

}  // namespace ferrodist
