#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

// Adds `Listener` and `Signal`.
void bind_listener(nanobind::module_& m);

}  // namespace ferrodist
