// Backward of tokens: what the gradient of a row is made of, the functors of gradients for
// row_pass.cuh and short_gradients.cuh, and the kernels before and after these. Only token_rows.cu
// includes this.
#pragma once

#include <cstdint>

#include "kernels/grid/launch.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "kernels/rows/short_gradients.cuh"
#include "kernels/rows/token_values.cuh"
#include "launchers.h"
#include "losses/rows/tokens.h"

namespace lossops::cuda {

// The class index k of a row; operands are those of a slice.
__device__ __forceinline__ int64_t load_index(const TokenBackwardArgs& args,
                                              const RowGrid::Place& place, int64_t k) {
  return load_class_index(args.index, place.offset(args.index) + k * args.index_stride);
}
// The gradient of the log-probability of class index k. acc_t: the dtype of statistics.
template <typename acc_t>
__device__ __forceinline__ acc_t load_grad(const TokenBackwardArgs& args,
                                           const RowGrid::Place& place, int64_t k) {
  const Operand& grads = args.grad_log_probs;
  return static_cast<const acc_t*>(
      grads.data)[place.offset(grads) + k * args.grad_log_probs_stride];
}

// The gradient of a row's entropy or lse.
template <typename acc_t>
__device__ __forceinline__ acc_t load_row_grad(const RowGrid::Place& place, const Operand& grad) {
  return grad.data != nullptr ? static_cast<const acc_t*>(grad.data)[place.offset(grad)] : acc_t(0);
}

// Class indices whose gradients a lane adds up at a time, and the lanes that share those of a row.
constexpr int kLaneIndices = 2;
inline int lanes_of_sum(int64_t num_indices) {
  return lanes_for(ceil_div(num_indices, int64_t{kLaneIndices}));
}

// What a class index takes from TokenGradient::of_softmax. grad: of its log-probability. NaN if the
// index is out of range.
template <typename acc_t>
__device__ __forceinline__ acc_t grad_in_range(const TokenBackwardArgs& args, int64_t c,
                                               acc_t grad) {
  return c >= 0 && c < args.num_classes ? grad : math::quiet_nan<acc_t>();
}

// TokenGradient::of_softmax of a row, in each of the lanes_of_sum() that share it, in fp64: it
// nearly cancels the grad_log_probs of a class. NaN if a class index is out of range. By all lanes
// of a warp.
template <typename acc_t>
__device__ __forceinline__ double gradient_of_softmax(const TokenBackwardArgs& args,
                                                      const RowGrid::Place& place, int lane,
                                                      int lanes) {
  double sum = 0;
  const double of_lse = load_row_grad<acc_t>(place, args.grad_lse);
  const int64_t count = args.grad_log_probs.data != nullptr ? args.num_indices : 0;
#pragma unroll 1
  for (int64_t first = lane; first < count; first += kLaneIndices * lanes) {
#pragma unroll
    for (int u = 0; u < kLaneIndices; ++u) {
      const int64_t k = first + u * lanes;
      if (k < count) {
        const int64_t c = load_index(args, place, k);
        sum -= grad_in_range(args, c, load_grad<acc_t>(args, place, k));
      }
    }
  }
#pragma unroll 1
  for (int bit = lanes / 2; bit > 0; bit /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, bit);
  }
  return sum + of_lse;
}

// What a row's gradient takes from memory besides of_softmax: its statistics and grad_entropy.
template <typename acc_t>
struct TokenNumbers {
  TokenStats<acc_t> stats;
  acc_t of_entropy;

  TokenNumbers() = default;
  __device__ __forceinline__ TokenNumbers(const TokenBackwardArgs& args,
                                          const RowGrid::Place& place)
      : of_entropy(load_row_grad<acc_t>(place, args.grad_entropy)) {
    const auto* const kept = static_cast<const acc_t*>(args.row_stats) + place.row;
    stats = {kept[0], kept[args.rows.numel], kept[2 * args.rows.numel]};
  }
  __device__ __forceinline__ TokenGradient<acc_t> gradient(acc_t of_softmax) const {
    return TokenGradient<acc_t>::of(stats, of_softmax, of_entropy);
  }
};

// The gradient with respect to the logit of a class index. z: the mapped logit; slope: the map's
// derivative there; sum: of the grad_log_probs of that class; of_softmax: gradient_of_softmax().
template <typename acc_t>
__device__ __forceinline__ acc_t gradient_at(const TokenNumbers<acc_t>& row, acc_t z, acc_t slope,
                                             double sum, double of_softmax) {
  const auto common = static_cast<acc_t>(of_softmax + sum);
  return row.gradient(common).at_index(z, static_cast<acc_t>(sum), common) * slope;
}

// TokenGradient::of_class() in few operations: exp(z - max) (at_max + per_unit (z - max) / unit)
// with
//   at_max = (of_softmax - of_entropy mean_distance) / sum, per_unit = -of_entropy unit / sum,
// unit: RowTerm's.
constexpr int kGradientNumbers = 3;
template <typename scalar_t>
struct TokenLogitGradient {
  using acc_t = acc_type_t<scalar_t>;
  using Term = RowTerm<scalar_t>;
  acc_t max = 0;
  acc_t at_max = 0;
  acc_t per_unit = 0;

  template <int kCount, typename Map>
  __device__ __forceinline__ void replace(acc_t (&x)[kCount], const Map& map) const {
#pragma unroll
    for (acc_t& value : x) {
      value = of_mapped(map.map(value)) * map.derivative(value);
    }
  }

 private:
  __device__ __forceinline__ acc_t of_mapped(acc_t z) const {
    const acc_t difference = Term::bounded(mapped_difference(z, max) * Term::kPerUnit);
    return Term::exp(difference) * math::product_plus(per_unit, difference, at_max);
  }
};

static_assert(sizeof(TokenLogitGradient<float>) == kGradientNumbers * sizeof(float));

// The TokenLogitGradient of each row, (rows,), as token_gradients_kernel has left it.
template <typename scalar_t>
struct TokenGradients {
  using Gradient = TokenLogitGradient<scalar_t>;
  static constexpr int kPartVectors = 128;
  // With 5 and 6, the step of fp16 300000x2100 padded by 3 is at .541 and .561 of the floor.
  // (H200, 2026-11)
  static constexpr int kBlocks = 6;
  const Gradient* of_rows;

  __device__ __forceinline__ Gradient of(const RowGrid::Place& place) const {
    return of_rows[place.row];
  }
  __device__ __forceinline__ void finish(const RowGrid::Place&, const RowPart&,
                                         const Gradient&) const {}
};

// The numbers of a TokenLogitGradient. unit: RowTerm's.
template <typename acc_t>
__device__ __forceinline__ void numbers_of(const TokenGradient<acc_t>& gradient, acc_t unit,
                                           acc_t (&numbers)[kGradientNumbers]) {
  const acc_t of_entropy = gradient.of_entropy * gradient.inverse_sum;
  const acc_t of_softmax = gradient.of_softmax * gradient.inverse_sum;
  numbers[0] = gradient.stats.max;
  numbers[1] = math::product_plus(-of_entropy, gradient.stats.mean_distance, of_softmax);
  numbers[2] = -of_entropy * unit;
}

// Leaves of each row a TokenLogitGradient in of_rows, for row_gradients_kernel, and
// gradient_of_softmax() in of_softmax, for token_classes_kernel. lanes: lanes_of_sum().
template <typename acc_t>
__global__ void __launch_bounds__(kRowThreads)
    token_gradients_kernel(const __grid_constant__ TokenBackwardArgs args,
                           const __grid_constant__ RowGrid grid, int lanes, acc_t unit,
                           acc_t* of_rows, double* of_softmax) {
  let_next_kernel_start();
  const uint32_t group = group_of_thread(lanes);
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const RowGrid::Place place = grid.place(group);
  const TokenNumbers<acc_t> of_row(args, place);
  const double sum = gradient_of_softmax<acc_t>(args, place, lane, lanes);
  if (lane == 0 && group < grid.groups) {
    of_softmax[place.row] = sum;
    acc_t numbers[kGradientNumbers];
    numbers_of(of_row.gradient(static_cast<acc_t>(sum)), unit, numbers);
#pragma unroll
    for (int i = 0; i < kGradientNumbers; ++i) {
      of_rows[place.row * kGradientNumbers + i] = numbers[i];
    }
  }
}

// What token_classes_kernel does. kRewrite: computes the gradients at class indices and writes
// them. In place, kKeep computes them before the logits are overwritten, and kRestore writes them.
enum class IndexPass : int8_t { kRewrite, kKeep, kRestore };

// Rewrites the gradients at class indices. Those of repeated indices add up: the first of them
// writes the sum. lanes: of a row; each repeats the work that a row has beside its indices.
// of_softmax: what token_gradients_kernel leaves. kept: (rows, indices), written by kKeep and read
// by kRestore.
template <typename acc_t>
__global__ void __launch_bounds__(kRowThreads)
    token_classes_kernel(const __grid_constant__ TokenBackwardArgs args,
                         const __grid_constant__ RowSource source,
                         const __grid_constant__ RowGrid grid, int lanes, IndexPass todo,
                         const double* of_softmax, double* kept) {
  const uint32_t group = group_of_thread(lanes);
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const RowGrid::Place place = grid.place(group);
  wait_for_previous_kernel();
  if (group >= grid.groups || !source.counts(place)) {
    return;
  }
#pragma unroll 1
  for (int64_t k = lane; k < args.num_indices; k += lanes) {
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
        sum += load_grad<acc_t>(args, place, other);
      }
    }
    if (is_first) {
      double value = 0;
      if (todo == IndexPass::kRestore) {
        value = kept[place.row * args.num_indices + k];
      } else {
        const int64_t offset = place.offset(source.input) + c * source.class_stride;
        const auto x = load_operand<acc_t>(source.input, offset);
        visit_logit_map<acc_t>(args.map, [&](const auto& map) {
          value = gradient_at(TokenNumbers<acc_t>(args, place), map.map(x), map.derivative(x), sum,
                              of_softmax[place.row]);
        });
      }
      if (todo == IndexPass::kKeep) {
        kept[place.row * args.num_indices + k] = value;
      } else {
        store_operand(args.grad_input,
                      place.offset(args.grad_input) + c * args.grad_input_class_stride, value);
      }
    }
  }
}

// What the gradients of a short row are made of, for short_gradients_kernel and a linear map.
template <typename scalar_t>
struct ShortTokenGradient {
  using acc_t = acc_type_t<scalar_t>;
  TokenLogitGradient<scalar_t> of_logit;
  bool counts;
  double of_softmax;                // gradient_of_softmax()
  GradientAtIndex<acc_t> at_index;  // of the only class index, if there is one

  __device__ __forceinline__ GradientAtIndex<acc_t> only_index() const { return at_index; }

  template <int kCount>
  __device__ __forceinline__ void replace(acc_t (&x)[kCount], const LinearMap<acc_t>& map) const {
    of_logit.replace(x, map);
    if (!counts) {
      keep_apart();  // else a choice for each element
#pragma unroll
      for (acc_t& value : x) {
        value = 0;
      }
    }
  }
};

// The most class indices of a row that short_gradients_kernel takes: one for each lane of a warp.
constexpr int64_t kFewIndices = kWarpSize;

// Does what token_gradients_kernel and token_classes_kernel do, for up to kFewIndices indices and a
// linear map, with the same bits.
template <typename scalar_t>
struct ShortTokenGradients {
  using Gradient = ShortTokenGradient<scalar_t>;
  static constexpr bool kManyIndices = true;
  using acc_t = acc_type_t<scalar_t>;
  TokenBackwardArgs args;  // operands are those of a slice
  RowSource source;
  RowType<scalar_t> type;
  LinearMap<acc_t> map;
  int sum_lanes;  // lanes_of_sum()

  __device__ __forceinline__ int lanes() const { return sum_lanes; }
  __device__ __forceinline__ int indices() const {
    return args.grad_log_probs.data != nullptr ? static_cast<int>(args.num_indices) : 0;
  }

  struct Numbers {
    TokenNumbers<acc_t> of_row;
    double of_softmax;
    bool counts;
    int index;  // the only class index, if there is one and it is in range; else -1
    acc_t grad;
  };
  __device__ __forceinline__ Numbers load(const RowGrid::Place& place, int lane) const {
    // All loads at once, as the block waits for them.
    Numbers row;
    row.counts = source.counts(place);
    row.of_row = TokenNumbers<acc_t>(args, place);
    row.index = -1;
    row.grad = 0;
    if (indices() == 1) {
      const int64_t c = load_index(args, place, 0);
      row.grad = load_grad<acc_t>(args, place, 0);
      row.index = c >= 0 && c < args.num_classes ? static_cast<int>(c) : -1;
      // gradient_of_softmax() of one index, in its order.
      row.of_softmax =
          (0.0 - grad_in_range(args, c, row.grad)) + load_row_grad<acc_t>(place, args.grad_lse);
    } else {
      row.of_softmax = gradient_of_softmax<acc_t>(args, place, lane, sum_lanes);
    }
    return row;
  }

  template <typename LogitOf>
  __device__ __forceinline__ Gradient of(const Numbers& row, const LogitOf& logit_of) const {
    acc_t numbers[kGradientNumbers];
    numbers_of(row.of_row.gradient(static_cast<acc_t>(row.of_softmax)), RowTerm<scalar_t>::kUnit,
               numbers);
    GradientAtIndex<acc_t> at_index;
    if (row.counts && row.index >= 0) {
      const acc_t x = logit_of(row.index);
      at_index = {row.index, gradient_at<acc_t>(row.of_row, map.map(x), map.derivative(x), row.grad,
                                                row.of_softmax)};
    }
    return {{numbers[0], numbers[1], numbers[2]}, row.counts, row.of_softmax, at_index};
  }

  __device__ __forceinline__ GradientAtIndex<acc_t> at_index(const RowGrid::Place& place,
                                                             const Gradient& row, bool exists,
                                                             int own, int k) const {
    const int64_t c = load_index(args, place, k);
    const bool is_there = exists && row.counts && c >= 0 && c < args.num_classes;
    const acc_t grad = is_there ? load_grad<acc_t>(args, place, k) : acc_t(0);
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    // own < 32 and c < 2^16, so the top bit marks lanes without an index: each is alone.
    const uint32_t key = is_there ? static_cast<uint32_t>(own) << 16 | static_cast<uint32_t>(c)
                                  : 0x80000000u | static_cast<uint32_t>(lane);
    uint32_t same = __match_any_sync(kAllLanes, key);
    const bool is_first = __ffs(same) - 1 == lane;
    double sum = 0;
    // In the order of k, as token_classes_kernel adds them.
#pragma unroll 1
    while (__any_sync(kAllLanes, same != 0)) {
      const acc_t next = __shfl_sync(kAllLanes, grad, same != 0 ? __ffs(same) - 1 : lane);
      sum += same != 0 ? next : acc_t(0);
      same &= same - 1;
    }
    if (!is_there || !is_first) {
      return {};
    }
    const auto* const logits = static_cast<const scalar_t*>(source.input.data);
    const scalar_t logit = logits[place.offset(source.input) + c * source.class_stride];
    const acc_t x =
        type.visit([&](auto like) { return to_acc<acc_t>(bits_as<decltype(like)>(logit)); });
    return {static_cast<int>(c), gradient_at(TokenNumbers<acc_t>(args, place), map.map(x),
                                             map.derivative(x), sum, row.of_softmax)};
  }
};

}  // namespace lossops::cuda
