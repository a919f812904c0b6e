// Derivatives of the operators to any order, reverse and forward, as hand-written autograd nodes.
//
// torch::autograd::Function would be shorter, but it has no forward mode and functorch refuses it.
// Everything that leans on PyTorch's autograd internals (Node, SavedVariable, forward gradients) is
// in this file. The formulas are derived in docs/layer_norm_math.md. With J = d xhat / d x, which
// is symmetric and acts on each row as
//     J v = rstd * (v - mean(v) - xhat * mean(v * xhat)),
// the gradient of layer_norm is  dx = J (dy * weight),  dw = sum dy * xhat,  db = sum dy.
// First derivatives run the fused kernels; what follows from differentiating them again is written
// in ATen's operators on xhat and rstd recomputed from x, so that any further order is ATen's own
// and right: the statistics saved by the forward are constants to autograd.
#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/library.h>

#include "layer_norm.h"

namespace fastnorm::ops {
namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::dynamo::autograd::CompiledNodeArgs;
using torch::dynamo::autograd::IValuePacker;
using torch::dynamo::autograd::PackedArgs;
using torch::dynamo::autograd::SwapSavedVariables;

// How PyTorch owns its nodes: a shared_ptr up to some version, an intrusive_ptr later.
using NodePointer = decltype(Edge::function);

template <class T>
std::shared_ptr<T> new_node(std::shared_ptr<Node>*) {
  // deleteNode unwinds long graphs without recursion. Found by argument-dependent lookup, so that
  // it is named only where it exists.
  return std::shared_ptr<T>(new T(), [](T* node) { deleteNode(node); });
}

template <class T>
c10::intrusive_ptr<T> new_node(c10::intrusive_ptr<Node>*) {
  return c10::make_intrusive<T>();
}

template <class T>
auto new_node() {
  return new_node<T>(static_cast<NodePointer*>(nullptr));
}

at::Tensor to_dtype(const at::Tensor& tensor, at::ScalarType dtype) {
  return tensor.defined() ? tensor.to(dtype) : tensor;
}

at::Tensor value_or_undefined(const OptionalTensor& tensor) {
  return tensor.value_or(at::Tensor());
}

// a + b, either of which may be undefined, meaning zero.
at::Tensor plus(const at::Tensor& a, const at::Tensor& b) {
  if (!a.defined()) return b;
  if (!b.defined()) return a;
  return a + b;
}

// a * b; undefined, meaning zero, where either is.
at::Tensor times(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() ? a * b : at::Tensor();
}

// x's rows in the dtype of the statistics, with what the derivatives are made of.
class Rows {
 public:
  Rows(const at::Tensor& input, size_t normalized_ndim, double eps)
      : dtype_(statistics_dtype(input.scalar_type())) {
    const int64_t ndim = input.dim();
    for (int64_t d = 0; d < ndim; ++d) {
      (d + static_cast<int64_t>(normalized_ndim) < ndim ? leading_ : trailing_).push_back(d);
    }
    const at::Tensor x = input.to(dtype_);
    const at::Tensor centered = x - mean(x);
    rstd_ = at::rsqrt(mean(centered * centered) + eps);
    xhat_ = centered * rstd_;
  }

  at::ScalarType dtype() const { return dtype_; }
  const at::Tensor& xhat() const { return xhat_; }

  at::Tensor mean(const at::Tensor& v) const { return v.mean(trailing_, /*keepdim=*/true); }

  // J v
  at::Tensor project(const at::Tensor& v) const {
    if (!v.defined()) return v;
    return rstd_ * (v - mean(v) - xhat_ * mean(v * xhat_));
  }

  // The derivative of J v along x moving by `x_tangent`, v held.
  at::Tensor project_tangent(const at::Tensor& v, const at::Tensor& x_tangent) const {
    if (!v.defined() || !x_tangent.defined()) return at::Tensor();
    const at::Tensor xhat_tangent = project(x_tangent);
    return -rstd_ * (mean(xhat_ * x_tangent) * project(v) + xhat_tangent * mean(v * xhat_) +
                     xhat_ * mean(v * xhat_tangent));
  }

  at::Tensor rstd_times(const at::Tensor& v) const { return rstd_ * v; }

  // Sum over the rows, in the shape of the parameters.
  at::Tensor sum_rows(const at::Tensor& v) const {
    if (!v.defined() || leading_.empty()) return v;
    return v.sum(leading_);
  }

 private:
  at::ScalarType dtype_;
  c10::DimVector leading_, trailing_;
  at::Tensor rstd_, xhat_;
};

// Which of a node's three gradients the running backward asks for.
std::array<bool, 3> wanted_outputs(Node& node) {
  return {node.task_should_compute_output(0), node.task_should_compute_output(1),
          node.task_should_compute_output(2)};
}

// Compiled autograd goes through the nodes before any shape is known, with empty tensors for the
// gradients. What a node does must not run on these: it is recorded as one call of `compute`, which
// runs when the graph is traced. `args` are what the node saved, swapped for the graph's values.
template <class... Args>
variable_list record_call(const Node& node, torch::dynamo::autograd::functional_apply_t compute,
                          std::once_flag& bound, const variable_list& gradients,
                          SwapSavedVariables& saved, const Args&... args) {
  using Metadata = std::vector<std::optional<torch::autograd::InputMetadata>>;
  const auto& python = torch::dynamo::autograd::getPyCompilerInterface();
  std::call_once(bound, [&] {
    python->bind_function(saved.get_py_compiler(), node.name(), compute,
                          {IValuePacker<Args>::packed_type()...});
  });
  return python->call_function(
      saved.get_py_compiler(), "apply_functional", node.name(), gradients,
      {IValuePacker<Args>::pack(args)...},
      IValuePacker<Metadata>::pack(torch::dynamo::autograd::get_input_metadata(node.next_edges())));
}

// ---- second derivatives -------------------------------------------------------------------------

// Gradients of <ggx, dx> + <ggw, dw> + <ggb, db> with respect to grad_out, input and weight. An
// undefined gg means zero.
struct DoubleBackward {
  at::Tensor grad_out, input, weight;
};

DoubleBackward double_backward(at::Tensor ggx, at::Tensor ggw, at::Tensor ggb,
                               const at::Tensor& grad_out, const at::Tensor& input,
                               const at::Tensor& weight, size_t normalized_ndim, double eps,
                               std::array<bool, 3> wanted) {
  const Rows rows(input, normalized_ndim, eps);
  ggx = to_dtype(ggx, rows.dtype());
  ggw = to_dtype(ggw, rows.dtype());
  ggb = to_dtype(ggb, rows.dtype());
  const at::Tensor dy = grad_out.to(rows.dtype());
  const at::Tensor w = to_dtype(weight, rows.dtype());
  const at::Tensor j_ggx = rows.project(ggx);

  DoubleBackward result;
  if (wanted[0]) {
    at::Tensor g = w.defined() ? times(j_ggx, w) : j_ggx;
    g = plus(g, times(ggw, rows.xhat()));
    if (ggb.defined()) g = plus(g, ggb.expand_as(dy));
    result.grad_out = to_dtype(g, grad_out.scalar_type());
  }
  if (wanted[1]) {
    // <ggx, J h> with h = dy * weight depends on x through J, and <ggw, dw> through xhat.
    at::Tensor g;
    if (ggx.defined()) {
      const at::Tensor h = w.defined() ? dy * w : dy;
      const at::Tensor j_h = rows.project(h);
      // d rstd / d x = -rstd^2 xhat / N, hence the term in mean(ggx * J h).
      g = -rows.rstd_times(rows.xhat() * rows.mean(ggx * j_h) + rows.mean(h * rows.xhat()) * j_ggx +
                           rows.mean(ggx * rows.xhat()) * j_h);
    }
    g = plus(g, rows.project(times(ggw, dy)));
    result.input = to_dtype(g, input.scalar_type());
  }
  if (wanted[2] && w.defined()) {
    result.weight = to_dtype(rows.sum_rows(times(j_ggx, dy)), weight.scalar_type());
  }
  return result;
}

struct LayerNormDoubleBackward : public Node {
  SavedVariable grad_out_, input_, weight_;
  int64_t normalized_ndim_ = 0;
  double eps_ = 0;

  std::string name() const override { return "FastnormLayerNormBackwardBackward"; }

  // Inputs: gradients of dx, dw, db. Outputs: of grad_out, input, weight.
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    return compute(gradients, grad_out_.unpack(), input_.unpack(), weight_.unpack(),
                   normalized_ndim_, eps_, wanted_outputs(*this));
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    grad_out_.reset_data();
    input_.reset_data();
    weight_.reset_data();
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(grad_out_, false);
    args.collect(input_, false);
    args.collect(weight_, false);
    args.collect(normalized_ndim_);
    args.collect(eps_);
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 SwapSavedVariables& saved) override {
    saved.before(grad_out_);
    saved.before(input_);
    saved.before(weight_);
    saved.before(normalized_ndim_);
    saved.before(eps_);
    static std::once_flag bound;
    variable_list result = record_call(*this, compute_packed, bound, gradients, saved,
                                       grad_out_.unpack(), input_.unpack(), weight_.unpack(),
                                       normalized_ndim_, eps_, wanted_outputs(*this));
    saved.after(grad_out_);
    saved.after(input_);
    saved.after(weight_);
    saved.after(normalized_ndim_);
    saved.after(eps_);
    return result;
  }

 private:
  static variable_list compute(const variable_list& gradients, const at::Tensor& grad_out,
                               const at::Tensor& input, const at::Tensor& weight,
                               int64_t normalized_ndim, double eps, std::array<bool, 3> wanted) {
    if (!gradients[0].defined() && !gradients[1].defined() && !gradients[2].defined()) {
      return variable_list(3);
    }
    const DoubleBackward result =
        double_backward(gradients[0], gradients[1], gradients[2], grad_out, input, weight,
                        static_cast<size_t>(normalized_ndim), eps, wanted);
    return {result.grad_out, result.input, result.weight};
  }

  static variable_list compute_packed(const variable_list& gradients,
                                      const std::vector<c10::IValue>& packed) {
    PackedArgs args(packed);
    const auto grad_out = args.unpack<at::Tensor>();
    const auto input = args.unpack<at::Tensor>();
    const auto weight = args.unpack<at::Tensor>();
    const auto normalized_ndim = args.unpack<int64_t>();
    const auto eps = args.unpack<double>();
    const auto wanted = args.unpack<std::array<bool, 3>>();
    return compute(gradients, grad_out, input, weight, normalized_ndim, eps, wanted);
  }
};

// ---- first derivatives --------------------------------------------------------------------------

struct LayerNormBackward : public Node {
  SavedVariable input_, weight_, bias_, mean_, rstd_;
  std::vector<c10::SymInt> normalized_shape_;
  double eps_ = 0;

  std::string name() const override { return "FastnormLayerNormBackward"; }

  // Input: the gradient of output (and, undefined, those of mean and rstd).
  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto self = owner();
    return compute(gradients, input_.unpack(), normalized_shape_, mean_.unpack(self),
                   rstd_.unpack(self), weight_.unpack(), bias_.unpack(), eps_,
                   wanted_outputs(*this));
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    input_.reset_data();
    weight_.reset_data();
    bias_.reset_data();
    mean_.reset_data();
    rstd_.reset_data();
  }

  void compiled_args(CompiledNodeArgs& args) const override {
    args.collect(input_, false);
    args.collect(weight_, false);
    args.collect(bias_, false);
    args.collect(mean_, true);
    args.collect(rstd_, true);
    args.collect(normalized_shape_);
    args.collect(eps_);
  }

  variable_list apply_with_saved(const variable_list& gradients,
                                 SwapSavedVariables& saved) override {
    saved.before(input_);
    saved.before(weight_);
    saved.before(bias_);
    saved.before(mean_);
    saved.before(rstd_);
    saved.before(normalized_shape_);
    saved.before(eps_);
    static std::once_flag bound;
    const auto self = owner();
    variable_list result =
        record_call(*this, compute_packed, bound, gradients, saved, input_.unpack(),
                    normalized_shape_, mean_.unpack(self), rstd_.unpack(self), weight_.unpack(),
                    bias_.unpack(), eps_, wanted_outputs(*this));
    saved.after(input_);
    saved.after(weight_);
    saved.after(bias_);
    saved.after(mean_);
    saved.after(rstd_);
    saved.after(normalized_shape_);
    saved.after(eps_);
    return result;
  }

 private:
  // The pointer that unpacking an output of this node asks for.
  NodePointer owner() { return getptr(); }

  static variable_list compute(const variable_list& gradients, const at::Tensor& input,
                               const std::vector<c10::SymInt>& normalized_shape,
                               const at::Tensor& mean, const at::Tensor& rstd,
                               const at::Tensor& weight, const at::Tensor& bias, double eps,
                               std::array<bool, 3> wanted) {
    if (!gradients[0].defined()) return variable_list(3);
    auto [dx, dw, db] = layer_norm_backward(
        gradients[0], input, normalized_shape, mean, rstd, weight, bias, eps,
        {wanted[0], weight.defined() && wanted[1], bias.defined() && wanted[2]});
    return {dx, dw, db};
  }

  static variable_list compute_packed(const variable_list& gradients,
                                      const std::vector<c10::IValue>& packed) {
    PackedArgs args(packed);
    const auto input = args.unpack<at::Tensor>();
    const auto normalized_shape = args.unpack<std::vector<c10::SymInt>>();
    const auto mean = args.unpack<at::Tensor>();
    const auto rstd = args.unpack<at::Tensor>();
    const auto weight = args.unpack<at::Tensor>();
    const auto bias = args.unpack<at::Tensor>();
    const auto eps = args.unpack<double>();
    const auto wanted = args.unpack<std::array<bool, 3>>();
    return compute(gradients, input, normalized_shape, mean, rstd, weight, bias, eps, wanted);
  }
};

// ---- forward mode -------------------------------------------------------------------------------

at::Tensor tangent(const OptionalTensor& tensor) {
  return given(tensor) ? tensor->_fw_grad(/*level=*/0) : at::Tensor();
}

at::Tensor primal(const OptionalTensor& tensor) {
  return given(tensor) ? tensor->_fw_primal(/*level=*/0) : at::Tensor();
}

bool has_tangent(const OptionalTensor& tensor) { return tangent(tensor).defined(); }

// Attaches a tangent to a result; undefined means zero and attaches nothing.
void set_tangent(const at::Tensor& result, const at::Tensor& value) {
  if (result.defined() && value.defined()) {
    result._set_fw_grad(value.to(result.scalar_type()), /*level=*/0, /*is_inplace_op=*/false);
  }
}

// ---- the operators under autograd ---------------------------------------------------------------

Tensors3 layer_norm_forward_autograd(const at::Tensor& input, c10::SymIntArrayRef normalized_shape,
                                     const OptionalTensor& weight, const OptionalTensor& bias,
                                     double eps, std::optional<at::ScalarType> out_dtype) {
  const bool any_tangent = has_tangent(input) || has_tangent(weight) || has_tangent(bias);
  decltype(new_node<LayerNormBackward>()) node;
  if (torch::autograd::compute_requires_grad(input, weight, bias)) {
    node = new_node<LayerNormBackward>();
    node->set_next_edges(torch::autograd::collect_next_edges(input, value_or_undefined(weight),
                                                             value_or_undefined(bias)));
    node->input_ = SavedVariable(input, false);
    node->weight_ = SavedVariable(value_or_undefined(weight), false);
    node->bias_ = SavedVariable(value_or_undefined(bias), false);
    node->normalized_shape_ = normalized_shape.vec();
    node->eps_ = eps;
  }

  Tensors3 results = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return layer_norm_forward(input, normalized_shape, weight, bias, eps, out_dtype);
  }();
  const auto& [output, mean, rstd] = results;

  if (node) {
    torch::autograd::set_history(output, node);
    node->mean_ = SavedVariable(mean, false);
    node->rstd_ = SavedVariable(rstd, false);
  }
  if (any_tangent) {
    const Rows rows(primal(input), normalized_shape.size(), eps);
    const at::Tensor w = to_dtype(primal(weight), rows.dtype());
    at::Tensor t = rows.project(to_dtype(tangent(input), rows.dtype()));
    if (w.defined()) t = times(t, w);
    t = plus(t, times(rows.xhat(), to_dtype(tangent(weight), rows.dtype())));
    const at::Tensor bias_tangent = to_dtype(tangent(bias), rows.dtype());
    if (bias_tangent.defined()) t = plus(t, bias_tangent.expand_as(rows.xhat()));
    set_tangent(output, t);
  }
  return results;
}

Tensors3 layer_norm_backward_autograd(const at::Tensor& grad_out, const at::Tensor& input,
                                      c10::SymIntArrayRef normalized_shape, const at::Tensor& mean,
                                      const at::Tensor& rstd, const OptionalTensor& weight,
                                      const OptionalTensor& bias, double eps,
                                      std::array<bool, 3> output_mask) {
  const bool any_tangent = has_tangent(grad_out) || has_tangent(input) || has_tangent(weight);
  decltype(new_node<LayerNormDoubleBackward>()) node;
  if (torch::autograd::compute_requires_grad(grad_out, input, weight)) {
    node = new_node<LayerNormDoubleBackward>();
    node->set_next_edges(
        torch::autograd::collect_next_edges(grad_out, input, value_or_undefined(weight)));
    node->grad_out_ = SavedVariable(grad_out, false);
    node->input_ = SavedVariable(input, false);
    node->weight_ = SavedVariable(value_or_undefined(weight), false);
    node->normalized_ndim_ = static_cast<int64_t>(normalized_shape.size());
    node->eps_ = eps;
  }

  Tensors3 results = [&] {
    const at::AutoDispatchBelowADInplaceOrView below_autograd;
    return layer_norm_backward(grad_out, input, normalized_shape, mean, rstd, weight, bias, eps,
                               output_mask);
  }();
  const auto& [dx, dw, db] = results;

  if (node) {
    torch::autograd::set_history(dx, node);
    torch::autograd::set_history(dw, node);
    torch::autograd::set_history(db, node);
  }
  if (any_tangent) {
    const Rows rows(primal(input), normalized_shape.size(), eps);
    const at::Tensor w = to_dtype(primal(weight), rows.dtype());
    const at::Tensor dy = primal(grad_out).to(rows.dtype());
    const at::Tensor x_tangent = to_dtype(tangent(input), rows.dtype());
    const at::Tensor dy_tangent = to_dtype(tangent(grad_out), rows.dtype());
    if (dx.defined()) {
      const at::Tensor h = w.defined() ? dy * w : dy;
      const at::Tensor h_tangent = plus(w.defined() ? times(dy_tangent, w) : dy_tangent,
                                        times(dy, to_dtype(tangent(weight), rows.dtype())));
      set_tangent(dx, plus(rows.project(h_tangent), rows.project_tangent(h, x_tangent)));
    }
    if (dw.defined()) {
      set_tangent(dw, rows.sum_rows(plus(times(dy_tangent, rows.xhat()),
                                         times(dy, rows.project(x_tangent)))));
    }
    if (db.defined()) set_tangent(db, rows.sum_rows(dy_tangent));
  }
  return results;
}

}  // namespace

TORCH_LIBRARY_IMPL(fastnorm, Autograd, m) {
  m.impl("layer_norm_forward", layer_norm_forward_autograd);
  m.impl("layer_norm_backward", layer_norm_backward_autograd);
}

}  // namespace fastnorm::ops
