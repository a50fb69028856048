#include "bindings/tensor_transfers.h"

#include <algorithm>
#include <chrono>

namespace ferrodist {

nb::object unfinished(const Deadline& deadline, const std::exception_ptr& interruption, Unfinished progress) {
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

bool may_prefer_offer(const P2PEngine& engine, std::size_t size, int peer) {
    return size >= least_offered && engine.shares_memory_with(peer);
}

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

}  // namespace ferrodist
