// The engine's own time for small collectives, without Python: two ranks that are threads, 8 bytes of float32 for each.
// benchmarks/prepared.py compares calls from Python with it.
//
//   collective_times [number of calls]     prints the name and the microseconds of each collective
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "collectives/data_movement.h"
#include "collectives/reductions.h"
#include "engine/communicator.h"

using namespace ferrodist;

namespace {

constexpr int num_ranks = 2;
constexpr double patience = 60.0;

using Elements = std::array<float, 4>;
using Collective = std::function<void(Context&, std::byte* out, const std::byte* source, const Deadline&)>;

std::vector<std::unique_ptr<Communicator>> make_group() {
    const shm::Layout layout{
        .num_ranks = num_ranks, .group_size = num_ranks, .slot_bytes = std::size_t{1} << 20, .spin_micros = 300};
    const Descriptor descriptor(shm::create_memory("ferrodist-times", layout.size_bytes()));
    const auto memory = std::make_shared<const shm::Mapping>(descriptor.get(), layout.size_bytes());
    shm::GroupMemory(memory, layout).initialize();
    std::vector<std::unique_ptr<Communicator>> group;
    for (int rank = 0; rank < num_ranks; ++rank)
        group.push_back(std::make_unique<Communicator>(
            Fabric(std::make_shared<shm::GroupMemory>(memory, layout), rank, nullptr, std::vector<int>(num_ranks, 0))));
    return group;
}

// The microseconds of a call on the slower rank.
double time_calls(const Collective& collective, int num_calls) {
    const auto group = make_group();
    std::array<double, num_ranks> micros{};
    std::vector<std::thread> threads;
    for (std::size_t rank = 0; rank < num_ranks; ++rank)
        threads.emplace_back([&, rank] {
            Communicator& own = *group[rank];
            Elements source{1.0F, 2.0F, 3.0F, 4.0F}, out{};
            const auto call = [&] {
                own.run_in_turn(own.reserve(), patience, [&](Context& context, const Deadline& deadline) {
                    collective(context, reinterpret_cast<std::byte*>(out.data()),
                               reinterpret_cast<const std::byte*>(source.data()), deadline);
                });
            };
            for (int i = 0; i < num_calls / 10; ++i) call();
            const auto began = Clock::now();
            for (int i = 0; i < num_calls; ++i) call();
            micros[rank] = std::chrono::duration<double, std::micro>(Clock::now() - began).count() / num_calls;
        });
    for (auto& thread : threads) thread.join();
    return *std::max_element(micros.begin(), micros.end());
}

}  // namespace

int main(int argc, char** argv) {
    const int num_calls = argc > 1 ? std::atoi(argv[1]) : 100000;
    const Reduction sum{.dtype = DType::float32, .op = ReduceOp::sum};
    const std::vector<std::size_t> ones(num_ranks, 1), twos(num_ranks, 2);
    const auto print = [&](const char* name, const Collective& collective) {
        std::printf("%s %.3f\n", name, time_calls(collective, num_calls));
    };
    print("allreduce", [&](Context& context, std::byte* out, const std::byte* source, const Deadline& deadline) {
        allreduce(context, out, source, 2, sum, deadline);
    });
    print("broadcast", [&](Context& context, std::byte* out, const std::byte* source, const Deadline& deadline) {
        broadcast(context, out, source, 2, DType::float32, 0, deadline);
    });
    print("all_gather", [&](Context& context, std::byte* out, const std::byte* source, const Deadline& deadline) {
        all_gather(context, out, source, twos, DType::float32, 0, deadline);
    });
    print("reduce_scatter", [&](Context& context, std::byte* out, const std::byte* source, const Deadline& deadline) {
        reduce_scatter(context, out, source, twos, 0, sum, deadline);
    });
    print("all_to_all", [&](Context& context, std::byte* out, const std::byte* source, const Deadline& deadline) {
        all_to_all(context, out, source, ones, ones, 1, DType::float32, deadline);
    });
}
