// The memory of a group as a collective sees it, wherever its ranks are: ranks of this host in shared memory, others
// over connections. Each rank has arrival records, flags and slots; `slot(r, m)` of a remote rank holds the bytes that
// it has sent of segment m, at the offsets that they have in its own slot.
#pragma once

#include <memory>
#include <vector>

#include "transport/shm/group_memory.h"
#include "transport/tcp/links.h"

namespace ferrodist {

// A byte range of a slot.
struct Range {
    std::size_t offset = 0;
    std::size_t size = 0;
};

// A rank's neighbours in the chain of hosts (see [Note: chain] in collectives/chain.h); it exists where hosts follow one
// another in rank order, with equally many ranks each.
struct Chain {
    int num_local = 1;    // ranks per host; 1 where there is no chain
    int first_local = 0;  // the first rank of this host
    int previous = -1;    // the rank with the same local index on the previous host, or -1
    int next = -1;        // the same on the next host
};

class Fabric {
public:
    // A group whose ranks are all on this host.
    Fabric(std::shared_ptr<shm::GroupMemory> memory, int rank) : Fabric(std::move(memory), rank, nullptr, {}) {}

    // `hosts[r]` is equal for ranks of the same host, whose indexes in its memory follow rank order; `links` has
    // connections to all other ranks.
    Fabric(std::shared_ptr<shm::GroupMemory> memory, int rank, std::unique_ptr<tcp::Links> links,
           const std::vector<int>& hosts);

    [[nodiscard]] int rank() const noexcept { return rank_; }
    // The layout for the whole group.
    [[nodiscard]] const shm::Layout& layout() const noexcept { return layout_; }
    [[nodiscard]] int num_ranks() const noexcept { return layout_.num_ranks; }
    [[nodiscard]] bool has_remote_ranks() const noexcept { return links_ != nullptr; }
    [[nodiscard]] const Chain& chain() const noexcept { return chain_; }

    // Begins this rank's next collective. Writes its call into its arrival record, and returns the record's payload,
    // which the caller fills before it calls `enter`.
    std::byte* begin(const shm::Call& call) {
        ++sequence_;
        shm::Arrival& own = arrival(rank_);
        own.call = call;
        return own.payload.data();
    }

    // Publishes this rank's arrival record and waits for the records of all ranks. Throws Failure{mismatch} unless all
    // have made the same call.
    void enter(const Deadline& deadline) {
        if (!links_)
            memory_->arrive(rank_, sequence_, deadline);
        else
            arrive_over_links(deadline);
        const shm::Call& own = arrival(rank_).call;
        for (int r = 0; r < num_ranks(); ++r)
            if (!(arrival(r).call == own)) throw_mismatch();
        known_done_ = next_segment_;  // a rank that has arrived has completed all collectives before
    }

    // The number of collectives begun so far.
    [[nodiscard]] std::uint64_t sequence() const noexcept { return sequence_; }

    // Rank r's arrival record in the current collective, after `enter`.
    [[nodiscard]] shm::Arrival& arrival(int r) const { return arrival(r, sequence_); }
    [[nodiscard]] shm::Arrival& arrival(int r, std::uint64_t sequence) const {
        if (!links_) return memory_->arrival(r, sequence);
        return links_->is_remote(r) ? links_->arrival(r, sequence) : memory_->arrival(local(r), sequence);
    }
    [[nodiscard]] std::byte* slot(int r, std::uint64_t segment) const {
        if (!links_) return memory_->slot(r, segment);
        return links_->is_remote(r) ? links_->slot(r, segment) : memory_->slot(local(r), segment);
    }
    // Publishes one count per rank; between `begin` and `enter`.
    void publish_counts(std::span<const std::size_t> counts);
    // Rank r's counts in the current collective.
    [[nodiscard]] std::span<std::uint64_t> counts(int r) const {
        if (!links_) return memory_->counts(r, sequence_);
        return links_->is_remote(r) ? links_->counts(r, sequence_) : memory_->counts(local(r), sequence_);
    }

    // Throws Failure{mismatch} with every rank's call and payload in the current collective.
    [[noreturn]] void throw_mismatch() const;

    // The number of the next segment: segments are numbered consecutively over all collectives.
    [[nodiscard]] std::uint64_t next_segment() const noexcept { return next_segment_; }
    // Counts the segments of a collective. All ranks count the same number of them.
    void count_segments(std::uint64_t count) noexcept { next_segment_ += count; }
    // Whether all ranks are known to be done with the segment that was in the slot of segment `number`.
    [[nodiscard]] bool is_slot_free(std::uint64_t number) const noexcept {
        return number < shm::num_slots + known_done_;
    }

    // Queues for the ranks of other hosts the parts of segment `number` that they will read, from this rank's slot:
    // `range_for(r)` for rank r. They leave with the next message.
    template <class RangeFor>
    void send_staged(std::uint64_t number, const RangeFor& range_for) {
        send_ranges(tcp::LinkFrameType::staged, number, range_for);
    }

    // The same at once, and sets the flag for the ranks of this host.
    template <class RangeFor>
    void publish_staged(std::uint64_t number, const RangeFor& range_for) {
        send_ranges(tcp::LinkFrameType::staged, number, range_for);
        if (links_) links_->write();
        memory_->publish(own().staged, number + 1);
    }
    template <class RangeFor>
    void publish_folded(std::uint64_t number, const RangeFor& range_for) {
        send_ranges(tcp::LinkFrameType::folded, number, range_for);
        if (links_) links_->write();
        memory_->publish(own().folded, number + 1);
    }
    // Publishes that this rank has read all it needs of segments below `number`.
    void publish_done(std::uint64_t number);

    // Waits until `flag` of every rank is at least `value`.
    void await(shm::Flag shm::RankFlags::* flag, std::uint64_t value, const Deadline& deadline);
    // The same for the ranks of this host alone, and for one rank of any host.
    void publish_host(shm::Flag shm::RankFlags::* flag, std::uint64_t value) { memory_->publish(own().*flag, value); }
    void await_host(shm::Flag shm::RankFlags::* flag, std::uint64_t value, const Deadline& deadline);
    void await_rank(int r, shm::Flag shm::RankFlags::* flag, std::uint64_t value, const Deadline& deadline);
    // Queues bytes of this rank's slot for one rank of another host, or that it is done; `write` sends what is queued,
    // and so does any wait.
    void send_to(int r, tcp::LinkFrameType kind, std::uint64_t number, const Range& range) {
        links_->send(r, kind, number, range.offset, {slot(rank_, number) + range.offset, range.size});
    }

    void send_done_to(int r, std::uint64_t number) { links_->send(r, tcp::LinkFrameType::done, number, 0, {}); }
    void write() { links_->write(); }

    // For a group of two ranks on two hosts: sends segment `number` to the other rank straight from `data`, without a
    // slot. `data` must stay unchanged until `await_exchanged`, which waits until it has been sent and the other rank's
    // segment has arrived.
    void send_partner(std::uint64_t number, std::span<const std::byte> data) {
        links_->send(1 - rank_, tcp::LinkFrameType::staged, number, 0, data);
    }
    void await_exchanged(std::uint64_t number, const Deadline& deadline);

    // Waits until everything queued has been sent; every collective ends with it.
    void flush(const Deadline& deadline);

    // Sets the callback for long waits for arrivals. Must be set before anything waits.
    void set_long_wait(LongWait long_wait) { memory_->long_wait = std::move(long_wait); }

    // Reports to the ranks of other hosts that the collective at `sequence` has failed here.
    void report_failure(std::uint64_t sequence) noexcept;
    void leave();
    void stop() noexcept;  // in a forked child
    void abort(std::string_view record);
    void check() const { memory_->check(); }

private:
    [[nodiscard]] int local(int r) const { return local_indexes_[static_cast<std::size_t>(r)]; }
    [[nodiscard]] shm::RankFlags& own() const { return memory_->flags(links_ ? local(rank_) : rank_); }
    [[nodiscard]] shm::RankFlags& flags(int r) const {
        return links_->is_remote(r) ? links_->flags(r) : memory_->flags(local(r));
    }

    void arrive_over_links(const Deadline& deadline);

    template <class RangeFor>
    void send_ranges(tcp::LinkFrameType kind, std::uint64_t number, const RangeFor& range_for) {
        if (!links_) return;
        for (int r = 0; r < num_ranks(); ++r) {
            if (!links_->is_remote(r)) continue;
            send_to(r, kind, number, range_for(r));
        }
    }
    // Blocks until `is_ready(r)` for every rank.
    template <class IsThere>
    void wait_for_all(const IsThere& is_ready, FailureKind timeout_kind, const Deadline& deadline,
                      LongWait::Watch* watch = nullptr);

    std::shared_ptr<shm::GroupMemory> memory_;
    std::unique_ptr<tcp::Links> links_;
    int rank_;
    std::vector<int> local_indexes_;  // each local rank's index in the host's memory
    Chain chain_;
    std::uint64_t sequence_ = 0;      // of the collective that this rank has begun
    std::uint64_t entered_ = 0;       // of the collective that this rank has entered; with remote ranks only
    std::uint64_t next_segment_ = 0;  // segments counted so far
    std::uint64_t known_done_ = 0;    // segments that all ranks are known to have completed
    bool has_local_peers_ = false;
    shm::Layout layout_;
    std::unique_ptr<Contention> contention_ = std::make_unique<Contention>();
};

}  // namespace ferrodist
