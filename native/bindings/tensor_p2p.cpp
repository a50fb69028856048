// The messages of point-to-point tensors on the fast path; `collectives/tensor_protocol.py` describes the protocol.
#include "bindings/tensor_p2p.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <exception>
#include <functional>

#include "base/deadline.h"
#include "bindings/fast_call.h"
#include "bindings/tensor_messages.h"

namespace ferrodist {

using namespace nanobind::literals;

namespace {

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

// Whether a message is to be offered first, see `least_offered`.
bool may_prefer_offer(const P2PEngine& engine, std::size_t size, int peer) {
    return size >= least_offered && engine.shares_memory_with(peer);
}

// Waits for a message that was offered to be taken, but only a little if it can be sent at once. Returns the exception
// that interrupted it.
std::exception_ptr await_taken(P2PEngine& engine, Send& send, const Deadline& deadline) {
    if (!send.prefers_offer || send.size > engine.settings().eager_bytes || send.has_ended.load()) return nullptr;
    const double seconds = std::min(seconds_offered(send.size), seconds_left(deadline));
    try {
        const GilRelease released;
        if (!engine.wait(send, seconds)) engine.send_now(send);
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

nb::object tensor_and_source(const nb::object& tensor, int source) { return nb::make_tuple(tensor, source); }

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

// A message that is sent while others move. It is cancelled if it is left before its end.
class ExchangedSend {
public:
    ExchangedSend(P2PEngine& engine, const std::byte* data, std::size_t size, int dst, const Tag& tag)
        : engine_(engine), send_(data, size, dst, tag) {
        send_.prefers_offer = may_prefer_offer(engine, size, dst);
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
        const std::exception_ptr interruption = await_taken(engine_, send_, deadline);
        return interruption ? interruption : await_end(self, send_, deadline);
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

// The messages of a tensor that is sent while others are received. Cancels those that are left before their end.
class StartedSend {
public:
    StartedSend(const TensorP2P& self, const Outgoing& outgoing)
        : self_(self),
          outgoing_(outgoing),
          first_(*self.engine, outgoing.first.bytes, outgoing.first_size, outgoing.dst_rank, outgoing.tag),
          payload_(*self.engine, outgoing.view.data, outgoing.size, outgoing.dst_rank,
                   self.tag(payload_channel, outgoing.payload_number)) {}

    // False if its peer or the group has ended.
    bool start() {
        is_sent_at_once_ = outgoing_.is_inline() && self_.engine->try_send(outgoing_.first.bytes, outgoing_.first_size,
                                                                           outgoing_.dst_rank, outgoing_.tag);
        if (is_sent_at_once_) return true;
        const nb::gil_scoped_release released;
        return first_.start() && (outgoing_.is_inline() || payload_.start());
    }
    std::exception_ptr await(const Deadline& deadline) {
        const std::exception_ptr interruption = first_.await(self_, deadline);
        return interruption ? interruption : payload_.await(self_, deadline);
    }
    void cancel() {
        first_.cancel();
        payload_.cancel();
    }
    [[nodiscard]] bool is_done() const {
        return is_sent_at_once_ || (first_.is_done() && (outgoing_.is_inline() || payload_.is_done()));
    }
    [[nodiscard]] bool has_failed() const { return first_.has_failed() || payload_.has_failed(); }
    void describe(Unfinished& progress) const {
        progress.is_sent = is_done();
        if (first_.is_done() && !progress.is_sent) progress.payload_id = outgoing_.payload_id;
    }

private:
    const TensorP2P& self_;
    const Outgoing& outgoing_;
    bool is_sent_at_once_ = false;
    ExchangedSend first_;
    ExchangedSend payload_;
};

// A receive of a batch. Its transfers are cancelled where they are left before their end.
class BatchedReceive {
public:
    BatchedReceive(const TensorP2P& self, nb::object tensor, const TensorView& view, int src, std::uint64_t tag)
        : self_(self),
          tensor_(std::move(tensor)),
          view_(view),
          first_(message_.bytes, sizeof(message_), self.engine_rank(src), self.tag(tensor_channel, tag)) {
        first_.accepts_shorter = true;
    }
    BatchedReceive(const BatchedReceive&) = delete;
    BatchedReceive& operator=(const BatchedReceive&) = delete;
    ~BatchedReceive() { cancel(); }

    // False if its peer or the group has ended.
    bool start() {
        has_started_ = post(first_);
        return has_started_;
    }
    // Waits for the first message.
    std::exception_ptr await_first(const Deadline& deadline, const ShouldStop& should_stop) {
        return await_end(self_, first_, deadline, should_stop);
    }
    // Copies the elements, or starts to receive them; false if the first message isn't that of such a tensor.
    bool take_first() {
        const auto header = first_.outcome == Outcome::done ? message_.header(first_.message_size) : std::nullopt;
        if (!header || !matches(view_, *header)) return false;
        const std::size_t size = view_.count * size_of(view_.dtype);
        const std::size_t inline_size = first_.message_size - sizeof(TensorHeader);
        if (inline_size != 0 && inline_size != size) return false;
        if (inline_size == size) {
            if (size != 0) std::memcpy(view_.data, message_.elements(), size);
            is_done_ = true;
            return true;
        }
        payload_.emplace(view_.data, size, first_.peer, self_.tag(payload_channel, header->payload_id));
        if (post(*payload_)) return true;
        payload_.reset();
        return false;
    }
    // Waits for the elements.
    std::exception_ptr await_payload(const Deadline& deadline, const ShouldStop& should_stop) {
        return payload_ ? await_end(self_, *payload_, deadline, should_stop) : nullptr;
    }
    void cancel() {
        for (Receive* receive : {has_started_ ? &first_ : nullptr, payload_ ? &*payload_ : nullptr}) {
            if (receive == nullptr || receive->has_ended.load()) continue;
            const nb::gil_scoped_release released;
            self_.engine->cancel(*receive);
        }
    }
    [[nodiscard]] bool is_done() const { return is_done_ || (payload_ && has_ended(*payload_, Outcome::done)); }
    [[nodiscard]] bool has_failed() const {
        return (has_started_ && has_failed(first_)) || (payload_ && has_failed(*payload_));
    }
    [[nodiscard]] int source() const { return self_.group_rank(first_.peer); }
    [[nodiscard]] nb::handle tensor() const { return tensor_; }
    [[nodiscard]] bool has_elements() const { return view_.count != 0; }
    void describe(Unfinished& progress) const {
        if (is_done()) {
            progress.received = nb::int_(source());
        } else if (has_started_ && has_ended(first_, Outcome::done)) {
            progress.message = message_.to_python(first_.message_size);
            progress.source = source();
        }
    }

private:
    static bool has_ended(const Receive& receive, Outcome outcome) {
        return receive.has_ended.load() && receive.outcome == outcome;
    }
    static bool has_failed(const Receive& receive) {
        return receive.has_ended.load() && receive.outcome != Outcome::done;
    }
    bool post(Receive& receive) {
        if (receive.size <= sizeof(FirstMessage) && self_.engine->start_if_open(receive, false)) return true;
        const nb::gil_scoped_release released;
        return self_.engine->start_if_open(receive, true);
    }

    const TensorP2P& self_;
    nb::object tensor_;
    TensorView view_;
    bool has_started_ = false;
    bool is_done_ = false;
    FirstMessage message_;
    Receive first_;
    std::optional<Receive> payload_;
};

// An operation of a batch: one of the two.
struct BatchedSend {
    BatchedSend(const TensorP2P& self, nb::object its_tensor, std::unique_ptr<Outgoing> its_messages)
        : tensor(std::move(its_tensor)), messages(std::move(its_messages)), started(self, *messages) {}

    nb::object tensor;
    std::unique_ptr<Outgoing> messages;
    StartedSend started;
};
struct BatchedOperation {
    std::unique_ptr<BatchedSend> send;
    std::unique_ptr<BatchedReceive> receive;

    // Null for arguments that are not plain.
    static BatchedOperation of(const P2PCall& call, const P2POperation& operation) {
        BatchedOperation made;
        if (operation.is_send) {
            auto messages = std::make_unique_for_overwrite<Outgoing>();
            if (messages->write(call, operation.tensor, operation.rank, operation.tag))
                made.send = std::make_unique<BatchedSend>(call.p2p, operation.tensor, std::move(messages));
            return made;
        }
        const auto view = view_tensor(operation.tensor.ptr());
        const auto src = call.p2p.peer(operation.rank, true);
        const auto tag = plain_uint(operation.tag);
        if (view && view->shape.size() <= max_dims && src && tag && *tag >> tag_bits == 0)
            made.receive = std::make_unique<BatchedReceive>(call.p2p, operation.tensor, *view, *src, *tag);
        return made;
    }
    [[nodiscard]] bool has_failed() const { return send ? send->started.has_failed() : receive->has_failed(); }
    [[nodiscard]] bool is_done() const { return send ? send->started.is_done() : receive->is_done(); }
    void cancel() { send ? send->started.cancel() : receive->cancel(); }
    [[nodiscard]] nb::object progress() const {
        Unfinished found;
        send ? send->started.describe(found) : receive->describe(found);
        return nb::cast(std::move(found));
    }
};

// Starts and awaits all, until one fails or the call is interrupted. Receives are posted first, in their order: then
// messages need no room of their own. All headers are awaited before any payload: so payloads of several ranks come at
// the same time.
std::exception_ptr move_all(std::vector<BatchedOperation>& all, const Deadline& deadline) {
    for (auto& each : all)
        if (each.receive && !each.receive->start()) return nullptr;
    for (auto& each : all)
        if (each.send && !each.send->started.start()) return nullptr;
    const ShouldStop has_failed = [&] { return std::ranges::any_of(all, &BatchedOperation::has_failed); };
    std::exception_ptr interruption;
    for (auto& each : all) {
        if (!each.receive) continue;
        interruption = each.receive->await_first(deadline, has_failed);
        if (interruption || !each.receive->take_first()) return interruption;
    }
    for (auto& each : all) {
        interruption =
            each.send ? each.send->started.await(deadline) : each.receive->await_payload(deadline, has_failed);
        if (interruption || !each.is_done()) return interruption;
    }
    return nullptr;
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

nb::object run_batch(const P2PCall& call, const std::vector<P2POperation>& operations) {
    std::vector<BatchedOperation> all;
    for (const P2POperation& operation : operations) {
        all.push_back(BatchedOperation::of(call, operation));
        if (!all.back().send && !all.back().receive) return nb::none();
    }
    const Deadline deadline(call.limit);
    const std::exception_ptr interruption = move_all(all, deadline);
    for (auto& each : all) each.cancel();
    call.p2p.engine->dispatch_events();
    for (const auto& each : all)
        if (each.receive && each.is_done() && each.receive->has_elements() &&
            !mark_written(each.receive->tensor().ptr()))
            throw nb::python_error();
    nb::list results;
    const bool are_done = !interruption && std::ranges::all_of(all, &BatchedOperation::is_done);
    for (const auto& each : all) {
        if (!are_done)
            results.append(each.progress());
        else
            results.append(each.send ? each.send->messages->group_rank : each.receive->source());
    }
    if (are_done) return results;
    Unfinished progress;
    progress.operations = results;
    return unfinished(deadline, interruption, std::move(progress));
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
