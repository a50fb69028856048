// Runtime selection of the faster of two implementations, from measured times.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>

namespace ferrodist {

enum class Choice : unsigned char { first, second };

constexpr Choice other(Choice choice) {
    return choice == Choice::first ? Choice::second : Choice::first;
}

class TwoWayAutotuner {
public:
    // The second choice is used where it has been `min_speedup` times as fast. One call in `trial_period` uses the
    // slower choice, so that both stay measured.
    constexpr TwoWayAutotuner(double min_speedup, unsigned trial_period)
        : min_speedup_(min_speedup), trial_period_(trial_period) {}

    [[nodiscard]] Choice better() const noexcept {
        return recent_[0].best_seconds_per_byte() > min_speedup_ * recent_[1].best_seconds_per_byte() ? Choice::second
                                                                                                      : Choice::first;
    }

    [[nodiscard]] Choice next() noexcept { return ++num_calls_ % trial_period_ == 0 ? other(better()) : better(); }

    // Records that `size` bytes with one choice took `seconds`.
    void record(Choice choice, double seconds, std::size_t size) noexcept {
        Recent& recent = recent_[static_cast<std::size_t>(choice)];
        recent.seconds_per_byte[recent.next++ % recent.seconds_per_byte.size()] = seconds / static_cast<double>(size);
    }

private:
    // The best of the last few samples: a preempted call takes longer, but no call is faster by accident.
    struct Recent {
        std::array<double, 4> seconds_per_byte{};  // 0 until measured, so that the choice is tried
        unsigned next = 0;

        [[nodiscard]] double best_seconds_per_byte() const noexcept {
            return *std::ranges::min_element(seconds_per_byte);
        }
    };

    double min_speedup_;
    unsigned trial_period_;
    unsigned num_calls_ = 0;
    std::array<Recent, 2> recent_;
};

}  // namespace ferrodist
