// The waiting side of P2PEngine: how its threads wait, and which of them moves messages meanwhile; see the notes in
// p2p_engine.h.
#include <pthread.h>

#include <algorithm>

#include "base/interruption.h"
#include "base/processor.h"
#include "engine/p2p_engine.h"

namespace ferrodist {

namespace {

constexpr auto tick = std::chrono::milliseconds(1);
constexpr auto no_tick = std::chrono::hours(1);

constexpr auto loss_patience = std::chrono::seconds(1);  // see [Note: lost connections]
constexpr auto loss_tick = std::chrono::milliseconds(100);

// Polling connections takes a system call, as long as several polls of the rings.
constexpr int ring_polls_per_connection_poll = 8;

// A shorter wait does not tell anything about the processor.
constexpr int polls_before_migration = 16;

// What the doorbell wakes the progress thread for.
constexpr std::uint32_t progress_bits = shm::progress_thread | shm::on_full_ring;

}  // namespace

class P2PEngine::WaiterScope {
public:
    explicit WaiterScope(P2PEngine& engine) : engine_(engine) {
        engine_.num_waiters_.fetch_add(1);
        auto& asleep = engine_.doorbell_.asleep;
        if ((asleep.load(std::memory_order_relaxed) & shm::progress_thread) != 0) asleep.fetch_and(~progress_bits);
    }
    WaiterScope(const WaiterScope&) = delete;
    WaiterScope& operator=(const WaiterScope&) = delete;
    ~WaiterScope() {
        if (engine_.num_waiters_.fetch_sub(1) != 1) return;
        if (!engine_.is_ticking_.load() || engine_.admission_.mailbox.has_listeners()) engine_.arm_progress_thread();
    }

private:
    P2PEngine& engine_;
};

bool P2PEngine::wait(const Transfer& transfer, double timeout) {
    if (transfer.has_ended.load()) return true;
    if (is_abandoned_.load()) return false;
    const Deadline deadline(timeout);
    const WaiterScope watch(*this);
    bool has_moved = true;
    while (true) {
        if (has_moved && timeout > 0.0 && spin(transfer, deadline)) return true;
        num_asleep_.fetch_add(1);
        doorbell_.asleep.fetch_or(shm::waiter);
        const std::uint32_t word = doorbell_.word.load();
        {
            Guard guard(*this, false);
            guard.set_asleep();
            has_moved = poll(&transfer);
            if (poller_ && !has_moved && !transfer.has_ended.load()) poller_->arm();
        }
        if (!transfer.has_ended.load()) dispatch_events();
        if (!has_moved && !transfer.has_ended.load() && (doorbell_.asleep.load() & shm::waiter) != 0) {
            const auto left = std::min<Clock::duration>(deadline.remaining(), interruption_period);
            if (left > Clock::duration::zero())
                doorbell_.sleep(word, shm::waiter, std::chrono::duration_cast<std::chrono::nanoseconds>(left));
        }
        num_asleep_.fetch_sub(1);
        if (transfer.has_ended.load()) return true;
        check_interruption();
        if (deadline.expired()) return false;
    }
}

void P2PEngine::signal(Transfer& transfer) {
    transfer.has_ended.store(true);
    // A thread that is about to sleep counts itself before it checks the transfer a last time.
    if (num_asleep_.load() != 0) doorbell_.wake(shm::waiter);
}

bool P2PEngine::spin(const Transfer& transfer, const Deadline& deadline) {
    if (poller_ && poller_->is_armed()) {
        const Guard guard(*this, false);
        if (num_asleep_.load() == 0) poller_->disarm();  // a thread that goes to sleep now arms it under the lock
    }
    const auto longest =
        std::min(spin_time_, std::chrono::duration_cast<std::chrono::microseconds>(deadline.remaining()));
    Spin spin(contention_, longest, settings_.is_oversubscribed ? Spin::oversubscribed : Spin::on_rings);
    for (int num_polls = 1;; ++num_polls) {
        if (transfer.has_ended.load()) return true;
        bool has_moved = false;
        const bool polls_connections =
            ring_channels_.empty() || settings_.is_oversubscribed || num_polls % ring_polls_per_connection_poll == 0;
        const tcp::ReadySet ready = polls_connections ? poll_connections() : tcp::ReadySet();
        if (ready.size() != 0 || has_incoming()) {
            const Guard guard(*this, std::try_to_lock);
            if (guard.owns_lock()) has_moved = poll(&transfer, ready);
        }
        if (transfer.has_ended.load()) return true;
        dispatch_events();
        if (num_polls == polls_before_migration && !settings_.is_oversubscribed) leave_shared_processor();
        if (has_moved) {
            spin.restart();
        } else if (!spin.should_retry()) {
            return false;
        }
        relax();
    }
}

// See [Note: shared processors].
void P2PEngine::leave_shared_processor() noexcept {
    const int here = ::sched_getcpu();
    if (here < 0 || ring_channels_.empty()) return;
    auto& noted = doorbell_.processor;
    if (noted.load(std::memory_order_relaxed) != here + 1) noted.store(here + 1, std::memory_order_relaxed);
    cpu_set_t occupied;
    CPU_ZERO(&occupied);
    bool is_shared = false;
    for (const auto* channel : ring_channels_) {
        const int processor = channel->processor_of_peer();
        if (processor < 0 || processor >= CPU_SETSIZE) continue;
        CPU_SET(static_cast<unsigned>(processor), &occupied);
        is_shared |= processor == here;
    }
    if (!is_shared) return;
    migrate_thread(occupied);
    noted.store(::sched_getcpu() + 1, std::memory_order_relaxed);
}

// Whether ranks of this host have sent anything, or there is something to write to them.
bool P2PEngine::has_incoming() const noexcept {
    if (has_work_.load(std::memory_order_relaxed)) return true;
    return std::ranges::any_of(ring_channels_, [](const auto* channel) { return channel->has_frames(); });
}

// Makes the doorbell wake the progress thread from now on, and receives what has arrived before.
void P2PEngine::arm_progress_thread() {
    if (peers_.empty()) return;
    // If it is armed nothing has arrived since; but a message may be half read.
    if ((doorbell_.asleep.load() & shm::progress_thread) != 0 && !has_work_.load() && !has_events_.load()) return;
    const Guard guard(*this);
    const bool waits_for_full_ring = (doorbell_.asleep.load() & progress_bits) == shm::on_full_ring;
    arm();  // also where it is armed for rings: a waiter disarms connections
    if (!waits_for_full_ring || has_started()) poll(nullptr);
}

void P2PEngine::arm() {
    doorbell_.asleep.fetch_or(has_started() ? shm::progress_thread : shm::on_full_ring);
    if (poller_ && !is_closed_) poller_->arm();
}

// Arms the progress thread for a transfer that goes on, or for something that is still to be written, if it sleeps until
// a ring is full. If it is awake it finds them by itself.
void P2PEngine::arm_for_started() {
    if ((doorbell_.asleep.load() & progress_bits) != shm::on_full_ring || !has_started()) return;
    arm();
    poll(nullptr);
}

// Makes the progress thread poll by itself.
void P2PEngine::wake_progress_thread() {
    doorbell_.asleep.fetch_and(~progress_bits);
    doorbell_.wake(progress_bits);
}

void P2PEngine::run_progress_thread() {
    ::pthread_setname_np(::pthread_self(), "ferro-messages");
    std::uint64_t num_moves_seen = 0;
    while (true) {
        std::chrono::nanoseconds longest = no_tick;
        std::uint32_t word = doorbell_.word.load();
        if (is_left_to_waiters(num_moves_seen, longest)) {
            doorbell_.sleep(word, progress_bits, longest);
            continue;
        }
        {
            const Guard guard(*this);
            if (is_closed_) return;
            poll(nullptr);
            const bool is_ticking = num_moves_ != num_moves_seen;
            num_moves_seen = num_moves_;
            is_ticking_.store(is_ticking);
            // A leaving waiter checks `is_ticking_` after it has decremented the count: it arms the progress thread if
            // this does not.
            const bool arms = num_waiters_.load() == 0 && (!is_ticking || has_started());
            if (arms) arm();
            word = doorbell_.word.load();
            if (arms) poll(nullptr);
            report_losses();
            if (!unexplained_.empty()) longest = loss_tick;
            if (is_ticking) longest = tick;
        }
        doorbell_.sleep(word, progress_bits, longest);
    }
}

// Whether threads wait, which move all messages, and there is nothing else to do. Then the progress thread sleeps for at
// most `longest`.
bool P2PEngine::is_left_to_waiters(std::uint64_t& num_moves_seen, std::chrono::nanoseconds& longest) {
    if (num_waiters_.load() == 0 || !is_open() || has_unexplained_.load() || has_events_.load()) return false;
    const bool is_ticking = num_moves_seen != num_moves_.load();
    is_ticking_.store(is_ticking);
    // As below: a waiter that leaves now sees `is_ticking_`, or is missed here.
    if (!is_ticking && num_waiters_.load() == 0) return false;
    num_moves_seen = num_moves_.load();
    if (is_ticking) longest = tick;
    return true;
}

void P2PEngine::run_poll_thread() {
    ::pthread_setname_np(::pthread_self(), "ferro-watchman");
    while (poller_->sleep()) {
        const Guard guard(*this);
        if (is_closed_) return;
        poller_->set_fired();
        const bool has_moved = poll(nullptr);
        if (num_asleep_.load() != 0) {
            poller_->arm();
        } else if (num_waiters_.load() == 0) {
            // Unsolicited traffic is left to the progress thread's ticks; otherwise the next event is wanted at once.
            has_moved && !has_started() ? wake_progress_thread() : poller_->arm();
        }
    }
}

// See [Note: lost connections].
void P2PEngine::report_losses() {
    const auto before = Clock::now() - loss_patience;
    std::erase_if(unexplained_, [&](const Loss& loss) {
        if (loss.time > before) return false;
        admission_.add_event(PeerEvent::Kind::gone, loss.rank);
        return true;
    });
    has_unexplained_.store(!unexplained_.empty());
}

// Whether there are active transfers, or frames to be written.
bool P2PEngine::has_started() const {
    return admission_.mailbox.has_receives() ||
           std::ranges::any_of(peers_, [](const auto& peer) { return peer->has_sends(); });
}

}  // namespace ferrodist
