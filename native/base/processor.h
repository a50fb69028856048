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

// Moves this thread off the processors of `avoided`, if it may use any other.
inline void migrate_thread(const cpu_set_t& avoided) noexcept {
    cpu_set_t usable;
    if (::sched_getaffinity(0, sizeof usable, &usable) != 0) return;
    cpu_set_t others;
    CPU_AND(&others, &usable, &avoided);
    CPU_XOR(&others, &usable, &others);
    if (CPU_COUNT(&others) == 0) return;
    if (::sched_setaffinity(0, sizeof others, &others) == 0) ::sched_setaffinity(0, sizeof usable, &usable);
}

// Moves this thread to another processor, if it may use more than one.
inline void migrate_thread() noexcept {
    const int here = ::sched_getcpu();
    if (here < 0 || here >= CPU_SETSIZE) return;
    cpu_set_t avoided;
    CPU_ZERO(&avoided);
    CPU_SET(static_cast<unsigned>(here), &avoided);
    migrate_thread(avoided);
}

}  // namespace ferrodist
