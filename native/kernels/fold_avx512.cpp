// The folds compiled for avx512; the build gives this file its compiler flags.
#define FERRODIST_INSTRUCTIONS avx512
#include "kernels/fold_loops.h"
