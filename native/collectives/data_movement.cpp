#include "collectives/data_movement.h"

#include <numeric>

#include "base/fresh_memory.h"
#include "collectives/exchange.h"
#include "collectives/sizes.h"

namespace ferrodist {

namespace {

shm::Call call_of(Operation operation, std::size_t count, DType dtype, int root = -1, int dim = -1) {
    return {.operation = static_cast<std::uint8_t>(operation),
            .dtype = static_cast<std::uint8_t>(dtype),
            .dim = static_cast<std::int8_t>(dim),
            .root = root,
            .count = count};
}

std::size_t largest_of(std::span<const std::size_t> counts) {
    return *std::max_element(counts.begin(), counts.end());
}

// Copies between a user's memory and a slot, unless both addresses are equal.
void move_bytes(std::byte* out, const std::byte* source, std::size_t size) {
    if (out != source) copy_bytes(out, source, size);
}

// all_gather, and gather, where only the root has an `out`.
void collect(Context& context, const shm::Call& call, std::byte* out, const std::byte* source,
             std::span<const std::size_t> counts, DType dtype, const Deadline& deadline) {
    const std::size_t element_size = size_of(dtype);
    std::vector<std::size_t>& starts = context.starts;
    find_starts(counts, starts);
    const std::size_t largest = largest_of(counts);
    const auto rank = static_cast<std::size_t>(context.rank);
    const auto own_place = [&] { return out + starts[rank] * element_size; };
    std::byte* payload = context.fabric.begin(call);
    if (largest * element_size <= shm::max_inline_bytes) {
        copy_bytes(payload, source, counts[rank] * element_size);
        context.fabric.enter(deadline);
        if (out == nullptr) return;
        for (std::size_t r = 0; r < counts.size(); ++r)
            copy_bytes(out + starts[r] * element_size, context.fabric.arrival(static_cast<int>(r)).payload.data(),
                       counts[r] * element_size);
        return;
    }
    expect_writes(out, starts.back() * element_size);
    const std::size_t segment_elements =
        elements_in(segment_bytes(largest * element_size, context.fabric.layout()), element_size);
    const auto pieces_of = [&](std::size_t r) {
        return Segmentation{.count = counts[r], .element_size = element_size, .segment_elements = segment_elements};
    };
    // The parts differ in size; each rank's offer starts at its own part.
    const Offer offer = offer_source(context, call.root < 0 ? Operation::all_gather : Operation::gather, source,
                                     counts[rank] * element_size, largest * element_size);
    exchange(
        context, payload, offer, (largest + segment_elements - 1) / segment_elements,
        [&](std::size_t k, std::byte* slot) {
            const Segmentation segmentation = pieces_of(rank);
            context.into_shared.copy(slot, source + segmentation.offset_bytes(k), segmentation.size_bytes(k));
        },
        [&](std::size_t k, int r) {
            return Range{.size = call.root < 0 || r == call.root ? pieces_of(rank).size_bytes(k) : 0};
        },
        [&](std::size_t k, std::uint64_t number) {
            if (out == nullptr) return;
            for (std::size_t step = 0; step < counts.size(); ++step) {
                const std::size_t r = (rank + step) % counts.size();
                const Segmentation segmentation = pieces_of(r);
                const std::byte* from = r == rank ? source + segmentation.offset_bytes(k)
                                                  : context.fabric.slot(static_cast<int>(r), number);
                std::byte* to = r == rank ? own_place() + segmentation.offset_bytes(k)
                                          : out + starts[r] * element_size + segmentation.offset_bytes(k);
                move_bytes(to, from, segmentation.size_bytes(k));
            }
        },
        [&](const Sources& sources) {
            if (out == nullptr) return;
            for (std::size_t step = 1; step < counts.size(); ++step) {
                const std::size_t r = (rank + step) % counts.size();
                sources.copy(static_cast<int>(r), 0, out + starts[r] * element_size, counts[r] * element_size);
            }
            move_bytes(own_place(), source, counts[rank] * element_size);
        },
        deadline);
}

}  // namespace

void barrier(Context& context, const Deadline& deadline) {
    context.fabric.begin({.operation = static_cast<std::uint8_t>(Operation::barrier)});
    context.fabric.enter(deadline);
}

void broadcast(Context& context, std::byte* out, const std::byte* source, std::size_t count, DType dtype, int root,
               const Deadline& deadline) {
    const std::size_t element_size = size_of(dtype);
    const std::size_t size = count * element_size;
    const bool is_root = context.rank == root;
    std::byte* payload = context.fabric.begin(call_of(Operation::broadcast, count, dtype, root));
    if (size <= shm::max_inline_bytes) {
        if (is_root) copy_bytes(payload, source, size);
        context.fabric.enter(deadline);
        if (is_root)
            move_bytes(out, source, size);
        else
            copy_bytes(out, context.fabric.arrival(root).payload.data(), size);
        return;
    }
    if (!is_root || out != source) expect_writes(out, size);
    const Segmentation segmentation{
        .count = count,
        .element_size = element_size,
        .segment_elements = elements_in(segment_bytes(size, context.fabric.layout()), element_size)};
    const Offer offer = offer_source(context, Operation::broadcast, is_root ? source : out, size, size);
    exchange(
        context, payload, offer, segmentation.num_segments(),
        [&](std::size_t k, std::byte* slot) {
            if (is_root)
                context.into_shared.copy(slot, source + segmentation.offset_bytes(k), segmentation.size_bytes(k));
        },
        [&](std::size_t k, int) { return Range{.size = is_root ? segmentation.size_bytes(k) : 0}; },
        [&](std::size_t k, std::uint64_t number) {
            const std::size_t offset = segmentation.offset_bytes(k);
            move_bytes(out + offset, is_root ? source + offset : context.fabric.slot(root, number),
                       segmentation.size_bytes(k));
        },
        [&](const Sources& sources) {
            if (is_root)
                move_bytes(out, source, size);
            else
                sources.copy(root, 0, out, size);
        },
        deadline);
}

void all_gather(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts,
                DType dtype, int dim, const Deadline& deadline) {
    const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    collect(context, call_of(Operation::all_gather, total, dtype, -1, dim), out, source, counts, dtype, deadline);
}

void gather(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts, DType dtype,
            int root, const Deadline& deadline) {
    const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    std::byte* target = context.rank == root ? out : nullptr;
    collect(context, call_of(Operation::gather, total, dtype, root), target, source, counts, dtype, deadline);
}

void scatter(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts,
             DType dtype, int root, const Deadline& deadline) {
    const std::size_t element_size = size_of(dtype);
    std::vector<std::size_t>& starts = context.starts;
    find_starts(counts, starts);
    const std::size_t largest = largest_of(counts);
    const bool is_root = context.rank == root;
    std::byte* payload = context.fabric.begin(call_of(Operation::scatter, starts.back(), dtype, root));
    const std::size_t slot_bytes = segment_bytes(largest * counts.size() * element_size, context.fabric.layout());
    const std::size_t segment_elements = elements_in(slot_bytes / counts.size(), element_size);
    const std::size_t room = segment_elements * element_size;
    const auto pieces_of = [&](std::size_t r) {
        return Segmentation{.count = counts[r], .element_size = element_size, .segment_elements = segment_elements};
    };
    const auto own = static_cast<std::size_t>(context.rank);
    expect_writes(out, counts[own] * element_size);
    // Only the root has a source; no symmetric memory, for the other ranks have no counterpart.
    Offer offer = offer_source(context, Operation::scatter, nullptr, 0, largest * element_size);
    offer.own = source;
    exchange(
        context, payload, offer, (largest + segment_elements - 1) / segment_elements,
        [&](std::size_t k, std::byte* slot) {
            if (!is_root) return;
            for (std::size_t r = 0; r < counts.size(); ++r) {
                if (r == own) continue;
                const Segmentation segmentation = pieces_of(r);
                context.into_shared.copy(slot + r * room,
                                         source + starts[r] * element_size + segmentation.offset_bytes(k),
                                         segmentation.size_bytes(k));
            }
        },
        [&](std::size_t k, int r) {
            const auto to = static_cast<std::size_t>(r);
            return is_root ? Range{.offset = to * room, .size = pieces_of(to).size_bytes(k)} : Range{};
        },
        [&](std::size_t k, std::uint64_t number) {
            const Segmentation segmentation = pieces_of(own);
            const std::byte* from = is_root ? source + starts[own] * element_size + segmentation.offset_bytes(k)
                                            : context.fabric.slot(root, number) + own * room;
            move_bytes(out + segmentation.offset_bytes(k), from, segmentation.size_bytes(k));
        },
        [&](const Sources& sources) {
            if (is_root)
                move_bytes(out, source + starts[own] * element_size, counts[own] * element_size);
            else
                sources.copy(root, starts[own] * element_size, out, counts[own] * element_size);
        },
        deadline);
}

void share(Context& context, std::string_view name, std::string_view head, std::string_view elements,
           const std::function<void(std::string_view)>& take, const Deadline& deadline) {
    struct Front {
        std::array<char, share_name_bytes> name = {};
        std::uint64_t size = 0;
    };
    // What has room behind the front in the arrival record is there, all else in a slot.
    constexpr std::size_t inline_room = shm::max_inline_bytes - sizeof(Front);
    Fabric& fabric = context.fabric;
    const std::size_t room = fabric.has_remote_ranks() ? share_room_between_hosts : share_room;
    if (head.size() + elements.size() > room) elements = {};
    Front own{.size = head.size() + elements.size()};
    std::copy_n(name.data(), std::min(name.size(), share_name_bytes), own.name.data());
    const std::uint64_t number = fabric.next_segment();
    std::byte* const payload = fabric.begin({.operation = static_cast<std::uint8_t>(Operation::share)});
    std::memcpy(payload, &own, sizeof own);
    const auto write = [&](std::byte* to) {
        copy_bytes(to, reinterpret_cast<const std::byte*>(head.data()), head.size());
        copy_bytes(to + head.size(), reinterpret_cast<const std::byte*>(elements.data()), elements.size());
    };
    if (own.size <= inline_room) {
        write(payload + sizeof own);
    } else {
        await_slot(fabric, number, deadline);
        write(fabric.slot(context.rank, number));
        fabric.send_staged(number, [&](int) { return Range{.size = own.size}; });
    }
    fabric.enter(deadline);
    const auto front_of = [&](int r) {
        Front front;
        std::memcpy(&front, fabric.arrival(r).payload.data(), sizeof front);
        front.size = std::min<std::uint64_t>(front.size, room);
        return front;
    };
    for (int r = 0; r < context.num_ranks; ++r)
        if (front_of(r).name != own.name) fabric.throw_mismatch();
    bool any_in_slot = false;
    for (int r = 0; r < context.num_ranks; ++r) {
        const std::uint64_t size = front_of(r).size;
        const bool is_in_slot = size > inline_room;
        const std::byte* from = is_in_slot ? fabric.slot(r, number) : fabric.arrival(r).payload.data() + sizeof own;
        take({reinterpret_cast<const char*>(from), size});
        any_in_slot = any_in_slot || is_in_slot;
    }
    if (any_in_slot) fabric.count_segments(1);
}

}  // namespace ferrodist
