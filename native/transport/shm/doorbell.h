// A rank's doorbell: a word in shared memory that its threads sleep on, and that other ranks ring when they have put
// something where this rank looks.
//
// [Note: asleep]
// A sleeper sets its bit in `asleep`, reads `word`, looks once more for what it waits for, and sleeps only while `word` is
// what it read. Whoever puts something there does so first and reads `asleep` after; all of this is sequentially
// consistent, so either the sleeper finds it or it is rung for. Ringing clears `asleep`: what follows is written without a
// system call until the sleeper has asked again. A killed rank leaves a bit behind, for which it is rung once.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "transport/shm/segment.h"

namespace ferrodist::shm {

// Who sleeps: bits of `Doorbell::asleep`.
inline constexpr std::uint32_t waiter = 1;  // threads that wait for a transfer
inline constexpr std::uint32_t keeper = 2;  // the thread that moves messages when nobody waits

struct alignas(line_bytes) Doorbell {
    std::atomic<std::uint32_t> word;
    std::atomic<std::uint32_t> asleep;

    // Wakes those who have asked to be; see [Note: asleep].
    void ring() {
        if (asleep.load() != 0) wake(asleep.exchange(0));
    }

    // Wakes these sleepers, whether they have asked or not.
    void wake(std::uint32_t whom);

    // Sleeps while `word` is `seen`, for at most `longest`.
    void sleep(std::uint32_t seen, std::uint32_t as, std::chrono::nanoseconds longest);
};
static_assert(sizeof(Doorbell) == line_bytes);

}  // namespace ferrodist::shm
