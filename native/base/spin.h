// How long a thread that waits spins before it sleeps.
//
// [Note: spinning]
// On virtual machines a wake-up takes 40 to 200 us. A rank that sleeps and is woken so late makes the others sleep, too,
// who are then late in turn: so ranks spin longer than that. But where other programs want the processor, too, spinning
// uses up a share of it that a sleeper keeps, and by which it is run at once when it is woken. And what is waited for may
// need this very processor: the system likes to wake a rank where it is waited for. So while it spins a thread gives way
// now and then; in a group with more ranks than processors at every look at the clock. When that takes long, somebody else has run: it
// sleeps, and for a while spins are short. Two ranks on two processors that ten other programs used, too, allreduce of
// 1 MiB, medians in us: 2100 where they spun for 300 us in any case, 570 where for 50.
//
// [Note: moving]
// The system sometimes runs two ranks on one processor while another one is idle: on a virtual machine it does not take a
// halted processor for idle when it wakes a thread. Ranks that give way to each other leave it no reason to part them, for
// seconds: of 250 batches of allreduces of 64 KiB to 1 MiB a quarter ran so, in twice the time. So a rank whose yields
// again and again take as long as another's turn asks to be run elsewhere, once: it takes this processor out of those
// that its thread may use, and puts it back. Of 744 batches none ran so then. How many yields that takes differs from
// thread to thread, so that two do not both go.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "base/deadline.h"
#include "base/processor.h"

namespace ferrodist {

// What spins learn from each other: those of one segment, of one group between hosts, of one messenger.
class Contention {
public:
    [[nodiscard]] bool is_seen(Clock::time_point now) const noexcept {
        return now.time_since_epoch().count() < until_.load(std::memory_order_relaxed);
    }
    void note(Clock::time_point now) noexcept {
        until_.store((now + std::chrono::milliseconds(50)).time_since_epoch().count(), std::memory_order_relaxed);
    }

    // Whether it is time to go elsewhere, after a yield that took so long: see [Note: moving].
    [[nodiscard]] bool should_move(Clock::duration gone) noexcept {
        constexpr auto alone = std::chrono::microseconds(3);
        if (gone < alone) {
            num_shared_.store(0, std::memory_order_relaxed);
            return false;
        }
        if (num_shared_.fetch_add(1, std::memory_order_relaxed) < most_shared_) return false;
        num_shared_.store(0, std::memory_order_relaxed);
        return true;
    }

private:
    std::atomic<Clock::rep> until_{0};  // hints: nothing is ordered by them
    std::atomic<int> num_shared_{0};
    int most_shared_ = 4 + 4 * static_cast<int>(::gettid() % 4);
};

// One wait's. After each try that found nothing: `tries_again()`; when that is false it is time to sleep, until `restart`.
class Spin {
public:
    struct Manner {
        int tries_a_look;                        // at the clock
        int looks_a_yield;                       // never where it is 0
        std::chrono::microseconds somebody_ran;  // a rank's thread gives a processor back sooner
        std::chrono::microseconds short_spin;
        bool moves;  // to another processor, where it shares one for long
    };
    // For flags in memory, with a pause after each try.
    static constexpr Manner on_flags{32, 8, std::chrono::microseconds(100), std::chrono::microseconds(50), true};
    // For messages, where a try looks at several rings.
    static constexpr Manner on_rings{16, 8, std::chrono::microseconds(100), std::chrono::microseconds(50), false};
    // For connections, where a try makes system calls. A thread that never gives way is stopped by who else wants its
    // processor, which shows between two looks; so does a hypervisor's stop, which is taken for the same.
    static constexpr Manner on_connections{16, 0, std::chrono::microseconds(1000), std::chrono::microseconds(50), false};
    // For all of these in a group with more ranks than processors.
    static constexpr Manner crowded{4, 1, std::chrono::microseconds(1000), std::chrono::microseconds(15), false};

    // `longest` where nobody else wants the processor. `work` is how many of what the manner has in mind a try looks at.
    Spin(Contention& contention, std::chrono::microseconds longest, const Manner& manner, int work = 1)
        : contention_(contention), longest_(longest), manner_(manner), tries_a_look_(std::max(1, manner.tries_a_look / work)) {}

    // What it waits for has come nearer.
    void restart() noexcept {
        num_tries_ = num_looks_ = 0;
        is_over_ = false;
    }

    [[nodiscard]] bool tries_again() {
        if (is_over_) return false;
        return ++num_tries_ % tries_a_look_ != 0 || looks_again();
    }

    // The same for a caller that makes `tries_a_look` at a time, and other things in between.
    [[nodiscard]] int tries_a_look() const noexcept { return tries_a_look_; }
    [[nodiscard]] bool looks_again() {
        auto now = Clock::now();
        if (num_looks_ == 0) {
            end_ = now + (contention_.is_seen(now) ? std::min(longest_, manner_.short_spin) : longest_);
            last_look_ = now;
        }
        auto since = std::exchange(last_look_, now);
        bool has_yielded = false;
        if (++num_looks_; manner_.looks_a_yield != 0) {
            since = now;
            has_yielded = num_looks_ % manner_.looks_a_yield == 0;
            if (has_yielded) {
                give_way();
                now = Clock::now();
            }
        }
        const bool somebody_ran = now - since > manner_.somebody_ran;
        if (somebody_ran) {
            contention_.note(now);
        } else if (manner_.moves && has_yielded && contention_.should_move(now - since)) {
            move_away();
        }
        is_over_ = somebody_ran || now >= end_;
        return !is_over_;
    }

private:
    Contention& contention_;
    std::chrono::microseconds longest_;
    const Manner& manner_;
    int tries_a_look_;
    Clock::time_point end_{};
    Clock::time_point last_look_{};
    int num_tries_ = 0;
    int num_looks_ = 0;
    bool is_over_ = false;
};

}  // namespace ferrodist
