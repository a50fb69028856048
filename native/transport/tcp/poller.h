// An epoll set of a rank's connections, polled by spinning threads and slept on by one background thread.
//
// [Note: armed]
// Spinning threads poll the connections themselves, and a thread that sleeps on them would only compete with them: so
// it is woken only after the poller has been armed, and for one event. Arming takes a system call, and reports events
// that came before it.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <span>

#include "base/descriptor.h"

namespace ferrodist::tcp {

// A batch of readiness events.
class ReadySet {
public:
    struct Entry {
        std::size_t index;
        bool is_readable;
        bool is_writable;
    };

    ReadySet() noexcept {}  // leaves the array uninitialized

    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] Entry operator[](std::size_t i) const noexcept {
        constexpr auto ended = EPOLLHUP | EPOLLERR;
        return {.index = events_[i].data.u64,
                .is_readable = (events_[i].events & (EPOLLIN | ended)) != 0,
                .is_writable = (events_[i].events & EPOLLOUT) != 0};
    }

private:
    friend class Poller;
    std::array<epoll_event, 16> events_;
    std::size_t size_ = 0;
};

class Poller {
public:
    Poller();

    // Registers `socket`: its events carry `index`, until it is removed.
    void add(int socket, std::size_t index);
    void set_writing(int socket, std::size_t index, bool is_writing) const noexcept;
    void remove(int socket) const noexcept;

    // The connections that are ready now. For any thread.
    [[nodiscard]] ReadySet poll() const noexcept;
    // Blocks until a connection is ready, or `longest` has passed.
    void wait(std::chrono::milliseconds longest) const noexcept;

    // See [Note: armed]. For one thread at a time.
    void arm() noexcept;
    void disarm() noexcept;
    // For any thread.
    [[nodiscard]] bool is_armed() const noexcept { return is_armed_.load(std::memory_order_relaxed); }
    // Records that the sleeper has been woken.
    void set_fired() noexcept { is_armed_ = false; }

    // Blocks until a connection is ready and the poller is armed. False once `stop` has been called. For one thread.
    [[nodiscard]] bool sleep() const noexcept;
    void stop() const noexcept;

    // In a forked child: closes its copies of the descriptors.
    void drop() noexcept;

private:
    void rearm(std::uint32_t events) const noexcept;

    Descriptor all_;      // connections
    Descriptor sleeper_;  // the background thread sleeps on it: `all_` when armed, and `wakeup_`
    Descriptor wakeup_;
    std::atomic<bool> is_armed_{false};
};

}  // namespace ferrodist::tcp
