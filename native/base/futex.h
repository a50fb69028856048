// Wrappers of the futex system call.
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

#include "base/deadline.h"

namespace ferrodist {

// Which threads may sleep on a word: those of this process, or those of all processes that map its memory, each at an
// address of its own.
enum class FutexScope : int { process = FUTEX_PRIVATE_FLAG, host = 0 };

inline constexpr std::uint32_t any_bit = FUTEX_BITSET_MATCH_ANY;

// Sleeps while `word` is `seen`, for at most `timeout`, with the wake mask `bits`. May return spuriously.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds timeout,
                       FutexScope sleepers, std::uint32_t bits = any_bit) noexcept {
    // FUTEX_WAIT_BITSET takes an absolute time on the clock of `Clock`.
    const std::chrono::nanoseconds end =
        Clock::now().time_since_epoch() + std::max(timeout, std::chrono::nanoseconds(0));
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(end);
    const timespec until{.tv_sec = static_cast<std::time_t>(seconds.count()),
                         .tv_nsec = static_cast<long>((end - seconds).count())};
    ::syscall(SYS_futex, &word, FUTEX_WAIT_BITSET | static_cast<int>(sleepers), seen, &until, nullptr, bits);
}

// Wakes the threads that sleep with one of `bits` in their mask.
inline void futex_wake(std::atomic<std::uint32_t>& word, FutexScope sleepers, std::uint32_t bits = any_bit) noexcept {
    ::syscall(SYS_futex, &word, FUTEX_WAKE_BITSET | static_cast<int>(sleepers), INT_MAX, nullptr, nullptr, bits);
}

}  // namespace ferrodist
