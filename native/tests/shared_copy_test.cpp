// Copies into shared memory, cached and streamed.
#include "transport/shm/shared_copy.h"

#include <atomic>
#include <thread>
#include <vector>

#include "check.h"

using namespace ferrodist::shm;
using ferrodist::require;

namespace {

std::byte value_at(std::size_t i, std::size_t seed) {
    return static_cast<std::byte>((i * 31 + seed * 7 + 1) & 0xff);
}

void test_both_copies_write_the_same_bytes() {
    constexpr std::size_t most = 700, margin = 80;
    const std::byte untouched{0xa5};
    std::vector<std::byte> source(most + margin);
    for (std::size_t i = 0; i < source.size(); ++i) source[i] = value_at(i, 0);
    for (const auto copy : {copy_cached, copy_streamed}) {
        for (std::size_t size = 0; size < most; ++size) {
            const std::size_t from = size % 17, to = size % 67;
            std::vector<std::byte> out(most + 2 * margin, untouched);
            copy(out.data() + to, source.data() + from, size);
            for (std::size_t i = 0; i < out.size(); ++i) {
                const bool is_written = i >= to && i < to + size;
                require(out[i] == (is_written ? source[i - to + from] : untouched), "byte %zu of %zu", i, size);
            }
        }
    }
}

// A reader in another thread that sees a flag finds everything copied before it.
template <class Copy>
void test_copied_bytes_are_visible_after_a_flag(const Copy& copy, std::size_t size, std::uint64_t num_rounds) {
    std::vector<std::byte> shared(size), source(size);
    std::atomic<std::uint64_t> written{0}, read{0};
    std::thread reader([&] {
        for (std::uint64_t round = 1; round <= num_rounds; ++round) {
            while (written.load(std::memory_order_acquire) != round) std::this_thread::yield();
            for (std::size_t i = size; i-- > 0;)  // in reverse, for the last bytes written become visible last
                require(shared[i] == value_at(i, round), "byte %zu in round %zu", i, static_cast<std::size_t>(round));
            read.store(round, std::memory_order_release);
        }
    });
    for (std::uint64_t round = 1; round <= num_rounds; ++round) {
        for (std::size_t i = 0; i < size; ++i) source[i] = value_at(i, round);
        copy(shared.data(), source.data(), size);
        written.store(round, std::memory_order_release);
        while (read.load(std::memory_order_acquire) != round) std::this_thread::yield();
    }
    reader.join();
}

}  // namespace

int main() {
    test_both_copies_write_the_same_bytes();
    SharedCopy copies;
    const auto copy = [&](std::byte* out, const std::byte* source, std::size_t size) {
        copies.copy(out, source, size);
    };
    for (const std::size_t size : {64, 1000, 5000, 24 * 1024, 100'003}) {
        const std::uint64_t num_rounds = 20'000'000 / (size + 2000);
        test_copied_bytes_are_visible_after_a_flag(copy, size, num_rounds);
        test_copied_bytes_are_visible_after_a_flag(copy_streamed, size, num_rounds);
    }
    std::puts("shared copies: all right");
}
