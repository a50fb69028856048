// A collective that was started and not waited for.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#include "base/deadline.h"
#include "base/event_count.h"

namespace ferrodist {

class Pending {
public:
    explicit Pending(std::uint64_t place) : place_(place) {}

    // Where it stands among the collectives of its group.
    [[nodiscard]] std::uint64_t place() const noexcept { return place_; }

    [[nodiscard]] bool is_done() const noexcept { return is_done_.load(); }

    // Blocks until it has ended; false when `timeout` seconds have passed before. Throws the Failure it ended with, each
    // time. Any number of threads may wait.
    bool wait(double timeout);

    // Ends it, with a Failure unless that is null. Called once.
    void finish(std::exception_ptr failure);

private:
    std::uint64_t place_;
    EventCount ended_;
    std::atomic<bool> is_done_{false};  // stored after `failure_`, which is not written again
    std::exception_ptr failure_;
};

}  // namespace ferrodist
