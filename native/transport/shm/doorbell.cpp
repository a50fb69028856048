#include "transport/shm/doorbell.h"

#include "base/futex.h"

namespace ferrodist::shm {

void Doorbell::wake(std::uint32_t whom) {
    if (whom == 0) return;
    word.fetch_add(1);
    futex_wake(word, Sleepers::of_host, whom);
}

void Doorbell::sleep(std::uint32_t seen, std::uint32_t as, std::chrono::nanoseconds longest) {
    futex_wait(word, seen, longest, Sleepers::of_host, as);
}

}  // namespace ferrodist::shm
