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

// Lets another thread have the processor, if one wants it.
inline void give_way() noexcept {
    ::sched_yield();
}

}  // namespace ferrodist
