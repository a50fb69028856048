// The handshake of a group's ranks before its first collective.
#pragma once

#include "collectives/context.h"

namespace ferrodist {

// Finds out whether all ranks can read each other's memory; see transport/shm/peer_memory.h.
void probe_peer_memory(Context& context, const Deadline& deadline);

}  // namespace ferrodist
