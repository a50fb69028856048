// Which messages a rank takes in, and what it says of those that it does not.
#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "engine/mailbox.h"

namespace ferrodist {

// What a messenger's user is to do something about.
struct PeerEvent {
    enum class Kind : int {
        full,    // `rank` sent `message`, and there is no room for what nobody asks for
        broken,  // `rank` wrote what no rank would write
        gone,    // the connection to `rank` has ended, and nobody has said why for a while
    };

    Kind kind;
    int rank;
    std::shared_ptr<Message> message;
};

// A mailbox, and who may put something in. For one thread at a time.
class Admission {
public:
    Admission(int num_ranks, std::size_t its_eager_bytes, std::size_t max_unasked_bytes)
        : eager_bytes(its_eager_bytes), mailbox(max_unasked_bytes), num_ranks_(static_cast<std::size_t>(num_ranks)) {}

    // Has a message wait for its bytes or its receive; false when it is not taken in.
    [[nodiscard]] bool announce(const std::shared_ptr<Message>& message);
    [[nodiscard]] bool is_welcome(int source, const Tag& tag) const;
    void tell(PeerEvent::Kind kind, int rank, std::shared_ptr<Message> message = nullptr) {
        news.push_back({.kind = kind, .rank = rank, .message = std::move(message)});
    }

    void open_group(std::uint64_t group, const std::vector<int>& members);
    void end_group(std::uint64_t group);
    // Drops what is known of a group that has ended: the caller knows that no message of it comes any more.
    void forget_group(std::uint64_t group) { groups_.erase(group); }
    // Ends all that waits, and takes nothing in any more.
    void close();

    const std::size_t eager_bytes;
    Mailbox mailbox;
    std::vector<PeerEvent> news;

private:
    struct Group {
        bool has_ended = false;
        std::vector<bool> members;  // by rank; empty while this rank has not made the group: then all may be
    };

    std::size_t num_ranks_;
    std::unordered_map<std::uint64_t, Group> groups_;
    bool is_world_there_ = true;
    bool is_closed_ = false;
};

}  // namespace ferrodist
