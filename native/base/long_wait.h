// Who is told of ranks that a collective has waited for in vain for a long time, while it goes on waiting.
#pragma once

#include <cstdint>
#include <functional>
#include <limits>
#include <vector>

#include "base/deadline.h"

namespace ferrodist {

struct LongWait {
    double seconds = std::numeric_limits<double>::infinity();
    // Called in the waiting thread, once in a wait, with the collective's sequence, the ranks that are late, and its deadline.
    std::function<void(std::uint64_t, const std::vector<int>&, const Deadline&)> tell;

    // One wait, whose deadline began with the call.
    class Watch {
    public:
        Watch(const LongWait& long_wait, std::uint64_t sequence) : long_wait_(long_wait), sequence_(sequence) {}

        void look(const Deadline& deadline, const std::vector<int>& late) {
            if (is_told_ || deadline.elapsed_seconds() < long_wait_.seconds) return;
            is_told_ = true;
            long_wait_.tell(sequence_, late, deadline);
        }

    private:
        const LongWait& long_wait_;
        std::uint64_t sequence_;
        bool is_told_ = false;
    };
};

}  // namespace ferrodist
