#include "bindings/tensor.h"

namespace ferrodist {

namespace {

// The part of DLPack's binary interface that is used; field for field as its specification has it.
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
enum TypeCode : std::uint8_t { signed_integer = 0, unsigned_integer = 1, floating = 2, brain_float = 4, complex = 5, boolean_code = 6, float8_e4m3fn_code = 10, float8_e5m2_code = 12 };

const Exchange* interface = nullptr;
PyTypeObject* tensor_type = nullptr;
PyTypeObject* parameter_type = nullptr;
PyObject* requires_grad = nullptr;  // the attribute's name
PyObject* is_neg = nullptr;         // the method's
PyObject* is_inference = nullptr;   // the method's
PyObject* increment_version = nullptr;
PyObject* forward_mode = nullptr;   // what torch.autograd.forward_ad has under its names
PyObject* current_level = nullptr;  // the name of its level, which is not negative where tensors may have tangents

// Whether a fresh reference is to a true value; an error counts as true, for it leads the long way, which reports it.
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
    PyObject* level = forward_mode == nullptr ? nullptr : PyDict_GetItem(forward_mode, current_level);
    return level != nullptr && PyLong_CheckExact(level) && PyLong_AsLong(level) >= 0;
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
            return std::nullopt;  // complex tensors may be lazily conjugated: the long way resolves that
    }
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
    interface = found;
    tensor_type = reinterpret_cast<PyTypeObject*>(plain);
    parameter_type = reinterpret_cast<PyTypeObject*>(parameter);
    requires_grad = PyUnicode_InternFromString("requires_grad");
    is_neg = PyUnicode_InternFromString("is_neg");
    is_inference = PyUnicode_InternFromString("is_inference");
    increment_version = Py_NewRef(increment);
    current_level = PyUnicode_InternFromString("_current_level");
    PyObject* module = PyImport_ImportModule("torch.autograd.forward_ad");
    if (module == nullptr) {
        PyErr_Clear();
        interface = nullptr;
        return false;
    }
    forward_mode = Py_NewRef(PyModule_GetDict(module));
    Py_DECREF(module);
    return true;
}

std::optional<TensorView> view_tensor(PyObject* object) {
    Tensor tensor{};
    if (interface == nullptr || (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type)) return std::nullopt;
    if (may_have_tangents() || is_true(PyObject_GetAttr(object, requires_grad))) return std::nullopt;
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
    // A tensor that is negated lazily is a view of every other number of a complex one: contiguous only when it is small.
    if (count <= 1 && is_true(PyObject_CallMethodNoArgs(object, is_neg))) return std::nullopt;
    return TensorView{.data = static_cast<std::byte*>(tensor.data) + tensor.byte_offset,
                      .count = static_cast<std::size_t>(count),
                      .dtype = *dtype,
                      .shape = {tensor.shape, static_cast<std::size_t>(tensor.num_dims)}};
}

bool mark_written(PyObject* tensor) {
    PyObject* tensors = PyTuple_Pack(1, tensor);
    if (tensors == nullptr) return false;
    PyObject* result = PyObject_CallOneArg(increment_version, tensors);
    Py_DECREF(tensors);
    if (result != nullptr) {
        Py_DECREF(result);
        return true;
    }
    PyObject *type = nullptr, *value = nullptr, *traceback = nullptr;
    PyErr_Fetch(&type, &value, &traceback);
    if (is_true(PyObject_CallMethodNoArgs(tensor, is_inference))) {  // such a tensor has no version
        Py_XDECREF(type);
        Py_XDECREF(value);
        Py_XDECREF(traceback);
        return true;
    }
    PyErr_Restore(type, value, traceback);
    return false;
}

}  // namespace ferrodist
