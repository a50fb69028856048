#include "bindings/p2p.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings/signal_check.h"
#include "bindings/gil_release.h"
#include "bindings/listener.h"
#include "bindings/p2p_arguments.h"
#include "bindings/fast_p2p.h"
#include "bindings/tensor_p2p.h"
#include "bindings/completion_listener.h"
#include "engine/p2p_engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist {

namespace {

// A Python object's buffer, held for the lifetime of this object.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }

    // False if it is not contiguous, or read-only where it is to be written; no Python error is set.
    bool open(nb::handle object, bool is_written) {
        if (PyObject_GetBuffer(object.ptr(), &view_, is_written ? PyBUF_WRITABLE : PyBUF_SIMPLE) == 0) return true;
        PyErr_Clear();
        return false;
    }
    [[nodiscard]] std::byte* data() const noexcept { return static_cast<std::byte*>(view_.buf); }
    [[nodiscard]] std::size_t size() const noexcept { return static_cast<std::size_t>(view_.len); }

private:
    Py_buffer view_{};
};

// A transfer started by Python. It keeps itself alive until it has ended and its end has been reported.
struct Request final : CompletionListener {
    explicit Request(std::shared_ptr<P2PEngine> its_engine) : engine(std::move(its_engine)) {}

    std::shared_ptr<P2PEngine> engine;
    Buffer buffer;
    std::optional<Send> send;
    std::optional<Receive> receive;
    std::vector<nb::object> callbacks;
    PyObject* self = nullptr;

    [[nodiscard]] Transfer& transfer() noexcept {
        return send ? static_cast<Transfer&>(*send) : static_cast<Transfer&>(*receive);
    }
    [[nodiscard]] bool has_ended() noexcept { return transfer().has_ended.load(); }

    void on_end(Transfer& /*ended*/) override {}
    void flush() override;
};

void call(nb::handle function, nb::args arguments = nb::borrow<nb::args>(nb::make_tuple())) {
    try {
        function(*arguments);
    } catch (nb::python_error& error) {
        raise_later(error, function);
    }
}

void Request::flush() {
    for (const nb::object& callback : std::exchange(callbacks, {})) call(callback);
    Py_DECREF(self);
}

// Dispatches the engine's events to Python. `on_event(kind, rank, group, size)` is called for protocol violations and
// lost ranks.
void dispatch_events(P2PEngine& engine, nb::handle on_event) {
    const SignalCheck::Working working;
    const EngineEvents events = engine.take_events();
    for (Transfer* ended = events.first_ended; ended != nullptr;) {
        CompletionListener& listener = *static_cast<CompletionListener*>(ended->owner);
        Transfer& transfer = *std::exchange(ended, ended->next_ended);
        listener.on_end(transfer);
        if (ended == nullptr || ended->owner != &listener) listener.flush();
    }
    for (const PeerEvent& event : events.peer_events) {
        const std::uint64_t group = event.message ? event.message->tag.group : 0;
        const std::size_t size = event.message ? event.message->buffered_size() : 0;
        call(on_event, nb::borrow<nb::args>(nb::make_tuple(static_cast<int>(event.kind), event.rank, group, size)));
    }
}

// Takes ownership of the sockets, even if it throws.
std::shared_ptr<P2PEngine> make_engine(const P2PEngine::Settings& settings, int memory, int num_local,
                                       const std::vector<int>& local_indexes, const std::vector<int>& sockets,
                                       nb::object on_event) {
    P2PEngine::Routes routes{.rings = nullptr, .local_indexes = local_indexes, .sockets = {}};
    for (const int number : sockets) routes.sockets.emplace_back(number);
    const shm::RingLayout layout = shm::RingLayout::for_ranks(num_local);
    {
        const GilRelease released;
        shm::take_pages(memory, layout.part_of(local_indexes[static_cast<std::size_t>(settings.rank)]));
    }
    routes.rings =
        std::make_shared<const shm::Rings>(std::make_shared<const shm::Mapping>(memory, layout.size_bytes()), layout);
    // Freed with the last reference, by Python.
    return std::make_shared<P2PEngine>(settings, std::move(routes),
                                       [on_event = std::move(on_event)](P2PEngine& engine) {
                                           const nb::gil_scoped_acquire guard;
                                           dispatch_events(engine, on_event);
                                       });
}

// The outcome of a transfer, for Python: `NativeP2P` makes errors of it.
nb::object outcome_tuple(const Transfer& transfer, std::size_t message_size) {
    return nb::make_tuple(static_cast<int>(transfer.outcome), transfer.peer, message_size, transfer.reason);
}

nb::object fast_send(P2PEngine& self, nb::handle data, nb::handle dst, nb::handle tag, nb::handle timeout) {
    if (!self.is_open()) return nb::none();
    const auto rank = peer_in(dst, self.settings().rank, self.num_ranks(), false);
    const auto number = plain_uint(tag);
    const auto limit = seconds_of(timeout);
    Buffer buffer;
    if (!rank || !number || !limit || !buffer.open(data, false)) return nb::none();
    const Tag whole{0, *number};
    if (buffer.size() <= small_bytes && self.try_send(buffer.data(), buffer.size(), *rank, whole))
        return nb::borrow(Py_True);
    Send send(buffer.data(), buffer.size(), *rank, whole);
    bool has_started = false;
    {
        const nb::gil_scoped_release released;
        has_started = self.start_if_open(send);
    }
    if (!has_started) return nb::none();
    await(self, send, *limit);
    self.dispatch_events();
    return send.outcome == Outcome::done ? nb::borrow(Py_True) : outcome_tuple(send, 0);
}

nb::object fast_recv(P2PEngine& self, nb::handle into, nb::handle src, nb::handle tag, nb::handle timeout) {
    if (!self.is_open()) return nb::none();
    const auto rank = peer_in(src, self.settings().rank, self.num_ranks(), true);
    const auto number = plain_uint(tag);
    const auto limit = seconds_of(timeout);
    Buffer buffer;
    if (!rank || !number || !limit || !buffer.open(into, true)) return nb::none();
    Receive receive(buffer.data(), buffer.size(), *rank, Tag{0, *number});
    if (buffer.size() > small_bytes || !self.start_if_open(receive, false)) {
        const nb::gil_scoped_release released;
        if (!self.start_if_open(receive, true)) {
            return nb::object();  // made None by the caller, with the GIL
        }
    }
    if (!receive.has_ended.load()) await(self, receive, *limit);
    self.dispatch_events();
    if (receive.outcome == Outcome::done) return nb::steal(PyLong_FromLong(receive.peer));
    return outcome_tuple(receive, receive.message_size);
}

enum class Kind { send, receive, receive_shorter };

nb::object start(const std::shared_ptr<P2PEngine>& self, nb::handle data, int peer, std::uint64_t group,
                 std::uint64_t number, Kind kind) {
    const bool is_send = kind == Kind::send;
    auto* request = new Request(self);
    nb::object object = nb::cast(request, nb::rv_policy::take_ownership);
    if (!request->buffer.open(data, !is_send)) throw nb::type_error("no contiguous buffer");
    request->self = object.ptr();
    const Tag tag{group, number};
    if (is_send)
        request->send.emplace(request->buffer.data(), request->buffer.size(), peer, tag);
    else
        request->receive.emplace(request->buffer.data(), request->buffer.size(), peer, tag).accepts_shorter =
            kind == Kind::receive_shorter;
    request->transfer().owner = static_cast<CompletionListener*>(request);
    request->transfer().is_watched = true;
    Py_INCREF(request->self);
    {
        const nb::gil_scoped_release released;
        if (is_send)
            self->start(*request->send);
        else
            self->start(*request->receive);
    }
    self->dispatch_events();
    return object;
}

bool wait_for(Request& request, double timeout) {
    bool has_ended = request.has_ended();
    if (!has_ended) {
        const GilRelease released;
        has_ended = request.engine->wait(request.transfer(), timeout);
    }
    request.engine->dispatch_events();
    return has_ended;
}

bool cancel(Request& request) {
    const nb::gil_scoped_release released;
    return request.send ? request.engine->cancel(*request.send) : request.engine->cancel(*request.receive);
}

void add_callback(Request& request, nb::object callback) {
    if (request.has_ended()) {
        callback();
        return;
    }
    request.callbacks.push_back(std::move(callback));
    const nb::gil_scoped_release released;
    request.engine->watch_end(request.transfer());
}

}  // namespace

void bind_p2p(nb::module_& m) {
    m.def(
        "create_rings",
        [](int num_ranks) {
            const GilRelease released;
            const shm::RingLayout layout = shm::RingLayout::for_ranks(num_ranks);
            Descriptor memory = shm::create_memory("ferrodist-messages", layout.size_bytes());
            shm::take_pages(memory.get(), layout.common_part());
            shm::Rings(std::make_shared<const shm::Mapping>(memory.get(), layout.size_bytes()), layout).initialize();
            return memory.release();
        },
        "num_ranks"_a, "Create the rings of one host's ranks; returns a descriptor, which the caller closes.");

    nb::class_<Request>(m, "Request", "A started transfer.")
        .def_prop_ro("peer", [](Request& self) { return self.transfer().peer; })
        .def_prop_ro("tag_number", [](Request& self) { return self.transfer().tag.number; })
        .def("done", &Request::has_ended)
        .def("wait", &wait_for, "timeout"_a, "Block until it has ended; False after `timeout` seconds.")
        .def("cancel", &cancel)
        .def("add_done_callback", &add_callback, "callback"_a)
        .def(
            "outcome",
            [](Request& self) { return outcome_tuple(self.transfer(), self.receive ? self.receive->message_size : 0); },
            "The outcome, the peer, the message's size, and the reason's id.");

    nb::class_<P2PEngine>(m, "P2PEngine", "The point-to-point engine of a rank.")
        .def(nb::new_([](int rank, std::size_t eager_bytes, std::size_t max_unexpected_bytes, bool is_oversubscribed,
                         std::uint32_t spin_micros, int memory, int num_local, const std::vector<int>& local_indexes,
                         const std::vector<int>& sockets, nb::object on_event) {
                 const P2PEngine::Settings settings{.rank = rank,
                                                    .eager_bytes = eager_bytes,
                                                    .max_unexpected_bytes = max_unexpected_bytes,
                                                    .is_oversubscribed = is_oversubscribed,
                                                    .spin_micros = spin_micros};
                 return make_engine(settings, memory, num_local, local_indexes, sockets, std::move(on_event));
             }),
             "rank"_a, "eager_bytes"_a, "max_unexpected_bytes"_a, "is_oversubscribed"_a, "spin_micros"_a, "memory"_a,
             "num_local"_a, "local_indexes"_a, "sockets"_a, "on_event"_a)
        .def("fast_send", &fast_send, "data"_a.none(), "dst"_a.none(), "tag"_a.none(), "timeout"_a.none(),
             "True if it was sent, None if the general path must take the call, else the outcome.")
        .def(
            "fast_recv",
            [](P2PEngine& self, nb::handle into, nb::handle src, nb::handle tag, nb::handle timeout) {
                nb::object result = fast_recv(self, into, src, tag, timeout);
                return result.is_valid() ? result : nb::object(nb::none());
            },
            "into"_a.none(), "src"_a.none(), "tag"_a.none(), "timeout"_a.none(),
            "Like `fast_send`; returns the sender's rank on success.")
        .def(
            "try_send",
            [](P2PEngine& self, const nb::bytes& data, int dst, std::uint64_t group, std::uint64_t number) {
                return self.is_open() && self.try_send(reinterpret_cast<const std::byte*>(data.c_str()), data.size(),
                                                       dst, {group, number});
            },
            "data"_a, "dst"_a, "group"_a, "number"_a,
            "Try to send a small message at once; returns whether it was sent.")
        .def(
            "start_send",
            [](const std::shared_ptr<P2PEngine>& self, nb::handle data, int dst, std::uint64_t group,
               std::uint64_t number) { return start(self, data, dst, group, number, Kind::send); },
            "data"_a, "dst"_a, "group"_a, "number"_a)
        .def(
            "start_recv",
            [](const std::shared_ptr<P2PEngine>& self, nb::handle into, int src, std::uint64_t group,
               std::uint64_t number, bool accepts_shorter) {
                return start(self, into, src, group, number, accepts_shorter ? Kind::receive_shorter : Kind::receive);
            },
            "into"_a, "src"_a, "group"_a, "number"_a, "accepts_shorter"_a = false)
        .def(
            "end_unmatched",
            [](P2PEngine& self, Request& request, std::size_t reason) {
                const nb::gil_scoped_release released;
                return self.end_unmatched(*request.receive, reason);
            },
            "request"_a, "reason"_a)
        .def(
            "end_send",
            [](P2PEngine& self, Request& request, std::size_t reason) {
                const nb::gil_scoped_release released;
                return self.end(*request.send, reason);
            },
            "request"_a, "reason"_a)
        .def(
            "active_transfers",
            [](P2PEngine& self) {
                std::vector<std::tuple<bool, std::uint64_t, int>> found;
                const nb::gil_scoped_release released;
                for (const TransferKey& key : self.active_transfers())
                    found.emplace_back(key.is_send, key.group, key.peer);
                return found;
            },
            "The active transfers: whether it is a send, its group, and its peer as requested.")
        .def(
            "fail",
            [](P2PEngine& self, bool is_send, std::uint64_t group, int peer, std::size_t reason) {
                self.fail({is_send, group, peer}, reason);
            },
            "is_send"_a, "group"_a, "peer"_a, "reason"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("open_group", &P2PEngine::open_group, "group"_a, "members"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("end_group", &P2PEngine::end_group, "group"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("forget_group", &P2PEngine::forget_group, "group"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("lose", &P2PEngine::lose, "rank"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("num_frames_to", &P2PEngine::num_frames_to, "rank"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("await_frames", &P2PEngine::await_frames, "rank"_a, "count"_a, "timeout"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("fullest_source", &P2PEngine::fullest_source, "newest"_a, "buffered_size"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("close", &P2PEngine::close, nb::call_guard<nb::gil_scoped_release>())
        .def("drain", &P2PEngine::drain, "timeout"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("abandon", [](const std::shared_ptr<P2PEngine>& self) {
            self->abandon();
            new std::shared_ptr<P2PEngine>(self);  // its lock and its threads are the parent's: never destroyed
        });

    bind_listener(m);
    bind_tensor_p2p(m);
    bind_fast_p2p(m);
}

}  // namespace ferrodist
