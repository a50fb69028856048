// What the ranks of one host share for one group: flags, calls and staging slots.
//
// [Note: one writer]
// Every flag has one rank that writes it (the doorbell, the arrival counter and the abort record apart), on cache lines
// of its own, and grows only. So nothing has to be reset, and no lock lies in shared memory: a rank that is killed leaves
// nothing locked behind.
//
// [Note: memory order]
// A flag is stored after the data it speaks of and loaded before that data is read, with sequentially consistent
// operations: as release and acquire they order the data, and being in one total order with the `sleepers` counter they
// let nobody sleep through a store (see `publish` and `wait_until`). No order of x86 is relied on beyond that.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/deadline.h"
#include "base/failure.h"
#include "base/long_wait.h"
#include "base/spin.h"
#include "transport/shm/memory.h"

namespace ferrodist::shm {

// Two cache lines: processors fetch lines in pairs.
inline constexpr std::size_t line_bytes = 128;

// Slots a rank has for staging; see [Note: slots] in collectives/pipeline.h.
inline constexpr std::size_t num_slots = 3;

// One rank's collective call, as it lies beside its arrival flag. Equal on all ranks, or the call is a mismatch.
struct Call {
    std::uint8_t operation = 0;
    std::uint8_t dtype = 0;
    std::uint8_t reduce_op = 0;
    std::int8_t dim = -1;
    std::int32_t root = -1;
    std::uint64_t count = 0;

    friend bool operator==(const Call&, const Call&) = default;
};
static_assert(sizeof(Call) == 16);

// Bytes that travel with the arrival flag. The first of them lie on its line, so few cost nothing more.
inline constexpr std::size_t max_inline_bytes = 2 * line_bytes - sizeof(std::uint64_t) - sizeof(Call);

using Flag = std::atomic<std::uint64_t>;
static_assert(Flag::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

// A rank's arrival at a collective. There are two a rank, used in turn: when a rank writes the one of call n+2, all
// ranks have arrived at n+1, and so are done reading what it held for n.
struct alignas(line_bytes) Arrival {
    Flag sequence;
    Call call;
    std::array<std::byte, max_inline_bytes> payload;
};
static_assert(sizeof(Arrival) == 2 * line_bytes);

// How far a rank is in the segments of all collectives so far.
struct alignas(line_bytes) Progress {
    Flag staged;  // its input of segments below this lies in its slots
    Flag folded;  // its part of the result of segments below this lies in its slots
    Flag done;    // it has read all it needs of segments below this
    Flag left;    // 1 once it has left the group
};

// What a group is set up with, the same on all its ranks of this host.
struct Layout {
    int num_ranks = 1;   // on this host
    int group_size = 1;  // on all hosts
    std::size_t slot_bytes = 0;
    bool is_crowded = false;        // more ranks than processors
    std::uint32_t spin_micros = 0;  // how long to spin before sleeping

    [[nodiscard]] std::size_t size_bytes() const;
};

class Segment {
public:
    // In memory of `layout.size_bytes()`, which ranks that are threads may share. Whoever created the memory calls
    // `initialize` before others use it.
    Segment(std::shared_ptr<const Mapping> memory, const Layout& layout);

    void initialize();

    [[nodiscard]] const Layout& layout() const noexcept { return layout_; }
    [[nodiscard]] Arrival& arrival(int rank, std::uint64_t sequence) const noexcept;
    [[nodiscard]] Progress& progress(int rank) const noexcept;
    [[nodiscard]] std::byte* slot(int rank, std::uint64_t segment) const noexcept;
    // A row of one number a rank, written before the arrival at `sequence`.
    [[nodiscard]] std::span<std::uint64_t> counts(int rank, std::uint64_t sequence) const noexcept;

    // Whom to tell where this rank waits for arrivals for long; set before anything waits.
    LongWait long_wait;

    // Stores `value` into one of this rank's flags and wakes those who sleep.
    void publish(Flag& flag, std::uint64_t value);

    // The waits below throw Failure: late or stalled, left, aborted, stopped.

    // Says that this rank has arrived at `sequence`, and waits for all.
    void arrive(int rank, std::uint64_t sequence, const Deadline& deadline);

    // Waits until `flag` of every rank's progress is at least `value`.
    void await(Flag Progress::* flag, std::uint64_t value, const Deadline& deadline);

    // Ends the group: whoever waits in it, now or later, throws Failure{aborted} with `record`. The first counts.
    void abort(std::string_view record);

    // Says that `rank`, which is this one, has left: whoever waits for it throws Failure{left}, and whoever waits here
    // throws Failure{stopped}.
    void leave(int rank);

    // Has whoever waits here throw Failure{stopped}, without a word to the other ranks.
    void stop() noexcept { is_stopped_.store(true); }

    [[nodiscard]] bool is_aborted() const noexcept;

    // Throws when the group has ended for all ranks or for this one.
    void check() const;

private:
    struct Header;

    // Blocks until `ready()`, or until `lagging()`, which names the ranks that it waits for, names none; `lateness` is what
    // they are too late for.
    template <class Ready, class Lagging>
    void wait_until(const Ready& ready, const Lagging& lagging, FailureKind lateness, const Deadline& deadline,
                    LongWait::Watch* watch = nullptr);

    void ring();
    [[nodiscard]] bool has_ended() const noexcept { return is_stopped_.load() || is_aborted(); }
    [[nodiscard]] std::string abort_record() const;
    [[nodiscard]] Header& header() const noexcept;

    Contention contention_;
    Layout layout_;
    std::shared_ptr<const Mapping> memory_;
    std::byte* arrivals_;
    std::byte* progress_;
    std::byte* counts_;
    std::byte* slots_;
    std::atomic<bool> is_stopped_{false};  // of this process's view of the segment
};

}  // namespace ferrodist::shm
