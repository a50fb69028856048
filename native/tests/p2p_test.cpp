// A stress test of the P2P engine: random messages from a seed, between ranks that are threads. Sizes on both sides of
// each limit, tags, any source, cancelled transfers, receives into longer buffers, several threads per rank.
//
//   p2p_test [number of messages a rank sends] [seed]
#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <thread>
#include <vector>

#include "p2p_group.h"

using namespace ferrodist;

namespace {

constexpr std::uint64_t num_tags = 4;

// The content of message `number` with a tag from one rank to another.
Bytes content(int from, int to, std::uint64_t tag, std::uint64_t number, std::uint64_t seed) {
    std::mt19937_64 random(seed ^ (number * num_tags + tag) * 1000003u ^
                           static_cast<std::uint64_t>(from * 64 + to) << 40);
    static constexpr std::size_t limits[] = {0,      1,      8, 16, 17, 100, 1000, 4000, eager_bytes, eager_bytes + 1,
                                             40'000, 100'000};
    Bytes bytes(limits[random() % std::size(limits)]);
    auto state = static_cast<std::uint32_t>(random());
    for (auto& byte : bytes) {
        state = state * 1664525u + 1013904223u;
        byte = static_cast<std::byte>(state >> 24);
    }
    return bytes;
}

// A rank's program: one thread sends and one receives, with all other ranks and all tags interleaved.
class Program {
public:
    Program(P2PEngine& engine, int rank, int num_ranks, std::uint64_t seed)
        : engine_(engine), rank_(rank), num_ranks_(num_ranks), seed_(seed) {}

    void send_all(std::uint64_t num_messages) {
        std::mt19937_64 random(seed_ + static_cast<std::uint64_t>(rank_));
        struct Started {
            Bytes bytes;
            std::unique_ptr<Send> send;
        };
        std::deque<Started> started;
        const auto finish = [&] {
            require(engine_.wait(*started.front().send, patience), "rank %d: a send does not end", rank_);
            require(started.front().send->outcome == Outcome::done, "wrong outcome of a send");
            started.pop_front();
        };
        for (std::uint64_t number = 0; number < num_messages; ++number)
            for (int to = 0; to < num_ranks_; ++to) {
                if (to == rank_) continue;
                for (std::uint64_t tag = 0; tag < num_tags; ++tag) {
                    Bytes bytes = content(rank_, to, tag, number, seed_);
                    if (random() % 8 == 0) {  // one that is cancelled, if possible, with a tag that no receive has
                        Send cancelled(bytes.data(), bytes.size(), to, Tag{7, 99});
                        require(engine_.start_if_open(cancelled), "the group is open");
                        if (random() % 2 == 0) engine_.wait(cancelled, 1e-5);
                        engine_.cancel(cancelled);
                    }
                    if (engine_.try_send(bytes.data(), bytes.size(), to, Tag{0, tag})) continue;
                    auto send = std::make_unique<Send>(bytes.data(), bytes.size(), to, Tag{0, tag});
                    engine_.start(*send);
                    started.push_back({std::move(bytes), std::move(send)});
                    if (random() % 4 == 0 || started.size() > 16) finish();
                }
            }
        while (!started.empty()) finish();
    }

    void receive_all(std::uint64_t num_messages) {
        std::mt19937_64 random(~seed_ - static_cast<std::uint64_t>(rank_));
        for (std::uint64_t number = 0; number < num_messages; ++number)
            for (std::uint64_t tag = 0; tag < num_tags; ++tag)
                for (int turn = 0; turn < num_ranks_; ++turn) {
                    const int from = tag % 2 == 0 ? turn : num_ranks_ - 1 - turn;
                    if (from != rank_) receive(from, tag, number, random);
                }
    }

private:
    void receive(int from, std::uint64_t tag, std::uint64_t number, std::mt19937_64& random) {
        const Bytes expected = content(from, rank_, tag, number, seed_);
        Bytes bytes(expected.size(), std::byte{0xEE});
        const Tag whole{0, tag};
        for (int attempt = static_cast<int>(random() % 4); attempt == 1 || attempt == 2; attempt = 0) {
            if (attempt == 1) {  // cancelled, perhaps half way
                Receive cancelled(bytes.data(), bytes.size(), from, whole);
                engine_.start(cancelled);
                if (random() % 2 == 0) engine_.wait(cancelled, 1e-5 * static_cast<double>(random() % 20));
                if (!engine_.cancel(cancelled)) {
                    require(cancelled.outcome == Outcome::done && bytes == expected,
                            "wrong bytes in a cancelled receive");
                    return;
                }
            } else {  // of a wrong size: the message stays queued
                Bytes other(expected.size() + 1);
                Receive wrong(other.data(), other.size(), from, whole);
                engine_.start(wrong);
                require(engine_.wait(wrong, patience), "a receive of a wrong size does not end");
                require(wrong.outcome == Outcome::wrong_size && wrong.message_size == expected.size(), "a wrong size");
            }
        }
        std::atomic<bool> has_ended{false};
        const bool accepts_shorter = random() % 4 == 0;
        if (accepts_shorter) bytes.resize(expected.size() + random() % 200, std::byte{0xEE});
        Receive receive(bytes.data(), bytes.size(), from, whole);
        receive.accepts_shorter = accepts_shorter;
        const bool is_watched = random() % 8 == 0;
        receive.is_watched = is_watched;
        receive.owner = &has_ended;
        engine_.start(receive);
        if (is_watched && random() % 2 == 0) {  // without a waiter: the progress thread moves it
            engine_.watch_end(receive);
            engine_.dispatch_events();
            const Deadline deadline(patience);
            while (!has_ended.load()) {
                require(!deadline.expired(), "not reported");
                std::this_thread::yield();
            }
        }
        require(engine_.wait(receive, patience), "rank %d: nothing from rank %d, tag %d, number %d", rank_, from,
                static_cast<int>(tag), static_cast<int>(number));
        while (is_watched && !has_ended.load()) engine_.dispatch_events();
        require(receive.outcome == Outcome::done && receive.peer == from, "wrong outcome of a receive");
        require(receive.message_size == expected.size(), "wrong size of a message");
        require(std::ranges::all_of(bytes.begin() + static_cast<std::ptrdiff_t>(expected.size()), bytes.end(),
                                    [](std::byte each) { return each == std::byte{0xEE}; }),
                "bytes written behind a message");
        bytes.resize(expected.size());
        require(bytes == expected, "rank %d: wrong bytes from rank %d, tag %d, number %d", rank_, from,
                static_cast<int>(tag), static_cast<int>(number));
    }

    P2PEngine& engine_;
    int rank_;
    int num_ranks_;
    std::uint64_t seed_;
};

void stress(const char* what, const Net& net, std::uint64_t total, std::uint64_t seed) {
    const int num_ranks = static_cast<int>(net.hosts.size());
    const auto ranks = static_cast<std::uint64_t>(num_ranks);
    const std::uint64_t num_messages = std::max<std::uint64_t>(1, total / (ranks * (ranks - 1) * num_tags));
    const Group group = make_group(net);
    run_threads(2 * num_ranks, [&](int thread) {
        const int rank = thread / 2;
        Program program(*group[static_cast<std::size_t>(rank)], rank, num_ranks, seed);
        if (thread % 2 == 0)
            program.send_all(num_messages);
        else
            program.receive_all(num_messages);
    });
    for (int rank = 0; rank < num_ranks; ++rank)  // cancelled messages may still be in transit
        for (int other = 0; other < num_ranks; ++other)
            if (rank != other)
                group[static_cast<std::size_t>(rank)]->await_frames(
                    other, group[static_cast<std::size_t>(other)]->num_frames_to(rank), patience);
    for (const auto& engine : group) engine->end_group(7);
    require(num_violations.load() == 0, "a protocol violation was reported");
    for (const auto& engine : group)
        require(engine->unexpected_bytes() == 0, "%d bytes are left", static_cast<int>(engine->unexpected_bytes()));
    leave(group);
    std::printf("%llu messages, %d ranks, %s%s\n",
                static_cast<unsigned long long>(num_messages * ranks * (ranks - 1) * num_tags), num_ranks, what,
                net.is_oversubscribed ? ", oversubscribed" : "");
}

// Receives from any source get each message once, in order per sender.
void any_source_receives_all(const Net& net, std::uint64_t num_messages) {
    const int num_ranks = static_cast<int>(net.hosts.size());
    const Group group = make_group(net);
    run_threads(num_ranks, [&](int rank) {
        P2PEngine& own = *group[static_cast<std::size_t>(rank)];
        std::uint64_t numbers[2]{};
        if (rank != 0) {
            for (std::uint64_t number = 0; number < num_messages; ++number) {
                numbers[1] = number;
                Send send(reinterpret_cast<const std::byte*>(numbers), sizeof(numbers), 0, Tag{1, 5});
                own.start(send);
                require(own.wait(send, patience), "a send does not end");
            }
            return;
        }
        std::vector<std::uint64_t> next(static_cast<std::size_t>(num_ranks), 0);
        for (std::uint64_t i = 0; i < num_messages * static_cast<std::uint64_t>(num_ranks - 1); ++i) {
            Receive receive(reinterpret_cast<std::byte*>(numbers), sizeof(numbers), any_source, Tag{1, 5});
            own.start(receive);
            require(own.wait(receive, patience), "nothing comes");
            require(numbers[1] == next[static_cast<std::size_t>(receive.peer)]++, "out of order");
        }
    });
    std::printf("%llu messages from any of %d ranks\n", static_cast<unsigned long long>(num_messages), num_ranks - 1);
}

// Messages sent before a rank left are still received; further receives from it end.
void sent_messages_survive_the_sender(const Net& net) {
    const Group group = make_group(net);
    Bytes sent(4000, std::byte{3}), received(4000);
    const Deadline deadline(patience);
    while (!group[0]->try_send(sent.data(), 4000, 1, Tag{})) {  // fails while another thread holds the lock
        require(!deadline.expired(), "no room for a message");
        std::this_thread::yield();
    }
    Bytes large(eager_bytes + 1);
    Send offered(large.data(), large.size(), 1, Tag{});
    group[0]->start(offered);
    const std::uint64_t num_frames = group[0]->num_frames_to(1);
    group[0]->close();
    require(offered.outcome == Outcome::ended, "an offered message outlives its sender");
    group[1]->await_frames(0, num_frames, patience);
    group[1]->lose(0);
    Receive first(received.data(), received.size(), 0, Tag{});
    group[1]->start(first);
    require(first.outcome == Outcome::done && received == sent, "a message that was sent before is lost");
    Receive second(large.data(), large.size(), 0, Tag{});
    group[1]->start(second);
    require(group[1]->end_unmatched(second, 5) && second.reason == 5, "an offer outlives its sender");
    require(!group[1]->try_send(sent.data(), 8, 0, Tag{}), "a message was sent to a lost rank");
    std::printf("sent messages survive the sender\n");
}

// Every protocol violation disconnects its rank, is reported once, and has no other effect.
void protocol_violations_are_rejected() {
    const Frame wrong[] = {
        {.kind = static_cast<FrameType>(9)},
        {.kind = FrameType::eager, .size = eager_bytes + 1},
        {.kind = FrameType::eager, .size = 100},                // no payload
        {.kind = FrameType::eager, .length = 100, .size = 50},  // more than the message has
        {.kind = FrameType::eager, .length = 8, .size = 8, .offset = 1},
        {.kind = FrameType::offer, .length = 8, .message = 3, .size = 100'000},
        {.kind = FrameType::offer, .message = 3, .size = std::uint64_t{1} << 60},
        {.kind = FrameType::data, .message = 3, .size = 100'000},               // nothing
        {.kind = FrameType::data, .length = 8, .message = 2, .size = 100'000},  // of an offer that was not granted
        {.kind = FrameType::data, .length = 8, .message = 1, .size = 3000, .offset = 2000},  // out of order
        {.kind = FrameType::data, .length = 8, .message = 1, .size = 2000, .offset = 1000},  // of another size
        {.kind = FrameType::offer, .message = 2, .size = 100'000},                           // a duplicate
        {.kind = FrameType::grant, .length = 8, .size = 8},
        {.kind = FrameType::withdraw, .length = 8, .size = 8},
        {.kind = FrameType::taken, .length = 8, .size = 8},
        {.kind = FrameType::unreadable, .length = 8, .size = 8},
    };
    const Bytes bytes(4000, std::byte{1});
    for (const Net& net : {local(2), remote(2)})
        for (const Frame& frame : wrong) {
            num_violations.store(0);
            Made made;
            const Group group = make_group(net, &made);
            shm::RingWriter writer(*made.rings, 0, net.hosts[1] == 0 ? 1 : 0);
            const auto write = [&](const Frame& some) {
                if (net.hosts[1] == 0) {
                    writer.write(some, bytes.data());
                } else {
                    require(::write(made.socket.get(), &some, sizeof some) == sizeof some, "a frame");
                    require(::write(made.socket.get(), bytes.data(), some.length) == some.length, "its payload");
                }
            };
            write({.kind = FrameType::eager, .length = 1000, .message = 1, .size = 3000});
            write({.kind = FrameType::offer, .message = 2, .size = 100'000});
            write(frame);
            Bytes into(3000);
            Receive receive(into.data(), into.size(), 0, Tag{});
            group[1]->start(receive);
            require(!group[1]->wait(receive, 0.01), "half a message completed a receive");
            group[1]->dispatch_events();
            require(num_violations.load() == 1, "frame %d was not reported", static_cast<int>(&frame - wrong));
            require(group[1]->cancel(receive), "the receive has ended");
        }
    // Impossible positions, and a frame that ends outside the ring.
    for (const std::uint64_t tail : {std::uint64_t{1}, std::uint64_t{64}, std::uint64_t{1} << 40}) {
        num_violations.store(0);
        Made made;
        const Group group = make_group(local(2), &made);
        const Frame frame{.kind = FrameType::eager, .length = 0xFFFFFFFF, .size = 100};
        std::memcpy(made.rings->bytes(0, 1), &frame, sizeof(frame));
        made.rings->ring(0, 1).tail.store(tail);
        (void)group[1]->active_transfers();
        group[1]->dispatch_events();
        require(num_violations.load() == 1, "an impossible tail was not reported");
    }
    num_violations.store(0);
    std::printf("protocol violations are rejected\n");
}

// A lost connection without a reason is reported once, after a while.
void a_lost_connection_is_reported() {
    num_gone.store(0);
    Made made;
    const Group group = make_group(remote(2), &made);
    num_gone.store(0);
    made.socket = Descriptor();
    const Deadline deadline(patience);
    while (num_gone.load() == 0) {
        require(!deadline.expired(), "not reported");
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    std::printf("a lost connection is reported\n");
}

// A rank that only computes still receives: its progress thread moves the messages.
void an_idle_rank_receives_messages(const Net& net) {
    const Group group = make_group(net);
    Bytes bytes(4000);
    for (int i = 0; i < 100; ++i) {
        Send send(bytes.data(), bytes.size(), 1, Tag{});
        group[0]->start(send);
        require(group[0]->wait(send, patience), "the message is not received");
    }
    std::printf("an idle rank receives messages\n");
}

// One thread waits for a signal from another one, which also posts receives ahead: each signal ends one wait, and each
// message is reported in order, without a waiter.
void a_signal_ends_a_wait(const Net& net, std::uint64_t num_rounds) {
    const Group group = make_group(net);
    P2PEngine& own = *group[1];
    std::atomic<std::uint64_t> num_woken{0};
    std::atomic<bool> has_ended{false};
    std::atomic<std::uint64_t> num_received{0};
    Transfer signal(any_source, Tag{});
    std::thread waiter([&] {
        for (std::uint64_t round = 1; round <= num_rounds; ++round) {
            require(own.wait(signal, patience), "a signal does not wake who waits");
            signal.has_ended.store(false);
            num_woken.store(round);
        }
    });
    std::thread sender([&] {
        for (std::uint64_t number = 0; !has_ended.load(); ++number) {
            while (number > num_received.load() + 1000 && !has_ended.load()) std::this_thread::yield();
            Send send(reinterpret_cast<const std::byte*>(&number), sizeof(number), 1, Tag{1, 5});
            group[0]->start(send);
            require(group[0]->wait(send, patience), "a send does not end");
        }
    });
    struct Slot {
        std::uint64_t number = 0;
        std::atomic<bool> has_ended{false};
        std::optional<Receive> receive;
    };
    std::array<Slot, 4> slots;
    const auto ask = [&](Slot& slot) {
        slot.has_ended.store(false);
        auto* data = reinterpret_cast<std::byte*>(&slot.number);
        Receive& receive = slot.receive.emplace(data, sizeof(slot.number), 0, Tag{1, 5});
        receive.owner = &slot.has_ended;
        receive.is_watched = true;
        own.start_with_listener(receive);
    };
    for (Slot& slot : slots) ask(slot);
    own.watch_end(*slots[0].receive);
    const auto drain = [&] {
        while (slots[num_received % slots.size()].has_ended.load()) {
            Slot& slot = slots[num_received % slots.size()];
            require(slot.number == num_received++, "out of order");
            ask(slot);
        }
        own.dispatch_events();
    };
    for (std::uint64_t round = 1; round <= num_rounds; ++round) {
        const Deadline deadline(patience);
        if (round % 7 == 0) std::this_thread::sleep_for(std::chrono::microseconds(50));  // the waiter falls asleep
        own.signal(signal);
        while (num_woken.load() != round) {
            drain();
            require(!deadline.expired(), "a signal is lost");
        }
    }
    waiter.join();
    const Deadline deadline(patience);
    for (const std::uint64_t goal = num_received + 100; num_received < goal; drain()) {  // no waiter
        require(!deadline.expired(), "a message is not reported");
        std::this_thread::yield();
    }
    has_ended.store(true);
    sender.join();
    for (Slot& slot : slots) {
        if (!slot.receive->has_ended.load()) own.cancel(*slot.receive);
    }
    leave(group);
    std::printf("%llu signals, %llu messages reported\n", static_cast<unsigned long long>(num_rounds),
                static_cast<unsigned long long>(num_received));
}

}  // namespace

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // the last line is printed even if it crashes
    const std::uint64_t total = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 40000;
    const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    for (const Net& net : {local(2), remote(2)}) {
        sent_messages_survive_the_sender(net);
        an_idle_rank_receives_messages(net);
    }
    for (Net net : {local(2), remote(2)})
        for (const bool is_oversubscribed : {false, true}) {
            net.is_oversubscribed = is_oversubscribed;
            a_signal_ends_a_wait(net, total / 20);
        }
    protocol_violations_are_rejected();
    a_lost_connection_is_reported();
    for (const Net& net : {local(5), remote(5), mixed(5)}) any_source_receives_all(net, total / 60);
    const auto with = [](Net net, bool is_oversubscribed, std::size_t ring_bytes, int socket_bytes) {
        net.is_oversubscribed = is_oversubscribed;
        net.ring_bytes = ring_bytes;
        net.socket_bytes = socket_bytes;
        return net;
    };
    stress("rings of 16 KiB", with(local(2), false, 16 * 1024, 0), total / 8, seed);
    stress("rings of 1 MiB", with(local(2), true, 1024 * 1024, 0), total / 8, seed + 1);
    stress("rings of 32 KiB", with(local(3), true, 32 * 1024, 0), total / 12, seed + 2);
    stress("rings of 16 KiB", with(local(4), false, 16 * 1024, 0), total / 12, seed + 3);
    stress("rings of 16 KiB", with(local(8), true, 16 * 1024, 0), total / 12, seed + 4);
    stress("connections", with(remote(2), false, 16 * 1024, 0), total / 12, seed + 5);
    stress("connections of 8 KiB", with(remote(2), true, 16 * 1024, 8 * 1024), total / 12, seed + 6);
    stress("connections of 8 KiB", with(remote(4), false, 16 * 1024, 8 * 1024), total / 12, seed + 7);
    stress("rings and connections", with(mixed(4), true, 16 * 1024, 0), total / 12, seed + 8);
    stress("rings and connections of 8 KiB", with(mixed(6), true, 16 * 1024, 8 * 1024), total / 12, seed + 9);
}
