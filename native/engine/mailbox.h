// A rank's mailbox: matches incoming messages with posted receives by tag and source, in order of arrival.
// `backends/mailbox.py` describes the semantics and their reasons, for the transports written in Python.
//
// [Note: who may write into a receive's buffer]
// Bytes are written into a user's buffer only under the lock of the mailbox's owner, and only while the message is
// matched with the receive. The bytes received of a message whose receive was cancelled are retained for the next
// receive; a message that is read in place is read anew.
#pragma once

#include <array>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "engine/transfer.h"

namespace ferrodist {

// For one thread at a time.
class Mailbox {
public:
    // `max_unexpected_bytes` bounds the buffered unexpected messages, those without a posted receive.
    explicit Mailbox(std::size_t max_unexpected_bytes) : max_unexpected_bytes_(max_unexpected_bytes) {}
    Mailbox(const Mailbox&) = delete;
    Mailbox& operator=(const Mailbox&) = delete;
    ~Mailbox() { drop_all(); }

    // Posts a receive.
    void post(Receive& receive);

    // Adds an announced message; its bytes follow. False if no receive matches it and the mailbox is full.
    bool arrive(const std::shared_ptr<Message>& message);

    // Removes and returns the receive that matches a message, to be completed at once; null if there is none.
    [[nodiscard]] Receive* take_receive(int source, const Tag& tag, std::size_t size);

    // The address for the bytes from `offset` of an arrived message; null to discard them.
    [[nodiscard]] static std::byte* target(const Message& message, std::size_t offset) noexcept;
    // Records that `count` bytes of it have been written there.
    void advance(Message& message, std::size_t count);

    // Cancels a receive. False if it has ended.
    bool cancel(Receive& receive, Outcome outcome);
    // Ends a receive with `Outcome::ended`; the bytes of its message are discarded.
    void fail(Receive& receive);
    // Removes a message that its sender withdrew; its matched receive waits for the next message.
    void withdraw(Message& message);
    // Frees one waiting message, or all of them.
    void drop(Message& message);
    void drop_all() {
        for_each_waiting_message([this](Message& message) { drop(message); });
    }

    // Completes a receive from `take_receive` whose buffer holds the message.
    void finish(Receive& receive, int source);
    // Ends a send. Sends are not in the mailbox, but their ends are reported through it.
    void end(Send& send, Outcome outcome) { end_transfer(send, outcome); }

    template <class Visit>
    void for_each_receive(const Visit& visit) {  // which may end the one it is called with
        for (auto& queue : receives_) visit_all(queue, visit);
        visit_all(matched_, visit);
    }
    template <class Visit>
    void for_each_waiting_message(const Visit& visit) {  // which may drop the one it is called with
        for (auto& queue : messages_) visit_all(queue, visit);
    }

    // The rank that sent most of the unexpected bytes, counting the rejected message of `newest`.
    [[nodiscard]] int fullest_source(int newest, std::size_t buffered_size);
    [[nodiscard]] std::size_t unexpected_bytes() const noexcept { return unexpected_bytes_; }
    [[nodiscard]] bool has_receives() const noexcept { return num_receives_ != 0; }
    // For any thread. The value may be stale: then the progress thread notices one tick later.
    [[nodiscard]] bool has_listeners() const noexcept { return num_listeners_.load(std::memory_order_relaxed) != 0; }
    void add_listener(Transfer& transfer) noexcept;

    // Results of the calls above, for the owner to collect.
    std::vector<std::shared_ptr<Message>> wanted;  // offered messages that a receive has been matched with
    std::size_t num_ended = 0;                     // number of all transfers that have ended
    [[nodiscard]] bool has_ended_watched() const noexcept { return first_ended_ != nullptr; }
    // Watched transfers that have ended, in order.
    [[nodiscard]] Transfer* take_ended() noexcept {
        last_ended_ = nullptr;
        return std::exchange(first_ended_, nullptr);
    }

private:
    static constexpr std::size_t num_buckets = 256;
    static constexpr std::size_t message_overhead = 512;  // per message beside its bytes: bounds empty ones, too

    template <class Item, class Visit>
    static void visit_all(TransferList<Item>& queue, const Visit& visit) {
        for (Item* item = queue.first(); item != nullptr;) {
            Item* next = item->next;
            visit(*item);
            item = next;
        }
    }

    static std::size_t bucket(const Tag& tag) noexcept;
    void end(Receive& receive, Outcome outcome);
    void end_transfer(Transfer& transfer, Outcome outcome);
    bool take_message(Receive& receive);
    void enqueue(const std::shared_ptr<Message>& message);
    void pair(Receive& receive, const std::shared_ptr<Message>& message);
    void complete(Receive& receive, Message& message);
    [[nodiscard]] bool refuse_size(Receive& receive, int source, std::size_t size);
    void unmatch(Receive& receive);

    std::size_t max_unexpected_bytes_;
    std::array<TransferList<Receive>, num_buckets> receives_;
    std::array<TransferList<Message>, num_buckets> messages_;
    TransferList<Receive> matched_;  // matched receives whose message is still arriving
    std::uint64_t num_posted_ = 0;
    std::uint64_t num_arrived_ = 0;
    std::size_t num_receives_ = 0;               // that have not ended
    std::atomic<std::size_t> num_listeners_{0};  // of transfers that have not ended
    std::size_t unexpected_bytes_ = 0;
    Transfer* first_ended_ = nullptr;
    Transfer* last_ended_ = nullptr;
};

}  // namespace ferrodist
