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

// Maximum bytes read from one connection before others get their turn.
constexpr std::size_t max_read_bytes = 1 << 20;

// Buffer for reads where a frame may begin: all of a small collective arrives in one call, and is copied once more.
constexpr std::size_t buffer_bytes = 20 * 1024;

// Bytes read beyond the rest of a frame: with much data, all but these go straight to their destination.
constexpr std::size_t extra_bytes = 512;

[[noreturn]] void throw_violation(int rank, const char* what) {
    throw Failure(FailureKind::protocol, {rank}, what);
}

}  // namespace

Links::Links(const std::vector<int>& descriptors, std::size_t slot_bytes) : slot_bytes_(slot_bytes) {
    std::vector<Descriptor> sockets;  // owned before anything can throw
    sockets.reserve(descriptors.size());
    for (const int number : descriptors) sockets.emplace_back(number);
    wakeup_ = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
    if (wakeup_.get() < 0) throw std::system_error(errno, std::generic_category(), "eventfd");
    for (Descriptor& socket : sockets) {
        const int number = socket.get();
        if (number < 0) {
            peers_.push_back(nullptr);
            continue;
        }
        auto peer = std::make_unique<Peer>();
        peer->socket = std::move(socket);
        if (::fcntl(number, F_SETFL, ::fcntl(number, F_GETFL) | O_NONBLOCK) != 0)
            throw std::system_error(errno, std::generic_category(), "fcntl of a connection");
        for (auto& row : peer->counts) row.resize(descriptors.size());
        peer->buffer = std::make_unique<std::byte[]>(buffer_bytes);
        peer->slots = std::make_unique<std::byte[]>(shm::num_slots * slot_bytes);
        peers_.push_back(std::move(peer));
    }
}

void Links::send(int rank, LinkFrameType kind, std::uint64_t number, std::size_t offset,
                 std::span<const std::byte> data) {
    Peer& peer = *peers_[index(rank)];
    if (peer.is_gone) return;
    Outgoing& outgoing = peer.outgoing.emplace_back();
    outgoing.header = {frame_magic, kind, number, offset, data.size()};
    if (data.size() > outgoing.copy.size()) {
        outgoing.data = data;
    } else if (!data.empty()) {
        std::memcpy(outgoing.copy.data(), data.data(), data.size());
    }
}

bool Links::write(Peer& peer) noexcept {
    static_assert(offsetof(Outgoing, copy) == sizeof(Header), "they are sent as one");
    bool has_moved = false;
    while (peer.has_unsent()) {
        std::array<iovec, 16> parts;
        std::size_t num_parts = 0;
        std::size_t size = 0;
        const auto add = [&](const std::byte* data, std::size_t part) {
            if (part == 0) return;
            parts[num_parts++] = {const_cast<std::byte*>(data), part};
            size += part;
        };
        for (std::size_t i = peer.first_unsent; i < peer.outgoing.size() && num_parts + 2 <= parts.size(); ++i) {
            const Outgoing& each = peer.outgoing[i];
            const std::size_t of_head = std::min(each.num_sent, each.copied_size());
            add(reinterpret_cast<const std::byte*>(&each) + of_head, each.copied_size() - of_head);
            add(each.data.data() + (each.num_sent - of_head), each.data.size() - (each.num_sent - of_head));
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
        count_sent(peer, static_cast<std::size_t>(count));
        if (static_cast<std::size_t>(count) < size) break;  // the socket's buffer is full
    }
    return has_moved;
}

void Links::count_sent(Peer& peer, std::size_t size) noexcept {
    while (size > 0) {
        Outgoing& first = peer.outgoing[peer.first_unsent];
        const std::size_t rest = sizeof(Header) + first.header.size - first.num_sent;
        const std::size_t taken = std::min(size, rest);
        first.num_sent += taken;
        size -= taken;
        if (taken == rest) ++peer.first_unsent;
    }
    if (peer.first_unsent == peer.outgoing.size()) {
        peer.outgoing.clear();
        peer.first_unsent = 0;
    }
}

bool Links::write() noexcept {
    bool has_moved = false;
    for (const auto& peer : peers_)
        if (peer) has_moved |= write(*peer);
    return has_moved;
}

std::span<std::byte> Links::target_of(Peer& peer, int rank) const {
    const Header& header = peer.header;
    if (header.magic != frame_magic) throw_violation(rank, "a frame that does not begin like one");
    switch (header.kind) {
        case LinkFrameType::arrival:
            if (header.size != sizeof(shm::Arrival) - sizeof(shm::Flag)) break;
            return {reinterpret_cast<std::byte*>(&peer.arrivals[header.number & 1].call), header.size};
        case LinkFrameType::counts:
            if (header.size != peers_.size() * sizeof(std::uint64_t)) break;
            return std::as_writable_bytes(std::span(peer.counts[header.number & 1]));
        case LinkFrameType::staged:
        case LinkFrameType::folded:
            if (header.offset > slot_bytes_ || header.size > slot_bytes_ - header.offset) break;
            return {slot(rank, header.number) + header.offset, header.size};
        case LinkFrameType::done:
        case LinkFrameType::failed:
            if (header.size != 0) break;
            return {};
    }
    throw_violation(rank, "a frame of a kind or size that none has");
}

void Links::handle_frame(Peer& peer, int rank) {
    const std::uint64_t number = peer.header.number;
    switch (peer.header.kind) {
        case LinkFrameType::arrival:
            peer.arrivals[number & 1].sequence.store(number);
            break;
        case LinkFrameType::counts:
            break;
        case LinkFrameType::staged:
            peer.flags.staged.store(number + 1);
            break;
        case LinkFrameType::folded:
            peer.flags.folded.store(number + 1);
            break;
        case LinkFrameType::done:
            peer.flags.done.store(number);
            break;
        case LinkFrameType::failed:
            if (number < failed_at_) {
                failed_at_ = number;
                failed_rank_ = rank;
            }
            break;
    }
}

bool Links::read(Peer& peer, int rank) {
    std::size_t total = 0;
    while (!peer.is_gone && total < max_read_bytes) {
        std::array<iovec, 2> parts{{{peer.target.data(), peer.target.size()},
                                    {peer.buffer.get() + peer.num_buffered,
                                     (peer.target.empty() ? buffer_bytes : extra_bytes) - peer.num_buffered}}};
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = parts.size();
        const ssize_t count = ::recvmsg(peer.socket.get(), &message, MSG_DONTWAIT);
        if (count < 0 && errno == EINTR) continue;
        if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
        if (count <= 0) {
            peer.is_gone = true;
            break;
        }
        const auto size = static_cast<std::size_t>(count);
        total += size;
        const std::size_t of_target = std::min(size, peer.target.size());
        peer.target = peer.target.subspan(of_target);
        if (of_target > 0 && peer.target.empty()) handle_frame(peer, rank);
        peer.num_buffered += size - of_target;
        parse_frames(peer, rank);
        if (size < parts[0].iov_len + parts[1].iov_len) break;  // nothing more has arrived
    }
    return total > 0;
}

// Handles the complete frames in the buffer, and keeps an incomplete header.
void Links::parse_frames(Peer& peer, int rank) {
    const std::byte* at = peer.buffer.get();
    std::size_t left = peer.num_buffered;
    while (left >= sizeof(Header) && peer.target.empty()) {
        std::memcpy(&peer.header, at, sizeof(Header));
        peer.target = target_of(peer, rank);
        const std::size_t size = std::min(left - sizeof(Header), peer.target.size());
        if (size > 0) std::memcpy(peer.target.data(), at + sizeof(Header), size);
        peer.target = peer.target.subspan(size);
        at += sizeof(Header) + size;
        left -= sizeof(Header) + size;
        if (peer.target.empty()) handle_frame(peer, rank);
    }
    if (left > 0) std::memmove(peer.buffer.get(), at, left);
    peer.num_buffered = left;
}

bool Links::move() {
    bool has_moved = write();
    for (std::size_t rank = 0; rank < peers_.size(); ++rank)
        if (peers_[rank]) has_moved |= read(*peers_[rank], static_cast<int>(rank));
    return has_moved;
}

bool Links::has_unsent() const {
    return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) { return peer && peer->has_unsent(); });
}

bool Links::has_unsent_staged(int rank, std::uint64_t number) const {
    const Peer& peer = *peers_[index(rank)];
    if (!peer.has_unsent()) return false;
    return std::any_of(peer.outgoing.begin() + static_cast<std::ptrdiff_t>(peer.first_unsent), peer.outgoing.end(),
                       [&](const Outgoing& each) {
                           return each.header.kind == LinkFrameType::staged && each.header.number <= number;
                       });
}

void Links::drop_unsent() noexcept {
    for (const auto& peer : peers_) {
        if (!peer || !peer->has_unsent()) continue;
        peer->is_gone = true;  // a frame may be partly sent
        peer->outgoing.clear();
    }
}

void Links::sleep(std::chrono::nanoseconds timeout) {
    std::vector<pollfd> entries;
    for (const auto& peer : peers_)
        if (peer && !peer->is_gone)
            entries.push_back({.fd = peer->socket.get(),
                               .events = static_cast<short>(peer->has_unsent() ? POLLIN | POLLOUT : POLLIN),
                               .revents = 0});
    entries.push_back({.fd = wakeup_.get(), .events = POLLIN, .revents = 0});
    const auto count = timeout.count();
    const timespec limit{.tv_sec = static_cast<time_t>(count / 1'000'000'000),
                         .tv_nsec = static_cast<long>(count % 1'000'000'000)};
    ::ppoll(entries.data(), entries.size(), &limit, nullptr);
    if ((entries.back().revents & POLLIN) != 0) {
        std::uint64_t rings = 0;
        [[maybe_unused]] const ssize_t size = ::read(wakeup_.get(), &rings, sizeof rings);
    }
}

void Links::leave() noexcept {
    for (const auto& peer : peers_)
        if (peer) ::shutdown(peer->socket.get(), SHUT_WR);  // what was sent before is still delivered
    wake();
}

void Links::drop() noexcept {
    for (auto& peer : peers_)
        if (peer) peer->socket = Descriptor();
    wakeup_ = Descriptor();
}

void Links::wake() noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t size = ::write(wakeup_.get(), &one, sizeof one);
}

}  // namespace ferrodist::tcp
