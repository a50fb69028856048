// A rank's communicator of one group. Thread-safe: collectives run in the order of their tickets.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "collectives/context.h"
#include "collectives/handshake.h"
#include "engine/collective_queue.h"

namespace ferrodist {

class Communicator {
public:
    explicit Communicator(Fabric fabric)
        : fabric_(std::move(fabric)),
          context_{.fabric = fabric_,
                   .rank = fabric_.rank(),
                   .num_ranks = fabric_.num_ranks(),
                   .instructions = best_instruction_set(),
                   .arenas = &arenas_} {}

    Communicator(const Communicator&) = delete;
    Communicator& operator=(const Communicator&) = delete;
    ~Communicator();

    [[nodiscard]] int rank() const noexcept { return context_.rank; }
    [[nodiscard]] int num_ranks() const noexcept { return context_.num_ranks; }

    // Takes the next ticket. All ranks must take tickets in the same order, and run a collective with each.
    std::uint64_t reserve() noexcept { return reserved_.fetch_add(1); }

    // Runs `collective(context, deadline)` once all collectives before `ticket` have ended. Throws Failure.
    template <class Collective>
    void run_in_turn(std::uint64_t ticket, double timeout, const Collective& collective) {
        const Deadline deadline(timeout);
        try {
            check();
            await_turn(ticket, deadline);
            const Turn turn(*this, ticket);
            const std::uint64_t sequence = fabric_.sequence() + 1;
            try {
                check();
                collective(context_, deadline);
                fabric_.flush(deadline);
            } catch (...) {
                mark_broken();
                fabric_.report_failure(sequence);
                throw;
            }
        } catch (Failure& failure) {
            failure.set_context(ticket, deadline.elapsed_seconds());
            mark_broken();
            throw;
        } catch (...) {
            mark_broken();
            throw;
        }
    }

    // Blocks until all collectives before `ticket` have ended; throws if the group has ended.
    void await_turn(std::uint64_t ticket);

    // Exchanges the ranks' capabilities. Called on all ranks before anything else.
    void handshake(double timeout) {
        const Deadline deadline(timeout);
        try {
            probe_peer_memory(context_, deadline);
        } catch (Failure& failure) {
            failure.set_context(0, deadline.elapsed_seconds());
            mark_broken();
            throw;
        }
    }

    // Sets a callback for collectives that wait for other ranks' arrival for `seconds`: `callback(ticket, own_arrival,
    // stragglers, deadline)`, called once per wait in the waiting thread, which may be the queue's. `run_end(end)` runs
    // `end`, which waits for that thread, without blocking the callback. Call it before anything runs.
    template <class Callback, class RunEnd>
    void set_long_wait_callback(double seconds, Callback callback, RunEnd run_end) {
        run_end_ = std::move(run_end);
        auto notify = [this, callback = std::move(callback)](std::uint64_t sequence, const std::vector<int>& stragglers,
                                                             const Deadline& deadline) {
            callback(turn_.load(), fabric_.arrival(rank(), sequence), stragglers, deadline);
        };
        fabric_.set_long_wait({.seconds = seconds, .notify = std::move(notify)});
    }

    // Whether a collective of `size` bytes neither copies for long nor makes system calls, if no rank is late.
    [[nodiscard]] bool is_short(std::size_t size) const noexcept {
        constexpr std::size_t soon_copied = 4 * 1024;
        return size <= soon_copied && !fabric_.has_remote_ranks();
    }

    // Whether the ranks can read each other's memory.
    [[nodiscard]] bool can_read_peers() const noexcept { return context_.peers.is_usable(); }

    // Takes a ticket and queues `collective(context, deadline)`, which moves `size` bytes. `timeout` counts from its
    // turn. Its buffers must live until it has ended.
    std::shared_ptr<Pending> start(double timeout, std::size_t size, CollectiveQueue::Collective collective);
    // Blocks until the collective has ended; see Pending::wait. An exception other than Failure that ends a thread's
    // wait may have ended the group.
    bool wait(Pending& pending, double timeout) { return queue_.wait(pending, timeout); }

    // Retains `owner` until a collective has ended; the next call of either function frees it. For one thread at a
    // time.
    void retain(std::shared_ptr<Pending> pending, std::shared_ptr<void> owner);
    void free_retained();

    // Whether this rank has left the group, or a collective before its end: then nothing runs here any more.
    [[nodiscard]] bool is_broken() const noexcept { return is_broken_.load(); }

    // Registers symmetric memory that all ranks have mapped.
    void add_arena(const std::shared_ptr<const shm::Arena>& arena) { arenas_.add(arena); }

    // Aborts the group for all ranks of this host; see GroupMemory::abort.
    void abort(std::string_view record) {
        fabric_.abort(record);
        mark_broken();
    }

    // Leaves the group; see GroupMemory::leave.
    void leave() {
        fabric_.leave();
        mark_broken();
        if (queue_.has_thread()) queue_.end();
    }

    // In a forked child: detaches from the group and the thread, which belong to the parent.
    void stop() noexcept {
        fabric_.stop();
        queue_.abandon();
        is_broken_.store(true);
    }

private:
    // Passes the turn on when a collective has ended, successfully or not.
    class Turn {
    public:
        Turn(Communicator& communicator, std::uint64_t ticket) : communicator_(communicator), ticket_(ticket) {}
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;
        ~Turn() { communicator_.pass_turn(ticket_ + 1); }

    private:
        Communicator& communicator_;
        std::uint64_t ticket_;
    };

    void check() const;  // throws if the group has ended
    void await_turn(std::uint64_t ticket, const Deadline& deadline);
    void pass_turn(std::uint64_t next);
    void mark_broken();  // this rank is out of step with the others: nothing runs here any more

    Fabric fabric_;
    shm::Arenas arenas_;
    // It and the fabric's counters are owned by the holder of the turn: `turn_` is stored after a change and loaded
    // before a read.
    Context context_;
    std::atomic<std::uint64_t> reserved_{0};
    std::atomic<std::uint64_t> turn_{0};
    std::atomic<bool> is_broken_{false};
    EventCount passed_;
    std::function<void(const std::function<void()>&)> run_end_ = [](const auto& end) { end(); };
    std::vector<std::pair<std::shared_ptr<Pending>, std::shared_ptr<void>>> retained_;  // owners of tensors
    CollectiveQueue queue_{[this](std::uint64_t ticket, double timeout, const CollectiveQueue::Collective& collective) {
        await_turn(ticket);
        run_in_turn(ticket, timeout, collective);
    }};
};

}  // namespace ferrodist
