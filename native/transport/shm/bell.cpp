#include "transport/shm/bell.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ctime>

#include "base/deadline.h"

namespace ferrodist::shm {

// Neither call is FUTEX_PRIVATE: the word lies at another address in each process.

void Bell::wake(std::uint32_t whom) {
    if (whom == 0) return;
    word.fetch_add(1);
    ::syscall(SYS_futex, &word, FUTEX_WAKE_BITSET, INT32_MAX, nullptr, nullptr, whom);
}

void Bell::sleep(std::uint32_t seen, std::uint32_t as, std::chrono::nanoseconds longest) {
    // This form of the call takes a point in time, on the clock of `Clock`.
    using std::chrono::nanoseconds;
    using std::chrono::seconds;
    const nanoseconds end = Clock::now().time_since_epoch() + longest;
    const auto whole = std::chrono::duration_cast<seconds>(end);
    const timespec until{.tv_sec = static_cast<std::time_t>(whole.count()),
                         .tv_nsec = static_cast<long>((end - whole).count())};
    ::syscall(SYS_futex, &word, FUTEX_WAIT_BITSET, seen, &until, nullptr, as);
}

}  // namespace ferrodist::shm
