// The functions of the fast path of point-to-point calls.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

void bind_fast_p2p(nanobind::module_& m);

}  // namespace ferrodist
