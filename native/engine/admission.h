// Admission of incoming messages, and the events reported for those that are rejected.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/mailbox.h"

namespace ferrodist {

// An event that the engine's owner must act on.
struct PeerEvent {
    enum class Kind : int {
        full,    // `rank` sent `message`, and the buffer for unexpected messages is full
        broken,  // `rank` violated the protocol
        gone,    // the connection to `rank` has ended, and the control plane has given no reason within a second
    };

    Kind kind;
    int rank;
    std::shared_ptr<Message> message;
};

// A mailbox with its admission rules. For one thread at a time.
class Admission {
public:
    Admission(int num_ranks, std::size_t its_eager_bytes, std::size_t max_unexpected_bytes)
        : eager_bytes(its_eager_bytes),
          mailbox(max_unexpected_bytes),
          num_ranks_(static_cast<std::size_t>(num_ranks)) {}

    // Queues a message until its bytes or its receive arrive; false if it is rejected.
    [[nodiscard]] bool announce(const std::shared_ptr<Message>& message);
    [[nodiscard]] bool is_admitted(int source, const Tag& tag) const;
    void add_event(PeerEvent::Kind kind, int rank, std::shared_ptr<Message> message = nullptr) {
        events.push_back({.kind = kind, .rank = rank, .message = std::move(message)});
    }

    void open_group(std::uint64_t group, const std::vector<int>& members);
    void end_group(std::uint64_t group);
    // Drops the record of a group that has ended, once no message of it can arrive any more.
    void forget_group(std::uint64_t group) { groups_.erase(group); }
    // Ends everything that waits, and rejects all further messages.
    void close();

    const std::size_t eager_bytes;
    Mailbox mailbox;
    std::vector<PeerEvent> events;
    std::size_t num_in_place = 0;  // messages that all peers are reading in place now

private:
    struct Group {
        bool has_ended = false;
        std::vector<bool> members;  // by rank; empty until this rank has created the group: then all ranks are admitted
    };

    std::size_t num_ranks_;
    std::unordered_map<std::uint64_t, Group> groups_;
    bool is_world_open_ = true;
    bool is_closed_ = false;
};

}  // namespace ferrodist
