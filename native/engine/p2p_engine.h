// The point-to-point engine of a rank: messages through rings in shared memory and over connections, matched with
// receives in one mailbox.
//
// [Note: who moves messages]
// A thread that waits for a transfer moves all of this rank's messages meanwhile: it spins for a while, then sleeps on
// the rank's doorbell. If no thread waits, the progress thread moves messages; it sleeps on the same doorbell. A rank
// that sends and receives all the time is between two waits for most of it, and waking the progress thread for each
// message would cost more than the messages: so while there is traffic the progress thread does not set its
// `Doorbell::asleep` bit, but polls once a millisecond; after a millisecond without traffic it sets the bit and sleeps
// until the doorbell rings. It sets the bit at once if a transfer has been started but no thread waits. A rank that
// has started nothing reads messages of its host when it asks for them: the doorbell then rings only for a ring without
// space. Connections between hosts wake the poll thread as ever. While
// a thread waits, the progress thread does not even take the lock: it would copy on the processor that the waiting
// thread needs. Exchanges of 2 MiB, a few after each silence, took 930 us before these two rules.
//
// [Note: who watches connections]
// Data that arrives over a connection does not ring a doorbell. A poll thread sleeps on the connections, armed whenever
// a thread sleeps on the doorbell; it moves what has arrived, and wakes the threads whose transfers have ended.
//
// [Note: shared processors]
// A rank that has been woken often runs on its waker's processor; see [Note: moving] in base/spin.h. Two ranks that
// exchange large messages then take turns, in twice the time, and for as long as they go on: exchanges of 2 MiB, eight at
// a time after silences of 20 ms, took 500 us instead of 220 in one of two runs. So a rank notes the processor on which
// it waits, and one that finds another rank's there migrates to one where none has waited. A note may be old: then a
// rank migrates needlessly, or late.
//
// [Note: the lock]
// One lock per rank, held while bytes move, for up to a budget at a time. Its holder never waits for anything else,
// least of all for the interpreter: events for the engine's owner are dispatched after its release (`EngineEvents`).
//
// [Note: lost connections]
// The control plane knows why a rank is gone, but may learn it a moment after the connection has ended. Transfers with
// that rank wait for the reason. The engine reports a lost connection by itself only if the control plane has reported
// nothing within a second.
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

// Events for the engine's owner.
struct EngineEvents {
    std::vector<PeerEvent> peer_events;
    Transfer* first_ended = nullptr;
};

// A key for active transfers: what failures of groups and ranks select them by.
struct TransferKey {
    bool is_send;
    std::uint64_t group;
    int peer;  // as requested, `any_source` included

    friend bool operator==(const TransferKey&, const TransferKey&) = default;
};

class P2PEngine {
public:
    struct Settings {
        int rank = 0;
        std::size_t eager_bytes = 0;
        std::size_t max_unexpected_bytes = 0;
        bool is_oversubscribed = false;
        std::uint32_t spin_micros = 0;
    };
    // The route to each rank of the group: its index in the rings of this host, or -1 and a connection.
    struct Routes {
        std::shared_ptr<const shm::Rings> rings;
        std::vector<int> local_indexes;
        std::vector<Descriptor> sockets;
    };

    // `on_events` is called, without the lock and by any thread, when `take_events` has something.
    P2PEngine(const Settings& settings, Routes routes, std::function<void(P2PEngine&)> on_events);
    P2PEngine(const P2PEngine&) = delete;
    P2PEngine& operator=(const P2PEngine&) = delete;
    ~P2PEngine();

    [[nodiscard]] const Settings& settings() const noexcept { return settings_; }
    [[nodiscard]] int num_ranks() const noexcept { return static_cast<int>(by_rank_.size()); }

    // Whether messages to another rank go through shared memory.
    [[nodiscard]] bool shares_memory_with(int rank) const { return is_local_[static_cast<std::size_t>(rank)]; }

    // Whether fast-path calls can succeed: false once the group has ended here, and in a forked child.
    [[nodiscard]] bool is_open() const noexcept { return is_open_.load(std::memory_order_relaxed); }

    // Sends a small message at once; returns false without effect if that is impossible, or impossible now.
    bool try_send(const std::byte* data, std::size_t size, int dst, const Tag& tag);
    // Starts a send if its peer and the group are open; returns false without effect if not.
    bool start_if_open(Send& send);
    // The same for a receive. `may_wait`: whether to wait for the lock; the caller then waits for the receive next.
    bool start_if_open(Receive& receive, bool may_wait);

    // Start a transfer without checking the state of the group, which the caller has done.
    void start(Send& send);
    void start(Receive& receive);
    // Starts a receive with a listener. After the first of a series call `watch_end`.
    void start_with_listener(Receive& receive);

    // Blocks until the transfer has ended; false after `timeout` seconds.
    bool wait(const Transfer& transfer, double timeout);
    // Ends a transfer that only serves as a signal for threads in `wait`.
    void signal(Transfer& transfer);
    // Cancels a transfer. False if it has ended, or can no longer be stopped.
    bool cancel(Send& send) { return cancel(send, Outcome::cancelled, 0); }
    bool cancel(Receive& receive);
    bool end(Send& send, std::size_t reason) { return cancel(send, Outcome::ended, reason); }
    // Ends a receive that no message has matched so far.
    bool end_unmatched(Receive& receive, std::size_t reason);
    // Sends a message at once that was offered first (`Send::prefers_offer`) and that nobody has taken.
    void send_now(Send& send);
    // Makes the engine report the end of a watched transfer soon, even if no thread waits for it here.
    void watch_end(Transfer& transfer);

    // Failures of groups and ranks. Messages that arrived earlier are received first.
    std::vector<TransferKey> active_transfers();
    void fail(const TransferKey& key, std::size_t reason);
    void open_group(std::uint64_t group, const std::vector<int>& members);
    void end_group(std::uint64_t group);
    void forget_group(std::uint64_t group);
    void lose(int rank);
    // The number of frames sent to a rank, for channels that control-plane messages may overtake; and a wait until
    // `count` frames have arrived from a rank, for at most `timeout` seconds.
    std::uint64_t num_frames_to(int rank);
    void await_frames(int rank, std::uint64_t count, double timeout);

    [[nodiscard]] int fullest_source(int newest, std::size_t buffered_size);
    [[nodiscard]] std::size_t unexpected_bytes();

    // Dispatches events to the owner; see `on_events`.
    void dispatch_events() {
        for (int turn = 0; has_events_.load(std::memory_order_relaxed) && !is_abandoned_.load(); ++turn) {
            if (turn == max_dispatches) return wake_progress_thread();
            on_events_(*this);
        }
    }
    EngineEvents take_events();

    // Ends all transfers and the threads. Data already sent is delivered until `drain`.
    void close();
    // After `close`: shuts down the connections to other hosts in an orderly way, within `timeout` seconds, and closes
    // them.
    void drain(double timeout);
    // In a forked child: everything belongs to the parent.
    void abandon() noexcept;

private:
    // Dispatches that one thread does before it leaves continuous traffic to the progress thread.
    static constexpr int max_dispatches = 8;

    struct Loss {
        int rank;
        Clock::time_point time;
    };

    // Holds the lock. Its release wakes threads whose transfers have ended, and dispatches events.
    class Guard {
    public:
        explicit Guard(P2PEngine& engine, bool dispatches = true)
            : engine_(engine), lock_(engine.mutex_), dispatches_(dispatches) {}
        Guard(P2PEngine& engine, std::try_to_lock_t)
            : engine_(engine), lock_(engine.mutex_, std::try_to_lock), dispatches_(false) {}
        Guard(const Guard&) = delete;
        Guard& operator=(const Guard&) = delete;
        ~Guard();

        [[nodiscard]] bool owns_lock() const noexcept { return lock_.owns_lock(); }
        // Marks this thread as counted among the sleepers, so it need not be woken.
        void set_asleep() noexcept { is_asleep_ = true; }
        // Marks this thread as about to wait for a transfer that is under way, so that it goes on reading by itself.
        void set_will_wait() noexcept { will_wait_ = true; }

    private:
        P2PEngine& engine_;
        std::unique_lock<std::mutex> lock_;
        bool dispatches_;
        bool is_asleep_ = false;
        bool will_wait_ = false;
    };

    // Counts a waiting thread; the last one hands over to the progress thread.
    class WaiterScope;

    void connect(Routes& routes);
    [[nodiscard]] bool has_incoming() const noexcept;
    [[nodiscard]] tcp::ReadySet poll_connections() const noexcept {
        return poller_ ? poller_->poll() : tcp::ReadySet();
    }
    bool spin(const Transfer& transfer, const Deadline& deadline);
    void leave_shared_processor() noexcept;
    void arm_progress_thread();
    void run_progress_thread();
    bool is_left_to_waiters(std::uint64_t& num_moves_seen, std::chrono::nanoseconds& longest);
    void run_poll_thread();
    bool cancel(Send& send, Outcome outcome, std::size_t reason);

    // All of these run under the lock.
    [[nodiscard]] Peer* peer_of(int rank) const noexcept { return by_rank_[static_cast<std::size_t>(rank)]; }
    void start(Peer& peer, Send& send);
    void note_work(const Peer& peer);
    void note_move() noexcept { num_moves_.store(num_moves_.load(std::memory_order_relaxed) + 1); }
    bool read(Peer& peer, const Transfer* until);
    bool poll(const Transfer* until) { return poll(until, poll_connections()); }
    bool poll(const Transfer* until, const tcp::ReadySet& ready);
    void process_mailbox();
    void arm();
    void arm_for_started();
    void wake_progress_thread();
    void report_losses();
    [[nodiscard]] bool has_started() const;

    Settings settings_;
    std::function<void(P2PEngine&)> on_events_;
    std::mutex mutex_;
    Admission admission_;
    std::shared_ptr<const shm::Rings> rings_;
    shm::Doorbell& doorbell_;
    std::unique_ptr<tcp::Poller> poller_;                 // null without connections
    std::vector<const shm::RingChannel*> ring_channels_;  // the channels of the first peers
    std::vector<tcp::TcpChannel*> tcp_channels_;          // the channels of the other peers
    std::vector<std::unique_ptr<Peer>> peers_;
    std::vector<Peer*> by_rank_;
    std::vector<bool> is_local_;  // by rank; never changes
    std::vector<bool> lost_;      // by rank
    std::size_t num_lost_ = 0;
    std::vector<Loss> unexplained_;  // lost connections whose reason is not known yet
    std::atomic<bool> has_unexplained_{false};
    std::size_t num_ended_seen_ = 0;           // when waiters were last woken for it
    std::atomic<std::uint64_t> num_moves_{0};  // counts moves, to detect traffic; changed under the lock

    std::chrono::microseconds spin_time_;
    Contention contention_;
    std::atomic<bool> is_open_{true};
    std::atomic<bool> is_abandoned_{false};
    std::atomic<bool> has_events_{false};
    std::atomic<bool> has_work_{false};   // for ranks of this host, see `Peer::has_work`
    std::atomic<bool> is_ticking_{true};  // the progress thread polls within a millisecond
    std::atomic<int> num_waiters_{0};     // partner of `is_ticking_`: either thread sees the other's store
    std::atomic<int> num_asleep_{0};      // how many of the waiters sleep
    bool is_closed_ = false;
    std::unique_ptr<std::thread> progress_thread_;
    std::unique_ptr<std::thread> poll_thread_;  // see [Note: who watches connections]
};

}  // namespace ferrodist
