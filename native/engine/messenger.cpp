#include "engine/messenger.h"

#include <pthread.h>

#include <algorithm>

#include "base/interruption.h"
#include "base/processor.h"

namespace ferrodist {

namespace {

constexpr auto tick = std::chrono::milliseconds(1);
constexpr auto no_tick = std::chrono::hours(1);

constexpr int pauses_a_look = 16;  // at the clock

// Of a ring that are read before the others get their turn; no less than a ring holds.
constexpr std::size_t budget_bytes = std::size_t{1} << 20;

constexpr std::uint64_t max_message_bytes = std::uint64_t{1} << 48;

}  // namespace

Messenger::Held::~Held() {
    if (!lock_.owns_lock()) return;
    messenger_.settle();
    const std::size_t num_ended = messenger_.mailbox_.num_ended;
    const bool has_ended = num_ended != messenger_.num_ended_seen_;
    messenger_.num_ended_seen_ = num_ended;
    lock_.unlock();
    if (has_ended && messenger_.num_asleep_.load() > (is_asleep_ ? 1 : 0)) messenger_.bell_.load()->wake(shm::waiter);
    if (does_work_) messenger_.do_work();
}

class Messenger::Watch {
public:
    explicit Watch(Messenger& messenger) : messenger_(messenger) {
        messenger_.num_waiters_.fetch_add(1);
        auto& asleep = messenger_.bell_.load()->asleep;
        if ((asleep.load(std::memory_order_relaxed) & shm::keeper) != 0) asleep.fetch_and(~shm::keeper);
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;
    ~Watch() {
        if (messenger_.num_waiters_.fetch_sub(1) != 1) return;
        if (!messenger_.is_ticking_.load() || messenger_.mailbox_.has_listeners()) messenger_.ask_keeper();
    }

private:
    Messenger& messenger_;
};

Messenger::Messenger(const Settings& settings, std::function<void()> on_work)
    : settings_(settings),
      on_work_(std::move(on_work)),
      mailbox_(settings.max_unasked_bytes),
      by_rank_(static_cast<std::size_t>(settings.num_ranks), nullptr),
      lost_(static_cast<std::size_t>(settings.num_ranks), false),
      bell_(&own_bell_) {}

Messenger::~Messenger() {
    close();
}

void Messenger::attach(std::shared_ptr<const shm::Rings> rings, const std::vector<int>& local_indexes, bool is_crowded,
                       std::uint32_t spin_micros) {
    {
        const Held held(*this);
        rings_ = std::move(rings);
        const int own = local_indexes[static_cast<std::size_t>(settings_.rank)];
        for (int rank = 0; rank < settings_.num_ranks; ++rank) {
            const auto place = static_cast<std::size_t>(rank);
            if (rank == settings_.rank || local_indexes[place] < 0) continue;
            peers_.push_back(std::make_unique<Peer>(*rings_, rank, own, local_indexes[place]));
            by_rank_[place] = peers_.back().get();
            by_rank_[place]->is_lost = lost_[place];
        }
        is_crowded_ = is_crowded;
        spin_time_ = std::chrono::microseconds(spin_micros);
        bell_.store(&rings_->bell(own));
        has_peers_.store(!peers_.empty());
    }
    own_bell_.wake(shm::waiter);  // whoever sleeps there sleeps on the other from now on
    if (!peers_.empty()) keeper_ = std::make_unique<std::thread>([this] { keep(); });
}

bool Messenger::try_send(const std::byte* data, std::size_t size, int dst, const Tag& tag) {
    shm::Bell* bell = nullptr;
    {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock.owns_lock() || !is_open()) return false;
        Peer* peer = peer_of(dst);
        if (peer == nullptr || peer->is_lost || peer->has_outgoing()) return false;
        if (size > settings_.eager_bytes || size > peer->writer.chunk_bytes()) return false;
        if (peer->writer.room(size) < static_cast<std::ptrdiff_t>(size)) return false;
        ++num_starts_;
        peer->writer.write({.kind = shm::FrameKind::eager,
                            .length = static_cast<std::uint32_t>(size),
                            .message = peer->num_messages++,
                            .group = tag.group,
                            .tag = tag.number,
                            .size = size,
                            .offset = 0},
                           data);
        bell = &peer->bell;
    }
    bell->ring();
    return true;
}

bool Messenger::start_if_open(Send& send) {
    const Held held(*this, false);
    Peer* peer = peer_of(send.peer);
    if (!is_open() || peer == nullptr || peer->is_lost) return false;
    enqueue(*peer, send);
    return true;
}

bool Messenger::start_if_open(Receive& receive, bool may_wait) {
    const Held held = may_wait ? Held(*this, false) : Held(*this, std::try_to_lock);
    if (!held.is_held() || !is_open()) return false;
    if (receive.source == any_source ? num_lost_ != 0 : lost_[static_cast<std::size_t>(receive.source)]) return false;
    ++num_starts_;
    mailbox_.post(receive);
    if (receive.outcome == Outcome::under_way) poll(&receive);
    return true;
}

void Messenger::start(Send& send) {
    const Held held(*this, false);
    enqueue(*peer_of(send.peer), send);
}

void Messenger::start(Receive& receive) {
    const Held held(*this, false);
    ++num_starts_;
    mailbox_.post(receive);
    if (receive.outcome == Outcome::under_way && !is_closed_) poll(&receive);
}

bool Messenger::wait(const Transfer& transfer, double timeout) {
    if (transfer.has_ended.load()) return true;
    if (is_abandoned_.load()) return false;
    const Deadline deadline(timeout);
    const Watch watch(*this);
    bool has_moved = true;
    while (true) {
        if (has_moved && timeout > 0.0 && spin(transfer)) return true;
        shm::Bell& bell = *bell_.load();
        num_asleep_.fetch_add(1);
        bell.asleep.fetch_or(shm::waiter);
        const std::uint32_t word = bell.word.load();
        {
            Held held(*this, false);
            held.set_asleep();
            has_moved = poll(&transfer);
        }
        if (!transfer.has_ended.load()) do_work();
        if (!has_moved && !transfer.has_ended.load() && (bell.asleep.load() & shm::waiter) != 0) {
            const auto left = std::min<Clock::duration>(deadline.remaining(), interruption_period);
            if (left > Clock::duration::zero())
                bell.sleep(word, shm::waiter, std::chrono::duration_cast<std::chrono::nanoseconds>(left));
        }
        num_asleep_.fetch_sub(1);
        if (transfer.has_ended.load()) return true;
        look_for_interruption();
        if (deadline.expired()) return false;
    }
}

bool Messenger::spin(const Transfer& transfer) {
    auto end = Clock::now() + spin_time_;
    for (int num_looks = 1;; ++num_looks) {
        if (transfer.has_ended.load()) return true;
        bool has_moved = false;
        if (has_news()) {
            const Held held(*this, std::try_to_lock);
            if (held.is_held()) has_moved = poll(&transfer);
        }
        if (transfer.has_ended.load()) return true;
        do_work();
        if (is_crowded_) {
            if (has_moved) num_looks = 0;
            if (num_looks == crowded_pauses + crowded_yields) return false;
            num_looks < crowded_pauses ? relax() : give_way();
            continue;
        }
        if (has_moved)
            end = Clock::now() + spin_time_;
        else if (num_looks % pauses_a_look == 0 && Clock::now() >= end)
            return false;
        relax();
    }
}

bool Messenger::has_news() const noexcept {
    if (!has_peers_.load(std::memory_order_acquire)) return false;
    if (has_outgoing_.load(std::memory_order_relaxed)) return true;
    return std::ranges::any_of(peers_, [](const auto& peer) { return peer->reader.has_frames(); });
}

// Has the keeper woken by whatever comes from now on, and takes in what has come.
void Messenger::ask_keeper() {
    if (!has_peers_.load()) return;
    auto& asleep = bell_.load()->asleep;
    if ((asleep.load() & shm::keeper) != 0) return;  // since it was asked nothing has come
    const Held held(*this);
    asleep.fetch_or(shm::keeper);
    poll(nullptr);
}

void Messenger::keep() {
    ::pthread_setname_np(::pthread_self(), "ferro-messages");
    shm::Bell& bell = *bell_.load();
    std::uint64_t num_starts_seen = 0;
    while (true) {
        bool is_ticking = false;
        std::uint32_t word = 0;
        {
            const Held held(*this);
            if (is_closed_) return;
            const bool has_moved = poll(nullptr);
            is_ticking = has_moved || num_starts_ != num_starts_seen;
            num_starts_seen = num_starts_;
            is_ticking_.store(is_ticking);
            // A waiter that leaves looks at `is_ticking_` after it has counted itself out: it asks if this does not.
            const bool asks = num_waiters_.load() == 0 && (!is_ticking || has_started());
            if (asks) bell.asleep.fetch_or(shm::keeper);
            word = bell.word.load();
            if (asks) poll(nullptr);
        }
        bell.sleep(word, shm::keeper, is_ticking ? std::chrono::nanoseconds(tick) : std::chrono::nanoseconds(no_tick));
    }
}

bool Messenger::cancel(Send& send, Outcome outcome, std::size_t reason) {
    if (is_abandoned_.load()) return false;
    const Held held(*this);
    Peer& peer = *peer_of(send.peer);
    const bool is_cancelled = cancel_held(send, outcome, reason);
    if (is_cancelled) pump(peer);
    return is_cancelled;
}

bool Messenger::cancel_held(Send& send, Outcome outcome, std::size_t reason) {
    if (send.outcome != Outcome::under_way) return false;
    Peer& peer = *peer_of(send.peer);
    auto& queue = send.stage == Send::Stage::queued    ? peer.queued
                  : send.stage == Send::Stage::offered ? peer.offered
                                                       : peer.granted;
    queue.remove(send);
    send.reason = reason;
    if (send.is_announced) notify(peer, shm::FrameKind::withdraw, send.number);
    mailbox_.end(send, outcome);  // after which whoever waits for it may be gone with it
    return true;
}

bool Messenger::cancel(Receive& receive, Outcome outcome) {
    if (is_abandoned_.load()) return false;
    Held held(*this);
    await_writer(held.lock(), receive);
    return mailbox_.cancel(receive, outcome);
}

bool Messenger::end_unmatched(Receive& receive, std::size_t reason) {
    const Held held(*this);
    poll(nullptr);
    if (receive.outcome != Outcome::under_way || receive.message) return false;
    receive.reason = reason;
    mailbox_.fail(receive);
    return true;
}

void Messenger::listen(Transfer& transfer) {
    if (is_abandoned_.load()) return;
    {
        const Held held(*this, false);
        mailbox_.add_listener(transfer);
    }
    if (num_waiters_.load() == 0) ask_keeper();
}

// Until the writer of a linked message is done with the receive's buffer.
void Messenger::await_writer(std::unique_lock<std::mutex>& lock, const Receive& receive) {
    writer_done_.wait(lock, [&] {
        const Message* message = receive.message.get();
        return message == nullptr || !message->is_being_written || message->kept;
    });
}

std::byte* Messenger::begin_write(Message& message, std::size_t offset) {
    const Held held(*this);
    std::byte* target = Mailbox::target(message, offset);
    message.is_being_written = target != nullptr;
    return target;
}

void Messenger::end_write(const std::shared_ptr<Message>& message, std::size_t count) {
    {
        const Held held(*this);
        message->is_being_written = false;
        mailbox_.advance(*message, count);
    }
    writer_done_.notify_all();
}

void Messenger::withdraw(Message& message) {
    const Held held(*this);
    mailbox_.withdraw(message);
}

std::vector<Party> Messenger::parties() {
    const Held held(*this);
    poll(nullptr);
    std::vector<Party> found;
    const auto add = [&](const Party& party) {
        if (std::ranges::find(found, party) == found.end()) found.push_back(party);
    };
    mailbox_.for_each_receive([&](const Receive& receive) { add({false, receive.tag.group, receive.source}); });
    for (const auto& peer : peers_)
        for (const auto* queue : {&peer->queued, &peer->offered, &peer->granted})
            for (const Send* send = queue->first(); send != nullptr; send = send->next)
                add({true, send->tag.group, peer->rank});
    return found;
}

void Messenger::fail(const Party& party, std::size_t reason) {
    Held held(*this);
    if (party.is_send) {
        Peer& peer = *peer_of(party.peer);
        for (auto* queue : {&peer.queued, &peer.offered, &peer.granted})
            for (Send* send = queue->first(); send != nullptr;) {
                Send* next = send->next;
                if (send->tag.group == party.group) cancel_held(*send, Outcome::ended, reason);
                send = next;
            }
        pump(peer);
        return;
    }
    while (true) {
        Receive* held_up = nullptr;  // by the writer of its message
        mailbox_.for_each_receive([&](Receive& receive) {
            if (receive.tag.group != party.group || receive.source != party.peer) return;
            if (receive.message && receive.message->is_being_written && !receive.message->kept) {
                held_up = &receive;
                return;
            }
            receive.reason = reason;
            mailbox_.fail(receive);
        });
        if (held_up == nullptr) return;
        const std::shared_ptr<Message> message = held_up->message;
        writer_done_.wait(held.lock(), [&] { return !message->is_being_written; });
    }
}

void Messenger::open_group(std::uint64_t group, const std::vector<int>& members) {
    const Held held(*this);
    Group& opened = groups_[group];
    opened.members.assign(static_cast<std::size_t>(settings_.num_ranks), false);
    for (const int rank : members) opened.members[static_cast<std::size_t>(rank)] = true;
    mailbox_.for_each_waiting_message([&](Message& message) {
        if (message.tag.group == group && !is_welcome(message.source, message.tag)) mailbox_.drop(message);
    });
}

void Messenger::end_group(std::uint64_t group) {
    const Held held(*this);
    groups_[group] = {.has_ended = true, .members = {}};
    if (group == 0) is_open_.store(false);
    mailbox_.for_each_waiting_message([&](Message& message) {
        if (message.tag.group == group) mailbox_.drop(message);
    });
    for (const auto& peer : peers_)
        std::erase_if(peer->incoming, [&](const auto& each) { return each.second->tag.group == group; });
}

void Messenger::lose(int rank) {
    const Held held(*this);
    const auto place = static_cast<std::size_t>(rank);
    if (lost_[place]) return;
    lost_[place] = true;
    ++num_lost_;
    Peer* peer = peer_of(rank);
    if (peer == nullptr) return;
    read(*peer, nullptr);  // what it has sent stays valid
    break_off(*peer);
}

// Nothing more is taken from a rank, nor sent to it.
void Messenger::break_off(Peer& peer) {
    peer.is_lost = true;
    peer.notices.clear();
    while (!peer.incoming.empty()) {
        const std::shared_ptr<Message> message = peer.incoming.begin()->second;
        peer.incoming.erase(peer.incoming.begin());
        // What waits whole is out of this list; this has not all come, and never will.
        mailbox_.withdraw(*message);
    }
}

std::vector<Messenger::Waiting> Messenger::waiting_messages() {
    const Held held(*this);
    std::vector<Waiting> found;
    mailbox_.for_each_waiting_message(
        [&](const Message& message) { found.push_back({message.number, message.source, message.tag}); });
    return found;
}

void Messenger::drop(std::uint64_t number) {
    const Held held(*this);
    mailbox_.for_each_waiting_message([&](Message& message) {
        if (message.number == number) mailbox_.drop(message);
    });
}

int Messenger::fullest_source(int newest, std::size_t size_kept) {
    const Held held(*this);
    return mailbox_.fullest_source(newest, size_kept);
}

std::size_t Messenger::unasked_bytes() {
    const Held held(*this);
    return mailbox_.unasked_bytes();
}

Work Messenger::take_work() {
    const Held held(*this, false);
    has_work_.store(false);
    return {.news = std::exchange(news_, {}), .first_ended = mailbox_.take_ended()};
}

void Messenger::close() {
    if (is_abandoned_.load()) return;
    is_open_.store(false);
    {
        const Held held(*this, false);
        if (is_closed_) return;
        for (const auto& peer : peers_) pump(*peer);
        is_closed_ = true;
        mailbox_.for_each_receive([&](Receive& receive) { mailbox_.fail(receive); });
        mailbox_.drop_all();
        for (const auto& peer : peers_)
            for (auto* queue : {&peer->queued, &peer->offered, &peer->granted})
                while (Send* send = queue->first()) {
                    queue->remove(*send);
                    mailbox_.end(*send, Outcome::ended);
                }
    }
    if (!keeper_) return;
    bell_.load()->wake(shm::keeper | shm::waiter);
    if (keeper_->get_id() == std::this_thread::get_id())
        keeper_->detach();
    else
        keeper_->join();
    keeper_.reset();
}

void Messenger::abandon() noexcept {
    is_open_.store(false);
    is_abandoned_.store(true);
    (void)keeper_.release();
}

// All below run under the lock.

// Moves what can be moved, but reads no further than to the end of `until`. Returns whether anything has.
bool Messenger::poll(const Transfer* until) {
    if (is_closed_) return false;
    bool has_moved = false;
    bool has_outgoing = false;
    for (const auto& peer : peers_)
        if (!peer->is_lost) has_moved |= read(*peer, until);
    settle();
    for (const auto& peer : peers_) {
        if (peer->has_outgoing()) has_moved |= pump(*peer);
        has_outgoing |= peer->has_outgoing();
    }
    has_outgoing_.store(has_outgoing, std::memory_order_relaxed);
    return has_moved;
}

bool Messenger::read(Peer& peer, const Transfer* until) {
    bool has_read = false;
    for (std::size_t num_bytes = 0; num_bytes < budget_bytes;) {
        if (until != nullptr && until->outcome != Outcome::under_way) break;
        shm::Frame frame;
        const auto front = peer.reader.front(frame);
        if (front == shm::RingReader::Front::none) break;
        if (front == shm::RingReader::Front::broken || !take(peer, frame)) {
            news_.push_back({.kind = News::Kind::broken, .rank = peer.rank, .message = nullptr});
            break_off(peer);
            break;
        }
        peer.reader.pop(frame);
        has_read = true;
        num_bytes += sizeof(frame) + frame.length;
        if (peer.reader.should_release() && peer.reader.release()) peer.bell.ring();
    }
    if (peer.reader.release()) peer.bell.ring();
    return has_read;
}

// Acts on a frame; false when no rank of this version would have written it.
bool Messenger::take(Peer& peer, const shm::Frame& frame) {
    if (frame.size > max_message_bytes || frame.length > frame.size) return false;
    switch (frame.kind) {
        case shm::FrameKind::eager:
            if (frame.size > settings_.eager_bytes || frame.offset != 0) return false;
            if (frame.length == 0 && frame.size != 0) return false;
            take_eager(peer, frame);
            return true;
        case shm::FrameKind::offer: {
            if (frame.length != 0 || frame.size == 0 || peer.incoming.contains(frame.message)) return false;
            announce(peer, frame, true);
            return true;
        }
        case shm::FrameKind::data:
            return take_data(peer, frame);
        case shm::FrameKind::grant:
            take_grant(peer, frame.message);
            return frame.length == 0;
        case shm::FrameKind::withdraw:
            if (const auto found = peer.incoming.find(frame.message); found != peer.incoming.end()) {
                const std::shared_ptr<Message> message = found->second;
                peer.incoming.erase(found);
                mailbox_.withdraw(*message);
            }
            return frame.length == 0;
    }
    return false;
}

void Messenger::take_eager(Peer& peer, const shm::Frame& frame) {
    const Tag tag{frame.group, frame.tag};
    if (frame.length == frame.size && is_welcome(peer.rank, tag)) {
        // The usual case: it is whole, and its receive is there.
        if (Receive* receive = mailbox_.take_receive(peer.rank, tag, frame.size)) {
            peer.reader.copy_to(receive->data, frame.length);
            mailbox_.finish(*receive, peer.rank);
            return;
        }
    }
    const auto message = announce(peer, frame, false);
    if (!message || frame.length == 0) return;
    if (std::byte* target = Mailbox::target(*message, 0)) peer.reader.copy_to(target, frame.length);
    advance(peer, *message, frame);
}

// Has a message wait for its bytes or its receive; null when it is not taken in.
std::shared_ptr<Message> Messenger::announce(Peer& peer, const shm::Frame& frame, bool is_offered) {
    const Tag tag{frame.group, frame.tag};
    if (!is_welcome(peer.rank, tag)) return nullptr;
    auto message = std::make_shared<Message>(peer.rank, tag, frame.size, is_offered);
    message->sender_number = frame.message;
    if (!mailbox_.arrive(message)) {
        news_.push_back({.kind = News::Kind::full, .rank = peer.rank, .message = message});
        return nullptr;
    }
    if (frame.length != frame.size) peer.incoming[frame.message] = message;
    return message;
}

bool Messenger::take_data(Peer& peer, const shm::Frame& frame) {
    if (frame.length == 0) return false;
    const auto found = peer.incoming.find(frame.message);
    if (found == peer.incoming.end()) return true;  // its group has ended, or it was not taken in
    const std::shared_ptr<Message> message = found->second;
    if (frame.size != message->size || frame.offset != message->num_received) return false;
    if (frame.length > message->size - message->num_received) return false;
    if (message->is_offered && !message->is_granted) return false;
    if (std::byte* target = Mailbox::target(*message, frame.offset)) peer.reader.copy_to(target, frame.length);
    advance(peer, *message, frame);
    return true;
}

void Messenger::advance(Peer& peer, Message& message, const shm::Frame& frame) {
    mailbox_.advance(message, frame.length);
    if (message.num_received == message.size) peer.incoming.erase(frame.message);
}

void Messenger::take_grant(Peer& peer, std::uint64_t number) {
    for (Send* send = peer.offered.first(); send != nullptr; send = send->next) {
        if (send->number != number) continue;
        peer.offered.remove(*send);
        send->stage = Send::Stage::granted;
        peer.granted.add(*send);
        return;
    }  // else it was taken back meanwhile
}

// Writes what waits to be written to a rank, as far as there is room. Returns whether anything was.
bool Messenger::pump(Peer& peer) {
    if (peer.is_lost || is_closed_) return false;
    bool has_written = false;
    bool has_looked = false;
    while (peer.has_outgoing()) {
        bool has_room = false;
        while (!peer.notices.empty() && peer.writer.room(0) >= 0) {
            peer.writer.write(peer.notices.front(), nullptr);
            peer.notices.pop_front();
            has_room = true;
        }
        if (Send* send = peer.queued.first()) has_room |= put(peer, *send);
        if (Send* send = peer.granted.first()) has_room |= put(peer, *send);
        if (has_room) {
            has_written = true;
            peer.bell.ring();
        } else if (has_looked) {
            break;
        }
        has_looked = !has_room;
        if (!has_room) peer.writer.set_blocked(true);  // and look once more
    }
    if (!peer.has_outgoing())
        peer.writer.set_blocked(false);
    else
        has_outgoing_.store(true, std::memory_order_relaxed);
    return has_written;
}

// Writes the next frame of a message; false when there is no room for it.
bool Messenger::put(Peer& peer, Send& send) {
    shm::Frame frame{.kind = shm::FrameKind::data,
                     .length = 0,
                     .message = send.number,
                     .group = send.tag.group,
                     .tag = send.tag.number,
                     .size = send.size,
                     .offset = send.num_written};
    const bool is_offer = send.stage == Send::Stage::queued && send.size > settings_.eager_bytes;
    const std::size_t length = is_offer ? 0 : std::min(send.size - send.num_written, peer.writer.chunk_bytes());
    if (peer.writer.room(length) < static_cast<std::ptrdiff_t>(length)) return false;
    if (!send.is_announced) frame.kind = is_offer ? shm::FrameKind::offer : shm::FrameKind::eager;
    frame.length = static_cast<std::uint32_t>(length);
    peer.writer.write(frame, send.data + send.num_written);
    send.is_announced = true;
    send.num_written += length;
    if (is_offer) {
        peer.queued.remove(send);
        send.stage = Send::Stage::offered;
        peer.offered.add(send);
    } else if (send.num_written == send.size) {
        (send.stage == Send::Stage::queued ? peer.queued : peer.granted).remove(send);
        mailbox_.end(send, Outcome::done);
    }
    return true;
}

void Messenger::enqueue(Peer& peer, Send& send) {
    ++num_starts_;
    send.number = peer.num_messages++;
    peer.queued.add(send);
    pump(peer);
}

void Messenger::notify(Peer& peer, shm::FrameKind kind, std::uint64_t number) {
    if (!peer.is_lost)
        peer.notices.push_back(
            {.kind = kind, .length = 0, .message = number, .group = 0, .tag = 0, .size = 0, .offset = 0});
}

// Does what has come of the mailbox's calls.
void Messenger::settle() {
    for (const auto& message : mailbox_.granted) {
        if (message->is_granted) continue;
        message->is_granted = true;
        Peer* peer = message->is_linked ? nullptr : peer_of(message->source);
        if (peer == nullptr) {
            news_.push_back({.kind = News::Kind::grant, .rank = message->source, .message = message});
        } else {
            notify(*peer, shm::FrameKind::grant, message->sender_number);
            pump(*peer);
        }
    }
    mailbox_.granted.clear();
    if (!news_.empty() || mailbox_.has_ended_watched()) has_work_.store(true, std::memory_order_relaxed);
}

bool Messenger::is_welcome(int source, const Tag& tag) const {
    if (is_closed_) return false;
    if (tag.group == 0 && is_open()) return true;
    const auto found = groups_.find(tag.group);
    if (found == groups_.end()) return true;
    const Group& group = found->second;
    return !group.has_ended && (group.members.empty() || group.members[static_cast<std::size_t>(source)]);
}

// Whether transfers are under way that somebody may wait for elsewhere.
bool Messenger::has_started() const {
    return mailbox_.has_receives() ||
           std::ranges::any_of(peers_, [](const auto& peer) { return peer->has_outgoing() || peer->offered.first(); });
}

}  // namespace ferrodist
