// The messages of point-to-point tensors on the fast path; `collectives/tensor_protocol.py` describes the protocol.
#include "bindings/tensor_p2p.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <exception>

#include "base/deadline.h"
#include "bindings/fast_call.h"
#include "bindings/tensor_messages.h"
#include "bindings/tensor_transfers.h"

namespace ferrodist {

using namespace nanobind::literals;

namespace {

// Sends a message; false if it was not sent, and will not be.
bool send_message(const TensorP2P& self, const std::byte* data, std::size_t size, int peer, const Tag& tag,
                  const Deadline& deadline, std::exception_ptr& interruption) {
    P2PEngine& engine = *self.engine;
    if (size <= sizeof(FirstMessage) && engine.try_send(data, size, peer, tag)) return true;
    Send send(data, size, peer, tag);
    send.prefers_offer = deadline.seconds() > 0.0 && may_prefer_offer(engine, size, peer);
    {
        const nb::gil_scoped_release released;
        if (!engine.start_if_open(send)) return false;
    }
    interruption = await_taken(engine, send, deadline);
    if (!interruption) interruption = await_end(self, send, deadline);
    return send.outcome == Outcome::done;
}

// Receives a message; false if none has arrived that fits.
bool recv_message(const TensorP2P& self, Receive& receive, const Deadline& deadline, std::exception_ptr& interruption,
                  const ShouldStop& should_stop) {
    P2PEngine& engine = *self.engine;
    if (receive.size > sizeof(FirstMessage) || !engine.start_if_open(receive, false)) {
        const nb::gil_scoped_release released;
        if (!engine.start_if_open(receive, true)) return false;
    }
    interruption = await_end(self, receive, deadline, should_stop);
    return receive.outcome == Outcome::done;
}

struct Target {
    nb::object tensor;
    std::optional<TensorView> view;
    bool is_new = false;
};

// Receives a tensor into the one that `target_of` returns for its header. `result_of` makes the result.
template <class TargetOf, class ResultOf>
nb::object receive(const TensorP2P& self, nb::handle src, nb::handle tag, const Deadline& deadline,
                   const TargetOf& target_of, const ResultOf& result_of, const ShouldStop& should_stop = {}) {
    const auto peer = self.peer(src, true);
    const auto user_tag = plain_uint(tag);
    if (!self.is_usable() || !peer || !user_tag || *user_tag >> tag_bits != 0) return nb::none();

    std::exception_ptr interruption;
    FirstMessage message;
    Receive first(message.bytes, sizeof(message), self.engine_rank(*peer), self.tag(tensor_channel, *user_tag));
    first.accepts_shorter = true;
    if (!recv_message(self, first, deadline, interruption, should_stop)) return unfinished(deadline, interruption);
    const int source = self.group_rank(first.peer);
    const auto give_up = [&] {
        Unfinished progress;
        progress.message = message.to_python(first.message_size);
        progress.source = source;
        return unfinished(deadline, interruption, std::move(progress));
    };
    if (interruption) return give_up();
    const auto header = message.header(first.message_size);
    if (!header) return give_up();
    const Target target = target_of(*header, interruption);
    if (!target.view || !matches(*target.view, *header)) return give_up();
    const std::size_t size = target.view->count * size_of(target.view->dtype);
    const std::size_t inline_size = first.message_size - sizeof(TensorHeader);
    if (inline_size != 0 && inline_size != size) return give_up();
    if (inline_size != 0) {
        std::memcpy(target.view->data, message.elements(), size);
    } else if (size != 0) {
        Receive second(target.view->data, size, first.peer, self.tag(payload_channel, header->payload_id));
        if (!recv_message(self, second, deadline, interruption, should_stop)) return give_up();
    }
    if (size != 0 && !target.is_new && !mark_written(target.tensor.ptr())) {
        try {
            throw nb::python_error();
        } catch (...) {
            interruption = std::current_exception();
        }
    }
    if (interruption) return unfinished(deadline, interruption);
    return result_of(target.tensor, source);
}

nb::object tensor_and_source(const nb::object& tensor, int source) {
    return nb::make_tuple(tensor, source);
}

// Receives into a tensor, of which `view` is the view; returns both, as `receive_new`.
nb::object receive_into(const TensorP2P& self, nb::handle tensor, const TensorView& view, nb::handle src,
                        nb::handle tag, const Deadline& deadline, const ShouldStop& should_stop = {}) {
    const auto target_of = [&](const TensorHeader&, std::exception_ptr&) { return Target{nb::borrow(tensor), view}; };
    return receive(self, src, tag, deadline, target_of, tensor_and_source, should_stop);
}

// Receives into a new tensor. `like` may be a tensor whose view has the wanted dtype.
nb::object receive_new(const TensorP2P& self, nb::handle src, nb::handle tag, const Deadline& deadline,
                       const WantedTensor& wanted, nb::handle like = {}, std::span<const std::int64_t> like_shape = {},
                       const ShouldStop& should_stop = {}) {
    const auto target_of = [&](const TensorHeader& header, std::exception_ptr& interruption) {
        const std::array<std::int64_t, max_dims> sizes = header.shape;
        const auto shape = std::span(sizes).first(header.num_dims);
        if (!wanted.fits(header.dtype, shape)) return Target{};
        nb::object made = like.is_valid() && std::ranges::equal(shape, like_shape)
                              ? new_like(like)
                              : new_tensor(header.dtype, shape, shape.empty() ? 0 : static_cast<std::size_t>(shape[0]));
        if (!made.is_valid()) {
            nb::python_error error;
            if (!error.matches(PyExc_RuntimeError) && !error.matches(PyExc_MemoryError))
                interruption = std::make_exception_ptr(std::move(error));
            return Target{};  // of no memory the general path raises
        }
        const auto view = view_tensor(made.ptr());
        return Target{std::move(made), view, true};
    };
    return receive(self, src, tag, deadline, target_of, tensor_and_source, should_stop);
}

}  // namespace

nb::object send(const P2PCall& call, nb::handle tensor, nb::handle dst, nb::handle tag) {
    const TensorP2P& self = call.p2p;
    Outgoing outgoing;
    if (!outgoing.write(call, tensor, dst, tag)) return nb::none();
    const Deadline deadline(call.limit);
    std::exception_ptr interruption;
    if (!send_message(self, outgoing.first.bytes, outgoing.first_size, outgoing.dst_rank, outgoing.tag, deadline,
                      interruption))
        return unfinished(deadline, interruption);
    if (!outgoing.is_inline() &&
        (interruption || !send_message(self, outgoing.view.data, outgoing.size, outgoing.dst_rank,
                                       self.tag(payload_channel, outgoing.payload_number), deadline, interruption))) {
        Unfinished progress;
        progress.payload_id = outgoing.payload_id;
        return unfinished(deadline, interruption, std::move(progress));
    }
    return interruption ? unfinished(deadline, interruption) : nb::bool_(true);
}

nb::object receive_into(const P2PCall& call, nb::handle tensor, nb::handle src, nb::handle tag) {
    const auto view = view_tensor(tensor.ptr());
    if (!view) return nb::none();
    return receive_into(call.p2p, tensor, *view, src, tag, Deadline(call.limit));
}

nb::object receive_new(const P2PCall& call, nb::handle src, nb::handle tag, const WantedTensor& wanted) {
    return receive_new(call.p2p, src, tag, Deadline(call.limit), wanted);
}

nb::object exchange(const P2PCall& call, nb::handle tensor, nb::handle dst, nb::handle src, nb::handle tag,
                    WantedTensor wanted, nb::handle out) {
    const TensorP2P& self = call.p2p;
    Outgoing outgoing;
    if (!self.peer(src, true) || !outgoing.write(call, tensor, dst, tag)) return nb::none();
    wanted.dtype = static_cast<int>(outgoing.view.dtype);
    std::optional<TensorView> target;
    if (!out.is_none()) {
        target = view_tensor(out.ptr());
        if (!target || target->shape.size() > max_dims) return nb::none();
        if (!wanted.fits(static_cast<std::uint8_t>(target->dtype), target->shape)) return nb::none();
        if (overlap({outgoing.view, *target})) return nb::none();
    }
    const Deadline deadline(call.limit);
    StartedSend sent(self, outgoing);
    // A send that fails ends the wait for the other tensor: the general path raises the reason.
    const ShouldStop has_failed = [&] { return sent.has_failed(); };
    const auto receive_other = [&] {
        return target ? receive_into(self, out, *target, src, tag, deadline, has_failed)
                      : receive_new(self, src, tag, deadline, wanted, tensor, outgoing.view.shape, has_failed);
    };
    const nb::object received = sent.start() ? receive_other() : nb::object(nb::none());
    const bool is_received = PyTuple_Check(received.ptr());
    const std::exception_ptr interruption = is_received ? sent.await(deadline) : nullptr;
    if (is_received && !interruption && sent.is_done()) return received;
    sent.cancel();
    self.engine->dispatch_events();
    Unfinished progress;
    if (is_received)
        progress.received = received;
    else if (!received.is_none())
        progress = nb::cast<Unfinished>(received);
    sent.describe(progress);
    return is_received || received.is_none() ? unfinished(deadline, interruption, std::move(progress))
                                             : nb::cast(std::move(progress));
}

void bind_tensor_p2p(nb::module_& m) {
    m.attr("INLINE_LIMIT") = inline_limit;
    nb::class_<Unfinished>(m, "Unfinished",
                           "The progress of a point-to-point call that the fast path has left to the general one.")
        .def_ro("seconds", &Unfinished::seconds, "The elapsed time.")
        .def_ro("payload_id", &Unfinished::payload_id, nb::arg().none(),
                "Of a send: the payload's id, if the header was sent and the payload was not; else None.")
        .def_ro("is_sent", &Unfinished::is_sent, "Of a send that is one of several operations: whether all was sent.")
        .def_ro("received", &Unfinished::received, nb::arg().none(),
                "Of a receive that is one of several operations: its result, if it is done; else None.")
        .def_ro("message", &Unfinished::message, nb::arg().none(),
                "Of a receive: the tensor's first message, if it has arrived and is not used up; else None.")
        .def_ro("source", &Unfinished::source, "The rank that sent the message.")
        .def_ro("operations", &Unfinished::operations, nb::arg().none(),
                "Of a batch: a list of the progress of each operation.")
        .def_ro("interruption", &Unfinished::interruption, nb::arg().none(), "The exception to raise, or None.");

    nb::class_<TensorP2P>(m, "TensorP2P",
                          "A rank's point-to-point tensors in a group, for the functions `fast_send`, "
                          "`fast_recv_into`, `fast_recv`, `fast_sendrecv` and `fast_batch`.",
                          nb::is_weak_referenceable())
        .def(nb::init<std::shared_ptr<P2PEngine>, std::uint64_t, int, std::vector<int>>(), "engine"_a, "group"_a,
             "rank"_a, "ranks"_a)
        .def(
            "close", [](TensorP2P& self) { self.is_open.store(false); },
            "Make all further calls use the general path; the caller then ends the active ones.");
}

}  // namespace ferrodist
