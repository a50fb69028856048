// Where a rank sees which of its connections can be read or written, at once or asleep.
//
// [Note: armed]
// Threads that spin look at the connections themselves, and one that sleeps for them would only be in their way: it is
// woken by what comes only after somebody has armed the lookout, and for one thing. Arming takes a system call, and finds
// what had come before.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <span>

#include "base/descriptor.h"

namespace ferrodist::tcp {

// Some of the connections that can be read or written.
class ReadySet {
public:
    struct Sight {
        std::size_t place;
        bool is_readable;
        bool is_writable;
    };

    ReadySet() noexcept {}  // and leaves the rest as it is

    [[nodiscard]] std::size_t size() const noexcept { return size_; }
    [[nodiscard]] Sight operator[](std::size_t i) const noexcept {
        constexpr auto ended = EPOLLHUP | EPOLLERR;
        return {.place = events_[i].data.u64,
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

    // All that comes of `socket` is seen at `place`, until it is removed.
    void add(int socket, std::size_t place);
    void set_writing(int socket, std::size_t place, bool is_writing) const noexcept;
    void remove(int socket) const noexcept;

    // What can be done now, for any thread.
    [[nodiscard]] ReadySet look() const noexcept;
    // Blocks until something can be, or `longest` has passed.
    void watch(std::chrono::milliseconds longest) const noexcept;

    // See [Note: armed]. For one thread at a time.
    void arm() noexcept;
    void disarm() noexcept;
    // For any thread.
    [[nodiscard]] bool is_armed() const noexcept { return is_armed_.load(std::memory_order_relaxed); }
    // Says that a sleeper has been woken.
    void set_fired() noexcept { is_armed_ = false; }

    // For one thread: blocks until something can be done and the lookout is armed. False once `stop` has been called.
    [[nodiscard]] bool sleep() const noexcept;
    void stop() const noexcept;

    // In a forked child: closes its copies.
    void drop() noexcept;

private:
    void rearm(std::uint32_t events) const noexcept;

    Descriptor all_;      // connections
    Descriptor sleeper_;  // what its thread sleeps on: `all_` when armed, and `alarm_`
    Descriptor alarm_;
    std::atomic<bool> is_armed_{false};
};

}  // namespace ferrodist::tcp
