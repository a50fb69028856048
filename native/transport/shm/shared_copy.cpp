#include "transport/shm/shared_copy.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ferrodist::shm {

namespace {

// Below this a copy goes through the cache: its reader is about to read it.
constexpr std::size_t least_streamed = 4 * 1024;
// From this on copies are timed: it takes some 50 ns. A frame of a ring is; what a fold copies at a time follows the others.
constexpr std::size_t least_timed = 24 * 1024;
// One copy in so many goes the other way.
constexpr unsigned trial_period = 16;
// How many times as fast a copy past the caches has to be: its reader pays for it.
constexpr double least_gain = 2.0;

void copy_by(CopyChoice::Way way, std::byte* out, const std::byte* source, std::size_t size) noexcept {
    if (way == CopyChoice::Way::cached) {
        copy_cached(out, source, size);
    } else {
        copy_streamed(out, source, size);
    }
}

}  // namespace

double CopyChoice::Recent::best() const noexcept {
    return *std::ranges::min_element(seconds_a_byte);
}

CopyChoice::Way CopyChoice::better() const noexcept {
    return recent_[0].best() > least_gain * recent_[1].best() ? Way::streamed : Way::cached;
}

CopyChoice::Way CopyChoice::next() noexcept {
    const Way better_one = better();
    if (++num_copies_ % trial_period != 0) return better_one;
    return better_one == Way::cached ? Way::streamed : Way::cached;
}

void CopyChoice::took(Way way, double seconds, std::size_t size) noexcept {
    Recent& recent = of(way);
    recent.seconds_a_byte[recent.next++ % recent.seconds_a_byte.size()] = seconds / static_cast<double>(size);
}

void SharedCopy::copy(std::byte* out, const std::byte* source, std::size_t size) noexcept {
    if (size < least_streamed) return copy_cached(out, source, size);
    if (size < least_timed) return copy_by(choice_.better(), out, source, size);
    const CopyChoice::Way way = choice_.next();
    const auto began = std::chrono::steady_clock::now();
    copy_by(way, out, source, size);
    choice_.took(way, std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count(), size);
}

void copy_cached(std::byte* out, const std::byte* source, std::size_t size) noexcept {
    if (size != 0) std::memcpy(out, source, size);
}

// Of the sanitizers' builds all stores are to be seen by them.
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
    // Such stores keep no order with others, not even with a release.
    _mm_sfence();
}

#else

void copy_streamed(std::byte* out, const std::byte* source, std::size_t size) noexcept {
    copy_cached(out, source, size);
}

#endif

}  // namespace ferrodist::shm
