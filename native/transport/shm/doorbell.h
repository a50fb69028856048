// A rank's doorbell for point-to-point messages: a futex word in shared memory that its threads sleep on, and that
// other ranks ring when they have written something for it. Collectives have a bell for all ranks (group_memory.cpp).
//
// [Note: asleep]
// A sleeper sets its bit in `asleep`, reads `word`, checks its condition once more, and sleeps only while `word` is
// unchanged. A writer writes first and reads `asleep` after; all of this is sequentially consistent, so either the
// sleeper finds what was written or the writer rings. Ringing clears the bits that it wakes: later writes make no system
// call until the sleeper sets its bit again. A killed rank leaves a bit behind, which costs one ring.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

#include "transport/shm/group_memory.h"

namespace ferrodist::shm {

// Kinds of sleepers: bits of `Doorbell::asleep`.
inline constexpr std::uint32_t waiter = 1;           // threads that wait for a transfer
inline constexpr std::uint32_t progress_thread = 2;  // the thread that moves messages when no thread waits
inline constexpr std::uint32_t on_full_ring = 4;     // the same thread while it need only empty rings that are full

struct alignas(line_bytes) Doorbell {
    std::atomic<std::uint32_t> word;
    std::atomic<std::uint32_t> asleep;
    std::atomic<std::int32_t> processor;  // one more than that on which the rank waited last; 0: unknown. A hint.

    // Wake the sleepers that have set their bit, after a write and after a write that has found no space; see
    // [Note: asleep].
    void ring() { ring(waiter | progress_thread); }
    void ring_for_space() { ring(on_full_ring); }

    // Wakes the sleepers of `bits`, whether their bit is set or not.
    void wake(std::uint32_t bits);

    // Sleeps while `word` is `seen`, for at most `longest`.
    void sleep(std::uint32_t seen, std::uint32_t bits, std::chrono::nanoseconds longest);

private:
    void ring(std::uint32_t bits) {
        if ((asleep.load() & bits) != 0) wake(asleep.fetch_and(~bits) & bits);
    }
};
static_assert(sizeof(Doorbell) == line_bytes);

}  // namespace ferrodist::shm
