// The fast path of collectives: from Python's tensors straight into the engine. collectives/fast_path.py says when a
// call is plain, and has the calls from rank to rank.
#pragma once

#include <nanobind/nanobind.h>

#include "engine/communicator.h"

namespace ferrodist {

void bind_fast_path(nanobind::module_& m, nanobind::class_<Communicator>& communicator);

}  // namespace ferrodist
