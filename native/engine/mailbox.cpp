#include "engine/mailbox.h"

#include <cstring>

namespace ferrodist {

namespace {

bool fits(int source, int other) {
    return source == any_source || source == other;
}

}  // namespace

std::size_t Mailbox::bucket(const Tag& tag) noexcept {
    // Tags are small integers, counters, and hashes: the multiplication mixes them all.
    const std::uint64_t mixed = (tag.number ^ tag.group) * 0x9E3779B97F4A7C15u;
    return static_cast<std::size_t>(mixed >> 56) % num_buckets;
}

void Mailbox::post(Receive& receive) {
    receive.number = ++num_posted_;
    ++num_receives_;
    if (!take_message(receive)) receives_[bucket(receive.tag)].add(receive);
}

bool Mailbox::arrive(const std::shared_ptr<Message>& message) {
    message->number = ++num_arrived_;
    if (Receive* receive = take_receive(message->source, message->tag, message->size)) {
        pair(*receive, message);
        return true;
    }
    if (unexpected_bytes_ + message->buffered_size() + message_overhead > max_unexpected_bytes_) return false;
    enqueue(message);
    return true;
}

Receive* Mailbox::take_receive(int source, const Tag& tag, std::size_t size) {
    auto& queue = receives_[bucket(tag)];
    for (Receive* receive = queue.first(); receive != nullptr;) {
        Receive* next = receive->next;
        if (receive->tag == tag && fits(receive->source, source)) {
            queue.remove(*receive);
            if (!refuse_size(*receive, source, size)) return receive;
        }
        receive = next;
    }
    return nullptr;
}

std::byte* Mailbox::target(const Message& message, std::size_t offset) noexcept {
    if (message.buffer) return message.buffer.get() + offset;
    return message.receive != nullptr ? message.receive->data + offset : nullptr;
}

void Mailbox::advance(Message& message, std::size_t count) {
    message.num_received += count;
    if (message.num_received == message.size && message.receive != nullptr) complete(*message.receive, message);
}

bool Mailbox::cancel(Receive& receive, Outcome outcome) {
    if (receive.outcome != Outcome::under_way) return false;
    const std::shared_ptr<Message> message = receive.message;
    if (!message) {
        receives_[bucket(receive.tag)].remove(receive);
        end(receive, outcome);
        return true;
    }
    unmatch(receive);
    if (message->in_place) {  // read anew for the next receive
        message->num_received = 0;
        message->is_fetched = false;
        message->fetch.reset();
    } else if (!message->buffer && message->size != 0) {
        message->buffer = std::make_unique_for_overwrite<std::byte[]>(message->size);
        if (message->num_received != 0) std::memcpy(message->buffer.get(), receive.data, message->num_received);
    }
    end(receive, outcome);
    if (Receive* next = take_receive(message->source, message->tag, message->size))
        pair(*next, message);
    else
        enqueue(message);
    return true;
}

void Mailbox::fail(Receive& receive) {
    if (receive.message)
        unmatch(receive);
    else
        receives_[bucket(receive.tag)].remove(receive);
    end(receive, Outcome::ended);
}

void Mailbox::finish(Receive& receive, int source) {
    receive.peer = source;
    end(receive, Outcome::done);
}

void Mailbox::add_listener(Transfer& transfer) noexcept {
    if (transfer.has_listener || transfer.outcome != Outcome::under_way) return;
    transfer.has_listener = true;
    ++num_listeners_;
}

void Mailbox::withdraw(Message& message) {
    Receive* receive = message.receive;
    const std::shared_ptr<Message> kept_alive = receive != nullptr ? receive->message : message.self;
    drop(message);
    if (receive == nullptr) return;
    unmatch(*receive);
    receive->peer = receive->source;
    if (!take_message(*receive)) receives_[bucket(receive->tag)].add(*receive);
}

void Mailbox::drop(Message& message) {
    if (!message.self) return;
    messages_[bucket(message.tag)].remove(message);
    unexpected_bytes_ -= message.buffered_size() + message_overhead;
    const std::shared_ptr<Message> last = std::move(message.self);
}

void Mailbox::end(Receive& receive, Outcome outcome) {
    --num_receives_;
    end_transfer(receive, outcome);
}

void Mailbox::end_transfer(Transfer& transfer, Outcome outcome) {
    transfer.outcome = outcome;
    ++num_ended;
    if (transfer.has_listener) --num_listeners_;
    if (transfer.is_watched) {
        (first_ended_ == nullptr ? first_ended_ : last_ended_->next_ended) = &transfer;
        last_ended_ = &transfer;
    }
    transfer.has_ended.store(true);
}

int Mailbox::fullest_source(int newest, std::size_t buffered_size) {
    std::unordered_map<int, std::size_t> filled{{newest, buffered_size + message_overhead}};
    for_each_waiting_message(
        [&](const Message& message) { filled[message.source] += message.buffered_size() + message_overhead; });
    int fullest = newest;
    for (const auto& [source, size] : filled)
        if (size > filled[fullest]) fullest = source;
    return fullest;
}

// Matches a receive with the first waiting message, or ends it if that does not fit; false if no message waits.
bool Mailbox::take_message(Receive& receive) {
    for (Message* message = messages_[bucket(receive.tag)].first(); message != nullptr; message = message->next) {
        if (message->tag != receive.tag || !fits(receive.source, message->source)) continue;
        if (!refuse_size(receive, message->source, message->size)) {
            const std::shared_ptr<Message> taken = message->self;
            drop(*message);
            pair(receive, taken);
        }
        return true;
    }
    return false;
}

void Mailbox::enqueue(const std::shared_ptr<Message>& message) {
    if (!message->is_offered && !message->buffer && message->size != 0)
        message->buffer = std::make_unique_for_overwrite<std::byte[]>(message->size);
    unexpected_bytes_ += message->buffered_size() + message_overhead;
    message->self = message;
    messages_[bucket(message->tag)].add(*message);
}

void Mailbox::pair(Receive& receive, const std::shared_ptr<Message>& message) {
    receive.peer = message->source;
    if (message->num_received == message->size) {
        complete(receive, *message);
        return;
    }
    receive.message = message;
    message->receive = &receive;
    matched_.add(receive);
    if (message->is_offered && !message->buffer) wanted.push_back(message);
}

void Mailbox::complete(Receive& receive, Message& message) {
    if (message.buffer && message.size != 0) std::memcpy(receive.data, message.buffer.get(), message.size);
    const std::shared_ptr<Message> last = receive.message;
    if (receive.message) unmatch(receive);
    end(receive, Outcome::done);
}

bool Mailbox::refuse_size(Receive& receive, int source, std::size_t size) {
    receive.message_size = size;
    if (receive.size == size || (receive.accepts_shorter && size < receive.size)) return false;
    receive.peer = source;
    end(receive, Outcome::wrong_size);
    return true;
}

void Mailbox::unmatch(Receive& receive) {
    matched_.remove(receive);
    receive.message->receive = nullptr;
    receive.message.reset();
}

}  // namespace ferrodist
