// The connections of one rank to the ranks of other hosts, for one group: what they stage, fold and call comes in here
// and lies in memory of this process as it would in the shared segment.
//
// Whoever runs a collective reads and writes all connections, while it waits for anything; nobody does in between. A
// frame is a header and bytes of one slot; those of one connection arrive in the order in which they were sent.
//
// [Note: few system calls]
// For small collectives system calls are nearly all the time, sends above all: each takes its way through the kernel. So
// frames queue until whoever sends them has no more to send, and leave in one call, data and arrival together. One call
// reads the rest of a frame straight to its place, and into a buffer what has come after it.
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
#include "transport/shm/segment.h"

namespace ferrodist::tcp {

enum class Kind : std::uint32_t { arrival = 1, counts = 2, staged = 3, folded = 4, done = 5, failed = 6 };

// The same on all machines that can be in a group: little-endian, which `ferrodist` requires.
struct Header {
    std::uint32_t magic;
    Kind kind;
    std::uint64_t number;  // a collective's sequence, or a segment's number
    std::uint64_t offset;  // in the slot
    std::uint64_t size;    // bytes that follow
};
static_assert(sizeof(Header) == 32);

class Links {
public:
    // `descriptors[r]` is the connection to rank r, owned from now on, or -1 for ranks of this host.
    Links(const std::vector<int>& descriptors, std::size_t slot_bytes);

    [[nodiscard]] bool is_remote(int rank) const { return peers_[index(rank)] != nullptr; }

    // What a remote rank has said.
    [[nodiscard]] shm::Arrival& arrival(int rank, std::uint64_t sequence) const {
        return peers_[index(rank)]->arrivals[sequence & 1];
    }
    [[nodiscard]] std::span<std::uint64_t> counts(int rank, std::uint64_t sequence) const {
        return peers_[index(rank)]->counts[sequence & 1];
    }
    [[nodiscard]] shm::Progress& progress(int rank) const { return peers_[index(rank)]->progress; }
    [[nodiscard]] std::byte* slot(int rank, std::uint64_t segment) const {
        return peers_[index(rank)]->slots.get() + segment % shm::num_slots * slot_bytes_;
    }

    // Queues bytes for one remote rank, which leave with the next `write` or `move`. `data` must stay as it is until
    // nothing is unsent, or until that rank is known to have got it; a copy is taken of what is no longer than an arrival.
    void send(int rank, Kind kind, std::uint64_t number, std::size_t offset, std::span<const std::byte> data);

    // Writes what connections take without waiting; whether anything moved.
    bool write() noexcept;
    // The same, and reads what they give. Throws Failure{protocol}.
    bool move();

    // Throws Failure{failed} when a rank has said that a collective up to `sequence` has failed there. It said so after
    // all that it sent before, so a rank that comes late to that collective finds it beside the arrivals, whatever news
    // comes another way.
    void check(std::uint64_t sequence) const {
        if (failed_at_ <= sequence) throw Failure(FailureKind::failed, {failed_rank_});
    }

    [[nodiscard]] bool has_unsent() const;
    [[nodiscard]] bool has_unsent(int rank) const { return peers_[index(rank)]->has_unsent(); }
    // The same, of segments up to `number` that were staged.
    [[nodiscard]] bool has_unsent_staged(int rank, std::uint64_t number) const;
    // Nothing is sent any more that has not been: its data need not stay.
    void drop_unsent() noexcept;
    // Whether a rank's connection has ended.
    [[nodiscard]] bool is_gone(int rank) const { return peers_[index(rank)]->is_gone; }

    // Blocks until a connection gives or takes something, `wake` is called, or `timeout` has passed.
    void sleep(std::chrono::nanoseconds timeout);
    // Ends a `sleep`, from any thread.
    void wake() noexcept;
    // Tells the other ranks that nothing comes any more, from any thread.
    void leave() noexcept;
    // In a forked child: closes its copies of the connections, which are the parent's.
    void drop() noexcept;

private:
    struct Outgoing {
        Header header;
        std::array<std::byte, sizeof(shm::Arrival)> copy;
        std::span<const std::byte> data;  // where it lies, or none if it was copied
        std::size_t num_sent = 0;         // of header, copy and data together

        // What was not copied follows header and copy, which lie side by side.
        [[nodiscard]] std::size_t head_size() const { return sizeof header + header.size - data.size(); }
    };

    struct Peer {
        Descriptor socket;
        bool is_gone = false;
        std::vector<Outgoing> outgoing;
        std::size_t first_unsent = 0;  // those before it have left

        Header header{};              // of the frame that is coming in
        std::span<std::byte> target;  // where the rest of its data goes; empty between frames
        std::unique_ptr<std::byte[]> buffer;
        std::size_t num_buffered = 0;  // less than a header, between reads

        shm::Arrival arrivals[2]{};
        std::vector<std::uint64_t> counts[2];
        shm::Progress progress{};
        std::unique_ptr<std::byte[]> slots;

        [[nodiscard]] bool has_unsent() const { return !is_gone && first_unsent < outgoing.size(); }
    };

    static std::size_t index(int rank) { return static_cast<std::size_t>(rank); }
    static bool write(Peer& peer) noexcept;
    static void count_sent(Peer& peer, std::size_t size) noexcept;
    bool read(Peer& peer, int rank);
    void take_apart(Peer& peer, int rank);
    std::span<std::byte> target_of(Peer& peer, int rank) const;
    void act_on(Peer& peer, int rank);

    std::vector<std::unique_ptr<Peer>> peers_;  // by rank; null for those of this host
    std::size_t slot_bytes_;
    std::uint64_t failed_at_ = UINT64_MAX;  // the first collective that a rank has said to have failed, and the rank
    int failed_rank_ = -1;
    Descriptor alarm_;
};

}  // namespace ferrodist::tcp
