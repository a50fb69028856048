// Sleeping on a word and being woken: the kernel's futex, in one place.
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

// Who may sleep on a word: the threads of this process, or those of all that have its memory mapped, each at an address of
// its own.
enum class Sleepers : int { of_process = FUTEX_PRIVATE_FLAG, of_host = 0 };

inline constexpr std::uint32_t everybody = FUTEX_BITSET_MATCH_ANY;

// Sleeps while `word` is `seen`, for at most `longest`, as one of those that have a bit of `as`. It may return earlier.
inline void futex_wait(std::atomic<std::uint32_t>& word, std::uint32_t seen, std::chrono::nanoseconds longest,
                       Sleepers sleepers, std::uint32_t as = everybody) noexcept {
    // This form of the call takes a point in time, on the clock of `Clock`.
    const std::chrono::nanoseconds end = Clock::now().time_since_epoch() + std::max(longest, std::chrono::nanoseconds(0));
    const auto whole = std::chrono::duration_cast<std::chrono::seconds>(end);
    const timespec until{.tv_sec = static_cast<std::time_t>(whole.count()),
                         .tv_nsec = static_cast<long>((end - whole).count())};
    ::syscall(SYS_futex, &word, FUTEX_WAIT_BITSET | static_cast<int>(sleepers), seen, &until, nullptr, as);
}

// Wakes those that sleep with a bit of `whom`.
inline void futex_wake(std::atomic<std::uint32_t>& word, Sleepers sleepers, std::uint32_t whom = everybody) noexcept {
    ::syscall(SYS_futex, &word, FUTEX_WAKE_BITSET | static_cast<int>(sleepers), INT_MAX, nullptr, nullptr, whom);
}

}  // namespace ferrodist
