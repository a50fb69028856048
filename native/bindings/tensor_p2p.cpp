// Fast path of point-to-point tensors: sends and receives their messages without Python between;
// `collectives/tensor_protocol.py` describes the protocol.
//
// A call that does not complete normally returns how far it has got, with no active transfer, and the general path goes
// on from there: it raises all errors, and cleans up after interrupted calls.
#include "bindings/tensor_p2p.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "bindings/p2p_arguments.h"
#include "bindings/tensor.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist {

namespace {

// Constants of backends/tags.py.
constexpr unsigned number_bits = 56;
constexpr std::uint64_t tensor_channel = 4;
constexpr std::uint64_t payload_channel = 5;

constexpr std::size_t max_dims = 12;

// Elements of up to `inline_limit` bytes may follow the header in one message; `INLINE_LIMIT` of backends/mailbox.py.
// Between hosts a second message takes 3 us. Through shared memory it takes 0.16 us, as long as copying 3 KiB twice: so
// there only smaller elements are inline.
constexpr std::size_t inline_limit = 16 * 1024;
constexpr std::size_t local_inline_limit = 2 * 1024;

// A payload that a thread of the host waits for is faster read in place (`Send::prefers_offer`), if it has this size.
// Before a smaller one than `EAGER_LIMIT` is sent at once instead, its receiver has as long as two such copies take.
constexpr std::size_t least_offered = 32 * 1024;

double seconds_offered(std::size_t size) {
    return 5e-6 + static_cast<double>(size) / 8e9;
}

bool is_offered(const P2PEngine& engine, std::size_t size, int peer, const Deadline& deadline) {
    return size >= least_offered && engine.shares_memory_with(peer) && deadline.seconds() > seconds_offered(size);
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
};

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
        return {group, channel << number_bits | number};
    }
};

// The progress of a call that did not complete.
struct Unfinished {
    double seconds = 0.0;                // elapsed time
    nb::object payload_id = nb::none();  // of a send: the payload's id, if the header was sent and the payload was not
    bool is_sent = false;                // of an exchange: all was sent
    nb::object received = nb::none();    // of an exchange: the result of its receive, if that is done
    nb::object message = nb::none();     // of a receive: the first message, if it has arrived and is not used up
    int source = any_source;             // and the rank that sent it
    nb::object interruption = nb::none();  // the exception of a signal handler
};

nb::object unfinished(const Deadline& deadline, const std::exception_ptr& interruption, Unfinished progress = {}) {
    progress.seconds = deadline.elapsed_seconds();
    if (interruption) {
        try {
            std::rethrow_exception(interruption);
        } catch (const nb::python_error& error) {
            progress.interruption = nb::borrow(error.value());
        }
    }
    return nb::cast(std::move(progress));
}

nb::object not_started() {
    return nb::cast(Unfinished{});
}

double seconds_left(const Deadline& deadline) {
    return std::chrono::duration<double>(deadline.remaining()).count();
}

using ShouldStop = std::function<bool()>;  // see `await`

// Waits for a started transfer, which has ended when this returns. Returns the exception that interrupted it.
template <class SomeTransfer>
std::exception_ptr await_end(const TensorP2P& self, SomeTransfer& transfer, const Deadline& deadline,
                             const ShouldStop& should_stop = {}) {
    std::exception_ptr interruption;
    if (!self.is_open.load()) {
        const nb::gil_scoped_release released;
        self.engine->cancel(transfer);
    }
    if (!transfer.has_ended.load()) {
        try {
            await(*self.engine, transfer, seconds_left(deadline), should_stop);
        } catch (...) {
            interruption = std::current_exception();
        }
    }
    self.engine->dispatch_events();
    return interruption;
}

// Waits a little for a message to be taken that its sender need not offer, and then sends it at once.
std::exception_ptr await_taken(const TensorP2P& self, Send& send) {
    P2PEngine& engine = *self.engine;
    if (send.has_ended.load() || send.size > engine.settings().eager_bytes || !send.prefers_offer) return nullptr;
    try {
        const GilRelease released;
        if (!engine.wait(send, seconds_offered(send.size))) engine.send_now(send);
    } catch (...) {
        const nb::gil_scoped_release released;
        engine.cancel(send);
        return std::current_exception();
    }
    return nullptr;
}

// Sends a message; false if it was not sent, and will not be.
bool send_message(const TensorP2P& self, const std::byte* data, std::size_t size, int peer, const Tag& tag,
                  const Deadline& deadline, std::exception_ptr& interruption) {
    P2PEngine& engine = *self.engine;
    if (size <= sizeof(FirstMessage) && engine.try_send(data, size, peer, tag)) return true;
    Send send(data, size, peer, tag);
    send.prefers_offer = is_offered(engine, size, peer, deadline);
    {
        const nb::gil_scoped_release released;
        if (!engine.start_if_open(send)) return false;
    }
    interruption = await_taken(self, send);
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

// The messages of a tensor to send: the first, and the payload's id unless the elements are in the first.
struct Outgoing {
    int dst_rank = 0;  // the engine's
    Tag tag;
    TensorView view;
    std::size_t size = 0;  // of the elements, in bytes
    std::uint64_t payload_number = 0;
    nb::object payload_id = nb::none();
    std::size_t first_size = 0;
    FirstMessage first;

    [[nodiscard]] bool is_inline() const { return payload_id.is_none(); }

    // False if the general path is to check the arguments. A payload gets the next of `payload_ids`.
    bool write(const TensorP2P& self, nb::handle tensor, nb::handle dst, nb::handle tag_number,
               nb::handle payload_ids) {
        const auto peer = self.peer(dst, false);
        const auto user_tag = plain_uint(tag_number);
        if (!self.is_usable() || !peer || !user_tag || *user_tag >> number_bits != 0) return false;
        const auto found = view_tensor(tensor.ptr());
        if (!found || found->shape.size() > max_dims) return false;
        view = *found;
        size = view.count * size_of(view.dtype);
        dst_rank = self.engine_rank(*peer);
        tag = self.tag(tensor_channel, *user_tag);
        if (size > (self.engine->shares_memory_with(dst_rank) ? local_inline_limit : inline_limit)) {
            payload_id = nb::steal(PyIter_Next(payload_ids.ptr()));
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

// `fd.send`. Returns None on success.
nb::object send(const TensorP2P& self, nb::handle tensor, nb::handle dst, nb::handle tag, nb::handle timeout,
                nb::handle payload_ids) {
    const auto limit = seconds_of(timeout);
    Outgoing outgoing;
    if (!limit || !outgoing.write(self, tensor, dst, tag, payload_ids)) return not_started();
    const Deadline deadline(*limit);
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
    return interruption ? unfinished(deadline, interruption) : nb::none();
}

// Whether a small message can be sent without a posted receive.
bool can_exchange(const TensorP2P& self, nb::handle tensor, nb::handle src) {
    const auto view = view_tensor(tensor.ptr());
    return view && view->count * size_of(view->dtype) <= small_bytes && self.peer(src, true);
}

// Whether a header is valid: it comes from another process.
bool is_possible(const TensorHeader& header) {
    const std::array<std::int64_t, max_dims> shape = header.shape;
    return header.dtype < num_dtypes && header.num_dims <= max_dims && std::ranges::min(shape) >= 0;
}

bool matches(const TensorView& view, const TensorHeader& header) {
    const std::array<std::int64_t, max_dims> shape = header.shape;
    return static_cast<std::uint8_t>(view.dtype) == header.dtype && view.shape.size() == header.num_dims &&
           std::equal(view.shape.begin(), view.shape.end(), shape.begin());
}

struct Target {
    nb::object tensor;
    std::optional<TensorView> view;
};

// Receives a tensor into the one that `target_of` returns for its header. `result_of` makes the result.
template <class TargetOf, class ResultOf>
nb::object receive(const TensorP2P& self, nb::handle src, nb::handle tag, const Deadline& deadline,
                   const TargetOf& target_of, const ResultOf& result_of, const ShouldStop& should_stop = {}) {
    const auto peer = self.peer(src, true);
    const auto user_tag = plain_uint(tag);
    if (!self.is_usable() || !peer || !user_tag || *user_tag >> number_bits != 0) return not_started();

    std::exception_ptr interruption;
    FirstMessage message;
    Receive first(message.bytes, sizeof(message), self.engine_rank(*peer), self.tag(tensor_channel, *user_tag));
    first.accepts_shorter = true;
    if (!recv_message(self, first, deadline, interruption, should_stop)) return unfinished(deadline, interruption);
    const int source = self.group_rank(first.peer);
    const auto give_up = [&] {
        Unfinished progress;
        progress.message = nb::bytes(reinterpret_cast<const char*>(message.bytes), first.message_size);
        progress.source = source;
        return unfinished(deadline, interruption, std::move(progress));
    };
    if (interruption || first.message_size < sizeof(TensorHeader)) return give_up();
    TensorHeader header;
    std::memcpy(&header, message.bytes, sizeof(header));
    if (!is_possible(header)) return give_up();

    const Target target = target_of(header, interruption);
    if (!target.view || !matches(*target.view, header)) return give_up();
    const std::size_t size = target.view->count * size_of(target.view->dtype);
    const std::size_t inline_size = first.message_size - sizeof(header);
    if (inline_size != 0 && inline_size != size) return give_up();
    if (inline_size != 0) {
        std::memcpy(target.view->data, message.elements(), size);
    } else if (size != 0) {
        Receive second(target.view->data, size, first.peer, self.tag(payload_channel, header.payload_id));
        if (!recv_message(self, second, deadline, interruption, should_stop)) return give_up();
    }
    if (size != 0 && !mark_written(target.tensor.ptr())) {
        try {
            throw nb::python_error();
        } catch (...) {
            interruption = std::current_exception();
        }
    }
    if (interruption) return unfinished(deadline, interruption);
    return result_of(target.tensor, source);
}

// `fd.recv_into`; returns the rank that sent the tensor on success.
nb::object receive_into(const TensorP2P& self, nb::handle tensor, nb::handle src, nb::handle tag, nb::handle timeout) {
    const auto view = view_tensor(tensor.ptr());
    const auto limit = seconds_of(timeout);
    if (!view || !limit) return not_started();
    return receive(
        self, src, tag, Deadline(*limit),
        [&](const TensorHeader&, std::exception_ptr&) { return Target{nb::borrow(tensor), view}; },
        [](const nb::object&, int source) { return nb::object(nb::int_(source)); });
}

// `fd.recv`, into the tensor that `make(dtype, shape)` returns, with the dtype as a number; it returns None for a
// tensor that must not be received. Returns the tensor and the rank that sent it on success.
nb::object receive_new(const TensorP2P& self, nb::handle src, nb::handle tag, const Deadline& deadline, nb::handle make,
                       const ShouldStop& should_stop = {}) {
    const auto target_of = [&](const TensorHeader& header, std::exception_ptr& interruption) {
        const std::array<std::int64_t, max_dims> sizes = header.shape;
        nb::object shape = nb::steal(PyTuple_New(header.num_dims));
        for (std::size_t dim = 0; dim < header.num_dims; ++dim)
            PyTuple_SET_ITEM(shape.ptr(), static_cast<Py_ssize_t>(dim), PyLong_FromLongLong(sizes[dim]));
        try {
            nb::object made = make(static_cast<int>(header.dtype), shape);
            const auto view = view_tensor(made.ptr());
            return Target{std::move(made), view};
        } catch (const nb::python_error&) {
            interruption = std::current_exception();
            return Target{};
        }
    };
    return receive(
        self, src, tag, deadline, target_of,
        [](const nb::object& tensor, int source) { return nb::object(nb::make_tuple(tensor, source)); }, should_stop);
}

// Cancels a send of an exchange that is left before its end.
class ExchangedSend {
public:
    ExchangedSend(P2PEngine& engine, const std::byte* data, std::size_t size, int dst, const Tag& tag,
                  const Deadline& deadline)
        : engine_(engine), send_(data, size, dst, tag) {
        send_.prefers_offer = is_offered(engine, size, dst, deadline);
    }
    ExchangedSend(const ExchangedSend&) = delete;
    ExchangedSend& operator=(const ExchangedSend&) = delete;
    ~ExchangedSend() { cancel(); }

    // False, without effect, if its peer or the group has ended. Without the GIL.
    bool start() {
        has_started_ = engine_.start_if_open(send_);
        return has_started_;
    }
    void cancel() {
        if (!has_started_ || send_.has_ended.load()) return;
        const nb::gil_scoped_release released;
        engine_.cancel(send_);
    }
    std::exception_ptr await(const TensorP2P& self, const Deadline& deadline) {
        if (!has_started_) return nullptr;
        if (auto interruption = await_taken(self, send_)) return interruption;
        return await_end(self, send_, deadline);
    }
    [[nodiscard]] bool is_done() const { return has_ended() && send_.outcome == Outcome::done; }
    // Whether it has ended in another way: it will not be sent.
    [[nodiscard]] bool has_failed() const { return has_ended() && send_.outcome != Outcome::done; }

private:
    [[nodiscard]] bool has_ended() const { return has_started_ && send_.has_ended.load(); }

    P2PEngine& engine_;
    Send send_;
    bool has_started_ = false;
};

// `fd.sendrecv`: sends a tensor while it receives one, as `send` and `receive_new` do. What it returns when it is not
// done has the progress of both.
nb::object exchange(const TensorP2P& self, nb::handle tensor, nb::handle dst, nb::handle src, nb::handle tag,
                    nb::handle timeout, nb::handle payload_ids, nb::handle make) {
    const auto limit = seconds_of(timeout);
    Outgoing outgoing;
    if (!limit || !self.peer(src, true) || !outgoing.write(self, tensor, dst, tag, payload_ids)) return not_started();
    const Deadline deadline(*limit);
    ExchangedSend first(*self.engine, outgoing.first.bytes, outgoing.first_size, outgoing.dst_rank, outgoing.tag,
                        deadline);
    ExchangedSend payload(*self.engine, outgoing.view.data, outgoing.size, outgoing.dst_rank,
                          self.tag(payload_channel, outgoing.payload_number), deadline);
    bool has_started = false;
    {
        const nb::gil_scoped_release released;
        has_started = first.start() && (outgoing.is_inline() || payload.start());
    }
    const auto is_sent = [&] { return first.is_done() && (outgoing.is_inline() || payload.is_done()); };
    // A send that fails ends the wait for the other tensor: the general path raises the reason.
    const auto has_failed = [&] { return first.has_failed() || payload.has_failed(); };
    const nb::object received =
        has_started ? receive_new(self, src, tag, deadline, make, has_failed) : unfinished(deadline, nullptr);
    const bool is_received = PyTuple_Check(received.ptr());
    std::exception_ptr interruption;
    if (is_received) {
        interruption = first.await(self, deadline);
        if (!interruption) interruption = payload.await(self, deadline);
        if (is_sent() && !interruption) return received;
    }
    first.cancel();
    payload.cancel();
    self.engine->dispatch_events();
    Unfinished progress;
    if (is_received) {
        progress.received = received;
    } else {
        if (!nb::isinstance<Unfinished>(received)) return received;
        progress = nb::cast<Unfinished>(received);
    }
    progress.is_sent = is_sent();
    if (first.is_done() && !progress.is_sent) progress.payload_id = outgoing.payload_id;
    return is_received ? unfinished(deadline, interruption, std::move(progress)) : nb::cast(std::move(progress));
}

}  // namespace

void bind_tensor_p2p(nb::module_& m) {
    m.attr("INLINE_LIMIT") = inline_limit;
    nb::class_<Unfinished>(m, "Unfinished",
                           "The progress of an incomplete call of `TensorP2P`; the general path goes on from there.")
        .def_ro("seconds", &Unfinished::seconds, "The elapsed time.")
        .def_ro("payload_id", &Unfinished::payload_id, nb::arg().none(),
                "Of a send: the payload's id, if the header was sent and the payload was not; else None.")
        .def_ro("is_sent", &Unfinished::is_sent, "Of an exchange: whether all was sent.")
        .def_ro("received", &Unfinished::received, nb::arg().none(),
                "Of an exchange: the result of its receive, if that is done; else None.")
        .def_ro("message", &Unfinished::message, nb::arg().none(),
                "Of a receive: the tensor's first message, if it has arrived and is not used up; else None.")
        .def_ro("source", &Unfinished::source, "The rank that sent the message.")
        .def_ro("interruption", &Unfinished::interruption, nb::arg().none(), "The exception to raise, or None.");

    nb::class_<TensorP2P>(m, "TensorP2P", "The fast path of a group's point-to-point tensors.",
                          nb::is_weak_referenceable())
        .def(nb::init<std::shared_ptr<P2PEngine>, std::uint64_t, int, std::vector<int>>(), "engine"_a, "group"_a,
             "rank"_a, "ranks"_a)
        .def(
            "close", [](TensorP2P& self) { self.is_open.store(false); },
            "Make all further calls use the general path; the caller then ends the active ones.")
        .def("can_exchange", &can_exchange, "tensor"_a.none(), "src"_a.none(),
             "Whether a `send` of the tensor followed by a receive from `src` cannot deadlock.")
        .def("exchange", &exchange, "tensor"_a.none(), "dst"_a.none(), "src"_a.none(), "tag"_a.none(),
             "timeout"_a.none(), "payload_ids"_a, "make"_a,
             "The tensor received while another is sent, and the rank that sent it, or an `Unfinished`.")
        .def("send", &send, "tensor"_a.none(), "dst"_a.none(), "tag"_a.none(), "timeout"_a.none(), "payload_ids"_a,
             "None if it was sent, else an `Unfinished`.")
        .def("receive_into", &receive_into, "tensor"_a.none(), "src"_a.none(), "tag"_a.none(), "timeout"_a.none(),
             "The rank that sent it, or an `Unfinished`.")
        .def(
            "receive_new",
            [](const TensorP2P& self, nb::handle src, nb::handle tag, nb::handle timeout, nb::handle make) {
                const auto limit = seconds_of(timeout);
                return limit ? receive_new(self, src, tag, Deadline(*limit), make) : not_started();
            },
            "src"_a.none(), "tag"_a.none(), "timeout"_a.none(), "make"_a,
            "The tensor and the rank that sent it, or an `Unfinished`.");
}

}  // namespace ferrodist
