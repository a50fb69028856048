// Messages between the ranks of one host, through rings in shared memory, and the one place where those and the messages
// of other hosts meet their receives.
//
// [Note: frames]
// A message of up to `eager_bytes` is written to the ring at once, in one frame or several. A larger one is offered, and
// its bytes follow when the other rank has granted it, straight from the sender's buffer through the ring into the
// receiver's. Its sender may take a message back until its last byte is in the ring.
//
// [Note: who moves messages]
// Whoever waits for a transfer moves all of this rank's messages meanwhile: it spins for a while, then sleeps on the
// rank's doorbell. When nobody waits, the `keeper` does, a thread that sleeps on the same bell. A rank that sends and
// receives all the time is between two waits for most of it, and waking the keeper for each message would cost more than
// the messages: so while there is traffic the keeper does not ask to be woken, but looks once a millisecond, and only
// when it has seen nothing go on in one of these does it ask (`Bell::asleep`) and sleep until it is rung for. It asks at
// once where somebody listens for a transfer's end without waiting here. A rank that only computes is left alone.
//
// [Note: the lock]
// One lock a rank, which is held while bytes move, for up to `budget_bytes` at a time. Its holder never waits for
// anything else, the interpreter least of all: what concerns the messenger's user is done after its release (`Work`).
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/deadline.h"
#include "engine/mailbox.h"
#include "transport/shm/ring.h"

namespace ferrodist {

// What a messenger's user is to do.
struct News {
    enum class Kind : int {
        grant,   // tell the sender of a linked message that it may come
        full,    // `rank` sent `message`, and there is no room for what nobody asks for
        broken,  // `rank` wrote to its ring what no rank would write
    };

    Kind kind;
    int rank;
    std::shared_ptr<Message> message;
};

struct Work {
    std::vector<News> news;
    Transfer* first_ended = nullptr;
};

// Which transfers are under way, as far as ends of groups and ranks tell them apart.
struct Party {
    bool is_send;
    std::uint64_t group;
    int peer;  // as asked for

    friend bool operator==(const Party&, const Party&) = default;
};

class Messenger {
public:
    struct Settings {
        int rank = 0;
        int num_ranks = 1;
        std::size_t eager_bytes = 0;
        std::size_t max_unasked_bytes = 0;
    };

    // `on_work` is called, without the lock and by any thread, when `take_work` has something.
    Messenger(const Settings& settings, std::function<void()> on_work);
    Messenger(const Messenger&) = delete;
    Messenger& operator=(const Messenger&) = delete;
    ~Messenger();

    // Gets the rings of this host; `local_indexes[r]` is the place of rank r in them, -1 for ranks of other hosts. Called
    // once at most, before any message to a rank of this host.
    void attach(std::shared_ptr<const shm::Rings> rings, const std::vector<int>& local_indexes, bool is_crowded,
                std::uint32_t spin_micros);

    [[nodiscard]] const Settings& settings() const noexcept { return settings_; }

    // Whether `try_` calls are worth the try: false once the group has ended here. In a forked child, at once.
    [[nodiscard]] bool is_open() const noexcept { return is_open_.load(std::memory_order_relaxed); }

    // Sends a small message at once; false, with nothing done, when that can't be, or can't be now.
    bool try_send(const std::byte* data, std::size_t size, int dst, const Tag& tag);
    // Starts a send to a rank of this host, if it and the group are there: false, with nothing done, if they are not.
    bool start_if_open(Send& send);
    // The same for a receive, from any host. `may_wait` is whether the lock is worth waiting for.
    bool start_if_open(Receive& receive, bool may_wait);

    // Start whatever the state of the group is, of which the caller takes care; a send's rank is of this host.
    void start(Send& send);
    void start(Receive& receive);

    // Blocks until the transfer has ended; false when `timeout` seconds have passed before.
    bool wait(const Transfer& transfer, double timeout);
    // Takes a send back, or gives a receive up. False when it has ended.
    bool cancel(Send& send) { return cancel(send, Outcome::cancelled, 0); }
    bool cancel(Receive& receive) { return cancel(receive, Outcome::cancelled); }
    bool end(Send& send, std::size_t reason) { return cancel(send, Outcome::ended, reason); }
    // Ends a receive for which nothing has come, not even to the rings.
    bool end_unmatched(Receive& receive, std::size_t reason);
    // Has the owner of a watched transfer told of its end soon, though nobody waits for it here.
    void listen(Transfer& transfer);

    // Linked messages, from ranks of other hosts. One thread calls these.
    bool arrive(const std::shared_ptr<Message>& message) {
        const Held held(*this);
        return mailbox_.arrive(message);
    }
    // Where bytes from `offset` go, which the caller may write until `end_write`; null when nobody wants them.
    std::byte* begin_write(Message& message, std::size_t offset);
    void end_write(const std::shared_ptr<Message>& message, std::size_t count);
    void withdraw(Message& message);

    // The ends of groups and ranks. What came before the news is taken in first.
    std::vector<Party> parties();
    void fail(const Party& party, std::size_t reason);
    void open_group(std::uint64_t group, const std::vector<int>& members);
    void end_group(std::uint64_t group);
    void lose(int rank);

    struct Waiting {
        std::uint64_t number;
        int source;
        Tag tag;
    };
    std::vector<Waiting> waiting_messages();
    void drop(std::uint64_t number);
    [[nodiscard]] int fullest_source(int newest, std::size_t size_kept);
    [[nodiscard]] std::size_t unasked_bytes();

    // The user's part of what has happened; see `on_work`.
    void do_work() {
        if (has_work_.load(std::memory_order_relaxed) && !is_abandoned_.load()) on_work_();
    }
    Work take_work();

    // Ends all that is under way, and the keeper.
    void close();
    // In a forked child: all of it is the parent's.
    void abandon() noexcept;

private:
    struct Peer {
        Peer(const shm::Rings& rings, int its_rank, int own_index, int its_index)
            : rank(its_rank),
              bell(rings.bell(its_index)),
              writer(rings, own_index, its_index),
              reader(rings, its_index, own_index) {}

        int rank;
        shm::Bell& bell;
        shm::RingWriter writer;
        shm::RingReader reader;
        bool is_lost = false;  // nothing goes there or comes from there
        std::uint64_t num_messages = 0;
        std::deque<shm::Frame> notices;  // grants and withdrawals
        Queue<Send> queued;              // not wholly announced
        Queue<Send> offered;
        Queue<Send> granted;
        std::unordered_map<std::uint64_t, std::shared_ptr<Message>> incoming;  // announced and not whole, by its number

        [[nodiscard]] bool has_outgoing() const noexcept {
            return !notices.empty() || queued.first() != nullptr || granted.first() != nullptr;
        }
    };
    struct Group {
        bool has_ended = false;
        std::vector<bool> members;  // by rank; empty while this rank has not made the group: then all may be
    };

    // The lock, and what follows its release: waking who waits for what has ended, and the user's work.
    class Held {
    public:
        explicit Held(Messenger& messenger, bool does_work = true)
            : messenger_(messenger), lock_(messenger.mutex_), does_work_(does_work) {}
        Held(Messenger& messenger, std::try_to_lock_t)
            : messenger_(messenger), lock_(messenger.mutex_, std::try_to_lock), does_work_(false) {}
        Held(const Held&) = delete;
        Held& operator=(const Held&) = delete;
        ~Held();

        [[nodiscard]] bool is_held() const noexcept { return lock_.owns_lock(); }
        std::unique_lock<std::mutex>& lock() noexcept { return lock_; }
        // Its thread counts as one that sleeps, which need not be woken.
        void set_asleep() noexcept { is_asleep_ = true; }

    private:
        Messenger& messenger_;
        std::unique_lock<std::mutex> lock_;
        bool does_work_;
        bool is_asleep_ = false;
    };

    // Counts a thread that waits, and leaves the keeper in its place.
    class Watch;

    // All of these run under the lock.
    [[nodiscard]] Peer* peer_of(int rank) const noexcept { return by_rank_[static_cast<std::size_t>(rank)]; }
    bool poll(const Transfer* until);
    bool read(Peer& peer, const Transfer* until);
    [[nodiscard]] bool take(Peer& peer, const shm::Frame& frame);
    void take_eager(Peer& peer, const shm::Frame& frame);
    [[nodiscard]] bool take_data(Peer& peer, const shm::Frame& frame);
    void take_grant(Peer& peer, std::uint64_t number);
    std::shared_ptr<Message> announce(Peer& peer, const shm::Frame& frame, bool is_offered);
    void advance(Peer& peer, Message& message, const shm::Frame& frame);
    void break_off(Peer& peer);
    bool pump(Peer& peer);
    bool put(Peer& peer, Send& send);
    void enqueue(Peer& peer, Send& send);
    static void notify(Peer& peer, shm::FrameKind kind, std::uint64_t number);
    bool cancel_held(Send& send, Outcome outcome, std::size_t reason);
    void await_writer(std::unique_lock<std::mutex>& lock, const Receive& receive);
    void settle();
    [[nodiscard]] bool is_welcome(int source, const Tag& tag) const;
    [[nodiscard]] bool has_started() const;

    bool cancel(Send& send, Outcome outcome, std::size_t reason);
    bool cancel(Receive& receive, Outcome outcome);

    [[nodiscard]] bool has_news() const noexcept;
    bool spin(const Transfer& transfer);
    void ask_keeper();
    void keep();

    Settings settings_;
    std::function<void()> on_work_;
    std::mutex mutex_;
    std::condition_variable writer_done_;
    Mailbox mailbox_;
    std::shared_ptr<const shm::Rings> rings_;
    std::vector<std::unique_ptr<Peer>> peers_;  // on this host
    std::vector<Peer*> by_rank_;
    std::unordered_map<std::uint64_t, Group> groups_;
    std::vector<bool> lost_;  // by rank
    std::size_t num_lost_ = 0;
    std::vector<News> news_;
    std::size_t num_ended_seen_ = 0;  // of `mailbox_.num_ended`, when waiters were last woken for it
    std::uint64_t num_starts_ = 0;    // of transfers, to see whether there is traffic

    shm::Bell own_bell_{};  // of a rank without rings
    std::atomic<shm::Bell*> bell_;
    bool is_crowded_ = false;
    std::chrono::microseconds spin_time_{0};
    std::atomic<bool> is_open_{true};
    std::atomic<bool> is_abandoned_{false};
    std::atomic<bool> has_work_{false};
    std::atomic<bool> has_outgoing_{false};
    std::atomic<bool> has_peers_{false};     // set once `peers_` is complete
    std::atomic<bool> is_ticking_{true};     // the keeper looks by itself, and soon
    std::atomic<int> num_waiters_{0};        // partner of `is_ticking_`: one of keeper and last waiter sees the other
    std::atomic<int> num_asleep_{0};         // of the waiters
    bool is_closed_ = false;
    std::unique_ptr<std::thread> keeper_;
};

}  // namespace ferrodist
