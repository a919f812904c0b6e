// Trains a small network on three interleaved spirals twice, with fastnorm::nn::LayerNorm and with
// torch::nn::LayerNorm, from the same seed, and compares the two.
//
//   train [cpu | cuda]
#include <fastnorm/fastnorm.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <string>
#include <vector>

constexpr int64_t kWidth = 64;
constexpr int64_t kPointsPerArm = 200;
constexpr int64_t kArms = 3;
constexpr int kSteps = 300;
constexpr int kNoDevice = 77;

struct Points {
  torch::Tensor positions;  // (points, 2)
  torch::Tensor arms;       // (points,): which spiral each is on
};

Points make_spirals(torch::Device device) {
  std::vector<torch::Tensor> positions, arms;
  for (int64_t arm = 0; arm < kArms; ++arm) {
    const auto radius = torch::linspace(0.1, 1.0, kPointsPerArm);
    const auto angle = 5.0 * radius + 2.0 * M_PI * static_cast<double>(arm) / kArms;
    positions.push_back(torch::stack({radius * angle.cos(), radius * angle.sin()}, 1));
    arms.push_back(torch::full({kPointsPerArm}, arm, torch::kLong));
  }
  return {torch::cat(positions).to(device), torch::cat(arms).to(device)};
}

struct Outcome {
  double first_loss;
  double last_loss;
  double accuracy;
};

template <class LayerNorm>
Outcome train(torch::Device device) {
  torch::manual_seed(0);
  const std::vector<int64_t> shape{kWidth};
  torch::nn::Sequential model(torch::nn::Linear(2, kWidth), LayerNorm(shape), torch::nn::GELU(),
                              torch::nn::Linear(kWidth, kWidth), LayerNorm(shape),
                              torch::nn::GELU(), torch::nn::Linear(kWidth, kArms));
  model->to(device);
  const Points points = make_spirals(device);
  torch::optim::Adam optimizer(model->parameters(), 0.01);
  Outcome outcome{};
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const auto loss =
        torch::nn::functional::cross_entropy(model->forward(points.positions), points.arms);
    loss.backward();
    optimizer.step();
    outcome.last_loss = loss.item<double>();
    if (step == 0) outcome.first_loss = outcome.last_loss;
  }
  const torch::NoGradGuard no_grad;
  const auto found = model->forward(points.positions).argmax(1);
  outcome.accuracy = found.eq(points.arms).to(torch::kDouble).mean().item<double>();
  return outcome;
}

void print(const char* name, const Outcome& outcome) {
  std::printf("%-24s loss %.4f -> %.4f, accuracy %.1f%%\n", name, outcome.first_loss,
              outcome.last_loss, 100 * outcome.accuracy);
}

int main(int argc, char** argv) {
  const std::string wanted = argc > 1 ? argv[1] : torch::cuda::is_available() ? "cuda" : "cpu";
  if (wanted == "cuda" && !torch::cuda::is_available()) {
    std::printf("there is no CUDA device\n");
    return kNoDevice;
  }
  const torch::Device device(wanted);
  if (device.is_cpu()) torch::set_num_threads(1);  // more cost so small a network time
  std::printf("fastnorm %s on %s\n", fastnorm_version(), device.str().c_str());
  const Outcome ours = train<fastnorm::nn::LayerNorm>(device);
  print("fastnorm::nn::LayerNorm", ours);
  const Outcome theirs = train<torch::nn::LayerNorm>(device);
  print("torch::nn::LayerNorm", theirs);

  const bool same_start = std::abs(ours.first_loss - theirs.first_loss) < 1e-5;
  const bool learned = ours.accuracy > 0.95 && ours.last_loss < 0.1 * ours.first_loss;
  if (!same_start) std::printf("FAILED: the first losses differ\n");
  if (!learned) std::printf("FAILED: the network with fastnorm did not learn the spirals\n");
  return same_start && learned ? 0 : 1;
}
