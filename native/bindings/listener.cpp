#include "bindings/listener.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/tuple.h>

#include <deque>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>

#include "bindings/signal_check.h"
#include "bindings/gil_release.h"
#include "bindings/completion_listener.h"
#include "engine/p2p_engine.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist {

namespace {

// Messages of one size that keep coming from a rank, with one tag: receives that are asked for ahead, and again when they
// have ended. All of it is used with the interpreter.
//
// [Note: order]
// The places are asked for in their order, so messages come to them in it; but of two threads that tell of ends, the one
// that has the later ones may come first. So what has ended waits until those before it have been told of. And one thread
// at a time calls Python: what others bring meanwhile it finds when it comes back.
class Listener final : public CompletionListener {
public:
    Listener(std::shared_ptr<P2PEngine> messenger, std::size_t size, int source, const Tag& tag, int num_places,
             nb::object heard, nb::object ended)
        : messenger_(std::move(messenger)), size_(size), heard_(std::move(heard)), ended_(std::move(ended)) {
        for (int i = 0; i < num_places; ++i) places_.emplace_back(size, source, tag);
    }

    // `self` is Python's object of it, which is kept for as long as something is asked for.
    void start(PyObject* self) {
        self_ = self;
        Py_INCREF(self_);
        for (Place& place : places_) ask(place);
        messenger_->listen(*places_.front().receive);
        messenger_->do_work();
    }

    // Ends what nothing has come for.
    void end(std::size_t reason) {
        for (Place& place : places_) {
            if (place.is_asked) messenger_->end_unmatched(*place.receive, reason);
        }
    }

    // Nothing is heard any more.
    void close() {
        is_closed_ = true;
        const nb::object heard = std::move(heard_);
        const nb::object ended = std::move(ended_);
        for (Place& place : places_) {
            if (place.is_asked) messenger_->cancel(*place.receive);
        }
    }

    void hear(Transfer& ended) override {
        for (Place& place : places_) {
            if (&*place.receive == &ended) place.is_told = true;
        }
        while (places_[next_].is_told) {
            Place& place = places_[next_];
            next_ = (next_ + 1) % places_.size();
            take(place);
        }
    }

    void act() override {
        if (is_acting_) return;
        is_acting_ = true;
        // The handler of an interruption may raise wherever Python runs, before a message is taken out of the list, too.
        for (int num_raised = 0; !is_closed_ && nb::len(messages_) != 0;) {
            nb::list batch = std::exchange(messages_, nb::list());
            if (call(nb::object(heard_), batch) || ++num_raised > most_raised) continue;
            for (const nb::handle newer : messages_) batch.append(newer);
            messages_ = std::move(batch);
        }
        if (!is_closed_ && ending_) call(std::move(ended_), nb::cast(*std::exchange(ending_, std::nullopt)));
        is_acting_ = false;
        if (num_asked_ == 0 && self_ != nullptr) Py_DECREF(std::exchange(self_, nullptr));
    }

private:
    struct Place {
        Place(std::size_t size, int its_source, const Tag& its_tag)
            : bytes(std::make_unique<std::byte[]>(size)), source(its_source), tag(its_tag) {}

        std::unique_ptr<std::byte[]> bytes;
        int source;
        Tag tag;
        bool is_asked = false;
        bool is_told = false;
        std::optional<Receive> receive;
    };

    static constexpr int most_raised = 3;

    static bool call(const nb::object& function, const nb::object& argument) {
        if (!function.is_valid()) return true;
        try {
            function(argument);
            return true;
        } catch (nb::python_error& error) {
            raise_later(error, function);
            return false;
        }
    }

    void ask(Place& place) {
        place.is_asked = true;
        ++num_asked_;
        Receive& receive = place.receive.emplace(place.bytes.get(), size_, place.source, place.tag);
        receive.owner = static_cast<CompletionListener*>(this);
        receive.is_watched = true;
        messenger_->start_heard(receive);
    }

    void take(Place& place) {
        place.is_asked = place.is_told = false;
        --num_asked_;
        const Receive& receive = *place.receive;
        if (receive.outcome == Outcome::done && !has_ended_) {
            messages_.append(nb::bytes(place.bytes.get(), size_));
            if (!is_closed_) ask(place);
        } else if (!has_ended_) {
            has_ended_ = true;
            ending_.emplace(static_cast<int>(receive.outcome), receive.peer, receive.size_sent, receive.reason);
        }
    }

    std::shared_ptr<P2PEngine> messenger_;
    std::size_t size_;
    nb::object heard_;
    nb::object ended_;
    std::deque<Place> places_;  // which stay where they are
    std::size_t next_ = 0;      // that is taken
    std::size_t num_asked_ = 0;
    nb::list messages_;
    std::optional<std::tuple<int, int, std::size_t, std::size_t>> ending_;
    bool has_ended_ = false;
    bool is_acting_ = false;
    bool is_closed_ = false;
    PyObject* self_ = nullptr;
};

// Something that a thread waits for while it moves messages.
struct Signal {
    std::shared_ptr<P2PEngine> messenger;
    Transfer transfer{any_source, Tag{}};

    void set() { messenger->signal(transfer); }

    bool wait(double timeout) {
        if (!transfer.has_ended.load()) {
            const GilRelease released;
            messenger->wait(transfer, timeout);
        }
        const bool was_set = transfer.has_ended.exchange(false);
        messenger->do_work();
        return was_set;
    }
};

}  // namespace

void bind_listener(nb::module_& m) {
    nb::class_<Listener>(m, "Listener", "Messages of one size that keep coming from a rank.")
        .def("end", &Listener::end, "reason"_a)
        .def("close", &Listener::close);
    m.def(
        "listen",
        [](std::shared_ptr<P2PEngine> messenger, std::size_t size, int source, std::uint64_t group, std::uint64_t number,
           int num_places, nb::object heard, nb::object ended) {
            auto* listener = new Listener(std::move(messenger), size, source, Tag{group, number}, num_places,
                                          std::move(heard), std::move(ended));
            nb::object object = nb::cast(listener, nb::rv_policy::take_ownership);
            listener->start(object.ptr());
            return object;
        },
        "messenger"_a, "size"_a, "source"_a, "group"_a, "number"_a, "num_places"_a, "heard"_a, "ended"_a);

    nb::class_<Signal>(m, "Signal", "Something that a thread waits for while it moves messages.")
        .def(nb::new_([](std::shared_ptr<P2PEngine> messenger) {
                 return new Signal{.messenger = std::move(messenger)};
             }),
             "messenger"_a)
        .def("set", &Signal::set)
        .def("wait", &Signal::wait, "timeout"_a, "Whether it has been set; it no longer is then.");
}

}  // namespace ferrodist
