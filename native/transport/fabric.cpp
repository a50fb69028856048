#include "transport/fabric.h"

#include <algorithm>
#include <cstring>

#include "base/failure.h"
#include "base/interruption.h"

namespace ferrodist {

namespace {

// How often a rank with peers on its host polls their flags while it sleeps on its connections.
constexpr auto host_poll_period = std::chrono::microseconds(200);

// [Note: spinning on connections]
// A rank that sleeps on its connections frees its processor, and the scheduler likes to move the other rank of a
// connection there; so the two swap processors, packets are reordered, and TCP takes that for losses and slows down,
// which makes them sleep again. So with enough processors a rank polls its connections for longer than it polls flags.
// Two ranks on two hosts that are network namespaces, under TCP BBR, medians of nine runs of 25 batches in us: 64 KiB
// 20 and 1 MiB 277 with 3 ms; 91 and 1157 with sleeping after 300 us and a yield at each clock check.

// Each rank's index among the ranks of its host.
std::vector<int> local_indexes(const std::vector<int>& hosts) {
    std::vector<int> indexes;
    for (auto own = hosts.begin(); own != hosts.end(); ++own)
        indexes.push_back(static_cast<int>(std::count(hosts.begin(), own, *own)));
    return indexes;
}

Chain chain_of(const std::vector<int>& hosts, int rank) {
    if (hosts.empty()) return {};
    const auto num_ranks = static_cast<int>(hosts.size());
    const auto num_local = static_cast<int>(std::count(hosts.begin(), hosts.end(), hosts.front()));
    if (num_local == num_ranks || num_ranks % num_local != 0) return {};
    for (std::size_t r = 0; r < hosts.size(); ++r) {
        const std::size_t first = r / static_cast<std::size_t>(num_local) * static_cast<std::size_t>(num_local);
        if (hosts[r] != hosts[first] || std::count(hosts.begin(), hosts.end(), hosts[r]) != num_local) return {};
    }
    return {.num_local = num_local,
            .first_local = rank / num_local * num_local,
            .previous = rank >= num_local ? rank - num_local : -1,
            .next = rank + num_local < num_ranks ? rank + num_local : -1};
}

}  // namespace

Fabric::Fabric(std::shared_ptr<shm::GroupMemory> memory, int rank, std::unique_ptr<tcp::Links> links,
               const std::vector<int>& hosts)
    : memory_(std::move(memory)),
      links_(std::move(links)),
      rank_(rank),
      local_indexes_(local_indexes(hosts)),
      chain_(chain_of(hosts, rank)),
      has_local_peers_(memory_->layout().num_ranks > 1),
      layout_(memory_->layout()) {
    layout_.num_ranks = layout_.group_size;
}

void Fabric::publish_counts(std::span<const std::size_t> counts) {
    const auto row = this->counts(rank_);
    std::copy(counts.begin(), counts.end(), row.begin());
    if (!links_) return;
    for (int r = 0; r < num_ranks(); ++r)
        if (links_->is_remote(r)) links_->send(r, tcp::LinkFrameType::counts, sequence_, 0, std::as_bytes(row));
}

void Fabric::throw_mismatch() const {
    std::string lines;
    for (int each = 0; each < num_ranks(); ++each) {
        const shm::Arrival& record = arrival(each);
        lines.append(reinterpret_cast<const char*>(&record.call), sizeof record.call);
        lines.append(reinterpret_cast<const char*>(record.payload.data()), record.payload.size());
    }
    throw Failure(FailureKind::mismatch, {}, std::move(lines));
}

void Fabric::arrive_over_links(const Deadline& deadline) {
    entered_ = sequence_;
    shm::Arrival& own = arrival(rank_);
    const auto* data = reinterpret_cast<const std::byte*>(&own.call);
    for (int r = 0; r < num_ranks(); ++r)
        if (links_->is_remote(r))
            links_->send(r, tcp::LinkFrameType::arrival, sequence_, 0, {data, sizeof own - sizeof own.sequence});
    memory_->publish(own.sequence, sequence_);
    LongWait::Watch watch(memory_->long_wait, sequence_);
    wait_for_all([&](int r) { return arrival(r).sequence.load() >= sequence_; }, FailureKind::late, deadline, &watch);
}

void Fabric::publish_done(std::uint64_t number) {
    if (links_)
        for (int r = 0; r < num_ranks(); ++r)
            if (links_->is_remote(r)) links_->send(r, tcp::LinkFrameType::done, number, 0, {});
    memory_->publish(own().done, number);
}

void Fabric::await(shm::Flag shm::RankFlags::* flag, std::uint64_t value, const Deadline& deadline) {
    if (!links_) return memory_->await(flag, value, deadline);
    wait_for_all([&](int r) { return (flags(r).*flag).load() >= value; }, FailureKind::stalled, deadline);
}

void Fabric::await_host(shm::Flag shm::RankFlags::* flag, std::uint64_t value, const Deadline& deadline) {
    wait_for_all([&](int r) { return links_->is_remote(r) || (flags(r).*flag).load() >= value; }, FailureKind::stalled,
                 deadline);
}

void Fabric::await_rank(int rank, shm::Flag shm::RankFlags::* flag, std::uint64_t value, const Deadline& deadline) {
    wait_for_all([&](int r) { return r != rank || (flags(r).*flag).load() >= value; }, FailureKind::stalled, deadline);
}

void Fabric::await_exchanged(std::uint64_t number, const Deadline& deadline) {
    wait_for_all(
        [&](int r) { return r == rank_ || (flags(r).staged.load() > number && !links_->has_unsent_staged(r, number)); },
        FailureKind::stalled, deadline);
}

void Fabric::flush(const Deadline& deadline) {
    if (!links_ || !links_->has_unsent()) return;
    wait_for_all([&](int r) { return !links_->is_remote(r) || !links_->has_unsent(r); }, FailureKind::stalled,
                 deadline);
}

template <class IsThere>
void Fabric::wait_for_all(const IsThere& is_ready, FailureKind timeout_kind, const Deadline& deadline,
                          LongWait::Watch* watch) {
    int next = 0;
    const auto is_over = [&] {
        while (next < num_ranks() && is_ready(next)) ++next;
        return next == num_ranks();
    };
    const auto lagging = [&] {
        std::vector<int> ranks;
        for (int r = 0; r < num_ranks(); ++r)
            if (!is_ready(r)) ranks.push_back(r);
        return ranks;
    };
    links_->write();
    links_->check(entered_);
    if (is_over()) return;
    release_interpreter();
    Spin spin(*contention_, std::chrono::microseconds(layout_.spin_micros),
              layout_.is_oversubscribed ? Spin::oversubscribed : Spin::on_connections,
              layout_.group_size - memory_->layout().num_ranks);
    while (true) {
        const bool has_moved = links_->move();
        links_->check(entered_);
        if (is_over()) return;
        if (has_moved) {
            spin.restart();
            continue;
        }
        check();
        if (spin.should_retry()) continue;
        check_interruption();
        std::vector<int> ranks = lagging();
        if (ranks.empty()) return;  // they have just arrived
        for (const int r : ranks) {
            if (links_->is_remote(r) ? !links_->is_gone(r) : flags(r).left.load() == 0) continue;
            if (is_ready(r)) continue;
            check();  // as in GroupMemory::wait_until
            throw Failure(links_->is_remote(r) ? FailureKind::lost : FailureKind::left, {r});
        }
        if (deadline.expired()) throw Failure(timeout_kind, std::move(ranks));
        if (watch != nullptr) watch->check(deadline, ranks);
        const std::chrono::nanoseconds longest = has_local_peers_ ? std::chrono::nanoseconds(host_poll_period)
                                                                  : std::chrono::nanoseconds(interruption_period);
        links_->sleep(std::clamp<std::chrono::nanoseconds>(deadline.remaining(), std::chrono::nanoseconds(0), longest));
    }
}

void Fabric::report_failure(std::uint64_t sequence) noexcept {
    if (!links_) return;
    for (int r = 0; r < num_ranks(); ++r)
        if (links_->is_remote(r)) links_->send(r, tcp::LinkFrameType::failed, sequence, 0, {});
    links_->write();
    links_->drop_unsent();  // its data may be in the caller's memory
}

void Fabric::leave() {
    memory_->leave(links_ ? local(rank_) : rank_);
    if (links_) links_->leave();
}

void Fabric::stop() noexcept {
    memory_->stop();
    if (links_) links_->drop();
}

void Fabric::abort(std::string_view record) {
    memory_->abort(record);
    if (links_) links_->wake();
}

}  // namespace ferrodist
