// Copies into memory that other processors read.
//
// [Note: shared copies]
// A store needs its cache line for itself, and who read the line last still has it. Between processors that share a cache it is
// taken away fast, and the next reader finds the bytes in that cache. Between others (other dies, other sockets; where a
// virtual machine runs is not known, and changes) it may take five times as long: 2 GB/s in place of 10, measured on one
// kind of processor. Stores that go past the caches need no line: 11 GB/s in both cases, but the next reader finds the
// bytes in memory, at 7 GB/s in place of 11. So both ways are timed, and the faster one by far is gone.
#pragma once

#include <array>
#include <cstddef>

namespace ferrodist::shm {

// Which of the two ways is gone, from how long each has taken.
class CopyChoice {
public:
    enum class Way : unsigned char { cached, streamed };

    // The better way; at times the other one, for both are to be known.
    [[nodiscard]] Way next() noexcept;
    [[nodiscard]] Way better() const noexcept;
    // Takes note of a copy that went a way.
    void took(Way way, double seconds, std::size_t size) noexcept;

private:
    // The best of the last few counts: whoever is stopped in the middle takes longer, and nobody is faster by accident.
    struct Recent {
        std::array<double, 4> seconds_a_byte{};  // 0 before it is known, so it is tried
        std::size_t next = 0;

        [[nodiscard]] double best() const noexcept;
    };
    [[nodiscard]] Recent& of(Way way) noexcept { return recent_[static_cast<std::size_t>(way)]; }

    std::array<Recent, 2> recent_;
    unsigned num_copies_ = 0;
};

// Copies into memory that is shared, one after the other.
class SharedCopy {
public:
    // What was copied is there for whoever sees a store (of a flag, a position) that this thread makes later and releases.
    void copy(std::byte* out, const std::byte* source, std::size_t size) noexcept;

private:
    CopyChoice choice_;
};

// The two ways; the second is the first where the processor has no such stores.
void copy_cached(std::byte* out, const std::byte* source, std::size_t size) noexcept;
void copy_streamed(std::byte* out, const std::byte* source, std::size_t size) noexcept;

}  // namespace ferrodist::shm
