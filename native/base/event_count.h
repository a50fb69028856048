// What threads of one process sleep on until something has changed. Unlike a condition variable it may go, in a forked
// child, while a thread of the parent's sleeps on it; the child has no such thread, and nobody to wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/futex.h"

namespace ferrodist {

class EventCount {
public:
    // To be read before one looks at what one waits for.
    [[nodiscard]] std::uint32_t current() const noexcept { return word_.load(); }

    // Sleeps for at most `longest`, or until `notify_all` is called after `seen` was read.
    void wait(std::uint32_t seen, std::chrono::nanoseconds longest) noexcept {
        // Partner: `notify_all` changes the word before it looks for sleepers, all of it sequentially consistent. Either it
        // sees this one counted, or the kernel sees that the word has changed.
        num_asleep_.fetch_add(1);
        futex_wait(word_, seen, longest, Sleepers::of_process);
        num_asleep_.fetch_sub(1);
    }

    void notify_all() noexcept {
        word_.fetch_add(1);
        if (num_asleep_.load() != 0) futex_wake(word_, Sleepers::of_process);
    }

private:
    std::atomic<std::uint32_t> word_{0};
    std::atomic<std::uint32_t> num_asleep_{0};
};

}  // namespace ferrodist
