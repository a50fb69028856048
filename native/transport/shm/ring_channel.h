// The channel between two ranks of one host: a ring in each direction.
#pragma once

#include "transport/channel.h"
#include "transport/shm/ring.h"

namespace ferrodist::shm {

class RingChannel final : public Channel {
public:
    RingChannel(const Rings& rings, int own_index, int its_index)
        : doorbell_(rings.doorbell(its_index)),
          writer_(rings, own_index, its_index),
          reader_(rings, its_index, own_index),
          outgoing_(rings.ring(own_index, its_index)),
          incoming_(rings.ring(its_index, own_index)) {}

    // Whether there are unread frames. For any thread.
    [[nodiscard]] bool has_frames() const noexcept { return reader_.has_frames(); }

    // The processor on which the other rank waited last, or -1. For any thread.
    [[nodiscard]] int processor_of_peer() const noexcept {
        return doorbell_.processor.load(std::memory_order_relaxed) - 1;
    }

    [[nodiscard]] std::size_t max_frame_payload() const noexcept override { return writer_.max_frame_payload(); }
    [[nodiscard]] Put put(const Frame& frame, const std::byte* payload) override {
        if (writer_.room(frame.length) < static_cast<std::ptrdiff_t>(frame.length)) return Put::none;
        writer_.write(frame, payload);
        return Put::complete;
    }
    bool set_blocked(bool is_blocked) override {
        writer_.set_blocked(is_blocked);
        if (is_blocked) doorbell_.ring_for_space();
        return is_blocked;
    }
    void notify() override { doorbell_.ring(); }

    [[nodiscard]] Front front(Frame& frame) override {
        const Front front = reader_.front(frame);
        length_ = frame.length;
        return front;
    }
    [[nodiscard]] std::size_t read_payload(std::byte* target, std::size_t length) override {
        if (target != nullptr) reader_.copy_to(target, length);
        return length;
    }
    void pop() override {
        reader_.pop(length_);
        if (reader_.should_release()) release_space();
    }
    void release_space() override {
        if (reader_.release()) doorbell_.ring();
    }

    [[nodiscard]] std::optional<MessageMemory> publish(std::uint64_t number, const std::byte* data) override {
        auto& place = outgoing_.place_of(number);
        if (place.load(std::memory_order_relaxed) != 0) return std::nullopt;
        place.store(number + 1);  // before the offer: partner in `take`
        return MessageMemory{.process = ProcessRecord::own(), .address = reinterpret_cast<std::uintptr_t>(data)};
    }
    [[nodiscard]] bool withdraw(std::uint64_t number) override { return outgoing_.unpublish(number); }
    [[nodiscard]] bool read_in_place(const MessageMemory& memory, std::size_t offset, std::byte* target,
                                     std::size_t size) override {
        return read_process(memory.process, target, memory.address + offset, size) == 0;
    }
    [[nodiscard]] bool take(std::uint64_t number) override { return incoming_.unpublish(number); }

private:
    Doorbell& doorbell_;
    RingWriter writer_;
    RingReader reader_;
    Ring& outgoing_;
    Ring& incoming_;
    std::uint32_t length_ = 0;  // of the front frame
};

}  // namespace ferrodist::shm
