// Rings: what the ranks of one host send each other messages through, one for each ordered pair of them.
//
// [Note: one writer, messages]
// `tail` and `is_blocked` of a ring are written by its sender alone, `head` by its receiver alone, each on cache lines of
// their own. Both positions only grow. The sender stores `tail` after the bytes below it, and the receiver loads it before
// it reads them; the receiver stores `head` when it has read what is below, and the sender loads it before it writes there
// again. Nothing is locked, so a rank that is killed leaves behind at most bytes that no `tail` speaks of.
//
// A sender that finds no room says so in `is_blocked` and looks at `head` once more before it sleeps; the receiver looks at
// `is_blocked` after it has stored `head`: one of the two sees the other, for all four are sequentially consistent.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "transport/channel.h"
#include "transport/shm/doorbell.h"
#include "transport/shm/memory.h"
#include "transport/shm/segment.h"
#include "transport/shm/shared_copy.h"

namespace ferrodist::shm {

// Frames and their payloads take multiples of a cache line: those of up to 16 bytes one.
inline constexpr std::size_t frame_unit = 64;

struct Ring {
    alignas(line_bytes) std::atomic<std::uint64_t> tail;
    std::atomic<std::uint32_t> is_blocked;
    alignas(line_bytes) std::atomic<std::uint64_t> head;
};
static_assert(sizeof(Ring) == 2 * line_bytes);

struct RingLayout {
    int num_ranks = 1;           // on this host
    std::size_t ring_bytes = 0;  // a power of two

    // For so many ranks: large enough to hide the receiver's pauses, small enough to stay in the processor's caches and
    // within 16 MiB for all pairs, but for very many ranks.
    [[nodiscard]] static RingLayout of(int num_ranks);
    [[nodiscard]] std::size_t size_bytes() const;
};

// All rings of a host, and its ranks' doorbells.
class Rings {
public:
    // In memory of `layout.size_bytes()`. Whoever created it calls `initialize` before others use it.
    Rings(std::shared_ptr<const Mapping> memory, const RingLayout& layout);

    void initialize();

    [[nodiscard]] const RingLayout& layout() const noexcept { return layout_; }
    [[nodiscard]] Doorbell& bell(int rank) const noexcept;
    [[nodiscard]] Ring& ring(int from, int to) const noexcept;
    [[nodiscard]] std::byte* bytes(int from, int to) const noexcept;

private:
    [[nodiscard]] std::size_t index(int from, int to) const noexcept;

    RingLayout layout_;
    std::shared_ptr<const Mapping> memory_;
    std::byte* rings_;
    std::byte* bytes_;
};

// A sender's side of a ring. For one thread at a time.
class RingWriter {
public:
    RingWriter(const Rings& rings, int from, int to);

    // Bytes that a frame may carry now, or -1 when there is no room for one.
    [[nodiscard]] std::ptrdiff_t room(std::size_t wanted);
    // Bytes that a frame should carry at most, so that the other side begins to read while this one writes.
    [[nodiscard]] std::size_t chunk_bytes() const noexcept;

    // Puts a frame and its `length` bytes in, for which there must be room.
    void write(const Frame& frame, const std::byte* payload);

    // Whether this side waits for room; stored before it looks for the last time.
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

// A receiver's side of a ring. For one thread at a time, but for `has_frames`.
class RingReader {
public:
    using Front = Channel::Front;

    RingReader(const Rings& rings, int from, int to);

    // Whether there is something that has not been read, for any thread.
    [[nodiscard]] bool has_frames() const noexcept {
        return ring_.tail.load(std::memory_order_relaxed) != position_.load(std::memory_order_relaxed);
    }

    // Copies the oldest frame out; `broken` when no sender of this version would have written it.
    [[nodiscard]] Front front(Frame& frame);
    // Copies the first `length` bytes of that frame's payload to `target`.
    void copy_to(std::byte* target, std::size_t length) const;
    // Goes on to the next one, from one of so many bytes.
    void pop(std::size_t length);

    // Gives what was read back to the sender. Returns whether it waits for that, and there is enough for it to go on.
    [[nodiscard]] bool release();
    // Whether so much has been read that it should be given back before reading on.
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
