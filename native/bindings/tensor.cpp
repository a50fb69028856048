#include "bindings/tensor.h"

#include <bit>

namespace ferrodist {

namespace {

// The part of DLPack's binary interface that is used; field for field as in its specification.
struct DataType {
    std::uint8_t code;
    std::uint8_t bits;
    std::uint16_t lanes;
};

struct Tensor {
    void* data;
    std::int32_t device_type;
    std::int32_t device_id;
    std::int32_t num_dims;
    DataType dtype;
    std::int64_t* shape;
    std::int64_t* strides;
    std::uint64_t byte_offset;
};

struct Exchange {
    std::uint32_t major_version;
    std::uint32_t minor_version;
    void* older;
    void* allocate;
    void* managed_from_object;
    void* managed_to_object;
    int (*tensor_from_object)(void* object, Tensor* out);
    void* current_stream;
};

constexpr std::int32_t cpu = 1;
enum TypeCode : std::uint8_t {
    signed_integer = 0,
    unsigned_integer = 1,
    floating = 2,
    brain_float = 4,
    boolean_code = 6
};

const Exchange* interface = nullptr;
PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;
// Called directly, without Python's attribute lookup, which saves 35 ns per tensor.
const PyGetSetDef* requires_grad = nullptr;  // the attribute
PyCFunction is_neg = nullptr;                // the method
PyObject* is_inference = nullptr;            // the method's name
PyObject* increment_version = nullptr;
PyObject* forward_mode = nullptr;   // dict of torch.autograd.forward_ad
PyObject* current_level = nullptr;  // name of its level, which is not negative where tensors may have tangents
PyObject* dispatch = nullptr;       // dict of torch.utils._python_dispatch
PyObject* has_mode = nullptr;       // name of torch's flag for dispatch modes (tracing)
PyObject* num_modes = nullptr;      // function of torch._C that counts this thread's dispatch modes

// Whether a new reference is to a true value. An error counts as true: the general path reports it.
bool is_true(PyObject* value) {
    if (value == nullptr) {
        PyErr_Clear();
        return true;
    }
    const bool result = value != Py_False;
    Py_DECREF(value);
    return result;
}

bool may_have_tangents() {
    PyObject* level = PyDict_GetItemWithError(forward_mode, current_level);
    return level != nullptr && PyLong_CheckExact(level) && PyLong_AsLong(level) >= 0;
}

// The flag is torch's, and one for all threads. Where modes of several have overlapped it may stay True: then the modes
// are counted, which always would take 30 to 60 ns of each call. It may also be False too early for another thread that
// is still in its mode; torch has the same trouble there.
bool may_be_traced() {
    if (PyDict_GetItemWithError(dispatch, has_mode) != Py_True) return false;
    PyObject* count = PyObject_CallNoArgs(num_modes);
    const bool is_none = count != nullptr && PyLong_CheckExact(count) && PyLong_AsLong(count) == 0;
    PyErr_Clear();
    Py_XDECREF(count);
    return !is_none;
}

// Both return an object that lives as long as the type, or null if it is of another kind.

const PyGetSetDef* getter_of(PyObject* type, const char* name) {
    PyObject* found = PyObject_GetAttrString(type, name);
    if (found == nullptr) PyErr_Clear();
    const bool fits = found != nullptr && Py_TYPE(found) == &PyGetSetDescr_Type;
    const auto* getter = fits ? reinterpret_cast<PyGetSetDescrObject*>(found)->d_getset : nullptr;
    Py_XDECREF(found);
    return getter;
}

PyCFunction method_of(PyObject* type, const char* name) {
    PyObject* found = PyObject_GetAttrString(type, name);
    if (found == nullptr) PyErr_Clear();
    const bool fits = found != nullptr && Py_TYPE(found) == &PyMethodDescr_Type;
    const auto* method = fits ? reinterpret_cast<PyMethodDescrObject*>(found)->d_method : nullptr;
    Py_XDECREF(found);
    return method != nullptr && method->ml_flags == METH_NOARGS ? method->ml_meth : nullptr;
}

// A module's dict, or null if there is no such module.
PyObject* names_of(const char* module_name) {
    PyObject* module = PyImport_ImportModule(module_name);
    if (module == nullptr) {
        PyErr_Clear();
        return nullptr;
    }
    PyObject* names = Py_NewRef(PyModule_GetDict(module));
    Py_DECREF(module);
    return names;
}

std::optional<DType> dtype_of(DataType type) {
    if (type.lanes != 1) return std::nullopt;
    switch (type.code) {
        case floating:
            if (type.bits == 32) return DType::float32;
            if (type.bits == 64) return DType::float64;
            if (type.bits == 16) return DType::float16;
            return std::nullopt;
        case brain_float:
            return DType::bfloat16;
        case signed_integer:
            if (type.bits == 64) return DType::int64;
            if (type.bits == 32) return DType::int32;
            if (type.bits == 16) return DType::int16;
            if (type.bits == 8) return DType::int8;
            return std::nullopt;
        case unsigned_integer:
            return type.bits == 8 ? std::optional(DType::uint8) : std::nullopt;
        case boolean_code:
            return DType::boolean;
        default:
            return std::nullopt;  // 8-bit floats, and complex: it may be lazily conjugated
    }
}

// Whether autograd tracks it.
bool needs_grad(PyObject* object) {
    return is_true(requires_grad->get(object, requires_grad->closure));
}

// The view of a tensor, unless it is of one of torch's special kinds.
std::optional<TensorView> view_memory(PyObject* object) {
    Tensor tensor{};
    if (interface->tensor_from_object(object, &tensor) != 0) {
        PyErr_Clear();
        return std::nullopt;
    }
    if (tensor.device_type != cpu) return std::nullopt;
    const std::optional<DType> dtype = dtype_of(tensor.dtype);
    if (!dtype) return std::nullopt;
    std::int64_t count = 1;
    for (std::int32_t dim = tensor.num_dims - 1; dim >= 0; --dim) {
        if (tensor.shape[dim] != 1 && tensor.strides != nullptr && tensor.strides[dim] != count) return std::nullopt;
        count *= tensor.shape[dim];
    }
    if (tensor.data == nullptr && count != 0) return std::nullopt;
    // Last, because it takes longest, 60 ns: DLPack does not say whether a tensor is lazily negated.
    if (is_true(is_neg(object, nullptr))) return std::nullopt;
    return TensorView{.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset,
                      .count = static_cast<std::size_t>(count),
                      .dtype = *dtype,
                      .shape = {tensor.shape, static_cast<std::size_t>(tensor.num_dims)}};
}

bool has_known_type(PyObject* object) {
    return Py_TYPE(object) == tensor_type || Py_TYPE(object) == parameter_type;
}

std::optional<TensorView> view_plain(PyObject* object) {
    return has_known_type(object) && !needs_grad(object) ? view_memory(object) : std::nullopt;
}

}  // namespace

bool load_tensor_interface(PyObject* plain, PyObject* parameter, PyObject* increment) {
    PyObject* capsule = PyObject_GetAttrString(plain, "__dlpack_c_exchange_api__");
    if (capsule == nullptr) {
        PyErr_Clear();
        return false;
    }
    // The table belongs to torch and lives as long as the process.
    const auto* found = static_cast<const Exchange*>(PyCapsule_GetPointer(capsule, "dlpack_exchange_api"));
    Py_DECREF(capsule);
    if (found == nullptr) PyErr_Clear();
    if (found == nullptr || found->major_version != 1 || found->tensor_from_object == nullptr) return false;
    requires_grad = getter_of(plain, "requires_grad");
    is_neg = method_of(plain, "is_neg");
    forward_mode = names_of("torch.autograd.forward_ad");
    dispatch = names_of("torch.utils._python_dispatch");
    PyObject* names = names_of("torch._C");
    num_modes = names == nullptr ? nullptr : Py_XNewRef(PyDict_GetItemString(names, "_len_torch_dispatch_stack"));
    if (requires_grad == nullptr || is_neg == nullptr || forward_mode == nullptr) return false;
    if (dispatch == nullptr || num_modes == nullptr) return false;
    interface = found;
    tensor_type = reinterpret_cast<PyTypeObject*>(plain);
    parameter_type = reinterpret_cast<PyTypeObject*>(parameter);
    is_inference = PyUnicode_InternFromString("is_inference");
    increment_version = Py_NewRef(increment);
    current_level = PyUnicode_InternFromString("_current_level");
    has_mode = PyUnicode_InternFromString("_is_in_torch_dispatch_mode");
    return true;
}

bool is_plain_here() {
    return interface != nullptr && !may_have_tangents() && !may_be_traced();
}

std::optional<TensorView> view_tensor(PyObject* object) {
    return is_plain_here() ? view_plain(object) : std::nullopt;
}

std::optional<TensorView> view_data(PyObject* object) {
    return is_plain_here() && has_known_type(object) ? view_memory(object) : std::nullopt;
}

std::optional<std::pair<TensorView, TensorView>> view_tensors(PyObject* tensor, PyObject* other) {
    const auto first = view_tensor(tensor);
    if (!first) return std::nullopt;
    const auto second = tensor == other ? first : view_plain(other);
    return second ? std::optional(std::pair(*first, *second)) : std::nullopt;
}

std::optional<TensorSnapshot> TensorSnapshot::of(PyObject* object) {
    Tensor tensor{};
    if (!view_tensor(object) || interface->tensor_from_object(object, &tensor) != 0) {
        PyErr_Clear();
        return std::nullopt;
    }
    TensorSnapshot snapshot;
    snapshot.data_ = static_cast<std::byte*>(tensor.data) + tensor.byte_offset;
    snapshot.type_ = std::bit_cast<std::uint32_t>(tensor.dtype);
    snapshot.sizes_.assign(tensor.shape, tensor.shape + tensor.num_dims);
    if (tensor.strides != nullptr)
        snapshot.sizes_.insert(snapshot.sizes_.end(), tensor.strides, tensor.strides + tensor.num_dims);
    std::int64_t count = 1;
    for (std::int32_t dim = tensor.num_dims - 1; dim >= 0; --dim) {
        if (tensor.strides != nullptr && tensor.strides[dim] != count) snapshot.may_be_negated_ = true;
        count *= tensor.shape[dim];
    }
    snapshot.may_be_negated_ = snapshot.may_be_negated_ || count < 2;
    return snapshot;
}

bool TensorSnapshot::is_of(PyObject* object) const {
    if (!has_known_type(object) || needs_grad(object)) return false;
    if (may_be_negated_ && is_true(is_neg(object, nullptr))) return false;
    Tensor tensor{};
    if (interface->tensor_from_object(object, &tensor) != 0) {
        PyErr_Clear();
        return false;
    }
    const auto num_dims = static_cast<std::size_t>(tensor.num_dims);
    if (static_cast<std::byte*>(tensor.data) + tensor.byte_offset != data_ || tensor.device_type != cpu ||
        std::bit_cast<std::uint32_t>(tensor.dtype) != type_ ||
        sizes_.size() != (tensor.strides == nullptr ? num_dims : 2 * num_dims))
        return false;
    for (std::size_t dim = 0; dim < num_dims; ++dim) {  // a loop, for there are few: `std::equal` would call memcmp
        if (tensor.shape[dim] != sizes_[dim]) return false;
        if (tensor.strides != nullptr && tensor.strides[dim] != sizes_[num_dims + dim]) return false;
    }
    return true;
}

PyObject* alias_of(PyObject* tensor) {
    static PyObject* const name = PyUnicode_InternFromString("data");
    return PyObject_GetAttr(tensor, name);
}

bool mark_written(PyObject* tensor) {
    PyObject* tensors = PyTuple_Pack(1, tensor);
    if (tensors == nullptr) return false;
    const bool is_marked = mark_written(tensor, tensors);
    Py_DECREF(tensors);
    return is_marked;
}

bool mark_written(PyObject* tensor, PyObject* in_tuple) {
    PyObject* result = PyObject_CallOneArg(increment_version, in_tuple);
    if (result != nullptr) {
        Py_DECREF(result);
        return true;
    }
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject* answer = PyObject_CallMethodNoArgs(tensor, is_inference);
    if (answer == nullptr) PyErr_Clear();
    const bool has_no_version = answer == Py_True;
    Py_XDECREF(answer);
    if (has_no_version) {
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return true;
    }
    PyErr_Restore(type, value, traceback);
    return false;
}

}  // namespace ferrodist
