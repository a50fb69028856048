// The fast paths of the calls of `torch.distributed`: of tensors and lists of tensors that are given, as a row of
// elements of any shape, untracked by autograd.
#pragma once

#include <Python.h>

namespace ferrodist {

// The functions that Python calls, for `PyModule_AddFunctions`.
extern PyMethodDef torch_functions[];

}  // namespace ferrodist
