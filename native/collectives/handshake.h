// What the ranks of a group find out about each other before its first collective.
#pragma once

#include "collectives/context.h"

namespace ferrodist {

// Finds out whether all ranks can read each other's memory; see transport/shm/peer_memory.h.
void meet_peers(Context& context, const Deadline& deadline);

}  // namespace ferrodist
