#include "transport/shm/ring.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <new>

namespace ferrodist::shm {

namespace {

constexpr std::size_t all_rings_bytes = std::size_t{16} << 20;
constexpr std::size_t min_ring_bytes = std::size_t{16} << 10;
constexpr std::size_t max_ring_bytes = std::size_t{512} << 10;
constexpr std::size_t max_chunk_bytes = std::size_t{32} << 10;

constexpr std::size_t taken_by(std::size_t length) {
    return round_up(sizeof(Frame) + length, frame_unit);
}

}  // namespace

RingLayout RingLayout::for_ranks(int num_ranks) {
    if (num_ranks == 1) return {.num_ranks = 1, .ring_bytes = min_ring_bytes};  // unused
    const auto ranks = static_cast<std::size_t>(num_ranks);
    const std::size_t share = std::bit_floor(all_rings_bytes / (ranks * ranks));
    return {.num_ranks = num_ranks, .ring_bytes = std::clamp(share, min_ring_bytes, max_ring_bytes)};
}

std::size_t RingLayout::size_bytes() const {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    return common_part().size + ranks * ranks * ring_bytes;
}

Part RingLayout::common_part() const {
    const auto ranks = static_cast<std::size_t>(num_ranks);
    const std::size_t doorbells = round_up(ranks * sizeof(Doorbell), page_bytes);
    return {.start = 0, .size = doorbells + round_up(ranks * ranks * sizeof(Ring), page_bytes)};
}

Part RingLayout::part_of(int local) const {
    const std::size_t size = static_cast<std::size_t>(num_ranks) * ring_bytes;  // of the rings to all ranks
    return {.start = common_part().size + static_cast<std::size_t>(local) * size, .size = size};
}

Rings::Rings(std::shared_ptr<const Mapping> memory, const RingLayout& layout)
    : layout_(layout), memory_(std::move(memory)) {
    const auto ranks = static_cast<std::size_t>(layout.num_ranks);
    rings_ = memory_->data() + round_up(ranks * sizeof(Doorbell), page_bytes);
    bytes_ = memory_->data() + layout.common_part().size;
}

void Rings::initialize() {
    // The memory is zero, the initial value of all positions; this begins the objects' lifetimes.
    for (int rank = 0; rank < layout_.num_ranks; ++rank) {
        new (&doorbell(rank)) Doorbell{};
        for (int other = 0; other < layout_.num_ranks; ++other) new (&ring(rank, other)) Ring{};
    }
}

std::size_t Rings::index(int from, int to) const noexcept {
    return static_cast<std::size_t>(from) * static_cast<std::size_t>(layout_.num_ranks) + static_cast<std::size_t>(to);
}

Doorbell& Rings::doorbell(int rank) const noexcept {
    return *std::launder(
        reinterpret_cast<Doorbell*>(memory_->data() + static_cast<std::size_t>(rank) * sizeof(Doorbell)));
}

Ring& Rings::ring(int from, int to) const noexcept {
    return *std::launder(reinterpret_cast<Ring*>(rings_ + index(from, to) * sizeof(Ring)));
}

std::byte* Rings::bytes(int from, int to) const noexcept {
    return bytes_ + index(from, to) * layout_.ring_bytes;
}

RingWriter::RingWriter(const Rings& rings, int from, int to)
    : ring_(rings.ring(from, to)), bytes_(rings.bytes(from, to)), size_(rings.layout().ring_bytes) {
}

std::ptrdiff_t RingWriter::room(std::size_t wanted) {
    if (size_ - (tail_ - head_) < taken_by(wanted)) head_ = ring_.head.load();
    const std::size_t free = size_ - (tail_ - head_);
    return free < frame_unit ? -1 : static_cast<std::ptrdiff_t>(free - sizeof(Frame));
}

std::size_t RingWriter::max_frame_payload() const noexcept {
    return std::min(size_ / 4, max_chunk_bytes) - sizeof(Frame);
}

void RingWriter::write(const Frame& frame, const std::byte* payload) {
    // Frames begin at multiples of their unit, so a header never wraps.
    const std::size_t at = tail_ & (size_ - 1);
    std::memcpy(bytes_ + at, &frame, sizeof(Frame));
    if (frame.length != 0) {
        const std::size_t start = (at + sizeof(Frame)) & (size_ - 1);
        const std::size_t first = std::min<std::size_t>(frame.length, size_ - start);
        copy_.copy(bytes_ + start, payload, first);
        if (first < frame.length) copy_.copy(bytes_, payload + first, frame.length - first);
    }
    tail_ += taken_by(frame.length);
    ring_.tail.store(tail_);  // partners: the loads in `RingReader`
}

void RingWriter::set_blocked(bool is_blocked) {
    if (is_blocked == is_blocked_) return;
    is_blocked_ = is_blocked;
    ring_.is_blocked.store(is_blocked ? 1 : 0);  // partner: the load in `RingReader::release`
}

RingReader::RingReader(const Rings& rings, int from, int to)
    : ring_(rings.ring(from, to)), bytes_(rings.bytes(from, to)), size_(rings.layout().ring_bytes) {
}

RingReader::Front RingReader::front(Frame& frame) {
    if (tail_ == head_) {
        tail_ = ring_.tail.load();
        if (tail_ == head_) return Front::none;
    }
    const std::uint64_t available = tail_ - head_;
    if (available > size_ || available % frame_unit != 0) return Front::broken;
    // A copy: the checked values must be the used ones, whatever the other rank writes meanwhile.
    std::memcpy(&frame, bytes_ + (head_ & (size_ - 1)), sizeof(Frame));
    if (frame.length > size_ || taken_by(frame.length) > available) return Front::broken;
    return Front::frame;
}

void RingReader::copy_to(std::byte* target, std::size_t length) const {
    if (length == 0) return;
    const std::size_t start = (head_ + sizeof(Frame)) & (size_ - 1);
    const std::size_t first = std::min(length, size_ - start);
    std::memcpy(target, bytes_ + start, first);
    if (first < length) std::memcpy(target + first, bytes_, length - first);
}

void RingReader::pop(std::size_t length) {
    head_ += taken_by(length);
    position_.store(head_, std::memory_order_relaxed);
}

bool RingReader::release() {
    if (released_ == head_) return false;
    released_ = head_;
    ring_.head.store(head_);  // partner: the load in `RingWriter::room`
    const bool is_enough = tail_ == head_ || tail_ - head_ <= size_ / 2;
    return is_enough && ring_.is_blocked.load() != 0;
}

}  // namespace ferrodist::shm
