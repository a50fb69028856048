// Messages, and the sends and receives that move them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace ferrodist {

// What keeps conversations apart; compared and nothing more. `group` is 0 for the group itself, else a sub-group's.
struct Tag {
    std::uint64_t group = 0;
    std::uint64_t number = 0;

    friend bool operator==(const Tag&, const Tag&) = default;
};

inline constexpr int any_source = -1;

enum class Outcome : int {
    under_way,
    done,
    wrong_size,  // of a receive: the message has another size, and stays
    cancelled,
    ended,  // by whoever knows why
};

// A list through its members, which are in one list at a time and ordered by their numbers.
template <class Item>
class Queue {
public:
    [[nodiscard]] Item* first() const noexcept { return first_; }

    // At the end, or, for an item that was taken out before, in its old place.
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

// A send or a receive. It stays where it is, and its buffer too, until it has ended. All but `has_ended` is read and
// written under the messenger's lock, or once it has ended.
struct Transfer {
    Transfer(int its_peer, const Tag& its_tag) : peer(its_peer), tag(its_tag) {}
    Transfer(const Transfer&) = delete;
    Transfer& operator=(const Transfer&) = delete;
    ~Transfer() = default;

    std::atomic<bool> has_ended{false};  // stored last
    Outcome outcome = Outcome::under_way;
    int peer;  // the other side; any_source until it is known
    Tag tag;
    bool is_watched = false;         // its owner is told of its end, and keeps it until then
    bool has_listener = false;       // and somebody waits for that, who does not wait here
    std::size_t reason = 0;          // of an `ended` one: its owner knows what it means
    void* owner = nullptr;           // for whoever is told
    Transfer* next_ended = nullptr;  // of those that owners are to be told of
};

struct Receive;

// A message that has been announced, has partly come, or waits whole.
struct Message {
    Message(int its_source, const Tag& its_tag, std::size_t its_size, bool is_offer)
        : source(its_source), tag(its_tag), size(its_size), is_offered(is_offer) {}

    int source;
    Tag tag;
    std::size_t size;
    bool is_offered;          // it moves once it is asked for
    bool is_granted = false;  // its sender has been told
    std::uint64_t number = 0;       // in the order of arrival
    std::uint64_t sender_number = 0;
    std::size_t num_received = 0;
    std::unique_ptr<std::byte[]> kept;  // its bytes, when they can't go to a receive's buffer
    Receive* receive = nullptr;
    std::shared_ptr<Message> self;  // itself, while it waits for a receive
    Message* previous = nullptr;
    Message* next = nullptr;

    // Bytes of it that are held unasked: none of an offered one.
    [[nodiscard]] std::size_t size_kept() const noexcept { return is_offered ? 0 : size; }
};

struct Receive : Transfer {
    Receive(std::byte* its_data, std::size_t its_size, int its_source, const Tag& its_tag)
        : Transfer(its_source, its_tag), data(its_data), size(its_size), source(its_source) {}

    std::byte* data;
    std::size_t size;
    int source;
    std::size_t size_sent = 0;  // of a wrong size
    std::uint64_t number = 0;   // in the order in which receives were asked for
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
    std::uint64_t number = 0;  // of the message
    Send* previous = nullptr;
    Send* next = nullptr;
};

}  // namespace ferrodist
