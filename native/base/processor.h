// What the processor is told while a thread spins.
#pragma once

#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ferrodist {

// About 20 to 60 ns on x86-64; a hint without a fixed length elsewhere.
inline void relax() noexcept {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");  // `yield` is a no-op on most cores
#endif
}

// Where ranks share processors whoever is waited for may need this one: after some pauses it is given away, until a program
// of somebody else's takes it for long, and at most so often. Four ranks on two processors meet in 4 us this way, in 19 with
// ten yields, and slower where each sleeps and is woken: docs/decisions/0010-giving-way-where-cores-are-short.md.
inline constexpr int crowded_pauses = 8;
inline constexpr int crowded_yields = 30;

// Lets another thread have the processor, if one wants it.
inline void give_way() noexcept {
    ::sched_yield();
}

}  // namespace ferrodist
