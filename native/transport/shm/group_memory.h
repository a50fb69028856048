// A group's shared memory on one host: arrival records, flags and staging slots.
//
// [Note: one writer]
// Every flag has one rank that writes it, on cache lines of its own, and only grows. Exceptions are the group's bell,
// the abort record, and in oversubscribed groups the arrival counter and `released`, which the last rank to arrive
// writes. So nothing has to be reset, and there are no locks in shared memory: a killed rank leaves nothing locked
// behind.
//
// [Note: memory order]
// A flag is stored after the data that it publishes and loaded before that data is read, with sequentially consistent
// operations: as release and acquire they order the data, and because they are in one total order with the `sleepers`
// counter no thread sleeps through a store (see `publish` and `wait_until`). Nothing relies on the stronger ordering of
// x86.
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

// Staging slots per rank; see [Note: slots] in collectives/exchange.h.
inline constexpr std::size_t num_slots = 3;

// The signature of one rank's collective call, stored beside its arrival flag. It must be equal on all ranks.
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

// Maximum payload inlined with the arrival flag. Its first bytes are on the flag's cache line, so small payloads cost
// nothing extra.
inline constexpr std::size_t max_inline_bytes = 2 * line_bytes - sizeof(std::uint64_t) - sizeof(Call);

using Flag = std::atomic<std::uint64_t>;
static_assert(Flag::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

// The record of a rank's arrival at a collective. Each rank has two, used alternately: when a rank writes the one of
// call n+2, all ranks have arrived at n+1, and so have read the one of n.
struct alignas(line_bytes) Arrival {
    Flag sequence;
    Call call;
    std::array<std::byte, max_inline_bytes> payload;
};
static_assert(sizeof(Arrival) == 2 * line_bytes);

// How far a rank has come through the segments of all collectives so far; see [Note: slots] in collectives/exchange.h.
struct alignas(line_bytes) RankFlags {
    Flag staged;  // its input of segments below this is in its slots
    Flag folded;  // its chunk of the result of segments below this is in its slots
    Flag done;    // it has read all it needs of segments below this
    Flag left;    // 1 once it has left the group
};

// The configuration of a group, the same on all its ranks of this host.
struct Layout {
    int num_ranks = 1;   // on this host; in `Fabric::layout` on all hosts
    int group_size = 1;  // on all hosts
    std::size_t slot_bytes = 0;
    bool is_oversubscribed = false;  // more ranks than processors
    std::uint32_t spin_micros = 0;   // how long to spin before sleeping

    [[nodiscard]] std::size_t size_bytes() const;
    // What several ranks write, and what the rank with index `local` on this host alone does; see [Note: first touch]
    // in memory.h.
    [[nodiscard]] Part common_part() const;
    [[nodiscard]] Part part_of(int local) const;
};

class GroupMemory {
public:
    // Uses memory of `layout.size_bytes()`, which ranks that are threads may share. The creator of the memory calls
    // `initialize` before others use it.
    GroupMemory(std::shared_ptr<const Mapping> memory, const Layout& layout);

    void initialize();

    [[nodiscard]] const Layout& layout() const noexcept { return layout_; }
    [[nodiscard]] Arrival& arrival(int rank, std::uint64_t sequence) const noexcept;
    [[nodiscard]] RankFlags& flags(int rank) const noexcept;
    [[nodiscard]] std::byte* slot(int rank, std::uint64_t segment) const noexcept;
    // One count per rank, written before the arrival at `sequence`.
    [[nodiscard]] std::span<std::uint64_t> counts(int rank, std::uint64_t sequence) const noexcept;

    // The callback for long waits for arrivals. Must be set before anything waits.
    LongWait long_wait;

    // Stores `value` into one of this rank's flags and wakes the sleepers.
    void publish(Flag& flag, std::uint64_t value);

    // The waits below throw Failure: late or stalled, left, aborted, stopped.

    // Publishes this rank's arrival at `sequence`, and waits for the arrival of all ranks. Oversubscribed ranks count
    // their arrivals instead of looking at each other's flags.
    void arrive(int rank, std::uint64_t sequence, const Deadline& deadline);

    // Waits until `flag` of every rank's progress is at least `value`.
    void await(Flag RankFlags::* flag, std::uint64_t value, const Deadline& deadline);

    // Aborts the group: all present and future waits in it throw Failure{aborted} with `record`. The first abort wins.
    void abort(std::string_view record);

    // Marks `rank`, which is this rank, as gone: waits for it throw Failure{left}, and waits of this rank throw
    // Failure{stopped}.
    void leave(int rank);

    // Makes waits of this rank throw Failure{stopped}; other ranks are not notified.
    void stop() noexcept { is_stopped_.store(true); }

    [[nodiscard]] bool is_aborted() const noexcept;

    // Throws if the group has ended, for all ranks or for this one.
    void check() const;

private:
    struct Header;

    // Blocks until `ready()`, or until `lagging()`, which lists the ranks waited for, is empty; `timeout_kind` is the
    // failure to throw on a timeout.
    template <class Ready, class Lagging>
    void wait_until(const Ready& ready, const Lagging& lagging, FailureKind timeout_kind, const Deadline& deadline,
                    LongWait::Watch* watch = nullptr);

    void ring();
    [[nodiscard]] bool has_ended() const noexcept { return is_stopped_.load() || is_aborted(); }
    [[nodiscard]] std::string abort_record() const;
    [[nodiscard]] Header& header() const noexcept;

    Contention contention_;
    Layout layout_;
    std::shared_ptr<const Mapping> memory_;
    std::byte* arrivals_;
    std::byte* flags_;
    std::byte* counts_;
    std::byte* slots_;
    std::atomic<bool> is_stopped_{false};  // of this process's view of the memory
};

}  // namespace ferrodist::shm
