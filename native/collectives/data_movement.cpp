#include "collectives/data_movement.h"

#include <cstring>
#include <numeric>

#include "base/fresh_memory.h"
#include "collectives/chain.h"
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

std::size_t sum_of(std::span<const std::size_t> counts) {
    return std::accumulate(counts.begin(), counts.end(), std::size_t{0});
}

// all_gather, and gather, where only the root has `outs`.
void collect(Context& context, const shm::Call& call, std::span<std::byte* const> outs, const std::byte* source,
             std::span<const std::size_t> counts, DType dtype, const Deadline& deadline) {
    const std::size_t element_size = size_of(dtype);
    const std::size_t largest = largest_of(counts);
    const auto rank = static_cast<std::size_t>(context.rank);
    std::byte* payload = context.fabric.begin(call);
    if (largest * element_size <= shm::max_inline_bytes) {
        copy_bytes(payload, source, counts[rank] * element_size);
        context.fabric.enter(deadline);
        for (std::size_t r = 0; r < outs.size(); ++r)
            copy_bytes(outs[r], context.fabric.arrival(static_cast<int>(r)).payload.data(), counts[r] * element_size);
        return;
    }
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
            for (std::size_t step = 0; step < outs.size(); ++step) {
                const std::size_t r = (rank + step) % counts.size();
                const Segmentation segmentation = pieces_of(r);
                const std::byte* from = r == rank ? source + segmentation.offset_bytes(k)
                                                  : context.fabric.slot(static_cast<int>(r), number);
                move_bytes(outs[r] + segmentation.offset_bytes(k), from, segmentation.size_bytes(k));
            }
        },
        [&](const Sources& sources) {
            for (std::size_t step = 1; step < outs.size(); ++step) {
                const std::size_t r = (rank + step) % counts.size();
                sources.copy(static_cast<int>(r), 0, outs[r], counts[r] * element_size);
            }
            if (!outs.empty()) move_bytes(outs[rank], source, counts[rank] * element_size);
        },
        deadline);
}

// The places of the parts in one piece of memory.
std::span<std::byte* const> parts_of(Context& context, std::byte* out, std::span<const std::size_t> counts,
                                     DType dtype) {
    expect_writes(out, sum_of(counts) * size_of(dtype));
    for (std::size_t r = 0; r < counts.size(); ++r) {
        context.outputs[r] = out;
        out += counts[r] * size_of(dtype);
    }
    return context.outputs;
}

void expect_parts(std::span<std::byte* const> outs, std::span<const std::size_t> counts, DType dtype) {
    for (std::size_t r = 0; r < outs.size(); ++r) expect_writes(outs[r], counts[r] * size_of(dtype));
}

// The addresses of a root's parts that are in memory of their own, written before its offer.
class PartAddresses {
public:
    explicit PartAddresses(const Context& context) : context_(context) {}

    [[nodiscard]] bool fit() const {
        return num_ranks() * sizeof(std::uint64_t) + offer_bytes <= shm::max_inline_bytes;
    }
    [[nodiscard]] std::byte* offer_in(std::byte* payload) const {
        return payload + (fit() ? num_ranks() * sizeof(std::uint64_t) : 0);
    }
    void write(std::byte* payload, std::span<const std::byte* const> sources) const {
        for (std::size_t r = 0; r < sources.size(); ++r) {
            const std::uint64_t address = reinterpret_cast<std::uintptr_t>(sources[r]);
            std::memcpy(payload + r * sizeof address, &address, sizeof address);
        }
    }
    // After `enter`: that of this rank's part.
    [[nodiscard]] std::uint64_t own(int root) const {
        std::uint64_t address = 0;
        const auto offset = static_cast<std::size_t>(context_.rank) * sizeof address;
        std::memcpy(&address, context_.fabric.arrival(root).payload.data() + offset, sizeof address);
        return address;
    }

private:
    [[nodiscard]] std::size_t num_ranks() const { return static_cast<std::size_t>(context_.num_ranks); }

    const Context& context_;
};

// scatter. On the root `sources[r]` is part r, and `whole` the memory in which they follow each other, if they do.
void distribute(Context& context, std::byte* out, std::span<const std::byte* const> sources, const std::byte* whole,
                std::span<const std::size_t> counts, DType dtype, int root, const Deadline& deadline) {
    const std::size_t element_size = size_of(dtype);
    const std::size_t largest = largest_of(counts);
    const bool is_root = context.rank == root;
    std::byte* payload = context.fabric.begin(call_of(Operation::scatter, sum_of(counts), dtype, root));
    const std::size_t slot_bytes = segment_bytes(largest * counts.size() * element_size, context.fabric.layout());
    const std::size_t segment_elements = elements_in(slot_bytes / counts.size(), element_size);
    const std::size_t room = segment_elements * element_size;
    const auto pieces_of = [&](std::size_t r) {
        return Segmentation{.count = counts[r], .element_size = element_size, .segment_elements = segment_elements};
    };
    const auto own = static_cast<std::size_t>(context.rank);
    const std::size_t own_size = counts[own] * element_size;
    expect_writes(out, own_size);
    // Only the root has a source; no symmetric memory, for the other ranks have no counterpart. Without `whole` its
    // offer's address is 0.
    Offer offer = offer_source(context, Operation::scatter, nullptr, 0, largest * element_size);
    offer.own = whole;
    const PartAddresses addresses(context);
    if (is_root && whole == nullptr) {
        offer.is_readable = offer.is_readable && addresses.fit();
        if (offer.is_readable) addresses.write(payload, sources);
    }
    exchange(
        context, addresses.offer_in(payload), offer, (largest + segment_elements - 1) / segment_elements,
        [&](std::size_t k, std::byte* slot) {
            for (std::size_t r = 0; r < sources.size(); ++r) {
                if (r == own) continue;
                const Segmentation segmentation = pieces_of(r);
                context.into_shared.copy(slot + r * room, sources[r] + segmentation.offset_bytes(k),
                                         segmentation.size_bytes(k));
            }
        },
        [&](std::size_t k, int r) {
            const auto to = static_cast<std::size_t>(r);
            return is_root ? Range{.offset = to * room, .size = pieces_of(to).size_bytes(k)} : Range{};
        },
        [&](std::size_t k, std::uint64_t number) {
            const Segmentation segmentation = pieces_of(own);
            const std::byte* from =
                is_root ? sources[own] + segmentation.offset_bytes(k) : context.fabric.slot(root, number) + own * room;
            move_bytes(out + segmentation.offset_bytes(k), from, segmentation.size_bytes(k));
        },
        [&](const Sources& offered) {
            if (is_root) return move_bytes(out, sources[own], own_size);
            const std::size_t start = sum_of(counts.first(own)) * element_size;
            offered.copy(root, offered.address_of(root) == 0 ? addresses.own(root) : start, out, own_size);
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
    if (can_broadcast_in_chain(context.fabric, size))
        return broadcast_in_chain(context, out, source, segmentation, root, deadline);
    // A root whose result is its source has nothing else to do while the others read.
    const bool is_read = !is_root || out != source || size <= most_read_from_idle_bytes;
    const Offer offer = offer_source(context, Operation::broadcast, is_root ? source : out, size, is_read ? size : 0);
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
    collect(context, call_of(Operation::all_gather, sum_of(counts), dtype, -1, dim),
            parts_of(context, out, counts, dtype), source, counts, dtype, deadline);
}

void all_gather(Context& context, std::span<std::byte* const> outs, const std::byte* source,
                std::span<const std::size_t> counts, DType dtype, int dim, const Deadline& deadline) {
    expect_parts(outs, counts, dtype);
    collect(context, call_of(Operation::all_gather, sum_of(counts), dtype, -1, dim), outs, source, counts, dtype,
            deadline);
}

void gather(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts, DType dtype,
            int root, const Deadline& deadline) {
    std::span<std::byte* const> outs;
    if (context.rank == root) outs = parts_of(context, out, counts, dtype);
    collect(context, call_of(Operation::gather, sum_of(counts), dtype, root), outs, source, counts, dtype, deadline);
}

void gather(Context& context, std::span<std::byte* const> outs, const std::byte* source,
            std::span<const std::size_t> counts, DType dtype, int root, const Deadline& deadline) {
    expect_parts(outs, counts, dtype);
    collect(context, call_of(Operation::gather, sum_of(counts), dtype, root), outs, source, counts, dtype, deadline);
}

void scatter(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts,
             DType dtype, int root, const Deadline& deadline) {
    std::span<const std::byte* const> sources;
    if (context.rank == root) {
        const std::byte* part = source;
        for (std::size_t r = 0; r < counts.size(); ++r) {
            context.inputs[r] = part;
            part += counts[r] * size_of(dtype);
        }
        sources = context.inputs;
    }
    distribute(context, out, sources, source, counts, dtype, root, deadline);
}

void scatter(Context& context, std::byte* out, std::span<const std::byte* const> sources,
             std::span<const std::size_t> counts, DType dtype, int root, const Deadline& deadline) {
    distribute(context, out, sources, nullptr, counts, dtype, root, deadline);
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
