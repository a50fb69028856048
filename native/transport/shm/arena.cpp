#include "transport/shm/arena.h"

#include <algorithm>
#include <cerrno>
#include <limits>
#include <system_error>

namespace ferrodist::shm {

std::size_t arena_bytes(std::size_t stride, int num_ranks) {
    if (num_ranks <= 0 || stride > std::numeric_limits<std::size_t>::max() / static_cast<std::size_t>(num_ranks))
        throw std::system_error(EOVERFLOW, std::generic_category(), "size of symmetric memory");
    return stride * static_cast<std::size_t>(num_ranks);
}

void Arenas::add(const std::shared_ptr<const Arena>& arena) {
    const std::lock_guard lock(mutex_);
    std::erase_if(arenas_, [](const auto& each) { return each.expired(); });
    arenas_.push_back(arena);
    is_used_.store(true);
}

SymmetricTensor Arenas::find(const std::byte* data, std::size_t size) const {
    if (!is_used_.load()) return {};
    const std::lock_guard lock(mutex_);
    for (const auto& each : arenas_)
        if (auto arena = each.lock(); arena && arena->holds(data, size)) {
            // Offsets are the same on all ranks; only the buffers' bases differ.
            const auto offset = static_cast<std::size_t>(data - arena->buffer(0)) % arena->stride();
            return {std::move(arena), offset};
        }
    return {};
}

}  // namespace ferrodist::shm
