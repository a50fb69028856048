// Prepared collectives (collectives/prepared.py): objects that Python calls without a frame, with the same tensors each
// time.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

void bind_prepared(nanobind::module_& m);

}  // namespace ferrodist
