#include "collectives/movement.h"

#include <numeric>

#include "collectives/pipeline.h"
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

// Where each part starts, into `starts`, which begins with 0 and has an entry for the end.
void find_starts(std::span<const std::size_t> counts, std::vector<std::size_t>& starts) {
    std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
}

std::size_t largest_of(std::span<const std::size_t> counts) {
    return *std::max_element(counts.begin(), counts.end());
}

// Copies between a user's memory and a slot, unless they are the same place.
void move_bytes(std::byte* out, const std::byte* source, std::size_t size) {
    if (out != source) copy_bytes(out, source, size);
}

// all_gather, and gather where only the root has an `out`.
void collect(Context& context, const shm::Call& call, std::byte* out, const std::byte* source,
             std::span<const std::size_t> counts, DType dtype, const Deadline& deadline) {
    const std::size_t element_size = size_of(dtype);
    std::vector<std::size_t>& starts = context.starts;
    find_starts(counts, starts);
    const std::size_t largest = largest_of(counts);
    const auto rank = static_cast<std::size_t>(context.rank);
    const auto own_place = [&] { return out + starts[rank] * element_size; };
    std::byte* payload = begin(context, call);
    if (largest * element_size <= shm::max_inline_bytes) {
        copy_bytes(payload, source, counts[rank] * element_size);
        enter(context, deadline);
        if (out == nullptr) return;
        for (std::size_t r = 0; r < counts.size(); ++r)
            copy_bytes(out + starts[r] * element_size, context.arrival_of(static_cast<int>(r)).payload.data(),
                       counts[r] * element_size);
        return;
    }
    const std::size_t piece = elements_in(segment_bytes(largest * element_size, context.fabric.layout()), element_size);
    const auto pieces_of = [&](std::size_t r) {
        return Pieces{.count = counts[r], .element_size = element_size, .piece = piece};
    };
    // The parts differ in size; each rank offers the memory from where its own begins.
    const std::size_t read_size = largest * element_size;
    const bool is_read = call.root < 0 || read_size <= most_read_from_one_bytes;
    const Offer offer = offer_source(context, source, counts[rank] * element_size, is_read ? read_size : 0);
    exchange(
        context, payload, offer, (largest + piece - 1) / piece,
        [&](std::size_t k, std::byte* slot) {
            const Pieces pieces = pieces_of(rank);
            copy_bytes(slot, source + pieces.offset_bytes(k), pieces.size_bytes(k));
        },
        [&](std::size_t k, int r) {
            return Range{.size = call.root < 0 || r == call.root ? pieces_of(rank).size_bytes(k) : 0};
        },
        [&](std::size_t k, std::uint64_t number) {
            if (out == nullptr) return;
            for (std::size_t step = 0; step < counts.size(); ++step) {
                const std::size_t r = (rank + step) % counts.size();
                const Pieces pieces = pieces_of(r);
                const std::byte* from = r == rank ? source + pieces.offset_bytes(k)
                                                  : context.fabric.slot(static_cast<int>(r), number);
                std::byte* to = r == rank ? own_place() + pieces.offset_bytes(k)
                                          : out + starts[r] * element_size + pieces.offset_bytes(k);
                move_bytes(to, from, pieces.size_bytes(k));
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
    begin(context, {.operation = static_cast<std::uint8_t>(Operation::barrier)});
    enter(context, deadline);
}

void broadcast(Context& context, std::byte* data, std::size_t count, DType dtype, int root, const Deadline& deadline) {
    const std::size_t element_size = size_of(dtype);
    const std::size_t size = count * element_size;
    const bool is_root = context.rank == root;
    std::byte* payload = begin(context, call_of(Operation::broadcast, count, dtype, root));
    if (size <= shm::max_inline_bytes) {
        if (is_root) copy_bytes(payload, data, size);
        enter(context, deadline);
        if (!is_root) copy_bytes(data, context.arrival_of(root).payload.data(), size);
        return;
    }
    const Pieces pieces{.count = count,
                        .element_size = element_size,
                        .piece = elements_in(segment_bytes(size, context.fabric.layout()), element_size)};
    const Offer offer = offer_source(context, data, size, size <= most_read_from_one_bytes ? size : 0);
    exchange(
        context, payload, offer, pieces.num_segments(),
        [&](std::size_t k, std::byte* slot) {
            if (is_root) copy_bytes(slot, data + pieces.offset_bytes(k), pieces.size_bytes(k));
        },
        [&](std::size_t k, int) { return Range{.size = is_root ? pieces.size_bytes(k) : 0}; },
        [&](std::size_t k, std::uint64_t number) {
            if (!is_root)
                copy_bytes(data + pieces.offset_bytes(k), context.fabric.slot(root, number), pieces.size_bytes(k));
        },
        [&](const Sources& sources) {
            if (!is_root) sources.copy(root, 0, data, size);
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
    std::byte* payload = begin(context, call_of(Operation::scatter, starts.back(), dtype, root));
    const std::size_t slot_bytes = segment_bytes(largest * counts.size() * element_size, context.fabric.layout());
    const std::size_t piece = elements_in(slot_bytes / counts.size(), element_size);
    const std::size_t room = piece * element_size;
    const auto pieces_of = [&](std::size_t r) {
        return Pieces{.count = counts[r], .element_size = element_size, .piece = piece};
    };
    const auto own = static_cast<std::size_t>(context.rank);
    // Only the root has a source; no symmetric memory, for its ranks' tensors lie elsewhere.
    const Offer offer{.is_readable = offer_source(context, nullptr, 0, largest * element_size).is_readable, .own = source};
    exchange(
        context, payload, offer, (largest + piece - 1) / piece,
        [&](std::size_t k, std::byte* slot) {
            if (!is_root) return;
            for (std::size_t r = 0; r < counts.size(); ++r) {
                if (r == own) continue;
                const Pieces pieces = pieces_of(r);
                copy_bytes(slot + r * room, source + starts[r] * element_size + pieces.offset_bytes(k),
                           pieces.size_bytes(k));
            }
        },
        [&](std::size_t k, int r) {
            const auto to = static_cast<std::size_t>(r);
            return is_root ? Range{.offset = to * room, .size = pieces_of(to).size_bytes(k)} : Range{};
        },
        [&](std::size_t k, std::uint64_t number) {
            const Pieces pieces = pieces_of(own);
            const std::byte* from = is_root ? source + starts[own] * element_size + pieces.offset_bytes(k)
                                            : context.fabric.slot(root, number) + own * room;
            move_bytes(out + pieces.offset_bytes(k), from, pieces.size_bytes(k));
        },
        [&](const Sources& sources) {
            if (is_root)
                move_bytes(out, source + starts[own] * element_size, counts[own] * element_size);
            else
                sources.copy(root, starts[own] * element_size, out, counts[own] * element_size);
        },
        deadline);
}

void all_to_all(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> send_counts,
                std::span<const std::size_t> receive_counts, std::size_t unit, DType dtype, const Deadline& deadline) {
    const std::size_t element_size = size_of(dtype);
    const std::size_t ranks = send_counts.size();
    std::vector<std::size_t>& sent_from = context.starts;
    std::vector<std::size_t>& received_at = context.other_starts;
    find_starts(send_counts, sent_from);
    find_starts(receive_counts, received_at);
    const auto own = static_cast<std::size_t>(context.rank);
    std::byte* payload = begin(context, call_of(Operation::all_to_all, unit, dtype));
    context.fabric.give_counts(context.sequence, send_counts);
    // Before the offer: whether all parts of this rank have `unit` elements, which is the same number on all ranks; and the
    // parts, if they have and are few. Where all say so nobody looks at counts, nor at slots where they are few.
    constexpr std::size_t most_inline_bytes = shm::max_inline_bytes - offer_bytes - sizeof(std::uint64_t);
    const auto is_unit = [&](std::size_t count) { return count == unit; };
    const std::uint64_t is_even = std::ranges::all_of(send_counts, is_unit) && std::ranges::all_of(receive_counts, is_unit);
    const bool is_inline = is_even != 0 && ranks * unit * element_size <= most_inline_bytes;
    std::memcpy(payload, &is_even, sizeof is_even);
    const auto parts_of = [&](int r) { return context.arrival_of(r).payload.data() + sizeof is_even; };
    if (is_inline) copy_bytes(parts_of(context.rank), source, ranks * unit * element_size);
    payload = parts_of(context.rank) + most_inline_bytes;
    // The sizes differ from rank to rank and are not known before all have entered, so the segments are as large as
    // slots allow.
    const std::size_t piece = elements_in(context.fabric.layout().slot_bytes / ranks, element_size);
    const std::size_t room = piece * element_size;
    const auto pieces_of = [&](std::size_t count) {
        return Pieces{.count = count, .element_size = element_size, .piece = piece};
    };
    const auto are_all_even = [&] {
        for (int r = 0; r < context.num_ranks; ++r) {
            std::uint64_t theirs = 0;
            std::memcpy(&theirs, context.arrival_of(r).payload.data(), sizeof theirs);
            if (theirs == 0) return false;
        }
        return true;
    };
    const auto num_segments = [&] {
        if (are_all_even()) return (unit + piece - 1) / piece;
        std::size_t largest = 0;
        for (std::size_t r = 0; r < ranks; ++r) {
            const auto counts = context.fabric.counts(static_cast<int>(r), context.sequence);
            if (counts[own] != receive_counts[r]) {
                const std::uint64_t sent_and_expected[2] = {counts[own], receive_counts[r]};
                throw Failure(FailureKind::sizes, {static_cast<int>(r)},
                              {reinterpret_cast<const char*>(sent_and_expected), sizeof sent_and_expected});
            }
            for (std::size_t to = 0; to < ranks; ++to)
                if (to != r) largest = std::max<std::size_t>(largest, counts[to]);
        }
        return (largest + piece - 1) / piece;
    };
    const auto copy_own = [&] {
        copy_bytes(out + received_at[own] * element_size, source + sent_from[own] * element_size,
                   std::min(send_counts[own], receive_counts[own]) * element_size);
    };
    const std::size_t sent_bytes = sent_from[ranks] * element_size;
    const Offer offer = offer_source(context, source, sent_bytes, sent_bytes / ranks);
    const auto direct = [&](const Sources& sources) {
        for (std::size_t step = 1; step < ranks; ++step) {
            const std::size_t r = (own + step) % ranks;
            const auto sent = context.fabric.counts(static_cast<int>(r), context.sequence);
            const std::size_t begin = std::accumulate(sent.begin(), sent.begin() + context.rank, std::uint64_t{0});
            sources.copy(static_cast<int>(r), begin * element_size, out + received_at[r] * element_size,
                         receive_counts[r] * element_size);
        }
        copy_own();
    };
    const auto stage = [&](std::size_t k, std::byte* slot) {
        for (std::size_t r = 0; r < ranks; ++r) {
            if (r == own) continue;
            const Pieces pieces = pieces_of(send_counts[r]);
            copy_bytes(slot + r * room, source + sent_from[r] * element_size + pieces.offset_bytes(k),
                       pieces.size_bytes(k));
        }
    };
    const auto staged_for = [&](std::size_t k, int r) {
        const auto to = static_cast<std::size_t>(r);
        return Range{.offset = to * room, .size = pieces_of(send_counts[to]).size_bytes(k)};
    };
    const auto take = [&](std::size_t k, std::uint64_t number) {
        if (k == 0) copy_own();
        for (std::size_t step = 1; step < ranks; ++step) {
            const std::size_t r = (own + step) % ranks;
            const Pieces pieces = pieces_of(receive_counts[r]);
            copy_bytes(out + received_at[r] * element_size + pieces.offset_bytes(k),
                       context.fabric.slot(static_cast<int>(r), number) + own * room, pieces.size_bytes(k));
        }
    };
    make_offer(context, payload, offer, stage, staged_for, deadline);
    enter(context, deadline);
    if (is_inline && are_all_even()) {
        for (std::size_t r = 0; r < ranks; ++r)
            copy_bytes(out + r * unit * element_size,
                       parts_of(static_cast<int>(r)) + own * unit * element_size, unit * element_size);
        ++context.segments;  // what was staged
        return;
    }
    exchange_entered(context, payload, offer, num_segments(), stage, staged_for, take, direct, deadline);
}

std::vector<std::string> share(Context& context, std::string_view name, std::string_view data,
                               const Deadline& deadline) {
    std::byte* payload = begin(context, {.operation = static_cast<std::uint8_t>(Operation::share)});
    std::memset(payload, 0, share_name_bytes);
    std::memcpy(payload, name.data(), std::min(name.size(), share_name_bytes));
    const std::uint64_t length = data.size();
    std::vector<std::string> shared;
    exchange(
        context, payload + share_name_bytes, {}, 1,
        [&](std::size_t, std::byte* slot) {
            std::memcpy(slot, &length, sizeof length);
            std::memcpy(slot + sizeof length, data.data(), data.size());
        },
        [&](std::size_t, int) { return Range{.size = sizeof length + data.size()}; },
        [&](std::size_t, std::uint64_t number) {
            for (int r = 0; r < context.num_ranks; ++r)
                if (std::memcmp(context.arrival_of(r).payload.data(), payload, share_name_bytes) != 0)
                    throw_mismatch(context);
            for (int r = 0; r < context.num_ranks; ++r) {
                const std::byte* slot = context.fabric.slot(r, number);
                std::uint64_t size = 0;
                std::memcpy(&size, slot, sizeof size);
                shared.emplace_back(reinterpret_cast<const char*>(slot + sizeof size), size);
            }
        },
        [](const Sources&) {}, deadline);
    return shared;
}

}  // namespace ferrodist
