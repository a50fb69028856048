// How the messenger's threads wait, and who moves messages meanwhile: see its notes.
#include <pthread.h>

#include <algorithm>

#include "base/interruption.h"
#include "base/processor.h"
#include "engine/p2p_engine.h"

namespace ferrodist {

namespace {

constexpr auto tick = std::chrono::milliseconds(1);
constexpr auto no_tick = std::chrono::hours(1);

constexpr auto news_patience = std::chrono::seconds(1);  // see [Note: lost connections]
constexpr auto news_tick = std::chrono::milliseconds(100);

// To look at connections takes a system call, as long as some looks at rings.
constexpr int looks_at_rings = 8;

}  // namespace

class P2PEngine::Watch {
public:
    explicit Watch(P2PEngine& messenger) : messenger_(messenger) {
        messenger_.num_waiters_.fetch_add(1);
        auto& asleep = messenger_.bell_.asleep;
        if ((asleep.load(std::memory_order_relaxed) & shm::keeper) != 0) asleep.fetch_and(~shm::keeper);
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() {
        if (messenger_.num_waiters_.fetch_sub(1) != 1) return;
        if (!messenger_.is_ticking_.load() || messenger_.reception_.mailbox.has_listeners()) messenger_.ask_keeper();
    }

private:
    P2PEngine& messenger_;
};

bool P2PEngine::wait(const Transfer& transfer, double timeout) {
    if (transfer.has_ended.load()) return true;
    if (is_abandoned_.load()) return false;
    const Deadline deadline(timeout);
    const Watch watch(*this);
    bool has_moved = true;
    while (true) {
        if (has_moved && timeout > 0.0 && spin(transfer)) return true;
        num_asleep_.fetch_add(1);
        bell_.asleep.fetch_or(shm::waiter);
        const std::uint32_t word = bell_.word.load();
        {
            Held held(*this, false);
            held.set_asleep();
            has_moved = poll(&transfer);
            if (lookout_ && !has_moved && !transfer.has_ended.load()) lookout_->arm();
        }
        if (!transfer.has_ended.load()) do_work();
        if (!has_moved && !transfer.has_ended.load() && (bell_.asleep.load() & shm::waiter) != 0) {
            const auto left = std::min<Clock::duration>(deadline.remaining(), interruption_period);
            if (left > Clock::duration::zero())
                bell_.sleep(word, shm::waiter, std::chrono::duration_cast<std::chrono::nanoseconds>(left));
        }
        num_asleep_.fetch_sub(1);
        if (transfer.has_ended.load()) return true;
        look_for_interruption();
        if (deadline.expired()) return false;
    }
}

void P2PEngine::signal(Transfer& transfer) {
    transfer.has_ended.store(true);
    // Who is about to sleep has counted itself before it looks at the transfer a last time.
    if (num_asleep_.load() != 0) bell_.wake(shm::waiter);
}

bool P2PEngine::spin(const Transfer& transfer) {
    if (lookout_ && lookout_->is_armed()) {
        const Held held(*this, false);
        if (num_asleep_.load() == 0) lookout_->disarm();  // whoever falls asleep now arms it when it gets the lock
    }
    Spin spin(contention_, spin_time_, settings_.is_crowded ? Spin::crowded : Spin::on_rings);
    for (int num_looks = 1;; ++num_looks) {
        if (transfer.has_ended.load()) return true;
        bool has_moved = false;
        const bool looks_out = local_.empty() || settings_.is_crowded || num_looks % looks_at_rings == 0;
        const tcp::ReadySet sights = looks_out ? look() : tcp::ReadySet();
        if (sights.size() != 0 || has_news()) {
            const Held held(*this, std::try_to_lock);
            if (held.is_held()) has_moved = poll(&transfer, sights);
        }
        if (transfer.has_ended.load()) return true;
        do_work();
        if (has_moved) {
            spin.restart();
        } else if (!spin.tries_again()) {
            return false;
        }
        relax();
    }
}

// Of ranks of this host.
bool P2PEngine::has_news() const noexcept {
    if (has_outgoing_.load(std::memory_order_relaxed)) return true;
    return std::ranges::any_of(local_, [](const auto* channel) { return channel->has_frames(); });
}

// Has the keeper woken by whatever comes from now on, and takes in what has come.
void P2PEngine::ask_keeper() {
    if (peers_.empty()) return;
    if ((bell_.asleep.load() & shm::keeper) != 0) return;  // since it was asked nothing has come
    const Held held(*this);
    ask();
    poll(nullptr);
}

void P2PEngine::ask() {
    bell_.asleep.fetch_or(shm::keeper);
    if (lookout_ && !is_closed_) lookout_->arm();
}

// Has the keeper look for itself.
void P2PEngine::call_keeper() {
    bell_.asleep.fetch_and(~shm::keeper);
    bell_.wake(shm::keeper);
}

void P2PEngine::keep() {
    ::pthread_setname_np(::pthread_self(), "ferro-messages");
    std::uint64_t num_moves_seen = 0;
    while (true) {
        std::chrono::nanoseconds longest = no_tick;
        std::uint32_t word = 0;
        {
            const Held held(*this);
            if (is_closed_) return;
            poll(nullptr);
            const bool is_ticking = num_moves_ != num_moves_seen;
            num_moves_seen = num_moves_;
            is_ticking_.store(is_ticking);
            // A waiter that leaves looks at `is_ticking_` after it has counted itself out: it asks if this does not.
            const bool asks = num_waiters_.load() == 0 && (!is_ticking || has_started());
            if (asks) ask();
            word = bell_.word.load();
            if (asks) poll(nullptr);
            tell_losses();
            if (!unexplained_.empty()) longest = news_tick;
            if (is_ticking) longest = tick;
        }
        bell_.sleep(word, shm::keeper, longest);
    }
}

void P2PEngine::look_out() {
    ::pthread_setname_np(::pthread_self(), "ferro-watchman");
    while (lookout_->sleep()) {
        const Held held(*this);
        if (is_closed_) return;
        lookout_->set_fired();
        const bool has_moved = poll(nullptr);
        if (num_asleep_.load() != 0) {
            lookout_->arm();
        } else if (num_waiters_.load() == 0) {
            // Where much comes unasked the keeper looks once in a while; else what comes next is to be seen at once.
            has_moved && !has_started() ? call_keeper() : lookout_->arm();
        }
    }
}

// See [Note: lost connections].
void P2PEngine::tell_losses() {
    const auto before = Clock::now() - news_patience;
    std::erase_if(unexplained_, [&](const Loss& loss) {
        if (loss.time > before) return false;
        reception_.tell(PeerEvent::Kind::gone, loss.rank);
        return true;
    });
}

// Whether transfers are under way that somebody may wait for elsewhere.
bool P2PEngine::has_started() const {
    return reception_.mailbox.has_receives() ||
           std::ranges::any_of(peers_, [](const auto& peer) { return peer->has_sends(); });
}

}  // namespace ferrodist
