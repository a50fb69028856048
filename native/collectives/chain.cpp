#include "collectives/chain.h"

#include <algorithm>
#include <array>

namespace ferrodist {

namespace {

bool is_small_float(DType dtype) {
    return dtype == DType::float16 || dtype == DType::bfloat16 || dtype == DType::float8_e4m3fn ||
           dtype == DType::float8_e5m2;
}

// One allreduce on one rank; see [Note: chain].
class ChainFold {
public:
    ChainFold(Context& context, ReductionFolder& folder, std::byte* out, const std::byte* source, std::size_t count,
              const Reduction& reduction)
        : context_(context),
          fabric_(context.fabric),
          chain_(fabric_.chain()),
          out_(out),
          source_(source),
          element_size_(size_of(reduction.dtype)),
          segmentation_{
              .count = count,
              .element_size = element_size_,
              .segment_elements = elements_in(segment_bytes(count * element_size_, fabric_.layout()), element_size_)},
          base_(fabric_.next_segment()) {
        // The mean is divided where the fold ends.
        const bool is_partial = chain_.next >= 0 && reduction.op == ReduceOp::mean;
        fold_ = find_fold(reduction.dtype, is_partial ? ReduceOp::sum : reduction.op, context.instructions);
        std::size_t index = 0;
        if (chain_.previous >= 0) context_.factors[index++] = 1.0;
        for (int j = 0; j < chain_.num_local; ++j) context_.factors[index++] = folder.factor_of(chain_.first_local + j);
        if (reduction.op == ReduceOp::mean) context_.factors[0] = context.num_ranks;
    }

    void run(const Deadline& deadline) {
        const std::size_t count = segmentation_.num_segments();
        stage(0, deadline);
        for (std::size_t k = 0; k < count; ++k) {
            if (k + 1 < count) stage(k + 1, deadline);
            fold(k, deadline);
            if (k > 0) take(k - 1, deadline);
        }
        take(count - 1, deadline);
        fabric_.count_segments(count);
        fabric_.publish_done(base_ + count);  // for all hosts: the next collective may use all slots
    }

private:
    [[nodiscard]] Chunks chunks_of(std::size_t k) const {
        return divide(segmentation_.size_of(k), chain_.num_local, element_size_);
    }
    [[nodiscard]] int own_index() const { return context_.rank - chain_.first_local; }
    [[nodiscard]] Range own_range(std::size_t k) const {
        const Chunks chunks = chunks_of(k);
        return {.offset = chunks.begin_of(own_index()) * element_size_,
                .size = chunks.size_of(own_index()) * element_size_};
    }

    // `action(rank, offset, size)` for each chunk of segment k that another rank of this host folds.
    template <class Action>
    void for_others(std::size_t k, const Action& action) const {
        const Chunks chunks = chunks_of(k);
        for (int step = 1; step < chain_.num_local; ++step) {
            const int j = (own_index() + step) % chain_.num_local;
            action(chain_.first_local + j, chunks.begin_of(j) * element_size_, chunks.size_of(j) * element_size_);
        }
    }

    void stage(std::size_t k, const Deadline& deadline) {
        const std::uint64_t number = base_ + k;
        if (!fabric_.is_slot_free(number))
            fabric_.await_host(&shm::RankFlags::done, number - shm::num_slots + 1, deadline);
        std::byte* slot = fabric_.slot(context_.rank, number);
        for_others(k, [&](int, std::size_t offset, std::size_t size) {
            context_.into_shared.copy(slot + offset, source_ + segmentation_.offset_bytes(k) + offset, size);
        });
        fabric_.publish_host(&shm::RankFlags::staged, number + 1);
    }

    void fold(std::size_t k, const Deadline& deadline) {
        const std::uint64_t number = base_ + k;
        const Range own = own_range(k);
        fabric_.await_host(&shm::RankFlags::staged, number + 1, deadline);
        if (chain_.previous >= 0) fabric_.await_rank(chain_.previous, &shm::RankFlags::staged, number + 1, deadline);
        std::byte* slot = fabric_.slot(context_.rank, number) + own.offset;
        std::byte* result = out_ + segmentation_.offset_bytes(k) + own.offset;
        for (std::size_t start = 0; start < own.size; start += copied_bytes) {
            const std::size_t size = std::min(copied_bytes, own.size - start);
            const std::size_t offset = own.offset + start;
            std::size_t index = 0;
            if (chain_.previous >= 0) context_.inputs[index++] = fabric_.slot(chain_.previous, number) + offset;
            for (int r = chain_.first_local; r < chain_.first_local + chain_.num_local; ++r)
                context_.inputs[index++] = r == context_.rank ? source_ + segmentation_.offset_bytes(k) + offset
                                                              : fabric_.slot(r, number) + offset;
            std::byte* target = chain_.next >= 0 ? slot + start : result + start;
            fold_(target, context_.inputs.data(), index, size / element_size_, context_.factors.data());
            if (chain_.next < 0) context_.into_shared.copy(slot + start, target, size);
        }
        if (chain_.next >= 0) {
            fabric_.send_to(chain_.next, tcp::LinkFrameType::staged, number, own);
        } else {
            publish_result(number, own);
        }
    }

    void take(std::size_t k, const Deadline& deadline) {
        const std::uint64_t number = base_ + k;
        if (chain_.next >= 0) {
            const Range own = own_range(k);
            fabric_.await_rank(chain_.next, &shm::RankFlags::folded, number + 1, deadline);
            const std::byte* theirs = fabric_.slot(chain_.next, number) + own.offset;
            context_.into_shared.copy(fabric_.slot(context_.rank, number) + own.offset, theirs, own.size);
            copy_bytes(out_ + segmentation_.offset_bytes(k) + own.offset, theirs, own.size);
            publish_result(number, own);
        }
        fabric_.await_host(&shm::RankFlags::folded, number + 1, deadline);
        for_others(k, [&](int r, std::size_t offset, std::size_t size) {
            copy_bytes(out_ + segmentation_.offset_bytes(k) + offset, fabric_.slot(r, number) + offset, size);
        });
        fabric_.publish_host(&shm::RankFlags::done, number + 1);
    }

    void publish_result(std::uint64_t number, const Range& own) {
        if (chain_.previous >= 0) fabric_.send_to(chain_.previous, tcp::LinkFrameType::folded, number, own);
        fabric_.publish_host(&shm::RankFlags::folded, number + 1);
    }

    Context& context_;
    Fabric& fabric_;
    Chain chain_;
    std::byte* out_;
    const std::byte* source_;
    std::size_t element_size_;
    Segmentation segmentation_;
    std::uint64_t base_;
    Fold fold_;
};

// One broadcast on one rank; see [Note: chain of a broadcast].
class ChainBroadcast {
public:
    ChainBroadcast(Context& context, std::byte* out, const std::byte* source, const Segmentation& segmentation,
                   int root)
        : context_(context),
          fabric_(context.fabric),
          out_(out),
          source_(source),
          segmentation_(segmentation),
          relay_(fabric_.chain().first_local + root % fabric_.chain().num_local),
          base_(fabric_.next_segment()) {
        const Chain& chain = fabric_.chain();
        const int own_host = context.rank / chain.num_local;
        const int root_host = root / chain.num_local;
        if (own_host > root_host) before_ = chain.previous;
        if (own_host < root_host) before_ = chain.next;
        if (own_host <= root_host) beyond_[0] = chain.previous;
        if (own_host >= root_host) beyond_[1] = chain.next;
    }

    void run(const Deadline& deadline) {
        const std::size_t count = segmentation_.num_segments();
        for (std::size_t k = 0; k < count; ++k) {
            if (context_.rank == relay_) {
                relay(k, deadline);
            } else {
                fabric_.await_rank(relay_, &shm::RankFlags::staged, base_ + k + 1, deadline);
                take(k, fabric_.slot(relay_, base_ + k));
            }
            fabric_.publish_host(&shm::RankFlags::done, base_ + k + 1);
        }
        // A rank may leave the group after this. If it closed a connection with answers that it has not read, what it
        // has sent there could be lost.
        if (context_.rank == relay_) await_beyond(base_ + count, deadline);
        fabric_.count_segments(count);
        // Before the next collective ranks of other hosts wait for this only if all slots were used.
        if (count >= shm::num_slots) fabric_.publish_done(base_ + count);
    }

private:
    void relay(std::size_t k, const Deadline& deadline) {
        const std::uint64_t number = base_ + k;
        const std::byte* from = source_ + segmentation_.offset_bytes(k);
        if (before_ >= 0) {
            fabric_.await_rank(before_, &shm::RankFlags::staged, number + 1, deadline);
            from = fabric_.slot(before_, number);
        }
        await_own_slot(number, deadline);
        const std::size_t size = segmentation_.size_bytes(k);
        context_.into_shared.copy(fabric_.slot(context_.rank, number), from, size);
        fabric_.publish_host(&shm::RankFlags::staged, number + 1);
        for (const int r : beyond_)
            if (r >= 0) fabric_.send_to(r, tcp::LinkFrameType::staged, number, {.size = size});
        fabric_.write();
        take(k, from);
        if (before_ >= 0) fabric_.send_done_to(before_, number + 1);
    }

    // Waits until this host's ranks have read, and those beyond have received, what was in the slot of segment `number`.
    void await_own_slot(std::uint64_t number, const Deadline& deadline) {
        if (fabric_.is_slot_free(number)) return;
        const std::uint64_t done = number - shm::num_slots + 1;
        fabric_.await_host(&shm::RankFlags::done, done, deadline);
        await_beyond(done, deadline);
    }

    void await_beyond(std::uint64_t done, const Deadline& deadline) {
        for (const int r : beyond_)
            if (r >= 0) fabric_.await_rank(r, &shm::RankFlags::done, done, deadline);
    }

    void take(std::size_t k, const std::byte* from) {
        std::byte* out = out_ + segmentation_.offset_bytes(k);
        if (out != from) copy_bytes(out, from, segmentation_.size_bytes(k));
    }

    Context& context_;
    Fabric& fabric_;
    std::byte* out_;
    const std::byte* source_;
    Segmentation segmentation_;
    int relay_;                          // of this host
    int before_ = -1;                    // the relay of the host nearer to the root, or -1 on the root's
    std::array<int, 2> beyond_{-1, -1};  // those of the hosts farther from it, or -1
    std::uint64_t base_;
};

// From this size on a broadcast goes along the chain, or if it needs several segments.
constexpr std::size_t least_chain_bytes = std::size_t{64} * 1024;

}  // namespace

bool can_broadcast_in_chain(const Fabric& fabric, std::size_t size) {
    return fabric.chain().num_local > 1 && size >= std::min(least_chain_bytes, fabric.layout().slot_bytes);
}

void broadcast_in_chain(Context& context, std::byte* out, const std::byte* source, const Segmentation& segmentation,
                        int root, const Deadline& deadline) {
    context.fabric.enter(deadline);
    ChainBroadcast(context, out, source, segmentation, root).run(deadline);
}

bool can_fold_in_chain(const Fabric& fabric, const Reduction& reduction) {
    return fabric.chain().num_local > 1 && !is_small_float(reduction.dtype);
}

void fold_in_chain(Context& context, ReductionFolder& folder, std::byte* out, const std::byte* source,
                   std::size_t count, const Reduction& reduction, const Deadline& deadline) {
    context.fabric.enter(deadline);
    ChainFold(context, folder, out, source, count, reduction).run(deadline);
}

}  // namespace ferrodist
