// `fd.batch`: sends and receives of tensors that move together.
#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "base/deadline.h"
#include "bindings/fast_call.h"
#include "bindings/tensor_messages.h"
#include "bindings/tensor_p2p.h"
#include "bindings/tensor_transfers.h"

namespace ferrodist {

namespace {

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

}  // namespace ferrodist
