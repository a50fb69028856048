// Symmetric memory: one buffer per rank of a host, all mapped by every rank, so that ranks read and write each other's
// tensors without staging.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "transport/shm/memory.h"

namespace ferrodist::shm {

// The buffers created by one collective allocation. An arena lives as long as any tensor in this rank's buffer.
class Arena {
public:
    // `stride` is the number of bytes per rank; the buffers follow one another in rank order. `id` is the same on all
    // ranks, and not 0.
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

// The size of the buffers of `num_ranks` ranks together. Throws std::system_error if it exceeds the address space.
std::size_t arena_bytes(std::size_t stride, int num_ranks);

// A tensor's address in symmetric memory: the same on all ranks if they pass matching tensors. Arena 0 means that the
// tensor is not in symmetric memory.
struct SymmetricAddress {
    std::uint64_t arena = 0;
    std::uint64_t offset = 0;

    friend bool operator==(const SymmetricAddress&, const SymmetricAddress&) = default;
};

// A tensor of this rank in symmetric memory, and its counterparts at the same offset on other ranks.
struct SymmetricTensor {
    std::shared_ptr<const Arena> arena;
    std::size_t offset = 0;

    [[nodiscard]] SymmetricAddress address() const {
        return arena ? SymmetricAddress{arena->id(), offset} : SymmetricAddress{};
    }
    [[nodiscard]] std::byte* at(int rank) const { return arena->buffer(rank) + offset; }
};

// The arenas of one group. Thread-safe.
class Arenas {
public:
    void add(const std::shared_ptr<const Arena>& arena);

    // The arena and offset that contain a tensor of this rank, if any.
    [[nodiscard]] SymmetricTensor find(const std::byte* data, std::size_t size) const;

private:
    mutable std::mutex mutex_;
    std::vector<std::weak_ptr<const Arena>> arenas_;
    std::atomic<bool> is_used_{false};  // saves groups without arenas the lock
};

}  // namespace ferrodist::shm
