// Runs a TorchScript model and an AOTInductor package that Python exported (export_models.py), both
// with fastnorm's operators inside, and compares the results with Python's. Nothing of fastnorm is
// named here: linking the program to it is enough.
//
//   load_models <directory>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/script.h>
#include <torch/torch.h>

#include <cstdio>
#include <string>

constexpr int kNoDevice = 77;

bool agrees(const char* name, const torch::Tensor& result, const torch::Tensor& expected) {
  const double difference = (result - expected).abs().max().item<double>();
  const double allowed = 1e-5 * expected.abs().max().item<double>();
  std::printf(
      "%-12s first values %.6f %.6f, largest difference from Python's %.3g (%.3g allowed): %s\n",
      name, result.flatten()[0].item<double>(), result.flatten()[1].item<double>(), difference,
      allowed, difference <= allowed ? "agrees" : "DIFFERS");
  return difference <= allowed;
}

int main(int argc, char** argv) {
  if (argc != 2) {
    std::printf("usage: load_models <directory that export_models.py wrote>\n");
    return 2;
  }
  const std::string directory = argv[1];
  const torch::jit::Module tensors = torch::jit::load(directory + "/tensors.pt", torch::kCPU);
  const std::string device = tensors.attr("device").toStringRef();
  if (device == "cuda" && !torch::cuda::is_available()) {
    std::printf("there is no CUDA device\n");
    return kNoDevice;
  }
  const torch::Tensor input = tensors.attr("input").toTensor().to(device);
  const torch::Tensor expected = tensors.attr("output").toTensor().to(device);
  std::printf("%-12s first values %.6f %.6f, on %s\n", "Python",
              expected.flatten()[0].item<double>(), expected.flatten()[1].item<double>(),
              device.c_str());

  const torch::NoGradGuard no_grad;
  torch::jit::Module scripted = torch::jit::load(directory + "/scripted.pt", torch::Device(device));
  bool all_agree = agrees("TorchScript", scripted.forward({input}).toTensor(), expected);

  torch::inductor::AOTIModelPackageLoader package(directory + "/aoti.pt2");
  all_agree &= agrees("AOTInductor", package.run({input}).at(0), expected);
  return all_agree ? 0 : 1;
}
