// A rank's mailbox: where messages that arrive meet the receives that were asked for, matched by tag and source in order
// of arrival. `backends/mailbox.py` says what it does, and why, for the transports that are written in Python.
//
// [Note: who may write into a receive's buffer]
// Bytes go into a user's buffer only under the lock of whoever owns the mailbox, and while the message is matched with the
// receive. What has come of a message whose receive was cancelled is kept for the next one.
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
    // Of messages that nobody asked for it keeps `max_unasked_bytes`.
    explicit Mailbox(std::size_t max_unasked_bytes) : max_unasked_bytes_(max_unasked_bytes) {}
    Mailbox(const Mailbox&) = delete;
    Mailbox& operator=(const Mailbox&) = delete;
    ~Mailbox() { drop_all(); }

    // Asks for a message.
    void post(Receive& receive);

    // Takes a message's announcement; its bytes follow. False when nobody has asked for it and the mailbox is full.
    bool arrive(const std::shared_ptr<Message>& message);

    // The receive that a message is for, which is no longer waiting then and is to be completed at once; or none.
    [[nodiscard]] Receive* take_receive(int source, const Tag& tag, std::size_t size);

    // Where bytes from `offset` of an arrived message go; null when nobody wants them.
    [[nodiscard]] static std::byte* target(const Message& message, std::size_t offset) noexcept;
    // Says that so many bytes of it have been written there.
    void advance(Message& message, std::size_t count);

    // False when it has ended.
    bool cancel(Receive& receive, Outcome outcome);
    // Ends a receive for good: what comes of its message goes nowhere.
    void fail(Receive& receive);
    // Forgets a message that its sender took back; a receive it was matched with waits for the next one.
    void withdraw(Message& message);
    // Frees a message that waits, and all of them.
    void drop(Message& message);
    void drop_all() {
        for_each_waiting_message([this](Message& message) { drop(message); });
    }

    // Completes a receive from `take_receive`, whose buffer holds the message.
    void finish(Receive& receive, int source);
    // Ends a send, which is not the mailbox's, but those who wait for ends don't mind the difference.
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

    // The rank that sent most of what nobody asked for, with a message that is not taken.
    [[nodiscard]] int fullest_source(int newest, std::size_t size_kept);
    [[nodiscard]] std::size_t unasked_bytes() const noexcept { return unasked_bytes_; }
    [[nodiscard]] bool has_receives() const noexcept { return num_receives_ != 0; }
    // For any thread; of what it sees too late the keeper takes care, a tick later.
    [[nodiscard]] bool has_listeners() const noexcept { return num_listeners_.load(std::memory_order_relaxed) != 0; }
    void add_listener(Transfer& transfer) noexcept;

    // What has come of the calls above, and is the owner's to take.
    std::vector<std::shared_ptr<Message>> granted;  // offered messages that may come now
    std::size_t num_ended = 0;                      // of all transfers
    [[nodiscard]] bool has_ended_watched() const noexcept { return first_ended_ != nullptr; }
    // Watched transfers that have ended, in order.
    [[nodiscard]] Transfer* take_ended() noexcept {
        last_ended_ = nullptr;
        return std::exchange(first_ended_, nullptr);
    }

private:
    static constexpr std::size_t num_buckets = 256;
    static constexpr std::size_t message_cost = 512;  // beside its own bytes, so that empty ones don't pile up either

    template <class Item, class Visit>
    static void visit_all(Queue<Item>& queue, const Visit& visit) {
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
    void keep(const std::shared_ptr<Message>& message);
    void pair(Receive& receive, const std::shared_ptr<Message>& message);
    void complete(Receive& receive, Message& message);
    [[nodiscard]] bool refuse_size(Receive& receive, int source, std::size_t size);
    void unmatch(Receive& receive);

    std::size_t max_unasked_bytes_;
    std::array<Queue<Receive>, num_buckets> receives_;
    std::array<Queue<Message>, num_buckets> messages_;
    Queue<Receive> matched_;  // their message is on its way
    std::uint64_t num_posted_ = 0;
    std::uint64_t num_arrived_ = 0;
    std::size_t num_receives_ = 0;   // that have not ended
    std::atomic<std::size_t> num_listeners_{0};  // of transfers that have not ended
    std::size_t unasked_bytes_ = 0;
    Transfer* first_ended_ = nullptr;
    Transfer* last_ended_ = nullptr;
};

}  // namespace ferrodist
