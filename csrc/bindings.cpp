// The operators: their schemas, and the functions of bindings/ that are registered for them. This
// file and bindings/ are the only ones that include torch, and of torch only the LibTorch Stable
// ABI, so that one binary serves every release from 2.10 on.

// Registration runs once: by size, for 20 KB less of a wheel.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("Os")
#endif

#include <torch/csrc/stable/library.h>

#include <array>
#include <sstream>
#include <string>
#include <tuple>
#include <vector>

#include "bindings/cross_entropy.h"
#include "bindings/elementwise.h"
#include "bindings/launch.h"
#include "bindings/scale.h"
#include "bindings/tokens.h"
#include "losses/elementwise/registry.h"

namespace lossops::bindings {
namespace {

// The schemas of the operators that graphs hold. lossops/_extension.py defines them: the stable ABI
// of torch 2.10 cannot give an operator a tag, and compilers read the tags.
struct Schemas {
  std::string text;  // a line each

  void def(const std::string& schema) { text += schema + "\n"; }
};

// ----------------------------------------------------------------- elementwise

// The ops of one elementwise loss, whose schemas add Params... to the common arguments.
template <typename Loss, ElementwiseLoss kLoss, typename ParamList>
struct ElementwiseOps;

template <typename Loss, ElementwiseLoss kLoss, typename... Params>
struct ElementwiseOps<Loss, kLoss, ParamTypes<Params...>> {
  // The public op without autograd, whose kernel is in lossops/_ops/calling.py.
  static Tensor loss(Tensor input, Tensor target, std::string reduction, Params... params) {
    return value(input, target, std::nullopt, reduction, false, params...);
  }

  static Tensor weighted_loss(Tensor input, Tensor target, std::string reduction,
                              OptionalTensor weight, Params... params) {
    return value(input, target, weight, reduction, false, params...);
  }

  static Tensor value(Tensor input, Tensor target, OptionalTensor weight, std::string reduction,
                      bool float32_result, Params... params) {
    return run_forward(input, target, weight, reduction, float32_result, Extra::kNothing, params...)
        .loss;
  }

  static std::tuple<Tensor, Tensor> forward(Tensor input, Tensor target, OptionalTensor weight,
                                            std::string reduction, bool float32_result,
                                            Params... params) {
    const ElementwiseResult result = run_forward(input, target, weight, reduction, float32_result,
                                                 Extra::kBackwardTerms, params...);
    return {result.loss, *result.mean_terms};
  }

  static std::tuple<Tensor, Tensor> forward_gradient(Tensor input, Tensor target,
                                                     OptionalTensor weight, std::string reduction,
                                                     bool float32_result, Params... params) {
    const ElementwiseResult result = run_forward(input, target, weight, reduction, float32_result,
                                                 Extra::kGradient, params..., {true, false});
    return {result.loss, *result.kept[0]};
  }

  static std::tuple<Tensor, OptionalTensor, OptionalTensor> forward_gradients(
      Tensor input, Tensor target, OptionalTensor weight, std::string reduction,
      bool float32_result, Params... params, std::vector<bool> output_mask) {
    LOSSOPS_CHECK(name_of(kLoss), output_mask.size() == 2,
                  "output_mask must have 2 entries, but has ", output_mask.size());
    const ElementwiseResult result =
        run_forward(input, target, weight, reduction, float32_result, Extra::kGradient, params...,
                    {output_mask[0], output_mask[1]});
    return {result.loss, result.kept[0], result.kept[1]};
  }

  static void backward_kept(Tensor grad_input, Tensor grad_output, Tensor input, Tensor target,
                            OptionalTensor weight, std::string reduction, bool float32_result,
                            Params... params) {
    backward_kept_gradients(grad_input, std::nullopt, grad_output, input, target, weight, reduction,
                            float32_result, params...);
  }

  static void backward_kept_gradients(OptionalTensor grad_input, OptionalTensor grad_target,
                                      Tensor grad_output, Tensor input, Tensor target,
                                      OptionalTensor weight, std::string reduction,
                                      bool /*float32_result*/, Params... params) {
    elementwise_backward(kLoss, grad_output, input, target, weight, std::nullopt,
                         LossParams{{static_cast<double>(params)...}}, reduction,
                         {grad_input.has_value(), grad_target.has_value(), false},
                         {grad_input, grad_target});
  }

  static std::vector<Tensor> backward(Tensor grad_output, Tensor input, Tensor target,
                                      OptionalTensor weight, OptionalTensor mean_terms,
                                      std::string reduction, std::vector<bool> output_mask,
                                      Params... params) {
    return elementwise_backward(kLoss, grad_output, input, target, weight, mean_terms,
                                LossParams{{static_cast<double>(params)...}}, reduction,
                                output_mask);
  }

  static ElementwiseResult run_forward(const Tensor& input, const Tensor& target,
                                       const OptionalTensor& weight, const std::string& reduction,
                                       bool float32_result, Extra extra, Params... params,
                                       std::array<bool, 2> wanted = {}) {
    return elementwise_forward(kLoss, input, target, weight,
                               LossParams{{static_cast<double>(params)...}}, reduction,
                               float32_result, extra, wanted);
  }

  static void define(Schemas& m) {
    const std::string name = name_of(kLoss);
    const std::string params = Loss::kSchema;
    const std::string weight = Loss::kTraits.has_weight ? ", Tensor? weight=None" : "";
    m.def(name + "(Tensor input, Tensor target, *, str reduction=\"mean\"" + weight + params +
          ") -> Tensor");
    m.def(name +
          "_forward(Tensor input, Tensor target, Tensor? weight, str reduction, "
          "bool float32_result" +
          params + ") -> (Tensor loss, Tensor mean_terms)");
    // With defaults: an argument that is left out costs nothing, any other 0.15 us.
    const std::string arguments =
        "Tensor input, Tensor target, Tensor? weight=None, str reduction=\"mean\", "
        "bool float32_result=False" +
        params;
    m.def(name + "_value(" + arguments + ") -> Tensor");
    m.def(name + "_forward_gradient(" + arguments + ") -> (Tensor loss, Tensor grad_input)");
    m.def(name + "_backward_kept(Tensor(a!) grad_input, Tensor grad_output, " + arguments +
          ") -> ()");
    // Of any gradients. The two above are quicker by the 0.1 us that a mask and results that may be
    // None take, and 0.3 us.
    m.def(name + "_forward_gradients(" + arguments +
          ", *, bool[] output_mask) "
          "-> (Tensor loss, Tensor? grad_input, Tensor? grad_target)");
    m.def(name +
          "_backward_kept_gradients(Tensor(a!)? grad_input, Tensor(b!)? grad_target, "
          "Tensor grad_output, " +
          arguments + ") -> ()");
    m.def(name +
          "_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
          "Tensor? mean_terms, str reduction, bool[] output_mask" +
          params + ") -> Tensor[]");
  }

  static void implement(torch::stable::detail::StableLibrary& m) {
    const std::string name = name_of(kLoss);
    m.impl(name.c_str(), Loss::kTraits.has_weight ? TORCH_BOX(&ElementwiseOps::weighted_loss)
                                                  : TORCH_BOX(&ElementwiseOps::loss));
    m.impl((name + "_forward").c_str(), TORCH_BOX(&ElementwiseOps::forward));
    m.impl((name + "_value").c_str(), TORCH_BOX(&ElementwiseOps::value));
    m.impl((name + "_forward_gradient").c_str(), TORCH_BOX(&ElementwiseOps::forward_gradient));
    m.impl((name + "_backward").c_str(), TORCH_BOX(&ElementwiseOps::backward));
    m.impl((name + "_backward_kept").c_str(), TORCH_BOX(&ElementwiseOps::backward_kept));
    m.impl((name + "_forward_gradients").c_str(), TORCH_BOX(&ElementwiseOps::forward_gradients));
    m.impl((name + "_backward_kept_gradients").c_str(),
           TORCH_BOX(&ElementwiseOps::backward_kept_gradients));
  }
};

#define LOSSOPS_OPS(name, Loss) ElementwiseOps<Loss, ElementwiseLoss::name, Loss::Params>

std::string build_info() {
#if defined(__clang__)
  constexpr const char* kCompiler = __VERSION__;
#else
  constexpr const char* kCompiler = "GCC " __VERSION__;
#endif
  std::ostringstream json;
#if defined(LOSSOPS_WITH_CUDA)
  json << "{\"cuda\": \"" << LOSSOPS_CUDA_VERSION << "\", \"cuda_archs\": \"" << LOSSOPS_CUDA_ARCHS
       << "\"";
#else
  json << "{\"cuda\": null, \"cuda_archs\": \"\"";
#endif
  json << ", \"compiler\": \"" << kCompiler << "\", \"torch_target\": \"2.10\"}";
  return json.str();
}

// ---------------------------------------------------------------- registration

std::string schemas() {
  Schemas m;
#define LOSSOPS_ROW(name, Loss) LOSSOPS_OPS(name, Loss)::define(m);
  LOSSOPS_ELEMENTWISE_LOSSES(LOSSOPS_ROW)
#undef LOSSOPS_ROW
  m.def(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, *, int ignore_index=-100, "
      "str reduction=\"mean\", float label_smoothing=0.0) -> Tensor");
  m.def(
      "cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, int ignore_index, "
      "str reduction, float label_smoothing, bool float32_result) "
      "-> (Tensor loss, Tensor row_stats, Tensor mean_terms)");
  m.def(
      "cross_entropy_value(Tensor input, Tensor target, Tensor? weight=None, "
      "int ignore_index=-100, str reduction=\"mean\", float label_smoothing=0.0, "
      "bool float32_result=False) -> Tensor");
  m.def(
      "cross_entropy_forward_gradient(Tensor input, Tensor target, Tensor? weight=None, "
      "int ignore_index=-100, str reduction=\"mean\", float label_smoothing=0.0, "
      "bool float32_result=False) -> (Tensor loss, Tensor grad_input, Tensor saved)");
  m.def(
      "cross_entropy_backward_kept(Tensor(a!) grad_input, Tensor grad_output, Tensor input, "
      "Tensor target, Tensor saved, Tensor? weight=None, int ignore_index=-100, "
      "str reduction=\"mean\", float label_smoothing=0.0, bool float32_result=False) -> ()");
  m.def(
      "cross_entropy_backward_inplace(Tensor(a!) input, Tensor grad_output, Tensor target, "
      "Tensor? weight, Tensor row_stats, Tensor? mean_terms, int ignore_index, str reduction, "
      "float label_smoothing) -> ()");
  m.def(
      "cross_entropy_forward_inplace(Tensor(a!) input, Tensor target, Tensor? weight, "
      "Tensor? denominator, int ignore_index, float label_smoothing) -> Tensor");
  m.def(
      "cross_entropy_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
      "Tensor row_stats, Tensor? mean_terms, int ignore_index, str reduction, "
      "float label_smoothing, bool[] output_mask) -> Tensor[]");
  m.def("scale_kept(Tensor(a!) gradient, Tensor factor) -> ()");
  m.def("first_invalid_target(Tensor target, int num_classes, int ignore_index) -> Tensor");
  // The public operators of token values: lossops/_ops/row_values.py composes them of
  // token_values_forward.
  m.def(
      "selective_log_softmax(Tensor logits, Tensor index, float temperature=1.0, "
      "Tensor? row_mask=None, *, float logit_scale=1.0, float? softcap=None) -> Tensor");
  m.def(
      "entropy_from_logits(Tensor logits, int? chunk_size=None, *, float temperature=1.0, "
      "float logit_scale=1.0, float? softcap=None) -> Tensor");
  m.def(
      "selective_log_softmax_and_entropy(Tensor logits, Tensor index, "
      "bool entropy_requires_grad=True, float temperature=1.0, Tensor? row_mask=None, *, "
      "float logit_scale=1.0, float? softcap=None) -> (Tensor log_probs, Tensor entropy)");
  m.def(
      "token_values_forward(Tensor logits, Tensor? index, Tensor? row_mask, float temperature, "
      "float logit_scale, float? softcap, bool has_entropy, bool has_lse, bool keeps_stats) "
      "-> (Tensor log_probs, Tensor entropy, Tensor lse, Tensor row_stats)");
  m.def(
      "token_values_backward(Tensor? grad_log_probs, Tensor? grad_entropy, Tensor? grad_lse, "
      "Tensor logits, Tensor? index, Tensor? row_mask, Tensor row_stats, float temperature, float "
      "logit_scale, "
      "float? softcap, bool has_entropy, bool has_lse, bool[] output_mask) -> Tensor[]");
  m.def(
      "token_values_backward_inplace(Tensor(a!) logits, Tensor? grad_log_probs, "
      "Tensor? grad_entropy, Tensor? grad_lse, Tensor? index, Tensor? row_mask, Tensor row_stats, "
      "float temperature, float logit_scale, float? softcap, bool has_entropy, bool has_lse) "
      "-> ()");
  return m.text;
}

// What no graph holds.
void define_questions(torch::stable::detail::StableLibrary& m) {
  m.def("schemas() -> str");
  m.def(
      "cross_entropy_plan(Tensor input, Tensor target, Tensor? weight=None, *, "
      "str reduction=\"mean\", float label_smoothing=0.0, bool gradient=False, str device=\"\") "
      "-> str");
  m.def("cross_entropy_plan_table(str device=\"\") -> str");
  m.def("build_info() -> str");
  m.def("cuda_problem() -> str");
}

// The same functions serve both devices.
void implement_ops(torch::stable::detail::StableLibrary& m) {
#define LOSSOPS_ROW(name, Loss) LOSSOPS_OPS(name, Loss)::implement(m);
  LOSSOPS_ELEMENTWISE_LOSSES(LOSSOPS_ROW)
#undef LOSSOPS_ROW
  m.impl("cross_entropy", TORCH_BOX(&cross_entropy));
  m.impl("cross_entropy_forward", TORCH_BOX(&cross_entropy_forward));
  m.impl("cross_entropy_value", TORCH_BOX(&cross_entropy_value));
  m.impl("cross_entropy_forward_gradient", TORCH_BOX(&cross_entropy_forward_gradient));
  m.impl("cross_entropy_forward_inplace", TORCH_BOX(&cross_entropy_forward_inplace));
  m.impl("cross_entropy_backward", TORCH_BOX(&cross_entropy_backward));
  m.impl("cross_entropy_backward_kept", TORCH_BOX(&cross_entropy_backward_kept));
  m.impl("cross_entropy_backward_inplace", TORCH_BOX(&cross_entropy_backward_inplace));
  m.impl("scale_kept", TORCH_BOX(&scale_kept));
  m.impl("first_invalid_target", TORCH_BOX(&first_invalid_target));
  m.impl("token_values_forward", TORCH_BOX(&token_values_forward));
  m.impl("token_values_backward", TORCH_BOX(&token_values_backward));
  m.impl("token_values_backward_inplace", TORCH_BOX(&token_values_backward_inplace));
}

}  // namespace
}  // namespace lossops::bindings

STABLE_TORCH_LIBRARY(lossops, m) { lossops::bindings::define_questions(m); }

STABLE_TORCH_LIBRARY_IMPL(lossops, CompositeExplicitAutograd, m) {
  m.impl("schemas", TORCH_BOX(&lossops::bindings::schemas));
  m.impl("cross_entropy_plan", TORCH_BOX(&lossops::bindings::cross_entropy_plan));
  m.impl("cross_entropy_plan_table", TORCH_BOX(&lossops::bindings::cross_entropy_plan_table));
  m.impl("build_info", TORCH_BOX(&lossops::bindings::build_info));
  m.impl("cuda_problem", TORCH_BOX(&lossops::bindings::cuda_problem));
}

STABLE_TORCH_LIBRARY_IMPL(lossops, CPU, m) { lossops::bindings::implement_ops(m); }

// Registered without CUDA kernels too: the call then says what is missing.
STABLE_TORCH_LIBRARY_IMPL(lossops, CUDA, m) { lossops::bindings::implement_ops(m); }
