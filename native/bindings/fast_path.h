// The fast path of collectives: from Python's tensors straight into the engine. collectives/fast_path.py says when a
// call is plain, and has the calls from rank to rank.
#pragma once

#include <nanobind/nanobind.h>

#include <string_view>

#include "bindings/fast_call.h"
#include "engine/communicator.h"

namespace ferrodist {

// Runs a collective on a path: tensor, out or None, and the other arguments. Returns None if it is not plain.
using FastCollective = PyObject* (*)(const OpenFastPath&, nanobind::handle, nanobind::handle, PyObject* const*);

// The collective of a name that takes one tensor and gives one; null if there is none.
FastCollective find_fast_collective(std::string_view name);

void bind_fast_path(nanobind::module_& m, nanobind::class_<Communicator>& communicator);

}  // namespace ferrodist
