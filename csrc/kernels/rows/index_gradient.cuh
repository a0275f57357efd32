// The numbers that all gradients of a row with a class index are made of.
#pragma once

#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_pass.cuh"

namespace lossops::cuda {

// Cross entropy takes logits as they are.
struct NoMap {};

// What replace() of a LogitGradient takes of a row, and no more: kernels keep it of many rows in
// shared memory.
template <bool kExact>
struct LogitNumbers {
  float max;
  float factor;
  math::MultipleOfExp multiple;
  float lowest;

  LogitNumbers() = default;
  __device__ __forceinline__ explicit LogitNumbers(const LogitGradient<float, true>& of)
      : max(of.softmax.max), factor(of.softmax.factor), multiple(of.multiple), lowest(of.lowest) {}

  template <int kCount>
  __device__ __forceinline__ void replace(float (&x)[kCount]) const {
    LogitGradient<float, true> of;
    of.softmax.max = max;
    of.softmax.factor = factor;
    of.multiple = multiple;
    of.lowest = lowest;
    of.replace(x);
  }
  // The gradient at a logit above `lowest`.
  __device__ __forceinline__ float usual(float x) const { return multiple(x); }
  // Whether the gradients are 0 at all logits, because the grad_output or the weight is. A NaN
  // among the logits is one in the factor.
  __device__ __forceinline__ bool are_zero() const {
    return __float_as_uint(factor) == 0 && ::fabsf(max) < math::infinity<float>();
  }
};
template <>
struct LogitNumbers<false> {
  float scale;
  float offset;
  float factor;

  LogitNumbers() = default;
  __device__ __forceinline__ explicit LogitNumbers(const LogitGradient<float, false>& of)
      : scale(of.terms.scale), offset(of.terms.offset), factor(of.factor) {}

  template <int kCount>
  __device__ __forceinline__ void replace(float (&x)[kCount]) const {
    LogitGradient<float, false> of;
    of.terms.scale = scale;
    of.terms.offset = offset;
    of.factor = factor;
    of.replace(x);
  }
  // Gradients of half types are computed also where they are 0.
  __device__ __forceinline__ bool are_zero() const { return false; }
  __device__ __forceinline__ float usual(float x) const {
    float value[1] = {x};
    replace(value);
    return value[0];
  }
};

// What the gradients of a row are made of.
template <bool kExact>
struct IndexGradient {
  LogitNumbers<kExact> of_logit;
  float at_index;  // if the row has no loss, of all logits
  int index;       // negative: the row has no loss

  static __device__ __forceinline__ IndexGradient of(const LogitGradient<float, kExact>& gradient,
                                                     float at_index, int index) {
    // Else the compiler may choose between a number and another's negative, with the sign of a NaN.
    return {LogitNumbers<kExact>(gradient), unfolded(at_index), index};
  }
  static __device__ __forceinline__ IndexGradient without_loss(float value) {
    return {LogitNumbers<kExact>(LogitGradient<float, kExact>()), value, -1};
  }

  // Whether all gradients are 0, but for the class index's.
  __device__ __forceinline__ bool is_zero() const {
    return index >= 0 ? of_logit.are_zero() : at_index == 0.0f;
  }

  __device__ __forceinline__ GradientAtIndex<float> only_index() const { return {index, at_index}; }

  template <int kCount>
  __device__ __forceinline__ void replace(float (&x)[kCount], const NoMap& /*map*/ = {}) const {
    of_logit.replace(x);
    if (index < 0) {
      keep_apart();  // else a choice for each element
#pragma unroll
      for (float& value : x) {
        value = at_index;
      }
    }
  }
};

// What memory has of a row beside its logits: statistics that forward has left, the target, the
// grad_output. The offsets are those of the row.
struct IndexRowNumbers {
  int64_t index;  // as it is in memory
  float max;
  float rest;
  float scale;

  IndexRowNumbers() = default;
  __device__ __forceinline__ IndexRowNumbers(const CrossEntropyBackwardArgs& args, int64_t row,
                                             int64_t target_offset, int64_t grad_output_offset)
      : index(load_class_index(args.target, target_offset)) {
    const RowStats<float> stats(const_cast<void*>(args.row_stats), args.rows.numel);
    max = stats.max[row];
    rest = stats.rest[row];
    scale = row_scale<float>(args, grad_output_offset);
  }

  // logit_of(c): the logit of class c.
  template <bool kExact, typename LogitOf>
  __device__ __forceinline__ IndexGradient<kExact> gradient(const CrossEntropyBackwardArgs& args,
                                                            const LogitOf& logit_of) const {
    const RowTarget<float> target(args, index, 0);
    const RowGradient<float, false, kExact> gradient(
        args, target, kept_summary(max, rest, target, logit_of), scale);
    return target.has_loss() ? IndexGradient<kExact>::of(gradient.logit_gradient, gradient.at_index,
                                                         static_cast<int>(target.index))
                             : IndexGradient<kExact>::without_loss(gradient.without_loss());
  }
};

// The IndexGradient of a row.
template <bool kExact>
__device__ __forceinline__ IndexGradient<kExact> index_gradient(
    const CrossEntropyBackwardArgs& args, int64_t row, int64_t input_offset, int64_t target_offset,
    int64_t grad_output_offset) {
  const IndexRowNumbers numbers(args, row, target_offset, grad_output_offset);
  return numbers.gradient<kExact>(args, [&](int64_t c) {
    return load_operand<float>(args.input, input_offset + c * args.input_class_stride);
  });
}

}  // namespace lossops::cuda
