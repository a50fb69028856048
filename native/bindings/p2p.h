// The Python bindings of the P2P engine.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

void bind_p2p(nanobind::module_& m);

}  // namespace ferrodist
