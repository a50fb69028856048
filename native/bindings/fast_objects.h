// The fast paths of collectives of objects, which [Note: shared sizes] in shared_sizes.h describes.
#pragma once

#include <Python.h>

namespace ferrodist {

// The functions that Python calls, for `PyModule_AddFunctions`.
extern PyMethodDef object_functions[];

}  // namespace ferrodist
