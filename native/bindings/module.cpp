// The Python module of the engine. Only bindings/ knows Python.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <functional>
#include <system_error>

#include "bindings/eager_tensors.h"
#include "bindings/failures.h"
#include "bindings/p2p.h"
#include "bindings/prepared.h"
#include "bindings/gil_release.h"
#include "bindings/fast_path.h"
#include "bindings/tensor.h"
#include "bindings/tensor_bytes.h"
#include "collectives/data_movement.h"
#include "collectives/reductions.h"
#include "engine/communicator.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ferrodist {

namespace {

using Address = std::uintptr_t;  // address of a tensor's elements; 0 where a rank has none

std::byte* at(Address address) {
    return reinterpret_cast<std::byte*>(address);
}

shm::Layout make_layout(int num_ranks, int group_size, std::size_t slot_bytes, bool is_oversubscribed,
                        std::uint32_t spin_micros) {
    return {.num_ranks = num_ranks,
            .group_size = group_size,
            .slot_bytes = slot_bytes,
            .is_oversubscribed = is_oversubscribed,
            .spin_micros = spin_micros};
}

std::shared_ptr<shm::GroupMemory> map_segment(int descriptor, const shm::Layout& layout) {
    return std::make_shared<shm::GroupMemory>(std::make_shared<shm::Mapping>(descriptor, layout.size_bytes()), layout);
}

int create_segment(const shm::Layout& layout) {
    Descriptor memory = shm::create_memory("ferrodist", layout.size_bytes());
    shm::take_pages(memory.get(), layout.common_part());
    map_segment(memory.get(), layout)->initialize();
    return memory.release();
}

std::shared_ptr<const shm::Arena> map_arena(Communicator& self, int descriptor, std::uint64_t id, std::size_t stride,
                                            std::size_t size) {
    const GilRelease released;
    if (size > stride) throw std::system_error(EOVERFLOW, std::generic_category(), "size of a symmetric tensor");
    const std::size_t all = shm::arena_bytes(stride, self.num_ranks());
    shm::take_pages(descriptor, {.start = static_cast<std::size_t>(self.rank()) * stride, .size = stride});
    auto memory = std::make_shared<const shm::Mapping>(descriptor, all);
    auto arena = std::make_shared<const shm::Arena>(std::move(memory), id, stride, self.rank());
    self.add_arena(arena);
    return arena;
}

template <class Collective>
void run(Communicator& self, std::uint64_t ticket, double timeout, const Collective& collective) {
    const GilRelease released;
    self.run_in_turn(ticket, timeout, collective);
}

Reduction make_reduction(int dtype, int op, double factor) {
    return {.dtype = static_cast<DType>(dtype), .op = static_cast<ReduceOp>(op), .factor = factor};
}

nb::bytes to_bytes(const std::string& text) {
    return nb::bytes(text.data(), text.size());
}

}  // namespace

NB_MODULE(_native, m) {
    nb::set_leak_warnings(false);  // groups that are still open when the interpreter exits
    bind_failures(m);

    m.attr("PAGE_BYTES") = shm::page_bytes;
    m.attr("SHARE_ROOM") = share_room;
    m.attr("SHARE_ROOM_BETWEEN_HOSTS") = share_room_between_hosts;
    m.def(
        "load_tensor_interface",
        [](nb::handle tensor_type, nb::handle parameter_type, nb::handle increment_version) {
            return load_tensor_interface(tensor_type.ptr(), parameter_type.ptr(), increment_version.ptr());
        },
        "tensor_type"_a, "parameter_type"_a, "increment_version"_a,
        "Enable the fast paths; False if torch lacks the interface.");
    m.def(
        "create_segment",
        [](int num_ranks, int group_size, std::size_t slot_bytes, bool is_oversubscribed, std::uint32_t spin_micros) {
            const GilRelease released;
            return create_segment(make_layout(num_ranks, group_size, slot_bytes, is_oversubscribed, spin_micros));
        },
        "num_ranks"_a, "group_size"_a, "slot_bytes"_a, "is_oversubscribed"_a, "spin_micros"_a,
        "Create the shared memory of a group's ranks on one host; returns a descriptor, which the caller closes.");
    m.def(
        "fold",
        [](Address out, const std::vector<Address>& inputs, std::size_t count, int dtype, int op,
           const std::vector<double>& factors, int instructions) {
            const Fold fold = find_fold(static_cast<DType>(dtype), static_cast<ReduceOp>(op),
                                        static_cast<InstructionSet>(instructions));
            if (fold == nullptr) return false;
            std::vector<const std::byte*> sources;
            for (const Address input : inputs) sources.push_back(at(input));
            fold(at(out), sources.data(), sources.size(), count, factors.data());
            return true;
        },
        "out"_a, "inputs"_a, "count"_a, "dtype"_a, "op"_a, "factors"_a, "instructions"_a,
        "Fold arrays in their order, for tests; False if the reduction is undefined.");
    m.def("best_instruction_set", [] { return static_cast<int>(best_instruction_set()); });

    m.def(
        "create_arena",
        [](std::size_t stride, int num_ranks) {
            const GilRelease released;
            return shm::create_memory("ferrodist-symmetric", shm::arena_bytes(stride, num_ranks)).release();
        },
        "stride"_a, "num_ranks"_a, "Create symmetric memory; returns a descriptor, which the caller closes.");

    bind_p2p(m);
    bind_tensor_bytes(m);
    bind_eager_tensors(m);

    nb::class_<Communicator> communicator(m, "Communicator", "A rank's communicator of one group.");
    bind_fast_path(m, communicator);
    bind_prepared(m);
    communicator
        .def(
            "__init__",
            [](Communicator* self, int descriptor, int rank, const std::vector<int>& hosts,
               const std::vector<int>& links, int num_ranks, int group_size, std::size_t slot_bytes,
               bool is_oversubscribed, std::uint32_t spin_micros) {
                const shm::Layout layout =
                    make_layout(num_ranks, group_size, slot_bytes, is_oversubscribed, spin_micros);
                const auto own = hosts.begin() + rank;
                const auto local = static_cast<int>(std::count(hosts.begin(), own, *own));
                {
                    const GilRelease released;
                    shm::take_pages(descriptor, layout.part_of(local));
                }
                std::unique_ptr<tcp::Links> connections;
                if (num_ranks < group_size) connections = std::make_unique<tcp::Links>(links, slot_bytes);
                new (self) Communicator(Fabric(map_segment(descriptor, layout), rank, std::move(connections), hosts));
            },
            "descriptor"_a, "rank"_a, "hosts"_a, "links"_a, "num_ranks"_a, "group_size"_a, "slot_bytes"_a,
            "is_oversubscribed"_a, "spin_micros"_a)
        .def("reserve", &Communicator::reserve)
        .def(
            "await_turn",
            [](Communicator& self, std::uint64_t ticket) {
                const GilRelease released;
                self.await_turn(ticket);
            },
            "ticket"_a)
        .def(
            "set_long_wait_callback",
            [](Communicator& self, double seconds, nb::callable callback) {
                auto call_python = [callback = std::move(callback)](std::uint64_t ticket, const shm::Arrival& own,
                                                                    const std::vector<int>& stragglers,
                                                                    const Deadline& deadline) {
                    static_assert(offsetof(shm::Arrival, payload) == offsetof(shm::Arrival, call) + sizeof own.call);
                    if (!nb::is_alive()) return;
                    const nb::gil_scoped_acquire guard;
                    try {
                        nb::list ranks;
                        for (const int rank : stragglers) ranks.append(rank);
                        callback(
                            ticket,
                            nb::bytes(reinterpret_cast<const char*>(&own.call), sizeof own.call + sizeof own.payload),
                            ranks, deadline.elapsed_seconds(), deadline.seconds());
                    } catch (nb::python_error& error) {
                        error.discard_as_unraisable(callback);
                    }
                };
                self.set_long_wait_callback(seconds, std::move(call_python), [](const std::function<void()>& end) {
                    const GilRelease released;
                    end();
                });
            },
            "seconds"_a, "callback"_a,
            "Call callback(ticket, record, stragglers, elapsed, timeout) once in each collective that waits for "
            "`seconds`.")
        .def_prop_ro("is_broken", &Communicator::is_broken)
        .def_prop_ro("can_read_peers", &Communicator::can_read_peers, "Whether the ranks can read each other's memory.")
        .def(
            "handshake",
            [](Communicator& self, double timeout) {
                const GilRelease released;
                self.handshake(timeout);
            },
            "timeout"_a, "Exchange the ranks' capabilities; called on all ranks before anything else.")
        .def(
            "abort",
            [](Communicator& self, nb::bytes record) {
                self.abort({static_cast<const char*>(record.data()), record.size()});
            },
            "record"_a)
        .def("leave", &Communicator::leave)
        .def(
            "map_arena",
            [](Communicator& self, int descriptor, std::uint64_t id, std::size_t stride, std::size_t size) {
                auto arena = map_arena(self, descriptor, id, stride, size);
                std::byte* data = arena->buffer(self.rank());
                const nb::capsule owner(
                    new std::shared_ptr<const shm::Arena>(std::move(arena)),
                    [](void* guard) noexcept { delete static_cast<std::shared_ptr<const shm::Arena>*>(guard); });
                return nb::ndarray<nb::pytorch, std::uint8_t, nb::ndim<1>>(data, {size}, owner);
            },
            "descriptor"_a, "id"_a, "stride"_a, "size"_a,
            "Map symmetric memory; returns this rank's part as a tensor of bytes, which keeps the mapping.")
        .def("stop", &Communicator::stop)
        .def(
            "barrier",
            [](Communicator& self, double timeout, std::uint64_t ticket) { run(self, ticket, timeout, barrier); },
            "timeout"_a, "ticket"_a)
        .def(
            "share",
            [](Communicator& self, nb::bytes name, nb::bytes data, double timeout, std::uint64_t ticket) {
                const std::string_view key{static_cast<const char*>(name.data()), name.size()};
                const std::string_view value{static_cast<const char*>(data.data()), data.size()};
                std::vector<std::string> shared;
                const auto take = [&](std::string_view bytes) { shared.emplace_back(bytes); };
                run(self, ticket, timeout, [&](Context& context, const Deadline& deadline) {
                    share(context, key, value, {}, take, deadline);
                });
                nb::list result;
                for (const std::string& each : shared) result.append(to_bytes(each));
                return result;
            },
            "name"_a, "data"_a, "timeout"_a, "ticket"_a)
        .def(
            "allreduce",
            [](Communicator& self, Address out, Address source, std::size_t count, int dtype, int op, double factor,
               double timeout, std::uint64_t ticket) {
                run(self, ticket, timeout, [&](Context& context, const Deadline& deadline) {
                    allreduce(context, at(out), at(source), count, make_reduction(dtype, op, factor), deadline);
                });
            },
            "out"_a, "source"_a, "count"_a, "dtype"_a, "op"_a, "factor"_a, "timeout"_a, "ticket"_a)
        .def(
            "reduce",
            [](Communicator& self, Address out, Address source, std::size_t count, int root, int dtype, int op,
               double factor, double timeout, std::uint64_t ticket) {
                run(self, ticket, timeout, [&](Context& context, const Deadline& deadline) {
                    reduce(context, at(out), at(source), count, root, make_reduction(dtype, op, factor), deadline);
                });
            },
            "out"_a, "source"_a, "count"_a, "root"_a, "dtype"_a, "op"_a, "factor"_a, "timeout"_a, "ticket"_a)
        .def(
            "reduce_scatter",
            [](Communicator& self, Address out, Address source, const std::vector<std::size_t>& counts, int dim,
               int dtype, int op, double factor, double timeout, std::uint64_t ticket) {
                run(self, ticket, timeout, [&](Context& context, const Deadline& deadline) {
                    reduce_scatter(context, at(out), at(source), counts, dim, make_reduction(dtype, op, factor),
                                   deadline);
                });
            },
            "out"_a, "source"_a, "counts"_a, "dim"_a, "dtype"_a, "op"_a, "factor"_a, "timeout"_a, "ticket"_a)
        .def(
            "broadcast",
            [](Communicator& self, Address data, std::size_t count, int dtype, int root, double timeout,
               std::uint64_t ticket) {
                run(self, ticket, timeout, [&](Context& context, const Deadline& deadline) {
                    broadcast(context, at(data), at(data), count, static_cast<DType>(dtype), root, deadline);
                });
            },
            "data"_a, "count"_a, "dtype"_a, "root"_a, "timeout"_a, "ticket"_a)
        .def(
            "all_gather",
            [](Communicator& self, Address out, Address source, const std::vector<std::size_t>& counts, int dtype,
               int dim, double timeout, std::uint64_t ticket) {
                run(self, ticket, timeout, [&](Context& context, const Deadline& deadline) {
                    all_gather(context, at(out), at(source), counts, static_cast<DType>(dtype), dim, deadline);
                });
            },
            "out"_a, "source"_a, "counts"_a, "dtype"_a, "dim"_a, "timeout"_a, "ticket"_a)
        .def(
            "gather",
            [](Communicator& self, Address out, Address source, const std::vector<std::size_t>& counts, int dtype,
               int root, double timeout, std::uint64_t ticket) {
                run(self, ticket, timeout, [&](Context& context, const Deadline& deadline) {
                    gather(context, at(out), at(source), counts, static_cast<DType>(dtype), root, deadline);
                });
            },
            "out"_a, "source"_a, "counts"_a, "dtype"_a, "root"_a, "timeout"_a, "ticket"_a)
        .def(
            "scatter",
            [](Communicator& self, Address out, Address source, const std::vector<std::size_t>& counts, int dtype,
               int root, double timeout, std::uint64_t ticket) {
                run(self, ticket, timeout, [&](Context& context, const Deadline& deadline) {
                    scatter(context, at(out), at(source), counts, static_cast<DType>(dtype), root, deadline);
                });
            },
            "out"_a, "source"_a, "counts"_a, "dtype"_a, "root"_a, "timeout"_a, "ticket"_a)
        .def(
            "all_to_all",
            [](Communicator& self, Address out, Address source, const std::vector<std::size_t>& send_counts,
               const std::vector<std::size_t>& receive_counts, std::size_t unit, int dtype, double timeout,
               std::uint64_t ticket) {
                run(self, ticket, timeout, [&](Context& context, const Deadline& deadline) {
                    all_to_all(context, at(out), at(source), send_counts, receive_counts, unit,
                               static_cast<DType>(dtype), deadline);
                });
            },
            "out"_a, "source"_a, "send_counts"_a, "receive_counts"_a, "unit"_a, "dtype"_a, "timeout"_a, "ticket"_a);
}

}  // namespace ferrodist
