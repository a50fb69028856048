// The channel of two ranks of different hosts: a connection.
//
// [Note: short and long payloads]
// A frame that fits the buffer into which everything is read first is given out when it is whole, and copied from there.
// Of a longer one that is given out what there is, and its further bytes are read straight to where they belong. A payload
// is written straight from where it is.
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
    // `lookout` sees it at `place`.
    TcpChannel(Descriptor socket, Poller& lookout, std::size_t place);

    [[nodiscard]] std::size_t chunk_bytes() const noexcept override;
    [[nodiscard]] Put put(const Frame& frame, const std::byte* payload) override;
    [[nodiscard]] Put finish() override;
    void keep_rest() override;
    bool set_blocked(bool is_blocked) override;

    [[nodiscard]] Front front(Frame& frame) override;
    [[nodiscard]] std::size_t take(std::byte* target, std::size_t length) override;
    void pop() override;
    // What is in the buffer nobody would see: so it is read.
    [[nodiscard]] bool may_stop() override {
        is_dry_ = true;
        return false;
    }
    void give_back() override { is_dry_ = false; }
    void break_off() override { end_reading(); }

    [[nodiscard]] std::uint64_t num_put() const noexcept override { return num_put_; }
    [[nodiscard]] std::uint64_t num_read() const noexcept override { return num_read_; }

    // At the end: writes what is begun, says that nothing follows, and reads until the other rank has said so too.
    // Returns whether both have.
    [[nodiscard]] bool leave();
    void close() noexcept {
        end_reading();
        drop();
    }
    // In a forked child: closes its copy, and does nothing to the connection.
    void drop() noexcept { socket_ = Descriptor(); }

private:
    [[nodiscard]] std::size_t num_buffered() const noexcept { return stop_ - start_; }
    bool fill(std::size_t wanted);
    std::size_t receive(std::byte* target, std::size_t room);
    void end_reading() noexcept;
    Front give_out(Frame& frame);

    Descriptor socket_;
    Poller& lookout_;
    std::size_t place_;

    // Writing.
    Frame frame_;  // which is being put in
    const std::byte* payload_ = nullptr;
    std::unique_ptr<std::byte[]> copy_;  // of its payload, when `payload_` must not be read any more
    std::size_t num_written_ = 0;        // of frame and payload together
    std::uint64_t num_put_ = 0;
    bool is_blocked_ = false;
    bool is_broken_ = false;  // nothing can be written; what has come can still be read
    bool has_left_ = false;

    // Reading.
    std::unique_ptr<std::byte[]> buffer_;
    std::size_t start_ = 0, stop_ = 0;  // of what is in it
    Frame header_;                      // of the frame that is being read
    std::size_t num_left_ = 0;          // bytes of its payload that have not been given out
    std::size_t num_in_front_ = 0;      // bytes given out that have not been taken
    bool is_in_frame_ = false;
    bool is_dry_ = false;  // no more is asked for in this turn: there was less than that before
    bool has_ended_ = false;
    std::uint64_t num_read_ = 0;
};

}  // namespace ferrodist::tcp
