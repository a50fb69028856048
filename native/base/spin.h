// How long a thread that waits spins before it sleeps.
//
// [Note: spinning]
// On virtual machines a wake-up takes 40 to 200 us. A rank that sleeps and is woken so late makes the others sleep, too,
// who are then late in turn: so ranks spin longer than that. But where other programs want the processor, too, spinning
// uses up a share of it that a sleeper keeps, and by which it is run at once when it is woken. And what is waited for may
// need this very processor: the system likes to wake a rank where it is waited for. So while it spins a thread gives way
// now and then; in a group with more ranks than processors at every look. When that takes long, somebody else has run: it
// sleeps, and for a while spins are short. Two ranks on two processors that ten other programs used, too, allreduce of
// 1 MiB, medians in us: 2100 where they spun for 300 us in any case, 570 where for 50.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "base/deadline.h"
#include "base/processor.h"

namespace ferrodist {

// What the spins of one process learn from each other.
class Contention {
public:
    [[nodiscard]] bool is_seen(Clock::time_point now) const noexcept {
        return now.time_since_epoch().count() < until_.load(std::memory_order_relaxed);
    }
    void note(Clock::time_point now) noexcept {
        until_.store((now + std::chrono::milliseconds(50)).time_since_epoch().count(), std::memory_order_relaxed);
    }

private:
    std::atomic<Clock::rep> until_{0};  // a hint: nothing is ordered by it
};

class Spin {
public:
    struct Manner {
        int pauses_a_look;
        int looks_a_yield;                       // never where it is 0
        std::chrono::microseconds somebody_ran;  // so long another rank does not keep a processor that it was given
        std::chrono::microseconds short_spin;
    };
    static constexpr Manner alone{32, 8, std::chrono::microseconds(100), std::chrono::microseconds(50)};
    // In a group with more ranks than processors.
    static constexpr Manner crowded{4, 1, std::chrono::microseconds(1000), std::chrono::microseconds(15)};
    // On connections; see [Note: spinning on connections].
    static constexpr Manner steady{16, 0, std::chrono::microseconds(1000), std::chrono::microseconds(50)};

    // `longest` where nobody else wants the processor.
    Spin(Contention& contention, std::chrono::microseconds longest, const Manner& manner)
        : contention_(contention), longest_(longest), manner_(manner) {}

    // Pauses between two questions whether to go on, where nothing else takes time between them.
    [[nodiscard]] int pauses_a_look() const noexcept { return manner_.pauses_a_look; }

    // What it waits for has come nearer.
    void restart() noexcept { num_looks_ = 0; }

    [[nodiscard]] bool goes_on() {
        auto now = Clock::now();
        if (num_looks_ == 0) {
            end_ = now + (contention_.is_seen(now) ? std::min(longest_, manner_.short_spin) : longest_);
            last_look_ = now;
        }
        auto since = std::exchange(last_look_, now);
        if (++num_looks_; manner_.looks_a_yield != 0) {
            since = now;  // what else stopped this thread, as a hypervisor may, wants no processor of its
            if (num_looks_ % manner_.looks_a_yield == 0) {
                give_way();
                now = Clock::now();
            }
        }
        if (now - since <= manner_.somebody_ran) return now < end_;
        contention_.note(now);
        return false;
    }

private:
    Contention& contention_;
    std::chrono::microseconds longest_;
    const Manner& manner_;
    Clock::time_point end_{};
    Clock::time_point last_look_{};
    int num_looks_ = 0;
};

}  // namespace ferrodist
