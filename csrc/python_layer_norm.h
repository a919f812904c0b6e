// The operator as a Python function of fastnorm._C.
#pragma once

#include <Python.h>

namespace fastnorm {

// layer_norm(input, normalized_shape, weight, bias, eps, out_dtype): what torch.ops would do,
// without its search through schemas and its boxing of arguments. None for what torch.ops has to
// handle: any type but plain tensors, ints and floats, and modes that watch the calls themselves.
PyObject* python_layer_norm(PyObject* self, PyObject* const* arguments, Py_ssize_t count);

}  // namespace fastnorm
