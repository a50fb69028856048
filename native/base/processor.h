// CPU hints and scheduling calls for spinning threads.
#pragma once

#include <sched.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ferrodist {

// Pauses for about 20 to 60 ns on x86-64; a hint without a fixed length elsewhere.
inline void relax() noexcept {
#if defined(__x86_64__)
    _mm_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb" ::: "memory");  // `yield` is a no-op on most cores
#endif
}

// Yields the processor to another runnable thread, if there is one.
inline void yield_processor() noexcept {
    ::sched_yield();
}

// Moves this thread to another processor, if it may use more than one.
inline void migrate_thread() noexcept {
    cpu_set_t usable;
    if (::sched_getaffinity(0, sizeof usable, &usable) != 0 || CPU_COUNT(&usable) < 2) return;
    const int here = ::sched_getcpu();
    if (here < 0 || here >= CPU_SETSIZE) return;
    cpu_set_t others = usable;
    CPU_CLR(static_cast<unsigned>(here), &others);
    if (::sched_setaffinity(0, sizeof others, &others) == 0) ::sched_setaffinity(0, sizeof usable, &usable);
}

}  // namespace ferrodist
