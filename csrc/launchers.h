// What both backends implement: raw pointers, sizes and an execution context in,
// nothing of torch. bindings/ fills these structs; kernels/ and cpu/ read them.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "losses/elementwise/registry.h"
#include "losses/rows/logit_map.h"
#include "scalar_types.h"

namespace lossops {

// torch's TensorIterator has the same bound.
constexpr int kMaxDims = 25;

enum class Reduction : int8_t {
  kNone,
  kMean,
  kSum
};  // batchmean is a mean with its own denominator

// A strided tensor over the sizes of the argument struct that holds it.
struct Operand {
  void* data = nullptr;  // null: absent
  DType dtype = DType::kFloat32;
  int64_t strides[kMaxDims] = {};  // elements; 0 along broadcast dimensions
};

// Dimension 0 is the fastest.
struct IterationSpace {
  int ndim = 0;
  int64_t sizes[kMaxDims] = {};
  int64_t numel = 0;
};

// ---------------------------------------------------------------- elementwise

struct ElementwiseArgs {
  ElementwiseLoss loss = ElementwiseLoss::mse_loss;
  LossParams params;
  Reduction reduction = Reduction::kMean;
  IterationSpace space;  // broadcast shape of input and target
  Operand input;
  Operand target;
  Operand weight;  // multiplies the loss of its element
  // Each operand is one dense run, all in the same order: element i of each is data[i]. Their
  // dtypes are floating, and may differ. grad_output of a reduction does not count.
  bool contiguous = false;
  bool acc_double = false;  // compute in fp64, else in fp32
  // Mean: the sum is divided by this, or by mean_terms[0] where weight is given.
  double denominator = 1;
  // How often each element of weight occurs in the broadcast shape. 0: the shape is empty and
  // weight is not; denominator holds then.
  double weight_copies = 1;
};

struct ElementwiseForwardArgs : ElementwiseArgs {
  Operand output;                // none: the shape of space; else one element
  double* mean_terms = nullptr;  // out, (2,): denominator, mean; weighted mean only
  // Gradients for a grad_output of 1; null: not wanted. Reductions only, no weighted mean. CUDA: of
  // a broadcast operand too, with strides 0 along the dimensions that are summed over. CPU: only of
  // operands that have as many elements as the space.
  Operand grad_input;
  Operand grad_target;
};

struct ElementwiseBackwardArgs : ElementwiseArgs {
  Operand grad_output;  // strides 0 for a reduction; null: 1
  // The gradients hold those for a grad_output of 1: nothing to do where it is 1.
  bool kept = false;
  const double* mean_terms = nullptr;  // (2,), from forward; weighted mean only
  // If false, no gradient depends on input, and a launcher may leave it unread.
  bool takes_input = true;
  // Null where not wanted. A gradient whose operand is broadcast has its own launcher.
  Operand grad_input;
  Operand grad_target;
  Operand grad_weight;
};

// A gradient of ElementwiseBackwardArgs that is summed over the dimensions along which its operand
// was broadcast, where its strides are 0. CUDA: others may be beside it, or in its place. CPU: one
// alone; dimensions [0, num_kept) of space are the gradient's own, the rest are summed over.
struct ElementwiseBackwardReduceArgs : ElementwiseBackwardArgs {
  int num_kept = 0;
};

// A dense tensor that is multiplied by one number, in place; nothing to do where that is 1.
struct ScaleArgs {
  void* data = nullptr;
  DType dtype = DType::kFloat32;
  int64_t numel = 0;
  const void* factor = nullptr;
  DType factor_dtype = DType::kFloat32;
};

// -------------------------------------------------------------- cross entropy

struct CrossEntropyArgs {
  Reduction reduction = Reduction::kMean;
  // One row of logits per element of the target's shape, numbered in that shape's
  // row-major order.
  IterationSpace rows;
  int64_t num_classes = 0;
  Operand input;  // strides over rows
  int64_t input_class_stride = 1;
  Operand target;  // class indices (int64, int32, uint8), or probabilities
  bool target_is_probability = false;
  int64_t target_class_stride = 0;  // probabilities only
  const void* weight = nullptr;     // (C,), any stride
  DType weight_dtype = DType::kFloat32;
  int64_t weight_stride = 1;
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  bool acc_double = false;

  // Coefficients of more than one class per row: {max, sum, Q} are kept, else {max, sum}.
  LOSSOPS_HOST_DEVICE bool dense() const { return target_is_probability || label_smoothing > 0; }
};

struct CrossEntropyForwardArgs : CrossEntropyArgs {
  Operand output;  // none: strides over rows; else one element
  // Out, (2 or 3, rows) of acc_t: max, sum, Q; null: no backward pass will come, or it will need
  // none, as CrossEntropyPlan::needs_row_stats says.
  void* row_stats = nullptr;
  double* mean_terms = nullptr;  // out, (2,): denominator, mean; mean only
  // One element, in the memory of the tensors: what the gradient of a mean is divided by, where the
  // rows are a part of those that the mean is of. The loss is then their sum. Null: all rows.
  const double* denominator = nullptr;
  // The gradient for a grad_output of 1; null: not wanted. Reductions only. May be the input
  // itself, with the input's strides.
  Operand grad_input;
  int64_t grad_input_class_stride = 1;
  // Out, CPU only: the first row whose class index is out of range, or -1.
  int64_t* first_invalid_row = nullptr;

  // The gradient takes the place of the logits.
  LOSSOPS_HOST_DEVICE bool is_in_place() const {
    return grad_input.data != nullptr && grad_input.data == input.data;
  }
};

struct CrossEntropyBackwardArgs : CrossEntropyArgs {
  Operand grad_output;  // none: strides over rows; else strides 0; null: 1
  // grad_input holds the gradient for a grad_output of 1: nothing to do where it is 1.
  bool kept = false;
  const void* row_stats = nullptr;     // null: kept, and the plan of its forward needs none
  const double* mean_terms = nullptr;  // (2,), from forward; mean only
  // Strides over rows; null: not wanted. May be the input itself, with the input's strides, where
  // no other gradient is wanted: what a row needs of its logits must be read before it is written.
  Operand grad_input;
  int64_t grad_input_class_stride = 1;
  Operand grad_target;  // probabilities only; null: not wanted
  int64_t grad_target_class_stride = 1;
  // (C,) contiguous, weight_dtype; probabilities only; null: not wanted
  void* grad_weight = nullptr;
};

// --------------------------------------------------------------------- tokens

// Log-probabilities of num_indices classes a row, its entropy and the log of its sum of
// exponentials, lse; see losses/rows/tokens.h.
struct TokenArgs {
  IterationSpace rows;  // the shape of the logits without classes
  int64_t num_classes = 0;
  Operand input;  // logits; strides over rows
  int64_t input_class_stride = 1;
  LogitMapParams map;
  Operand index;  // int64, int32 or uint8; null: no log-probabilities
  int64_t num_indices = 0;
  int64_t index_stride = 0;  // from one index of a row to its next
  // Integers, floating-point numbers or bools; 0: the row's values and gradients are 0, whatever
  // its logits are. Null: all rows count.
  Operand row_mask;
  bool has_entropy = false;
  bool acc_double = false;
};

struct TokenForwardArgs : TokenArgs {
  Operand log_probs;  // (rows, num_indices); strides over rows
  int64_t log_probs_stride = 1;
  Operand entropy;  // null: not wanted
  Operand lse;      // likewise
  // Out, (3, rows) of acc_t: max, rest, D; null: no backward pass will come.
  void* row_stats = nullptr;
  // Out, CPU only: the first row with an index out of range, or -1.
  int64_t* first_invalid_row = nullptr;
};

struct TokenBackwardArgs : TokenArgs {
  Operand grad_log_probs;  // null: none
  int64_t grad_log_probs_stride = 1;
  Operand grad_entropy;  // null: none
  Operand grad_lse;      // null: none
  const void* row_stats = nullptr;
  Operand grad_input;  // may be the input itself, with the input's strides
  int64_t grad_input_class_stride = 1;

  // The gradient takes the place of the logits.
  bool is_in_place() const { return grad_input.data == input.data; }
};

// What a backend decides about a forward pass, once a call, from everything but the memory that the
// plan itself asks for: row_stats, mean_terms and scratch.
class CrossEntropyPlan {
 public:
  int64_t scratch = 0;  // doubles
  // Whether a gradient that forward leaves takes row_stats: on its way, or to compute it again.
  bool needs_row_stats = true;

  // The backend's own decision.
  template <typename T>
  void keep(const T& decision) {
    static_assert(sizeof(T) <= sizeof(kept_) && std::is_trivially_copyable_v<T>);
    std::memcpy(kept_, &decision, sizeof(T));
  }
  template <typename T>
  T kept() const {
    T decision;
    std::memcpy(&decision, kept_, sizeof(T));
    return decision;
  }

 private:
  alignas(8) unsigned char kept_[192];
};

// What forward was asked for that left the gradient which a backward pass has kept.
inline CrossEntropyForwardArgs forward_of(const CrossEntropyBackwardArgs& args) {
  CrossEntropyForwardArgs forward;
  static_cast<CrossEntropyArgs&>(forward) = args;
  forward.grad_input = args.grad_input;
  forward.grad_input_class_stride = args.grad_input_class_stride;
  return forward;
}

// --------------------------------------------------------------- the backends

// A launcher that needs scratch has a companion that says how many doubles.
#define LOSSOPS_DECLARE_LAUNCHERS(Context)                                                       \
  int64_t elementwise_forward_scratch(const ElementwiseForwardArgs& args);                       \
  void launch_elementwise_forward(const ElementwiseForwardArgs& args, double* scratch, Context); \
  void launch_elementwise_backward(const ElementwiseBackwardArgs& args, Context);                \
  int64_t elementwise_backward_reduce_scratch(const ElementwiseBackwardReduceArgs& args);        \
  void launch_elementwise_backward_reduce(const ElementwiseBackwardReduceArgs& args,             \
                                          double* scratch, Context);                             \
  void launch_scale(const ScaleArgs& args, Context);                                             \
  CrossEntropyPlan plan_cross_entropy_forward(const CrossEntropyForwardArgs& args);              \
  void launch_cross_entropy_forward(const CrossEntropyForwardArgs& args,                         \
                                    const CrossEntropyPlan& plan, double* scratch, Context);     \
  int64_t cross_entropy_backward_scratch(const CrossEntropyBackwardArgs& args);                  \
  void launch_cross_entropy_backward(const CrossEntropyBackwardArgs& args, double* scratch,      \
                                     Context);                                                   \
  int64_t token_forward_scratch(const TokenForwardArgs& args);                                   \
  void launch_token_forward(const TokenForwardArgs& args, double* scratch, Context);             \
  int64_t token_backward_scratch(const TokenBackwardArgs& args);                                 \
  void launch_token_backward(const TokenBackwardArgs& args, double* scratch, Context);           \
  /* Writes the first row whose class index is out of range, or -1, to *result. */               \
  void launch_first_invalid_target(const CrossEntropyArgs& args, int64_t* result, Context);

namespace cuda {

// A cudaStream_t. Launch errors are thrown as std::runtime_error.
using Context = void*;
LOSSOPS_DECLARE_LAUNCHERS(Context)

// Why this process cannot use CUDA, in one sentence; empty where it can.
std::string why_unusable();

// JSON, in builds without CUDA too: the kernels that would take a call on a device, and why; all
// kernels of cross entropy, and the numbers of classes at which one ends and the next begins.
// device: a name that the table lists, or empty: the current one.
std::string explain_cross_entropy(const CrossEntropyForwardArgs& args, const std::string& device);
std::string explain_cross_entropy_table(const std::string& device);

}  // namespace cuda

namespace cpu {

// Runs body(data, begin, end) over [0, count) in parallel, in any split.
struct Context {
  void (*parallel_for)(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t),
                       void* data);
};
LOSSOPS_DECLARE_LAUNCHERS(Context)

}  // namespace cpu

#undef LOSSOPS_DECLARE_LAUNCHERS

}  // namespace lossops
