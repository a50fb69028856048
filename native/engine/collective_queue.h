// The queue of asynchronously started collectives, which run one after the other in ticket order.
//
// [Note: who runs them]
// Waking a thread costs more than starting a small collective, and more than the collective itself. So the queue's
// thread polls once a millisecond while there is work, and is woken only for large collectives that should begin at
// once, and for a waiter that cannot run the collective itself. After some idle polls it sleeps until it is woken. A
// thread that waits for a collective without a timeout runs it and those before it, unless another thread is running
// one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "base/event_count.h"
#include "collectives/context.h"
#include "engine/pending.h"

namespace ferrodist {

class CollectiveQueue {
public:
    using Collective = std::function<void(Context&, const Deadline&)>;
    // Runs the collective of a ticket; `timeout` in seconds counts from its turn.
    using Run = std::function<void(std::uint64_t ticket, double timeout, const Collective& collective)>;

    explicit CollectiveQueue(Run run) : run_(std::move(run)) {}
    CollectiveQueue(const CollectiveQueue&) = delete;
    CollectiveQueue& operator=(const CollectiveQueue&) = delete;

    // Adds a collective that moves `size` bytes. `reserve()` takes its ticket under the lock: otherwise two threads
    // could queue out of ticket order, and the first in the queue would wait for one behind it.
    template <class Reserve>
    std::shared_ptr<Pending> add(double timeout, Collective collective, std::size_t size, const Reserve& reserve) {
        const bool is_urgent = size >= urgent_bytes;
        bool wakes = is_urgent;
        std::shared_ptr<Pending> pending;
        {
            const std::lock_guard lock(mutex_);
            if (!thread_) thread_ = std::make_unique<std::thread>([this] { run_thread(); });
            pending = std::make_shared<Pending>(reserve());
            started_.push_back({timeout, is_urgent, std::move(collective), pending});
            wakes = wakes || is_asleep_;
        }
        if (wakes) wake();
        return pending;
    }

    // Like `Pending::wait`, but runs the awaited collectives in this thread where it can.
    bool wait(Pending& pending, double timeout);

    // Makes the queue's thread check at once.
    void wake() noexcept { changed_.notify_all(); }

    // False before the first collective was started, and in a forked child.
    [[nodiscard]] bool has_thread() const noexcept { return thread_ != nullptr; }
    // Makes the thread end once the queue is empty; `close` also waits for that.
    void end();
    void close();
    // In a forked child, which has no such thread.
    void abandon() noexcept { (void)thread_.release(); }

private:
    struct Started {
        double timeout;
        bool is_urgent;
        Collective collective;
        std::shared_ptr<Pending> pending;
    };

    // Removes a waiting thread from the count.
    class Waiting {
    public:
        explicit Waiting(CollectiveQueue& queue) : queue_(queue) {}
        Waiting(const Waiting&) = delete;
        Waiting& operator=(const Waiting&) = delete;
        ~Waiting() {
            const std::lock_guard lock(queue_.mutex_);
            --queue_.num_waiting_;
        }

    private:
        CollectiveQueue& queue_;
    };

    // Collectives of this size take tens of microseconds: starting them at once is worth a wake-up, to overlap them
    // with the caller's computation.
    static constexpr std::size_t urgent_bytes = 256 * 1024;

    void run_thread();
    // Runs the first collective in this thread. Rethrows an exception other than Failure: an interruption of this
    // thread.
    void run_first(std::unique_lock<std::mutex>& lock);

    Run run_;
    std::mutex mutex_;
    EventCount changed_;  // only the queue's thread sleeps on it
    std::deque<Started> started_;
    bool is_running_ = false;  // a thread runs the former first: one at a time, for each timeout counts from its turn
    int num_waiting_ = 0;      // threads that wait for a collective that another thread runs
    bool is_asleep_ = false;   // the queue's thread sleeps until it is woken
    bool is_closing_ = false;
    std::unique_ptr<std::thread> thread_;  // created when a collective is first started
};

}  // namespace ferrodist
