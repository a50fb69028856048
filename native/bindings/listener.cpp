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

// Persistent receives: messages of one size from one rank with one tag, with receives posted ahead and posted again
// when they have ended. All members are accessed with the GIL.
//
// [Note: order]
// Slots are posted in their order, so messages arrive in them in that order; but of two threads that report ends, the
// one with the later ends may come first. So a slot that has ended waits until those before it have been reported. Only
// one thread at a time calls Python: it also delivers what others add meanwhile.
class Listener final : public CompletionListener {
public:
    Listener(std::shared_ptr<P2PEngine> engine, std::size_t size, int source, const Tag& tag, int num_slots,
             nb::object on_messages, nb::object on_end)
        : engine_(std::move(engine)), size_(size), on_messages_(std::move(on_messages)), on_end_(std::move(on_end)) {
        for (int i = 0; i < num_slots; ++i) slots_.emplace_back(size, source, tag);
    }

    // `self` is this object's Python object, kept alive while receives are posted.
    void start(PyObject* self) {
        self_ = self;
        Py_INCREF(self_);
        for (Slot& slot : slots_) post(slot);
        engine_->watch_end(*slots_.front().receive);
        engine_->dispatch_events();
    }

    // Ends the receives that no message has matched.
    void end(std::size_t reason) {
        for (Slot& slot : slots_) {
            if (slot.is_posted) engine_->end_unmatched(*slot.receive, reason);
        }
    }

    // Stops all callbacks.
    void close() {
        is_closed_ = true;
        const nb::object on_messages = std::move(on_messages_);
        const nb::object on_end = std::move(on_end_);
        for (Slot& slot : slots_) {
            if (slot.is_posted) engine_->cancel(*slot.receive);
        }
    }

    void on_end(Transfer& ended) override {
        for (Slot& slot : slots_) {
            if (&*slot.receive == &ended) slot.has_ended = true;
        }
        while (slots_[next_].has_ended) {
            Slot& slot = slots_[next_];
            next_ = (next_ + 1) % slots_.size();
            complete(slot);
        }
    }

    void flush() override {
        if (is_flushing_) return;
        is_flushing_ = true;
        // A signal handler may raise wherever Python runs, even before the callback has taken a message out of the
        // list.
        for (int num_raised = 0; !is_closed_ && nb::len(messages_) != 0;) {
            nb::list batch = std::exchange(messages_, nb::list());
            if (call(nb::object(on_messages_), batch) || ++num_raised > max_raised) continue;
            for (const nb::handle newer : messages_) batch.append(newer);
            messages_ = std::move(batch);
        }
        if (!is_closed_ && end_info_) call(std::move(on_end_), nb::cast(*std::exchange(end_info_, std::nullopt)));
        is_flushing_ = false;
        if (num_posted_ == 0 && self_ != nullptr) Py_DECREF(std::exchange(self_, nullptr));
    }

private:
    struct Slot {
        Slot(std::size_t size, int its_source, const Tag& its_tag)
            : bytes(std::make_unique<std::byte[]>(size)), source(its_source), tag(its_tag) {}

        std::unique_ptr<std::byte[]> bytes;
        int source;
        Tag tag;
        bool is_posted = false;
        bool has_ended = false;
        std::optional<Receive> receive;
    };

    static constexpr int max_raised = 3;

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

    void post(Slot& slot) {
        slot.is_posted = true;
        ++num_posted_;
        Receive& receive = slot.receive.emplace(slot.bytes.get(), size_, slot.source, slot.tag);
        receive.owner = static_cast<CompletionListener*>(this);
        receive.is_watched = true;
        engine_->start_with_listener(receive);
    }

    void complete(Slot& slot) {
        slot.is_posted = slot.has_ended = false;
        --num_posted_;
        const Receive& receive = *slot.receive;
        if (receive.outcome == Outcome::done && !has_ended_) {
            messages_.append(nb::bytes(slot.bytes.get(), size_));
            if (!is_closed_) post(slot);
        } else if (!has_ended_) {
            has_ended_ = true;
            end_info_.emplace(static_cast<int>(receive.outcome), receive.peer, receive.message_size, receive.reason);
        }
    }

    std::shared_ptr<P2PEngine> engine_;
    std::size_t size_;
    nb::object on_messages_;
    nb::object on_end_;
    std::deque<Slot> slots_;  // a deque, for its elements must not move
    std::size_t next_ = 0;    // the next slot to complete
    std::size_t num_posted_ = 0;
    nb::list messages_;
    std::optional<std::tuple<int, int, std::size_t, std::size_t>> end_info_;
    bool has_ended_ = false;
    bool is_flushing_ = false;
    bool is_closed_ = false;
    PyObject* self_ = nullptr;
};

// An event that a thread waits for while it moves messages.
struct Signal {
    std::shared_ptr<P2PEngine> engine;
    Transfer transfer{any_source, Tag{}};

    void set() { engine->signal(transfer); }

    bool wait(double timeout) {
        if (!transfer.has_ended.load()) {
            const GilRelease released;
            engine->wait(transfer, timeout);
        }
        const bool was_set = transfer.has_ended.exchange(false);
        engine->dispatch_events();
        return was_set;
    }
};

}  // namespace

void bind_listener(nb::module_& m) {
    nb::class_<Listener>(m, "Listener", "Persistent receives: messages of one size from one rank.")
        .def("end", &Listener::end, "reason"_a)
        .def("close", &Listener::close);
    m.def(
        "post_persistent_recv",
        [](std::shared_ptr<P2PEngine> engine, std::size_t size, int source, std::uint64_t group, std::uint64_t number,
           int num_slots, nb::object on_messages, nb::object on_end) {
            auto* listener = new Listener(std::move(engine), size, source, Tag{group, number}, num_slots,
                                          std::move(on_messages), std::move(on_end));
            nb::object object = nb::cast(listener, nb::rv_policy::take_ownership);
            listener->start(object.ptr());
            return object;
        },
        "engine"_a, "size"_a, "source"_a, "group"_a, "number"_a, "num_slots"_a, "on_messages"_a, "on_end"_a);

    nb::class_<Signal>(m, "Signal", "An event that a thread waits for while it moves messages.")
        .def(nb::new_([](std::shared_ptr<P2PEngine> engine) { return new Signal{.engine = std::move(engine)}; }),
             "engine"_a)
        .def("set", &Signal::set)
        .def("wait", &Signal::wait, "timeout"_a,
             "Block until it is set or the timeout expires; return whether it was set, and clear it.");
}

}  // namespace ferrodist
