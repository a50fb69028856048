// One rank's part of a group, for any number of threads: collectives take turns in the order in which their places were
// reserved.
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
#include "engine/queue.h"

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

    // Takes the next place. Ranks must take theirs in the same order, and run something at each.
    std::uint64_t reserve() noexcept { return reserved_.fetch_add(1); }

    // Runs `collective(context, deadline)` when all before `place` have ended. Throws Failure.
    template <class Collective>
    void run(std::uint64_t place, double timeout, const Collective& collective) {
        const Deadline deadline(timeout);
        try {
            check();
            await_turn(place, deadline);
            const Turn turn(*this, place);
            const std::uint64_t sequence = context_.sequence + 1;
            try {
                check();
                collective(context_, deadline);
                fabric_.flush(deadline);
            } catch (...) {
                break_off();
                fabric_.give_up(sequence);
                throw;
            }
        } catch (Failure& failure) {
            failure.set_context(place, deadline.elapsed_seconds());
            break_off();
            throw;
        } catch (...) {
            break_off();
            throw;
        }
    }

    // Blocks until all before `place` have ended; throws when the group has.
    void await_turn(std::uint64_t place);

    // The ranks get to know each other; before anything else, on all of them.
    void meet(double timeout) {
        const Deadline deadline(timeout);
        try {
            meet_peers(context_, deadline);
        } catch (Failure& failure) {
            failure.set_context(0, deadline.elapsed_seconds());
            break_off();
            throw;
        }
    }

    // Has `tell(place, own_arrival, late, deadline)` called once in a collective that has waited for other ranks' arrival for so
    // long, in the thread that waits, which may be the queue's: `run_end(end)` runs what waits for that thread's end, in a way
    // that lets `tell` return. Before anything runs.
    template <class Tell, class RunEnd>
    void tell_of_long_waits(double seconds, Tell tell, RunEnd run_end) {
        run_end_ = std::move(run_end);
        auto tell_of_place = [this, tell = std::move(tell)](std::uint64_t sequence, const std::vector<int>& late,
                                                            const Deadline& deadline) {
            tell(turn_.load(), fabric_.arrival(rank(), sequence), late, deadline);
        };
        fabric_.set_long_wait({.seconds = seconds, .tell = std::move(tell_of_place)});
    }

    // Whether a collective of `size` bytes neither copies for long nor makes system calls, if no rank is late.
    [[nodiscard]] bool is_brief(std::size_t size) const noexcept {
        constexpr std::size_t soon_copied = 4 * 1024;
        return size <= soon_copied && !fabric_.has_remote_ranks();
    }

    // Whether they can read each other's memory.
    [[nodiscard]] bool can_read_peers() const noexcept { return context_.peers.is_usable(); }

    // Takes a place and has `collective(context, deadline)`, which moves `size` bytes, run there after all that was started
    // before. `timeout` counts from then. What it reads and writes must live until it has ended.
    std::shared_ptr<Pending> start(double timeout, std::size_t size, Queue::Collective collective);
    // Blocks until it has ended; see Pending::wait. What ends a thread's wait, and is no Failure, may have ended the group.
    bool wait(Pending& pending, double timeout) { return queue_.wait(pending, timeout); }

    // Keeps something until a collective has ended; the next call of either frees it. One thread at a time calls these.
    void keep(std::shared_ptr<Pending> pending, std::shared_ptr<void> owner);
    void free_kept();

    // Whether this rank has left a collective half way, or the group: nothing runs here any more.
    [[nodiscard]] bool is_broken() const noexcept { return is_broken_.load(); }

    // Makes symmetric memory known, which all ranks have mapped.
    void add_arena(const std::shared_ptr<const shm::Arena>& arena) { arenas_.add(arena); }

    // Ends the group for all ranks of this host; see Segment::abort.
    void abort(std::string_view record) {
        fabric_.abort(record);
        break_off();
    }

    // Leaves the group; see Segment::leave.
    void leave() {
        fabric_.leave();
        break_off();
        if (queue_.has_thread()) queue_.end();
    }

    // In a forked child: the group stays the parent's, and so does the thread.
    void stop() noexcept {
        fabric_.stop();
        queue_.abandon();
        is_broken_.store(true);
    }

private:
    // Passes the turn on when a collective has ended, well or not.
    class Turn {
    public:
        Turn(Communicator& communicator, std::uint64_t place) : communicator_(communicator), place_(place) {}
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;
        ~Turn() { communicator_.pass_turn(place_ + 1); }

    private:
        Communicator& communicator_;
        std::uint64_t place_;
    };

    void check() const;  // throws when the group has ended
    void await_turn(std::uint64_t place, const Deadline& deadline);
    void pass_turn(std::uint64_t next);
    void break_off();  // this rank is out of step with the others: nothing runs here any more

    Fabric fabric_;
    shm::Arenas arenas_;
    Context context_;  // for whoever has the turn: `turn_` is stored after it was changed and loaded before it is read
    std::atomic<std::uint64_t> reserved_{0};
    std::atomic<std::uint64_t> turn_{0};
    std::atomic<bool> is_broken_{false};
    EventCount passed_;
    std::function<void(const std::function<void()>&)> run_end_ = [](const auto& end) { end(); };
    std::vector<std::pair<std::shared_ptr<Pending>, std::shared_ptr<void>>> kept_;  // the bindings' owners of tensors
    Queue queue_{[this](std::uint64_t place, double timeout, const Queue::Collective& collective) {
        await_turn(place);
        run(place, timeout, collective);
    }};
};

}  // namespace ferrodist
