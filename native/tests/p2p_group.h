// Groups of P2P engines for tests: ranks that are threads over one mapping, so that the thread sanitizer sees every
// access.
#pragma once

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <atomic>
#include <cstddef>
#include <memory>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "base/descriptor.h"
#include "check.h"
#include "engine/p2p_engine.h"
#include "transport/shm/ring.h"

namespace ferrodist {

inline constexpr double patience = 60.0;
inline constexpr std::size_t eager_bytes = 8 * 1024;
inline constexpr std::size_t max_unexpected_bytes = std::size_t{1} << 30;

// Time limit with connections: a window smaller than a segment makes the kernel stall for fractions of a second, again
// and again.
inline constexpr int segment_bytes = 1024;

using Bytes = std::vector<std::byte>;

using Group = std::vector<std::unique_ptr<P2PEngine>>;

inline std::atomic<int> num_violations{0};  // protocol violations reported
inline std::atomic<int> num_gone{0};        // lost connections reported

struct Net {
    std::vector<int> hosts;  // of each rank
    std::size_t ring_bytes = 16 * 1024;
    int socket_bytes = 0;  // of each of a connection's buffers; 0 for the system's default
    bool is_oversubscribed = true;
};

// All ranks on one host, one rank per host, or alternating between two hosts.
inline Net local(int num_ranks) {
    Net net;
    net.hosts.assign(static_cast<std::size_t>(num_ranks), 0);
    return net;
}
inline Net remote(int num_ranks) {
    Net net;
    for (int rank = 0; rank < num_ranks; ++rank) net.hosts.push_back(rank);
    return net;
}
inline Net mixed(int num_ranks) {
    Net net;
    for (int rank = 0; rank < num_ranks; ++rank) net.hosts.push_back(rank % 2);
    return net;
}

// The two ends of a connection.
inline std::pair<Descriptor, Descriptor> make_connection(int buffer_bytes) {
    const auto set = [](const Descriptor& socket, int level, int option, int value) {
        if (value != 0) ::setsockopt(socket.get(), level, option, &value, sizeof value);
    };
    const Descriptor listener(::socket(AF_INET, SOCK_STREAM, 0));
    set(listener, SOL_SOCKET, SO_RCVBUF, buffer_bytes);
    set(listener, IPPROTO_TCP, TCP_MAXSEG, buffer_bytes != 0 ? segment_bytes : 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof address;
    auto* general = reinterpret_cast<sockaddr*>(&address);
    require(::bind(listener.get(), general, size) == 0 && ::listen(listener.get(), 1) == 0, "no listener");
    require(::getsockname(listener.get(), general, &size) == 0, "no address");
    Descriptor dialled(::socket(AF_INET, SOCK_STREAM, 0));
    set(dialled, SOL_SOCKET, SO_RCVBUF, buffer_bytes);
    set(dialled, IPPROTO_TCP, TCP_MAXSEG, buffer_bytes != 0 ? segment_bytes : 0);
    require(::connect(dialled.get(), general, size) == 0, "no connection");
    Descriptor accepted(::accept(listener.get(), nullptr, nullptr));
    for (const Descriptor* socket : {&dialled, &accepted}) {
        set(*socket, IPPROTO_TCP, TCP_NODELAY, 1);
        set(*socket, SOL_SOCKET, SO_SNDBUF, buffer_bytes);
    }
    return {std::move(dialled), std::move(accepted)};
}

// The raw channel of rank 0, through which a test writes to rank 1.
struct Made {
    std::shared_ptr<const shm::Rings> rings;
    Descriptor socket;
};

inline Group make_group(const Net& net, Made* made = nullptr) {
    const auto num_ranks = net.hosts.size();
    std::vector<std::vector<Descriptor>> sockets(num_ranks);
    for (auto& row : sockets) row.resize(num_ranks);
    for (std::size_t rank = 0; rank < num_ranks; ++rank)
        for (std::size_t other = 0; other < rank; ++other)
            if (net.hosts[rank] != net.hosts[other])
                std::tie(sockets[rank][other], sockets[other][rank]) = make_connection(net.socket_bytes);
    Descriptor unused;
    if (made != nullptr) {
        made->socket = std::move(sockets[0][1]);
        std::tie(sockets[0][1], unused) = make_connection(0);
    }
    std::vector<std::shared_ptr<const shm::Rings>> rings(num_ranks);  // by host
    Group group;
    for (std::size_t rank = 0; rank < num_ranks; ++rank) {
        std::vector<int> indexes;
        int num_local = 0;
        for (const int host : net.hosts) indexes.push_back(host == net.hosts[rank] ? num_local++ : -1);
        auto& host = rings[static_cast<std::size_t>(net.hosts[rank])];
        if (!host) {
            const shm::RingLayout layout{.num_ranks = num_local, .ring_bytes = net.ring_bytes};
            const Descriptor descriptor(shm::create_memory("ferrodist-test", layout.size_bytes()));
            auto memory = std::make_shared<const shm::Mapping>(descriptor.get(), layout.size_bytes());
            shm::Rings(memory, layout).initialize();
            host = std::make_shared<const shm::Rings>(memory, layout);
            if (made != nullptr && rank == 0) made->rings = host;
        }
        const P2PEngine::Settings settings{.rank = static_cast<int>(rank),
                                           .eager_bytes = eager_bytes,
                                           .max_unexpected_bytes = max_unexpected_bytes,
                                           .is_oversubscribed = net.is_oversubscribed,
                                           .spin_micros = 20};
        P2PEngine::Routes routes{.rings = host, .local_indexes = indexes, .sockets = std::move(sockets[rank])};
        group.push_back(std::make_unique<P2PEngine>(settings, std::move(routes), [](P2PEngine& engine) {
            const EngineEvents events = engine.take_events();
            for (const PeerEvent& event : events.peer_events) {
                require(event.kind != PeerEvent::Kind::full, "the buffer for unexpected messages is full");
                (event.kind == PeerEvent::Kind::broken ? num_violations : num_gone).fetch_add(1);
            }
            for (Transfer* ended = events.first_ended; ended != nullptr;) {
                auto* has_ended = static_cast<std::atomic<bool>*>(ended->owner);
                ended = ended->next_ended;
                has_ended->store(true);
            }
        }));
    }
    return group;
}

template <class Body>
void run_threads(int num_threads, const Body& body) {
    std::vector<std::thread> threads;
    for (int i = 0; i < num_threads; ++i) threads.emplace_back([&body, i] { body(i); });
    for (auto& thread : threads) thread.join();
}

// Closes all ranks, which must not take long.
inline void leave(const Group& group) {
    run_threads(static_cast<int>(group.size()), [&](int rank) {
        P2PEngine& own = *group[static_cast<std::size_t>(rank)];
        const Deadline deadline(patience);
        own.close();
        own.drain(patience);
        require(!deadline.expired(), "rank %d can't leave", rank);
    });
}

}  // namespace ferrodist
