// A point in time by which a blocking call must return.
#pragma once

#include <chrono>
#include <optional>

namespace ferrodist {

using Clock = std::chrono::steady_clock;

// A deadline whose clock starts at the first query, so that calls that end at once never read the clock. The deadline
// is later by the time until that query, some microseconds. For one thread.
class Deadline {
public:
    // `seconds` may be infinite; values beyond the clock's range are cut to about thirty years.
    explicit Deadline(double seconds) : seconds_(seconds) {}

    [[nodiscard]] bool expired() const { return Clock::now() >= end(); }
    [[nodiscard]] Clock::duration remaining() const { return end() - Clock::now(); }
    [[nodiscard]] Clock::time_point end() const { return start() + to_duration(seconds_); }
    [[nodiscard]] double seconds() const noexcept { return seconds_; }
    [[nodiscard]] double elapsed_seconds() const {
        return std::chrono::duration<double>(Clock::now() - start()).count();
    }

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
