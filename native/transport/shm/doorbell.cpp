#include "transport/shm/doorbell.h"

#include "base/futex.h"

namespace ferrodist::shm {

void Doorbell::wake(std::uint32_t bits) {
    if (bits == 0) return;
    word.fetch_add(1);
    futex_wake(word, FutexScope::host, bits);
}

void Doorbell::sleep(std::uint32_t seen, std::uint32_t bits, std::chrono::nanoseconds longest) {
    futex_wait(word, seen, longest, FutexScope::host, bits);
}

}  // namespace ferrodist::shm
