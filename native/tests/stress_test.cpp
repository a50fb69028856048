// A stress test of the collectives: random collectives from a seed, on ranks that are threads over one mapping, so that
// the thread sanitizer sees every access. Sizes on both sides of each algorithm's limits, results compared element by
// element with those of plain loops.
//
//   stress_test [number of collectives] [seed]
#include <sys/socket.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "collectives/data_movement.h"
#include "collectives/reductions.h"
#include "engine/communicator.h"
#include "transport/shm/arena.h"

using namespace ferrodist;

namespace {

using Element = std::int32_t;
using Values = std::vector<Element>;

constexpr double patience = 60.0;
constexpr std::size_t slot_bytes = 8 * 1024;  // small, so that a few thousand elements take several segments

std::byte* bytes_of(Values& values) {
    return reinterpret_cast<std::byte*>(values.data());
}

// The input of rank `rank` for collective `number`, which every rank can compute.
Values input_of(int rank, std::uint64_t number, std::size_t count) {
    Values values(count);
    auto state = static_cast<std::uint32_t>(number * 2654435761u + static_cast<std::uint64_t>(rank) * 40503u + 1u);
    for (auto& value : values) {
        state = state * 1664525u + 1013904223u;
        value = static_cast<Element>(state >> 8);
    }
    return values;
}

Values sum_of(int num_ranks, std::uint64_t number, std::size_t count) {
    Values total(count, 0);
    for (int rank = 0; rank < num_ranks; ++rank) {
        const Values values = input_of(rank, number, count);
        for (std::size_t i = 0; i < count; ++i) total[i] += values[i];
    }
    return total;
}

void expect(const Values& actual, const Values& expected, const char* what, int rank, std::uint64_t number) {
    require(actual == expected, "%s, collective %llu: wrong on rank %d", what, static_cast<unsigned long long>(number),
            rank);
}

class Program {
public:
    Program(Communicator& communicator, const shm::Arena& arena, int rank, int num_ranks, std::uint64_t seed)
        : communicator_(communicator),
          arena_(arena),
          rank_(rank),
          num_ranks_(num_ranks),
          random_(seed),
          own_random_(seed * 100 + static_cast<std::uint64_t>(rank)) {}

    void run(std::uint64_t num_collectives) {
        for (std::uint64_t number = 0; number < num_collectives; ++number) step(number);
    }

private:
    // Runs a collective at once, or starts it and waits; ranks may choose differently. Small ones are left to the
    // waiter.
    template <class Collective>
    void call(const Collective& collective) {
        const auto choice = own_random_() % 8;
        if (choice > 2) return communicator_.run_in_turn(communicator_.reserve(), patience, collective);
        const auto pending = communicator_.start(patience, choice == 0 ? 1024 * 1024 : 0, collective);
        if (choice == 1) require(communicator_.wait(*pending, patience), "wait");
        require(communicator_.wait(*pending, std::numeric_limits<double>::infinity()), "wait");
    }

    std::size_t random_count() {
        static constexpr std::size_t limits[] = {0,  1,   2,    12,   24,   25,   57,   58,
                                                 59, 100, 1000, 2047, 2048, 2049, 4097, 9000};
        return limits[random_() % std::size(limits)];
    }

    // The memory in which a collective finds `values`, and leaves its result for `bring_back`: symmetric memory on some
    // ranks, on all, or on none.
    std::byte* ticket(const Values& values, std::uint64_t number, std::size_t slot) {
        const std::uint64_t turn = number % 5;
        const bool is_shared = turn == 0 || (turn == 1 && (number / 5 + static_cast<std::uint64_t>(rank_)) % 2 == 0);
        if (!is_shared) {
            ring_channels_[slot] = values;
            return bytes_of(ring_channels_[slot]);
        }
        std::byte* data = arena_.buffer(rank_) + slot * arena_.stride() / 2;
        if (!values.empty()) std::memcpy(data, values.data(), values.size() * sizeof(Element));
        return data;
    }

    static Values bring_back(const std::byte* data, std::size_t count) {
        Values values(count);
        if (count != 0) std::memcpy(values.data(), data, count * sizeof(Element));
        return values;
    }

    // The same draws on all ranks.
    void step(std::uint64_t number) {
        const auto kind = random_() % 9;
        const std::size_t count = random_count();
        const int root = static_cast<int>(random_() % static_cast<std::uint64_t>(num_ranks_));
        const bool direct_read = random_() % 2 == 0;
        const auto ranks = static_cast<std::size_t>(num_ranks_);
        std::vector<std::size_t> counts(ranks);
        for (auto& each : counts) each = random_() % 4 == 0 ? random_count() : count;
        std::vector<std::size_t> starts(ranks + 1, 0);
        std::partial_sum(counts.begin(), counts.end(), starts.begin() + 1);
        const auto own = static_cast<std::size_t>(rank_);
        const Reduction sum{.dtype = DType::int32, .op = ReduceOp::sum};
        Values source = input_of(rank_, number, count);

        if (kind == 0) {
            std::byte* in = ticket(source, number, 0);
            std::byte* out = direct_read ? in : ticket(Values(count), number, 1);
            call([&](Context& c, const Deadline& d) { allreduce(c, out, in, count, sum, d); });
            expect(bring_back(out, count), sum_of(num_ranks_, number, count), "allreduce", rank_, number);
        } else if (kind == 1) {
            Values out(count, 0);
            call([&](Context& c, const Deadline& d) {
                reduce(c, bytes_of(out), bytes_of(source), count, root, sum, d);
            });
            if (rank_ == root) expect(out, sum_of(num_ranks_, number, count), "reduce", rank_, number);
        } else if (kind == 2) {
            std::byte* data = ticket(source, number, 0);
            call([&](Context& c, const Deadline& d) { broadcast(c, data, data, count, DType::int32, root, d); });
            expect(bring_back(data, count), input_of(root, number, count), "broadcast", rank_, number);
        } else if (kind == 3 || kind == 4) {
            source = input_of(rank_, number, counts[own]);
            Values out(starts.back());
            const bool is_gather = kind == 4;
            const std::byte* in = ticket(source, number, 0);
            const bool is_list = own_random_() % 2 == 0;
            std::vector<std::byte*> places;
            if (!is_gather || rank_ == root)
                for (std::size_t r = 0; r < ranks; ++r) places.push_back(bytes_of(out) + starts[r] * sizeof(Element));
            call([&](Context& c, const Deadline& d) {
                if (is_gather && is_list)
                    gather(c, places, in, counts, DType::int32, root, d);
                else if (is_gather)
                    gather(c, bytes_of(out), in, counts, DType::int32, root, d);
                else if (is_list)
                    all_gather(c, places, in, counts, DType::int32, 0, d);
                else
                    all_gather(c, bytes_of(out), in, counts, DType::int32, 0, d);
            });
            Values expected;
            for (int r = 0; r < num_ranks_; ++r) {
                const Values part = input_of(r, number, counts[static_cast<std::size_t>(r)]);
                expected.insert(expected.end(), part.begin(), part.end());
            }
            if (!is_gather || rank_ == root) expect(out, expected, "gather", rank_, number);
        } else if (kind == 5) {
            Values whole = input_of(root, number, starts.back());
            Values out(counts[own]);
            const bool is_list = own_random_() % 2 == 0;
            std::vector<Values> apart;
            std::vector<const std::byte*> parts;
            for (std::size_t r = 0; r < counts.size(); ++r) {
                const auto from = whole.begin() + static_cast<std::ptrdiff_t>(starts[r]);
                apart.emplace_back(from, from + static_cast<std::ptrdiff_t>(counts[r]));
            }
            for (Values& part : apart) parts.push_back(bytes_of(part));
            call([&](Context& c, const Deadline& d) {
                if (!is_list)
                    scatter(c, bytes_of(out), bytes_of(whole), counts, DType::int32, root, d);
                else if (rank_ == root)
                    scatter(c, bytes_of(out), parts, counts, DType::int32, root, d);
                else
                    scatter(c, bytes_of(out), {}, counts, DType::int32, root, d);
            });
            const auto begin = whole.begin() + static_cast<std::ptrdiff_t>(starts[own]);
            expect(out, Values(begin, begin + static_cast<std::ptrdiff_t>(counts[own])), "scatter", rank_, number);
        } else if (kind == 6) {
            Values whole = input_of(rank_, number, starts.back());
            Values out(counts[own]);
            const std::byte* in = ticket(whole, number, 0);
            call([&](Context& c, const Deadline& d) { reduce_scatter(c, bytes_of(out), in, counts, 0, sum, d); });
            const Values total = sum_of(num_ranks_, number, starts.back());
            const auto begin = total.begin() + static_cast<std::ptrdiff_t>(starts[own]);
            expect(out, Values(begin, begin + static_cast<std::ptrdiff_t>(counts[own])), "reduce_scatter", rank_,
                   number);
        } else if (kind == 7) {
            // Rank r sends rank s what `counts` says at r + s; or all the same; or rank 0 does, and the others do not.
            const auto policy = random_() % 3;
            const auto count_of = [&](std::size_t from, std::size_t to) {
                if (policy == 0) return counts[(from + to) % ranks];
                return policy == 1 || from == 0 || to == 0 ? count : (from + to) % 3 * count;
            };
            const auto sent_before = [&](std::size_t from, std::size_t to) {
                std::size_t sum = 0;
                for (std::size_t r = 0; r < to; ++r) sum += count_of(from, r);
                return sum;
            };
            std::vector<std::size_t> send(ranks), receive(ranks);
            for (std::size_t r = 0; r < ranks; ++r) {
                send[r] = count_of(own, r);
                receive[r] = count_of(r, own);
            }
            source = input_of(rank_, number, sent_before(own, ranks));
            Values out(std::accumulate(receive.begin(), receive.end(), std::size_t{0})), expected;
            const std::byte* in = ticket(source, number, 0);
            call([&](Context& c, const Deadline& d) {
                all_to_all(c, bytes_of(out), in, send, receive, policy == 0 ? 1 : count, DType::int32, d);
            });
            for (std::size_t r = 0; r < ranks; ++r) {
                const Values theirs = input_of(static_cast<int>(r), number, sent_before(r, ranks));
                const auto begin = theirs.begin() + static_cast<std::ptrdiff_t>(sent_before(r, own));
                expected.insert(expected.end(), begin, begin + static_cast<std::ptrdiff_t>(receive[r]));
            }
            expect(out, expected, "all_to_all", rank_, number);
        } else {
            std::vector<std::string> shared;
            const std::size_t size = count % 400;  // some in arrival records, others in slots
            const std::string mine(size, static_cast<char>('a' + rank_));
            call([&](Context& c, const Deadline& d) {
                barrier(c, d);
                share(c, "stress", mine, {}, [&](std::string_view bytes) { shared.emplace_back(bytes); }, d);
            });
            for (std::size_t r = 0; r < ranks; ++r)
                require(shared[r] == std::string(size, static_cast<char>('a' + static_cast<int>(r))), "share");
        }
    }

    Communicator& communicator_;
    const shm::Arena& arena_;
    Values ring_channels_[2];
    int rank_;
    int num_ranks_;
    std::mt19937_64 random_;  // the same draws on all ranks
    std::mt19937_64 own_random_;
};

using Group = std::vector<std::unique_ptr<Communicator>>;

std::shared_ptr<const shm::Mapping> make_memory(std::size_t size) {
    const Descriptor descriptor(shm::create_memory("ferrodist-test", size));
    return std::make_shared<const shm::Mapping>(descriptor.get(), size);
}

// Rank r is on host `hosts[r]`; ranks of different hosts are connected by sockets.
Group make_group(const std::vector<int>& hosts, bool is_oversubscribed, std::size_t slot_size = slot_bytes) {
    const int num_ranks = static_cast<int>(hosts.size());
    std::vector<std::vector<int>> sockets(hosts.size(), std::vector<int>(hosts.size(), -1));
    for (std::size_t a = 0; a < hosts.size(); ++a)
        for (std::size_t b = a + 1; b < hosts.size(); ++b) {
            if (hosts[a] == hosts[b]) continue;
            int pair[2];
            require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0, "socketpair");
            sockets[a][b] = pair[0];
            sockets[b][a] = pair[1];
        }
    std::map<int, std::shared_ptr<const shm::Mapping>> memories;
    Group group;
    for (int rank = 0; rank < num_ranks; ++rank) {
        const auto own = static_cast<std::size_t>(rank);
        const auto num_local = static_cast<int>(std::count(hosts.begin(), hosts.end(), hosts[own]));
        const shm::Layout layout{.num_ranks = num_local,
                                 .group_size = num_ranks,
                                 .slot_bytes = slot_size,
                                 .is_oversubscribed = is_oversubscribed,
                                 .spin_micros = 20};
        auto& memory = memories[hosts[own]];
        if (!memory) {
            memory = make_memory(layout.size_bytes());
            shm::GroupMemory(memory, layout).initialize();
        }
        auto segment = std::make_shared<shm::GroupMemory>(memory, layout);
        std::unique_ptr<tcp::Links> links;
        if (num_local < num_ranks) links = std::make_unique<tcp::Links>(sockets[own], slot_size);
        group.push_back(std::make_unique<Communicator>(Fabric(std::move(segment), rank, std::move(links), hosts)));
    }
    return group;
}

std::vector<int> one_host(int num_ranks) {
    return std::vector<int>(static_cast<std::size_t>(num_ranks), 0);
}

template <class Body>
void run_ranks(int num_ranks, const Body& body) {
    std::vector<std::thread> threads;
    for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back([&body, rank] { body(rank); });
    for (auto& thread : threads) thread.join();
}

void stress(const std::vector<int>& hosts, bool is_oversubscribed, std::uint64_t num_collectives, std::uint64_t seed) {
    const int num_ranks = static_cast<int>(hosts.size());
    const auto group = make_group(hosts, is_oversubscribed);
    constexpr std::size_t stride = 1024 * 1024;
    const auto memory = make_memory(stride * hosts.size());
    const bool has_arena = std::count(hosts.begin(), hosts.end(), hosts[0]) == num_ranks;
    run_ranks(num_ranks, [&](int rank) {
        Communicator& own = *group[static_cast<std::size_t>(rank)];
        const auto arena = std::make_shared<const shm::Arena>(memory, 7, stride, rank);
        if (has_arena) own.add_arena(arena);
        if (seed % 2 == 0) own.handshake(patience);  // without it all tensors are staged
        Program(own, *arena, rank, num_ranks, seed).run(num_collectives);
    });
    const int num_hosts = *std::max_element(hosts.begin(), hosts.end()) + 1;
    std::printf("%llu collectives, %d ranks, %d hosts%s\n", static_cast<unsigned long long>(num_collectives), num_ranks,
                num_hosts, is_oversubscribed ? ", oversubscribed" : "");
}

// All ranks use the transfer mode that rank 0 announces. If not all offer to be read directly, they stage, but return
// to direct reads if these are faster: as here, where rank 0 takes them for so fast that nothing beats them.
template <class Call>
void returns_to_direct_reads(const char* what, Operation operation, std::size_t read_size, const Call& call) {
    const auto group = make_group(one_host(2), false);
    constexpr std::size_t stride = 1024 * 1024;
    const auto memory = make_memory(2 * stride);
    const TransferMode::Kind kind = TransferMode::kind_of(operation, read_size);
    run_ranks(2, [&](int rank) {
        Communicator& own = *group[static_cast<std::size_t>(rank)];
        const auto arena = std::make_shared<const shm::Arena>(memory, 7, stride, rank);
        own.add_arena(arena);
        own.handshake(patience);
        if (!own.can_read_peers()) {
            std::printf("%s, rank %d: the system does not permit reading other processes' memory\n", what, rank);
            return;
        }
        const auto run = [&](const auto& collective) { own.run_in_turn(own.reserve(), patience, collective); };
        run([&](Context& c, const Deadline& d) {
            if (rank == 0)
                for (int i = 0; i < 4; ++i) c.transfer_mode.record(kind, TransferMode::direct_read, 1e-15, 1);
            barrier(c, d);
        });
        for (int number = 0; number < 8; ++number)
            run([&](Context& c, const Deadline& d) {
                // Direct once; then staged until both are measured, one call later on all ranks; and direct again.
                const Choice expected =
                    number == 0 || number > 5 ? TransferMode::direct_read : TransferMode::staged_copy;
                require(c.transfer_mode.choice_for(kind) == expected, "%s, call %d, rank %d", what, number, rank);
                call(c, d, rank, *arena);
            });
    });
}

void transfer_modes() {
    constexpr std::size_t count = 10'000;  // large enough for direct reads
    constexpr std::size_t size = count * sizeof(Element);
    const auto alike = [](Context& c, const Deadline& d, int, const shm::Arena&) {
        Values in(count), out(2 * count);
        all_gather(c, bytes_of(out), bytes_of(in), std::vector<std::size_t>{count, count}, DType::int32, 0, d);
    };
    returns_to_direct_reads("all_gather", Operation::all_gather, size, alike);
    const auto shared_on_one = [](Context& c, const Deadline& d, int rank, const shm::Arena& arena) {
        Values in(count), out(2 * count);
        const std::byte* source = rank == 0 ? arena.buffer(rank) : bytes_of(in);
        all_gather(c, bytes_of(out), source, std::vector<std::size_t>{count, count}, DType::int32, 0, d);
    };
    returns_to_direct_reads("symmetric on one rank", Operation::all_gather, size, shared_on_one);
    // Rank 1's parts are of another kind than rank 0's, or too small for any.
    for (const std::size_t theirs : {2 * count, std::size_t{1}}) {
        const auto uneven = [&](Context& c, const Deadline& d, int rank, const shm::Arena&) {
            const std::vector<std::size_t> sizes{count, theirs};
            const std::size_t sent = sizes[static_cast<std::size_t>(rank)];
            Values in(2 * sent), out(count + theirs);
            all_to_all(c, bytes_of(out), bytes_of(in), std::vector<std::size_t>{sent, sent}, sizes, 1, DType::int32, d);
        };
        returns_to_direct_reads("all_to_all", Operation::all_to_all, size, uneven);
    }
    std::printf("transfer modes\n");
}

// Parts so large that they are copied in both ways (transport/shm/shared_copy.h) and folded in several blocks; ranks
// that need no result have room for one block.
void large_parts(int num_ranks) {
    constexpr std::size_t count = 100'003;
    const auto group = make_group(one_host(num_ranks), false, 256 * 1024);
    run_ranks(num_ranks, [&](int rank) {
        Communicator& own = *group[static_cast<std::size_t>(rank)];
        const Reduction sum{.dtype = DType::int32, .op = ReduceOp::sum};
        for (std::uint64_t number = 0; number < 20; ++number) {
            const int root = static_cast<int>(number) % num_ranks;
            Values source = input_of(rank, number, count), out(count), all(count);
            own.run_in_turn(own.reserve(), patience, [&](Context& c, const Deadline& d) {
                reduce(c, bytes_of(out), bytes_of(source), count, root, sum, d);
                allreduce(c, bytes_of(all), bytes_of(source), count, sum, d);
            });
            const Values total = sum_of(num_ranks, number, count);
            if (rank == root) expect(out, total, "reduce of large parts", rank, number);
            expect(all, total, "allreduce of large parts", rank, number);
        }
    });
    std::printf("large parts, %d ranks\n", num_ranks);
}

template <class Collective>
FailureKind failure_of(Communicator& communicator, double timeout, const Collective& collective) {
    try {
        communicator.run_in_turn(communicator.reserve(), timeout, collective);
    } catch (const Failure& failure) {
        return failure.kind();
    }
    require(false, "a collective that had to fail did not");
    std::abort();
}

// Ranks that stay away, leave, abort or make another call end the others' waits, with the reason; on another host
// possibly because a rank that found it first has reported it.
void failures(const std::vector<int>& hosts, bool is_oversubscribed) {
    const auto all = [](Context& c, const Deadline& d) { barrier(c, d); };
    const auto other = [](Context& c, const Deadline& d) {
        std::byte data[4]{};
        broadcast(c, data, data, 1, DType::int32, 0, d);
    };
    auto group = make_group(hosts, is_oversubscribed);
    run_ranks(3, [&](int rank) {
        if (rank == 1) return;
        const FailureKind kind = failure_of(*group[static_cast<std::size_t>(rank)], 0.2, all);
        require(kind == FailureKind::late || kind == FailureKind::failed, "late");
    });
    group = make_group(hosts, is_oversubscribed);
    run_ranks(3, [&](int rank) {
        Communicator& own = *group[static_cast<std::size_t>(rank)];
        if (rank == 1) {
            own.leave();
            return;
        }
        const FailureKind kind = failure_of(own, patience, all);
        require(kind == FailureKind::left || kind == FailureKind::lost || kind == FailureKind::failed, "left");
    });
    group = make_group(hosts, is_oversubscribed);
    run_ranks(3, [&](int rank) {
        Communicator& own = *group[static_cast<std::size_t>(rank)];
        own.abort("enough");  // other hosts learn of it over the control plane
        require(failure_of(own, patience, all) == FailureKind::aborted, "aborted");
    });
    group = make_group(hosts, is_oversubscribed);
    run_ranks(3, [&](int rank) {
        Communicator& own = *group[static_cast<std::size_t>(rank)];
        const FailureKind kind = rank == 1 ? failure_of(own, patience, other) : failure_of(own, patience, all);
        require(kind == FailureKind::mismatch || kind == FailureKind::failed, "mismatch");
    });
    // Several threads of a rank: each collective waits for its turn.
    group = make_group({hosts[0], hosts[1]}, is_oversubscribed);
    run_ranks(2, [&](int rank) {
        Communicator& own = *group[static_cast<std::size_t>(rank)];
        for (int round = 0; round < 200; ++round) {
            const std::uint64_t first = own.reserve();
            const std::uint64_t second = own.reserve();
            std::thread later([&] { own.run_in_turn(second, patience, all); });
            own.run_in_turn(first, patience, all);
            later.join();
        }
    });
    // Several threads start and wait, and one of them goes on without waiting.
    group = make_group({hosts[0], hosts[1]}, is_oversubscribed);
    run_ranks(2, [&](int rank) {
        Communicator& own = *group[static_cast<std::size_t>(rank)];
        const double forever = std::numeric_limits<double>::infinity();
        for (int round = 0; round < 200; ++round) {
            const auto first = own.start(patience, 0, all);
            const auto second = own.start(patience, 0, all);
            std::thread other([&] { own.wait(*first, forever); });
            if (round % 2 == 0) own.wait(*second, forever);
            own.run_in_turn(own.reserve(), patience, all);
            other.join();
            require(own.wait(*second, 0.1), "an earlier collective has not ended");
        }
    });
    // Two threads wait for handles of one rank, some with a timeout that expires before the other rank arrives.
    group = make_group({hosts[0], hosts[1]}, is_oversubscribed);
    std::atomic<int> num_passed{0};
    run_ranks(2, [&](int rank) {
        Communicator& own = *group[static_cast<std::size_t>(rank)];
        const double forever = std::numeric_limits<double>::infinity();
        for (int round = 0; round < 50; ++round) {
            if (rank == 1)
                while (num_passed.load() < 2 * (round + 1)) std::this_thread::yield();
            std::vector<std::shared_ptr<Pending>> handles;
            for (int i = 0; i < 3; ++i) handles.push_back(own.start(patience, 0, all));
            const auto wait_for = [&](std::size_t first) {
                if (rank == 0) {
                    require(!own.wait(*handles[first], 0.0005), "a limit that passes");
                    num_passed.fetch_add(1);
                }
                require(own.wait(*handles[2], forever) && own.wait(*handles[first], forever),
                        "what another waits for, too");
            };
            std::thread other([&] { wait_for(0); });
            wait_for(1);
            other.join();
        }
    });
    std::printf("endings, host of rank 1: %d%s\n", hosts[1], is_oversubscribed ? ", oversubscribed" : "");
}

// In an oversubscribed group ranks increment a counter and set a flag separately: a rank that is stopped between the
// two, or after the last increment and before the release of the others, holds nobody up beyond the deadline, and is
// named if it is waited for.
void stopped_arrivals() {
    const shm::Layout layout{
        .num_ranks = 3, .group_size = 3, .slot_bytes = slot_bytes, .is_oversubscribed = true, .spin_micros = 20};
    const auto memory = make_memory(layout.size_bytes());
    shm::GroupMemory segment(memory, layout);
    segment.initialize();
    segment.arrival(0, 1).sequence.store(1);
    try {
        segment.arrive(1, 1, Deadline(0.2));
        require(false, "arrived without rank 2");
    } catch (const Failure& failure) {
        require(failure.kind() == FailureKind::late && failure.ranks() == std::vector{2}, "rank 2 is named");
    }
    segment.arrive(2, 1, Deadline(patience));
    std::printf("stopped arrivals\n");
}

// A rank aborts a group and leaves it at once: waiters report the abort, not the leaving. It does both at any moment of
// the waiter's check, which takes a while with many ranks.
void abort_precedes_leaving(std::uint64_t num_rounds) {
    constexpr int num_ranks = 512;
    const shm::Layout layout{.num_ranks = num_ranks, .group_size = num_ranks, .slot_bytes = 4096, .spin_micros = 0};
    const auto memory = make_memory(layout.size_bytes());
    for (std::uint64_t round = 0; round < num_rounds; ++round) {
        std::array<std::unique_ptr<shm::GroupMemory>, 2> segments;
        for (auto& segment : segments) segment = std::make_unique<shm::GroupMemory>(memory, layout);
        segments[0]->initialize();
        for (int rank = 3; rank < num_ranks; ++rank) segments[0]->arrival(rank, 1).sequence.store(1);
        std::atomic<int> num_there{0};
        run_ranks(2, [&](int rank) {
            shm::GroupMemory& own = *segments[static_cast<std::size_t>(rank)];
            num_there.fetch_add(1);
            while (num_there.load() < 2) relax();
            if (rank == 0) {
                std::this_thread::sleep_for(std::chrono::microseconds(100));
                own.publish(own.arrival(2, 1).sequence, 1);  // wakes the other rank
                const auto end = Clock::now() + std::chrono::nanoseconds(50 * (round % 1000));
                while (Clock::now() < end) relax();
                own.abort("enough");
                own.leave(0);
                return;
            }
            try {
                own.arrive(1, 1, Deadline(patience));
                require(false, "arrived without rank 0");
            } catch (const Failure& failure) {
                require(failure.kind() == FailureKind::aborted, "it ended before it left");
            }
        });
    }
    std::printf("ends before leaving\n");
}

}  // namespace

int main(int argc, char** argv) {
    const std::uint64_t total = argc > 1 ? std::strtoull(argv[1], nullptr, 10) : 20000;
    const std::uint64_t seed = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
    for (const bool is_oversubscribed : {false, true}) {
        failures({0, 0, 0}, is_oversubscribed);
        failures({0, 1, 2}, is_oversubscribed);
        failures({0, 1, 0}, is_oversubscribed);
    }
    stopped_arrivals();
    transfer_modes();
    large_parts(2);
    large_parts(3);
    abort_precedes_leaving(total / 20);
    stress(one_host(1), false, total / 20, seed);
    stress(one_host(2), false, total * 6 / 20, seed + 1);
    stress(one_host(2), true, total / 20, seed + 2);
    stress(one_host(3), true, total * 2 / 20, seed + 3);
    stress(one_host(4), false, total * 2 / 20, seed + 4);
    stress(one_host(4), true, total * 2 / 20, seed + 5);
    stress(one_host(8), true, total * 2 / 20, seed + 6);
    stress({0, 1}, false, total / 20, seed + 7);
    stress({0, 1, 2}, true, total / 20, seed + 8);
    stress({0, 1, 0, 1}, false, total / 20, seed + 9);
    stress({0, 0, 1, 1, 2}, true, total / 20, seed + 10);
    stress({0, 0, 1, 1}, false, total / 20, seed + 11);
    stress({0, 0, 0, 1, 1, 1}, true, total / 20, seed + 12);
    stress({0, 0, 1, 1, 2, 2}, true, total / 20, seed + 13);
}
