#include "engine/p2p_engine.h"

#include <algorithm>

namespace ferrodist {

namespace {

constexpr auto frames_tick = std::chrono::microseconds(100);
constexpr auto drain_tick = std::chrono::milliseconds(10);

// Maximum number of reads to receive everything that a lost rank has left behind.
constexpr int max_final_reads = 64;

}  // namespace

P2PEngine::Guard::~Guard() {
    if (!lock_.owns_lock()) return;
    engine_.process_mailbox();
    const std::size_t num_ended = engine_.admission_.mailbox.num_ended;
    const bool has_ended = num_ended != engine_.num_ended_seen_;
    engine_.num_ended_seen_ = num_ended;
    const bool is_reading = engine_.admission_.num_in_place != 0;  // and somebody has to go on
    lock_.unlock();
    if (is_reading && !will_wait_ && engine_.num_waiters_.load() == 0) engine_.wake_progress_thread();
    if ((has_ended || is_reading) && engine_.num_asleep_.load() > (is_asleep_ ? 1 : 0))
        engine_.doorbell_.wake(shm::waiter);
    if (dispatches_) engine_.dispatch_events();
}

P2PEngine::P2PEngine(const Settings& settings, Routes routes, std::function<void(P2PEngine&)> on_events)
    : settings_(settings),
      on_events_(std::move(on_events)),
      admission_(static_cast<int>(routes.local_indexes.size()), settings.eager_bytes, settings.max_unexpected_bytes),
      rings_(std::move(routes.rings)),
      doorbell_(rings_->doorbell(routes.local_indexes[static_cast<std::size_t>(settings.rank)])),
      by_rank_(routes.local_indexes.size(), nullptr),
      lost_(routes.local_indexes.size(), false),
      spin_time_(settings.spin_micros) {
    connect(routes);
    try {
        if (!peers_.empty()) progress_thread_ = std::make_unique<std::thread>([this] { run_progress_thread(); });
        if (poller_) poll_thread_ = std::make_unique<std::thread>([this] { run_poll_thread(); });
    } catch (...) {  // the system's thread limit is reached
        close();
        throw;
    }
}

P2PEngine::~P2PEngine() {
    close();
}

void P2PEngine::connect(Routes& routes) {
    const auto own = static_cast<std::size_t>(settings_.rank);
    std::vector<std::pair<std::size_t, std::unique_ptr<Channel>>> channels;
    for (std::size_t rank = 0; rank < by_rank_.size(); ++rank) {
        const int index = routes.local_indexes[rank];
        is_local_.push_back(index >= 0);
        if (rank == own || index < 0) continue;
        auto channel = std::make_unique<shm::RingChannel>(*rings_, routes.local_indexes[own], index);
        ring_channels_.push_back(channel.get());
        channels.emplace_back(rank, std::move(channel));
    }
    for (std::size_t rank = 0; rank < by_rank_.size(); ++rank) {
        if (routes.local_indexes[rank] >= 0) continue;
        if (!poller_) poller_ = std::make_unique<tcp::Poller>();
        auto tcp_channel =
            std::make_unique<tcp::TcpChannel>(std::move(routes.sockets[rank]), *poller_, channels.size());
        tcp_channels_.push_back(tcp_channel.get());
        channels.emplace_back(rank, std::move(tcp_channel));
    }
    for (auto& [rank, channel] : channels) {
        peers_.push_back(std::make_unique<Peer>(static_cast<int>(rank), std::move(channel), admission_));
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
        note_move();
    }
    peer->notify();
    return true;
}

bool P2PEngine::start_if_open(Send& send) {
    const Guard guard(*this, false);
    Peer* peer = peer_of(send.peer);
    if (!is_open() || peer == nullptr || peer->is_lost()) return false;
    start(*peer, send);
    return true;
}

bool P2PEngine::start_if_open(Receive& receive, bool may_wait) {
    Guard guard = may_wait ? Guard(*this, false) : Guard(*this, std::try_to_lock);
    if (!guard.owns_lock() || !is_open()) return false;
    if (receive.source == any_source ? num_lost_ != 0 : lost_[static_cast<std::size_t>(receive.source)]) return false;
    note_move();
    admission_.mailbox.post(receive);
    if (receive.outcome == Outcome::under_way) poll(&receive);
    if (receive.outcome != Outcome::under_way)
        arm_for_started();  // for the answer to the sender, if there was no space for it
    else if (may_wait)
        guard.set_will_wait();
    return true;
}

void P2PEngine::start(Send& send) {
    const Guard guard(*this, false);
    start(*peer_of(send.peer), send);
}

void P2PEngine::start(Receive& receive) {
    const Guard guard(*this, false);
    note_move();
    admission_.mailbox.post(receive);
    if (receive.outcome == Outcome::under_way) poll(&receive);
    arm_for_started();
}

void P2PEngine::start_with_listener(Receive& receive) {
    const Guard guard(*this, false);
    note_move();
    admission_.mailbox.add_listener(receive);
    admission_.mailbox.post(receive);
    if (receive.outcome == Outcome::under_way) poll(&receive);
    arm_for_started();
}

bool P2PEngine::cancel(Send& send, Outcome outcome, std::size_t reason) {
    if (is_abandoned_.load()) return false;
    const Guard guard(*this);
    Peer& peer = *peer_of(send.peer);
    const bool is_cancelled = peer.cancel(send, outcome, reason);
    note_work(peer);
    arm_for_started();
    return is_cancelled;
}

bool P2PEngine::cancel(Receive& receive) {
    if (is_abandoned_.load()) return false;
    const Guard guard(*this);
    const bool is_cancelled = admission_.mailbox.cancel(receive, Outcome::cancelled);
    arm_for_started();
    return is_cancelled;
}

bool P2PEngine::end_unmatched(Receive& receive, std::size_t reason) {
    const Guard guard(*this);
    poll(nullptr);
    if (receive.outcome != Outcome::under_way || receive.message) return false;
    receive.reason = reason;
    admission_.mailbox.fail(receive);
    return true;
}

void P2PEngine::watch_end(Transfer& transfer) {
    if (is_abandoned_.load()) return;
    {
        const Guard guard(*this, false);
        admission_.mailbox.add_listener(transfer);
    }
    if (num_waiters_.load() == 0) arm_progress_thread();
}

void P2PEngine::send_now(Send& send) {
    const Guard guard(*this);
    Peer& peer = *peer_of(send.peer);
    peer.send_now(send);
    note_work(peer);
    arm_for_started();
}

std::vector<TransferKey> P2PEngine::active_transfers() {
    const Guard guard(*this);
    poll(nullptr);
    std::vector<TransferKey> found;
    const auto add = [&](const TransferKey& key) {
        if (std::ranges::find(found, key) == found.end()) found.push_back(key);
    };
    admission_.mailbox.for_each_receive(
        [&](const Receive& receive) { add({false, receive.tag.group, receive.source}); });
    for (const auto& peer : peers_)
        peer->for_each_send([&](const Send& send) { add({true, send.tag.group, peer->rank()}); });
    return found;
}

void P2PEngine::fail(const TransferKey& key, std::size_t reason) {
    const Guard guard(*this);
    if (key.is_send) {
        Peer& peer = *peer_of(key.peer);
        peer.for_each_send([&](Send& send) {
            if (send.tag.group == key.group) peer.cancel(send, Outcome::ended, reason);
        });
        arm_for_started();
        return;
    }
    admission_.mailbox.for_each_receive([&](Receive& receive) {
        if (receive.tag.group != key.group || receive.source != key.peer) return;
        receive.reason = reason;
        admission_.mailbox.fail(receive);
    });
}

void P2PEngine::open_group(std::uint64_t group, const std::vector<int>& members) {
    const Guard guard(*this);
    admission_.open_group(group, members);
}

void P2PEngine::end_group(std::uint64_t group) {
    const Guard guard(*this);
    if (group == 0) is_open_.store(false);
    admission_.end_group(group);
    for (const auto& peer : peers_) peer->end_group(group);
}

void P2PEngine::forget_group(std::uint64_t group) {
    const Guard guard(*this);
    admission_.forget_group(group);
}

void P2PEngine::lose(int rank) {
    const Guard guard(*this);
    const auto index = static_cast<std::size_t>(rank);
    if (lost_[index]) return;
    lost_[index] = true;
    ++num_lost_;
    std::erase_if(unexplained_, [&](const Loss& loss) { return loss.rank == rank; });
    Peer* peer = peer_of(rank);
    if (peer == nullptr) return;
    for (int turn = 0; turn < max_final_reads && !is_closed_ && read(*peer, nullptr); ++turn) {
    }
    peer->disconnect();
}

std::uint64_t P2PEngine::num_frames_to(int rank) {
    const Guard guard(*this);
    const Peer* peer = peer_of(rank);
    return peer == nullptr ? 0 : peer->channel().num_put();
}

void P2PEngine::await_frames(int rank, std::uint64_t count, double timeout) {
    const Deadline deadline(timeout);
    while (true) {
        {
            const Guard guard(*this);
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

int P2PEngine::fullest_source(int newest, std::size_t buffered_size) {
    const Guard guard(*this);
    return admission_.mailbox.fullest_source(newest, buffered_size);
}

std::size_t P2PEngine::unexpected_bytes() {
    const Guard guard(*this);
    return admission_.mailbox.unexpected_bytes();
}

EngineEvents P2PEngine::take_events() {
    const Guard guard(*this, false);
    has_events_.store(false);
    return {.peer_events = std::exchange(admission_.events, {}), .first_ended = admission_.mailbox.take_ended()};
}

void P2PEngine::close() {
    if (is_abandoned_.load()) return;
    is_open_.store(false);
    {
        const Guard guard(*this, false);
        if (is_closed_) return;
        for (const auto& peer : peers_) {
            peer->pump();
            peer->for_each_send([&](Send& send) { peer->cancel(send, Outcome::ended, 0); });
        }
        is_closed_ = true;
        admission_.close();
        for (tcp::TcpChannel* tcp_channel : tcp_channels_) (void)tcp_channel->leave();
    }
    doorbell_.wake(shm::progress_thread | shm::on_full_ring | shm::waiter);
    if (poller_) poller_->stop();
    for (auto* thread : {&progress_thread_, &poll_thread_}) {
        if (!*thread) continue;
        if ((*thread)->get_id() == std::this_thread::get_id())
            (*thread)->detach();
        else
            (*thread)->join();
        thread->reset();
    }
}

void P2PEngine::drain(double timeout) {
    if (is_abandoned_.load() || !poller_) return;
    const Deadline deadline(timeout);
    while (true) {
        {
            const Guard guard(*this, false);
            const auto num_left =
                std::ranges::count_if(tcp_channels_, [](tcp::TcpChannel* tcp_channel) { return tcp_channel->leave(); });
            if (static_cast<std::size_t>(num_left) == tcp_channels_.size() || deadline.expired()) {
                for (tcp::TcpChannel* tcp_channel : tcp_channels_) tcp_channel->close();
                return;
            }
        }
        poller_->wait(drain_tick);
    }
}

void P2PEngine::abandon() noexcept {
    is_open_.store(false);
    is_abandoned_.store(true);
    (void)progress_thread_.release();
    (void)poll_thread_.release();
    for (tcp::TcpChannel* tcp_channel : tcp_channels_) tcp_channel->drop();
    if (poller_) poller_->drop();
}

// Everything below runs under the lock.

void P2PEngine::start(Peer& peer, Send& send) {
    note_move();
    peer.start(send);
    note_work(peer);
    arm_for_started();
}

// Makes spinning threads go on reading from a rank of this host, and writing to it: it sends no event when it has made
// space.
void P2PEngine::note_work(const Peer& peer) {
    if (peer.has_work()) has_work_.store(true, std::memory_order_relaxed);
}

bool P2PEngine::read(Peer& peer, const Transfer* until) {
    if (peer.is_lost()) return false;
    const bool has_read = peer.read(until);
    if (has_read && peer.has_outgoing()) peer.pump();  // a send may have been granted
    if (peer.is_lost() && !lost_[static_cast<std::size_t>(peer.rank())]) {
        unexplained_.push_back({.rank = peer.rank(), .time = Clock::now()});
        has_unexplained_.store(true);
        wake_progress_thread();
    }
    return has_read;
}

// Moves all messages that can be moved, but reads no further than the end of `until`. Returns whether anything moved.
bool P2PEngine::poll(const Transfer* until, const tcp::ReadySet& ready) {
    if (is_closed_) return false;
    bool has_moved = false;
    for (std::size_t i = 0; i < ring_channels_.size(); ++i) has_moved |= read(*peers_[i], until);
    for (std::size_t i = 0; i < ready.size(); ++i) {
        const auto entry = ready[i];
        Peer& peer = *peers_[entry.index];
        if (entry.is_readable) has_moved |= read(peer, until);
        if (entry.is_writable) has_moved |= peer.pump();
    }
    process_mailbox();
    bool has_work = false;
    for (std::size_t i = 0; i < ring_channels_.size(); ++i) {
        Peer& peer = *peers_[i];
        if (!peer.has_work()) continue;
        has_moved |= peer.pump();
        has_work |= peer.has_work();
    }
    has_work_.store(has_work, std::memory_order_relaxed);
    if (has_moved) note_move();
    return has_moved;
}

// Processes the results of calls to the mailbox.
void P2PEngine::process_mailbox() {
    auto& mailbox = admission_.mailbox;
    for (const auto& message : mailbox.wanted) {
        if (message->is_fetched) continue;
        Peer& peer = *peer_of(message->source);
        peer.fetch(message);
        note_work(peer);
    }
    mailbox.wanted.clear();
    if (!admission_.events.empty() || mailbox.has_ended_watched()) has_events_.store(true, std::memory_order_relaxed);
}

}  // namespace ferrodist
