#include "bindings/fast_path.h"

#include <nanobind/stl/unique_ptr.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <utility>
#include <vector>

#include "bindings/fast_call.h"
#include "bindings/fast_torch.h"
#include "bindings/fast_objects.h"
#include "bindings/fast_sized.h"
#include "bindings/started.h"

namespace ferrodist {

using namespace nanobind::literals;

namespace {

// The functions that Python calls. Each takes the arguments of its public namesake, all by position; tensor first, and
// group, out and timeout last. `run_fast` calls the lambda, whose `pass_..._if_plain` passes the engine's function, such
// as `allreduce` of collectives/reductions.cpp, to `go`, which is `run_collective`.

PyObject* fast_allreduce(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], op = arguments[1], group = arguments[2], out = arguments[3];
    const auto path = find_fast_path(group, arguments[4]);
    if (!path) Py_RETURN_NONE;
    return run_fast(*path, "allreduce", tensor, out_or_new(out, tensor, Shape::same), {{"op", op.ptr()}},
                    [&](nb::handle result, const auto& go) {
                        return pass_allreduce_if_plain(view_pair(tensor, result), number_of(op), go);
                    });
}

// The sum of a tensor over the ranks and another tensor: tensor, the other, group, timeout.
PyObject* fast_allreduce_add(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], addend = arguments[1];
    const auto path = find_fast_path(arguments[2], arguments[3]);
    if (!path) Py_RETURN_NONE;
    return run_fast(*path, "allreduce", tensor, out_or_new(nb::none(), tensor, Shape::same), {},
                    [&](nb::handle result, const auto& go) {
                        return pass_allreduce_add_if_plain(view_pair(tensor, result), view_tensor(addend.ptr()), go);
                    });
}

PyObject* fast_reduce(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], root = arguments[1], op = arguments[2], group = arguments[3],
                     out = arguments[4];
    const auto path = find_fast_path(group, arguments[5]);
    if (!path) Py_RETURN_NONE;
    const bool is_root = index_of(root) == path->communicator->rank();
    if (!is_root && !out.is_none()) Py_RETURN_NONE;  // the general path refuses it
    return run_fast(*path, "reduce", tensor,
                    is_root ? out_or_new(out, tensor, Shape::same) : out_or_new(out, tensor, Shape::nothing),
                    {{"op", op.ptr()}, {"root", root.ptr()}}, [&](nb::handle result, const auto& go) {
                        return pass_reduce_if_plain(*path->communicator, view_pair(tensor, is_root ? result : tensor),
                                                    number_of(op), index_of(root), go);
                    });
}

PyObject* fast_broadcast(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], root = arguments[1], group = arguments[2], out = arguments[3];
    const auto path = find_fast_path(group, arguments[4]);
    if (!path) Py_RETURN_NONE;
    return run_fast(*path, "broadcast", tensor, out_or_new(out, tensor, Shape::same), {{"root", root.ptr()}},
                    [&](nb::handle result, const auto& go) {
                        return pass_broadcast_if_plain(*path->communicator, view_pair(tensor, result), index_of(root),
                                                       go);
                    });
}

PyObject* fast_all_gather(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], dim = arguments[1], group = arguments[2], out = arguments[3];
    const auto path = find_fast_path(group, arguments[4]);
    if (!path) Py_RETURN_NONE;
    return run_fast(*path, "all_gather", tensor, out_or_new(out, tensor, Shape::joined, path->num_ranks()),
                    {{"dim", dim.ptr()}}, [&](nb::handle result, const auto& go) {
                        return pass_all_gather_if_plain(*path->communicator, tensor, result, index_of(dim), go);
                    });
}

PyObject* fast_reduce_scatter(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], op = arguments[1], dim = arguments[2], group = arguments[3],
                     out = arguments[4];
    const auto path = find_fast_path(group, arguments[5]);
    if (!path) Py_RETURN_NONE;
    return run_fast(*path, "reduce_scatter", tensor, out_or_new(out, tensor, Shape::part, path->num_ranks()),
                    {{"op", op.ptr()}, {"dim", dim.ptr()}}, [&](nb::handle result, const auto& go) {
                        return pass_reduce_scatter_if_plain(*path->communicator, tensor, result, number_of(op),
                                                            index_of(dim), go);
                    });
}

constexpr int end_of_dims = 64;  // torch's tensors have fewer
constexpr std::array<std::int64_t, 1> one_dim = {0};

// The numbers of elements of a list with one for each rank, or of equal parts for None; empty if it fits neither.
std::vector<std::size_t> elements_of(nb::handle counts, const OpenFastPath& path, std::size_t total_if_equal) {
    if (!counts.is_none()) return counts_of(counts, *path.communicator);
    if (total_if_equal % path.num_ranks() != 0) return {};
    return std::vector<std::size_t>(path.num_ranks(), total_if_equal / path.num_ranks());
}

// The ranks' elements one after the other: tensor, the ranks' numbers of elements (None: all alike), dim, group, timeout.
// The caller joins them along the dim, which is compared only.
PyObject* fast_all_gather_flat(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0];
    const int dim = index_of(arguments[2]);
    const auto path = find_fast_path(arguments[3], arguments[4]);
    const auto source = path ? view_tensor(tensor.ptr()) : std::nullopt;
    if (!source || dim < 0 || dim >= end_of_dims) Py_RETURN_NONE;
    const auto counts = elements_of(arguments[1], *path, source->count * path->num_ranks());
    if (counts.empty() || counts[static_cast<std::size_t>(path->communicator->rank())] != source->count) Py_RETURN_NONE;
    const std::size_t total = std::accumulate(counts.begin(), counts.end(), std::size_t{0});
    return run_fast(*path, "all_gather", tensor, new_tensor(static_cast<std::uint8_t>(source->dtype), one_dim, total),
                    {{"dim", arguments[2]}, {"counts", arguments[1]}}, [&](nb::handle result, const auto& go) {
                        const auto pair = view_pair(tensor, result);
                        if (!pair || pair->source.count != source->count || pair->out.count != total) return false;
                        go(size_of_pair(*pair), [&](Context& context, const Deadline& deadline) {
                            all_gather(context, pair->out.data, pair->source.data, counts, pair->source.dtype, dim,
                                       deadline);
                        });
                        return true;
                    });
}

// This rank's part of a fold: a tensor with the ranks' parts one after the other, op, their numbers of elements (None:
// all alike), dim, group, timeout.
PyObject* fast_reduce_scatter_flat(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], op = arguments[1];
    const int dim = index_of(arguments[3]);
    const auto path = find_fast_path(arguments[4], arguments[5]);
    const auto source = path ? view_tensor(tensor.ptr()) : std::nullopt;
    if (!source || dim < 0 || dim >= end_of_dims) Py_RETURN_NONE;
    const auto counts = elements_of(arguments[2], *path, source->count);
    if (std::accumulate(counts.begin(), counts.end(), std::size_t{0}) != source->count || counts.empty())
        Py_RETURN_NONE;
    const auto found = reduction_of(source->dtype, number_of(op));
    if (!found) Py_RETURN_NONE;
    const std::size_t own = counts[static_cast<std::size_t>(path->communicator->rank())];
    return run_fast(*path, "reduce_scatter", tensor, new_tensor(static_cast<std::uint8_t>(source->dtype), one_dim, own),
                    {{"op", op.ptr()}, {"dim", arguments[3]}, {"counts", arguments[2]}},
                    [&](nb::handle result, const auto& go) {
                        const auto pair = view_pair(tensor, result);
                        if (!pair || pair->source.count != source->count || pair->out.count != own) return false;
                        go(size_of_pair(*pair), [&](Context& context, const Deadline& deadline) {
                            reduce_scatter(context, pair->out.data, pair->source.data, counts, dim, *found, deadline);
                        });
                        return true;
                    });
}

PyObject* fast_all_to_all(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], group = arguments[1], out = arguments[2];
    const auto path = find_fast_path(group, arguments[3]);
    if (!path) Py_RETURN_NONE;
    return run_fast(*path, "all_to_all", tensor, out_or_new(out, tensor, Shape::same), {},
                    [&](nb::handle result, const auto& go) {
                        return pass_all_to_all_if_plain(*path->communicator, tensor, result, go);
                    });
}

PyObject* fast_all_to_all_single_uneven(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 6) Py_RETURN_NONE;
    const nb::handle tensor = arguments[0], group = arguments[3], out = arguments[4];
    const auto path = find_fast_path(group, arguments[5]);
    if (!path) Py_RETURN_NONE;
    const Rows rows{.sent = counts_of(arguments[1], *path->communicator),
                    .received = counts_of(arguments[2], *path->communicator)};
    const auto view = view_tensor(tensor.ptr());
    if (!view || rows.sent.empty() || rows.received.empty() || !rows.fit(*view, path->communicator->rank()))
        Py_RETURN_NONE;
    const std::size_t total = std::accumulate(rows.received.begin(), rows.received.end(), std::size_t{0});
    const nb::object unit = nb::int_(row_elements(view->shape));
    return run_fast(*path, "all_to_all", tensor, out_or_new(out, tensor, Shape::rows, total), {{"unit", unit.ptr()}},
                    [&](nb::handle result, const auto& go) {
                        return pass_uneven_all_to_all_if_plain(*path->communicator, tensor, result, rows, go);
                    });
}

// The tensors of a list or tuple with one for each rank; empty if the general path is to check them.
std::vector<nb::object> tensors_of(nb::handle list, const OpenFastPath& path) {
    if (!PyList_CheckExact(list.ptr()) && !PyTuple_CheckExact(list.ptr())) return {};
    if (PySequence_Fast_GET_SIZE(list.ptr()) != path.communicator->num_ranks()) return {};
    std::vector<nb::object> tensors;
    for (std::size_t r = 0; r < path.num_ranks(); ++r)
        tensors.push_back(nb::borrow(PySequence_Fast_GET_ITEM(list.ptr(), static_cast<Py_ssize_t>(r))));
    return tensors;
}

// Of a list of tensors; returns a list.
PyObject* fast_all_to_all_list(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 4) Py_RETURN_NONE;
    const auto path = find_fast_path(arguments[1], arguments[3]);
    if (!path) Py_RETURN_NONE;
    const std::vector<nb::object> tensors = tensors_of(arguments[0], *path);
    if (tensors.empty()) Py_RETURN_NONE;
    std::vector<nb::object> outs;
    if (arguments[2] == Py_None) {
        for (const nb::object& tensor : tensors) {
            outs.push_back(out_or_new(nb::none(), tensor, Shape::same));
            if (!outs.back().is_valid()) return nullptr;
        }
    } else {
        outs = tensors_of(arguments[2], *path);
        if (outs.empty()) Py_RETURN_NONE;
    }
    const auto parts = view_parts(tensors, outs);
    if (!parts) Py_RETURN_NONE;
    try {
        run_collective(*path, parts->part * path->num_ranks() * size_of(parts->dtype),
                       [&](Context& context, const Deadline& deadline) {
                           std::fill(context.counts.begin(), context.counts.end(), parts->part);
                           all_to_all(context, parts->outs, parts->sources, context.counts, context.counts, parts->part,
                                      parts->dtype, deadline);
                       });
    } catch (...) {
        const nb::object unit = nb::int_(parts->part);
        raise_for(*path, "all_to_all", tensors[0], outs[0], {{"unit", unit.ptr()}});
        return nullptr;
    }
    nb::list results;
    for (const nb::object& out : outs) {
        if (!mark_written(out.ptr())) return nullptr;
        results.append(out);
    }
    return results.release().ptr();
}

// Returns whether it was done.
PyObject* fast_barrier(PyObject*, PyObject* group) {
    const auto path = find_fast_path(group);
    if (!path) Py_RETURN_FALSE;
    try {
        run_collective(*path, 0, barrier);
    } catch (...) {
        raise_for(*path, "barrier", nb::none(), nb::none(), {});
        return nullptr;
    }
    Py_RETURN_TRUE;
}

PyMethodDef fast_functions[] = {
    fast_method<fast_allreduce>("fast_allreduce"),
    fast_method<fast_allreduce_add>("fast_allreduce_add"),
    fast_method<fast_reduce>("fast_reduce"),
    fast_method<fast_broadcast>("fast_broadcast"),
    fast_method<fast_all_gather>("fast_all_gather"),
    fast_method<fast_reduce_scatter>("fast_reduce_scatter"),
    fast_method<fast_all_gather_flat>("fast_all_gather_flat"),
    fast_method<fast_reduce_scatter_flat>("fast_reduce_scatter_flat"),
    fast_method<fast_all_to_all>("fast_all_to_all"),
    fast_method<fast_all_to_all_list>("fast_all_to_all_list"),
    fast_method<fast_all_to_all_single_uneven>("fast_all_to_all_single_uneven"),
    {"fast_barrier", fast_barrier, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

// Starts a collective if `check(go)` allows the fast path; else returns null.
template <class Check>
std::unique_ptr<Started> start(Communicator& self, nb::handle tensor, nb::handle out, double timeout,
                               const Check& check) {
    auto started = std::make_unique<Started>(self, tensor, out);
    check(started->starter(timeout));
    return started->is_started() ? std::move(started) : nullptr;
}

}  // namespace

void bind_fast_path(nb::module_& m, nb::class_<Communicator>& communicator) {
    for (PyMethodDef* functions : {fast_functions, sized_functions, object_functions, torch_functions})
        if (PyModule_AddFunctions(m.ptr(), functions) < 0) throw nb::python_error();
    m.def("load_fast_paths", &set_lookup, "collector"_a, "local_group"_a, "process"_a, "empty_like"_a, "make_tensor"_a,
          "Set where the fast paths find the default group, and the functions that make their results.");
    nb::class_<Started>(m, "Started", "A started collective.")
        .def("is_done", &Started::is_done)
        .def("wait", &Started::wait, "timeout"_a, "Block until it has ended; False after `timeout` seconds.");
    communicator
        .def(
            "start_allreduce",
            [](Communicator& self, nb::handle tensor, nb::handle out, int op, double timeout) {
                return start(self, tensor, out, timeout,
                             [&](const auto& go) { return pass_allreduce_if_plain(view_pair(tensor, out), op, go); });
            },
            "tensor"_a.none(), "out"_a.none(), "op"_a, "timeout"_a)
        .def(
            "start_broadcast",
            [](Communicator& self, nb::handle tensor, nb::handle out, int root, double timeout) {
                return start(self, tensor, out, timeout, [&](const auto& go) {
                    return pass_broadcast_if_plain(self, view_pair(tensor, out), root, go);
                });
            },
            "tensor"_a.none(), "out"_a.none(), "root"_a, "timeout"_a)
        .def(
            "start_all_gather",
            [](Communicator& self, nb::handle tensor, nb::handle out, int dim, double timeout) {
                return start(self, tensor, out, timeout,
                             [&](const auto& go) { return pass_all_gather_if_plain(self, tensor, out, dim, go); });
            },
            "tensor"_a.none(), "out"_a.none(), "dim"_a, "timeout"_a)
        .def(
            "start_reduce_scatter",
            [](Communicator& self, nb::handle tensor, nb::handle out, int op, int dim, double timeout) {
                return start(self, tensor, out, timeout, [&](const auto& go) {
                    return pass_reduce_scatter_if_plain(self, tensor, out, op, dim, go);
                });
            },
            "tensor"_a.none(), "out"_a.none(), "op"_a, "dim"_a, "timeout"_a)
        .def(
            "start_all_to_all",
            [](Communicator& self, nb::handle tensor, nb::handle out, double timeout) {
                return start(self, tensor, out, timeout,
                             [&](const auto& go) { return pass_all_to_all_if_plain(self, tensor, out, go); });
            },
            "tensor"_a.none(), "out"_a.none(), "timeout"_a);
}

}  // namespace ferrodist
