// Forward of tokens: the kernel that merges the states of each row's pieces, and writes the values.
#pragma once

#include <cstdint>

#include "cross_entropy_row.h"
#include "kernels/grid/launch.cuh"
#include "kernels/rows/entropy_row.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "launchers.h"
#include "losses/rows/tokens.h"
#include "strided.h"

namespace lossops::cuda {

// The dtype of statistics.
LOSSOPS_HOST_DEVICE DType stats_dtype(const TokenArgs& args) {
  return args.input.dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

// Values of rows and their gradients have the dtype of statistics. A switch over all dtypes would
// be a KB of code at each of their loads and stores.
__device__ __forceinline__ double load_value(const TokenArgs& args, const Operand& operand,
                                             int64_t offset) {
  return load_as<double>(operand.data, stats_dtype(args), offset);
}
__device__ __forceinline__ void store_value(const TokenArgs& args, const Operand& operand,
                                            int64_t offset, double value) {
  store_as(operand.data, stats_dtype(args), offset, value);
}

// The mapped logit of a class, as its pass has computed it.
__device__ __forceinline__ double mapped_logit(const TokenArgs& args, const RowSource& source,
                                               int64_t offset) {
  double z = 0;
  const auto map_as = [&](auto like) {
    using acc_t = decltype(like);
    const auto x = load_operand<acc_t>(source.input, offset);
    visit_logit_map<acc_t>(args.map, [&](const auto& map) { z = map.map(x); });
  };
  source.input.dtype == DType::kFloat64 ? map_as(double()) : map_as(float());
  return z;
}

// Merges the states of each row's pieces, writes its statistics where a backward pass will come,
// its log-probabilities, entropy and lse. Log-probabilities of class indices out of range are NaN.
// lanes: lanes_for(). What a row takes is computed in fp64: a kernel for all dtypes.
static __global__ void __launch_bounds__(kRowThreads)
    token_values_kernel(const __grid_constant__ TokenForwardArgs args,
                        const __grid_constant__ RowSource source,
                        const __grid_constant__ RowGrid grid, int pieces, int lanes,
                        const void* states) {
  const uint32_t group = group_of_thread(lanes);
  const RowGrid::Place place = grid.place(group);
  const bool is_double = args.input.dtype == DType::kFloat64;
  wait_for_previous_kernel();
  const auto state = merge_states<EntropySoftmax<double>>(pieces, lanes, [&](int piece) {
    const int64_t i = place.row * pieces + piece;
    if (is_double) {
      return static_cast<const EntropySoftmax<double>*>(states)[i];
    }
    const auto own = static_cast<const EntropySoftmax<float>*>(states)[i];
    EntropySoftmax<double> result;
    result.max = own.max;
    result.ones = own.ones;
    result.below = own.below;
    result.distance = own.distance;
    return result;
  });
  if (group >= grid.groups) {
    return;
  }
  const bool counts = source.counts(place);
  TokenStats<double> stats = {};
  if (counts) {
    stats = {state.max, state.rest(), args.entropy.data != nullptr ? state.mean_distance() : 0.0};
  }
  const TokenNormalizer<double> normalizer = stats.normalizer();
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
#pragma unroll 1
  for (int64_t k = lane; k < args.num_indices; k += lanes) {
    double log_prob = 0;
    if (counts) {
      const int64_t c =
          load_class_index(args.index, place.offset(args.index) + k * args.index_stride);
      log_prob = math::quiet_nan<double>();
      if (c >= 0 && c < args.num_classes) {
        log_prob = normalizer.log_prob(
            mapped_logit(args, source, place.offset(source.input) + c * source.class_stride));
      }
    }
    store_value(args, args.log_probs, place.offset(args.log_probs) + k * args.log_probs_stride,
                log_prob);
  }
  if (lane == 0) {
    if (args.entropy.data != nullptr) {
      store_value(args, args.entropy, place.offset(args.entropy),
                  counts ? normalizer.entropy() : 0.0);
    }
    if (args.lse.data != nullptr) {
      store_value(args, args.lse, place.offset(args.lse), counts ? normalizer.lse() : 0.0);
    }
    if (args.row_stats != nullptr) {
      const DType dtype = stats_dtype(args);
      store_as(args.row_stats, dtype, place.row, stats.max);
      store_as(args.row_stats, dtype, args.rows.numel + place.row, stats.rest);
      store_as(args.row_stats, dtype, 2 * args.rows.numel + place.row, stats.mean_distance);
    }
  }
}

}  // namespace lossops::cuda
