#include "engine/peer.h"

#include <algorithm>

namespace ferrodist {

namespace {

// Bytes read or written per turn, so that other peers get theirs; at least the size of a ring.
constexpr std::size_t budget_bytes = std::size_t{1} << 20;

constexpr std::uint64_t max_message_bytes = std::uint64_t{1} << 48;

}  // namespace

bool Peer::try_send(const std::byte* data, std::size_t size, const Tag& tag) {
    if (is_lost_ || has_outgoing()) return false;
    if (size > admission_.eager_bytes || size > channel_->max_frame_payload()) return false;
    const auto put = channel_->put({.kind = FrameType::eager,
                                    .length = static_cast<std::uint32_t>(size),
                                    .message = num_messages_,
                                    .group = tag.group,
                                    .tag = tag.number,
                                    .size = size,
                                    .offset = 0},
                                   data);
    if (put == Channel::Put::none) return false;
    ++num_messages_;
    if (put == Channel::Put::partial) {
        channel_->copy_rest();
        is_unfinished_ = true;
        channel_->set_blocked(true);
    }
    return true;
}

void Peer::start(Send& send) {
    send.number = num_messages_++;
    queued_.add(send);
    pump();
}

bool Peer::cancel(Send& send, Outcome outcome, std::size_t reason) {
    if (send.outcome != Outcome::under_way) return false;
    if (!withdraw(send)) return false;
    if (unfinished_ == &send) {
        channel_->copy_rest();
        unfinished_ = nullptr;
        advance(send, unfinished_bytes_);
        if (send.outcome != Outcome::under_way) return false;
    }
    queue_of(send).remove(send);
    send.reason = reason;
    if (send.is_announced) queue_control_frame(FrameType::withdraw, send.number);
    admission_.mailbox.end(send, outcome);  // after that the waiting thread may free it
    pump();
    return true;
}

// Makes the receiver unable to read a message in place any more. If it has taken the message, ends the send instead, and
// returns false.
bool Peer::withdraw(Send& send) {
    if (!std::exchange(send.is_in_place, false) || channel_->withdraw(send.number)) return true;
    offered_.remove(send);
    admission_.mailbox.end(send, Outcome::done);
    return false;
}

void Peer::send_now(Send& send) {
    if (send.outcome != Outcome::under_way || send.stage != Send::Stage::offered || !withdraw(send)) return;
    queue_control_frame(FrameType::withdraw, send.number);
    offered_.remove(send);
    send.prefers_offer = send.is_announced = false;
    send.stage = Send::Stage::queued;
    start(send);
}

void Peer::fetch(const std::shared_ptr<Message>& message) {
    message->is_fetched = true;
    if (std::ranges::find(reading_, message) == reading_.end()) {  // else its last receive was cancelled just now
        if (!message->in_place) return grant(*message);
        // A smaller one is not granted: its sender waits but briefly.
        if (message->size > admission_.eager_bytes && !has_sends()) {
            message->fetch = fetch_mode_.begin(message->size);
            if (message->fetch->choice == FetchMode::through_ring) return grant(*message);
        }
        reading_.push_back(message);
        ++admission_.num_in_place;
    }
    (void)read_some_in_place();
}

// Records the time of a message that has gone straight to its receive.
void Peer::end_fetch(const Message& message) {
    if (message.fetch && !message.buffer && message.receive != nullptr) fetch_mode_.end(*message.fetch, message.size);
}

void Peer::end_reading() {
    reading_.pop_front();
    --admission_.num_in_place;
}

void Peer::grant(Message& message) {
    message.is_granted = true;
    message.in_place.reset();
    queue_control_frame(FrameType::grant, message.sender_number);
    pump();
}

std::size_t Peer::read_some_in_place() {
    const std::shared_ptr<Message> message = reading_.front();
    Message& m = *message;
    if (!m.is_fetched) {  // its receive was cancelled, and it waits for another one
        end_reading();
        return 0;
    }
    const std::size_t size = m.receive == nullptr ? 0 : std::min(m.size - m.num_received, budget_bytes);
    if (size != 0 && !channel_->read_in_place(*m.in_place, m.num_received, Mailbox::target(m, m.num_received), size)) {
        end_reading();
        m.num_received = 0;
        m.fetch.reset();
        queue_control_frame(FrameType::unreadable, 0);
        grant(m);
        return 0;
    }
    const bool is_last = m.receive == nullptr || m.num_received + size == m.size;
    if (is_last) {
        end_reading();
        if (!channel_->take(m.sender_number)) return size;  // its withdrawal comes
        incoming_.erase(m.sender_number);
        queue_control_frame(FrameType::taken, m.sender_number);
        pump();
        end_fetch(m);
    }
    admission_.mailbox.advance(m, size);
    return size;
}

void Peer::queue_control_frame(FrameType kind, std::uint64_t number) {
    if (!is_lost_)
        control_frames_.push_back(
            {.kind = kind, .length = 0, .message = number, .group = 0, .tag = 0, .size = 0, .offset = 0});
}

TransferList<Send>& Peer::queue_of(const Send& send) noexcept {
    switch (send.stage) {
        case Send::Stage::queued:
            return queued_;
        case Send::Stage::offered:
            return offered_;
        case Send::Stage::granted:
            break;
    }
    return granted_;
}

bool Peer::pump() {
    if (is_lost_) return false;
    bool has_written = false;
    bool has_retried = false;
    num_bytes_put_ = 0;
    while (has_outgoing()) {
        const bool has_room = put_some();
        if (has_room) {
            has_written = true;
            channel_->notify();
        } else if (has_retried) {
            break;
        }
        has_retried = !has_room;
        if ((!has_room || num_bytes_put_ >= budget_bytes) && !channel_->set_blocked(true)) break;
    }
    if (!has_outgoing()) channel_->set_blocked(false);
    return has_written;
}

// Writes one frame of each kind; false if there is no space for any.
bool Peer::put_some() {
    if (is_unfinished_) {
        const auto put = channel_->finish();
        if (put != Channel::Put::complete) return put == Channel::Put::partial;
        is_unfinished_ = false;
        if (Send* send = std::exchange(unfinished_, nullptr)) advance(*send, unfinished_bytes_);
    }
    bool has_put = false;
    while (!control_frames_.empty() && !is_unfinished_) {
        const auto put = channel_->put(control_frames_.front(), nullptr);
        if (put == Channel::Put::none) break;
        is_unfinished_ = put == Channel::Put::partial;
        control_frames_.pop_front();
        has_put = true;
    }
    if (Send* send = queued_.first(); send != nullptr && !is_unfinished_) has_put |= put(*send);
    if (Send* send = granted_.first(); send != nullptr && !is_unfinished_) has_put |= put(*send);
    return has_put;
}

// Writes the next frame of a message; false if there is no space for it.
bool Peer::put(Send& send) {
    if (send.stage == Send::Stage::queued && is_offered(send)) return put_offer(send);
    const std::size_t length = std::min(send.size - send.num_written, channel_->max_frame_payload());
    const auto put = channel_->put({.kind = send.is_announced ? FrameType::data : FrameType::eager,
                                    .length = static_cast<std::uint32_t>(length),
                                    .message = send.number,
                                    .group = send.tag.group,
                                    .tag = send.tag.number,
                                    .size = send.size,
                                    .offset = send.num_written},
                                   send.data + send.num_written);
    if (put == Channel::Put::none) return false;
    send.is_announced = true;
    num_bytes_put_ += length;
    if (put == Channel::Put::partial) {
        is_unfinished_ = true;
        unfinished_ = &send;
        unfinished_bytes_ = length;
    } else {
        advance(send, length);
    }
    return true;
}

bool Peer::put_offer(Send& send) {
    const auto memory = reads_in_place_ ? channel_->publish(send.number, send.data) : std::nullopt;
    const auto put = channel_->put({.kind = FrameType::offer,
                                    .length = memory ? static_cast<std::uint32_t>(sizeof *memory) : 0,
                                    .message = send.number,
                                    .group = send.tag.group,
                                    .tag = send.tag.number,
                                    .size = send.size,
                                    .offset = 0},
                                   memory ? reinterpret_cast<const std::byte*>(&*memory) : nullptr);
    if (put == Channel::Put::none) {
        if (memory) (void)channel_->withdraw(send.number);  // nobody knows of it yet
        return false;
    }
    send.is_announced = true;
    send.is_in_place = memory.has_value();
    if (put == Channel::Put::partial) {
        is_unfinished_ = true;
        unfinished_ = &send;
        unfinished_bytes_ = 0;
    } else {
        advance(send, 0);
    }
    return true;
}

bool Peer::is_offered(const Send& send) const noexcept {
    return send.size > admission_.eager_bytes || (send.prefers_offer && reads_in_place_);
}

// Records that a frame of the message has been written, or will be.
void Peer::advance(Send& send, std::size_t count) {
    send.num_written += count;
    if (send.stage == Send::Stage::queued && is_offered(send)) {
        queued_.remove(send);
        send.stage = Send::Stage::offered;
        offered_.add(send);
    } else if (send.num_written == send.size) {
        queue_of(send).remove(send);
        admission_.mailbox.end(send, Outcome::done);
    }
}

bool Peer::read(const Transfer* until) {
    if (is_lost_) return false;
    bool has_read = false;
    std::size_t num_bytes = 0;
    while (true) {
        const bool is_done = until != nullptr && until->outcome != Outcome::under_way;
        if ((is_done || num_bytes >= budget_bytes) && channel_->may_stop()) break;
        Frame frame;
        const auto front = channel_->front(frame);
        if (front == Channel::Front::none) break;
        if (front == Channel::Front::ended) {
            disconnect();
            break;
        }
        if (front == Channel::Front::broken || !on_frame(frame)) {
            admission_.add_event(PeerEvent::Kind::broken, rank_);
            disconnect();
            break;
        }
        channel_->pop();
        has_read = true;
        num_bytes += sizeof(frame) + frame.length;
    }
    while (!reading_.empty() && num_bytes < budget_bytes) {
        num_bytes += read_some_in_place();
        has_read = true;
    }
    channel_->release_space();
    return has_read;
}

// Handles a frame; false on a protocol violation.
bool Peer::on_frame(const Frame& frame) {
    // The payload of an offer is not the message's.
    if (frame.size > max_message_bytes || (frame.length > frame.size && frame.kind != FrameType::offer)) return false;
    switch (frame.kind) {
        case FrameType::eager:
            if (frame.size > admission_.eager_bytes || frame.offset != 0) return false;
            if (frame.length == 0 && frame.size != 0) return false;
            on_eager(frame);
            return true;
        case FrameType::offer:
            return on_offer(frame);
        case FrameType::data:
            return on_data(frame);
        case FrameType::grant:
            on_grant(frame.message);
            return frame.length == 0;
        case FrameType::taken:
            on_taken(frame.message);
            return frame.length == 0;
        case FrameType::unreadable:
            reads_in_place_ = false;
            return frame.length == 0;
        case FrameType::withdraw:
            if (const auto found = incoming_.find(frame.message); found != incoming_.end()) {
                const std::shared_ptr<Message> message = found->second;
                incoming_.erase(found);
                admission_.mailbox.withdraw(*message);
            }
            return frame.length == 0;
    }
    return false;
}

void Peer::on_eager(const Frame& frame) {
    const Tag tag{frame.group, frame.tag};
    if (frame.length == frame.size && admission_.is_admitted(rank_, tag)) {
        // The usual case: a complete message with a posted receive.
        if (Receive* receive = admission_.mailbox.take_receive(rank_, tag, frame.size)) {
            (void)channel_->read_payload(receive->data, frame.length);
            admission_.mailbox.finish(*receive, rank_);
            return;
        }
    }
    const auto message = announce(frame, false);
    if (message && frame.length != 0) receive(*message, frame);
}

std::shared_ptr<Message> Peer::announce(const Frame& frame, bool is_offered, std::optional<MessageMemory> in_place) {
    auto message = std::make_shared<Message>(rank_, Tag{frame.group, frame.tag}, frame.size, is_offered);
    message->sender_number = frame.message;
    message->in_place = in_place;
    if (!admission_.announce(message)) return nullptr;
    if (is_offered || frame.length != frame.size) incoming_[frame.message] = message;
    return message;
}

bool Peer::on_offer(const Frame& frame) {
    const bool is_in_place = frame.length == sizeof(MessageMemory);
    if (frame.size == 0 || (frame.length != 0 && !is_in_place) || incoming_.contains(frame.message)) return false;
    std::optional<MessageMemory> memory;
    if (is_in_place) {
        memory.emplace();
        if (channel_->read_payload(reinterpret_cast<std::byte*>(&*memory), frame.length) != frame.length) return false;
    }
    announce(frame, true, memory);
    return true;
}

bool Peer::on_data(const Frame& frame) {
    if (frame.length == 0) return false;
    const auto found = incoming_.find(frame.message);
    if (found == incoming_.end()) return true;  // its group has ended, or it was rejected
    const std::shared_ptr<Message> message = found->second;
    if (frame.size != message->size || frame.offset != message->num_received) return false;
    if (frame.length > message->size - message->num_received) return false;
    if (message->is_offered && !message->is_granted) return false;
    receive(*message, frame);
    return true;
}

// Copies received bytes of a message to their destination.
void Peer::receive(Message& message, const Frame& frame) {
    std::byte* target = Mailbox::target(message, message.num_received);
    const std::size_t count = channel_->read_payload(target, frame.length);
    const bool is_last = message.num_received + count == message.size;
    if (is_last) end_fetch(message);
    admission_.mailbox.advance(message, count);
    if (is_last) incoming_.erase(frame.message);
}

void Peer::on_grant(std::uint64_t number) {
    Send* send = find_offered(number);
    if (send == nullptr) return;  // it has been withdrawn meanwhile
    if (!withdraw(*send)) return;
    offered_.remove(*send);
    send->stage = Send::Stage::granted;
    granted_.add(*send);
}

void Peer::on_taken(std::uint64_t number) {
    Send* send = find_offered(number);
    if (send == nullptr || !send->is_in_place) return;
    offered_.remove(*send);
    admission_.mailbox.end(*send, Outcome::done);
}

Send* Peer::find_offered(std::uint64_t number) const {
    for (Send* send = offered_.first(); send != nullptr; send = send->next)
        if (send->number == number) return send;
    return nullptr;
}

void Peer::disconnect() {
    if (is_lost_) return;
    is_lost_ = true;
    channel_->disconnect();
    control_frames_.clear();
    while (!reading_.empty()) end_reading();
    while (!incoming_.empty()) {
        const std::shared_ptr<Message> message = incoming_.begin()->second;
        incoming_.erase(incoming_.begin());
        // Complete messages are not in this list; this one will never be complete.
        admission_.mailbox.withdraw(*message);
    }
}

}  // namespace ferrodist
