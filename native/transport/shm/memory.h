// Shared memory mapped by several processes.
//
// [Note: first touch]
// The system allocates a page of shared memory on the NUMA node of the thread that first touches it, or that allocates
// it by `fallocate`. So no rank allocates another's: after its creation the memory has no pages; its creator allocates
// those that several ranks write (flags, calls and small data, which stay in the processors' caches), and each rank
// those that it alone writes: its slots, the rings that it sends by, its part of an arena. All have done so before any
// rank uses the memory.
#pragma once

#include <cstddef>
#include <utility>

#include "base/descriptor.h"

namespace ferrodist::shm {

// The alignment of the parts of shared memory; pages are at least this large.
inline constexpr std::size_t page_bytes = 4096;

constexpr std::size_t round_up(std::size_t size, std::size_t unit) {
    return (size + unit - 1) / unit * unit;
}

// An owned memory mapping. The descriptor that it was made from may be closed earlier.
class Mapping {
public:
    Mapping() = default;
    // Maps `size` bytes of `descriptor` for reading and writing. Throws std::system_error.
    Mapping(int descriptor, std::size_t size);
    Mapping(Mapping&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}
    Mapping& operator=(Mapping&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping();

    [[nodiscard]] std::byte* data() const noexcept { return data_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

private:
    std::byte* data_ = nullptr;
    std::size_t size_ = 0;
};

// A range of bytes of shared memory.
struct Part {
    std::size_t start = 0;
    std::size_t size = 0;
};

// Creates anonymous shared memory of `size` bytes that cannot shrink. It has no pages yet: see [Note: first touch].
// Throws std::system_error.
Descriptor create_memory(const char* name, std::size_t size);

// Allocates the pages of a part of shared memory, on the NUMA node of this thread: so a lack of memory is an error here
// and not a SIGBUS later. Signals do not end it, but an interruption (base/interruption.h) does. Throws
// std::system_error.
void take_pages(int descriptor, const Part& part);

}  // namespace ferrodist::shm
