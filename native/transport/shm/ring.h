// Ring buffers in shared memory: one for each ordered pair of ranks of a host.
//
// [Note: one writer, messages]
// `tail` and `is_blocked` of a ring are written by its sender alone, `head` by its receiver alone, each on cache lines
// of their own. Both positions only grow. The sender stores `tail` after the bytes below it, and the receiver loads it
// before it reads them; the receiver stores `head` after it has read the bytes below it, and the sender loads it before
// it writes there again. There are no locks, so a killed rank leaves behind at most bytes that no `tail` covers.
//
// A sender without space stores `is_blocked` and checks `head` once more before it sleeps; the receiver checks
// `is_blocked` after it has stored `head`: one of the two sees the other, for all four are sequentially consistent.
//
// [Note: messages in place]
// A large message need not go through the ring: its receiver reads it in the sender's memory, by a system call. The
// sender may take its memory back at any time, without waiting for the receiver, which may be stopped or dead. So a
// message to be read has a place in `published`, with its number plus one. The receiver reads the bytes first, and then
// exchanges that value for 0; the sender exchanges it for 0 to withdraw the message. One of the two succeeds. If it is
// the receiver, the sender has not withdrawn before, and the bytes were the message's through the whole read: the
// exchange is ordered after the read (release), and before the sender's next writes (acquire). If it is the sender, the
// receiver drops whatever it has read. A message whose place is occupied goes through the ring.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/channel.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/memory.h"
#include "transport/shm/group_memory.h"
#include "transport/shm/shared_copy.h"

namespace ferrodist::shm {

// Frames with their payloads take multiples of a cache line; one line for payloads of up to 16 bytes.
inline constexpr std::size_t frame_unit = 64;

inline constexpr std::size_t num_published = 16;  // messages of a ring that can be read in place at one time

struct Ring {
    alignas(line_bytes) std::atomic<std::uint64_t> tail;
    std::atomic<std::uint32_t> is_blocked;
    alignas(line_bytes) std::atomic<std::uint64_t> head;
    alignas(line_bytes) std::array<std::atomic<std::uint64_t>, num_published> published;

    // The place of a message in `published`.
    [[nodiscard]] std::atomic<std::uint64_t>& place_of(std::uint64_t number) noexcept {
        return published[number % num_published];
    }
    // Takes a message, or withdraws it; false if the other rank has done the other.
    [[nodiscard]] bool unpublish(std::uint64_t number) noexcept {
        std::uint64_t expected = number + 1;
        return place_of(number).compare_exchange_strong(expected, 0);
    }
};
static_assert(sizeof(Ring) == 3 * line_bytes);

struct RingLayout {
    int num_ranks = 1;           // on this host
    std::size_t ring_bytes = 0;  // a power of two

    // The layout for `num_ranks` ranks: large enough to hide the receiver's pauses, small enough to stay in the
    // processor's caches and, except for very many ranks, within 16 MiB for all pairs.
    [[nodiscard]] static RingLayout for_ranks(int num_ranks);
    [[nodiscard]] std::size_t size_bytes() const;
    // What several ranks write, and what the rank with index `local` on this host alone does; see [Note: first touch]
    // in memory.h.
    [[nodiscard]] Part common_part() const;
    [[nodiscard]] Part part_of(int local) const;
};

// All rings of a host, and its ranks' doorbells.
class Rings {
public:
    // Uses memory of `layout.size_bytes()`. The creator of the memory calls `initialize` before others use it.
    Rings(std::shared_ptr<const Mapping> memory, const RingLayout& layout);

    void initialize();

    [[nodiscard]] const RingLayout& layout() const noexcept { return layout_; }
    [[nodiscard]] Doorbell& doorbell(int rank) const noexcept;
    [[nodiscard]] Ring& ring(int from, int to) const noexcept;
    [[nodiscard]] std::byte* bytes(int from, int to) const noexcept;

private:
    [[nodiscard]] std::size_t index(int from, int to) const noexcept;

    RingLayout layout_;
    std::shared_ptr<const Mapping> memory_;
    std::byte* rings_;
    std::byte* bytes_;
};

// The sender's end of a ring. For one thread at a time.
class RingWriter {
public:
    RingWriter(const Rings& rings, int from, int to);

    // The payload that a frame can carry now, up to `wanted` bytes, or -1 if there is no space for a frame.
    [[nodiscard]] std::ptrdiff_t room(std::size_t wanted);
    // The maximum payload per frame, chosen so that the receiver reads while the sender writes.
    [[nodiscard]] std::size_t max_frame_payload() const noexcept;

    // Writes a frame and its `length` bytes of payload, for which there must be space.
    void write(const Frame& frame, const std::byte* payload);

    // Sets whether this side waits for space. Called before the last check before sleeping.
    void set_blocked(bool is_blocked);

private:
    Ring& ring_;
    std::byte* bytes_;
    std::size_t size_;
    std::uint64_t tail_ = 0;
    std::uint64_t head_ = 0;  // as last seen
    bool is_blocked_ = false;
    SharedCopy copy_;
};

// The receiver's end of a ring. For one thread at a time, except `has_frames`.
class RingReader {
public:
    using Front = Channel::Front;

    RingReader(const Rings& rings, int from, int to);

    // Whether there are unread frames. For any thread.
    [[nodiscard]] bool has_frames() const noexcept {
        return ring_.tail.load(std::memory_order_relaxed) != position_.load(std::memory_order_relaxed);
    }

    // Copies the oldest frame out; `broken` on a protocol violation.
    [[nodiscard]] Front front(Frame& frame);
    // Copies the first `length` bytes of that frame's payload to `target`.
    void copy_to(std::byte* target, std::size_t length) const;
    // Advances to the next frame, past one with a payload of `length` bytes.
    void pop(std::size_t length);

    // Returns the space that was read to the sender. Returns whether the sender is blocked and now has enough space.
    [[nodiscard]] bool release();
    // Whether so much has been read that the space should be returned before reading on.
    [[nodiscard]] bool should_release() const noexcept { return head_ - released_ >= size_ / 4; }

private:
    Ring& ring_;
    const std::byte* bytes_;
    std::size_t size_;
    std::uint64_t head_ = 0;
    std::uint64_t tail_ = 0;  // as last seen
    std::uint64_t released_ = 0;
    std::atomic<std::uint64_t> position_{0};  // `head_`, for `has_frames`
};

}  // namespace ferrodist::shm
