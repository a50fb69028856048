#include "collectives/reductions.h"

#include <array>

#include "base/fresh_memory.h"
#include "collectives/chain.h"
#include "collectives/reduction_folder.h"
#include "collectives/exchange.h"
#include "collectives/sizes.h"

namespace ferrodist {

namespace {

shm::Call call_of(Operation operation, std::size_t count, const Reduction& reduction, int root = -1, int dim = -1) {
    return {.operation = static_cast<std::uint8_t>(operation),
            .dtype = static_cast<std::uint8_t>(reduction.dtype),
            .reduce_op = static_cast<std::uint8_t>(reduction.op),
            .dim = static_cast<std::int8_t>(dim),
            .root = root,
            .count = count};
}

struct Elements {
    std::size_t begin;
    std::size_t size;
};

// Begins a call. Returns this rank's payload, in its arrival record, after the factor of a premultiplied sum.
std::byte* begin(Fabric& fabric, const shm::Call& call, const Reduction& reduction) {
    std::byte* payload = fabric.begin(call);
    if (reduction.factor_bytes() != 0) std::memcpy(payload, &reduction.factor, sizeof reduction.factor);
    return payload + reduction.factor_bytes();
}

// Folds `count` elements that fit into the arrival records, of which this rank needs `wanted`. No slots and no other
// flags: one wait, after which all inputs are in the ranks' records.
void fold_inline(Context& context, ReductionFolder& folder, const Reduction& reduction, std::byte* payload,
                 std::byte* out, const std::byte* source, Elements wanted, std::size_t count,
                 const Deadline& deadline) {
    const std::size_t element_size = size_of(reduction.dtype);
    copy_bytes(payload, source, count * element_size);
    context.fabric.enter(deadline);
    if (out == nullptr) return;
    const std::size_t offset = reduction.factor_bytes() + wanted.begin * element_size;
    folder.fold(out, wanted.size, [&](int r) { return context.fabric.arrival(r).payload.data() + offset; });
}

// Every rank that needs the result folds all of it, from the others' slots: one wait per segment.
void fold_whole(Context& context, ReductionFolder& folder, std::byte* payload, std::byte* out, const std::byte* source,
                const Segmentation& segmentation, int root, const Deadline& deadline) {
    const auto is_wanted_by = [&](int r) { return root < 0 || r == root; };
    exchange(
        context, payload, {}, segmentation.num_segments(),
        [&](std::size_t k, std::byte* slot) {
            if (context.rank != root)
                context.into_shared.copy(slot, source + segmentation.offset_bytes(k), segmentation.size_bytes(k));
        },
        [&](std::size_t k, int r) { return Range{.size = is_wanted_by(r) ? segmentation.size_bytes(k) : 0}; },
        [&](std::size_t k, std::uint64_t number) {
            if (out == nullptr) return;
            const std::size_t offset = segmentation.offset_bytes(k);
            folder.fold(out + offset, segmentation.size_of(k),
                        [&](int r) { return r == context.rank ? source + offset : context.fabric.slot(r, number); });
        },
        [](const Sources&) {}, deadline);
}

// Two ranks on two hosts: each sends the other its whole tensor and folds the whole. That takes as many bytes on the
// wire as folding in chunks, and one wait per segment. Nothing is staged: `source` is sent from its own memory, and may
// be equal to `out`.
void fold_with_partner(Context& context, ReductionFolder& folder, std::byte* out, const std::byte* source,
                       const Segmentation& segmentation, int root, const Deadline& deadline) {
    Fabric& fabric = context.fabric;
    const std::uint64_t base = fabric.next_segment();
    const bool partner_folds = root < 0 || root != context.rank;
    const auto send = [&](std::size_t k) {
        fabric.send_partner(base + k,
                            {source + segmentation.offset_bytes(k), partner_folds ? segmentation.size_bytes(k) : 0});
    };
    await_slot(fabric, base, deadline);
    send(0);
    fabric.enter(deadline);
    const std::size_t num_segments = segmentation.num_segments();
    for (std::size_t k = 0; k < num_segments; ++k) {
        const std::uint64_t number = base + k;
        if (k + 1 < num_segments) {
            await_slot(fabric, number + 1, deadline);
            send(k + 1);
        }
        fabric.await_exchanged(number, deadline);
        const std::byte* own = source + segmentation.offset_bytes(k);
        if (out != nullptr)
            folder.fold(out + segmentation.offset_bytes(k), segmentation.size_of(k),
                        [&](int r) { return r == context.rank ? own : fabric.slot(r, number); });
        finish_segment(fabric, k, num_segments, number);
    }
    fabric.count_segments(num_segments);
}

// Segment by segment: each rank folds a chunk of it, and the others read the result. `out` is null on ranks that need
// no result.
void fold_in_chunks(Context& context, ReductionFolder& folder, std::byte* payload, std::byte* out,
                    const std::byte* source, std::size_t count, std::size_t element_size, int root,
                    const Deadline& deadline) {
    const shm::Layout& layout = context.fabric.layout();
    const Segmentation segmentation{
        .count = count,
        .element_size = element_size,
        .segment_elements = elements_in(segment_bytes(count * element_size, layout), element_size)};
    const int rank = context.rank;
    const auto for_others = [&](std::size_t k, const auto& action) {
        const Chunks chunks = divide(segmentation.size_of(k), context.num_ranks, element_size);
        for (int step = 1; step < context.num_ranks; ++step) {
            const int r = (rank + step) % context.num_ranks;  // staggered, so that not all ranks access the same one
            action(r, chunks.begin_of(r) * element_size, chunks.size_of(r) * element_size);
        }
    };
    const auto range_of = [&](std::size_t k, int r) {
        const Chunks chunks = divide(segmentation.size_of(k), context.num_ranks, element_size);
        return Range{.offset = chunks.begin_of(r) * element_size, .size = chunks.size_of(r) * element_size};
    };
    // Zero-copy: each rank folds one chunk of the whole, and writes it to every rank's `out`.
    const Offer offer{.source = context.arenas->find(source, count * element_size),
                      .out = root < 0 ? context.arenas->find(out, count * element_size) : shm::SymmetricTensor{},
                      .needs_out = true};
    const auto direct = [&] {
        const Chunks chunks = divide(count, context.num_ranks, element_size);
        const std::size_t begin = chunks.begin_of(rank) * element_size;
        const std::size_t block = copied_bytes / element_size;
        for (std::size_t start = 0; start < chunks.size_of(rank); start += block) {
            // The others' calls may have raised while this rank was stopped: then their memory is theirs again.
            if (start != 0) context.fabric.check();
            const std::size_t size = std::min(block, chunks.size_of(rank) - start);
            const std::size_t offset = begin + start * element_size;
            std::byte* own = offer.out.at(rank) + offset;
            folder.fold(own, size, [&](int r) { return offer.source.at(r) + offset; });
            for (int r = 0; r < context.num_ranks; ++r)
                if (r != rank) context.into_shared.copy(offer.out.at(r) + offset, own, size * element_size);
        }
    };
    exchange_folded(
        context, payload, offer, segmentation.num_segments(),
        [&](std::size_t k, std::byte* slot) {
            for_others(k, [&](int, std::size_t offset, std::size_t size) {
                context.into_shared.copy(slot + offset, source + segmentation.offset_bytes(k) + offset, size);
            });
        },
        range_of,
        [&](std::size_t k, std::uint64_t number) {
            const Chunks chunks = divide(segmentation.size_of(k), context.num_ranks, element_size);
            const std::size_t offset = chunks.begin_of(rank) * element_size;
            const std::size_t size = chunks.size_of(rank);
            std::byte* slot = context.fabric.slot(rank, number) + offset;
            const std::byte* own = source + segmentation.offset_bytes(k) + offset;
            const auto at = [&](int r) { return r == rank ? own : context.fabric.slot(r, number) + offset; };
            std::byte* result = out != nullptr ? out + segmentation.offset_bytes(k) + offset : nullptr;
            folder.fold_into_shared(slot, result, size, element_size, at);
        },
        [&](std::size_t k, int r) { return root < 0 || r == root ? range_of(k, rank) : Range{}; },
        [&](std::size_t k, std::uint64_t number) {
            if (out == nullptr) return;
            for_others(k, [&](int r, std::size_t offset, std::size_t size) {
                copy_bytes(out + segmentation.offset_bytes(k) + offset, context.fabric.slot(r, number) + offset, size);
            });
        },
        direct, deadline);
}

// allreduce and reduce: the algorithm by size and layout.
void fold_by_size(Context& context, const shm::Call& call, std::byte* out, const std::byte* source, std::size_t count,
                  const Reduction& reduction, const Deadline& deadline) {
    const std::size_t element_size = size_of(reduction.dtype);
    const std::size_t size = count * element_size;
    const shm::Layout& layout = context.fabric.layout();
    const auto segments_of = [&](std::size_t bytes) {
        return Segmentation{
            .count = count, .element_size = element_size, .segment_elements = elements_in(bytes, element_size)};
    };
    ReductionFolder folder(context, reduction);
    std::byte* payload = begin(context.fabric, call, reduction);
    if (out != source) expect_writes(out, size);
    if (size + reduction.factor_bytes() <= shm::max_inline_bytes) {
        fold_inline(context, folder, reduction, payload, out, source, {.begin = 0, .size = count}, count, deadline);
    } else if (context.num_ranks == 2 && context.fabric.has_remote_ranks()) {
        fold_with_partner(context, folder, out, source, segments_of(partner_segment_bytes(layout)), call.root,
                          deadline);
    } else if (context.num_ranks == 2 && call.root >= 0) {
        fold_whole(context, folder, payload, out, source, segments_of(root_fold_segment_bytes(layout)), call.root,
                   deadline);
    } else if (size <= one_shot_bytes(layout)) {
        fold_whole(context, folder, payload, out, source, segments_of(one_shot_bytes(layout)), call.root, deadline);
    } else if (call.root < 0 && can_fold_in_chain(context.fabric, reduction)) {
        fold_in_chain(context, folder, out, source, count, reduction, deadline);
    } else {
        fold_in_chunks(context, folder, payload, out, source, count, element_size, call.root, deadline);
    }
}

}  // namespace

void allreduce(Context& context, std::byte* out, const std::byte* source, std::size_t count, const Reduction& reduction,
               const Deadline& deadline) {
    fold_by_size(context, call_of(Operation::allreduce, count, reduction), out, source, count, reduction, deadline);
}

void allreduce_add(Context& context, std::byte* out, const std::byte* source, const std::byte* addend,
                   std::size_t count, DType dtype, const Deadline& deadline) {
    const Reduction sum{.dtype = dtype, .op = ReduceOp::sum};
    allreduce(context, out, source, count, sum, deadline);
    const std::array<const std::byte*, 2> terms{out, addend};
    find_fold(dtype, sum.op, context.instructions)(out, terms.data(), terms.size(), count, nullptr);
}

void reduce(Context& context, std::byte* out, const std::byte* source, std::size_t count, int root,
            const Reduction& reduction, const Deadline& deadline) {
    std::byte* target = context.rank == root ? out : nullptr;
    fold_by_size(context, call_of(Operation::reduce, count, reduction, root), target, source, count, reduction,
                 deadline);
}

void reduce_scatter(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts,
                    int dim, const Reduction& reduction, const Deadline& deadline) {
    const std::size_t element_size = size_of(reduction.dtype);
    const auto ranks = static_cast<std::size_t>(context.num_ranks);
    std::vector<std::size_t>& starts = context.starts;
    find_starts(counts, starts);
    const std::size_t largest = *std::max_element(counts.begin(), counts.end());

    ReductionFolder folder(context, reduction);
    std::byte* payload =
        begin(context.fabric, call_of(Operation::reduce_scatter, starts[ranks], reduction, -1, dim), reduction);
    const auto own_rank = static_cast<std::size_t>(context.rank);
    if (starts[ranks] * element_size + reduction.factor_bytes() <= shm::max_inline_bytes)
        return fold_inline(context, folder, reduction, payload, out, source,
                           {.begin = starts[own_rank], .size = counts[own_rank]}, starts[ranks], deadline);
    expect_writes(out, counts[own_rank] * element_size);
    const std::size_t slot_bytes = segment_bytes(largest * ranks * element_size, context.fabric.layout());
    const std::size_t segment_elements = elements_in(slot_bytes / ranks, element_size);
    const auto pieces_of = [&](int r) {
        return Segmentation{.count = counts[static_cast<std::size_t>(r)],
                            .element_size = element_size,
                            .segment_elements = segment_elements};
    };
    const std::size_t room = segment_elements * element_size;  // bytes of one rank's part of a slot
    const auto source_of = [&](int r) { return source + starts[static_cast<std::size_t>(r)] * element_size; };
    const Offer offer =
        offer_source(context, Operation::reduce_scatter, source, starts[ranks] * element_size, largest * element_size);
    exchange(
        context, payload, offer, (largest + segment_elements - 1) / segment_elements,
        [&](std::size_t k, std::byte* slot) {
            for (int r = 0; r < context.num_ranks; ++r) {
                if (r == context.rank) continue;
                const Segmentation segmentation = pieces_of(r);
                context.into_shared.copy(slot + static_cast<std::size_t>(r) * room,
                                         source_of(r) + segmentation.offset_bytes(k), segmentation.size_bytes(k));
            }
        },
        [&](std::size_t k, int r) {
            return Range{.offset = static_cast<std::size_t>(r) * room, .size = pieces_of(r).size_bytes(k)};
        },
        [&](std::size_t k, std::uint64_t number) {
            const Segmentation segmentation = pieces_of(context.rank);
            if (segmentation.size_of(k) == 0) return;
            folder.fold(out + segmentation.offset_bytes(k), segmentation.size_of(k), [&](int r) {
                return r == context.rank
                           ? source_of(r) + segmentation.offset_bytes(k)
                           : context.fabric.slot(r, number) + static_cast<std::size_t>(context.rank) * room;
            });
        },
        [&](const Sources& sources) {
            const std::size_t count = counts[static_cast<std::size_t>(context.rank)];
            const std::byte* own = source_of(context.rank);
            const auto offset = static_cast<std::size_t>(own - source);
            if (sources.are_mapped())
                return folder.fold(out, count, [&](int r) { return offer.source.at(r) + offset; });
            // The others' parts go through this rank's slots, which stay in the cache.
            std::byte* slot = context.fabric.slot(context.rank, context.fabric.next_segment());
            const std::size_t block = elements_in(context.fabric.layout().slot_bytes / ranks, element_size);
            for (std::size_t start = 0; start < count; start += block) {
                const std::size_t size = std::min(block, count - start);
                const auto scratch_of = [&](int r) {
                    return slot + static_cast<std::size_t>(r) * block * element_size;
                };
                for (int r = 0; r < context.num_ranks; ++r)
                    if (r != context.rank)
                        sources.copy(r, offset + start * element_size, scratch_of(r), size * element_size);
                folder.fold(out + start * element_size, size,
                            [&](int r) { return r == context.rank ? own + start * element_size : scratch_of(r); });
            }
        },
        deadline);
}

}  // namespace ferrodist
