// Copies into memory that other processors read.
//
// [Note: shared copies]
// A store needs its cache line for itself, and who read the line last still has it. Between processors that share a
// cache it is taken away fast, and the next reader finds the bytes in that cache. Between others (other dies, other
// sockets; where a virtual machine runs is not known, and changes) it may take five times as long: 2 GB/s in place of
// 10, measured on one kind of processor. Stores that go past the caches need no line: 11 GB/s in both cases, but the
// next reader finds the bytes in memory, at 7 GB/s in place of 11. So both ways are timed, and the second is gone where
// it is faster by far.
#pragma once

#include <cstddef>

#include "base/two_way_autotuner.h"

namespace ferrodist::shm {

// Copies into memory that is shared, one after the other.
class SharedCopy {
public:
    // What was copied is there for whoever sees a store (of a flag, a position) that this thread makes later and releases.
    void copy(std::byte* out, const std::byte* source, std::size_t size) noexcept;

private:
    TwoWayAutotuner choice_{2.0, 16};  // its reader pays for a copy past the caches
};

// The two ways; the second is the first where the processor has no such stores.
void copy_cached(std::byte* out, const std::byte* source, std::size_t size) noexcept;
void copy_streamed(std::byte* out, const std::byte* source, std::size_t size) noexcept;

}  // namespace ferrodist::shm
