// The collectives that move elements and change none.
#pragma once

#include <cstddef>
#include <span>

#include "collectives/context.h"

namespace ferrodist {

void barrier(Context& context, const Deadline& deadline);

// Copies the root's `data` into every rank's.
void broadcast(Context& context, std::byte* data, std::size_t count, DType dtype, int root, const Deadline& deadline);

// Copies every rank's `source`, of `counts[r]` elements, into every rank's `out`, one after the other. `source` may be
// its place in `out`.
void all_gather(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts,
                DType dtype, int dim, const Deadline& deadline);

// The same into the root's `out`; it is not written elsewhere.
void gather(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts, DType dtype,
            int root, const Deadline& deadline);

// Copies part r of the root's `source` into rank r's `out`; `source` is not read elsewhere.
void scatter(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> counts,
             DType dtype, int root, const Deadline& deadline);

// Sends part r of `source` to rank r and collects what the ranks sent here in `out`. Throws Failure{sizes} when a rank
// sends another number of elements than `receive_counts` says. Ranks compare `unit`.
void all_to_all(Context& context, std::byte* out, const std::byte* source, std::span<const std::size_t> send_counts,
                std::span<const std::size_t> receive_counts, std::size_t unit, DType dtype, const Deadline& deadline);

// Bytes of a `share`'s name that ranks compare.
inline constexpr std::size_t share_name_bytes = 24;

// Gives every rank the bytes of each, in rank order. `name` must be the same on all ranks.
std::vector<std::string> share(Context& context, std::string_view name, std::string_view data,
                               const Deadline& deadline);

}  // namespace ferrodist
