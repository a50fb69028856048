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

class Fabric {
public:
    // All ranks on this host.
    Fabric(std::shared_ptr<shm::Segment> segment, int rank)
        : Fabric(std::move(segment), rank, nullptr, {}) {}

    // `local_indexes[r]` is the place of rank r in the segment; it has a meaning for ranks that `links` has not.
    Fabric(std::shared_ptr<shm::Segment> segment, int rank, std::unique_ptr<tcp::Links> links,
           std::vector<int> local_indexes);

    [[nodiscard]] int rank() const noexcept { return rank_; }
    // Of the whole group.
    [[nodiscard]] const shm::Layout& layout() const noexcept { return layout_; }
    [[nodiscard]] int num_ranks() const noexcept { return layout_.num_ranks; }

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

    // Sends the ranks of other hosts what they will read of segment `number`, which lies in this rank's slot:
    // `range_for(r)` for rank r.
    template <class RangeFor>
    void send_staged(std::uint64_t number, const RangeFor& range_for) {
        send_ranges(tcp::Kind::staged, number, range_for);
    }

    // The same, and says so to those of this host.
    template <class RangeFor>
    void publish_staged(std::uint64_t number, const RangeFor& range_for) {
        send_ranges(tcp::Kind::staged, number, range_for);
        segment_->publish(own().staged, number + 1);
    }
    template <class RangeFor>
    void publish_folded(std::uint64_t number, const RangeFor& range_for) {
        send_ranges(tcp::Kind::folded, number, range_for);
        segment_->publish(own().folded, number + 1);
    }
    // Says that this rank has read all it needs of segments below `number`.
    void publish_done(std::uint64_t number);

    // Waits until `flag` of every rank is at least `value`.
    void await(shm::Flag shm::Progress::* flag, std::uint64_t value, const Deadline& deadline);
    // Waits until all that was sent has left; collectives end with it.
    void flush(const Deadline& deadline);

    // Tells the ranks of other hosts that a collective has failed here.
    void give_up() noexcept;
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
            const Range range = range_for(r);
            links_->send(r, kind, number, range.offset, {slot(rank_, number) + range.offset, range.size});
        }
    }
    // Blocks until `is_there(r)` of every rank.
    template <class IsThere>
    void wait_for_all(const IsThere& is_there, FailureKind lateness, const Deadline& deadline);

    std::shared_ptr<shm::Segment> segment_;
    std::unique_ptr<tcp::Links> links_;
    int rank_;
    std::vector<int> local_indexes_;
    bool has_local_peers_ = false;
    shm::Layout layout_;
};

}  // namespace ferrodist
