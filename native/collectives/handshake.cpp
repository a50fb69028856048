#include "collectives/handshake.h"

#include <cstring>

namespace ferrodist {

void probe_peer_memory(Context& context, const Deadline& deadline) {
    if (context.fabric.has_remote_ranks() || context.num_ranks == 1) return;
    const shm::Call call{.operation = static_cast<std::uint8_t>(Operation::barrier)};
    const auto own = shm::ProcessRecord::own();
    std::memcpy(context.fabric.begin(call), &own, sizeof own);
    context.fabric.enter(deadline);
    std::uint8_t can_read = 1;
    for (int r = 0; r < context.num_ranks; ++r) {
        shm::ProcessRecord theirs;
        std::memcpy(&theirs, context.fabric.arrival(r).payload.data(), sizeof theirs);
        if (r != context.rank && !context.peers.probe(r, theirs)) can_read = 0;
    }
    std::memcpy(context.fabric.begin(call), &can_read, sizeof can_read);
    context.fabric.enter(deadline);
    for (int r = 0; r < context.num_ranks; ++r) {
        std::uint8_t theirs = 0;
        std::memcpy(&theirs, context.fabric.arrival(r).payload.data(), sizeof theirs);
        can_read &= theirs;
    }
    context.peers.set_usable(can_read != 0);
}

}  // namespace ferrodist
