#include "engine/pending.h"

#include <algorithm>

#include "base/interruption.h"
#include "base/processor.h"

namespace ferrodist {

namespace {

constexpr int pauses_before_sleep = 200;

}  // namespace

bool Pending::wait(double timeout) {
    const Deadline deadline(timeout);
    for (int i = 0; i < pauses_before_sleep && !is_done(); ++i) relax();
    while (!is_done()) {
        if (deadline.expired()) return false;
        const std::uint32_t seen = ended_.current();
        if (!is_done()) ended_.wait(seen, std::min<Clock::duration>(deadline.remaining(), interruption_period));
        if (!is_done()) check_interruption();
    }
    if (failure_) std::rethrow_exception(failure_);
    return true;
}

void Pending::finish(std::exception_ptr failure) {
    failure_ = std::move(failure);
    is_done_.store(true);
    ended_.notify_all();
}

}  // namespace ferrodist
