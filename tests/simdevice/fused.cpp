// What GPUs have one kernel for, and torch makes of parts where a device has none: RMS norm, which saves its input and one
// number a row, and the gradient of SiLU, which takes no memory beside its result.
#include "device.h"

#include <ATen/OpMathType.h>
#include <ATen/ops/rms_norm.h>
#include <ATen/ops/silu_backward.h>
#include <torch/library.h>

#include <numeric>

namespace sim {
namespace {
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

std::tuple<Tensor, Tensor> rms_norm(const Tensor& input, at::IntArrayRef shape, const OptionalTensor& weight,
                                    std::optional<double> eps) {
  count_launch();
  current_queue(input.device().index()).run_all();
  at::NoGradGuard no_grad;
  auto wide = at::toOpMathType(input.scalar_type());
  auto x = host_alias(input);
  std::vector<int64_t> dims(shape.size());
  std::iota(dims.begin(), dims.end(), x.dim() - (int64_t)shape.size());
  double added = eps.value_or(wide == at::kDouble ? std::numeric_limits<double>::epsilon() : std::numeric_limits<float>::epsilon());
  auto rstd = x.to(wide).square().mean(dims, true).add_(added).rsqrt_();
  auto out = at::rms_norm(x, shape, host_or_none(weight), added);
  return {to_device(out, input, input.scalar_type()), to_device(rstd, input, wide)};
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_out, const Tensor& input, at::IntArrayRef shape, const Tensor& rstd,
                                             const OptionalTensor& weight, std::array<bool, 2> mask) {
  count_launch();
  current_queue(input.device().index()).run_all();
  at::NoGradGuard no_grad;
  auto wide = at::toOpMathType(input.scalar_type());
  auto grad = host_alias(grad_out).to(wide), scale = host_alias(rstd);
  auto normed = host_alias(input).to(wide) * scale;
  std::vector<int64_t> rows(input.dim() - shape.size()), columns(shape.size());
  std::iota(rows.begin(), rows.end(), 0);
  std::iota(columns.begin(), columns.end(), (int64_t)rows.size());
  auto scaled = weight && weight->defined() ? grad * host_alias(*weight).to(wide) : grad;
  Tensor grad_input, grad_weight;
  if (mask[0]) {
    auto host = (scaled - normed * (scaled * normed).mean(columns, true)) * scale;
    grad_input = to_device(host, input, input.scalar_type());
  }
  if (mask[1]) grad_weight = to_device(rows.empty() ? grad * normed : (grad * normed).sum(rows), *weight, weight->scalar_type());
  return {grad_input, grad_weight};
}

Tensor silu_backward(const Tensor& grad_out, const Tensor& input) {
  count_launch();
  current_queue(input.device().index()).run_all();
  at::NoGradGuard no_grad;
  return to_device(at::silu_backward(host_alias(grad_out), host_alias(input)), input, input.scalar_type());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("silu_backward", &silu_backward);
  m.impl("_fused_rms_norm", &rms_norm);
  m.impl("_fused_rms_norm_backward", &rms_norm_backward);
}
}  // namespace
}  // namespace sim
