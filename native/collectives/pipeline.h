// How data too large to travel with the arrival moves: in segments, through each rank's slots.
//
// [Note: slots]
// The segments of all collectives of a group are numbered through; segment m of a rank lies in its slot m modulo
// `num_slots`. Each rank stages what the others need of it (`staged`), takes what it needs from the others' slots, and
// says so (`done`). Before a rank writes a slot anew, all ranks must be done with the segment that was in it: with three
// slots that one lies two segments back, so ranks of equal speed don't wait for it. While one segment is taken the next
// is staged.
//
// Every rank counts the same number of segments for a collective, also one that stages or takes nothing.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "collectives/context.h"
#include "collectives/sizes.h"

namespace ferrodist {

inline void await_slot(Context& context, std::uint64_t number, const Deadline& deadline) {
    if (number < shm::num_slots) return;
    const std::uint64_t needed = number - shm::num_slots + 1;
    if (needed > context.known_done) context.fabric.await(&shm::Progress::done, needed, deadline);
}

// Says that this rank has read all it needs of segment k of `count`, whose number is `number`: if anyone waits for that. Of
// the last segments nobody does, for who enters the next collective has ended this one.
inline void finish_segment(Context& context, std::size_t k, std::size_t count, std::uint64_t number) {
    if (k + shm::num_slots <= count) context.fabric.publish_done(number + 1);
}

// What a rank offers the others to read and write without staging; see [Note: offers].
struct Offer {
    shm::Shared source = {};
    shm::Shared out = {};
    bool needs_out = false;           // whether the collective can do without staging only if `out` is shared, too
    bool is_readable = false;         // whether the others may read `own`, which lies anywhere
    const std::byte* own = nullptr;   // this rank's source
    std::size_t read_size = 0;        // bytes that another rank takes of it
    std::optional<TransferMode::Kind> kind = {};  // where the call has ways to choose from

    [[nodiscard]] bool is_made() const { return is_readable || (source.arena && (out.arena || !needs_out)); }
};

// Whether all ranks do the same, so that what rank 0 takes is what they all take; not where one is the root.
inline bool is_alike(Operation operation) {
    return operation == Operation::all_gather || operation == Operation::reduce_scatter ||
           operation == Operation::all_to_all;
}

// The offer of a source of `size` bytes, of which another rank reads `read_size` at once.
inline Offer offer_source(const Context& context, Operation operation, const std::byte* source, std::size_t size,
                          std::size_t read_size) {
    Offer offer{.source = context.arenas->find(source, size), .own = source, .read_size = read_size};
    offer.is_readable = context.peers.is_usable() && read_size >= least_read_bytes(context.fabric.layout());
    if (offer.is_readable && is_alike(operation)) {
        offer.kind = TransferMode::kind_of(operation, read_size);
        offer.is_readable = context.reading.way_of(*offer.kind) == TransferMode::in_place;
    }
    return offer;
}

// [Note: offers]
// A rank whose tensors lie in symmetric memory says where, in the payload of its call; if ranks can read each other's
// memory, it says where its source lies in any case. If all ranks offer the same, nothing is staged: each rank reads and
// writes the others' tensors (`direct`), and all wait until all have. A rank that makes an offer stages nothing before it
// knows; so if any does, the first segment has a flag like the others.
struct Negotiated {
    bool is_direct;       // all offer the same
    bool is_mapped;       // and it is symmetric memory
    bool is_staged_late;  // the first segment is staged after entry on some rank
};

using Places = std::array<shm::Place, 2>;

// An offer as it travels.
struct Offered {
    Places places;
    std::uint64_t advice;  // see [Note: reading]; of rank 0
};
inline constexpr std::size_t offer_bytes = sizeof(Offered);

inline Offered offered_by(const Context& context, const std::byte* payload, int r) {
    const auto at = payload - context.arrival_of(context.rank).payload.data();
    Offered offered;
    std::memcpy(&offered, context.arrival_of(r).payload.data() + at, offer_bytes);
    return offered;
}

// In the place of an arena: that the offset is an address of the rank's process.
inline constexpr std::uint64_t readable = ~std::uint64_t{0};

// The other ranks' sources, once all have offered them.
class Sources {
public:
    Sources(const Context& context, const std::byte* payload, const Offer& offer, bool is_mapped)
        : context_(context),
          payload_(payload),
          offer_(offer),
          is_mapped_(is_mapped) {}

    // Copies what lies at `offset` of rank r's source.
    void copy(int r, std::size_t offset, std::byte* out, std::size_t size) const {
        if (size == 0) return;
        if (is_mapped_) return copy_bytes(out, offer_.source.of(r) + offset, size);
        context_.peers.read(r, out, offered_by(context_, payload_, r).places[1].offset + offset, size);
    }

    [[nodiscard]] bool are_mapped() const { return is_mapped_; }

private:
    const Context& context_;
    const std::byte* payload_;
    const Offer& offer_;
    bool is_mapped_;
};

inline Places places_of(const Offer& offer) {
    const shm::Place own{readable, reinterpret_cast<std::uintptr_t>(offer.own)};
    return {offer.is_made() ? offer.source.place() : shm::Place{}, offer.is_readable ? own : offer.out.place()};
}

// What a part of a call takes, on the rank that compares ways and in calls that have them; else it asks no clock.
class Stopwatch {
public:
    Stopwatch(Context& context, const Offer& offer)
        : context_(context),
          offer_(offer),
          is_on_(offer.kind && context.rank == 0),
          began_(is_on_ ? Clock::now() : Clock::time_point{}) {}

    [[nodiscard]] Clock::duration time() const { return is_on_ ? Clock::now() - began_ : Clock::duration{}; }

    // At the end of a call: its time is this one and that of staging before it entered. How long others were late is in
    // neither. It counts for the way that this rank offered, also where other ranks' offers led by way of slots, for that
    // is what the offer came to: a way that never counted would stay unknown, and be gone for ever.
    void note() const {
        if (!is_on_) return;
        const Way way = offer_.is_readable ? TransferMode::in_place : TransferMode::by_slots;
        const Clock::duration whole = time() + context_.staging_time;
        context_.reading.took(*offer_.kind, way, std::chrono::duration<double>(whole).count(), offer_.read_size);
    }

private:
    Context& context_;
    const Offer& offer_;
    bool is_on_;
    Clock::time_point began_;
};

template <class Stage>
void stage_first(Context& context, const Stage& stage, const Deadline& deadline) {
    await_slot(context, context.segments, deadline);
    stage(std::size_t{0}, context.fabric.slot(context.rank, context.segments));
}

// Writes the offer at `payload`, and stages segment 0 unless it may not be needed. Then it is time to enter.
template <class Stage, class StagedFor>
void make_offer(Context& context, std::byte* payload, const Offer& offer, const Stage& stage, const StagedFor& staged_for,
                const Deadline& deadline) {
    const bool is_advising = offer.kind && context.rank == 0;
    const Offered offered{places_of(offer), is_advising ? context.reading.advise(*offer.kind) : 0};
    std::memcpy(payload, &offered, offer_bytes);
    context.staging_time = {};
    if (offer.is_made()) return;
    const Stopwatch stopwatch(context, offer);
    stage_first(context, stage, deadline);
    context.fabric.send_staged(context.segments, [&](int r) { return staged_for(std::size_t{0}, r); });
    context.staging_time = stopwatch.time();
}

// After entry: what all ranks' offers come to. Stages segment 0 where it was not, and is needed.
template <class Stage, class StagedFor>
Negotiated negotiate_zero_copy(Context& context, const std::byte* payload, const Offer& offer, const Stage& stage,
                     const StagedFor& staged_for, const Deadline& deadline) {
    const Places places = places_of(offer);
    const bool is_made = offer.is_made();
    bool is_mapped = offer.source.arena != nullptr && is_made;
    bool is_readable = offer.is_readable;
    bool is_any_made = false;
    for (int r = 0; r < context.num_ranks; ++r) {
        const Places theirs = offered_by(context, payload, r).places;
        is_mapped = is_mapped && theirs[0] == places[0] && (!offer.needs_out || theirs[1] == places[1]);
        is_readable = is_readable && theirs[1].arena == readable;
        is_any_made = is_any_made || theirs[0].arena != 0 || theirs[1].arena == readable;
    }
    context.reading.follow(offered_by(context, payload, 0).advice);  // also on a rank whose own part is of no kind
    const bool is_direct = is_mapped || is_readable;
    if (!is_direct && is_any_made) {
        if (is_made) stage_first(context, stage, deadline);
        context.fabric.publish_staged(context.segments, [&](int r) { return staged_for(std::size_t{0}, r); });
    }
    return {.is_direct = is_direct, .is_mapped = is_mapped, .is_staged_late = !is_direct && is_any_made};
}

// Ends a collective without staging: counts as one segment, which all ranks wait for.
inline void finish_direct(Context& context, const Deadline& deadline) {
    const std::uint64_t next = ++context.segments;
    const auto nothing = [](int) { return Range{}; };
    context.fabric.publish_folded(next - 1, nothing);
    context.fabric.await(&shm::Progress::folded, next, deadline);
}

// Moves `num_segments` segments. `stage(k, slot)` puts this rank's part of segment k, counted from 0, into its slot, of which
// rank r reads `staged_for(k, r)`; `take(k, number)` reads segment k, whose number is `number`, from all slots. Segment 0 is
// always staged and taken. All ranks have made their offers (`make_offer`) and entered. Where all offer the same,
// `direct(sources)` does it all.
template <class Stage, class StagedFor, class Take, class Direct>
void exchange_entered(Context& context, std::byte* payload, const Offer& offer, std::size_t num_segments,
                      const Stage& stage, const StagedFor& staged_for, const Take& take, const Direct& direct,
                      const Deadline& deadline) {
    Fabric& fabric = context.fabric;
    const std::uint64_t base = context.segments;
    const Stopwatch stopwatch(context, offer);
    const Negotiated entered = negotiate_zero_copy(context, payload, offer, stage, staged_for, deadline);
    const std::size_t count = std::max<std::size_t>(num_segments, 1);
    if (entered.is_direct) {
        direct(Sources(context, payload, offer, entered.is_mapped));
        finish_direct(context, deadline);
        if (!entered.is_mapped) stopwatch.note();
        return;
    }
    for (std::size_t k = 0; k < count; ++k) {
        const std::uint64_t number = base + k;
        if (k + 1 < count) {
            await_slot(context, number + 1, deadline);
            stage(k + 1, fabric.slot(context.rank, number + 1));
            fabric.publish_staged(number + 1, [&](int r) { return staged_for(k + 1, r); });
        }
        if (k > 0 || entered.is_staged_late) fabric.await(&shm::Progress::staged, number + 1, deadline);
        take(k, number);
        finish_segment(context, k, count, number);
    }
    context.segments = base + count;
    stopwatch.note();
}

// The whole of it, for a call that has begun (`begin`), in whose `payload` there is room for an offer.
template <class Stage, class StagedFor, class Take, class Direct>
void exchange(Context& context, std::byte* payload, const Offer& offer, std::size_t num_segments, const Stage& stage,
              const StagedFor& staged_for, const Take& take, const Direct& direct, const Deadline& deadline) {
    make_offer(context, payload, offer, stage, staged_for, deadline);
    enter(context, deadline);
    exchange_entered(context, payload, offer, num_segments, stage, staged_for, take, direct, deadline);
}

// The same with a step between: `fold(k, number)` makes this rank's part of the result of segment k from all slots and
// leaves it in its own, of which rank r reads `folded_for(k, r)`; `take` reads the results. Segment k is folded
// while k-1 is taken by slower ranks.
template <class Stage, class StagedFor, class FoldStep, class FoldedFor, class Take, class Direct>
void exchange_folded(Context& context, std::byte* payload, const Offer& offer, std::size_t num_segments,
                     const Stage& stage, const StagedFor& staged_for, const FoldStep& fold, const FoldedFor& folded_for,
                     const Take& take, const Direct& direct, const Deadline& deadline) {
    Fabric& fabric = context.fabric;
    const std::uint64_t base = context.segments;
    make_offer(context, payload, offer, stage, staged_for, deadline);
    enter(context, deadline);
    const Negotiated entered = negotiate_zero_copy(context, payload, offer, stage, staged_for, deadline);
    if (entered.is_direct) {
        direct();
        return finish_direct(context, deadline);
    }
    const auto finish = [&](std::size_t k) {
        fabric.await(&shm::Progress::folded, base + k + 1, deadline);
        take(k, base + k);
        finish_segment(context, k, num_segments, base + k);
    };
    for (std::size_t k = 0; k < num_segments; ++k) {
        const std::uint64_t number = base + k;
        if (k + 1 < num_segments) {
            await_slot(context, number + 1, deadline);
            stage(k + 1, fabric.slot(context.rank, number + 1));
            fabric.publish_staged(number + 1, [&](int r) { return staged_for(k + 1, r); });
        }
        if (k > 0 || entered.is_staged_late) fabric.await(&shm::Progress::staged, number + 1, deadline);
        fold(k, number);
        fabric.publish_folded(number, [&](int r) { return folded_for(k, r); });
        if (k > 0) finish(k - 1);
    }
    finish(num_segments - 1);
    context.segments = base + num_segments;
}

// A range of elements, divided into segments of equal size, the last one smaller.
struct Pieces {
    std::size_t count;         // elements in all
    std::size_t element_size;  // bytes
    std::size_t piece;         // elements in a segment, at least 1

    [[nodiscard]] std::size_t num_segments() const { return (count + piece - 1) / piece; }
    [[nodiscard]] std::size_t begin_of(std::size_t k) const { return std::min(count, k * piece); }
    [[nodiscard]] std::size_t size_of(std::size_t k) const { return begin_of(k + 1) - begin_of(k); }
    [[nodiscard]] std::size_t offset_bytes(std::size_t k) const { return begin_of(k) * element_size; }
    [[nodiscard]] std::size_t size_bytes(std::size_t k) const { return size_of(k) * element_size; }
};

}  // namespace ferrodist
