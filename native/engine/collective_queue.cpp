#include "engine/collective_queue.h"

#include <pthread.h>

#include <chrono>
#include <cmath>
#include <exception>

namespace ferrodist {

namespace {

constexpr auto tick = std::chrono::milliseconds(1);
constexpr int most_idle_ticks = 5;
constexpr auto long_sleep = std::chrono::hours(1);

}  // namespace

bool CollectiveQueue::wait(Pending& pending, double timeout) {
    if (pending.is_done()) return pending.wait(timeout);
    {
        std::unique_lock lock(mutex_);
        if (std::isinf(timeout)) {
            while (!is_running_ && !started_.empty() && started_.front().pending->ticket() <= pending.ticket())
                run_first(lock);
        }
        if (pending.is_done()) {
            // Collectives queued meanwhile, and urgent ones, were left to this thread.
            const bool is_awaited = !started_.empty() && (num_waiting_ > 0 || started_.front().is_urgent);
            lock.unlock();
            if (is_awaited) wake();
            return pending.wait(timeout);
        }
        ++num_waiting_;
    }
    const Waiting counted(*this);
    wake();
    return pending.wait(timeout);
}

void CollectiveQueue::end() {
    {
        const std::lock_guard lock(mutex_);
        is_closing_ = true;
    }
    wake();
}

void CollectiveQueue::close() {
    end();
    thread_->join();
}

void CollectiveQueue::run_thread() {
    ::pthread_setname_np(::pthread_self(), "ferro-queue");
    std::unique_lock lock(mutex_);
    int num_idle = 0;
    while (true) {
        if (!started_.empty() && !is_running_) {
            try {
                run_first(lock);
            } catch (...) {  // the collective has ended with this failure
            }
            num_idle = 0;
            continue;
        }
        if (is_closing_ && started_.empty()) return;
        const std::uint32_t seen = changed_.current();
        is_asleep_ = num_idle == most_idle_ticks;
        lock.unlock();
        changed_.wait(seen, is_asleep_ ? std::chrono::nanoseconds(long_sleep) : tick);
        lock.lock();
        num_idle = started_.empty() && !is_asleep_ ? num_idle + 1 : 0;
        is_asleep_ = false;
    }
}

void CollectiveQueue::run_first(std::unique_lock<std::mutex>& lock) {
    const Started first = std::move(started_.front());
    started_.pop_front();
    is_running_ = true;
    lock.unlock();
    std::exception_ptr failure, interruption;
    const std::uint64_t ticket = first.pending->ticket();
    try {
        run_(ticket, first.timeout, first.collective);
    } catch (const Failure&) {
        failure = std::current_exception();
    } catch (...) {
        interruption = std::current_exception();
        Failure broken(FailureKind::broken, {});
        broken.set_context(ticket, 0.0);
        failure = std::make_exception_ptr(std::move(broken));
    }
    first.pending->finish(std::move(failure));
    lock.lock();
    is_running_ = false;
    if (interruption) std::rethrow_exception(interruption);
}

}  // namespace ferrodist
