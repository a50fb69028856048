#include "bindings/fast_p2p.h"

#include <array>
#include <optional>
#include <vector>

#include "bindings/fast_call.h"
#include "bindings/tensor_p2p.h"

namespace ferrodist {

using namespace nanobind::literals;

namespace {

struct P2PLookup {
    PyObject* payload_ids = nullptr;     // of collectives/tensor_protocol.py
    PyObject* unclaimed_key = nullptr;   // of a group's `UnclaimedTensors` in its attachments
    PyObject* deadline_names = nullptr;  // dict of ferrodist.deadline
    PyObject* send_type = nullptr;       // the operations of a batch
    PyObject* recv_type = nullptr;
    std::array<PyObject*, num_dtypes> dtypes{};
    PyObject* attachments_name = PyUnicode_InternFromString("attachments");
    PyObject* may_contain_name = PyUnicode_InternFromString("may_contain");
    PyObject* long_wait_name = PyUnicode_InternFromString("LONG_WAIT_SECONDS");
    PyObject* tensor_name = PyUnicode_InternFromString("tensor");
    PyObject* dst_name = PyUnicode_InternFromString("dst");
    PyObject* src_name = PyUnicode_InternFromString("src");
    PyObject* tag_name = PyUnicode_InternFromString("tag");
};
const P2PLookup* lookup = nullptr;

void set_p2p_lookup(nb::handle payload_ids, nb::handle unclaimed_key, nb::handle dtypes, nb::handle send_type,
                    nb::handle recv_type) {
    static P2PLookup found;
    found.payload_ids = payload_ids.inc_ref().ptr();
    found.unclaimed_key = unclaimed_key.inc_ref().ptr();
    found.deadline_names = PyModule_GetDict(nb::module_::import_("ferrodist.deadline").release().ptr());
    found.send_type = send_type.inc_ref().ptr();
    found.recv_type = recv_type.inc_ref().ptr();
    for (std::size_t i = 0; i < found.dtypes.size(); ++i)
        found.dtypes[i] = Py_NewRef(PyTuple_GET_ITEM(dtypes.ptr(), static_cast<Py_ssize_t>(i)));
    lookup = &found;
}

// The group of a call, its engine and its time; nothing if the call is to take the general path. The engine waits until
// a warning is due at most: the general path gives it.
std::optional<P2PCall> find_call(nb::handle group, nb::handle timeout) {
    if (lookup == nullptr) return std::nullopt;
    nb::object chosen = find_group(group);
    if (!chosen.is_valid()) return std::nullopt;
    nb::object path = fast_path_of(chosen);
    if (!path.is_valid()) return std::nullopt;
    const nb::handle p2p = FastPathFields::get(path, FastPathFields::p2p);
    if (!nb::isinstance<TensorP2P>(p2p)) return std::nullopt;
    const auto seconds = seconds_of(timeout.is_none() ? FastPathFields::get(path, FastPathFields::timeout) : timeout);
    PyObject* longest = PyDict_GetItemWithError(lookup->deadline_names, lookup->long_wait_name);
    const auto limit = longest == nullptr ? std::nullopt : seconds_of(longest);
    if (!seconds || !limit) return std::nullopt;
    const TensorP2P& found = *nb::inst_ptr<TensorP2P>(p2p);
    return P2PCall{std::move(path), found, std::move(chosen), std::min(*seconds, *limit)};
}

// Whether the group may hold a tensor of a tag that a cancelled receive has left: the general path takes it.
bool may_have_unclaimed(const P2PCall& call, nb::handle tag) {
    const nb::object attachments = nb::steal(PyObject_GetAttr(call.group.ptr(), lookup->attachments_name));
    if (!attachments.is_valid()) throw nb::python_error();
    PyObject* unclaimed = PyDict_GetItemWithError(attachments.ptr(), lookup->unclaimed_key);
    if (unclaimed == nullptr) return false;
    const nb::object answer = nb::steal(PyObject_CallMethodOneArg(unclaimed, lookup->may_contain_name, tag.ptr()));
    if (!answer.is_valid()) throw nb::python_error();
    return !answer.is(nb::handle(Py_False));
}

// The tensor that a call expects, of a shape or None; nothing if the general path is to check it.
std::optional<WantedTensor> wanted_tensor(nb::handle shape, nb::handle dtype) {
    WantedTensor wanted;
    if (!dtype.is_none()) {
        const auto found = std::ranges::find(lookup->dtypes, dtype.ptr());
        if (found == lookup->dtypes.end()) return std::nullopt;
        wanted.dtype = static_cast<int>(found - lookup->dtypes.begin());
    }
    if (shape.is_none()) return wanted;
    if (!PyTuple_Check(shape.ptr()) && !PyList_CheckExact(shape.ptr())) return std::nullopt;
    wanted.has_shape = true;
    wanted.num_dims = static_cast<std::size_t>(PySequence_Fast_GET_SIZE(shape.ptr()));
    if (wanted.num_dims > max_dims) return std::nullopt;
    for (std::size_t dim = 0; dim < wanted.num_dims; ++dim) {
        PyObject* size = PySequence_Fast_GET_ITEM(shape.ptr(), static_cast<Py_ssize_t>(dim));
        if (!PyLong_CheckExact(size)) return std::nullopt;
        int overflow = 0;
        wanted.sizes[dim] = PyLong_AsLongLongAndOverflow(size, &overflow);
        if (overflow != 0 || wanted.sizes[dim] < 0) return std::nullopt;
    }
    return wanted;
}

// `result` if it is not a tensor and the rank that sent it, or if both are asked for; else the tensor.
PyObject* received(nb::object result, nb::handle return_source) {
    const int wants_source = PyTuple_Check(result.ptr()) ? PyObject_IsTrue(return_source.ptr()) : 1;
    if (wants_source < 0) return nullptr;
    if (wants_source == 1) return result.release().ptr();
    return Py_NewRef(PyTuple_GET_ITEM(result.ptr(), 0));
}

// The functions that Python calls. Each takes the arguments of its public namesake, all by position. They return None
// if nothing has happened, an `Unfinished` if the call is not done, and else its result; for a send that is True.

PyObject* fast_send(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_NONE;
    const auto call = find_call(arguments[3], arguments[4]);
    if (!call) Py_RETURN_NONE;
    return send(*call, arguments[0], arguments[1], arguments[2]).release().ptr();
}

PyObject* fast_recv_into(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 5) Py_RETURN_NONE;
    const nb::handle tag = arguments[2];
    const auto call = find_call(arguments[3], arguments[4]);
    if (!call || may_have_unclaimed(*call, tag)) Py_RETURN_NONE;
    const nb::object result = receive_into(*call, arguments[0], arguments[1], tag);
    return Py_NewRef(PyTuple_Check(result.ptr()) ? PyTuple_GET_ITEM(result.ptr(), 1) : result.ptr());
}

PyObject* fast_recv(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 7) Py_RETURN_NONE;
    const nb::handle tag = arguments[3];
    const auto call = find_call(arguments[4], arguments[5]);
    if (!call || may_have_unclaimed(*call, tag)) Py_RETURN_NONE;
    const auto wanted = wanted_tensor(arguments[0], arguments[1]);
    if (!wanted) Py_RETURN_NONE;
    return received(receive_new(*call, arguments[2], tag, *wanted), arguments[6]);
}

PyObject* fast_sendrecv(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 9) Py_RETURN_NONE;
    const nb::handle tag = arguments[4];
    const auto call = find_call(arguments[5], arguments[6]);
    if (!call || may_have_unclaimed(*call, tag)) Py_RETURN_NONE;
    const auto wanted = wanted_tensor(arguments[2], nb::none());
    if (!wanted) Py_RETURN_NONE;
    const nb::object result = exchange(*call, arguments[0], arguments[1], arguments[3], tag, *wanted, arguments[8]);
    return received(result, arguments[7]);
}

// Operations, group, timeout.
PyObject* fast_batch(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    if (count != 3 || !PyList_CheckExact(arguments[0]) || PyList_GET_SIZE(arguments[0]) == 0) Py_RETURN_NONE;
    const auto call = find_call(arguments[1], arguments[2]);
    if (!call) Py_RETURN_NONE;
    std::vector<P2POperation> operations;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(arguments[0]); ++i) {
        PyObject* given = PyList_GET_ITEM(arguments[0], i);
        const auto* type = reinterpret_cast<PyObject*>(Py_TYPE(given));
        if (type != lookup->send_type && type != lookup->recv_type) Py_RETURN_NONE;
        const bool is_send = type == lookup->send_type;
        const auto field = [&](PyObject* name) {
            PyObject* value = PyObject_GetAttr(given, name);
            if (value == nullptr) throw nb::python_error();
            return nb::steal(value);
        };
        operations.push_back({.is_send = is_send,
                              .tensor = field(lookup->tensor_name),
                              .rank = field(is_send ? lookup->dst_name : lookup->src_name),
                              .tag = field(lookup->tag_name)});
        if (!is_send && may_have_unclaimed(*call, operations.back().tag)) Py_RETURN_NONE;
    }
    return run_batch(*call, operations).release().ptr();
}

// The messages of torch.distributed's sends and receives: the bytes of a tensor, under the channel of bytes. These two do
// not wait, and take messages of up to `small_bytes`, which are copied with the GIL.
struct BytesCall {
    P2PCall call;
    TensorView view;
    int peer;  // the engine's rank, or `any_source`
    Tag tag;

    [[nodiscard]] std::size_t size() const { return view.count * size_of(view.dtype); }

    // Of a tensor, a rank or None for any, a tag and a group; nothing if the call is to take the general path.
    static std::optional<BytesCall> of(PyObject* const* arguments, Py_ssize_t count, bool may_be_any) {
        constexpr std::uint64_t bytes_channel = 0;  // `Channel.BYTES` of backends/tags.py
        if (count != 4) return std::nullopt;
        auto call = find_call(arguments[3], nb::none());
        const auto view = view_data(arguments[0]);
        const auto number = plain_uint(arguments[2]);
        if (!call || !call->p2p.is_usable() || !view || !number || *number >> tag_bits != 0) return std::nullopt;
        const bool is_any = may_be_any && arguments[1] == Py_None;
        const auto peer = is_any ? any_source : call->p2p.peer(arguments[1], false);
        if (!peer || view->count == 0 || view->count * size_of(view->dtype) > small_bytes) return std::nullopt;
        const Tag tag = call->p2p.tag(bytes_channel, *number);
        const int rank = call->p2p.engine_rank(*peer);
        return BytesCall{std::move(*call), *view, rank, tag};
    }
};

// Returns whether it was sent.
PyObject* fast_send_bytes(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    const auto found = BytesCall::of(arguments, count, false);
    if (!found) Py_RETURN_FALSE;
    return PyBool_FromLong(found->call.p2p.engine->try_send(found->view.data, found->size(), found->peer, found->tag));
}

// Returns the rank that sent the message, if it has come already; else None.
PyObject* fast_recv_bytes(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
    const auto found = BytesCall::of(arguments, count, true);
    if (!found) Py_RETURN_NONE;
    const TensorP2P& p2p = found->call.p2p;
    Receive receive(found->view.data, found->size(), found->peer, found->tag);
    if (!p2p.engine->start_if_open(receive, false)) Py_RETURN_NONE;
    if (!receive.has_ended.load()) {
        const nb::gil_scoped_release released;
        p2p.engine->cancel(receive);
    }
    p2p.engine->dispatch_events();
    if (receive.outcome != Outcome::done) Py_RETURN_NONE;
    return PyLong_FromLong(p2p.group_rank(receive.peer));
}

PyMethodDef p2p_functions[] = {
    fast_method<fast_send>("fast_send"),
    fast_method<fast_recv_into>("fast_recv_into"),
    fast_method<fast_recv>("fast_recv"),
    fast_method<fast_sendrecv>("fast_sendrecv"),
    fast_method<fast_batch>("fast_batch"),
    fast_method<fast_send_bytes>("fast_send_bytes"),
    fast_method<fast_recv_bytes>("fast_recv_bytes"),
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

nb::object P2PCall::next_payload_id() const {
    const nb::object ids = nb::steal(PyObject_CallOneArg(lookup->payload_ids, group.ptr()));
    if (!ids.is_valid()) throw nb::python_error();
    nb::object id = nb::steal(PyIter_Next(ids.ptr()));
    if (!id.is_valid()) throw nb::python_error();
    return id;
}

void bind_fast_p2p(nb::module_& m) {
    if (PyModule_AddFunctions(m.ptr(), p2p_functions) < 0) throw nb::python_error();
    m.def("load_fast_p2p", &set_p2p_lookup, "payload_ids"_a, "unclaimed_key"_a, "dtypes"_a, "send_type"_a,
          "recv_type"_a,
          "Set what the fast path of point-to-point calls looks into; `dtypes` are in the order of ids.");
}

}  // namespace ferrodist
