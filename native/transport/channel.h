// How messages get from one rank to another: as frames, through a ring in shared memory or over a connection.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ferrodist {

// What frames say; see engine/p2p_engine.h.
enum class FrameKind : std::uint32_t { eager = 1, offer, grant, data, withdraw };

// The front of everything that goes through a channel: `length` bytes follow it. The same on all machines that can be in
// a group: little-endian, which `ferrodist` requires.
struct Frame {
    FrameKind kind{};
    std::uint32_t length = 0;
    std::uint64_t message = 0;  // the sender's number of the message it belongs to
    std::uint64_t group = 0;    // upper half of the message's tag
    std::uint64_t tag = 0;      // lower half
    std::uint64_t size = 0;     // of the whole message
    std::uint64_t offset = 0;   // where in the message the bytes belong
};
static_assert(sizeof(Frame) == 48);

// One rank's side of the way to another rank and back. For one thread at a time, but for `notify`.
class Channel {
public:
    // How much of a frame was put in.
    enum class Put : int { none, part, whole };
    enum class Front : int {
        none,
        frame,
        broken,  // what no sender of this version would have written
        ended,   // all has been read, and nothing will follow
    };

    Channel() = default;
    Channel(const Channel&) = delete;
    Channel& operator=(const Channel&) = delete;
    virtual ~Channel() = default;

    // Bytes that a frame carries at most.
    [[nodiscard]] virtual std::size_t chunk_bytes() const noexcept = 0;
    // Puts a frame and its `length` bytes in. Of one that goes in in part the payload stays as it is, and no other is put
    // in, until `finish` has put in the rest.
    [[nodiscard]] virtual Put put(const Frame& frame, const std::byte* payload) = 0;
    [[nodiscard]] virtual Put finish() { return Put::whole; }
    // Takes a copy of what `finish` needs of the payload.
    virtual void keep_rest() {}
    // Says whether this side waits for room. Returns whether it should look once more.
    virtual bool set_blocked(bool is_blocked) = 0;
    // Tells the other rank, if it sleeps, that there is something for it. For any thread.
    virtual void notify() {}

    // Copies out the oldest frame that has not been read, or as much of it as has come: then its further bytes follow in
    // frames of data.
    [[nodiscard]] virtual Front front(Frame& frame) = 0;
    // Moves its payload to `target`, or nowhere if that is null, once. Returns how many bytes: of data there may be fewer
    // than `length`.
    [[nodiscard]] virtual std::size_t take(std::byte* target, std::size_t length) = 0;
    // Goes on to the next one; a payload that was not taken goes nowhere.
    virtual void pop() = 0;
    // Whether reading may stop here. If not, `front` gives out what has to be read still, and no more.
    [[nodiscard]] virtual bool may_stop() { return true; }
    // Ends a turn of reading: gives what was read back to the sender, as room.
    virtual void give_back() {}

    // Nothing is read or written any more.
    virtual void break_off() {}

    // Frames that have been begun here, and that have been read here to their ends: where what one rank tells another
    // way may overtake them. Not counted where it can't.
    [[nodiscard]] virtual std::uint64_t num_put() const noexcept { return 0; }
    [[nodiscard]] virtual std::uint64_t num_read() const noexcept { return 0; }
};

}  // namespace ferrodist
