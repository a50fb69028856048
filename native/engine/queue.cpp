#include "engine/queue.h"

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

void Queue::end() {
    {
        const std::lock_guard lock(mutex_);
        is_closing_ = true;
    }
    hurry();
}

void Queue::close() {
    end();
    thread_->join();
}

void Queue::keep() {
    ::pthread_setname_np(::pthread_self(), "ferro-queue");
    std::unique_lock lock(mutex_);
    int num_idle = 0;
    while (true) {
        if (!started_.empty() && !is_running_) {
            try {
                run_first(lock);
            } catch (...) {  // it has ended with a failure
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

void Queue::run_first(std::unique_lock<std::mutex>& lock) {
    const Started first = std::move(started_.front());
    started_.pop_front();
    is_running_ = true;
    lock.unlock();
    std::exception_ptr failure, interruption;
    const std::uint64_t place = first.pending->place();
    try {
        run_(place, first.timeout, first.collective);
    } catch (const Failure&) {
        failure = std::current_exception();
    } catch (...) {
        interruption = std::current_exception();
        Failure broken(FailureKind::broken, {});
        broken.set_context(place, 0.0);
        failure = std::make_exception_ptr(std::move(broken));
    }
    first.pending->finish(std::move(failure));
    lock.lock();
    is_running_ = false;
    if (interruption) std::rethrow_exception(interruption);
}

}  // namespace ferrodist
