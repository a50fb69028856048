#include "transport/shm/group_memory.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "base/futex.h"
#include "base/interruption.h"
#include "base/processor.h"

namespace ferrodist::shm {

namespace {

constexpr std::size_t max_record_bytes = 4096;

// The longest single sleep: bounds how late an expired deadline is noticed.
constexpr auto max_sleep = interruption_period;

}  // namespace

struct GroupMemory::Header {
    struct alignas(line_bytes) Bell {
        std::atomic<std::uint32_t> word;      // changed by `ring`, slept on
        std::atomic<std::uint32_t> sleepers;  // ranks that sleep or are about to; a killed one may stay counted
    };
    struct alignas(line_bytes) Abort {
        std::atomic<std::uint32_t> state;  // 0: none, 1: being written, 2: written
        std::uint32_t length;
        std::array<char, max_record_bytes> record;
    };

    Bell bell;
    Abort abort;
    alignas(line_bytes) Flag num_arrivals;  // of all ranks at all collectives so far; in oversubscribed groups only
    alignas(line_bytes) Flag released;      // collectives at which all have arrived; in oversubscribed groups only
};

std::size_t Layout::size_bytes() const {
    return common_part().size + static_cast<std::size_t>(num_ranks) * num_slots * slot_bytes;
}

Part Layout::common_part() const {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    const auto columns = static_cast<std::size_t>(group_size);
    const std::size_t header = round_up(sizeof(Arrival) * 2 * ranks + sizeof(RankFlags) * ranks, page_bytes) +
                               round_up(2 * ranks * round_up(columns * sizeof(std::uint64_t), line_bytes), page_bytes);
    return {.start = 0, .size = 4 * page_bytes + header};
}

Part Layout::part_of(int local) const {
    const std::size_t size = num_slots * slot_bytes;
    return {.start = common_part().size + static_cast<std::size_t>(local) * size, .size = size};
}

GroupMemory::GroupMemory(std::shared_ptr<const Mapping> memory, const Layout& layout)
    : layout_(layout), memory_(std::move(memory)) {
    static_assert(sizeof(Header) <= 4 * page_bytes);
    const auto ranks = static_cast<std::size_t>(layout.num_ranks);
    arrivals_ = memory_->data() + 4 * page_bytes;
    flags_ = arrivals_ + sizeof(Arrival) * 2 * ranks;
    counts_ = arrivals_ + round_up(sizeof(Arrival) * 2 * ranks + sizeof(RankFlags) * ranks, page_bytes);
    slots_ = memory_->data() + layout.common_part().size;
}

void GroupMemory::initialize() {
    // The memory is zero, the initial value of all counters; this begins the objects' lifetimes.
    new (memory_->data()) Header{};
    for (int rank = 0; rank < layout_.num_ranks; ++rank) {
        new (&arrival(rank, 0)) Arrival{};
        new (&arrival(rank, 1)) Arrival{};
        new (&flags(rank)) RankFlags{};
    }
}

GroupMemory::Header& GroupMemory::header() const noexcept {
    return *std::launder(reinterpret_cast<Header*>(memory_->data()));
}

Arrival& GroupMemory::arrival(int rank, std::uint64_t sequence) const noexcept {
    const std::size_t index = 2 * static_cast<std::size_t>(rank) + (sequence & 1);
    return *std::launder(reinterpret_cast<Arrival*>(arrivals_ + index * sizeof(Arrival)));
}

RankFlags& GroupMemory::flags(int rank) const noexcept {
    return *std::launder(reinterpret_cast<RankFlags*>(flags_ + static_cast<std::size_t>(rank) * sizeof(RankFlags)));
}

std::byte* GroupMemory::slot(int rank, std::uint64_t segment) const noexcept {
    return slots_ + (static_cast<std::size_t>(rank) * num_slots + segment % num_slots) * layout_.slot_bytes;
}

std::span<std::uint64_t> GroupMemory::counts(int rank, std::uint64_t sequence) const noexcept {
    const auto columns = static_cast<std::size_t>(layout_.group_size);
    const std::size_t row = round_up(columns * sizeof(std::uint64_t), line_bytes);
    const std::size_t index = 2 * static_cast<std::size_t>(rank) + (sequence & 1);
    return {reinterpret_cast<std::uint64_t*>(counts_ + index * row), columns};
}

void GroupMemory::publish(Flag& flag, std::uint64_t value) {
    // Partner: the loads in `wait_until`. Either this sees the sleeper counted, or the sleeper sees the value.
    flag.store(value);
    if (header().bell.sleepers.load() != 0) ring();
}

void GroupMemory::ring() {
    header().bell.word.fetch_add(1);
    futex_wake(header().bell.word, FutexScope::host);
}

template <class Ready, class Lagging>
void GroupMemory::wait_until(const Ready& ready, const Lagging& lagging, FailureKind timeout_kind,
                             const Deadline& deadline, LongWait::Watch* watch) {
    Spin spin(contention_, std::chrono::microseconds(layout_.spin_micros),
              layout_.is_oversubscribed ? Spin::oversubscribed : Spin::on_flags);
    do {
        for (int i = 0; i < spin.tries_per_check(); ++i) {
            if (ready()) return;
            relax();
        }
        release_interpreter();
        check();
    } while (spin.check_clock());
    auto& bell = header().bell;
    while (true) {
        bell.sleepers.fetch_add(1);
        const std::uint32_t word = bell.word.load();
        const bool is_over = ready();
        if (!is_over && !has_ended()) {
            const auto left = std::min<Clock::duration>(deadline.remaining(), max_sleep);
            futex_wait(bell.word, word, left, FutexScope::host);
        }
        bell.sleepers.fetch_sub(1);
        if (is_over || ready()) return;
        check();
        check_interruption();
        std::vector<int> ranks = lagging();
        if (ranks.empty()) return;  // they have just arrived
        for (const int rank : ranks) {
            if (flags(rank).left.load() == 0 || ready()) continue;
            check();  // a rank that leaves an aborted group has aborted it before; the check above may be older
            throw Failure(FailureKind::left, {rank});
        }
        if (deadline.expired()) throw Failure(timeout_kind, std::move(ranks));
        if (watch != nullptr) watch->check(deadline, ranks);
    }
}

void GroupMemory::arrive(int rank, std::uint64_t sequence, const Deadline& deadline) {
    const int num_ranks = layout_.num_ranks;
    LongWait::Watch watch(long_wait, sequence);
    Flag& own = arrival(rank, sequence).sequence;
    const auto lagging = [&] {
        std::vector<int> ranks;
        for (int r = 0; r < num_ranks; ++r)
            if (arrival(r, sequence).sequence.load() < sequence) ranks.push_back(r);
        return ranks;
    };
    if (!layout_.is_oversubscribed) {
        publish(own, sequence);
        int next = 0;
        wait_until(
            [&] {
                while (next < num_ranks && arrival(next, sequence).sequence.load() >= sequence) ++next;
                return next == num_ranks;
            },
            lagging, FailureKind::late, deadline, &watch);
        return;
    }
    // Ranks outnumber the processors: the last one to arrive wakes all others once, and none is woken before. Data is
    // ordered by the count, which each rank reads and increments atomically, and by `released`. A rank's own flag only
    // serves to name stragglers, and so is stored once the others need nothing more of the rank: one that is stopped
    // anywhere before, even between its count and the release, is named. A rank that sees all flags may go on without
    // the release, for each flag orders its rank's data, too.
    const auto all = static_cast<std::uint64_t>(num_ranks) * sequence;
    const bool is_last = header().num_arrivals.fetch_add(1) + 1 == all;
    if (is_last) publish(header().released, sequence);
    own.store(sequence);
    if (is_last) return;
    wait_until([&] { return header().released.load() >= sequence; }, lagging, FailureKind::late, deadline, &watch);
}

void GroupMemory::await(Flag RankFlags::* flag, std::uint64_t value, const Deadline& deadline) {
    const int num_ranks = layout_.num_ranks;
    int next = 0;
    wait_until(
        [&] {
            while (next < num_ranks && (flags(next).*flag).load() >= value) ++next;
            return next == num_ranks;
        },
        [&] {
            std::vector<int> ranks;
            for (int r = 0; r < num_ranks; ++r)
                if ((flags(r).*flag).load() < value) ranks.push_back(r);
            return ranks;
        },
        FailureKind::stalled, deadline);
}

void GroupMemory::abort(std::string_view record) {
    auto& abort = header().abort;
    std::uint32_t none = 0;
    if (!abort.state.compare_exchange_strong(none, 1)) return;
    abort.length = static_cast<std::uint32_t>(std::min(record.size(), max_record_bytes));
    std::memcpy(abort.record.data(), record.data(), abort.length);
    abort.state.store(2);
    ring();
}

bool GroupMemory::is_aborted() const noexcept {
    return header().abort.state.load() != 0;
}

std::string GroupMemory::abort_record() const {
    const auto& abort = header().abort;
    // Its writer may have been killed while writing it: then there is no record.
    const Deadline patience(0.1);
    while (abort.state.load() == 1 && !patience.expired()) relax();
    return abort.state.load() == 2 ? std::string(abort.record.data(), abort.length) : std::string();
}

void GroupMemory::leave(int rank) {
    stop();
    publish(flags(rank).left, 1);
}

void GroupMemory::check() const {
    if (is_stopped_.load()) throw Failure(FailureKind::stopped, {});
    if (is_aborted()) throw Failure(FailureKind::aborted, {}, abort_record());
}

}  // namespace ferrodist::shm
