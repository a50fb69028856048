#include "bindings/messages.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>

#include "bindings/released.h"
#include "bindings/message_arguments.h"
#include "bindings/tensor_messages.h"
#include "engine/messenger.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist {

namespace {

// Python's view of a buffer, for as long as this lives.
class Buffer {
public:
    Buffer() = default;
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() { PyBuffer_Release(&view_); }

    // False when it is not contiguous, or is read-only and may not be; no Python error is set.
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

// A transfer that Python started. It keeps itself until it has ended and its end has been told.
struct Request {
    std::shared_ptr<Messenger> messenger;
    Buffer buffer;
    std::optional<Send> send;
    std::optional<Receive> receive;
    std::vector<nb::object> callbacks;
    PyObject* self = nullptr;

    [[nodiscard]] Transfer& transfer() noexcept {
        return send ? static_cast<Transfer&>(*send) : static_cast<Transfer&>(*receive);
    }
    [[nodiscard]] bool has_ended() noexcept { return transfer().has_ended.load(); }
};

// A message of a rank on another host, as `backends/tcp` sees it.
struct LinkedMessage {
    std::shared_ptr<Message> message;
    nb::object tag;
    nb::object grant;  // called once a receive is there for it; None for what comes at once
    bool is_granted = false;

    LinkedMessage(int source, nb::object its_tag, std::uint64_t group, std::uint64_t number, std::size_t size)
        : message(std::make_shared<Message>(source, Tag{group, number}, size, false)),
          tag(std::move(its_tag)),
          grant(nb::none()) {
        message->is_linked = true;
        message->owner = this;
    }
    LinkedMessage(const LinkedMessage&) = delete;
    LinkedMessage& operator=(const LinkedMessage&) = delete;
    ~LinkedMessage() { message->owner = nullptr; }  // under the interpreter's lock, as all that reads it is
};

void call(nb::handle function, nb::args arguments = nb::borrow<nb::args>(nb::make_tuple())) {
    try {
        function(*arguments);
    } catch (nb::python_error& error) {
        error.discard_as_unraisable(function);
    }
}

// Does what concerns Python of what has happened in the messenger. `tell(is_full, rank, tag, size)` hears of what ranks of
// this host did wrong.
void do_work(Messenger& messenger, nb::handle tell) {
    const Work work = messenger.take_work();
    for (Transfer* ended = work.first_ended; ended != nullptr;) {
        auto& request = *static_cast<Request*>(ended->owner);
        ended = ended->next_ended;
        for (const nb::object& callback : std::exchange(request.callbacks, {})) call(callback);
        Py_DECREF(request.self);
    }
    for (const News& news : work.news) {
        const auto* linked = news.message ? static_cast<LinkedMessage*>(news.message->owner) : nullptr;
        if (news.kind == News::Kind::grant) {
            if (linked != nullptr) call(nb::object(linked->grant));
        } else {
            const Tag tag = news.message ? news.message->tag : Tag{};
            call(tell, nb::borrow<nb::args>(nb::make_tuple(news.kind == News::Kind::full, news.rank, tag.group,
                                                           news.message ? news.message->size : 0)));
        }
    }
}

std::shared_ptr<Messenger> make_messenger(int rank, int num_ranks, std::size_t eager_bytes,
                                          std::size_t max_unasked_bytes, nb::object tell) {
    const Messenger::Settings settings{.rank = rank,
                                       .num_ranks = num_ranks,
                                       .eager_bytes = eager_bytes,
                                       .max_unasked_bytes = max_unasked_bytes};
    // Both are freed by whoever drops the last reference, which is Python.
    auto self = std::make_shared<Messenger*>(nullptr);
    auto messenger = std::make_shared<Messenger>(settings, [self, tell = std::move(tell)] {
        const nb::gil_scoped_acquire held;
        do_work(**self, tell);
    });
    *self = messenger.get();
    return messenger;
}

// How it has ended, for Python: see `NativeBackend`.
nb::object ending(const Transfer& transfer, std::size_t size_sent) {
    return nb::make_tuple(static_cast<int>(transfer.outcome), transfer.peer, size_sent, transfer.reason);
}

nb::object quick_send(Messenger& self, nb::handle data, nb::handle dst, nb::handle tag, nb::handle timeout) {
    if (!self.is_open()) return nb::none();
    const auto rank = peer_in(dst, self.settings().rank, self.settings().num_ranks, false);
    const auto number = small_number(tag);
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
    self.do_work();
    return send.outcome == Outcome::done ? nb::borrow(Py_True) : ending(send, 0);
}

nb::object quick_recv(Messenger& self, nb::handle into, nb::handle src, nb::handle tag, nb::handle timeout) {
    if (!self.is_open()) return nb::none();
    const auto rank = peer_in(src, self.settings().rank, self.settings().num_ranks, true);
    const auto number = small_number(tag);
    const auto limit = seconds_of(timeout);
    Buffer buffer;
    if (!rank || !number || !limit || !buffer.open(into, true)) return nb::none();
    Receive receive(buffer.data(), buffer.size(), *rank, Tag{0, *number});
    if (buffer.size() > small_bytes || !self.start_if_open(receive, false)) {
        const nb::gil_scoped_release released;
        if (!self.start_if_open(receive, true)) {
            return nb::object();  // made None below, with the interpreter
        }
    }
    if (!receive.has_ended.load()) await(self, receive, *limit);
    self.do_work();
    if (receive.outcome == Outcome::done) return nb::steal(PyLong_FromLong(receive.peer));
    return ending(receive, receive.size_sent);
}

nb::object start(const std::shared_ptr<Messenger>& self, nb::handle data, int peer, std::uint64_t group,
                 std::uint64_t number, bool is_send) {
    auto* request = new Request{.messenger = self, .buffer = {}, .send = {}, .receive = {}, .callbacks = {}};
    nb::object object = nb::cast(request, nb::rv_policy::take_ownership);
    if (!request->buffer.open(data, !is_send)) throw nb::type_error("no contiguous buffer");
    request->self = object.ptr();
    const Tag tag{group, number};
    if (is_send)
        request->send.emplace(request->buffer.data(), request->buffer.size(), peer, tag);
    else
        request->receive.emplace(request->buffer.data(), request->buffer.size(), peer, tag);
    request->transfer().owner = request;
    request->transfer().is_watched = true;
    Py_INCREF(request->self);
    {
        const nb::gil_scoped_release released;
        if (is_send)
            self->start(*request->send);
        else
            self->start(*request->receive);
    }
    self->do_work();
    return object;
}

bool wait_for(Request& request, double timeout) {
    bool has_ended = request.has_ended();
    if (!has_ended) {
        const Released released;
        has_ended = request.messenger->wait(request.transfer(), timeout);
    }
    request.messenger->do_work();
    return has_ended;
}

bool cancel(Request& request) {
    const nb::gil_scoped_release released;
    return request.send ? request.messenger->cancel(*request.send) : request.messenger->cancel(*request.receive);
}

void add_callback(Request& request, nb::object callback) {
    if (request.has_ended()) {
        callback();
        return;
    }
    request.callbacks.push_back(std::move(callback));
    const nb::gil_scoped_release released;
    request.messenger->listen(request.transfer());
}

}  // namespace

void bind_messages(nb::module_& m) {
    m.def(
        "create_rings",
        [](int num_ranks) {
            const shm::RingLayout layout = shm::RingLayout::of(num_ranks);
            const int descriptor = shm::create_memory("ferrodist-messages", layout.size_bytes());
            shm::Rings(std::make_shared<const shm::Mapping>(descriptor, layout.size_bytes()), layout).initialize();
            return descriptor;
        },
        "num_ranks"_a,
        "Make the memory through which the ranks of one host send messages; returns a descriptor, the caller's to close.");

    nb::class_<LinkedMessage>(m, "LinkedMessage", "A message from a rank of another host.")
        .def(nb::init<int, nb::object, std::uint64_t, std::uint64_t, std::size_t>(), "source"_a, "tag"_a, "group"_a,
             "number"_a, "size_bytes"_a)
        .def_ro("tag", &LinkedMessage::tag)
        .def_rw("grant", &LinkedMessage::grant, nb::arg().none())
        .def_rw("granted", &LinkedMessage::is_granted)
        .def_prop_ro("source", [](const LinkedMessage& self) { return self.message->source; })
        .def_prop_ro("size_bytes", [](const LinkedMessage& self) { return self.message->size; })
        .def_prop_ro("num_received", [](const LinkedMessage& self) { return self.message->num_received; });

    nb::class_<Request>(m, "Request", "A transfer that was started.")
        .def_prop_ro("peer", [](Request& self) { return self.transfer().peer; })
        .def_prop_ro("tag_number", [](Request& self) { return self.transfer().tag.number; })
        .def("done", &Request::has_ended)
        .def("wait", &wait_for, "timeout"_a, "False when so many seconds have passed before its end.")
        .def("cancel", &cancel)
        .def("add_done_callback", &add_callback, "callback"_a)
        .def(
            "ending",
            [](Request& self) { return ending(self.transfer(), self.receive ? self.receive->size_sent : 0); },
            "Outcome, peer, size of the message, and the number of the reason.");

    nb::class_<Messenger>(m, "Messenger", "A rank's messages.")
        .def(nb::new_(&make_messenger), "rank"_a, "num_ranks"_a, "eager_bytes"_a, "max_unasked_bytes"_a, "tell"_a)
        .def(
            "attach",
            [](Messenger& self, int descriptor, int num_local, const std::vector<int>& local_indexes, bool is_crowded,
               std::uint32_t spin_micros) {
                const shm::RingLayout layout = shm::RingLayout::of(num_local);
                auto memory = std::make_shared<const shm::Mapping>(descriptor, layout.size_bytes());
                const nb::gil_scoped_release released;
                self.attach(std::make_shared<const shm::Rings>(std::move(memory), layout), local_indexes, is_crowded,
                            spin_micros);
            },
            "descriptor"_a, "num_local"_a, "local_indexes"_a, "is_crowded"_a, "spin_micros"_a)
        .def("quick_send", &quick_send, "data"_a.none(), "dst"_a.none(), "tag"_a.none(), "timeout"_a.none(),
             "True when it has been sent, None when the long way must take the call, else how it has ended.")
        .def(
            "quick_recv",
            [](Messenger& self, nb::handle into, nb::handle src, nb::handle tag, nb::handle timeout) {
                nb::object result = quick_recv(self, into, src, tag, timeout);
                return result.is_valid() ? result : nb::object(nb::none());
            },
            "into"_a.none(), "src"_a.none(), "tag"_a.none(), "timeout"_a.none(), "As `quick_send`; the rank that sent it.")
        .def(
            "start_send",
            [](const std::shared_ptr<Messenger>& self, nb::handle data, int dst, std::uint64_t group,
               std::uint64_t number) { return start(self, data, dst, group, number, true); },
            "data"_a, "dst"_a, "group"_a, "number"_a)
        .def(
            "start_recv",
            [](const std::shared_ptr<Messenger>& self, nb::handle into, int src, std::uint64_t group,
               std::uint64_t number) { return start(self, into, src, group, number, false); },
            "into"_a, "src"_a, "group"_a, "number"_a)
        .def(
            "end_unmatched",
            [](Messenger& self, Request& request, std::size_t reason) {
                const nb::gil_scoped_release released;
                return self.end_unmatched(*request.receive, reason);
            },
            "request"_a, "reason"_a)
        .def(
            "end_send",
            [](Messenger& self, Request& request, std::size_t reason) {
                const nb::gil_scoped_release released;
                return self.end(*request.send, reason);
            },
            "request"_a, "reason"_a)
        .def(
            "arrive",
            [](Messenger& self, LinkedMessage& linked) {
                linked.message->is_offered = !linked.grant.is_none();
                const nb::gil_scoped_release released;
                return self.arrive(linked.message);
            },
            "message"_a)
        .def(
            "begin_write",
            [](Messenger& self, LinkedMessage& linked, std::size_t start, std::size_t stop) -> nb::object {
                std::byte* target = nullptr;
                {
                    const nb::gil_scoped_release released;
                    target = self.begin_write(*linked.message, start);
                }
                if (target == nullptr) return nb::none();
                return nb::steal<nb::object>(PyMemoryView_FromMemory(
                    reinterpret_cast<char*>(target), static_cast<Py_ssize_t>(stop - start), PyBUF_WRITE));
            },
            "message"_a, "start"_a, "stop"_a, "Where these bytes go, until `end_write`; None when nobody wants them.")
        .def(
            "end_write",
            [](Messenger& self, LinkedMessage& linked, std::size_t count) {
                const nb::gil_scoped_release released;
                self.end_write(linked.message, count);
            },
            "message"_a, "count"_a)
        .def(
            "withdraw",
            [](Messenger& self, LinkedMessage& linked) {
                const nb::gil_scoped_release released;
                self.withdraw(*linked.message);
            },
            "message"_a)
        .def(
            "parties",
            [](Messenger& self) {
                std::vector<std::tuple<bool, std::uint64_t, int>> found;
                const nb::gil_scoped_release released;
                for (const Party& party : self.parties()) found.emplace_back(party.is_send, party.group, party.peer);
                return found;
            },
            "What is under way: whether it is a send, its group, and its peer as asked for.")
        .def(
            "fail",
            [](Messenger& self, bool is_send, std::uint64_t group, int peer, std::size_t reason) {
                self.fail({is_send, group, peer}, reason);
            },
            "is_send"_a, "group"_a, "peer"_a, "reason"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("open_group", &Messenger::open_group, "group"_a, "members"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("end_group", &Messenger::end_group, "group"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("lose", &Messenger::lose, "rank"_a, nb::call_guard<nb::gil_scoped_release>())
        .def(
            "waiting_messages",
            [](Messenger& self) {
                std::vector<std::tuple<std::uint64_t, int, std::uint64_t, std::uint64_t>> found;
                const nb::gil_scoped_release released;
                for (const auto& each : self.waiting_messages())
                    found.emplace_back(each.number, each.source, each.tag.group, each.tag.number);
                return found;
            })
        .def("drop", &Messenger::drop, "number"_a, nb::call_guard<nb::gil_scoped_release>())
        .def("fullest_source", &Messenger::fullest_source, "newest"_a, "size_kept"_a,
             nb::call_guard<nb::gil_scoped_release>())
        .def("unasked_bytes", &Messenger::unasked_bytes, nb::call_guard<nb::gil_scoped_release>())
        .def("close", &Messenger::close, nb::call_guard<nb::gil_scoped_release>())
        .def("abandon", [](const std::shared_ptr<Messenger>& self) {
            self->abandon();
            new std::shared_ptr<Messenger>(self);  // its lock and its thread are the parent's: never destroyed
        });

    bind_tensor_messages(m);
}

}  // namespace ferrodist
