// A rank's connections to the ranks of other hosts, for the collectives of one group. Their arrivals and segments are
// received into memory of this process that has the layout of the shared segment.
//
// The thread that runs a collective reads and writes all connections while it waits for anything; between collectives
// nobody does. A frame is a header and bytes of one slot; the frames of one connection arrive in the order in which
// they were sent.
//
// [Note: few system calls]
// For small collectives system calls are nearly all of the time, sends above all: each passes through the kernel's
// network stack. So frames queue until the caller has no more to send, and leave in one call, data and arrival
// together. One call reads the rest of a frame straight to its destination, and the bytes after it into a buffer.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/descriptor.h"
#include "base/failure.h"
#include "transport/shm/group_memory.h"

namespace ferrodist::tcp {

enum class LinkFrameType : std::uint32_t { arrival = 1, counts = 2, staged = 3, folded = 4, done = 5, failed = 6 };

// A frame's header. Its layout is the same on all machines that can be in a group: little-endian, which `ferrodist`
// requires.
struct Header {
    std::uint32_t magic;
    LinkFrameType kind;
    std::uint64_t number;  // a collective's sequence, or a segment's number
    std::uint64_t offset;  // in the slot
    std::uint64_t size;    // payload bytes
};
static_assert(sizeof(Header) == 32);

class Links {
public:
    // `descriptors[r]` is the connection to rank r, owned from now on, or -1 for ranks of this host.
    Links(const std::vector<int>& descriptors, std::size_t slot_bytes);

    [[nodiscard]] bool is_remote(int rank) const { return peers_[index(rank)] != nullptr; }

    // The latest state received from a remote rank.
    [[nodiscard]] shm::Arrival& arrival(int rank, std::uint64_t sequence) const {
        return peers_[index(rank)]->arrivals[sequence & 1];
    }
    [[nodiscard]] std::span<std::uint64_t> counts(int rank, std::uint64_t sequence) const {
        return peers_[index(rank)]->counts[sequence & 1];
    }
    [[nodiscard]] shm::RankFlags& flags(int rank) const { return peers_[index(rank)]->flags; }
    [[nodiscard]] std::byte* slot(int rank, std::uint64_t segment) const {
        return peers_[index(rank)]->slots.get() + segment % shm::num_slots * slot_bytes_;
    }

    // Queues bytes for one remote rank; they leave with the next `write` or `move`. `data` must stay unchanged until
    // nothing is unsent, or until that rank is known to have received it; data no longer than an arrival is copied.
    void send(int rank, LinkFrameType kind, std::uint64_t number, std::size_t offset, std::span<const std::byte> data);

    // Writes what the connections accept without blocking; returns whether anything moved.
    bool write() noexcept;
    // The same, and reads what has arrived. Throws Failure{protocol}.
    bool move();

    // Throws Failure{failed} if a rank has reported that a collective up to `sequence` has failed there. The report
    // follows everything that the rank sent before, so a rank that comes late to that collective finds the report
    // beside the arrivals, whatever arrives over the control plane.
    void check(std::uint64_t sequence) const {
        if (failed_at_ <= sequence) throw Failure(FailureKind::failed, {failed_rank_});
    }

    [[nodiscard]] bool has_unsent() const;
    [[nodiscard]] bool has_unsent(int rank) const { return peers_[index(rank)]->has_unsent(); }
    // The same, for staged segments up to `number`.
    [[nodiscard]] bool has_unsent_staged(int rank, std::uint64_t number) const;
    // Drops everything unsent, so that its data need not stay unchanged.
    void drop_unsent() noexcept;
    // Whether a rank's connection has ended.
    [[nodiscard]] bool is_gone(int rank) const { return peers_[index(rank)]->is_gone; }

    // Blocks until a connection is readable or writable, `wake` is called, or `timeout` has passed.
    void sleep(std::chrono::nanoseconds timeout);
    // Ends a `sleep`, from any thread.
    void wake() noexcept;
    // Shuts the connections down for writing. For any thread.
    void leave() noexcept;
    // In a forked child: closes its copies of the connections, which belong to the parent.
    void drop() noexcept;

private:
    struct Outgoing {
        Header header;
        std::array<std::byte, sizeof(shm::Arrival)> copy;
        std::span<const std::byte> data;  // the payload, or empty if it was copied
        std::size_t num_sent = 0;         // of header, copy and data together

        // The size of header and copy, which are contiguous; uncopied data follows them.
        [[nodiscard]] std::size_t copied_size() const { return sizeof header + header.size - data.size(); }
    };

    struct Peer {
        Descriptor socket;
        bool is_gone = false;
        std::vector<Outgoing> outgoing;
        std::size_t first_unsent = 0;  // those before it have been sent

        Header header{};              // of the frame being received
        std::span<std::byte> target;  // where the rest of its data goes; empty between frames
        std::unique_ptr<std::byte[]> buffer;
        std::size_t num_buffered = 0;  // less than a header, between reads

        shm::Arrival arrivals[2]{};
        std::vector<std::uint64_t> counts[2];
        shm::RankFlags flags{};
        std::unique_ptr<std::byte[]> slots;

        [[nodiscard]] bool has_unsent() const { return !is_gone && first_unsent < outgoing.size(); }
    };

    static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
    static bool write(Peer& peer) noexcept;
    static void count_sent(Peer& peer, std::size_t size) noexcept;
    bool read(Peer& peer, int rank);
    void parse_frames(Peer& peer, int rank);
    std::span<std::byte> target_of(Peer& peer, int rank) const;
    void handle_frame(Peer& peer, int rank);

    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null for ranks of this host
    std::size_t slot_bytes_;
    std::uint64_t failed_at_ = UINT64_MAX;  // the first collective reported as failed, and by which rank
    int failed_rank_ = -1;
    Descriptor wakeup_;
};

}  // namespace ferrodist::tcp
