#include "python_layer_norm.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/util/SmallVector.h>
#include <pybind11/pybind11.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "fastnorm/layer_norm.h"

namespace fastnorm {
namespace {

constexpr Py_ssize_t kArguments = 6;

bool read(PyObject* object, std::optional<at::Tensor>& tensor) {
  if (object == Py_None) return true;
  if (!THPVariable_CheckExact(object)) return false;
  tensor = THPVariable_Unpack(object);
  return true;
}

bool read(PyObject* object, c10::SmallVector<int64_t, 4>& sizes) {
  if (!PyTuple_Check(object) && !PyList_Check(object)) return false;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
  PyObject* const* const items = PySequence_Fast_ITEMS(object);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!PyLong_CheckExact(items[i])) return false;
    sizes.push_back(PyLong_AsLongLong(items[i]));
    if (sizes.back() == -1 && PyErr_Occurred() != nullptr) {
      PyErr_Clear();  // too large: torch.ops has the words for it
      return false;
    }
  }
  return true;
}

bool read(PyObject* object, std::optional<at::ScalarType>& dtype) {
  if (object == Py_None) return true;
  if (!THPDtype_Check(object)) return false;
  dtype = reinterpret_cast<THPDtype*>(object)->scalar_type;
  return true;
}

}  // namespace

PyObject* python_layer_norm(PyObject* /*self*/, PyObject* const* arguments, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  std::optional<at::Tensor> input, weight, bias;
  c10::SmallVector<int64_t, 4> normalized_shape;
  std::optional<at::ScalarType> out_dtype;
  if (count != kArguments || at::impl::torch_function_mode_enabled() ||
      torch::jit::tracer::isTracing() || !read(arguments[0], input) || !input ||
      !read(arguments[1], normalized_shape) || !read(arguments[2], weight) ||
      !read(arguments[3], bias) || !PyFloat_CheckExact(arguments[4]) ||
      !read(arguments[5], out_dtype)) {
    Py_RETURN_NONE;
  }
  const double eps = PyFloat_AS_DOUBLE(arguments[4]);
  at::Tensor output;
  {
    const pybind11::gil_scoped_release released;
    output = layer_norm(*input, normalized_shape, weight, bias, eps, out_dtype);
  }
  return THPVariable_Wrap(std::move(output));
  END_HANDLE_TH_ERRORS
}

}  // namespace fastnorm
