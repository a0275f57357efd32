// Gradients that are sums, of broadcast operands: where each sum goes, and the fold of those of
// which several tiles have parts (strip_sums.cuh).
#pragma once

#include <cstdint>

#include "kernels/elements/operands.h"
#include "kernels/elements/process.cuh"
#include "kernels/elements/strip_plan.h"
#include "kernels/grid/column_reduce.cuh"
#include "kernels/primitives/integers.h"
#include "strided.h"

namespace lossops::cuda {

// The element of a gradient that a sum belongs to.
struct GradientSink {
  IterationSpace space;  // of the dimensions that are kept
  Operand gradient;      // strides over them
  ElementScales scales;

  void add(int64_t size, int64_t stride) {
    space.sizes[space.ndim] = size;
    gradient.strides[space.ndim++] = stride;
    space.numel *= size;
  }
  __device__ void operator()(int64_t output, double sum) const {
    if (holds_gradients(scales)) {
      return;
    }
    const Operand* const operands[1] = {&gradient};
    int64_t offsets[1] = {};
    strided_offsets(space, operands, output, offsets);
    store_operand<double>(gradient, offsets[0], sum);
  }
};

inline GradientSink make_sink(const ElementScales& scales, const Operand& gradient) {
  GradientSink sink;
  sink.space.numel = 1;
  sink.gradient.data = gradient.data;
  sink.gradient.dtype = gradient.dtype;
  sink.scales = scales;
  return sink;
}

// Sums that several tiles have parts of.
struct SumParts {
  const void* data;
  DType dtype;
  int64_t sums;
  ElementScales scales;

  __device__ __forceinline__ double operator()(int64_t sum, int64_t part) const {
    // No part was written if the gradients are there.
    return holds_gradients(scales) ? 0 : load_as<double>(data, dtype, part * sums + sum);
  }
};

// Folds the parts of a plan's sums, and tells its kernel to write them.
class SumFold {
 public:
  // operands: of the launch.
  template <typename acc_t>
  SumFold(StripPlan& plan, const Operand* operands, const ElementScales& scales, double* parts,
          acc_t /*of the parts*/) {
    if (plan.splits == 1) {
      return;
    }
    const StripOperand& gradient = plan.operands[plan.summed_gradient];
    sink_ = make_sink(scales, operands[plan.summed_gradient]);
    for (int dim = 0; dim < plan.extents.ndim; ++dim) {
      if (plan.is_kept(dim)) {
        sink_.add(plan.extents.sizes[dim], gradient.strides[dim] / gradient.bytes);
      }
    }
    constexpr DType kDType = sizeof(acc_t) == 8 ? DType::kFloat64 : DType::kFloat32;
    parts_ = {parts, kDType, plan.sums, scales};
    splits_ = plan.splits;
    scratch_ = parts + doubles_of_parts(plan, acc_t());
    plan.sum_into(parts, kDType);
  }
  void launch(cudaStream_t stream) const {
    if (splits_ > 1) {
      column_reduce(parts_, sink_, parts_.sums, splits_, scratch_, stream);
    }
  }

  // Doubles of the parts, and of the reduction of many.
  template <typename acc_t>
  static int64_t scratch(const StripPlan& plan, acc_t like) {
    return plan.splits > 1 ? doubles_of_parts(plan, like) +
                                 ColumnReducePlan(plan.sums, plan.splits).scratch(plan.sums)
                           : 0;
  }

 private:
  template <typename acc_t>
  static int64_t doubles_of_parts(const StripPlan& plan, acc_t /*like*/) {
    return ceil_div(plan.splits * plan.sums, int64_t{sizeof(double) / sizeof(acc_t)});
  }

  GradientSink sink_;
  SumParts parts_ = {};
  int64_t splits_ = 1;
  double* scratch_ = nullptr;
};

}  // namespace lossops::cuda
