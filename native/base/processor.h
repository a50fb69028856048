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

// Has the system run this thread on another of its processors, if it may use any.
inline void move_away() noexcept {
    cpu_set_t usable;
    if (::sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) < 2) return;
    const int here = ::sched_getcpu();
    if (here < 0 || here >= CPU_SETSIZE) return;
    cpu_set_t others = usable;
    CPU_CLR(static_cast<unsigned>(here), &others);
    if (::sched_setaffinity(0, sizeof others, &others) == 0) ::sched_setaffinity(0, sizeof usable, &usable);
}

}  // namespace ferrodist
