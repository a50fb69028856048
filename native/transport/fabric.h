// What a collective sees of the other ranks of its group, wherever they are: those of this host in a shared segment, the
// others over connections. Each rank has calls, flags and slots; `slot(r, m)` of a remote rank holds what it has sent of
// segment m, at the place where it has it.
#pragma once

#include <memory>
#include <vector>

#include "transport/shm/segment.h"
#include "transport/tcp/links.h"

namespace ferrodist {

// Bytes of a slot.
struct Range {
    std::size_t offset = 0;
    std::size_t size = 0;
};

// The neighbours of a rank where hosts follow one another in rank order, with equally many ranks each.
struct Chain {
    int num_local = 1;    // ranks of each host; 1 where there is no chain
    int first_local = 0;  // the first rank of this host
    int previous = -1;    // the rank of the same place on the host before, or -1
    int next = -1;        // on the host after
};

class Fabric {
public:
    // All ranks on this host.
    Fabric(std::shared_ptr<shm::Segment> segment, int rank)
        : Fabric(std::move(segment), rank, nullptr, {}) {}

    // `hosts[r]` is equal for ranks of the same host, which have their places in the segment in rank order; `links` has
    // connections to all others.
    Fabric(std::shared_ptr<shm::Segment> segment, int rank, std::unique_ptr<tcp::Links> links,
           const std::vector<int>& hosts);

    [[nodiscard]] int rank() const noexcept { return rank_; }
    // Of the whole group.
    [[nodiscard]] const shm::Layout& layout() const noexcept { return layout_; }
    [[nodiscard]] int num_ranks() const noexcept { return layout_.num_ranks; }
    [[nodiscard]] bool has_remote_ranks() const noexcept { return links_ != nullptr; }
    [[nodiscard]] const Chain& chain() const noexcept { return chain_; }

    [[nodiscard]] shm::Arrival& arrival(int r, std::uint64_t sequence) const {
        if (!links_) return segment_->arrival(r, sequence);
        return links_->is_remote(r) ? links_->arrival(r, sequence) : segment_->arrival(local(r), sequence);
    }
    [[nodiscard]] std::byte* slot(int r, std::uint64_t segment) const {
        if (!links_) return segment_->slot(r, segment);
        return links_->is_remote(r) ? links_->slot(r, segment) : segment_->slot(local(r), segment);
    }
    // A row of one number a rank that rank r gave before it arrived.
    [[nodiscard]] std::span<std::uint64_t> counts(int r, std::uint64_t sequence) const {
        if (!links_) return segment_->counts(r, sequence);
        return links_->is_remote(r) ? links_->counts(r, sequence) : segment_->counts(local(r), sequence);
    }

    void give_counts(std::uint64_t sequence, std::span<const std::size_t> counts);
    // Says that this rank has arrived, with the call and payload in its line, and waits for all.
    void arrive(std::uint64_t sequence, const Deadline& deadline);

    // Sends the ranks of other hosts, with what is sent next, what they will read of segment `number`, which lies in this
    // rank's slot: `range_for(r)` for rank r.
    template <class RangeFor>
    void send_staged(std::uint64_t number, const RangeFor& range_for) {
        send_ranges(tcp::Kind::staged, number, range_for);
    }

    // The same at once, and says so to those of this host.
    template <class RangeFor>
    void publish_staged(std::uint64_t number, const RangeFor& range_for) {
        send_ranges(tcp::Kind::staged, number, range_for);
        if (links_) links_->write();
        segment_->publish(own().staged, number + 1);
    }
    template <class RangeFor>
    void publish_folded(std::uint64_t number, const RangeFor& range_for) {
        send_ranges(tcp::Kind::folded, number, range_for);
        if (links_) links_->write();
        segment_->publish(own().folded, number + 1);
    }
    // Says that this rank has read all it needs of segments below `number`.
    void publish_done(std::uint64_t number);

    // Waits until `flag` of every rank is at least `value`.
    void await(shm::Flag shm::Progress::* flag, std::uint64_t value, const Deadline& deadline);
    // The same for the ranks of this host alone, and for one rank of another host.
    void publish_host(shm::Flag shm::Progress::* flag, std::uint64_t value) { segment_->publish(own().*flag, value); }
    void await_host(shm::Flag shm::Progress::* flag, std::uint64_t value, const Deadline& deadline);
    void await_rank(int r, shm::Flag shm::Progress::* flag, std::uint64_t value, const Deadline& deadline);
    void send_to(int r, tcp::Kind kind, std::uint64_t number, const Range& range) {
        links_->send(r, kind, number, range.offset, {slot(rank_, number) + range.offset, range.size});
    }

    // For a group of two ranks on two hosts: sends the other one segment `number`, which lies in `data` in place of a slot
    // and must stay there until `await_exchanged`, which waits until it has left and the other one's has come.
    void send_partner(std::uint64_t number, std::span<const std::byte> data) {
        links_->send(1 - rank_, tcp::Kind::staged, number, 0, data);
    }
    void await_exchanged(std::uint64_t number, const Deadline& deadline);

    // Waits until all that was sent has left; collectives end with it.
    void flush(const Deadline& deadline);

    // Whom to tell where this rank waits for arrivals for long; set before anything waits.
    void set_long_wait(LongWait long_wait) { segment_->long_wait = std::move(long_wait); }

    // Tells the ranks of other hosts that the collective at `sequence` has failed here.
    void give_up(std::uint64_t sequence) noexcept;
    void leave();
    void stop() noexcept;  // in a forked child
    void abort(std::string_view record);
    void check() const { segment_->check(); }

private:
    [[nodiscard]] int local(int r) const { return local_indexes_[static_cast<std::size_t>(r)]; }
    [[nodiscard]] shm::Progress& own() const { return segment_->progress(links_ ? local(rank_) : rank_); }
    [[nodiscard]] shm::Progress& progress(int r) const {
        return links_->is_remote(r) ? links_->progress(r) : segment_->progress(local(r));
    }

    template <class RangeFor>
    void send_ranges(tcp::Kind kind, std::uint64_t number, const RangeFor& range_for) {
        if (!links_) return;
        for (int r = 0; r < num_ranks(); ++r) {
            if (!links_->is_remote(r)) continue;
            send_to(r, kind, number, range_for(r));
        }
    }
    // Blocks until `is_there(r)` of every rank.
    template <class IsThere>
    void wait_for_all(const IsThere& is_there, FailureKind lateness, const Deadline& deadline,
                      LongWait::Watch* watch = nullptr);

    std::shared_ptr<shm::Segment> segment_;
    std::unique_ptr<tcp::Links> links_;
    int rank_;
    std::vector<int> local_indexes_;  // places in the segment, of the ranks that are in it
    Chain chain_;
    std::uint64_t sequence_ = 0;  // of the collective that this rank has come to
    bool has_local_peers_ = false;
    shm::Layout layout_;
    std::unique_ptr<Contention> contention_ = std::make_unique<Contention>();
};

}  // namespace ferrodist
