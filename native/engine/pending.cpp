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
    if (!is_done()) {
        std::unique_lock lock(mutex_);
        while (!is_done()) {
            const auto now = Clock::now();
            if (now >= deadline.end()) return false;
            ended_.wait_until(lock, std::min(deadline.end(), now + interruption_period));
            if (is_done()) break;
            lock.unlock();
            look_for_interruption();
            lock.lock();
        }
    }
    if (failure_) std::rethrow_exception(failure_);
    return true;
}

void Pending::finish(std::exception_ptr failure) {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    is_done_.store(true);
    ended_.notify_all();
}

}  // namespace ferrodist
