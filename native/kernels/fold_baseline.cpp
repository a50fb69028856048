// The folds with the instructions of baseline; the build gives this file its compiler flags.
#define FERRODIST_INSTRUCTIONS baseline
#include "kernels/fold_loops.h"
