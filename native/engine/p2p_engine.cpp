#include "engine/p2p_engine.h"

#include <algorithm>

namespace ferrodist {

namespace {

constexpr auto frames_tick = std::chrono::microseconds(100);
constexpr auto drain_tick = std::chrono::milliseconds(10);

// Turns of reading until all that a lost rank has left behind is taken in.
constexpr int last_turns = 64;

}  // namespace

P2PEngine::Held::~Held() {
    if (!lock_.owns_lock()) return;
    messenger_.settle();
    const std::size_t num_ended = messenger_.reception_.mailbox.num_ended;
    const bool has_ended = num_ended != messenger_.num_ended_seen_;
    messenger_.num_ended_seen_ = num_ended;
    lock_.unlock();
    if (has_ended && messenger_.num_asleep_.load() > (is_asleep_ ? 1 : 0)) messenger_.bell_.wake(shm::waiter);
    if (does_work_) messenger_.do_work();
}

P2PEngine::P2PEngine(const Settings& settings, Ways ways, std::function<void(P2PEngine&)> on_work)
    : settings_(settings),
      on_work_(std::move(on_work)),
      reception_(static_cast<int>(ways.local_indexes.size()), settings.eager_bytes, settings.max_unasked_bytes),
      rings_(std::move(ways.rings)),
      bell_(rings_->bell(ways.local_indexes[static_cast<std::size_t>(settings.rank)])),
      by_rank_(ways.local_indexes.size(), nullptr),
      lost_(ways.local_indexes.size(), false),
      spin_time_(settings.spin_micros) {
    connect(ways);
    try {
        if (!peers_.empty()) keeper_ = std::make_unique<std::thread>([this] { keep(); });
        if (lookout_) watchman_ = std::make_unique<std::thread>([this] { look_out(); });
    } catch (...) {  // the system starts no more threads
        close();
        throw;
    }
}

P2PEngine::~P2PEngine() {
    close();
}

void P2PEngine::connect(Ways& ways) {
    const auto own = static_cast<std::size_t>(settings_.rank);
    std::vector<std::pair<std::size_t, std::unique_ptr<Channel>>> channels;
    for (std::size_t rank = 0; rank < by_rank_.size(); ++rank) {
        const int index = ways.local_indexes[rank];
        if (rank == own || index < 0) continue;
        auto channel = std::make_unique<shm::RingChannel>(*rings_, ways.local_indexes[own], index);
        local_.push_back(channel.get());
        channels.emplace_back(rank, std::move(channel));
    }
    for (std::size_t rank = 0; rank < by_rank_.size(); ++rank) {
        if (ways.local_indexes[rank] >= 0) continue;
        if (!lookout_) lookout_ = std::make_unique<tcp::Poller>();
        auto wire = std::make_unique<tcp::TcpChannel>(std::move(ways.sockets[rank]), *lookout_, channels.size());
        wires_.push_back(wire.get());
        channels.emplace_back(rank, std::move(wire));
    }
    for (auto& [rank, channel] : channels) {
        peers_.push_back(std::make_unique<Peer>(static_cast<int>(rank), std::move(channel), reception_));
        by_rank_[rank] = peers_.back().get();
    }
}

bool P2PEngine::try_send(const std::byte* data, std::size_t size, int dst, const Tag& tag) {
    Peer* peer = nullptr;
    {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock() || !is_open()) return false;
        peer = peer_of(dst);
        if (peer == nullptr || !peer->try_send(data, size, tag)) return false;
        ++num_moves_;
    }
    peer->notify();
    return true;
}

bool P2PEngine::start_if_open(Send& send) {
    const Held held(*this, false);
    Peer* peer = peer_of(send.peer);
    if (!is_open() || peer == nullptr || peer->is_lost()) return false;
    start(*peer, send);
    return true;
}

bool P2PEngine::start_if_open(Receive& receive, bool may_wait) {
    const Held held = may_wait ? Held(*this, false) : Held(*this, std::try_to_lock);
    if (!held.is_held() || !is_open()) return false;
    if (receive.source == any_source ? num_lost_ != 0 : lost_[static_cast<std::size_t>(receive.source)]) return false;
    ++num_moves_;
    reception_.mailbox.post(receive);
    if (receive.outcome == Outcome::under_way) poll(&receive);
    return true;
}

void P2PEngine::start(Send& send) {
    const Held held(*this, false);
    start(*peer_of(send.peer), send);
}

void P2PEngine::start(Receive& receive) {
    const Held held(*this, false);
    ++num_moves_;
    reception_.mailbox.post(receive);
    if (receive.outcome == Outcome::under_way) poll(&receive);
}

void P2PEngine::start_heard(Receive& receive) {
    const Held held(*this, false);
    ++num_moves_;
    reception_.mailbox.add_listener(receive);
    reception_.mailbox.post(receive);
    if (receive.outcome == Outcome::under_way) poll(&receive);
}

bool P2PEngine::cancel(Send& send, Outcome outcome, std::size_t reason) {
    if (is_abandoned_.load()) return false;
    const Held held(*this);
    Peer& peer = *peer_of(send.peer);
    const bool is_cancelled = peer.cancel(send, outcome, reason);
    note_outgoing(peer);
    return is_cancelled;
}

bool P2PEngine::cancel(Receive& receive) {
    if (is_abandoned_.load()) return false;
    const Held held(*this);
    return reception_.mailbox.cancel(receive, Outcome::cancelled);
}

bool P2PEngine::end_unmatched(Receive& receive, std::size_t reason) {
    const Held held(*this);
    poll(nullptr);
    if (receive.outcome != Outcome::under_way || receive.message) return false;
    receive.reason = reason;
    reception_.mailbox.fail(receive);
    return true;
}

void P2PEngine::listen(Transfer& transfer) {
    if (is_abandoned_.load()) return;
    {
        const Held held(*this, false);
        reception_.mailbox.add_listener(transfer);
    }
    if (num_waiters_.load() == 0) ask_keeper();
}

std::vector<Party> P2PEngine::parties() {
    const Held held(*this);
    poll(nullptr);
    std::vector<Party> found;
    const auto add = [&](const Party& party) {
        if (std::ranges::find(found, party) == found.end()) found.push_back(party);
    };
    reception_.mailbox.for_each_receive(
        [&](const Receive& receive) { add({false, receive.tag.group, receive.source}); });
    for (const auto& peer : peers_)
        peer->for_each_send([&](const Send& send) { add({true, send.tag.group, peer->rank()}); });
    return found;
}

void P2PEngine::fail(const Party& party, std::size_t reason) {
    const Held held(*this);
    if (party.is_send) {
        Peer& peer = *peer_of(party.peer);
        peer.for_each_send([&](Send& send) {
            if (send.tag.group == party.group) peer.cancel(send, Outcome::ended, reason);
        });
        return;
    }
    reception_.mailbox.for_each_receive([&](Receive& receive) {
        if (receive.tag.group != party.group || receive.source != party.peer) return;
        receive.reason = reason;
        reception_.mailbox.fail(receive);
    });
}

void P2PEngine::open_group(std::uint64_t group, const std::vector<int>& members) {
    const Held held(*this);
    reception_.open_group(group, members);
}

void P2PEngine::end_group(std::uint64_t group) {
    const Held held(*this);
    if (group == 0) is_open_.store(false);
    reception_.end_group(group);
    for (const auto& peer : peers_) peer->end_group(group);
}

void P2PEngine::forget_group(std::uint64_t group) {
    const Held held(*this);
    reception_.forget_group(group);
}

void P2PEngine::lose(int rank) {
    const Held held(*this);
    const auto place = static_cast<std::size_t>(rank);
    if (lost_[place]) return;
    lost_[place] = true;
    ++num_lost_;
    std::erase_if(unexplained_, [&](const Loss& loss) { return loss.rank == rank; });
    Peer* peer = peer_of(rank);
    if (peer == nullptr) return;
    for (int turn = 0; turn < last_turns && !is_closed_ && read(*peer, nullptr); ++turn) {
    }
    peer->break_off();
}

std::uint64_t P2PEngine::num_frames_to(int rank) {
    const Held held(*this);
    const Peer* peer = peer_of(rank);
    return peer == nullptr ? 0 : peer->channel().num_put();
}

void P2PEngine::await_frames(int rank, std::uint64_t count, double timeout) {
    const Deadline deadline(timeout);
    while (true) {
        {
            const Held held(*this);
            Peer* peer = peer_of(rank);
            if (peer == nullptr || is_closed_) return;
            const bool has_moved = peer->channel().num_read() < count && read(*peer, nullptr);
            if (peer->is_lost() || peer->channel().num_read() >= count) return;
            if (has_moved) continue;
        }
        if (deadline.expired()) return;
        std::this_thread::sleep_for(frames_tick);
    }
}

int P2PEngine::fullest_source(int newest, std::size_t size_kept) {
    const Held held(*this);
    return reception_.mailbox.fullest_source(newest, size_kept);
}

std::size_t P2PEngine::unasked_bytes() {
    const Held held(*this);
    return reception_.mailbox.unasked_bytes();
}

Work P2PEngine::take_work() {
    const Held held(*this, false);
    has_work_.store(false);
    return {.news = std::exchange(reception_.news, {}), .first_ended = reception_.mailbox.take_ended()};
}

void P2PEngine::close() {
    if (is_abandoned_.load()) return;
    is_open_.store(false);
    {
        const Held held(*this, false);
        if (is_closed_) return;
        for (const auto& peer : peers_) {
            peer->pump();
            peer->for_each_send([&](Send& send) { peer->cancel(send, Outcome::ended, 0); });
        }
        is_closed_ = true;
        reception_.close();
        for (tcp::TcpChannel* wire : wires_) (void)wire->leave();
    }
    bell_.wake(shm::keeper | shm::waiter);
    if (lookout_) lookout_->stop();
    for (auto* thread : {&keeper_, &watchman_}) {
        if (!*thread) continue;
        if ((*thread)->get_id() == std::this_thread::get_id())
            (*thread)->detach();
        else
            (*thread)->join();
        thread->reset();
    }
}

void P2PEngine::drain(double timeout) {
    if (is_abandoned_.load() || !lookout_) return;
    const Deadline deadline(timeout);
    while (true) {
        {
            const Held held(*this, false);
            const auto num_left = std::ranges::count_if(wires_, [](tcp::TcpChannel* wire) { return wire->leave(); });
            if (static_cast<std::size_t>(num_left) == wires_.size() || deadline.expired()) {
                for (tcp::TcpChannel* wire : wires_) wire->close();
                return;
            }
        }
        lookout_->watch(drain_tick);
    }
}

void P2PEngine::abandon() noexcept {
    is_open_.store(false);
    is_abandoned_.store(true);
    (void)keeper_.release();
    (void)watchman_.release();
    for (tcp::TcpChannel* wire : wires_) wire->drop();
    if (lookout_) lookout_->drop();
}

// All below run under the lock.

void P2PEngine::start(Peer& peer, Send& send) {
    ++num_moves_;
    peer.start(send);
    note_outgoing(peer);
}

// Has whoever spins write for a rank of this host, which does not say when it has made room.
void P2PEngine::note_outgoing(const Peer& peer) {
    if (peer.has_outgoing()) has_outgoing_.store(true, std::memory_order_relaxed);
}

bool P2PEngine::read(Peer& peer, const Transfer* until) {
    if (peer.is_lost()) return false;
    const bool has_read = peer.read(until);
    if (has_read && peer.has_outgoing()) peer.pump();  // it may have been granted something
    if (peer.is_lost() && !lost_[static_cast<std::size_t>(peer.rank())]) {
        unexplained_.push_back({.rank = peer.rank(), .time = Clock::now()});
        call_keeper();
    }
    return has_read;
}

// Moves what can be moved, but reads no further than to the end of `until`. Returns whether anything has.
bool P2PEngine::poll(const Transfer* until, const tcp::ReadySet& sights) {
    if (is_closed_) return false;
    bool has_moved = false;
    for (std::size_t i = 0; i < local_.size(); ++i) has_moved |= read(*peers_[i], until);
    for (std::size_t i = 0; i < sights.size(); ++i) {
        const auto sight = sights[i];
        Peer& peer = *peers_[sight.place];
        if (sight.is_readable) has_moved |= read(peer, until);
        if (sight.is_writable) has_moved |= peer.pump();
    }
    settle();
    bool has_outgoing = false;
    for (std::size_t i = 0; i < local_.size(); ++i) {
        Peer& peer = *peers_[i];
        if (!peer.has_outgoing()) continue;
        has_moved |= peer.pump();
        has_outgoing |= peer.has_outgoing();
    }
    has_outgoing_.store(has_outgoing, std::memory_order_relaxed);
    if (has_moved) ++num_moves_;
    return has_moved;
}

// Does what has come of the mailbox's calls.
void P2PEngine::settle() {
    auto& mailbox = reception_.mailbox;
    for (const auto& message : mailbox.granted) {
        if (message->is_granted) continue;
        message->is_granted = true;
        Peer& peer = *peer_of(message->source);
        peer.grant(*message);
        note_outgoing(peer);
    }
    mailbox.granted.clear();
    if (!reception_.news.empty() || mailbox.has_ended_watched()) has_work_.store(true, std::memory_order_relaxed);
}

}  // namespace ferrodist
