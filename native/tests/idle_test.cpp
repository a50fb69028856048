// Ranks that have started nothing, or whose last wait is over: what others send them is taken, and what they have left
// to write is written, though no thread of theirs waits.
#include <thread>

#include "p2p_group.h"

using namespace ferrodist;

namespace {

constexpr auto silence = std::chrono::milliseconds(20);  // after it the progress thread sleeps
constexpr std::size_t message_bytes = 4000;
constexpr Tag tag{0, 1};

// Rank 0 sends rank 1 a message, for which that waits. Its thread spins, and then leaves.
void send_one(const Group& group) {
    std::thread receiver([&] {
        Bytes data(message_bytes);
        Receive receive(data.data(), data.size(), 0, tag);
        require(group[1]->start_if_open(receive, true) && group[1]->wait(receive, patience), "received");
    });
    std::this_thread::sleep_for(std::chrono::microseconds(5));
    const Bytes data(message_bytes);
    Send send(data.data(), data.size(), 1, tag);
    group[0]->start(send);
    require(group[0]->wait(send, patience), "sent");
    receiver.join();
    std::this_thread::sleep_for(silence);
}

// Small messages to a rank that computes go to its memory when rings or connections are full.
void a_flood_is_taken(const Net& net) {
    const Group group = make_group(net);
    std::this_thread::sleep_for(silence);
    send_one(group);
    const Bytes data(message_bytes);
    for (int number = 0; number < 16'384; ++number) {
        if (group[0]->try_send(data.data(), data.size(), 1, tag)) continue;
        Send send(data.data(), data.size(), 1, tag);
        group[0]->start(send);
        require(group[0]->wait(send, patience), "message %d of a flood", number);
    }
}

// A rank sends until a message may be written in part, and then computes: the rest follows when there is space.
void the_rest_is_written(const Net& net) {
    const Group group = make_group(net);
    std::this_thread::sleep_for(silence);
    send_one(group);
    Bytes data(message_bytes);
    int num_sent = 0;
    for (int num_refused = 0; num_refused < 2;) {
        if (group[1]->try_send(data.data(), data.size(), 0, tag)) {
            ++num_sent;
            num_refused = 0;
        } else {
            ++num_refused;
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
    }
    for (int number = 0; number < num_sent; ++number) {
        Receive receive(data.data(), data.size(), 1, tag);
        group[0]->start(receive);
        require(group[0]->wait(receive, patience), "message %d of %d", number, num_sent);
    }
}

// A receive reads a message in its sender's memory while the ring to the sender, who is stopped, is exactly full. When
// that reads on, it must learn that the message was taken. The sender's side is played by hand.
void the_answer_is_written(std::size_t size) {
    const shm::RingLayout layout{.num_ranks = 2, .ring_bytes = 16 * 1024};
    const Descriptor descriptor(shm::create_memory("ferrodist-test", layout.size_bytes()));
    const auto memory = std::make_shared<const shm::Mapping>(descriptor.get(), layout.size_bytes());
    const auto rings = std::make_shared<const shm::Rings>(memory, layout);
    shm::Rings(memory, layout).initialize();
    shm::RingChannel sender(*rings, 0, 1);
    P2PEngine::Routes routes{.rings = rings, .local_indexes = {0, 1}, .sockets = {}};
    routes.sockets.resize(2);
    P2PEngine receiver({.rank = 1,
                        .eager_bytes = eager_bytes,
                        .max_unexpected_bytes = max_unexpected_bytes,
                        .is_oversubscribed = false,
                        .spin_micros = 20},
                       std::move(routes), [](P2PEngine& engine) { (void)engine.take_events(); });
    std::this_thread::sleep_for(silence);
    const Bytes message(size, std::byte{7});
    const auto place = sender.publish(0, message.data());
    require(place.has_value(), "published");
    const Frame offer{.kind = FrameType::offer,
                      .length = sizeof *place,
                      .message = 0,
                      .group = 0,
                      .tag = tag.number,
                      .size = size,
                      .offset = 0};
    require(sender.put(offer, reinterpret_cast<const std::byte*>(&*place)) == Channel::Put::complete, "offered");
    sender.notify();
    const Bytes small(8);
    for (std::size_t i = 0; i < layout.ring_bytes / shm::frame_unit; ++i)
        while (!receiver.try_send(small.data(), small.size(), 0, {0, 2})) std::this_thread::yield();
    std::this_thread::sleep_for(silence);
    Bytes out(size);
    Receive receive(out.data(), out.size(), 0, tag);
    require(receiver.start_if_open(receive, true) && receiver.wait(receive, patience) && out == message, "received");
    std::this_thread::sleep_for(silence);
    Frame frame;
    for (const Deadline deadline(patience);; sender.release_space()) {
        require(!deadline.expired(), "the sender has not heard that its message of %zu bytes was taken", size);
        while (sender.front(frame) == Channel::Front::frame) {
            if (frame.kind == FrameType::taken) return;
            sender.pop();
        }
    }
}

}  // namespace

int main() {
    for (Net net : {local(2), remote(2), mixed(3)})
        for (const bool is_oversubscribed : {false, true}) {
            net.ring_bytes = 256 * 1024;
            net.is_oversubscribed = is_oversubscribed;
            a_flood_is_taken(net);
            the_rest_is_written(net);
        }
    for (const std::size_t size : {20'000, 100'000}) the_answer_is_written(size);
    std::puts("idle ranks");
}
