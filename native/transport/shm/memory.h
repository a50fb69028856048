// Memory that several processes map.
#pragma once

#include <cstddef>
#include <utility>

#include "base/descriptor.h"

namespace ferrodist::shm {

// What parts of shared memory begin at multiples of; a page is at least this large.
inline constexpr std::size_t page_bytes = 4096;

constexpr std::size_t round_up(std::size_t size, std::size_t unit) {
    return (size + unit - 1) / unit * unit;
}

// A mapping, which lives until its owner is destroyed; the descriptor it was made from may be closed before.
class Mapping {
public:
    Mapping() = default;
    // Maps `size` bytes of `descriptor`, to read and to write. Throws std::system_error.
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

// Makes anonymous shared memory of `size` bytes that can't shrink, and takes its pages now: a lack of memory is an
// error here and no bus error later. Signals don't end that, but an interruption (base/interruption.h) does. Throws
// std::system_error.
Descriptor create_memory(const char* name, std::size_t size);

}  // namespace ferrodist::shm
