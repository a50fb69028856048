// Exchange of data too large for the arrival records: in segments through each rank's slots, one segment staged while
// the previous one is read; or zero-copy, straight from the ranks' tensors.
//
// [Note: slots]
// The segments of all collectives of a group are numbered consecutively; segment m of a rank is in its slot m modulo
// `num_slots`. Each rank stages what the others need of it (`staged`), reads what it needs from the others' slots, and
// reports that (`done`). Before a rank overwrites a slot, all ranks must be done with the segment that was in it: with
// three slots that one is two segments back, so ranks of equal speed do not wait for it. While one segment is read the
// next is staged.
//
// Every rank counts the same number of segments for a collective, even if it stages or reads nothing.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <optional>

#include "collectives/context.h"
#include "collectives/sizes.h"

namespace ferrodist {

// Waits until this rank may overwrite the slot of segment `number`.
inline void await_slot(Fabric& fabric, std::uint64_t number, const Deadline& deadline) {
    if (!fabric.is_slot_free(number)) fabric.await(&shm::RankFlags::done, number - shm::num_slots + 1, deadline);
}

// Publishes that this rank has read all it needs of segment k of `count`, whose number is `number`, if any rank waits
// for that. For the last segments none does, because a rank that enters the next collective has completed this one.
inline void finish_segment(Fabric& fabric, std::size_t k, std::size_t count, std::uint64_t number) {
    if (k + shm::num_slots <= count) fabric.publish_done(number + 1);
}

// A rank's offer to the others to read and write its tensors without staging; see [Note: offers].
struct Offer {
    shm::SymmetricTensor source = {};
    shm::SymmetricTensor out = {};
    bool needs_out = false;                       // whether zero-copy also requires `out` to be in symmetric memory
    bool is_readable = false;                     // whether the others may read `own`, at any address
    const std::byte* own = nullptr;               // this rank's source
    std::size_t read_size = 0;                    // bytes that each other rank reads of it
    std::optional<TransferMode::Kind> kind = {};  // set if the autotuner decides for this call

    [[nodiscard]] bool is_made() const { return is_readable || (source.arena && (out.arena || !needs_out)); }
};

// Whether all ranks do the same work, so that rank 0's times hold for all; not so for operations with a root.
inline bool ranks_work_alike(Operation operation) {
    return operation == Operation::all_gather || operation == Operation::reduce_scatter ||
           operation == Operation::all_to_all;
}

// The offer of a source of `size` bytes, of which another rank reads `read_size` at once.
inline Offer offer_source(const Context& context, Operation operation, const std::byte* source, std::size_t size,
                          std::size_t read_size) {
    Offer offer{.source = context.arenas->find(source, size), .own = source, .read_size = read_size};
    offer.is_readable = context.peers.is_usable() && read_size >= least_read_bytes(context.fabric.layout());
    if (offer.is_readable && ranks_work_alike(operation)) {
        offer.kind = TransferMode::kind_of(operation, read_size);
        offer.is_readable = context.transfer_mode.choice_for(*offer.kind) == TransferMode::direct_read;
    }
    return offer;
}

// [Note: offers]
// A rank whose tensors are in symmetric memory puts their addresses into the payload of its call; if ranks can read
// each other's memory, it puts its source's address there in any case. If all ranks make the same offer, nothing is
// staged: each rank reads and writes the others' tensors (`direct`), and all wait until all have finished. A rank that
// makes an offer stages nothing before it knows the result; so if any does, the first segment is published by a flag
// like the others.
struct Negotiated {
    bool is_direct;       // all ranks make the same offer
    bool is_mapped;       // and it is symmetric memory
    bool is_staged_late;  // some rank stages the first segment after entry
};

using OfferAddresses = std::array<shm::SymmetricAddress, 2>;

// An offer in the wire format of the payload.
struct Offered {
    OfferAddresses addresses;
    std::uint64_t advice;  // see [Note: reading]; from rank 0
};
inline constexpr std::size_t offer_bytes = sizeof(Offered);

inline Offered offered_by(const Context& context, const std::byte* payload, int r) {
    const auto at = payload - context.fabric.arrival(context.rank).payload.data();
    Offered offered;
    std::memcpy(&offered, context.fabric.arrival(r).payload.data() + at, offer_bytes);
    return offered;
}

// In place of an arena's id: marks the offset as an address in the rank's process.
inline constexpr std::uint64_t process_address = ~std::uint64_t{0};

// The other ranks' sources, once all have offered them.
class Sources {
public:
    Sources(const Context& context, const std::byte* payload, const Offer& offer, bool is_mapped)
        : context_(context), payload_(payload), offer_(offer), is_mapped_(is_mapped) {}

    // Copies `size` bytes at `offset` of rank r's source.
    void copy(int r, std::size_t offset, std::byte* out, std::size_t size) const {
        if (size == 0) return;
        if (is_mapped_) return copy_bytes(out, offer_.source.at(r) + offset, size);
        context_.peers.read(r, out, offered_by(context_, payload_, r).addresses[1].offset + offset, size);
    }

    [[nodiscard]] bool are_mapped() const { return is_mapped_; }

    // The address of rank r's source in its process, unless they are mapped.
    [[nodiscard]] std::uint64_t address_of(int r) const {
        return offered_by(context_, payload_, r).addresses[1].offset;
    }

private:
    const Context& context_;
    const std::byte* payload_;
    const Offer& offer_;
    bool is_mapped_;
};

inline OfferAddresses addresses_of(const Offer& offer) {
    const shm::SymmetricAddress own{process_address, reinterpret_cast<std::uintptr_t>(offer.own)};
    return {offer.is_made() ? offer.source.address() : shm::SymmetricAddress{},
            offer.is_readable ? own : offer.out.address()};
}

// Measures a part of an autotuned call on rank 0; in all other cases it reads no clock.
class Stopwatch {
public:
    Stopwatch(Context& context, const Offer& offer)
        : context_(context),
          offer_(offer),
          is_on_(offer.kind && context.rank == 0),
          began_(is_on_ ? Clock::now() : Clock::time_point{}) {}

    [[nodiscard]] Clock::duration time() const { return is_on_ ? Clock::now() - began_ : Clock::duration{}; }

    // Records the time at the end of a call: this part plus the staging before `enter`. Waiting for stragglers is in
    // neither. It counts for the choice that this rank offered, even if other ranks' offers led to staging, for that is
    // the outcome of the offer: a choice that never counted would stay unmeasured, and be tried for ever.
    void record_time() const {
        if (!is_on_) return;
        const Choice choice = offer_.is_readable ? TransferMode::direct_read : TransferMode::staged_copy;
        const Clock::duration whole = time() + context_.staging_time;
        context_.transfer_mode.record(*offer_.kind, choice, std::chrono::duration<double>(whole).count(),
                                      offer_.read_size);
    }

private:
    Context& context_;
    const Offer& offer_;
    bool is_on_;
    Clock::time_point began_;
};

template <class Stage>
void stage_first(Context& context, const Stage& stage, const Deadline& deadline) {
    const std::uint64_t number = context.fabric.next_segment();
    await_slot(context.fabric, number, deadline);
    stage(std::size_t{0}, context.fabric.slot(context.rank, number));
}

// Writes the offer at `payload`, and stages segment 0 unless it may not be needed. `enter` comes next.
template <class Stage, class StagedFor>
void make_offer(Context& context, std::byte* payload, const Offer& offer, const Stage& stage,
                const StagedFor& staged_for, const Deadline& deadline) {
    const bool is_advising = offer.kind && context.rank == 0;
    const Offered offered{addresses_of(offer), is_advising ? context.transfer_mode.advise(*offer.kind) : 0};
    std::memcpy(payload, &offered, offer_bytes);
    context.staging_time = {};
    if (offer.is_made()) return;
    const Stopwatch stopwatch(context, offer);
    stage_first(context, stage, deadline);
    context.fabric.send_staged(context.fabric.next_segment(), [&](int r) { return staged_for(std::size_t{0}, r); });
    context.staging_time = stopwatch.time();
}

// After `enter`: combines all ranks' offers. Stages segment 0 if it was not staged and is needed.
template <class Stage, class StagedFor>
Negotiated negotiate_zero_copy(Context& context, const std::byte* payload, const Offer& offer, const Stage& stage,
                               const StagedFor& staged_for, const Deadline& deadline) {
    const OfferAddresses addresses = addresses_of(offer);
    const bool is_made = offer.is_made();
    bool is_mapped = offer.source.arena != nullptr && is_made;
    bool is_readable = offer.is_readable;
    bool is_any_made = false;
    for (int r = 0; r < context.num_ranks; ++r) {
        const OfferAddresses theirs = offered_by(context, payload, r).addresses;
        is_mapped = is_mapped && theirs[0] == addresses[0] && (!offer.needs_out || theirs[1] == addresses[1]);
        is_readable = is_readable && theirs[1].arena == process_address;
        is_any_made = is_any_made || theirs[0].arena != 0 || theirs[1].arena == process_address;
    }
    context.transfer_mode.follow(
        offered_by(context, payload, 0).advice);  // also on a rank whose own part is not autotuned
    const bool is_direct = is_mapped || is_readable;
    if (!is_direct && is_any_made) {
        if (is_made) stage_first(context, stage, deadline);
        context.fabric.publish_staged(context.fabric.next_segment(),
                                      [&](int r) { return staged_for(std::size_t{0}, r); });
    }
    return {.is_direct = is_direct, .is_mapped = is_mapped, .is_staged_late = !is_direct && is_any_made};
}

// Ends a collective without staging: counts as one segment, which all ranks wait for.
inline void finish_direct(Context& context, const Deadline& deadline) {
    const std::uint64_t number = context.fabric.next_segment();
    const auto nothing = [](int) { return Range{}; };
    context.fabric.count_segments(1);
    context.fabric.publish_folded(number, nothing);
    context.fabric.await(&shm::RankFlags::folded, number + 1, deadline);
}

// Moves `num_segments` segments. `stage(k, slot)` copies this rank's part of segment k, counted from 0, into its slot,
// of which rank r reads `staged_for(k, r)`; `take(k, number)` reads segment k, whose number is `number`, from all
// slots. Segment 0 is always staged and read. All ranks have made their offers (`make_offer`) and entered. If all make
// the same offer, `direct(sources)` does everything.
template <class Stage, class StagedFor, class Take, class Direct>
void exchange_entered(Context& context, std::byte* payload, const Offer& offer, std::size_t num_segments,
                      const Stage& stage, const StagedFor& staged_for, const Take& take, const Direct& direct,
                      const Deadline& deadline) {
    Fabric& fabric = context.fabric;
    const std::uint64_t base = context.fabric.next_segment();
    const Stopwatch stopwatch(context, offer);
    const Negotiated entered = negotiate_zero_copy(context, payload, offer, stage, staged_for, deadline);
    const std::size_t count = std::max<std::size_t>(num_segments, 1);
    if (entered.is_direct) {
        direct(Sources(context, payload, offer, entered.is_mapped));
        finish_direct(context, deadline);
        if (!entered.is_mapped) stopwatch.record_time();
        return;
    }
    for (std::size_t k = 0; k < count; ++k) {
        const std::uint64_t number = base + k;
        if (k + 1 < count) {
            await_slot(fabric, number + 1, deadline);
            stage(k + 1, fabric.slot(context.rank, number + 1));
            fabric.publish_staged(number + 1, [&](int r) { return staged_for(k + 1, r); });
        }
        if (k > 0 || entered.is_staged_late) fabric.await(&shm::RankFlags::staged, number + 1, deadline);
        take(k, number);
        finish_segment(fabric, k, count, number);
    }
    fabric.count_segments(count);
    stopwatch.record_time();
}

// Offer, entry and exchange, for a call that has begun (`begin`) and whose `payload` has room for an offer.
template <class Stage, class StagedFor, class Take, class Direct>
void exchange(Context& context, std::byte* payload, const Offer& offer, std::size_t num_segments, const Stage& stage,
              const StagedFor& staged_for, const Take& take, const Direct& direct, const Deadline& deadline) {
    make_offer(context, payload, offer, stage, staged_for, deadline);
    context.fabric.enter(deadline);
    exchange_entered(context, payload, offer, num_segments, stage, staged_for, take, direct, deadline);
}

// The same with a fold between: `fold(k, number)` computes this rank's chunk of the result of segment k from all slots
// and leaves it in its own slot, of which rank r reads `folded_for(k, r)`; `take` reads the results. Segment k is
// folded while slower ranks still read k-1.
template <class Stage, class StagedFor, class FoldStep, class FoldedFor, class Take, class Direct>
void exchange_folded(Context& context, std::byte* payload, const Offer& offer, std::size_t num_segments,
                     const Stage& stage, const StagedFor& staged_for, const FoldStep& fold, const FoldedFor& folded_for,
                     const Take& take, const Direct& direct, const Deadline& deadline) {
    Fabric& fabric = context.fabric;
    const std::uint64_t base = context.fabric.next_segment();
    make_offer(context, payload, offer, stage, staged_for, deadline);
    context.fabric.enter(deadline);
    const Negotiated entered = negotiate_zero_copy(context, payload, offer, stage, staged_for, deadline);
    if (entered.is_direct) {
        direct();
        return finish_direct(context, deadline);
    }
    const auto finish = [&](std::size_t k) {
        fabric.await(&shm::RankFlags::folded, base + k + 1, deadline);
        take(k, base + k);
        finish_segment(fabric, k, num_segments, base + k);
    };
    for (std::size_t k = 0; k < num_segments; ++k) {
        const std::uint64_t number = base + k;
        if (k + 1 < num_segments) {
            await_slot(fabric, number + 1, deadline);
            stage(k + 1, fabric.slot(context.rank, number + 1));
            fabric.publish_staged(number + 1, [&](int r) { return staged_for(k + 1, r); });
        }
        if (k > 0 || entered.is_staged_late) fabric.await(&shm::RankFlags::staged, number + 1, deadline);
        fold(k, number);
        fabric.publish_folded(number, [&](int r) { return folded_for(k, r); });
        if (k > 0) finish(k - 1);
    }
    finish(num_segments - 1);
    fabric.count_segments(num_segments);
}

// A division of elements into segments of equal size, the last one smaller.
struct Segmentation {
    std::size_t count;             // total number of elements
    std::size_t element_size;      // bytes
    std::size_t segment_elements;  // elements per segment, at least 1

    [[nodiscard]] std::size_t num_segments() const { return (count + segment_elements - 1) / segment_elements; }
    [[nodiscard]] std::size_t begin_of(std::size_t k) const { return std::min(count, k * segment_elements); }
    [[nodiscard]] std::size_t size_of(std::size_t k) const { return begin_of(k + 1) - begin_of(k); }
    [[nodiscard]] std::size_t offset_bytes(std::size_t k) const { return begin_of(k) * element_size; }
    [[nodiscard]] std::size_t size_bytes(std::size_t k) const { return size_of(k) * element_size; }
};

}  // namespace ferrodist
