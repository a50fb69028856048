#include "transport/shm/shared_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "base/deadline.h"

namespace ferrodist::shm {

namespace {

// Smaller copies go through the cache: their reader is about to read them.
constexpr std::size_t least_streamed = 4 * 1024;
// Copies of this size are timed, which takes some 50 ns: frames of rings of 128 KiB and more are. A fold's blocks are
// smaller and are not timed; they use the choice that the others lead to.
constexpr std::size_t least_timed = 24 * 1024;

void copy_by(Choice choice, std::byte* out, const std::byte* source, std::size_t size) noexcept {
    if (choice == Choice::first) {
        copy_cached(out, source, size);
    } else {
        copy_streamed(out, source, size);
    }
}

}  // namespace

void SharedCopy::copy(std::byte* out, const std::byte* source, std::size_t size) noexcept {
    if (size < least_streamed) return copy_cached(out, source, size);
    if (size < least_timed) return copy_by(tuner_.better(), out, source, size);
    const Choice choice = tuner_.next();
    const auto began = Clock::now();
    copy_by(choice, out, source, size);
    tuner_.record(choice, std::chrono::duration<double>(Clock::now() - began).count(), size);
}

void copy_cached(std::byte* out, const std::byte* source, std::size_t size) noexcept {
    if (size != 0) std::memcpy(out, source, size);
}

// Sanitizer builds use plain stores only, which the sanitizers see.
#if defined(__x86_64__) && !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)

void copy_streamed(std::byte* out, const std::byte* source, std::size_t size) noexcept {
    constexpr std::size_t line = 64;
    const std::size_t head = std::min(size, (line - reinterpret_cast<std::uintptr_t>(out) % line) % line);
    copy_cached(out, source, head);
    out += head;
    source += head;
    const std::size_t lines = (size - head) / line;
    for (std::size_t i = 0; i < lines; ++i, out += line, source += line) {
        const auto* from = reinterpret_cast<const __m128i*>(source);
        auto* to = reinterpret_cast<__m128i*>(out);
        const __m128i first = _mm_loadu_si128(from);
        const __m128i second = _mm_loadu_si128(from + 1);
        const __m128i third = _mm_loadu_si128(from + 2);
        const __m128i fourth = _mm_loadu_si128(from + 3);
        _mm_stream_si128(to, first);
        _mm_stream_si128(to + 1, second);
        _mm_stream_si128(to + 2, third);
        _mm_stream_si128(to + 3, fourth);
    }
    copy_cached(out, source, (size - head) % line);
    // Streaming stores are not ordered with other stores, not even by a release.
    _mm_sfence();
}

#else

void copy_streamed(std::byte* out, const std::byte* source, std::size_t size) noexcept {
    copy_cached(out, source, size);
}

#endif

}  // namespace ferrodist::shm
