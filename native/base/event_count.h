// What threads of one process sleep on until something has changed. Unlike a condition variable it may go, in a forked
// child, while a thread of the parent's sleeps on it; the child has no such thread, and nobody to wait for.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <ctime>

namespace ferrodist {

class EventCount {
public:
    // To be read before one looks at what one waits for.
    [[nodiscard]] std::uint32_t current() const noexcept { return word_.load(); }

    // Sleeps for at most `longest`, or until `notify_all` is called after `seen` was read.
    void wait(std::uint32_t seen, std::chrono::nanoseconds longest) noexcept {
        const auto nanoseconds = std::max<std::int64_t>(longest.count(), 0);
        const timespec timeout{.tv_sec = static_cast<std::time_t>(nanoseconds / 1'000'000'000),
                               .tv_nsec = static_cast<long>(nanoseconds % 1'000'000'000)};
        // Partner: `notify_all` changes the word before it looks for sleepers, all of it sequentially consistent. Either it
        // sees this one counted, or the kernel sees that the word has changed.
        num_asleep_.fetch_add(1);
        ::syscall(SYS_futex, &word_, FUTEX_WAIT_PRIVATE, seen, &timeout, nullptr, 0);
        num_asleep_.fetch_sub(1);
    }

    void notify_all() noexcept {
        word_.fetch_add(1);
        if (num_asleep_.load() != 0) ::syscall(SYS_futex, &word_, FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

private:
    std::atomic<std::uint32_t> word_{0};
    std::atomic<std::uint32_t> num_asleep_{0};
};

}  // namespace ferrodist
