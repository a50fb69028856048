// The interface of a channel: frames between two ranks, through rings in shared memory or over a TCP connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "transport/shm/peer_memory.h"

namespace ferrodist {

// Frame types; see [Note: frames] in engine/peer.h.
enum class FrameType : std::uint32_t { eager = 1, offer, grant, data, withdraw, taken, unreadable };

// The header of a frame, followed by `length` bytes of payload. Its layout is the same on all machines that can be in a
// group: little-endian, which `ferrodist` requires.
struct Frame {
    FrameType kind{};
    std::uint32_t length = 0;
    std::uint64_t message = 0;  // the sender's id of the message that the frame belongs to
    std::uint64_t group = 0;    // upper half of the message's tag
    std::uint64_t tag = 0;      // lower half
    std::uint64_t size = 0;     // size of the whole message
    std::uint64_t offset = 0;   // offset of the payload in the message
};
static_assert(sizeof(Frame) == 48);

// Where an offered message can be read in place: the payload of its offer.
struct MessageMemory {
    shm::ProcessRecord process;
    std::uint64_t address = 0;
};

// One rank's end of the bidirectional channel to another rank. For one thread at a time, except `notify`.
class Channel {
public:
    // How much of a frame was written.
    enum class Put : int { none, partial, complete };
    enum class Front : int {
        none,
        frame,
        broken,  // a protocol violation
        ended,   // the peer has closed the channel, and everything has been read
    };

    Channel() = default;
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;
    virtual ~Channel() = default;

    // Maximum payload of a frame, in bytes.
    [[nodiscard]] virtual std::size_t max_frame_payload() const noexcept = 0;
    // Writes a frame and its `length` bytes of payload. After a partial write the payload must stay unchanged, and no
    // other frame may be written, until `finish` has written the rest.
    [[nodiscard]] virtual Put put(const Frame& frame, const std::byte* payload) = 0;
    [[nodiscard]] virtual Put finish() { return Put::complete; }
    // Copies the unwritten rest of the payload, so that the caller's buffer is free.
    virtual void copy_rest() {}
    // Sets whether this side waits for space. Returns whether the caller should try to write once more.
    virtual bool set_blocked(bool is_blocked) = 0;
    // Wakes the other rank, if it sleeps. For any thread.
    virtual void notify() {}

    // Copies out the oldest unread frame, or as much of it as has arrived: its further bytes then follow as data
    // frames.
    [[nodiscard]] virtual Front front(Frame& frame) = 0;
    // Copies the front frame's payload to `target`, or discards it if `target` is null; once per frame. Returns the
    // number of bytes: fewer than `length` only for data frames.
    [[nodiscard]] virtual std::size_t read_payload(std::byte* target, std::size_t length) = 0;
    // Advances to the next frame and discards a payload that was not read.
    virtual void pop() = 0;
    // Whether the caller may stop reading here. If not, `front` returns only what still has to be read.
    [[nodiscard]] virtual bool may_stop() { return true; }
    // Ends a batch of reads: returns the space that was read to the sender.
    virtual void release_space() {}

    // Messages that are read in place; see [Note: messages in place] in shm/ring.h. The sender's side: makes message
    // `number` takable, and returns where it is; nothing if it cannot be read in place.
    [[nodiscard]] virtual std::optional<MessageMemory> publish(std::uint64_t /*number*/, const std::byte* /*data*/) {
        return std::nullopt;
    }
    // Withdraws it; false if the receiver has taken it.
    [[nodiscard]] virtual bool withdraw(std::uint64_t /*number*/) { return true; }
    // The receiver's side: copies `size` bytes from `offset` of a message to `target`; false if they cannot be read.
    [[nodiscard]] virtual bool read_in_place(const MessageMemory& /*memory*/, std::size_t /*offset*/,
                                             std::byte* /*target*/, std::size_t /*size*/) {
        return false;
    }
    // Takes a message that has been read; false if its sender has withdrawn it, and what was read is void.
    [[nodiscard]] virtual bool take(std::uint64_t /*number*/) { return false; }

    // Stops all reading and writing.
    virtual void disconnect() {}

    // The number of frames begun here, and of frames read here to their end. Used where control-plane messages may
    // overtake frames; 0 for channels where they cannot.
    [[nodiscard]] virtual std::uint64_t num_put() const noexcept { return 0; }
    [[nodiscard]] virtual std::uint64_t num_read() const noexcept { return 0; }
};

}  // namespace ferrodist
