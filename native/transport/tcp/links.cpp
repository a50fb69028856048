#include "transport/tcp/links.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "base/failure.h"

namespace ferrodist::tcp {

static_assert(std::endian::native == std::endian::little, "the frames' numbers are little-endian");

namespace {

constexpr std::uint32_t frame_magic = 0x54446646;

// What one call reads or writes at most: others have their turn in between.
constexpr std::size_t most_at_once = 1 << 20;

[[noreturn]] void throw_violation(int rank, const char* what) {
    throw Failure(FailureKind::protocol, {rank}, what);
}

}  // namespace

Links::Links(const std::vector<int>& descriptors, std::size_t slot_bytes)
    : slot_bytes_(slot_bytes), alarm_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
    if (alarm_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    for (const int number : descriptors) {
        if (number < 0) {
            peers_.push_back(nullptr);
            continue;
        }
        auto peer = std::make_unique<Peer>();
        peer->socket = Descriptor(number);
        if (::fcntl(number, F_SETFL, ::fcntl(number, F_GETFL) | O_NONBLOCK) != 0)
            throw std::system_error(errno, std::generic_category(), "fcntl of a connection");
        for (auto& row : peer->counts) row.resize(descriptors.size());
        peer->slots = std::make_unique<std::byte[]>(shm::num_slots * slot_bytes);
        peers_.push_back(std::move(peer));
    }
}

void Links::send(int rank, Kind kind, std::uint64_t number, std::size_t offset, std::span<const std::byte> data) {
    Peer& peer = *peers_[index(rank)];
    if (peer.is_gone) return;
    Outgoing outgoing{.header = {frame_magic, kind, number, offset, data.size()}, .data = data, .copy = nullptr};
    if (!data.empty() && data.size() <= shm::line_bytes) {
        outgoing.copy = std::make_unique<std::byte[]>(data.size());
        std::memcpy(outgoing.copy.get(), data.data(), data.size());
        outgoing.data = {outgoing.copy.get(), data.size()};
    }
    peer.outgoing.push_back(std::move(outgoing));
    write(peer);
}

bool Links::write(Peer& peer) {
    bool has_moved = false;
    while (!peer.outgoing.empty() && !peer.is_gone) {
        // Several frames a call: a flag and the data before it are one system call.
        std::array<iovec, 16> parts;
        std::size_t num_parts = 0;
        for (auto& each : peer.outgoing) {
            if (num_parts + 2 > parts.size()) break;
            const std::size_t of_header = std::min(each.num_sent, sizeof(Header));
            if (of_header < sizeof(Header))
                parts[num_parts++] = {reinterpret_cast<std::byte*>(&each.header) + of_header, sizeof(Header) - of_header};
            const std::size_t of_data = each.num_sent - of_header;
            if (of_data < each.data.size())
                parts[num_parts++] = {const_cast<std::byte*>(each.data.data()) + of_data, each.data.size() - of_data};
        }
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = num_parts;
        const ssize_t count = ::sendmsg(peer.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count < 0) {
            if (errno == EINTR) continue;
            if (errno != EAGAIN && errno != EWOULDBLOCK) peer.is_gone = true;
            return has_moved;
        }
        has_moved = true;
        auto left = static_cast<std::size_t>(count);
        while (left > 0) {
            Outgoing& first = peer.outgoing.front();
            const std::size_t rest = sizeof(Header) + first.data.size() - first.num_sent;
            const std::size_t taken = std::min(left, rest);
            first.num_sent += taken;
            left -= taken;
            if (taken == rest) peer.outgoing.pop_front();
        }
    }
    return has_moved;
}

std::span<std::byte> Links::target_of(Peer& peer, int rank) const {
    const Header& header = peer.header;
    if (header.magic != frame_magic) throw_violation(rank, "a frame that does not begin like one");
    switch (header.kind) {
        case Kind::arrival:
            if (header.size != shm::line_bytes - sizeof(std::uint64_t)) break;
            return {reinterpret_cast<std::byte*>(&peer.arrivals[header.number & 1].call), header.size};
        case Kind::counts:
            if (header.size != peers_.size() * sizeof(std::uint64_t)) break;
            return std::as_writable_bytes(std::span(peer.counts[header.number & 1]));
        case Kind::staged:
        case Kind::folded:
            if (header.offset > slot_bytes_ || header.size > slot_bytes_ - header.offset) break;
            return {slot(rank, header.number) + header.offset, header.size};
        case Kind::done:
        case Kind::failed:
            if (header.size != 0) break;
            return {};
    }
    throw_violation(rank, "a frame of a kind or size that none has");
}

void Links::act_on(Peer& peer, int rank) {
    const std::uint64_t number = peer.header.number;
    switch (peer.header.kind) {
        case Kind::arrival:
            peer.arrivals[number & 1].sequence.store(number);
            break;
        case Kind::counts:
            break;
        case Kind::staged:
            peer.progress.staged.store(number + 1);
            break;
        case Kind::folded:
            peer.progress.folded.store(number + 1);
            break;
        case Kind::done:
            peer.progress.done.store(number);
            break;
        case Kind::failed:
            if (number < failed_at_) {
                failed_at_ = number;
                failed_rank_ = rank;
            }
            break;
    }
}

bool Links::read(Peer& peer, int rank) {
    std::size_t total = 0;
    while (!peer.is_gone && total < most_at_once) {
        std::byte* at = reinterpret_cast<std::byte*>(&peer.header) + peer.num_received;
        std::size_t wanted = sizeof(Header) - peer.num_received;
        if (peer.num_received >= sizeof(Header)) {
            const auto target = target_of(peer, rank);
            const std::size_t done = peer.num_received - sizeof(Header);
            at = target.data() + done;
            wanted = target.size() - done;
        }
        if (wanted > 0) {
            const ssize_t count = ::recv(peer.socket.get(), at, wanted, MSG_DONTWAIT);
            if (count < 0 && errno == EINTR) continue;
            if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
            if (count <= 0) {
                peer.is_gone = true;
                break;
            }
            peer.num_received += static_cast<std::size_t>(count);
            total += static_cast<std::size_t>(count);
        }
        if (peer.num_received >= sizeof(Header) && peer.num_received == sizeof(Header) + target_of(peer, rank).size()) {
            peer.num_received = 0;
            act_on(peer, rank);
        }
    }
    return total > 0;
}

bool Links::move() {
    bool has_moved = false;
    for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
        if (!peers_[rank]) continue;
        has_moved |= write(*peers_[rank]);
        has_moved |= read(*peers_[rank], static_cast<int>(rank));
    }
    return has_moved;
}

bool Links::has_unsent() const {
    return std::any_of(peers_.begin(), peers_.end(),
                       [](const auto& peer) { return peer && !peer->is_gone && !peer->outgoing.empty(); });
}

void Links::sleep(std::chrono::nanoseconds timeout) {
    std::vector<pollfd> entries;
    for (const auto& peer : peers_)
        if (peer && !peer->is_gone)
            entries.push_back({.fd = peer->socket.get(),
                               .events = static_cast<short>(peer->outgoing.empty() ? POLLIN : POLLIN | POLLOUT),
                               .revents = 0});
    entries.push_back({.fd = alarm_.get(), .events = POLLIN, .revents = 0});
    const auto count = timeout.count();
    const timespec limit{.tv_sec = static_cast<time_t>(count / 1'000'000'000),
                         .tv_nsec = static_cast<long>(count % 1'000'000'000)};
    ::ppoll(entries.data(), entries.size(), &limit, nullptr);
    if ((entries.back().revents & POLLIN) != 0) {
        std::uint64_t rings = 0;
        [[maybe_unused]] const ssize_t size = ::read(alarm_.get(), &rings, sizeof rings);
    }
}

void Links::leave() noexcept {
    for (const auto& peer : peers_)
        if (peer) ::shutdown(peer->socket.get(), SHUT_WR);  // they still get what was sent before
    wake();
}

void Links::drop() noexcept {
    for (auto& peer : peers_)
        if (peer) peer->socket = Descriptor();
    alarm_ = Descriptor();
}

void Links::wake() noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t size = ::write(alarm_.get(), &one, sizeof one);
}

}  // namespace ferrodist::tcp
