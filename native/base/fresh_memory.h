// Memory that is written for the first time.
//
// [Note: fresh memory]
// A result is often in memory that the system has not given yet: it does so page by page, as they are written to, and that
// takes longer than the copying. 16 MiB on a virtual machine, in ms: into memory that is there 1.8; into small pages that
// are not 8.6; into large ones 2.2. Whether memory is there can't be asked for less than it costs to say what is wanted.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace ferrodist {

// Asks the system for large pages where a range is not there yet, in as far as they fit into it. What is there stays; a
// system that gives none, or was told not to, takes no notice.
inline void expect_writes(std::byte* begin, std::size_t size) {
#ifdef MADV_HUGEPAGE
    constexpr std::uintptr_t page = std::uintptr_t{2} << 20;
    constexpr std::size_t least = 2 * page;  // below it may hold no whole page
    if (begin == nullptr || size < least) return;
    const auto address = reinterpret_cast<std::uintptr_t>(begin);
    const std::uintptr_t first = (address + page - 1) / page * page;
    const std::uintptr_t end = (address + size) / page * page;
    ::madvise(begin + (first - address), end - first, MADV_HUGEPAGE);
#else
    (void)begin;
    (void)size;
#endif
}

}  // namespace ferrodist
