// Messages between the ranks of a group, through rings in shared memory and over connections, and the one place where
// they meet their receives.
//
// [Note: who moves messages]
// Whoever waits for a transfer moves all of this rank's messages meanwhile: it spins for a while, then sleeps on the
// rank's doorbell. When nobody waits, the `keeper` does, a thread that sleeps on the same bell. A rank that sends and
// receives all the time is between two waits for most of it, and waking the keeper for each message would cost more than
// the messages: so while there is traffic the keeper does not ask to be woken, but looks once a millisecond, and only
// when it has seen nothing go on in one of these does it ask (`Doorbell::asleep`) and sleep until it is rung for. It asks at
// once where somebody listens for a transfer's end without waiting here. A rank that only computes is left alone.
//
// [Note: who watches connections]
// A doorbell is not rung by what comes over a connection. A thread of its own sleeps on the connections, armed whenever
// somebody sleeps on the bell; it moves what has come, and wakes whose transfer has ended by that.
//
// [Note: the lock]
// One lock a rank, which is held while bytes move, for up to a budget at a time. Its holder never waits for anything
// else, the interpreter least of all: what concerns the messenger's user is done after its release (`Work`).
//
// [Note: lost connections]
// Why a rank is gone, those who hear of ranks' ends know, which may be a moment after its connection has ended. Transfers
// with it wait for that. The messenger says by itself that a connection has ended only when nobody has for a while.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/spin.h"
#include "base/descriptor.h"
#include "engine/peer.h"
#include "engine/admission.h"
#include "transport/shm/ring_channel.h"
#include "transport/tcp/tcp_channel.h"

namespace ferrodist {

// What a messenger's user is to do.
struct Work {
    std::vector<PeerEvent> news;
    Transfer* first_ended = nullptr;
};

// Which transfers are under way, as far as ends of groups and ranks tell them apart.
struct Party {
    bool is_send;
    std::uint64_t group;
    int peer;  // as asked for

    friend bool operator==(const Party&, const Party&) = default;
};

class P2PEngine {
public:
    struct Settings {
        int rank = 0;
        std::size_t eager_bytes = 0;
        std::size_t max_unasked_bytes = 0;
        bool is_crowded = false;
        std::uint32_t spin_micros = 0;
    };
    // To each rank of the group: its place in the rings of this host, or -1 and a connection.
    struct Ways {
        std::shared_ptr<const shm::Rings> rings;
        std::vector<int> local_indexes;
        std::vector<Descriptor> sockets;
    };

    // `on_work` is called, without the lock and by any thread, when `take_work` has something.
    P2PEngine(const Settings& settings, Ways ways, std::function<void(P2PEngine&)> on_work);
    P2PEngine(const P2PEngine&) = delete;
    P2PEngine& operator=(const P2PEngine&) = delete;
    ~P2PEngine();

    [[nodiscard]] const Settings& settings() const noexcept { return settings_; }
    [[nodiscard]] int num_ranks() const noexcept { return static_cast<int>(by_rank_.size()); }

    // Whether `try_` calls are worth the try: false once the group has ended here. In a forked child, at once.
    [[nodiscard]] bool is_open() const noexcept { return is_open_.load(std::memory_order_relaxed); }

    // Sends a small message at once; false, with nothing done, when that can't be, or can't be now.
    bool try_send(const std::byte* data, std::size_t size, int dst, const Tag& tag);
    // Starts a send, if its rank and the group are there: false, with nothing done, if they are not.
    bool start_if_open(Send& send);
    // The same for a receive. `may_wait` is whether the lock is worth waiting for.
    bool start_if_open(Receive& receive, bool may_wait);

    // Start whatever the state of the group is, of which the caller takes care.
    void start(Send& send);
    void start(Receive& receive);
    // A receive whose owner listens for its end from the start. For the first of some, `listen` is called afterwards.
    void start_heard(Receive& receive);

    // Blocks until the transfer has ended; false when `timeout` seconds have passed before.
    bool wait(const Transfer& transfer, double timeout);
    // Ends what nobody moves, and that a thread may `wait` for.
    void signal(Transfer& transfer);
    // Takes a send back, or gives a receive up. False when it has ended, or is bound to.
    bool cancel(Send& send) { return cancel(send, Outcome::cancelled, 0); }
    bool cancel(Receive& receive);
    bool end(Send& send, std::size_t reason) { return cancel(send, Outcome::ended, reason); }
    // Ends a receive for which nothing has come so far.
    bool end_unmatched(Receive& receive, std::size_t reason);
    // Has the owner of a watched transfer told of its end soon, though nobody waits for it here.
    void listen(Transfer& transfer);

    // The ends of groups and ranks. What came before the news is taken in first.
    std::vector<Party> parties();
    void fail(const Party& party, std::size_t reason);
    void open_group(std::uint64_t group, const std::vector<int>& members);
    void end_group(std::uint64_t group);
    void forget_group(std::uint64_t group);
    void lose(int rank);
    // Frames that have been sent to a rank, where what it is told another way may overtake them; and a wait until so many
    // have come from one, for at most `timeout` seconds.
    std::uint64_t num_frames_to(int rank);
    void await_frames(int rank, std::uint64_t count, double timeout);

    [[nodiscard]] int fullest_source(int newest, std::size_t size_kept);
    [[nodiscard]] std::size_t unasked_bytes();

    // The user's part of what has happened; see `on_work`.
    void do_work() {
        for (int turn = 0; has_work_.load(std::memory_order_relaxed) && !is_abandoned_.load(); ++turn) {
            if (turn == most_turns) return call_keeper();
            on_work_(*this);
        }
    }
    Work take_work();

    // Ends all that is under way, and the threads. What was sent still goes on its way until `drain`.
    void close();
    // After `close`: takes leave of the ranks on other hosts, for at most `timeout` seconds, and closes the connections.
    void drain(double timeout);
    // In a forked child: all of it is the parent's.
    void abandon() noexcept;

private:
    // Turns of work that a thread does before it leaves what comes all the while to the keeper.
    static constexpr int most_turns = 8;

    struct Loss {
        int rank;
        Clock::time_point time;
    };

    // The lock, and what follows its release: waking who waits for what has ended, and the user's work.
    class Held {
    public:
        explicit Held(P2PEngine& messenger, bool does_work = true)
            : messenger_(messenger), lock_(messenger.mutex_), does_work_(does_work) {}
        Held(P2PEngine& messenger, std::try_to_lock_t)
            : messenger_(messenger), lock_(messenger.mutex_, std::try_to_lock), does_work_(false) {}
        Held(const Held&) = delete;
        Held& operator=(const Held&) = delete;
        ~Held();

        [[nodiscard]] bool is_held() const noexcept { return lock_.owns_lock(); }
        // Its thread counts as one that sleeps, which need not be woken.
        void set_asleep() noexcept { is_asleep_ = true; }

    private:
        P2PEngine& messenger_;
        std::unique_lock<std::mutex> lock_;
        bool does_work_;
        bool is_asleep_ = false;
    };

    // Counts a thread that waits, and leaves the keeper in its place.
    class Watch;

    void connect(Ways& ways);
    [[nodiscard]] bool has_news() const noexcept;
    [[nodiscard]] tcp::ReadySet look() const noexcept { return lookout_ ? lookout_->look() : tcp::ReadySet(); }
    bool spin(const Transfer& transfer);
    void ask_keeper();
    void keep();
    void look_out();
    bool cancel(Send& send, Outcome outcome, std::size_t reason);

    // All of these run under the lock.
    [[nodiscard]] Peer* peer_of(int rank) const noexcept { return by_rank_[static_cast<std::size_t>(rank)]; }
    void start(Peer& peer, Send& send);
    void note_outgoing(const Peer& peer);
    bool read(Peer& peer, const Transfer* until);
    bool poll(const Transfer* until) { return poll(until, look()); }
    bool poll(const Transfer* until, const tcp::ReadySet& sights);
    void settle();
    void ask();
    void call_keeper();
    void tell_losses();
    [[nodiscard]] bool has_started() const;

    Settings settings_;
    std::function<void(P2PEngine&)> on_work_;
    std::mutex mutex_;
    Admission reception_;
    std::shared_ptr<const shm::Rings> rings_;
    shm::Doorbell& bell_;
    std::unique_ptr<tcp::Poller> lookout_;       // of a rank with connections
    std::vector<const shm::RingChannel*> local_;  // of the first peers
    std::vector<tcp::TcpChannel*> wires_;               // of the others
    std::vector<std::unique_ptr<Peer>> peers_;
    std::vector<Peer*> by_rank_;
    std::vector<bool> lost_;  // by rank
    std::size_t num_lost_ = 0;
    std::vector<Loss> unexplained_;   // connections that have ended without news of their ranks
    std::size_t num_ended_seen_ = 0;  // of `Mailbox::num_ended`, when waiters were last woken for it
    std::uint64_t num_moves_ = 0;     // to see whether there is traffic

    std::chrono::microseconds spin_time_;
    Contention contention_;
    std::atomic<bool> is_open_{true};
    std::atomic<bool> is_abandoned_{false};
    std::atomic<bool> has_work_{false};
    std::atomic<bool> has_outgoing_{false};  // to ranks of this host
    std::atomic<bool> is_ticking_{true};     // the keeper looks by itself, and soon
    std::atomic<int> num_waiters_{0};        // partner of `is_ticking_`: one of keeper and last waiter sees the other
    std::atomic<int> num_asleep_{0};         // of the waiters
    bool is_closed_ = false;
    std::unique_ptr<std::thread> keeper_;
    std::unique_ptr<std::thread> watchman_;  // see [Note: who watches connections]
};

}  // namespace ferrodist
