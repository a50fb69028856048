// The folds compiled for avx2; the build gives this file its compiler flags.
#define FERRODIST_INSTRUCTIONS avx2
#include "kernels/fold_loops.h"
