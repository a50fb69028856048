// Symmetric memory: a buffer of each rank of one host, all of them mapped by every rank, so that a rank can read and
// write the others' without staging.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/shm/memory.h"

namespace ferrodist::shm {

// The buffers that were made by one call on all ranks. It lives as long as any tensor in this rank's buffer does.
class Arena {
public:
    // `stride` bytes a rank, one rank after the other. `id` is the same on all ranks, and not 0.
    Arena(std::shared_ptr<const Mapping> memory, std::uint64_t id, std::size_t stride, int rank)
        : memory_(std::move(memory)), id_(id), stride_(stride), rank_(rank) {}

    [[nodiscard]] std::uint64_t id() const noexcept { return id_; }
    [[nodiscard]] std::size_t stride() const noexcept { return stride_; }
    [[nodiscard]] std::byte* buffer(int rank) const noexcept {
        return memory_->data() + static_cast<std::size_t>(rank) * stride_;
    }
    [[nodiscard]] bool holds(const std::byte* data, std::size_t size) const noexcept {
        return data >= buffer(rank_) && data + size <= buffer(rank_) + stride_;
    }

private:
    std::shared_ptr<const Mapping> memory_;
    std::uint64_t id_;
    std::size_t stride_;
    int rank_;
};

// Bytes of the buffers of so many ranks together. Throws std::system_error where no memory can be so large.
std::size_t arena_bytes(std::size_t stride, int num_ranks);

// Where a tensor lies in symmetric memory: the same on all ranks when they pass matching tensors. An arena of 0 means
// that it lies elsewhere.
struct Place {
    std::uint64_t arena = 0;
    std::uint64_t offset = 0;

    friend bool operator==(const Place&, const Place&) = default;
};

// A tensor of this rank, and the others' that lie at the same place.
struct Shared {
    std::shared_ptr<const Arena> arena;
    std::size_t offset = 0;

    [[nodiscard]] Place place() const { return arena ? Place{arena->id(), offset} : Place{}; }
    [[nodiscard]] std::byte* of(int rank) const { return arena->buffer(rank) + offset; }
};

// The arenas of one group. For any number of threads.
class Arenas {
public:
    void add(const std::shared_ptr<const Arena>& arena);

    // What a tensor of this rank is part of.
    [[nodiscard]] Shared find(const std::byte* data, std::size_t size) const;

private:
    mutable std::mutex mutex_;
    std::vector<std::weak_ptr<const Arena>> arenas_;
    std::atomic<bool> is_used_{false};  // spares groups without any the lock
};

}  // namespace ferrodist::shm
