// Collectives that move elements without changing them.
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string_view>

#include "collectives/context.h"

namespace ferrodist {

void barrier(Context& context, const Deadline& deadline);

// Copies the root's `source`, which may be its `out`, into every rank's `out`; `source` is not read elsewhere.
void broadcast(Context& context, std::byte* out, const std::byte* source, std::size_t count, DType dtype, int root,
               const Deadline& deadline);

// Concatenates every rank's `source`, of `counts[r]` elements, in every rank's `out`. `source` may be its own part of
// `out`.
void all_gather(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts,
                DType dtype, int dim, const Deadline& deadline);

// The same into the root's `out`; it is not written elsewhere.
void gather(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts, DType dtype,
            int root, const Deadline& deadline);

// Copies part r of the root's `source` into rank r's `out`; `source` is not read elsewhere.
void scatter(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts,
             DType dtype, int root, const Deadline& deadline);

// The same with memory of its own for each part: `outs[r]`, or `sources[r]`. Ranks that have none pass nothing.
void all_gather(Context& context, std::span<std::byte* const> outs, const std::byte* source,
                std::span<const std::size_t> counts, DType dtype, int dim, const Deadline& deadline);
void gather(Context& context, std::span<std::byte* const> outs, const std::byte* source,
            std::span<const std::size_t> counts, DType dtype, int root, const Deadline& deadline);
void scatter(Context& context, std::byte* out, std::span<const std::byte* const> sources,
             std::span<const std::size_t> counts, DType dtype, int root, const Deadline& deadline);

// Sends part r of `source` to rank r and receives the parts for this rank in `out`. Throws Failure{sizes} if a rank
// sends another number of elements than `receive_counts` says. `unit` must be equal on all ranks.
void all_to_all(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> send_counts,
                std::span<const std::size_t> receive_counts, std::size_t unit, DType dtype, const Deadline& deadline);

// The same with one tensor for each part: `sources[r]` and `outs[r]`.
void all_to_all(Context& context, std::span<std::byte* const> outs, std::span<const std::byte* const> sources,
                std::span<const std::size_t> send_counts, std::span<const std::size_t> receive_counts, std::size_t unit,
                DType dtype, const Deadline& deadline);

// Bytes of the name of a `share` call that ranks compare.
inline constexpr std::size_t share_name_bytes = 24;

// The most bytes that a rank shares. Between hosts each rank sends all of its own to each other rank, so that a second
// meeting is soon cheaper.
inline constexpr std::size_t share_room = 16 * 1024;
inline constexpr std::size_t share_room_between_hosts = 2 * 1024;

// Gathers every rank's bytes on all ranks: `head` and, if both together have room, `elements`. Calls `take(bytes)` for
// each rank, in rank order. `name` must be the same on all ranks.
void share(Context& context, std::string_view name, std::string_view head, std::string_view elements,
           const std::function<void(std::string_view)>& take, const Deadline& deadline);

}  // namespace ferrodist
