// Collectives that were started, which run one after the other in the order of their places.
//
// [Note: who runs them]
// To wake a thread costs more than to start a small collective, and than the collective itself. So the queue's thread
// looks by itself once a millisecond while there is something to do, and is woken for what takes long and should begin at
// once, and when somebody waits who can't run it. After some looks in vain it sleeps until it is woken. Who waits for a
// collective without a limit runs it, and those before it, unless somebody does already.
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

class Queue {
public:
    using Collective = std::function<void(Context&, const Deadline&)>;
    // Runs a collective at its place, with so many seconds for it from its turn on.
    using Run = std::function<void(std::uint64_t place, double timeout, const Collective& collective)>;

    explicit Queue(Run run) : run_(std::move(run)) {}
    Queue(const Queue&) = delete;
    Queue& operator=(const Queue&) = delete;

    // Adds a collective that moves `size` bytes. `reserve()` gives its place, under the lock: between two threads the queue
    // could else get out of the order of the places, and wait at its front for what stands behind.
    template <class Reserve>
    std::shared_ptr<Pending> add(double timeout, Collective collective, std::size_t size, const Reserve& reserve) {
        const bool is_urgent = size >= urgent_bytes;
        bool wakes = is_urgent;
        std::shared_ptr<Pending> pending;
        {
            const std::lock_guard lock(mutex_);
            if (!thread_) thread_ = std::make_unique<std::thread>([this] { keep(); });
            pending = std::make_shared<Pending>(reserve());
            started_.push_back({timeout, is_urgent, std::move(collective), pending});
            wakes = wakes || is_asleep_;
        }
        if (wakes) hurry();
        return pending;
    }

    // `Pending::wait`, which runs what is to be waited for where it can.
    bool wait(Pending& pending, double timeout);

    // Has the thread look at once.
    void hurry() noexcept { changed_.notify_all(); }

    // False before anything was started, and in a forked child.
    [[nodiscard]] bool has_thread() const noexcept { return thread_ != nullptr; }
    // Has the thread end, when all that was started has ended; and waits for that.
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

    // Takes a waiting thread out of the count.
    class Waiting {
    public:
        explicit Waiting(Queue& queue) : queue_(queue) {}
        Waiting(const Waiting&) = delete;
        Waiting& operator=(const Waiting&) = delete;
        ~Waiting() {
            const std::lock_guard lock(queue_.mutex_);
            --queue_.num_waiting_;
        }

    private:
        Queue& queue_;
    };

    // What takes tens of microseconds: its start is worth some, to be hidden behind what the caller computes.
    static constexpr std::size_t urgent_bytes = 256 * 1024;

    void keep();
    // Runs the first in this thread. Throws what is no Failure: an interruption of this thread.
    void run_first(std::unique_lock<std::mutex>& lock);

    Run run_;
    std::mutex mutex_;
    EventCount changed_;       // only the thread sleeps on it
    std::deque<Started> started_;
    bool is_running_ = false;  // somebody runs what was the first: one at a time, for the time of each counts from its turn
    int num_waiting_ = 0;      // threads that wait for something that another one runs
    bool is_asleep_ = false;   // the thread, until it is woken
    bool is_closing_ = false;
    std::unique_ptr<std::thread> thread_;  // made when something is first started
};

}  // namespace ferrodist
