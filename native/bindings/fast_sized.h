// The fast paths of collectives in which ranks first share their sizes: all_gather_uneven, gather and scatter.
#pragma once

#include <Python.h>

namespace ferrodist {

// The functions that Python calls, for `PyModule_AddFunctions`.
extern PyMethodDef sized_functions[];

}  // namespace ferrodist
