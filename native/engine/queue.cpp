#include "engine/queue.h"

#include <pthread.h>

#include <chrono>
#include <cmath>

namespace ferrodist {

namespace {

constexpr auto tick = std::chrono::milliseconds(1);
constexpr int most_idle_ticks = 5;

}  // namespace

bool Queue::wait(Pending& pending, double timeout) {
    if (pending.is_done()) return pending.wait(timeout);
    {
        std::unique_lock lock(mutex_);
        if (std::isinf(timeout)) {
            while (!is_running_ && !started_.empty() && started_.front().pending->place() <= pending.place())
                run_first(lock);
        }
        if (pending.is_done()) {
            // Whoever came meanwhile, and what should not wait, was left to this thread.
            const bool is_awaited = !started_.empty() && (num_waiting_ > 0 || started_.front().is_urgent);
            lock.unlock();
            if (is_awaited) hurry();
            return pending.wait(timeout);
        }
        ++num_waiting_;
    }
    const Waiting counted(*this);
    hurry();
    return pending.wait(timeout);
}

void Queue::close() {
    {
        const std::lock_guard lock(mutex_);
        is_closing_ = true;
    }
    changed_.notify_one();
    thread_->join();
}

void Queue::keep() {
    ::pthread_setname_np(::pthread_self(), "ferro-queue");
    std::unique_lock lock(mutex_);
    int num_idle = 0;
    while (true) {
        if (!started_.empty() && !is_running_) {
            run_first(lock);
            num_idle = 0;
        } else if (is_closing_ && started_.empty()) {
            return;
        } else if (num_idle < most_idle_ticks) {
            if (changed_.wait_for(lock, tick) == std::cv_status::timeout && started_.empty()) ++num_idle;
        } else {
            is_asleep_ = true;
            changed_.wait(lock);
            is_asleep_ = false;
            num_idle = 0;
        }
    }
}

void Queue::run_first(std::unique_lock<std::mutex>& lock) {
    const Started first = std::move(started_.front());
    started_.pop_front();
    is_running_ = true;
    lock.unlock();
    std::exception_ptr failure;
    try {
        run_(first.pending->place(), first.timeout, first.collective);
    } catch (...) {
        failure = std::current_exception();
    }
    first.pending->finish(std::move(failure));
    lock.lock();
    is_running_ = false;
}

}  // namespace ferrodist
