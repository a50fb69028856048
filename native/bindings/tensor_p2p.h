// The fast path of point-to-point tensors: the messages of a call, sent and received without Python between.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "bindings/p2p_arguments.h"
#include "bindings/tensor.h"

namespace ferrodist {

namespace nb = nanobind;

inline constexpr unsigned tag_bits = 56;  // of a user's tag; `TAG_BITS` of backends/tags.py without the channel
inline constexpr std::size_t max_dims = 12;

// A rank's point-to-point tensors in a group.
struct TensorP2P {
    TensorP2P(std::shared_ptr<P2PEngine> its_engine, std::uint64_t its_group, int its_rank, std::vector<int> its_ranks)
        : engine(std::move(its_engine)), group(its_group), rank(its_rank), ranks(std::move(its_ranks)) {}

    std::shared_ptr<P2PEngine> engine;
    std::uint64_t group;
    int rank;
    std::vector<int> ranks;  // the engine's rank for each rank of the group
    // False once the group has ended, or a rank has left it, which the engine knows only for the default group. The
    // thread that clears it then ends the active transfers, and a thread that starts a transfer checks it after: one
    // sees the other.
    std::atomic<bool> is_open{true};

    [[nodiscard]] bool is_usable() const noexcept { return is_open.load() && engine->is_open(); }
    [[nodiscard]] std::optional<int> peer(nb::handle object, bool may_be_any) const {
        return peer_in(object, rank, static_cast<int>(ranks.size()), may_be_any);
    }
    [[nodiscard]] int engine_rank(int peer) const {
        return peer == any_source ? any_source : ranks[static_cast<std::size_t>(peer)];
    }
    [[nodiscard]] int group_rank(int dst_rank) const {
        return static_cast<int>(std::ranges::find(ranks, dst_rank) - ranks.begin());
    }
    [[nodiscard]] Tag tag(std::uint64_t channel, std::uint64_t number) const {
        return {group, channel << tag_bits | number};
    }
};

// The progress of a call that did not complete: it has no active transfer, and the general path goes on from there. It
// raises all errors, and cleans up after interrupted calls.
struct Unfinished {
    double seconds = 0.0;                // elapsed time
    nb::object payload_id = nb::none();  // of a send: the payload's id, if the header was sent and the payload was not
    bool is_sent = false;                // of a send that is one of several operations: whether all was sent
    nb::object received = nb::none();    // of a receive that is one of several operations: its result, if that is done
    nb::object message = nb::none();     // of a receive: the first message, if it has arrived and is not used up
    int source = any_source;             // and the rank that sent it
    nb::object operations = nb::none();  // of a batch: a list of the progress of each
    nb::object interruption = nb::none();  // the exception of a signal handler
};

// A call's group, which gives payloads their ids, and the seconds that the call may take here.
struct P2PCall {
    nb::object guard;  // keeps `p2p` alive
    const TensorP2P& p2p;
    nb::object group;
    double limit;

    // The id of the next payload that this rank sends.
    [[nodiscard]] nb::object next_payload_id() const;
};

// The tensor that a `fd.recv` expects.
struct WantedTensor {
    int dtype = -1;  // -1: any
    bool has_shape = false;
    std::size_t num_dims = 0;
    std::array<std::int64_t, max_dims> sizes{};

    [[nodiscard]] bool fits(std::uint8_t its_dtype, std::span<const std::int64_t> shape) const {
        return (dtype < 0 || dtype == its_dtype) &&
               (!has_shape || std::ranges::equal(std::span(sizes).first(num_dims), shape));
    }
};

// All return None if nothing has happened, because the arguments are not plain, and an `Unfinished` if the call is not
// done.

// `fd.send`; returns True.
nb::object send(const P2PCall& call, nb::handle tensor, nb::handle dst, nb::handle tag);
// `fd.recv_into`; returns as `receive_new`.
nb::object receive_into(const P2PCall& call, nb::handle tensor, nb::handle src, nb::handle tag);
// `fd.recv`; returns the tensor and the rank that sent it.
nb::object receive_new(const P2PCall& call, nb::handle src, nb::handle tag, const WantedTensor& wanted);
// `fd.sendrecv`; returns as `receive_new`. The other tensor has the dtype of `tensor`, or goes into `out`.
nb::object exchange(const P2PCall& call, nb::handle tensor, nb::handle dst, nb::handle src, nb::handle tag,
                    WantedTensor wanted, nb::handle out);

// An operation of a batch: its rank is dst or src.
struct P2POperation {
    bool is_send;
    nb::object tensor;
    nb::object rank;
    nb::object tag;
};
// `fd.batch`, in tensor_batch.cpp; returns a list of the operations' peers.
nb::object run_batch(const P2PCall& call, const std::vector<P2POperation>& operations);

void bind_tensor_p2p(nb::module_& m);

}  // namespace ferrodist
