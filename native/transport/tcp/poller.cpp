#include "transport/tcp/poller.h"

#include <poll.h>
#include <sys/eventfd.h>

#include <cerrno>
#include <system_error>

namespace ferrodist::tcp {

namespace {

constexpr std::uint64_t of_wakeup = 1;

void check(bool is_good, const char* what) {
    if (!is_good) throw std::system_error(errno, std::generic_category(), what);
}

}  // namespace

Poller::Poller()
    : all_(::epoll_create1(EPOLL_CLOEXEC)),
      sleeper_(::epoll_create1(EPOLL_CLOEXEC)),
      wakeup_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    check(all_.get() >= 0 && sleeper_.get() >= 0, "epoll_create1");
    check(wakeup_.get() >= 0, "eventfd");
    epoll_event event{.events = EPOLLIN, .data = {.u64 = of_wakeup}};
    check(::epoll_ctl(sleeper_.get(), EPOLL_CTL_ADD, wakeup_.get(), &event) == 0, "epoll_ctl");
    event = {.events = EPOLLONESHOT, .data = {.u64 = 0}};
    check(::epoll_ctl(sleeper_.get(), EPOLL_CTL_ADD, all_.get(), &event) == 0, "epoll_ctl");
}

void Poller::add(int socket, std::size_t index) {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = index}};
    check(::epoll_ctl(all_.get(), EPOLL_CTL_ADD, socket, &event) == 0, "epoll_ctl of a connection");
}

void Poller::set_writing(int socket, std::size_t index, bool is_writing) const noexcept {
    epoll_event event{.events = EPOLLIN, .data = {.u64 = index}};
    if (is_writing) event.events |= EPOLLOUT;
    ::epoll_ctl(all_.get(), EPOLL_CTL_MOD, socket, &event);
}

void Poller::remove(int socket) const noexcept {
    ::epoll_ctl(all_.get(), EPOLL_CTL_DEL, socket, nullptr);
}

ReadySet Poller::poll() const noexcept {
    ReadySet ready;
    const int count = ::epoll_wait(all_.get(), ready.events_.data(), static_cast<int>(ready.events_.size()), 0);
    if (count > 0) ready.size_ = static_cast<std::size_t>(count);
    return ready;
}

void Poller::wait(std::chrono::milliseconds longest) const noexcept {
    pollfd entry{.fd = all_.get(), .events = POLLIN, .revents = 0};
    ::poll(&entry, 1, static_cast<int>(longest.count()));
}

void Poller::arm() noexcept {
    is_armed_ = true;
    rearm(EPOLLIN | EPOLLONESHOT);
}

void Poller::disarm() noexcept {
    is_armed_ = false;
    rearm(EPOLLONESHOT);
}

void Poller::rearm(std::uint32_t events) const noexcept {
    epoll_event event{.events = events, .data = {.u64 = 0}};
    ::epoll_ctl(sleeper_.get(), EPOLL_CTL_MOD, all_.get(), &event);
}

bool Poller::sleep() const noexcept {
    while (true) {
        epoll_event event{};
        const int count = ::epoll_wait(sleeper_.get(), &event, 1, -1);
        if (count < 0 && errno != EINTR) return false;
        if (count == 1) return event.data.u64 != of_wakeup;
    }
}

void Poller::stop() const noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto size = ::write(wakeup_.get(), &one, sizeof one);
}

void Poller::drop() noexcept {
    all_ = Descriptor();
    sleeper_ = Descriptor();
    wakeup_ = Descriptor();
}

}  // namespace ferrodist::tcp
