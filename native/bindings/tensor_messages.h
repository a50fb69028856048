// The messages of a point-to-point tensor, as collectives/tensor_protocol.py describes them.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>

#include "bindings/tensor_p2p.h"

namespace ferrodist {

// Constants of backends/tags.py.
inline constexpr std::uint64_t tensor_channel = 4;
inline constexpr std::uint64_t payload_channel = 5;

// Elements of up to `inline_limit` bytes may follow the header in one message; `INLINE_LIMIT` of backends/mailbox.py.
// Between hosts a second message takes 3 us. Through shared memory it takes 0.16 us, as long as copying 3 KiB twice: so
// there only smaller elements are inline.
inline constexpr std::size_t inline_limit = 16 * 1024;
inline constexpr std::size_t local_inline_limit = 2 * 1024;

// A payload of at least this size is offered first, even if it is small enough to be sent at once
// (`Send::prefers_offer`): who waits for it reads it in place. After `seconds_offered`, as long as two copies take, it is
// sent at once.
inline constexpr std::size_t least_offered = 32 * 1024;

inline double seconds_offered(std::size_t size) {
    return 5e-6 + static_cast<double>(size) / 8e9;
}

// A tensor's header: field for field `TensorHeader` of collectives/tensor_protocol.py.
struct [[gnu::packed]] TensorHeader {
    std::uint64_t payload_id;
    std::uint8_t dtype;
    std::uint8_t num_dims;
    std::array<std::int64_t, max_dims> shape;
};
static_assert(sizeof(TensorHeader) == 106);

// Memory for a tensor's first message: its header, and the elements if they are inline. Never initialized, which would
// take as long as the rest of a call.
struct FirstMessage {
    std::byte bytes[sizeof(TensorHeader) + inline_limit];

    FirstMessage() {}  // NOLINT: `= default` would let `FirstMessage{}` initialize the bytes
    [[nodiscard]] std::byte* elements() noexcept { return bytes + sizeof(TensorHeader); }
    // The header of a message of so many bytes, if it is valid: it comes from another process.
    [[nodiscard]] std::optional<TensorHeader> header(std::size_t size) const {
        TensorHeader found;
        if (size < sizeof(found)) return std::nullopt;
        std::memcpy(&found, bytes, sizeof(found));
        const std::array<std::int64_t, max_dims> shape = found.shape;
        const bool is_possible = found.dtype < num_dtypes && found.num_dims <= max_dims && std::ranges::min(shape) >= 0;
        return is_possible ? std::optional(found) : std::nullopt;
    }
    [[nodiscard]] nb::object to_python(std::size_t size) const {
        return nb::bytes(reinterpret_cast<const char*>(bytes), size);
    }
};

inline bool matches(const TensorView& view, const TensorHeader& header) {
    const std::array<std::int64_t, max_dims> shape = header.shape;
    return static_cast<std::uint8_t>(view.dtype) == header.dtype && view.shape.size() == header.num_dims &&
           std::equal(view.shape.begin(), view.shape.end(), shape.begin());
}

// The messages of a tensor to send: the first, and the payload's id unless the elements are in the first.
struct Outgoing {
    int group_rank = 0;  // the receiver's
    int dst_rank = 0;    // the engine's
    Tag tag;
    TensorView view;
    std::size_t size = 0;  // of the elements, in bytes
    std::uint64_t payload_number = 0;
    nb::object payload_id = nb::none();
    std::size_t first_size = 0;
    FirstMessage first;

    [[nodiscard]] bool is_inline() const { return payload_id.is_none(); }

    // False if the general path is to check the arguments.
    bool write(const P2PCall& call, nb::handle tensor, nb::handle dst, nb::handle tag_number) {
        const TensorP2P& self = call.p2p;
        const auto peer = self.peer(dst, false);
        const auto user_tag = plain_uint(tag_number);
        if (!self.is_usable() || !peer || !user_tag || *user_tag >> tag_bits != 0) return false;
        const auto found = view_tensor(tensor.ptr());
        if (!found || found->shape.size() > max_dims) return false;
        view = *found;
        size = view.count * size_of(view.dtype);
        group_rank = *peer;
        dst_rank = self.engine_rank(*peer);
        tag = self.tag(tensor_channel, *user_tag);
        if (size > (self.engine->shares_memory_with(dst_rank) ? local_inline_limit : inline_limit)) {
            payload_id = call.next_payload_id();
            payload_number = nb::cast<std::uint64_t>(payload_id);
        }
        TensorHeader header{.payload_id = payload_number,
                            .dtype = static_cast<std::uint8_t>(view.dtype),
                            .num_dims = static_cast<std::uint8_t>(view.shape.size()),
                            .shape = {}};
        std::array<std::int64_t, max_dims> shape{};
        std::ranges::copy(view.shape, shape.begin());
        header.shape = shape;
        std::memcpy(first.bytes, &header, sizeof(header));
        if (is_inline() && size != 0) std::memcpy(first.elements(), view.data, size);
        first_size = sizeof(header) + (is_inline() ? size : 0);
        return true;
    }
};

}  // namespace ferrodist
