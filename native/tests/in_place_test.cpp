// A stress test of messages that are read in place: no message that its sender has withdrawn is received, whenever it
// does so, and every other one is, once and whole.
//
//   in_place_test [number of messages] [seed]
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "p2p_group.h"

using namespace ferrodist;

namespace {

constexpr Tag tag{0, 1};

// The content of a message: its number again and again.
void fill(Bytes& bytes, std::uint64_t number) {
    for (std::size_t at = 0; at + sizeof number <= bytes.size(); at += sizeof number)
        std::memcpy(bytes.data() + at, &number, sizeof number);
}

std::uint64_t number_in(const Bytes& bytes) {
    std::uint64_t number = 0;
    std::memcpy(&number, bytes.data(), sizeof number);
    for (std::size_t at = 0; at < bytes.size(); at += sizeof number)
        require(std::memcmp(bytes.data() + at, &number, sizeof number) == 0, "a message of two");
    return number;
}

void pause(std::mt19937_64& random, std::uint64_t most_turns) {
    for (std::uint64_t turns = random() % most_turns; turns != 0; --turns) relax();
}

// One rank sends; it withdraws some messages, at any time, and overwrites each when its send has ended. The other one
// receives, and cancels some receives. Both ranks do both, if `is_mutual`.
void withdrawn_messages_are_not_received(const Net& net, std::uint64_t total, std::size_t size, bool is_mutual,
                                         std::uint64_t seed) {
    const Group group = make_group(net);
    std::vector<std::vector<std::uint64_t>> sent(2), received(2);
    const auto send_all = [&](int rank) {
        P2PEngine& own = *group[static_cast<std::size_t>(rank)];
        std::mt19937_64 random(seed + static_cast<std::uint64_t>(rank));
        Bytes bytes(size);
        for (std::uint64_t number = 0; number <= total; ++number) {
            fill(bytes, number);
            Send send(bytes.data(), bytes.size(), 1 - rank, tag);
            send.prefers_offer = random() % 2 == 0;
            own.start(send);
            if (number != total && random() % 2 == 0) {
                pause(random, 20'000);
                own.cancel(send);
            } else if (send.prefers_offer) {
                pause(random, 5'000);
                own.send_now(send);
            }
            require(own.wait(send, patience), "a send does not end");
            if (send.outcome == Outcome::done) sent[static_cast<std::size_t>(rank)].push_back(number);
            std::ranges::fill(bytes, std::byte{0xFF});
        }
    };
    const auto receive_all = [&](int rank) {
        P2PEngine& own = *group[static_cast<std::size_t>(rank)];
        std::mt19937_64 random(seed + 7 + static_cast<std::uint64_t>(rank));
        Bytes bytes(size);
        auto& numbers = received[static_cast<std::size_t>(rank)];
        while (numbers.empty() || numbers.back() != total) {
            Receive receive(bytes.data(), bytes.size(), 1 - rank, tag);
            own.start(receive);
            if (random() % 4 == 0) {
                pause(random, 20'000);
                if (own.cancel(receive)) continue;
            }
            require(own.wait(receive, patience), "nothing comes");
            require(receive.outcome == Outcome::done, "wrong outcome of a receive");
            numbers.push_back(number_in(bytes));
            std::ranges::fill(bytes, std::byte{0xEE});
        }
    };
    run_threads(is_mutual ? 4 : 2, [&](int thread) {
        const int rank = thread / 2;
        thread % 2 == 0 ? send_all(rank) : receive_all(1 - rank);
    });
    for (int rank = 0; rank < (is_mutual ? 2 : 1); ++rank)
        require(sent[static_cast<std::size_t>(rank)] == received[static_cast<std::size_t>(1 - rank)],
                "rank %d sent others than were received", rank);
    require(num_violations.load() == 0, "a protocol violation was reported");
    leave(group);
    std::printf("%llu of %llu messages of %llu bytes were not withdrawn%s\n",
                static_cast<unsigned long long>(sent[0].size()), static_cast<unsigned long long>(total),
                static_cast<unsigned long long>(size), is_mutual ? ", in both directions" : "");
}

// A message of several pieces goes on without a thread that waits for it: the progress thread reads it.
void the_progress_thread_reads_on() {
    Net net = local(2);
    net.ring_bytes = 512 * 1024;
    const Group group = make_group(net);
    Bytes bytes(std::size_t{5} << 20), into(bytes.size());
    for (std::uint64_t number = 0; number < 8; ++number) {
        fill(bytes, number);
        Send send(bytes.data(), bytes.size(), 1, tag);
        Receive receive(into.data(), into.size(), 0, tag);
        group[0]->start(send);
        if (number % 2 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(3));  // the offer is there, or comes
        group[1]->start(receive);
        const Deadline deadline(patience);
        while (!receive.has_ended.load()) {
            require(!deadline.expired(), "message %d stops half way", static_cast<int>(number));
            std::this_thread::sleep_for(std::chrono::microseconds(100));
        }
        require(number_in(into) == number, "wrong bytes");
        require(group[0]->wait(send, patience) && send.outcome == Outcome::done, "a send does not end");
    }
    std::printf("the progress thread reads on\n");
}

// A message whose receive is cancelled half way goes to the next receive of its tag, from its beginning: in place again,
// even if it would come through the ring if it came now. For that the fourth message of this size is measured meanwhile.
void a_cancelled_receive_leaves_its_message_to_the_next() {
    const Group group = make_group(local(2));
    const Tag other{0, 2};
    Bytes small(std::size_t{17} << 20), large(std::size_t{31} << 20), into_small(small.size()), first(large.size()),
        second(large.size());
    for (std::uint64_t number = 0; number < 3; ++number) {
        Send send(small.data(), small.size(), 1, other);
        Receive receive(into_small.data(), into_small.size(), 0, other);
        group[0]->start(send);
        group[1]->start(receive);
        require(group[1]->wait(receive, patience) && group[0]->wait(send, patience), "a message does not come");
    }
    fill(large, 9);
    Send fourth(small.data(), small.size(), 1, other);
    Send send(large.data(), large.size(), 1, tag);
    group[0]->start(fourth);
    group[0]->start(send);
    Receive receive_fourth(into_small.data(), into_small.size(), 0, other);
    Receive cancelled(first.data(), first.size(), 0, tag);
    Receive next(second.data(), second.size(), 0, tag);
    group[1]->start(receive_fourth);
    group[1]->start(cancelled);
    group[1]->start(next);
    require(group[1]->wait(receive_fourth, patience), "a message does not come");
    const bool is_cancelled = group[1]->cancel(cancelled);
    if (!is_cancelled) require(group[1]->cancel(next), "one message completes two receives");
    require(group[0]->wait(fourth, patience) && group[0]->wait(send, patience), "a send does not end");
    if (is_cancelled) require(group[1]->wait(next, patience), "the message does not come again");
    require(number_in(is_cancelled ? second : first) == 9, "wrong bytes");
    group[1]->dispatch_events();
    require(num_violations.load() == 0, "a protocol violation was reported");
    std::printf("a cancelled receive leaves its message to the next%s\n", is_cancelled ? "" : ", but it had come");
}

// More messages than can be offered in place at a time, none of which is received yet.
void messages_beyond_the_places_come() {
    const Group group = make_group(local(2));
    std::vector<Bytes> all;
    std::vector<std::unique_ptr<Send>> sends;
    for (std::uint64_t number = 0; number < 3 * shm::num_published; ++number) {
        fill(all.emplace_back(eager_bytes * 2), number);
        group[0]->start(*sends.emplace_back(std::make_unique<Send>(all.back().data(), all.back().size(), 1, tag)));
    }
    Bytes into(eager_bytes * 2);
    for (std::uint64_t number = 0; number < all.size(); ++number) {
        Receive receive(into.data(), into.size(), 0, tag);
        group[1]->start(receive);
        const Deadline deadline(patience);
        while (!group[1]->wait(receive, 1e-4)) {
            require(!deadline.expired(), "message %d does not come", static_cast<int>(number));
            group[0]->wait(*sends[number], 0.0);  // moves what goes through the ring
        }
        require(number_in(into) == number, "out of order");
    }
    for (const auto& send : sends) require(group[0]->wait(*send, patience), "a send does not end");
    std::printf("messages beyond the places come\n");
}

// A message that cannot be read in place comes through the ring, and its sender offers no more in place.
void unreadable_messages_come_through_the_ring() {
    Made made;
    const Group group = make_group(local(2), &made);
    shm::RingWriter writer(*made.rings, 0, 1);
    shm::RingReader reader(*made.rings, 1, 0);
    Bytes bytes(12'288), into(bytes.size());  // the ring has room for it
    fill(bytes, 5);
    auto process = shm::ProcessRecord::own();
    ++process.nonce;  // as of another process with this id
    const MessageMemory memory{.process = process, .address = reinterpret_cast<std::uintptr_t>(bytes.data())};
    Frame frame{
        .kind = FrameType::offer, .length = sizeof memory, .message = 4, .tag = tag.number, .size = bytes.size()};
    writer.write(frame, reinterpret_cast<const std::byte*>(&memory));
    Receive receive(into.data(), into.size(), 0, tag);
    group[1]->start(receive);
    const Deadline deadline(patience);
    std::vector<FrameType> answers;
    while (answers.size() < 2) {
        require(!deadline.expired(), "no answer to an offer");
        group[1]->wait(receive, 0.0);
        while (reader.front(frame) == Channel::Front::frame) {
            answers.push_back(frame.kind);
            require(frame.kind == FrameType::unreadable || frame.message == 4, "an answer to another message");
            reader.pop(frame.length);
        }
    }
    require(answers[0] == FrameType::unreadable && answers[1] == FrameType::grant, "another answer to an offer");
    for (std::size_t at = 0; at < bytes.size(); at += 4096)
        writer.write({.kind = FrameType::data, .length = 4096, .message = 4, .size = bytes.size(), .offset = at},
                     bytes.data() + at);
    require(group[1]->wait(receive, patience) && receive.outcome == Outcome::done, "a granted message does not come");
    require(number_in(into) == 5, "wrong bytes");
    writer.write({.kind = FrameType::unreadable}, nullptr);  // rank 1 offers nothing in place any more
    (void)group[1]->active_transfers();
    Send send(bytes.data(), bytes.size(), 0, tag);
    group[1]->start(send);
    require(reader.front(frame) == Channel::Front::frame && frame.kind == FrameType::offer && frame.length == 0,
            "an offer in place to a rank that cannot read");
    require(group[1]->cancel(send), "the send has ended");
    std::printf("unreadable messages come through the ring\n");
}

}  // namespace

int main(int argc, char** argv) {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);  // the last line is printed even if it crashes
    const std::uint64_t total = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 10000;
    const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    unreadable_messages_come_through_the_ring();
    the_progress_thread_reads_on();
    a_cancelled_receive_leaves_its_message_to_the_next();
    messages_beyond_the_places_come();
    for (const bool is_mutual : {false, true})
        for (const std::size_t size : {std::size_t{4096}, eager_bytes, 2 * eager_bytes, std::size_t{200'000}})
            withdrawn_messages_are_not_received(local(2), total / 8, size, is_mutual, seed + size);
    withdrawn_messages_are_not_received(local(2), total / 200, std::size_t{3} << 20, false, seed);
}
