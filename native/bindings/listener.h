// The Python bindings of repeated receives and of signals between threads.
#pragma once

#include <nanobind/nanobind.h>

namespace ferrodist {

// Adds `Listener` and `Signal`.
void bind_listener(nanobind::module_& m);

}  // namespace ferrodist
