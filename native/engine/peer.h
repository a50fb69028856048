// What goes on between a rank and one other: what is sent there and what comes from there, through the channel between
// the two.
//
// [Note: frames]
// A message of up to `eager_bytes` is written at once, in one frame or several. A larger one is offered, and its bytes
// follow when the other rank has granted it, straight from the sender's buffer into the channel and from there into the
// receiver's. Its sender may take a message back until its last frame is begun: then it arrives, from a copy of what has
// not been written.
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

// For one thread at a time, but for `notify`.
class Peer {
public:
    Peer(int rank, std::unique_ptr<Channel> channel, Admission& reception)
        : rank_(rank), channel_(std::move(channel)), reception_(reception) {}

    [[nodiscard]] int rank() const noexcept { return rank_; }
    [[nodiscard]] Channel& channel() const noexcept { return *channel_; }
    // Nothing goes there or comes from there.
    [[nodiscard]] bool is_lost() const noexcept { return is_lost_; }

    // Whether there is something to write.
    [[nodiscard]] bool has_outgoing() const noexcept {
        return is_unfinished_ || !notices_.empty() || queued_.first() != nullptr || granted_.first() != nullptr;
    }
    // Whether there is anything that has to go on.
    [[nodiscard]] bool has_sends() const noexcept { return has_outgoing() || offered_.first() != nullptr; }

    // Sends a small message at once; false, with nothing done, when that can't be. `notify` is the caller's to call.
    bool try_send(const std::byte* data, std::size_t size, const Tag& tag);
    void notify() const { channel_->notify(); }

    void start(Send& send);
    // Ends a send early; false when its message has arrived or will.
    bool cancel(Send& send, Outcome outcome, std::size_t reason);
    // Tells the sender of an offered message that it may come.
    void grant(const Message& message);

    // Writes what waits to be written, as far as there is room. Returns whether anything was.
    bool pump();
    // Reads what there is, but no further than to the end of `until`. Returns whether there was anything.
    bool read(const Transfer* until);

    // Takes nothing more from there, and sends nothing.
    void break_off();
    void end_group(std::uint64_t group) {
        std::erase_if(incoming_, [&](const auto& each) { return each.second->tag.group == group; });
    }

    // Calls `visit` with each send that is under way, which it may end.
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
    bool take(const Frame& frame);
    void take_eager(const Frame& frame);
    [[nodiscard]] bool take_data(const Frame& frame);
    void take_grant(std::uint64_t number);
    std::shared_ptr<Message> announce(const Frame& frame, bool is_offered);
    void receive(Message& message, const Frame& frame);

    bool put_some();
    bool put(Send& send);
    void advance(Send& send, std::size_t count);
    [[nodiscard]] Queue<Send>& queue_of(const Send& send) noexcept;
    void notice(FrameKind kind, std::uint64_t number);

    int rank_;
    std::unique_ptr<Channel> channel_;
    Admission& reception_;
    bool is_lost_ = false;
    std::uint64_t num_messages_ = 0;
    std::size_t num_bytes_put_ = 0;
    std::deque<Frame> notices_;  // grants and withdrawals
    Queue<Send> queued_;         // not wholly announced
    Queue<Send> offered_;
    Queue<Send> granted_;
    bool is_unfinished_ = false;   // a frame is in the channel in part:
    Send* unfinished_ = nullptr;   // of this send, if it has not ended,
    std::size_t num_unfinished_ = 0;  // with so many bytes
    std::unordered_map<std::uint64_t, std::shared_ptr<Message>> incoming_;  // announced and not whole, by its number
};

}  // namespace ferrodist
