// Copies into shared memory, with cached or with streaming stores.
//
// [Note: shared copies]
// A store needs exclusive ownership of its cache line, which the last reader still holds. Between processors that share
// a cache it is transferred fast, and the next reader finds the bytes in that cache. Between others (other dies, other
// sockets; where a virtual machine runs is not known, and changes) it may take five times as long: 2 GB/s instead of
// 10, measured on one kind of processor. Streaming stores, which bypass the caches, need no ownership: 11 GB/s in both
// cases, but the next reader finds the bytes in memory, at 7 GB/s instead of 11. So both are timed, and streaming
// stores are used where they are faster by far.
#pragma once

#include <cstddef>

#include "base/two_way_autotuner.h"

namespace ferrodist::shm {

// Copies into shared memory. For one thread at a time.
class SharedCopy {
public:
    // Copies `size` bytes. They are visible to whoever sees a release store (of a flag or a position) that this thread
    // makes later.
    void copy(std::byte* out, const std::byte* source, std::size_t size) noexcept;

private:
    TwoWayAutotuner tuner_{2.0, 16};  // the reader pays for a streamed copy
};

// The two implementations; streaming falls back to cached where the processor has no such stores.
void copy_cached(std::byte* out, const std::byte* source, std::size_t size) noexcept;
void copy_streamed(std::byte* out, const std::byte* source, std::size_t size) noexcept;

}  // namespace ferrodist::shm
