// One peer of a rank: the sends to it and the messages from it, through the channel between the two.
//
// [Note: frames]
// A message of up to `eager_bytes` is written at once, in one frame or several (eager protocol). A larger one is
// offered (rendezvous protocol). On one host its receiver may read it in the sender's memory, and then says that it has
// taken it. Otherwise it grants the message, and the bytes follow, straight from the sender's buffer into the channel
// and from there into the receiver's. The sender can cancel a message until it is taken, or until its last frame is
// begun: after that it arrives, from a copy of its unwritten bytes.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <unordered_map>

#include "base/deadline.h"
#include "engine/admission.h"
#include "transport/channel.h"

namespace ferrodist {

// For one thread at a time, except `notify`.
class Peer {
public:
    Peer(int rank, std::unique_ptr<Channel> channel, Admission& admission)
        : rank_(rank), channel_(std::move(channel)), admission_(admission) {}

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] Channel& channel() const noexcept { return *channel_; }
    // Whether the peer is disconnected.
    [[nodiscard]] bool is_lost() const noexcept { return is_lost_; }

    // Whether there is something to write.
    [[nodiscard]] bool has_outgoing() const noexcept {
        return is_unfinished_ || !control_frames_.empty() || queued_.first() != nullptr || granted_.first() != nullptr;
    }
    // Whether there is something to write, or to read in place.
    [[nodiscard]] bool has_work() const noexcept { return has_outgoing() || !reading_.empty(); }
    // Whether any send is incomplete.
    [[nodiscard]] bool has_sends() const noexcept { return has_outgoing() || offered_.first() != nullptr; }

    // Sends a small message at once; returns false without effect if that is impossible. The caller must call `notify`.
    bool try_send(const std::byte* data, std::size_t size, const Tag& tag);
    void notify() const { channel_->notify(); }

    void start(Send& send);
    // Ends a send early; false if its message has arrived or will arrive.
    bool cancel(Send& send, Outcome outcome, std::size_t reason);
    // Sends a message at once that `prefers_offer`, and has not been taken yet.
    void send_now(Send& send);
    // Reads an offered message that a receive has been matched with, or sends the grant for it.
    void fetch(const std::shared_ptr<Message>& message);

    // Writes as much queued data as there is space for. Returns whether anything was written.
    bool pump();
    // Reads what has arrived, at most until `until` has ended. Returns whether anything was read.
    bool read(const Transfer* until);

    // Stops all traffic with the peer.
    void disconnect();
    void end_group(std::uint64_t group) {
        std::erase_if(incoming_, [&](const auto& each) { return each.second->tag.group == group; });
    }

    // Calls `visit` for each active send; it may end that send.
    template <class Visit>
    void for_each_send(const Visit& visit) {
        for (auto* queue : {&queued_, &offered_, &granted_})
            for (Send* send = queue->first(); send != nullptr;) {
                Send* next = send->next;
                visit(*send);
                send = next;
            }
    }

private:
    bool on_frame(const Frame& frame);
    void on_eager(const Frame& frame);
    bool on_offer(const Frame& frame);
    [[nodiscard]] bool on_data(const Frame& frame);
    void on_grant(std::uint64_t number);
    void on_taken(std::uint64_t number);
    std::shared_ptr<Message> announce(const Frame& frame, bool is_offered,
                                      std::optional<MessageMemory> in_place = std::nullopt);
    void receive(Message& message, const Frame& frame);
    [[nodiscard]] Send* find_offered(std::uint64_t number) const;
    // Reads one piece of the first message that is read in place; returns its size.
    std::size_t read_some_in_place();
    void end_reading();
    void end_fetch(const Message& message);
    void grant(Message& message);

    bool put_some();
    bool put(Send& send);
    bool put_offer(Send& send);
    [[nodiscard]] bool is_offered(const Send& send) const noexcept;
    [[nodiscard]] bool withdraw(Send& send);
    void advance(Send& send, std::size_t count);
    [[nodiscard]] TransferList<Send>& queue_of(const Send& send) noexcept;
    void queue_control_frame(FrameType kind, std::uint64_t number);

    int rank_;
    std::unique_ptr<Channel> channel_;
    Admission& admission_;
    bool is_lost_ = false;
    bool reads_in_place_ = true;  // whether the peer does, as far as known
    std::uint64_t num_messages_ = 0;
    std::size_t num_bytes_put_ = 0;
    std::deque<Frame> control_frames_;  // all but offers and data
    TransferList<Send> queued_;         // not completely announced
    TransferList<Send> offered_;
    TransferList<Send> granted_;
    bool is_unfinished_ = false;                                            // a frame is partly written to the channel:
    Send* unfinished_ = nullptr;                                            // of this send, unless it has ended,
    std::size_t unfinished_bytes_ = 0;                                      // with this many bytes
    std::unordered_map<std::uint64_t, std::shared_ptr<Message>> incoming_;  // announced, incomplete; by the sender's id
    std::deque<std::shared_ptr<Message>> reading_;                          // of these, those read in place now
    FetchMode fetch_mode_;
};

}  // namespace ferrodist
