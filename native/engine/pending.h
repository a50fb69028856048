// The completion state of a collective that was started asynchronously.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#include "base/deadline.h"
#include "base/event_count.h"

namespace ferrodist {

class Pending {
public:
    explicit Pending(std::uint64_t ticket) : ticket_(ticket) {}

    // The collective's ticket in its group.
    [[nodiscard]] std::uint64_t ticket() const noexcept { return ticket_; }

    [[nodiscard]] bool is_done() const noexcept { return is_done_.load(); }

    // Blocks until the collective has ended; false after `timeout` seconds. Throws its Failure, each time. Thread-safe.
    bool wait(double timeout);

    // Completes the collective, with a Failure unless `failure` is null. Called once.
    void finish(std::exception_ptr failure);

private:
    std::uint64_t ticket_;
    EventCount ended_;
    std::atomic<bool> is_done_{false};  // stored after `failure_`, which is not written again
    std::exception_ptr failure_;
};

}  // namespace ferrodist
