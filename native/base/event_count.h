// An event count: threads of one process sleep on it until another thread signals a change. Unlike a condition variable
// it may be destroyed in a forked child while a thread of the parent sleeps on it: the child has no such thread and
// nobody to wait for.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "base/futex.h"

namespace ferrodist {

class EventCount {
public:
    // The current count. Read it before checking the condition to wait for.
    [[nodiscard]] std::uint32_t current() const noexcept { return word_.load(); }

    // Sleeps until `notify_all` is called after `seen` was read, or until `timeout` has passed.
    void wait(std::uint32_t seen, std::chrono::nanoseconds timeout) noexcept {
        // Partner: `notify_all` changes the word before it loads the number of sleepers; all operations are
        // sequentially consistent. So either it sees this thread counted, or the kernel sees that the word has changed.
        num_asleep_.fetch_add(1);
        futex_wait(word_, seen, timeout, FutexScope::process);
        num_asleep_.fetch_sub(1);
    }

    void notify_all() noexcept {
        word_.fetch_add(1);
        if (num_asleep_.load() != 0) futex_wake(word_, FutexScope::process);
    }

private:
    std::atomic<std::uint32_t> word_{0};
    std::atomic<std::uint32_t> num_asleep_{0};
};

}  // namespace ferrodist
