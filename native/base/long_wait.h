// The callback for collectives that have waited for other ranks for a long time. The wait goes on.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "base/deadline.h"

namespace ferrodist {

struct LongWait {
    double seconds = std::numeric_limits<double>::infinity();
    // Called in the waiting thread, once per wait, with the collective's sequence, the stragglers, and the deadline.
    std::function<void(std::uint64_t, const std::vector<int>&, const Deadline&)> notify;

    // The state of one wait, whose deadline began with the call.
    class Watch {
    public:
        Watch(const LongWait& long_wait, std::uint64_t sequence) : long_wait_(long_wait), sequence_(sequence) {}

        void check(const Deadline& deadline, const std::vector<int>& stragglers) {
            if (has_notified_ || deadline.elapsed_seconds() < long_wait_.seconds) return;
            has_notified_ = true;
            long_wait_.notify(sequence_, stragglers, deadline);
        }

    private:
        const LongWait& long_wait_;
        std::uint64_t sequence_;
        bool has_notified_ = false;
    };
};

}  // namespace ferrodist
