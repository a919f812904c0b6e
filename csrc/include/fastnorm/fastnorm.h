// The whole public C++ API: fastnorm::layer_norm and the primitives, fastnorm::nn::LayerNorm, and
// the version. Code that needs the functions alone compiles quicker with fastnorm/layer_norm.h.
#pragma once

#include "fastnorm/layer_norm.h"
#include "fastnorm/nn.h"
#include "fastnorm/version.h"
