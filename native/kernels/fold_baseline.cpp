// The folds compiled for baseline; the build gives this file its compiler flags.
#define FERRODIST_INSTRUCTIONS baseline
#include "kernels/fold_loops.h"
