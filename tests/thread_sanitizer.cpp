// The CPU kernels from many threads at once, for ThreadSanitizer: callers share their inputs and
// have results of their own, and each caller's work is spread over threads in turn. Without
// PyTorch, all of whose threads would otherwise have to be compiled with the sanitizer as well.
//
//   c++ -std=c++17 -O1 -g -fsanitize=thread csrc/cpu/*.cpp tests/thread_sanitizer.cpp -o check
//   ./check SECONDS      as long as that, at least once through everything
//   ./check planted      two callers with one result: the sanitizer must report it
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "../csrc/cpu/layer_norm_cpu.h"

namespace {

using fastnorm::BackwardArgs;
using fastnorm::DType;
using fastnorm::ForwardArgs;

constexpr int kCallers = 16;
constexpr int64_t kThreadsPerCall = 3;

// Pieces no shorter than `grain`, each on a thread of its own.
void run_on_threads(int64_t count, int64_t grain, fastnorm::cpu::ThreadPool::Body body,
                    void* context) {
  const int64_t pieces =
      std::max<int64_t>(1, std::min(kThreadsPerCall, count / std::max<int64_t>(1, grain)));
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < pieces; ++i) {
    threads.emplace_back(body, context, count * i / pieces, count * (i + 1) / pieces);
  }
  for (std::thread& thread : threads) thread.join();
}

constexpr fastnorm::cpu::ThreadPool kPool{run_on_threads};

struct Inputs {
  int64_t rows, cols;
  DType dtype;
  std::vector<char> x, dy, weight, bias;
};

std::vector<char> numbers(int64_t count, DType dtype, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  std::vector<char> bytes(count * fastnorm::size_in_bytes(dtype));
  for (int64_t i = 0; i < count; ++i) {
    const float value = normal(generator);
    if (dtype == DType::kFloat32) {
      std::memcpy(&bytes[4 * i], &value, 4);
    } else if (dtype == DType::kFloat64) {
      const double wide = value;
      std::memcpy(&bytes[8 * i], &wide, 8);
    } else {  // bfloat16, cut short; the same bits are some float16, too
      std::memcpy(&bytes[2 * i], reinterpret_cast<const char*>(&value) + 2, 2);
    }
  }
  return bytes;
}

Inputs make_inputs(int64_t rows, int64_t cols, DType dtype) {
  return {rows,
          cols,
          dtype,
          numbers(rows * cols, dtype, 1),
          numbers(rows * cols, dtype, 2),
          numbers(cols, dtype, 3),
          numbers(cols, dtype, 4)};
}

struct Results {
  std::vector<char> y, mean, rstd, dx, dw, db;

  bool operator==(const Results& other) const {
    return y == other.y && mean == other.mean && rstd == other.rstd && dx == other.dx &&
           dw == other.dw && db == other.db;
  }
};

Results make_results(const Inputs& inputs) {
  const int64_t element = fastnorm::size_in_bytes(inputs.dtype);
  const int64_t wide = fastnorm::size_in_bytes(fastnorm::accumulation_dtype(inputs.dtype));
  const auto bytes = [](int64_t count) { return std::vector<char>(count); };
  return {bytes(inputs.x.size()), bytes(inputs.rows * wide),    bytes(inputs.rows * wide),
          bytes(inputs.x.size()), bytes(inputs.cols * element), bytes(inputs.cols * element)};
}

void call(const Inputs& inputs, Results& results) {
  ForwardArgs forward;
  forward.rows = inputs.rows;
  forward.cols = inputs.cols;
  forward.eps = 1e-5;
  forward.x_dtype = forward.y_dtype = forward.weight_dtype = forward.bias_dtype = inputs.dtype;
  forward.x = inputs.x.data();
  forward.x_row_stride = inputs.cols;
  forward.weight = inputs.weight.data();
  forward.bias = inputs.bias.data();
  forward.y = results.y.data();
  forward.mean = results.mean.data();
  forward.rstd = results.rstd.data();
  fastnorm::cpu::forward(forward, kPool);

  BackwardArgs backward;
  backward.rows = inputs.rows;
  backward.cols = inputs.cols;
  backward.dy_dtype = backward.x_dtype = backward.weight_dtype = backward.bias_dtype = inputs.dtype;
  backward.dy = inputs.dy.data();
  backward.x = inputs.x.data();
  backward.dy_row_stride = backward.x_row_stride = inputs.cols;
  backward.mean = results.mean.data();
  backward.rstd = results.rstd.data();
  backward.weight = inputs.weight.data();
  backward.dx = results.dx.data();
  backward.dw = results.dw.data();
  backward.db = results.db.data();
  std::vector<double> workspace(fastnorm::cpu::backward_workspace_bytes(backward) / 8 + 1);
  fastnorm::cpu::backward(backward, workspace.data(), kPool);
}

// Few rows and many, narrow and wide, and rows that are shared among threads.
const std::vector<Inputs>& all_inputs() {
  static const std::vector<Inputs> inputs = [] {
    std::vector<Inputs> made;
    const DType dtypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16, DType::kFloat64};
    for (DType dtype : dtypes) {
      made.push_back(make_inputs(3000, 7, dtype));
      made.push_back(make_inputs(517, 100, dtype));
      made.push_back(make_inputs(65, 1027, dtype));
      made.push_back(make_inputs(3, 40000, dtype));
    }
    return made;
  }();
  return inputs;
}

int run_planted() {
  Results shared = make_results(all_inputs()[1]);
  const auto work = [&] { call(all_inputs()[1], shared); };
  std::thread one(work), other(work);
  one.join();
  other.join();
  return 0;
}

int run(double seconds) {
  const std::vector<Inputs>& inputs = all_inputs();
  std::vector<Results> expected;
  for (const Inputs& each : inputs) {
    expected.push_back(make_results(each));
    call(each, expected.back());
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::atomic<int64_t> calls{0}, wrong{0};
  const auto work = [&](int caller) {
    for (size_t i = 0; i < inputs.size() || std::chrono::steady_clock::now() < end; ++i) {
      const size_t which = (i + caller) % inputs.size();
      Results results = make_results(inputs[which]);
      call(inputs[which], results);
      if (!(results == expected[which])) ++wrong;
      ++calls;
    }
  };
  std::vector<std::thread> callers;
  for (int i = 0; i < kCallers; ++i) callers.emplace_back(work, i);
  for (std::thread& caller : callers) caller.join();
  std::printf("%s: %lld forwards and backwards by %d callers, %lld wrong\n",
              fastnorm::cpu::instruction_set(), static_cast<long long>(calls), kCallers,
              static_cast<long long>(wrong));
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string word = argc > 1 ? argv[1] : "0";
  return word == "planted" ? run_planted() : run(std::atof(word.c_str()));
}
