#include "engine/communicator.h"

namespace ferrodist {

Communicator::~Communicator() {
    if (!queue_.has_thread()) return;
    fabric_.leave();  // what is still under way ends
    break_off();
    queue_.close();
}

std::shared_ptr<Pending> Communicator::start(double timeout, std::size_t size, Queue::Collective collective) {
    try {
        check();
    } catch (Failure& failure) {  // at once, and not after what else is queued
        auto pending = std::make_shared<Pending>(reserve());
        failure.set_context(pending->place(), 0.0);
        pending->finish(std::current_exception());
        return pending;
    }
    return queue_.add(timeout, std::move(collective), size, [this] { return reserve(); });
}

void Communicator::await_turn(std::uint64_t place, const Deadline& deadline) {
    if (turn_.load() == place) return;
    queue_.hurry();  // what was started before may have been left for later
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
