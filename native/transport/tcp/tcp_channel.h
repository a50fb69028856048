// The channel between two ranks of different hosts: a TCP connection.
//
// [Note: short and long payloads]
// A frame that fits into the read buffer is returned once it is complete, and copied from there. Of a longer frame the
// part that has arrived is returned, and its further bytes are read straight to their destination. Payloads are written
// straight from the caller's memory.
#pragma once

#include <array>
#include <cstddef>
#include <memory>

#include "base/descriptor.h"
#include "transport/channel.h"
#include "transport/tcp/poller.h"

namespace ferrodist::tcp {

class TcpChannel final : public Channel {
public:
    // The poller reports the socket's events with `index`.
    TcpChannel(Descriptor socket, Poller& poller, std::size_t index);

    [[nodiscard]] std::size_t max_frame_payload() const noexcept override;
    [[nodiscard]] Put put(const Frame& frame, const std::byte* payload) override;
    [[nodiscard]] Put finish() override;
    void copy_rest() override;
    bool set_blocked(bool is_blocked) override;

    [[nodiscard]] Front front(Frame& frame) override;
    [[nodiscard]] std::size_t read_payload(std::byte* target, std::size_t length) override;
    void pop() override;
    // Buffered bytes raise no readiness event, so they have to be read before stopping.
    [[nodiscard]] bool may_stop() override {
        is_drained_ = true;
        return false;
    }
    void release_space() override { is_drained_ = false; }
    void disconnect() override { end_reading(); }

    [[nodiscard]] std::uint64_t num_put() const noexcept override { return num_put_; }
    [[nodiscard]] std::uint64_t num_read() const noexcept override { return num_read_; }

    // Shutdown: finishes a partial frame, ends the stream, and reads until the other rank has ended its stream. Returns
    // whether both have ended.
    [[nodiscard]] bool leave();
    void close() noexcept {
        end_reading();
        drop();
    }
    // In a forked child: closes its copy and leaves the connection alone.
    void drop() noexcept { socket_ = Descriptor(); }

private:
    [[nodiscard]] std::size_t num_buffered() const noexcept { return stop_ - start_; }
    bool fill(std::size_t wanted);
    std::size_t receive(std::byte* target, std::size_t room);
    void end_reading() noexcept;
    Front give_out(Frame& frame);

    Descriptor socket_;
    Poller& poller_;
    std::size_t index_;

    // Writing.
    Frame frame_;  // which is being written
    const std::byte* payload_ = nullptr;
    std::unique_ptr<std::byte[]> copy_;  // of its payload, once `payload_` must not be read any more
    std::size_t num_written_ = 0;        // of frame and payload together
    std::uint64_t num_put_ = 0;
    bool is_blocked_ = false;
    bool is_broken_ = false;  // writing has failed; what has arrived can still be read
    bool has_left_ = false;

    // Reading.
    std::unique_ptr<std::byte[]> buffer_;
    std::size_t start_ = 0, stop_ = 0;  // bounds of the buffered bytes
    Frame header_;                      // of the frame being read
    std::size_t num_left_ = 0;          // bytes of its payload that have not been returned
    std::size_t num_in_front_ = 0;      // bytes returned that have not been read
    bool is_in_frame_ = false;
    bool is_drained_ = false;  // the last read found less than it asked for, so this batch reads no more
    bool has_ended_ = false;
    std::uint64_t num_read_ = 0;
};

}  // namespace ferrodist::tcp
