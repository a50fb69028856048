// The fast path of collectives: from Python's tensors straight into the engine; see collectives/fast_path.py.
#pragma once

#include <nanobind/nanobind.h>

#include "engine/communicator.h"

namespace ferrodist {

void bind_fast_path(nanobind::module_& m, nanobind::class_<Communicator>& communicator);

}  // namespace ferrodist
