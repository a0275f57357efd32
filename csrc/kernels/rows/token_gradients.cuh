// Backward of tokens: what the gradient of a row is made of, the functors of gradients for
// row_pass.cuh and flat_gradients.cuh, and the kernels before and after these. Only token_rows.cu
// includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/grid/launch.cuh"
#include "kernels/rows/flat_gradients.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "kernels/rows/token_values.cuh"
#include "launchers.h"
#include "losses/rows/tokens.h"

namespace lossops::cuda {

// The class index k of a row, and its gradient; operands are those of a slice.
__device__ __forceinline__ int64_t load_index(const TokenBackwardArgs& args,
                                              const RowGrid::Place& place, int64_t k) {
  return load_class_index(args.index, place.offset(args.index) + k * args.index_stride);
}
__device__ __forceinline__ double load_grad(const TokenBackwardArgs& args,
                                            const RowGrid::Place& place, int64_t k) {
  return load_value(args, args.grad_log_probs,
                    place.offset(args.grad_log_probs) + k * args.grad_log_probs_stride);
}

// The gradient of a row's entropy or lse.
__device__ __forceinline__ double load_row_grad(const TokenBackwardArgs& args,
                                                const RowGrid::Place& place, const Operand& grad) {
  return grad.data != nullptr ? load_value(args, grad, place.offset(grad)) : 0.0;
}

// So few class indices are added up by a thread, one after the other; more by a warp.
constexpr int64_t kFewIndices = 32;

// What the gradient of a row that counts is made of. By all lanes of a warp, if the row has more
// than kFewIndices. What a row takes is computed in fp64, as in token_values_kernel.
__device__ __forceinline__ TokenGradient<double> load_gradient(const TokenBackwardArgs& args,
                                                               const RowGrid::Place& place) {
  double of_softmax = 0;
  const int64_t count = args.grad_log_probs.data != nullptr ? args.num_indices : 0;
  const bool is_shared = args.num_indices > kFewIndices;
#pragma unroll 1
  for (int64_t k = is_shared ? threadIdx.x % kWarpSize : 0; k < count;
       k += is_shared ? kWarpSize : 1) {
    const int64_t c = load_index(args, place, k);
    of_softmax -=
        c >= 0 && c < args.num_classes ? load_grad(args, place, k) : math::quiet_nan<double>();
  }
  of_softmax = is_shared ? warp_sum(of_softmax) : of_softmax;
  of_softmax += load_row_grad(args, place, args.grad_lse);
  const auto kept = [&](int64_t plane) {
    return load_as<double>(args.row_stats, stats_dtype(args), plane * args.rows.numel + place.row);
  };
  return TokenGradient<double>::of({kept(0), kept(1), kept(2)}, of_softmax,
                                   load_row_grad(args, place, args.grad_entropy));
}

// TokenGradient::of_class() in few operations.
constexpr int kGradientNumbers = 4;
template <typename scalar_t>
struct TokenLogitGradient {
  using acc_t = acc_type_t<scalar_t>;
  using Term = RowTerm<scalar_t>;
  acc_t max = 0;
  acc_t mean_distance = 0;
  acc_t of_softmax = 0;  // over the sum of exponentials
  acc_t of_entropy = 0;  // likewise
  static_assert(kGradientNumbers == 4, "the four above");

  template <int kCount, typename Map>
  __device__ __forceinline__ void replace(acc_t (&x)[kCount], const Map& map) const {
#pragma unroll
    for (acc_t& value : x) {
      value = of_mapped(map.map(value)) * map.derivative(value);
    }
  }

 private:
  __device__ __forceinline__ acc_t of_mapped(acc_t z) const {
    const acc_t difference = Term::bounded((z - max) * Term::kPerUnit);
    const acc_t below_mean = -Term::kUnit * difference - mean_distance;
    return Term::exp(difference) * (of_softmax + of_entropy * below_mean);
  }
};

// Those that token_gradients_kernel has left, (rows,).
template <typename scalar_t>
struct TokenGradients {
  using Gradient = TokenLogitGradient<scalar_t>;
  const Gradient* of_rows;

  __device__ __forceinline__ bool begin() const { return true; }
  __device__ __forceinline__ Gradient of(const RowGrid::Place& place) const {
    return of_rows[place.row];
  }
  __device__ __forceinline__ void finish(const RowGrid::Place&, const RowPart&,
                                         const Gradient&) const {}
};

// The numbers of a TokenLogitGradient.
__device__ __forceinline__ void numbers_of(const TokenGradient<double>& gradient,
                                           double (&numbers)[kGradientNumbers]) {
  numbers[0] = gradient.stats.max;
  numbers[1] = gradient.stats.mean_distance;
  numbers[2] = gradient.of_softmax * gradient.inverse_sum;
  numbers[3] = gradient.of_entropy * gradient.inverse_sum;
}

// The gradient at a class index of logit z after the map; slope: of the map; sum: of the gradients
// of its log-probabilities.
__device__ __forceinline__ double gradient_at(const TokenGradient<double>& gradient, double z,
                                              double slope, double sum) {
  return gradient.at_index(z, sum, gradient.of_softmax + sum) * slope;
}

// Leaves what the kernels of gradients take of each row, (rows,) TokenLogitGradient. lanes: of a
// row; a warp, if it has more than kFewIndices.
static __global__ void __launch_bounds__(kRowThreads)
    token_gradients_kernel(const __grid_constant__ TokenBackwardArgs args,
                           const __grid_constant__ RowSource source,
                           const __grid_constant__ RowGrid grid, int lanes, void* of_rows) {
  let_next_kernel_start();
  const uint32_t group = group_of_thread(lanes);
  const RowGrid::Place place = grid.place(group);
  const TokenGradient<double> gradient = load_gradient(args, place);
  if ((threadIdx.x & (lanes - 1)) == 0 && group < grid.groups) {
    const bool counts = source.counts(place);
    double numbers[kGradientNumbers];
    numbers_of(gradient, numbers);
#pragma unroll
    for (int i = 0; i < kGradientNumbers; ++i) {
      store_as(of_rows, stats_dtype(args), place.row * kGradientNumbers + i,
               counts ? numbers[i] : 0.0);
    }
  }
}

// What token_classes_kernel does with the gradients at class indices. In place, they are computed
// before the other gradients are written over the logits, and kept until these are.
enum class AtIndices : int8_t { kRewrite, kKeep, kRestore };

// Lanes that share the class indices of a row: a warp, if there are more than kFewIndices; else
// about one for five indices, because each lane repeats the work that a row has beside them. Step
// of 157 classes with 20 indices: 1.9 ms in this kernel, 2.8 with a lane for each index (H200,
// 2026-11).
inline int lanes_of_indices(int64_t num_indices) {
  return num_indices > kFewIndices
             ? kWarpSize
             : merging_lanes(static_cast<int>(std::max<int64_t>(num_indices / 5, 1)));
}

// Rewrites the gradients at class indices. Those of repeated indices add up: the first of them
// writes the sum. Like token_values_kernel for all dtypes. lanes: lanes_of_indices(). kept:
// (rows, indices), unless kRewrite.
static __global__ void __launch_bounds__(kRowThreads)
    token_classes_kernel(const __grid_constant__ TokenBackwardArgs args,
                         const __grid_constant__ RowSource source,
                         const __grid_constant__ RowGrid grid, int lanes, AtIndices todo,
                         double* kept) {
  const uint32_t group = group_of_thread(lanes);
  const RowGrid::Place place = grid.place(group);
  const TokenGradient<double> gradient = load_gradient(args, place);
  wait_for_previous_kernel();
  if (group >= grid.groups || !source.counts(place)) {
    return;
  }
#pragma unroll 1
  for (int64_t k = threadIdx.x & (lanes - 1); k < args.num_indices; k += lanes) {
    const int64_t c = load_index(args, place, k);
    if (c < 0 || c >= args.num_classes) {
      continue;
    }
    double sum = 0;
    bool is_first = true;
#pragma unroll 1
    for (int64_t other = 0; other < args.num_indices; ++other) {
      if (load_index(args, place, other) == c) {
        is_first = is_first && other >= k;
        sum += load_grad(args, place, other);
      }
    }
    if (is_first) {
      double value = 0;
      if (todo == AtIndices::kRestore) {
        value = kept[place.row * args.num_indices + k];
      } else {
        const int64_t offset = place.offset(source.input) + c * source.class_stride;
        const auto x = load_operand<double>(source.input, offset);
        double slope = 0;
        visit_logit_map<double>(args.map, [&](const auto& map) { slope = map.derivative(x); });
        value = gradient_at(gradient, mapped_logit(args, source, offset), slope, sum);
      }
      if (todo == AtIndices::kKeep) {
        kept[place.row * args.num_indices + k] = value;
      } else {
        store_operand(args.grad_input,
                      place.offset(args.grad_input) + c * args.grad_input_class_stride, value);
      }
    }
  }
}

// TokenLogitGradient of a short row, for flat_gradients_kernel: by a thread, with the gradient at
// the class index, if a row has one.
template <typename scalar_t>
struct FlatTokenGradient {
  static constexpr int kDoesNotCount = -2;
  using acc_t = acc_type_t<scalar_t>;
  TokenLogitGradient<scalar_t> of_logit;
  acc_t at_index;
  int index;

  template <int kCount, typename Map>
  __device__ __forceinline__ void replace(acc_t (&x)[kCount], const Map& map) const {
    of_logit.replace(x, map);
    if (index == kDoesNotCount) {
#pragma unroll
      for (acc_t& value : x) {
        value = 0;
      }
    }
  }
};

// As token_gradients_kernel and token_classes_kernel, with types that are known: a switch over
// dtypes and the constants of a map would take most of a short row's time.
template <typename scalar_t>
struct FlatTokenGradients {
  using Gradient = FlatTokenGradient<scalar_t>;
  using acc_t = acc_type_t<scalar_t>;
  TokenBackwardArgs args;  // operands are those of a slice
  RowSource source;
  RowType<scalar_t> type;
  LinearMap<acc_t> map;
  LinearMap<double> wide_map;  // the same in fp64
  // What token_gradients_kernel has left of each row; null: threads compute it themselves. See
  // takes_numbers().
  const TokenLogitGradient<scalar_t>* of_rows;

  __device__ __forceinline__ bool begin() const { return true; }

  __device__ __forceinline__ Gradient of(const RowGrid::Place& place) const {
    Gradient result{{}, acc_t(0), Gradient::kDoesNotCount};
    if (!source.counts(place)) {
      return result;
    }
    result.index = -1;
    if (of_rows != nullptr) {
      result.of_logit = of_rows[place.row];
      return result;
    }
    const TokenGradient<double> gradient = load_gradient(args, place);
    double numbers[kGradientNumbers];
    numbers_of(gradient, numbers);
    result.of_logit.max = static_cast<acc_t>(numbers[0]);
    result.of_logit.mean_distance = static_cast<acc_t>(numbers[1]);
    result.of_logit.of_softmax = static_cast<acc_t>(numbers[2]);
    result.of_logit.of_entropy = static_cast<acc_t>(numbers[3]);
    if (args.grad_log_probs.data != nullptr && args.num_indices == 1) {
      const int64_t c = load_index(args, place, 0);
      if (c >= 0 && c < args.num_classes) {
        const auto* const logits = static_cast<const scalar_t*>(source.input.data);
        const scalar_t logit = logits[place.offset(source.input) + c * source.class_stride];
        const acc_t x =
            type.visit([&](auto like) { return to_acc<acc_t>(bits_as<decltype(like)>(logit)); });
        result.index = static_cast<int>(c);
        result.at_index = static_cast<acc_t>(
            gradient_at(gradient, map.map(x), wide_map.derivative(x), load_grad(args, place, 0)));
      }
    }
    return result;
  }
};

// Longer rows, of more bytes, take row_gradients_kernel. Its kernels around it cost too much for
// short rows: rows of 26 bytes were at .01 of the floor, of 664 at .11 (step, H200, 2026-11). The
// bound is a choice, not measured.
constexpr int64_t kMostFlatTokenBytes = 4096;

}  // namespace lossops::cuda
