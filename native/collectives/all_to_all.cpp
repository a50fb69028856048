#include <algorithm>
#include <numeric>
#include <optional>

#include "base/fresh_memory.h"
#include "collectives/data_movement.h"
#include "collectives/exchange.h"
#include "collectives/sizes.h"

namespace ferrodist {

namespace {

// The payload's part before the offer: whether all parts that this rank sends and expects have one size, and which, and
// all of its parts if they are small, or the addresses of larger ones that are in tensors of their own. If all ranks
// announce the same size no counts are compared; if all ranks' parts are small, they need no slots.
class InlineParts {
public:
    // `part_bytes` is the common size of the parts, if they have one; `sent_bytes` is their sum.
    InlineParts(Context& context, std::optional<std::size_t> part_bytes, std::size_t sent_bytes)
        : context_(context),
          is_inline_(sent_bytes <= max_parts_bytes),
          header_(part_bytes ? *part_bytes + 1 : (is_inline_ ? uneven_inline : 0)) {}

    // `copy_parts(to)` copies this rank's parts, one after the other. Returns the address of the offer.
    template <class CopyParts>
    std::byte* write(std::byte* payload, const CopyParts& copy_parts) const {
        std::memcpy(payload, &header_, sizeof header_);
        if (is_inline_) copy_parts(payload + sizeof header_);
        return payload + sizeof header_ + max_parts_bytes;
    }

    // Whether there is room for the addresses of parts that are not small.
    [[nodiscard]] bool has_room_for_addresses() const {
        return !is_inline_ && static_cast<std::size_t>(context_.num_ranks) * sizeof(std::uint64_t) <= max_parts_bytes;
    }
    void write_addresses(std::byte* payload, std::span<const std::byte* const> sources) const {
        for (std::size_t r = 0; r < sources.size(); ++r) {
            const auto address = static_cast<std::uint64_t>(reinterpret_cast<std::uintptr_t>(sources[r]));
            std::memcpy(payload + sizeof header_ + r * sizeof address, &address, sizeof address);
        }
    }
    // After `enter`, if rank r has written them: the address of its part for this rank.
    [[nodiscard]] std::uint64_t address_at(std::size_t r) const {
        std::uint64_t address = 0;
        std::memcpy(&address, of(static_cast<int>(r)) + static_cast<std::size_t>(context_.rank) * sizeof address,
                    sizeof address);
        return address;
    }

    // After `enter`: what holds for all ranks.
    struct Common {
        bool is_even = true;  // all parts have the same size
        bool is_inline = true;
    };
    [[nodiscard]] Common common() const {
        Common common;
        for (int r = 0; r < context_.num_ranks; ++r) {
            std::uint64_t theirs = 0;
            std::memcpy(&theirs, context_.fabric.arrival(r).payload.data(), sizeof theirs);
            const bool is_even = theirs != 0 && theirs != uneven_inline;
            const bool is_small =
                is_even && (theirs - 1) * static_cast<std::size_t>(context_.num_ranks) <= max_parts_bytes;
            common.is_even = common.is_even && is_even && theirs == header_;
            common.is_inline = common.is_inline && (is_small || theirs == uneven_inline);
        }
        return common;
    }

    // The parts that rank r sends, one after the other.
    [[nodiscard]] const std::byte* of(int r) const {
        return context_.fabric.arrival(r).payload.data() + sizeof header_;
    }

private:
    static constexpr std::size_t max_parts_bytes = shm::max_inline_bytes - sizeof(std::uint64_t) - offer_bytes;
    static constexpr std::uint64_t uneven_inline = ~std::uint64_t{0};

    Context& context_;
    bool is_inline_;
    std::uint64_t header_;  // one more than the size of every part; if they differ, `uneven_inline` or 0
};

// Checks all ranks' announced send counts against what this rank expects. Returns the largest part that goes to another
// rank.
std::size_t compare_counts(const Context& context, std::span<const std::size_t> receive_counts) {
    const std::size_t ranks = receive_counts.size();
    std::size_t largest = 0;
    for (std::size_t r = 0; r < ranks; ++r) {
        const auto sent = context.fabric.counts(static_cast<int>(r));
        const std::uint64_t sent_and_expected[2] = {sent[static_cast<std::size_t>(context.rank)], receive_counts[r]};
        if (sent_and_expected[0] != sent_and_expected[1])
            throw Failure(FailureKind::sizes, {static_cast<int>(r)},
                          {reinterpret_cast<const char*>(sent_and_expected), sizeof sent_and_expected});
        for (std::size_t to = 0; to < ranks; ++to)
            if (to != r) largest = std::max<std::size_t>(largest, sent[to]);
    }
    return largest;
}

// `whole` is the memory of all sources, one after the other, if they and `outs` are each in one tensor; else null.
void exchange_parts(Context& context, std::span<std::byte* const> outs, std::span<const std::byte* const> sources,
                    const std::byte* whole, std::span<const std::size_t> send_counts,
                    std::span<const std::size_t> receive_counts, std::size_t unit, DType dtype,
                    const Deadline& deadline) {
    const std::size_t element_size = size_of(dtype);
    const std::size_t ranks = send_counts.size();
    std::vector<std::size_t>& sent_from = context.starts;
    find_starts(send_counts, sent_from);
    const auto own = static_cast<std::size_t>(context.rank);
    std::byte* payload = context.fabric.begin({.operation = static_cast<std::uint8_t>(Operation::all_to_all),
                                               .dtype = static_cast<std::uint8_t>(dtype),
                                               .count = unit});
    context.fabric.publish_counts(send_counts);
    const std::size_t part = send_counts[0];
    const auto is_part = [&](std::size_t count) { return count == part; };
    const bool is_even = std::ranges::all_of(send_counts, is_part) && std::ranges::all_of(receive_counts, is_part);
    const std::size_t sent_bytes = sent_from[ranks] * element_size;
    const InlineParts inline_parts(context, is_even ? std::optional(part * element_size) : std::nullopt, sent_bytes);
    std::byte* const offer_at = inline_parts.write(payload, [&](std::byte* to) {
        for (std::size_t r = 0; r < ranks; ++r)
            copy_bytes(to + sent_from[r] * element_size, sources[r], send_counts[r] * element_size);
    });
    // The sizes differ between ranks and are unknown until all have entered, so segments are as large as the slots
    // allow.
    const std::size_t segment_elements = elements_in(context.fabric.layout().slot_bytes / ranks, element_size);
    const std::size_t room = segment_elements * element_size;
    const auto pieces_of = [&](std::size_t count) {
        return Segmentation{.count = count, .element_size = element_size, .segment_elements = segment_elements};
    };
    // Runs `action(r)` for the other ranks, starting with a different one on each rank.
    const auto for_others = [&](const auto& action) {
        for (std::size_t step = 1; step < ranks; ++step) action((own + step) % ranks);
    };
    const auto copy_own = [&] {
        copy_bytes(outs[own], sources[own], std::min(send_counts[own], receive_counts[own]) * element_size);
    };
    const auto stage = [&](std::size_t k, std::byte* slot) {
        for_others([&](std::size_t r) {
            const Segmentation segmentation = pieces_of(send_counts[r]);
            context.into_shared.copy(slot + r * room, sources[r] + segmentation.offset_bytes(k),
                                     segmentation.size_bytes(k));
        });
    };
    const auto staged_for = [&](std::size_t k, int r) {
        const auto to = static_cast<std::size_t>(r);
        return Range{.offset = to * room, .size = pieces_of(send_counts[to]).size_bytes(k)};
    };
    const auto take = [&](std::size_t k, std::uint64_t number) {
        if (k == 0) copy_own();
        for_others([&](std::size_t r) {
            const Segmentation segmentation = pieces_of(receive_counts[r]);
            copy_bytes(outs[r] + segmentation.offset_bytes(k),
                       context.fabric.slot(static_cast<int>(r), number) + own * room, segmentation.size_bytes(k));
        });
    };
    // The offset in rank r's source of its part for this rank, in bytes.
    const auto offset_at = [&](std::size_t r) {
        const auto sent = context.fabric.counts(static_cast<int>(r));
        return std::accumulate(sent.begin(), sent.begin() + context.rank, std::uint64_t{0}) * element_size;
    };
    // A rank whose parts are in tensors of their own offers address 0, and has written the parts' addresses.
    const auto direct = [&](const Sources& offered) {
        for_others([&](std::size_t r) {
            const bool are_apart = !offered.are_mapped() && offered.address_of(static_cast<int>(r)) == 0;
            offered.copy(static_cast<int>(r), are_apart ? inline_parts.address_at(r) : offset_at(r), outs[r],
                         receive_counts[r] * element_size);
        });
        copy_own();
    };
    Offer offer;
    if (whole != nullptr) {
        offer = offer_source(context, Operation::all_to_all, whole, sent_bytes, sent_bytes / ranks);
    } else if (inline_parts.has_room_for_addresses()) {
        offer = offer_source(context, Operation::all_to_all, nullptr, 0, sent_bytes / ranks);
        inline_parts.write_addresses(payload, sources);
    }
    make_offer(context, offer_at, offer, stage, staged_for, deadline);
    context.fabric.enter(deadline);
    const InlineParts::Common common = inline_parts.common();
    const std::size_t largest = common.is_even ? part : compare_counts(context, receive_counts);
    if (common.is_inline) {
        for (std::size_t r = 0; r < ranks; ++r) {
            const std::size_t offset = common.is_even ? sent_from[own] * element_size : offset_at(r);
            copy_bytes(outs[r], inline_parts.of(static_cast<int>(r)) + offset, receive_counts[r] * element_size);
        }
        context.fabric.count_segments(1);  // the staged segment
        return;
    }
    if (whole != nullptr) {
        const std::size_t received = std::accumulate(receive_counts.begin(), receive_counts.end(), std::size_t{0});
        expect_writes(outs[0], received * element_size);
    } else {
        for (std::size_t r = 0; r < ranks; ++r) expect_writes(outs[r], receive_counts[r] * element_size);
    }
    exchange_entered(context, offer_at, offer, (largest + segment_elements - 1) / segment_elements, stage, staged_for,
                     take, direct, deadline);
}

}  // namespace

void all_to_all(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> send_counts,
                std::span<const std::size_t> receive_counts, std::size_t unit, DType dtype, const Deadline& deadline) {
    std::size_t sent = 0;
    std::size_t received = 0;
    for (std::size_t r = 0; r < send_counts.size(); ++r) {
        context.inputs[r] = source + sent * size_of(dtype);
        context.outputs[r] = out + received * size_of(dtype);
        sent += send_counts[r];
        received += receive_counts[r];
    }
    exchange_parts(context, context.outputs, context.inputs, source, send_counts, receive_counts, unit, dtype,
                   deadline);
}

void all_to_all(Context& context, std::span<std::byte* const> outs, std::span<const std::byte* const> sources,
                std::span<const std::size_t> send_counts, std::span<const std::size_t> receive_counts, std::size_t unit,
                DType dtype, const Deadline& deadline) {
    exchange_parts(context, outs, sources, nullptr, send_counts, receive_counts, unit, dtype, deadline);
}

}  // namespace ferrodist
