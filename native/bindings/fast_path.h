// The fast path of collectives: from Python's tensors straight into the engine. collectives/fast_path.py says when a
// call is plain; calls from rank to rank are in fast_p2p.h.
#pragma once

#include <nanobind/nanobind.h>

#include "engine/communicator.h"

namespace ferrodist {

void bind_fast_path(nanobind::module_& m, nanobind::class_<Communicator>& communicator);

}  // namespace ferrodist
