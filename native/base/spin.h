// The spin phase of a wait: how long a thread polls before it sleeps.
//
// [Note: spinning]
// On virtual machines a wake-up takes 40 to 200 us. A rank that sleeps and is woken so late makes the others sleep,
// too, who are then late in turn: so ranks spin for longer than a wake-up takes. But where other programs need the
// processor, spinning uses up a scheduler share that a sleeper keeps, and for which it runs at once when it is woken.
// The awaited rank may even need this very processor: the scheduler likes to wake a thread next to its waker. So a
// spinning thread yields now and then; in a group with more ranks than processors, at every clock check. If a yield
// takes long, another thread has run: the thread goes to sleep, and spins are short for a while. Two ranks on two
// processors that ten other programs used, too, allreduce of 1 MiB, medians in us: 2100 with spins of 300 us in any
// case, 570 with 50.
//
// [Note: moving]
// The scheduler sometimes runs two ranks on one processor while another is idle: on a virtual machine it does not count
// a halted processor as idle when it wakes a thread. Ranks that yield to each other give it no reason to separate them,
// for seconds: of 250 batches of allreduces of 64 KiB to 1 MiB a quarter ran so, in twice the time. So a rank whose
// yields repeatedly take as long as another thread's time slice migrates, once: it removes its processor from its
// affinity mask and puts it back. After that none of 744 batches ran so. The number of yields that this takes differs
// between threads, so that two do not both migrate. Messages have a better sign: `P2PEngine::leave_shared_processor`.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "base/deadline.h"
#include "base/processor.h"

namespace ferrodist {

// Contention observed by spinning threads, shared by the waits of one group's memory, of one group between hosts, or of
// one P2P engine.
class Contention {
public:
    [[nodiscard]] bool is_seen(Clock::time_point now) const noexcept {
        return now.time_since_epoch().count() < until_.load(std::memory_order_relaxed);
    }
    void note(Clock::time_point now) noexcept {
        until_.store((now + std::chrono::milliseconds(50)).time_since_epoch().count(), std::memory_order_relaxed);
    }

    // Whether to migrate to another processor, after a yield that took `yield_time`; see [Note: moving].
    [[nodiscard]] bool should_migrate(Clock::duration yield_time) noexcept {
        constexpr auto alone = std::chrono::microseconds(3);
        if (yield_time < alone) {
            num_shared_yields_.store(0, std::memory_order_relaxed);
            return false;
        }
        if (num_shared_yields_.fetch_add(1, std::memory_order_relaxed) < max_shared_) return false;
        num_shared_yields_.store(0, std::memory_order_relaxed);
        return true;
    }

private:
    std::atomic<Clock::rep> until_{0};  // hints: they order nothing
    std::atomic<int> num_shared_yields_{0};
    int max_shared_ = 4 + 4 * static_cast<int>(::gettid() % 4);
};

// The spin phase of one wait. Call `should_retry()` after each poll that found nothing; once it is false, sleep until
// `restart`.
class Spin {
public:
    struct Policy {
        int tries_per_check;                        // polls per reading of the clock
        int checks_per_yield;                       // clock checks per yield; 0: never yield
        std::chrono::microseconds preemption_time;  // a longer yield means that another thread has run
        std::chrono::microseconds short_spin;
        bool may_migrate;  // whether to leave a processor that is shared for long
    };
    // For flags in memory, with a pause after each poll.
    static constexpr Policy on_flags{32, 8, std::chrono::microseconds(100), std::chrono::microseconds(50), true};
    // For messages, where a poll reads several rings.
    static constexpr Policy on_rings{16, 8, std::chrono::microseconds(100), std::chrono::microseconds(50), false};
    // For connections, where a poll makes system calls. A thread that never yields is preempted by whoever needs its
    // processor, which shows as a gap between two clock checks. A hypervisor's pause looks the same and is treated the
    // same.
    static constexpr Policy on_connections{16, 0, std::chrono::microseconds(1000), std::chrono::microseconds(50),
                                           false};
    // For all waits of a group with more ranks than processors.
    static constexpr Policy oversubscribed{4, 1, std::chrono::microseconds(1000), std::chrono::microseconds(15), false};

    // `longest` applies without contention. `work` is the number of rings or connections that one poll covers.
    Spin(Contention& contention, std::chrono::microseconds longest, const Policy& policy, int work = 1)
        : contention_(contention),
          longest_(longest),
          policy_(policy),
          tries_per_check_(std::max(1, policy.tries_per_check / work)) {}

    // Starts the spin phase anew: the wait has made progress.
    void restart() noexcept {
        num_tries_ = num_checks_ = 0;
        is_over_ = false;
    }

    [[nodiscard]] bool should_retry() {
        if (is_over_) return false;
        return ++num_tries_ % tries_per_check_ != 0 || check_clock();
    }

    // For callers that poll `tries_per_check` times by themselves, with other work in between.
    [[nodiscard]] int tries_per_check() const noexcept { return tries_per_check_; }
    [[nodiscard]] bool check_clock() {
        auto now = Clock::now();
        if (num_checks_ == 0) {
            end_ = now + (contention_.is_seen(now) ? std::min(longest_, policy_.short_spin) : longest_);
            last_check_ = now;
        }
        auto last = std::exchange(last_check_, now);
        bool has_yielded = false;
        if (++num_checks_; policy_.checks_per_yield != 0) {
            last = now;
            has_yielded = num_checks_ % policy_.checks_per_yield == 0;
            if (has_yielded) {
                yield_processor();
                now = Clock::now();
            }
        }
        const bool was_preempted = now - last > policy_.preemption_time;
        if (was_preempted) {
            contention_.note(now);
        } else if (policy_.may_migrate && has_yielded && contention_.should_migrate(now - last)) {
            migrate_thread();
        }
        is_over_ = was_preempted || now >= end_;
        return !is_over_;
    }

private:
    Contention& contention_;
    std::chrono::microseconds longest_;
    const Policy& policy_;
    int tries_per_check_;
    Clock::time_point end_{};
    Clock::time_point last_check_{};
    int num_tries_ = 0;
    int num_checks_ = 0;
    bool is_over_ = false;
};

}  // namespace ferrodist
