#include "engine/communicator.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "base/interruption.h"

namespace ferrodist {

Communicator::~Communicator() {
    if (!queue_.has_thread()) return;
    fabric_.leave();  // what is still under way ends
    break_off();
    run_end_([this] { queue_.close(); });
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

void Communicator::keep(std::shared_ptr<Pending> pending, std::shared_ptr<void> owner) {
    free_kept();
    if (!pending->is_done()) kept_.emplace_back(std::move(pending), std::move(owner));
}

void Communicator::free_kept() {
    // They end in the order in which they were started, which is about that in which they were dropped.
    auto end = kept_.begin();
    while (end != kept_.end() && end->first->is_done()) ++end;
    // Whatever goes may have things of the caller's done, and lead back here: after it is out of the list.
    const std::vector<std::pair<std::shared_ptr<Pending>, std::shared_ptr<void>>> ended(
        std::make_move_iterator(kept_.begin()), std::make_move_iterator(end));
    kept_.erase(kept_.begin(), end);
}

void Communicator::await_turn(std::uint64_t place) {
    const Deadline forever(std::numeric_limits<double>::infinity());
    try {
        await_turn(place, forever);
    } catch (Failure& failure) {
        failure.set_context(place, forever.elapsed_seconds());
        throw;
    }
}

void Communicator::await_turn(std::uint64_t place, const Deadline& deadline) {
    if (turn_.load() == place) return;
    expect_wait();  // who has the turn may need the interpreter
    queue_.hurry();  // what was started before may have been left for later
    while (true) {
        const std::uint32_t seen = passed_.current();
        if (turn_.load() == place) return;
        check();
        if (deadline.expired()) throw Failure(FailureKind::queue, {context_.rank});
        passed_.wait(seen, std::min<Clock::duration>(deadline.remaining(), interruption_period));
        if (turn_.load() != place) look_for_interruption();
    }
}

void Communicator::pass_turn(std::uint64_t next) {
    turn_.store(next);
    passed_.notify_all();  // a system call only where somebody sleeps
}

void Communicator::check() const {
    fabric_.check();
    if (is_broken_.load()) throw Failure(FailureKind::broken, {});
}

void Communicator::break_off() {
    is_broken_.store(true);
    passed_.notify_all();
}

}  // namespace ferrodist
