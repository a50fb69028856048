// The assertion of the native tests.
#pragma once

#include <cstdio>
#include <cstdlib>

namespace ferrodist {

// Ends the test with a message unless `holds`.
template <class... Values>
void require(bool holds, const char* format, Values... values) {
    if (holds) return;
    std::fprintf(stderr, format, values...);
    std::fputc('\n', stderr);
    std::abort();
}

}  // namespace ferrodist
