#include "transport/tcp/tcp_channel.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <system_error>

namespace ferrodist::tcp {

static_assert(std::endian::native == std::endian::little, "the frames' numbers are little-endian");

namespace {

// The maximum payload of a frame: large enough to hide its overhead, small enough to let other frames through.
constexpr std::size_t max_payload_bytes = std::size_t{512} << 10;
constexpr std::size_t buffer_bytes = std::size_t{64} << 10;
// From this size on the rest of a payload is read straight to its destination, else through the buffer.
constexpr std::size_t direct_bytes = std::size_t{16} << 10;

constexpr int most_reads_in_a_row = 16;

// The kernel starts with a receive window of 64 KiB, so a message that arrives before its receiver reads waits for its
// rest. Setting SO_RCVLOWAT to this size and then to one byte opens the window without ending the kernel's autotuning,
// as SO_RCVBUF would: a tensor of 64 KiB took 60 to 90 us one way instead of 90 to 200.
constexpr int room_bytes = 1 << 20;

bool would_block(int error) {
    return error == EAGAIN || error == EWOULDBLOCK;
}

}  // namespace

TcpChannel::TcpChannel(Descriptor socket, Poller& poller, std::size_t index)
    : socket_(std::move(socket)),
      poller_(poller),
      index_(index),
      buffer_(std::make_unique_for_overwrite<std::byte[]>(buffer_bytes)) {
    if (::fcntl(socket_.get(), F_SETFL, ::fcntl(socket_.get(), F_GETFL) | O_NONBLOCK) != 0)
        throw std::system_error(errno, std::generic_category(), "fcntl of a connection");
    for (const int wanted : {room_bytes, 1})
        ::setsockopt(socket_.get(), SOL_SOCKET, SO_RCVLOWAT, &wanted, sizeof wanted);
    poller_.add(socket_.get(), index_);
}

std::size_t TcpChannel::max_frame_payload() const noexcept {
    return max_payload_bytes;
}

Channel::Put TcpChannel::put(const Frame& frame, const std::byte* payload) {
    if (is_broken_) return Put::none;
    frame_ = frame;
    payload_ = payload;
    num_written_ = 0;
    const Put put = finish();
    if (put != Put::none) ++num_put_;
    return put;
}

Channel::Put TcpChannel::finish() {
    const std::size_t size = sizeof(Frame) + frame_.length;
    bool has_written = false;
    while (num_written_ < size && !is_broken_) {
        std::array<iovec, 2> parts;
        std::size_t num_parts = 0;
        const std::size_t of_frame = std::min(num_written_, sizeof(Frame));
        if (of_frame < sizeof(Frame))
            parts[num_parts++] = {reinterpret_cast<std::byte*>(&frame_) + of_frame, sizeof(Frame) - of_frame};
        const std::size_t of_payload = num_written_ - of_frame;
        if (of_payload < frame_.length)
            parts[num_parts++] = {const_cast<std::byte*>(payload_) + of_payload, frame_.length - of_payload};
        msghdr message{};
        message.msg_iov = parts.data();
        message.msg_iovlen = num_parts;
        const ssize_t count = ::sendmsg(socket_.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (count >= 0) {
            num_written_ += static_cast<std::size_t>(count);
            has_written = true;
        } else if (would_block(errno)) {
            break;
        } else if (errno != EINTR) {
            is_broken_ = true;  // noticed by reading, after everything that has arrived
        }
    }
    if (num_written_ < size) return has_written ? Put::partial : Put::none;
    copy_.reset();
    return Put::complete;
}

void TcpChannel::copy_rest() {
    const std::size_t of_payload = num_written_ - std::min(num_written_, sizeof(Frame));
    if (copy_ || of_payload == frame_.length) return;
    copy_ = std::make_unique_for_overwrite<std::byte[]>(frame_.length);
    std::memcpy(copy_.get() + of_payload, payload_ + of_payload, frame_.length - of_payload);
    payload_ = copy_.get();
}

bool TcpChannel::set_blocked(bool is_blocked) {
    if (is_blocked != is_blocked_ && !has_ended_) poller_.set_writing(socket_.get(), index_, is_blocked);
    is_blocked_ = is_blocked;
    return false;
}

// Reads until `wanted` bytes are buffered; false if they have not arrived.
bool TcpChannel::fill(std::size_t wanted) {
    if (start_ == stop_)
        start_ = stop_ = 0;
    else if (start_ + wanted > buffer_bytes) {
        std::memmove(buffer_.get(), buffer_.get() + start_, num_buffered());
        stop_ -= start_;
        start_ = 0;
    }
    while (num_buffered() < wanted) {
        if (is_drained_) return false;
        // A data frame is followed by the next one of its message, of which only the header belongs into the buffer.
        const bool is_amid = header_.kind == FrameType::data && header_.offset + header_.length < header_.size;
        const bool is_front = wanted == sizeof(Frame);
        stop_ += receive(buffer_.get() + stop_, is_amid && is_front ? wanted - num_buffered() : buffer_bytes - stop_);
    }
    return true;
}

std::size_t TcpChannel::receive(std::byte* target, std::size_t room) {
    while (true) {
        const ssize_t count = ::recv(socket_.get(), target, room, MSG_DONTWAIT);
        if (count < 0 && errno == EINTR) continue;
        is_drained_ = count < 0 || static_cast<std::size_t>(count) < room;
        if (count > 0) return static_cast<std::size_t>(count);
        if (count == 0 || !would_block(errno)) end_reading();
        return 0;
    }
}

// Nothing more will arrive, so nothing that is sent there is of use: the other rank need not wait for it.
void TcpChannel::end_reading() noexcept {
    if (has_ended_) return;
    has_ended_ = is_broken_ = true;
    poller_.remove(socket_.get());
    ::shutdown(socket_.get(), SHUT_WR);
}

Channel::Front TcpChannel::front(Frame& frame) {
    if (is_in_frame_) {
        header_.offset += header_.length - num_left_;
        header_.length = static_cast<std::uint32_t>(num_left_);
        header_.kind = FrameType::data;
        if (num_buffered() > 0) return give_out(frame);
        if (num_left_ < direct_bytes ? fill(1) : !is_drained_) return give_out(frame);
    } else if (num_buffered() >= sizeof(Frame) || fill(sizeof(Frame))) {
        std::memcpy(&header_, buffer_.get() + start_, sizeof(Frame));
        if (header_.kind < FrameType::eager || header_.kind > FrameType::withdraw) return Front::broken;
        if (header_.length > max_payload_bytes || header_.length > header_.size) return Front::broken;
        if (header_.offset > header_.size - header_.length) return Front::broken;
        std::size_t wanted = sizeof(Frame) + header_.length;
        // Of a long message's announcement one byte is enough: then the frame is known to be incomplete.
        if (wanted > buffer_bytes) wanted = sizeof(Frame) + (header_.kind == FrameType::data ? 0 : 1);
        if (num_buffered() >= wanted || fill(wanted)) {
            start_ += sizeof(Frame);
            num_left_ = header_.length;
            is_in_frame_ = true;
            return give_out(frame);
        }
    }
    is_drained_ = false;  // it may have arrived by the next batch
    return has_ended_ ? Front::ended : Front::none;
}

Channel::Front TcpChannel::give_out(Frame& frame) {
    frame = header_;
    num_in_front_ = num_buffered() > 0 ? std::min(num_left_, num_buffered()) : num_left_;
    frame.length = static_cast<std::uint32_t>(num_in_front_);
    return Front::frame;
}

std::size_t TcpChannel::read_payload(std::byte* target, std::size_t length) {
    std::size_t count = std::min(length, num_in_front_);
    if (num_buffered() > 0) {
        if (target != nullptr) std::memcpy(target, buffer_.get() + start_, count);
        start_ += count;
    } else if (count > 0) {
        count = target != nullptr ? receive(target, count) : receive(buffer_.get(), std::min(count, buffer_bytes));
    }
    num_left_ -= count;
    num_in_front_ = 0;
    return count;
}

void TcpChannel::pop() {
    (void)read_payload(nullptr, num_in_front_);
    if (num_left_ > 0) return;
    is_in_frame_ = false;
    ++num_read_;
}

bool TcpChannel::leave() {
    const bool is_begun = num_written_ > 0 && num_written_ < sizeof(Frame) + frame_.length;
    if (is_begun && finish() != Put::complete && !is_broken_) return false;
    if (!has_left_) {
        ::shutdown(socket_.get(), SHUT_WR);
        has_left_ = true;
    }
    for (int i = 0; i < most_reads_in_a_row && !has_ended_ && receive(buffer_.get(), buffer_bytes) > 0; ++i) {
    }
    return has_ended_;
}

}  // namespace ferrodist::tcp
