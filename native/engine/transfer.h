// Messages, and the send and receive requests that move them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "engine/fetch_mode.h"
#include "transport/channel.h"

namespace ferrodist {

// A message tag; only compared. `group` is 0 for the group itself, else a sub-group's id.
struct Tag {
    std::uint64_t group = 0;
    std::uint64_t number = 0;

    friend bool operator==(const Tag&, const Tag&) = default;
};

inline constexpr int any_source = -1;

enum class Outcome : int {
    under_way,
    done,
    wrong_size,  // of a receive: the message does not fit the buffer, and stays queued
    cancelled,
    ended,  // ended by the engine's owner, which knows the reason
};

// An intrusive list of items ordered by `number`; each item is in one list at a time.
template <class Item>
class TransferList {
public:
    [[nodiscard]] Item* first() const noexcept { return first_; }

    // Adds an item at the end, or an item that was removed before at its former position.
    void add(Item& item) noexcept {
        Item* before = last_;
        while (before != nullptr && before->number > item.number) before = before->previous;
        item.previous = before;
        item.next = before == nullptr ? first_ : before->next;
        (before == nullptr ? first_ : before->next) = &item;
        (item.next == nullptr ? last_ : item.next->previous) = &item;
    }

    void remove(Item& item) noexcept {
        (item.previous == nullptr ? first_ : item.previous->next) = item.next;
        (item.next == nullptr ? last_ : item.next->previous) = item.previous;
        item.previous = item.next = nullptr;
    }

private:
    Item* first_ = nullptr;
    Item* last_ = nullptr;
};

// A send or receive request. It and its buffer must not move until it has ended. All members except `has_ended`
// are accessed under the engine's lock, or after the end.
struct Transfer {
    Transfer(int its_peer, const Tag& its_tag) : peer(its_peer), tag(its_tag) {}
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;
    ~Transfer() = default;

    std::atomic<bool> has_ended{false};  // stored last
    Outcome outcome = Outcome::under_way;
    int peer;  // the other rank; any_source until it is known
    Tag tag;
    bool is_watched = false;         // its owner is notified of its end, and keeps it alive until then
    bool has_listener = false;       // a listener waits for the notification, without waiting here
    std::size_t reason = 0;          // of an `ended` transfer: an id that its owner can interpret
    void* owner = nullptr;           // for the receiver of the notification
    Transfer* next_ended = nullptr;  // list of the transfers whose owners are to be notified
};

struct Receive;

// An incoming message: announced, partly received, or waiting complete.
struct Message {
    Message(int its_source, const Tag& its_tag, std::size_t its_size, bool is_offer)
        : source(its_source), tag(its_tag), size(its_size), is_offered(is_offer) {}

    int source;
    Tag tag;
    std::size_t size;
    bool is_offered;           // its data is read in place, or sent once it is granted
    bool is_fetched = false;   // its data has been asked for: it is read in place, or granted
    bool is_granted = false;   // the grant has been sent
    std::uint64_t number = 0;  // in order of arrival
    std::uint64_t sender_number = 0;
    std::size_t num_received = 0;
    std::optional<MessageMemory> in_place;  // where an offered message can be read
    std::optional<FetchMode::Fetch> fetch;  // of a message whose transfer is timed
    std::unique_ptr<std::byte[]> buffer;    // its bytes, if they cannot go to a receive's buffer
    Receive* receive = nullptr;
    std::shared_ptr<Message> self;  // keeps the message alive while it waits for a receive
    Message* previous = nullptr;
    Message* next = nullptr;

    // Bytes buffered for the unexpected message: none for an offered one.
    [[nodiscard]] std::size_t buffered_size() const noexcept { return is_offered ? 0 : size; }
};

struct Receive : Transfer {
    Receive(std::byte* its_data, std::size_t its_size, int its_source, const Tag& its_tag)
        : Transfer(its_source, its_tag), data(its_data), size(its_size), source(its_source) {}

    std::byte* data;
    std::size_t size;
    int source;
    bool accepts_shorter = false;  // whether the message may be shorter than the buffer
    std::size_t message_size = 0;  // of the message that it was matched with, or that has the wrong size
    std::uint64_t number = 0;      // in the order in which receives were posted
    std::shared_ptr<Message> message;
    Receive* previous = nullptr;
    Receive* next = nullptr;
};

struct Send : Transfer {
    Send(const std::byte* its_data, std::size_t its_size, int dst, const Tag& its_tag)
        : Transfer(dst, its_tag), data(its_data), size(its_size) {}

    enum class Stage { queued, offered, granted };

    const std::byte* data;
    std::size_t size;
    Stage stage = Stage::queued;
    std::size_t num_written = 0;
    bool is_announced = false;
    bool is_in_place = false;    // the receiver may read it in place
    bool prefers_offer = false;  // offered even if small enough to be sent at once; see `P2PEngine::send_now`
    std::uint64_t number = 0;    // the message's id
    Send* previous = nullptr;
    Send* next = nullptr;
};

}  // namespace ferrodist
