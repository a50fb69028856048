// Shared memory mapped by several processes.
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

// Creates anonymous shared memory of `size` bytes that cannot shrink, and allocates its pages now: so a lack of memory
// is an error here and not a SIGBUS later. Signals do not end it, but an interruption (base/interruption.h) does.
// Throws std::system_error.
Descriptor create_memory(const char* name, std::size_t size);

}  // namespace ferrodist::shm
