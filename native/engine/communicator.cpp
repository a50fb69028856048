#include "engine/communicator.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "base/interruption.h"

namespace ferrodist {

Communicator::~Communicator() {
    if (!queue_.has_thread()) return;
    fabric_.leave();  // ends what is still running
    mark_broken();
    run_end_([this] { queue_.close(); });
}

std::shared_ptr<Pending> Communicator::start(double timeout, std::size_t size, CollectiveQueue::Collective collective) {
    try {
        check();
    } catch (Failure& failure) {  // at once, not behind the queued collectives
        auto pending = std::make_shared<Pending>(reserve());
        failure.set_context(pending->ticket(), 0.0);
        pending->finish(std::current_exception());
        return pending;
    }
    return queue_.add(timeout, std::move(collective), size, [this] { return reserve(); });
}

void Communicator::retain(std::shared_ptr<Pending> pending, std::shared_ptr<void> owner) {
    free_retained();
    if (!pending->is_done()) retained_.emplace_back(std::move(pending), std::move(owner));
}

void Communicator::free_retained() {
    // Collectives end in the order in which they were started, which is about the order of this list.
    auto end = retained_.begin();
    while (end != retained_.end() && end->first->is_done()) ++end;
    // Destroying an owner may run the caller's code and reenter this function: so remove the entries first.
    const std::vector<std::pair<std::shared_ptr<Pending>, std::shared_ptr<void>>> ended(
        std::make_move_iterator(retained_.begin()), std::make_move_iterator(end));
    retained_.erase(retained_.begin(), end);
}

void Communicator::await_turn(std::uint64_t ticket) {
    const Deadline forever(std::numeric_limits<double>::infinity());
    try {
        await_turn(ticket, forever);
    } catch (Failure& failure) {
        failure.set_context(ticket, forever.elapsed_seconds());
        throw;
    }
}

void Communicator::await_turn(std::uint64_t ticket, const Deadline& deadline) {
    if (turn_.load() == ticket) return;
    release_interpreter();  // the holder of the turn may need the GIL
    queue_.wake();  // earlier collectives may still be queued
    while (true) {
        const std::uint32_t seen = passed_.current();
        if (turn_.load() == ticket) return;
        check();
        if (deadline.expired()) throw Failure(FailureKind::queue, {context_.rank});
        passed_.wait(seen, std::min<Clock::duration>(deadline.remaining(), interruption_period));
        if (turn_.load() != ticket) check_interruption();
    }
}

void Communicator::pass_turn(std::uint64_t next) {
    turn_.store(next);
    passed_.notify_all();  // a system call only if a thread sleeps
}

void Communicator::check() const {
    fabric_.check();
    if (is_broken_.load()) throw Failure(FailureKind::broken, {});
}

void Communicator::mark_broken() {
    is_broken_.store(true);
    passed_.notify_all();
}

}  // namespace ferrodist
