// The messages of point-to-point tensors while they are under way: waits, and sends that go on while others move.
#pragma once

#include <nanobind/nanobind.h>

#include <cstddef>
#include <exception>
#include <functional>

#include "base/deadline.h"
#include "bindings/fast_call.h"
#include "bindings/tensor_messages.h"

namespace ferrodist {

// What a call that is not done returns.
nb::object unfinished(const Deadline& deadline, const std::exception_ptr& interruption, Unfinished progress = {});

double seconds_left(const Deadline& deadline);

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
bool may_prefer_offer(const P2PEngine& engine, std::size_t size, int peer);

// Waits for a message that was offered to be taken, but only a little if it can be sent at once. Returns the exception
// that interrupted it.
std::exception_ptr await_taken(P2PEngine& engine, Send& send, const Deadline& deadline);

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

}  // namespace ferrodist
