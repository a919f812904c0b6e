// The CPU kernels' entry points: the best instruction set of the running machine.
//
// The environment variable FASTNORM_CPU_ISA, read once, asks for another one for testing:
// "baseline", "avx2" or "avx512".
#include "layer_norm_cpu.h"

#include <cstdlib>
#include <memory>
#include <stdexcept>
#include <string>

#include "instruction_sets.h"
#include "layer_norm_partition.h"
#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace fastnorm::cpu {
namespace {

struct InstructionSet {
  const char* key;   // in FASTNORM_CPU_ISA
  const char* name;  // for people
  const Kernels* kernels;
  bool (*is_supported)();
};

bool always() { return true; }

#if defined(__x86_64__)

constexpr const char* kBaselineName = "SSE2";

bool has_f16c() {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}

bool has_avx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

#elif defined(__aarch64__)
constexpr const char* kBaselineName = "NEON";
#else
constexpr const char* kBaselineName = "generic";
#endif

// The best first.
constexpr InstructionSet kInstructionSets[] = {
#if defined(__x86_64__)
    {"avx512", "AVX-512", &avx512::kKernels, has_avx512},
    {"avx2", "AVX2", &avx2::kKernels, has_avx2},
#endif
    {"baseline", kBaselineName, &baseline::kKernels, always},
};

const InstructionSet& choose() {
  const char* wanted = std::getenv("FASTNORM_CPU_ISA");
  std::string supported;
  for (const InstructionSet& set : kInstructionSets) {
    if (!set.is_supported()) continue;
    if (wanted == nullptr || *wanted == '\0' || std::string(wanted) == set.key) return set;
    supported += std::string(supported.empty() ? "" : ", ") + set.key;
  }
  throw std::runtime_error(std::string("FASTNORM_CPU_ISA is '") + wanted +
                           "', but this machine supports: " + supported);
}

const InstructionSet& chosen() {
  static const InstructionSet& set = choose();
  return set;
}

}  // namespace

void forward(const ForwardArgs& args, const ThreadPool& pool) {
  std::unique_ptr<Moments[]> scratch;
  if (partition(args).share_rows) scratch.reset(new Moments[args.rows * tile_count(args.cols)]);
  chosen().kernels->forward(args, scratch.get(), pool);
}

int64_t backward_workspace_bytes(const BackwardArgs& args) {
  return partition(args).workspace_bytes;
}

void backward(const BackwardArgs& args, void* workspace, const ThreadPool& pool) {
  chosen().kernels->backward(args, workspace, pool);
}

const char* instruction_set() { return chosen().name; }

}  // namespace fastnorm::cpu
