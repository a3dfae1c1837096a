// Fused attention on the simulated accelerator: the CPU's flash kernel, where the CPU itself would take it.
#include "device.h"

#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward.h>
#include <torch/library.h>

namespace sim {
namespace {
using at::Tensor;
using OptionalTensor = std::optional<Tensor>;

int64_t choose(const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& mask, double dropout,
               bool is_causal, std::optional<double> scale, bool enable_gqa) {
  if (mask && mask->requires_grad()) return static_cast<int64_t>(sdp::SDPBackend::math);
  auto chosen = at::_fused_sdp_choice(host_alias(query), host_alias(key), host_alias(value), host_or_none(mask), dropout,
                                      is_causal, scale, enable_gqa);
  bool is_flash = chosen == static_cast<int64_t>(sdp::SDPBackend::flash_attention);
  return static_cast<int64_t>(is_flash ? sdp::SDPBackend::overrideable : sdp::SDPBackend::math);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, c10::SymInt, c10::SymInt, Tensor, Tensor, Tensor> attention(
    const Tensor& query, const Tensor& key, const Tensor& value, const OptionalTensor& bias, double dropout, bool is_causal,
    bool, std::optional<double> scale) {
  count_launch();
  current_queue(query.device().index()).run_all();
  at::NoGradGuard no_grad;
  auto [out, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
      host_alias(query), host_alias(key), host_alias(value), dropout, is_causal, host_or_none(bias), scale);
  auto none = at::empty({0}, query.options().dtype(at::kLong));
  return {to_device(out, query), to_device(logsumexp, query), none, none, query.sym_size(2), key.sym_size(2), none, none, none};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> attention_backward(
    const Tensor& grad, const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& bias, std::array<bool, 4>,
    const Tensor& out, const Tensor& logsumexp, const Tensor&, const Tensor&, c10::SymInt, c10::SymInt, double dropout,
    bool is_causal, const Tensor&, const Tensor&, std::optional<double> scale) {
  count_launch();
  current_queue(query.device().index()).run_all();
  at::NoGradGuard no_grad;
  auto [grad_query, grad_key, grad_value] = at::_scaled_dot_product_flash_attention_for_cpu_backward(
      host_alias(grad), host_alias(query), host_alias(key), host_alias(value), host_alias(out), host_alias(logsumexp), dropout,
      is_causal, host_or_none(bias), scale);
  return {to_device(grad_query, query), to_device(grad_key, query), to_device(grad_value, query), Tensor()};
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("_scaled_dot_product_fused_attention_overrideable", &attention);
  m.impl("_scaled_dot_product_fused_attention_overrideable_backward", &attention_backward);
}
}  // namespace
}  // namespace sim

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &sim::choose)
}
