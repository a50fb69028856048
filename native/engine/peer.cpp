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
    if (size > admission_.eager_bytes || size > channel_->chunk_bytes()) return false;
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

void Peer::grant(const Message& message) {
    queue_control_frame(FrameType::grant, message.sender_number);
    pump();
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
    const bool is_offer = send.stage == Send::Stage::queued && send.size > admission_.eager_bytes;
    const std::size_t length = is_offer ? 0 : std::min(send.size - send.num_written, channel_->chunk_bytes());
    const auto kind = send.is_announced ? FrameType::data : is_offer ? FrameType::offer : FrameType::eager;
    const auto put = channel_->put({.kind = kind,
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

// Records that a frame of the message has been written, or will be.
void Peer::advance(Send& send, std::size_t count) {
    send.num_written += count;
    if (send.stage == Send::Stage::queued && send.size > admission_.eager_bytes) {
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
    channel_->release_space();
    return has_read;
}

// Handles a frame; false on a protocol violation.
bool Peer::on_frame(const Frame& frame) {
    if (frame.size > max_message_bytes || frame.length > frame.size) return false;
    switch (frame.kind) {
        case FrameType::eager:
            if (frame.size > admission_.eager_bytes || frame.offset != 0) return false;
            if (frame.length == 0 && frame.size != 0) return false;
            on_eager(frame);
            return true;
        case FrameType::offer: {
            if (frame.length != 0 || frame.size == 0 || incoming_.contains(frame.message)) return false;
            announce(frame, true);
            return true;
        }
        case FrameType::data:
            return on_data(frame);
        case FrameType::grant:
            on_grant(frame.message);
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

std::shared_ptr<Message> Peer::announce(const Frame& frame, bool is_offered) {
    auto message = std::make_shared<Message>(rank_, Tag{frame.group, frame.tag}, frame.size, is_offered);
    message->sender_number = frame.message;
    if (!admission_.announce(message)) return nullptr;
    if (frame.length != frame.size) incoming_[frame.message] = message;
    return message;
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
    admission_.mailbox.advance(message, channel_->read_payload(target, frame.length));
    if (message.num_received == message.size) incoming_.erase(frame.message);
}

void Peer::on_grant(std::uint64_t number) {
    for (Send* send = offered_.first(); send != nullptr; send = send->next) {
        if (send->number != number) continue;
        offered_.remove(*send);
        send->stage = Send::Stage::granted;
        granted_.add(*send);
        return;
    }  // otherwise it has been withdrawn meanwhile
}

void Peer::disconnect() {
    if (is_lost_) return;
    is_lost_ = true;
    channel_->disconnect();
    control_frames_.clear();
    while (!incoming_.empty()) {
        const std::shared_ptr<Message> message = incoming_.begin()->second;
        incoming_.erase(incoming_.begin());
        // Complete messages are not in this list; this one will never be complete.
        admission_.mailbox.withdraw(*message);
    }
}

}  // namespace ferrodist
