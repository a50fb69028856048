#include "engine/communicator.h"

#include <pthread.h>

namespace ferrodist {

Communicator::~Communicator() {
    if (!thread_) return;
    fabric_.leave();  // what is still under way ends
    break_off();
    {
        const std::lock_guard lock(started_mutex_);
        is_closing_ = true;
    }
    has_started_.notify_all();
    thread_->join();
}

std::shared_ptr<Pending> Communicator::start(double timeout,
                                             std::function<void(Context&, const Deadline&)> collective) {
    auto pending = std::make_shared<Pending>();
    try {
        check();
    } catch (Failure& failure) {  // at once, and not after what else is queued
        failure.set_context(reserve(), 0.0);
        pending->finish(std::current_exception());
        return pending;
    }
    {
        // One lock for place and queue: between two threads the queue could get out of the order of the places, and its
        // thread would wait for what stands behind it.
        const std::lock_guard lock(started_mutex_);
        if (!thread_) thread_ = std::make_unique<std::thread>([this] { run_started(); });
        started_.push_back({reserve(), timeout, std::move(collective), pending});
    }
    has_started_.notify_one();
    return pending;
}

void Communicator::run_started() {
    ::pthread_setname_np(::pthread_self(), "ferro-queue");
    while (true) {
        Started next;
        {
            std::unique_lock lock(started_mutex_);
            has_started_.wait(lock, [&] { return !started_.empty() || is_closing_; });
            if (started_.empty()) return;
            next = std::move(started_.front());
            started_.pop_front();
        }
        std::exception_ptr failure;
        try {
            run(next.place, next.timeout, next.collective);
        } catch (...) {
            failure = std::current_exception();
        }
        next.pending->finish(std::move(failure));
    }
}

void Communicator::await_turn(std::uint64_t place, const Deadline& deadline) {
    if (turn_.load() == place) return;
    std::unique_lock lock(mutex_);
    num_waiting_.fetch_add(1);
    passed_.wait_until(lock, deadline.end(), [&] { return turn_.load() == place || is_broken_.load(); });
    num_waiting_.fetch_sub(1);
    if (turn_.load() == place) return;
    check();
    throw Failure(FailureKind::queue, {context_.rank});
}

void Communicator::pass_turn(std::uint64_t next) {
    turn_.store(next);
    // Partner: `await_turn` counts itself before it looks at the turn, both sequentially consistent.
    if (num_waiting_.load() == 0) return;
    const std::lock_guard lock(mutex_);  // whoever is between its look and its sleep holds it
    passed_.notify_all();
}

void Communicator::check() const {
    fabric_.check();
    if (is_broken_.load()) throw Failure(FailureKind::broken, {});
}

void Communicator::break_off() {
    is_broken_.store(true);
    const std::lock_guard lock(mutex_);
    passed_.notify_all();
}

}  // namespace ferrodist
