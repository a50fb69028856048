// Points in time by which a blocking call must return.
#pragma once

#include <chrono>
#include <optional>

namespace ferrodist {

using Clock = std::chrono::steady_clock;

// The clock is first read when somebody asks: what ends at once never does. That makes a deadline later by the time it
// takes to get to the first question, some microseconds. For one thread.
class Deadline {
public:
    // `seconds` may be infinite; what the clock can't hold is cut to about thirty years.
    explicit Deadline(double seconds) : seconds_(seconds) {}

    [[nodiscard]] bool expired() const { return Clock::now() >= end(); }
    [[nodiscard]] Clock::duration remaining() const { return end() - Clock::now(); }
    [[nodiscard]] Clock::time_point end() const { return start() + to_duration(seconds_); }
    [[nodiscard]] double seconds() const noexcept { return seconds_; }
    [[nodiscard]] double elapsed_seconds() const { return std::chrono::duration<double>(Clock::now() - start()).count(); }

private:
    static Clock::duration to_duration(double seconds) {
        constexpr double longest = 1e9;
        const double bounded = seconds < longest ? (seconds > 0.0 ? seconds : 0.0) : longest;
        return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(bounded));
    }

    [[nodiscard]] Clock::time_point start() const {
        if (!start_) start_ = Clock::now();
        return *start_;
    }

    double seconds_;
    mutable std::optional<Clock::time_point> start_;
};

}  // namespace ferrodist
