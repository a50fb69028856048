// The folds with the instructions of avx2; the build gives this file its compiler flags.
#define FERRODIST_INSTRUCTIONS avx2
#include "kernels/fold_loops.h"
