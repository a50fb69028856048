// The channel of two ranks of one host: a ring each way.
#pragma once

#include "transport/channel.h"
#include "transport/shm/ring.h"

namespace ferrodist::shm {

class RingChannel final : public Channel {
public:
    RingChannel(const Rings& rings, int own_index, int its_index)
        : bell_(rings.bell(its_index)), writer_(rings, own_index, its_index), reader_(rings, its_index, own_index) {}

    // Whether there is something that has not been read, for any thread.
    [[nodiscard]] bool has_frames() const noexcept { return reader_.has_frames(); }

    [[nodiscard]] std::size_t chunk_bytes() const noexcept override { return writer_.chunk_bytes(); }
    [[nodiscard]] Put put(const Frame& frame, const std::byte* payload) override {
        if (writer_.room(frame.length) < static_cast<std::ptrdiff_t>(frame.length)) return Put::none;
        writer_.write(frame, payload);
        return Put::whole;
    }
    bool set_blocked(bool is_blocked) override {
        writer_.set_blocked(is_blocked);
        return is_blocked;
    }
    void notify() override { bell_.ring(); }

    [[nodiscard]] Front front(Frame& frame) override {
        const Front front = reader_.front(frame);
        length_ = frame.length;
        return front;
    }
    [[nodiscard]] std::size_t take(std::byte* target, std::size_t length) override {
        if (target != nullptr) reader_.copy_to(target, length);
        return length;
    }
    void pop() override {
        reader_.pop(length_);
        if (reader_.should_release()) give_back();
    }
    void give_back() override {
        if (reader_.release()) bell_.ring();
    }

private:
    Doorbell& bell_;
    RingWriter writer_;
    RingReader reader_;
    std::uint32_t length_ = 0;  // of the frame in front
};

}  // namespace ferrodist::shm
