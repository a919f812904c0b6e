// The Python module fastnorm._C: a quick way to the operator, what was built, and the CUDA plan for
// inspection and tests. The operators need no Python: they are in libfastnorm, which this module is
// linked to and which registers them when it is loaded.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "cuda/plan.h"
#include "inspection.h"
#include "python_layer_norm.h"

namespace py = pybind11;

namespace fastnorm {
namespace {

// The value of `names` under `name`, or an error that lists what it could have been.
template <class Value, size_t kSize>
Value find_named(const char* argument, const std::string& name,
                 const std::pair<const char*, Value> (&names)[kSize]) {
  std::string known;
  for (const auto& [key, value] : names) {
    if (name == key) return value;
    known += known.empty() ? key : std::string(", ") + key;
  }
  throw std::invalid_argument("Expected " + std::string(argument) + " to be one of " + known +
                              ", but got '" + name + "'");
}

template <class Value, size_t kSize>
const char* find_name(Value value, const std::pair<const char*, Value> (&names)[kSize]) {
  for (const auto& [key, known] : names) {
    if (known == value) return key;
  }
  return "";
}

constexpr std::pair<const char*, DType> kDtypes[] = {{"float32", DType::kFloat32},
                                                     {"float16", DType::kFloat16},
                                                     {"bfloat16", DType::kBFloat16},
                                                     {"float64", DType::kFloat64}};
constexpr std::pair<const char*, cuda::Kernel> kKernels[] = {
    {"short_rows", cuda::Kernel::kShortRows},
    {"elements", cuda::Kernel::kElements},
    {"rows", cuda::Kernel::kRows},
    {"cluster", cuda::Kernel::kCluster},
    {"few_rows", cuda::Kernel::kFewRows},
    {"few_elements", cuda::Kernel::kFewElements},
    {"ring", cuda::Kernel::kRing},
    {"split", cuda::Kernel::kSplit}};
constexpr std::pair<const char*, cuda::WeightGrads> kWeightGrads[] = {
    {"none", cuda::WeightGrads::kNone},
    {"fused", cuda::WeightGrads::kFused},
    {"row", cuda::WeightGrads::kRow},
    {"tiles", cuda::WeightGrads::kTiles},
    {"columns", cuda::WeightGrads::kColumns}};

py::dict build_info() {
  const inspection::BuildInfo build = inspection::build_info();
  py::dict info;
  info["version"] = build.version;
  info["torch"] = build.torch;
  info["cuda"] = build.cuda.empty() ? py::object(py::none()) : py::object(py::str(build.cuda));
  info["cuda_architectures"] = build.cuda_architectures;
  info["compiler"] = build.compiler;
  info["instruction_set"] = build.instruction_set;
  return info;
}

cuda::PlanRequest make_request(const std::optional<std::string>& kernel,
                               const std::optional<std::string>& weight_grads,
                               std::optional<int> cluster_size, std::optional<int> merged,
                               std::optional<bool> exchange_warp, std::optional<int> blocks,
                               std::optional<bool> in_bulk, std::optional<bool> finish_by_thread) {
  cuda::PlanRequest request;
  if (kernel) request.kernel = find_named("kernel", *kernel, kKernels);
  if (weight_grads) request.weight_grads = find_named("weight_grads", *weight_grads, kWeightGrads);
  request.cluster_size = cluster_size;
  request.merged = merged;
  request.exchange_warp = exchange_warp;
  request.blocks = blocks;
  request.in_bulk = in_bulk;
  request.finish_by_thread = finish_by_thread;
  return request;
}

template <class Plan>
py::dict describe_block(const Plan& plan) {
  py::dict result;
  result["kernel"] = find_name(plan.kernel, kKernels);
  result["chunks_per_thread"] = plan.chunks_per_thread;
  result["columns_per_thread"] = plan.columns_per_thread;
  result["threads_per_row"] = plan.threads_per_row;
  result["rows_per_block"] = plan.rows_per_block;
  result["cluster_size"] = plan.cluster_size;
  result["segments"] = plan.segments;
  result["vectorized"] = plan.vectorized;
  result["in_grid"] = plan.in_grid;
  result["exchange_warp"] = plan.exchange_warp;
  result["most_ahead"] = plan.most_ahead;
  result["blocks"] = plan.blocks;
  result["workspace_bytes"] = plan.workspace_bytes;
  return result;
}

py::dict plan(const std::string& direction, int64_t rows, int64_t cols, const std::string& dtype,
              bool aligned, bool contiguous, bool dx, bool dw_db, bool one_dtype, bool y_as_x,
              const std::optional<std::string>& dy_dtype, bool of_sums_dtype, int sm_count,
              int compute_capability, int large_clusters, bool whole_grids, int memory_bandwidth,
              const std::optional<std::string>& kernel,
              const std::optional<std::string>& weight_grads, std::optional<int> cluster_size,
              std::optional<int> merged, std::optional<bool> exchange_warp,
              std::optional<int> blocks, std::optional<bool> in_bulk,
              std::optional<bool> finish_by_thread) {
  const cuda::DeviceProperties device{sm_count, compute_capability, large_clusters, whole_grids,
                                      memory_bandwidth};
  const cuda::PlanRequest request = make_request(kernel, weight_grads, cluster_size, merged,
                                                 exchange_warp, blocks, in_bulk, finish_by_thread);
  const DType x_dtype = find_named("dtype", dtype, kDtypes);
  if (direction == "forward") {
    const cuda::ForwardPlan plan = inspection::plan_forward(
        {rows, cols, x_dtype, aligned, one_dtype, y_as_x, contiguous}, device, request);
    py::dict result = describe_block(plan);
    result["rows_per_thread"] = plan.rows_per_thread;
    result["gathers"] = plan.gathers;
    result["in_bulk"] = plan.in_bulk;
    result["bulk_stages"] = plan.bulk_stages;
    result["more_warps"] = plan.more_warps;
    result["rows_ahead"] = plan.rows_ahead;
    result["shared_bytes"] = plan.shared_bytes;
    return result;
  }
  if (direction != "backward") {
    throw std::invalid_argument("Expected direction to be one of forward, backward, but got '" +
                                direction + "'");
  }
  const cuda::BackwardPlan plan = inspection::plan_backward(
      {rows, cols, x_dtype, dy_dtype ? find_named("dy_dtype", *dy_dtype, kDtypes) : x_dtype,
       aligned, dx, dw_db, contiguous, of_sums_dtype},
      device, request);
  py::dict result = describe_block(plan);
  result["rows_per_warp"] = cuda::rows_per_warp(plan);
  result["bulk_stages"] = plan.bulk_stages;
  result["is_wide"] = plan.is_wide;
  result["brakes"] = plan.brakes;
  result["run_columns"] = plan.run_columns;
  result["dx"] = plan.dx;
  result["weight_grads"] = find_name(plan.weight_grads, kWeightGrads);
  result["partials"] = plan.partials;
  result["merged"] = plan.merged;
  result["shares"] = plan.shares;
  result["tile_lanes"] = plan.tile_lanes;
  result["slices"] = plan.slices;
  result["column_blocks"] = plan.column_blocks;
  result["column_width"] = plan.column_width;
  result["column_threads"] = plan.column_threads;
  result["column_rows"] = plan.column_rows;
  result["column_tiles"] = plan.column_tiles;
  result["sums_are_results"] = plan.sums_are_results;
  result["finish_threads"] = plan.finish_threads;
  result["finish_vectors"] = plan.finish_vectors;
  result["finish_spreads"] = plan.finish_spreads;
  return result;
}

}  // namespace
}  // namespace fastnorm

PYBIND11_MODULE(_C, m) {
  m.doc() = "fastnorm's compiled operators: a quick call, build information and the CUDA plan";
  static PyMethodDef functions[] = {
      {"layer_norm",
       reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(fastnorm::python_layer_norm)),
       METH_FASTCALL, "The operator for plain arguments; None where torch.ops has to be called."},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(m.ptr(), functions) != 0) throw py::error_already_set();
  m.def("build_info", &fastnorm::build_info, "What this library was built from and for.");
  m.def("plan", &fastnorm::plan, py::arg("direction"), py::arg("rows"), py::arg("cols"),
        py::arg("dtype"), py::kw_only(), py::arg("aligned") = true, py::arg("contiguous") = false,
        py::arg("dx") = true, py::arg("dw_db") = true, py::arg("one_dtype") = true,
        py::arg("y_as_x") = true, py::arg("dy_dtype") = py::none(),
        py::arg("of_sums_dtype") = false, py::arg("sm_count") = 132,
        py::arg("compute_capability") = 90, py::arg("large_clusters") = 7,
        py::arg("whole_grids") = true, py::arg("memory_bandwidth") = 4800,
        py::arg("kernel") = py::none(), py::arg("weight_grads") = py::none(),
        py::arg("cluster_size") = py::none(), py::arg("merged") = py::none(),
        py::arg("exchange_warp") = py::none(), py::arg("blocks") = py::none(),
        py::arg("in_bulk") = py::none(), py::arg("finish_by_thread") = py::none(),
        "How a LayerNorm of this size would run on such a GPU. Needs no GPU.");
  m.def(
      "force_plan",
      [](const std::optional<std::string>& kernel, const std::optional<std::string>& weight_grads,
         std::optional<int> cluster_size, std::optional<int> merged,
         std::optional<bool> exchange_warp, std::optional<int> blocks, std::optional<bool> in_bulk,
         std::optional<bool> finish_by_thread) {
        fastnorm::inspection::force_cuda_plan(
            fastnorm::make_request(kernel, weight_grads, cluster_size, merged, exchange_warp,
                                   blocks, in_bulk, finish_by_thread));
      },
      py::kw_only(), py::arg("kernel") = py::none(), py::arg("weight_grads") = py::none(),
      py::arg("cluster_size") = py::none(), py::arg("merged") = py::none(),
      py::arg("exchange_warp") = py::none(), py::arg("blocks") = py::none(),
      py::arg("in_bulk") = py::none(), py::arg("finish_by_thread") = py::none(),
      "For tests: run these kernels from now on wherever they can run; no argument undoes it.");
}
