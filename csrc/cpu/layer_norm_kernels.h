// The CPU kernels, written once and compiled once per instruction set. The including file defines
//   FASTNORM_CPU_NAMESPACE     the namespace that keeps this instruction set's code apart,
//   FASTNORM_CPU_VECTOR_BYTES  how wide a vector is,
// has included every header that is needed here, and has told the compiler the instruction set
// only after that. So no function that other files share is compiled for a newer machine: nothing
// here may include a standard header or call an inline function of the standard library.
//
// A row is walked in whole vectors. Columns left over are taken by one more vector that ends at
// the row's end: lanes it takes a second time are masked out of sums and written again unchanged.
// Rows narrower than a vector are first copied to the end of a buffer, where there is room for
// this. So lanes own columns by index alone, and a row's bits do not depend on where it lies.
//
// Loops over the rows or sums of a group are unrolled by pragma: only then, early enough, does the
// compiler keep their arrays in registers instead of clearing and filling them in memory.

namespace fastnorm::cpu::FASTNORM_CPU_NAMESPACE {
namespace {

// clang-format off: in this order
#include "layer_norm_vectors.h"
#include "layer_norm_rows.h"
#include "layer_norm_moments.h"
#include "layer_norm_forward.h"
#include "layer_norm_backward.h"
// clang-format on

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels{forward, backward};

}  // namespace fastnorm::cpu::FASTNORM_CPU_NAMESPACE
