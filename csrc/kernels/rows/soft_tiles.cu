// Cross entropy of short rows with smoothing or probabilities: a warp copies a tile of consecutive
// rows to shared memory, a lane or a few of them take a row, and the gradients take its place
// there.

#include <cstdint>
#include <type_traits>

#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_walk.cuh"
#include "kernels/rows/row_words.cuh"
#include "kernels/rows/soft_tiles_plan.h"
#include "kernels/rows/tile_copy.cuh"

namespace lossops::cuda {
namespace soft_tiles {
namespace {

// The tiles, as the kernel is told.
struct SoftShape {
  CopyShape logits;
  CopyShape probabilities;  // of probability targets, in elements of the logits' size
  Divisor classes;
  int tile_rows;
  int log_team;       // 2^log_team lanes share a row
  int warp_bytes;     // of shared memory
  int logit_bytes;    // those of them for logits
  bool splits_words;  // rows of logits may begin in the middle of a word
  bool probabilities_split_words;
  bool has_float_probabilities;  // in shared memory; otherwise they have the type of the logits
  bool gradient_in_run;          // as TileCopy::store_run() wants it
  Smoothing smoothing;
};

// Gives each class of a row its coefficient: a class index or a probability, smoothed, times the
// class weight.
template <typename scalar_t>
struct Coefficients {
  static constexpr int kPerWord = kWordElements<scalar_t>;

  Smoothing smoothing;
  bool has_weights;
  const float* weights;  // in shared memory
  bool has_index;        // the target is a class index
  int index;
  RowWords<scalar_t> probabilities;
  bool has_floats;  // probabilities are in `floats`, not in `probabilities`
  const float* floats;

  // The coefficients of the words k, k + distance, ...
  template <int kCount>
  __device__ __forceinline__ void load(int k, int distance, float (&q)[kCount]) const {
    constexpr int kWords = kCount / kPerWord;
    if (has_index) {
      for_each<kCount>(k, distance, [&](int n, int c) { q[n] = c == index ? 1.0f : 0.0f; });
    } else if (has_floats) {
      for_each<kCount>(k, distance, [&](int n, int c) { q[n] = floats[c]; });
    } else {
      uint32_t words[kWords];
      probabilities.load(k, distance, words);
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        q[n] = word_element<scalar_t>(words[n / kPerWord], n % kPerWord);
      }
    }
#pragma unroll
    for (float& value : q) {
      value = smoothing(value);
    }
    if (has_weights) {
      for_each<kCount>(k, distance, [&](int n, int c) { q[n] *= weights[c]; });
    }
  }
  // The coefficient of class c.
  __device__ __forceinline__ float of(int c) const {
    const float p = has_index    ? (c == index ? 1.0f : 0.0f)
                    : has_floats ? floats[c]
                                 : to_acc<float>(probabilities[c]);
    return has_weights ? smoothing(p) * weights[c] : smoothing(p);
  }

 private:
  template <int kCount, typename Body>
  static __device__ __forceinline__ void for_each(int k, int distance, const Body& body) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      body(n, (k + n / kPerWord * distance) * kPerWord + n % kPerWord);
    }
  }
};

// kKind: kSmooth for class indices with smoothing and without class weights. All other rows are
// kProbability, class indices with smoothing and class weights too. kGradient: one may be wanted.
template <typename scalar_t, RowKind kKind, bool kGradient>
__global__ void __launch_bounds__(kThreads, min_blocks(kKind == RowKind::kSmooth, kGradient))
    cross_entropy_forward_soft_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                      const __grid_constant__ SoftShape shape,
                                      Denominator denominator,
                                      const __grid_constant__ GradOutput grad_output,
                                      Partial* partials, Finalize finalize) {
  float given = 1;
  if (kGradient && grad_output.is_one(given)) {
    return;
  }
  constexpr int kPerWord = kWordElements<scalar_t>;
  constexpr bool kExact = kExactExponentials<scalar_t>;
  constexpr bool kIsSmooth = kKind == RowKind::kSmooth;
  LOSSOPS_DYNAMIC_SHARED(uint4, dynamic);
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const auto num_classes = static_cast<int>(args.num_classes);
  const int team = unfolded(1 << shape.log_team);
  const int member = lane & (team - 1);
  const int team_rows = kWarpSize >> shape.log_team;
  const int tile_rows = unfolded(shape.tile_rows);
  const int first_own = lane >> shape.log_team;
  char* const buffer = reinterpret_cast<char*>(dynamic) + unfolded(warp * shape.warp_bytes);
  TileCopy<scalar_t> logits(shape.logits, buffer);
  TileCopy<scalar_t> probabilities(shape.probabilities, buffer + shape.logit_bytes);
  auto* const weights =
      reinterpret_cast<float*>(reinterpret_cast<char*>(dynamic) + kWarps * shape.warp_bytes);
  const bool wants_gradient = kGradient && args.grad_input.data != nullptr;
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<float>, NoScale> unit(args, denominator, given);
  const bool has_weights = !kIsSmooth && args.weight != nullptr;
  if (has_weights) {
#pragma unroll 1
    for (int c = static_cast<int>(threadIdx.x); c < num_classes; c += kThreads) {
      weights[c] = class_weight<float>(args, c);
    }
    __syncthreads();
  }
  const bool has_indices = kIsSmooth || !args.target_is_probability;
  const bool has_floats = sizeof(scalar_t) == 4 || shape.has_float_probabilities;
  const SmoothedIndex smooth(shape.smoothing);
  // The class index of row r of a tile; args.ignore_index for what has none.
  const auto load_target = [&](int64_t first_row, int r, int rows) {
    return has_indices && r < rows
               ? load_class_index(args.target,
                                  row_offset_by_call(args.rows, args.target, first_row + r))
               : args.ignore_index;
  };
  // Calls body(k, count) for this lane's words k, k + team, ... of a row: `count` of them, which is
  // `batch`, or 1 at the end.
  const auto for_each_word = [&](auto batch, const auto& body) {
    constexpr int kCount = decltype(batch)::value;
    const int words = num_classes / kPerWord;
    int k = member;
#pragma unroll 1
    for (; k + (kCount - 1) * team < words; k += kCount * team) {
      body(k, batch);
    }
#pragma unroll 1
    for (; k < words; k += team) {
      body(k, std::integral_constant<int, 1>{});
    }
  };
  constexpr std::integral_constant<int, kTermBatch / kPerWord> kBatch;
  // Whether this lane has the last element, which is no whole word.
  const bool has_last = num_classes % kPerWord != 0 && num_classes / kPerWord % team == member;
  const int last = num_classes - 1;
  Partial partial;
  const int64_t first_of_warp = (int64_t{blockIdx.x} * kWarps + warp) * tile_rows;
#pragma unroll 1
  for (int64_t first_row = first_of_warp; first_row < args.rows.numel;
       first_row += int64_t{gridDim.x} * kWarps * tile_rows) {
    const int rows =
        unfolded(static_cast<int>(min(int64_t{tile_rows}, args.rows.numel - first_row)));
    if (shape.logits.layout.in_run) {
      logits.start_run(args.input.data, first_row, rows);
    } else {
      const auto* const from = static_cast<const scalar_t*>(args.input.data);
      for_classes<1, 2>(args.rows, args.input, 1, shape.classes, first_row, rows,
                        [&](int r, int c, int64_t offset) {
                          logits.elements()[logits.offset(r) + c] = from[offset];
                        });
    }
    if (!has_indices && shape.probabilities.layout.in_run) {
      probabilities.start_run(args.target.data, first_row, rows);
    } else if (!has_indices) {
      for_classes<1, 2>(args.rows, args.target, args.target_class_stride, shape.classes, first_row,
                        rows, [&](int r, int c, int64_t offset) {
                          const float p = load_operand<float>(args.target, offset);
                          scalar_t* const to = probabilities.elements() + probabilities.offset(r);
                          if (has_floats) {
                            reinterpret_cast<float*>(to)[c] = p;
                          } else {
                            to[c] = from_acc<scalar_t>(p);
                          }
                        });
    }
    int64_t next_target = load_target(first_row, first_own, rows);
    if (wants_gradient && first_row == first_of_warp) {
      unit.wait(args, denominator);
    }
    wait_for_own_copies();
    logits.settle();
    if (!has_indices) {
      probabilities.settle();
    }
    __syncwarp();
#pragma unroll 1
    for (int r = first_own; r - first_own < rows; r += team_rows) {
      const bool exists = r < rows;
      const int place = min(r, rows - 1);
      // Rows with probabilities all have a loss.
      const int index = !exists ? kIgnoredRow : has_indices ? checked_index(args, next_target) : 0;
      next_target = load_target(first_row, r + team_rows, rows);
      const RowWords<scalar_t> own(logits.elements(), logits.offset(place), shape.splits_words);
      const int probabilities_at = kIsSmooth ? 0 : probabilities.offset(place);
      const Coefficients<scalar_t> coefficients = {
          shape.smoothing,
          has_weights,
          weights,
          has_indices,
          index,
          {probabilities.elements(), probabilities_at, shape.probabilities_split_words},
          has_floats,
          reinterpret_cast<const float*>(probabilities.elements() + probabilities_at)};
      const float x_at_index = kIsSmooth && index >= 0 ? to_acc<float>(own[index]) : 0.0f;
      uint32_t maxima = lowest_word<scalar_t>();
      for_each_word(kBatch, [&](int k, auto count) {
        uint32_t loaded[decltype(count)::value];
        own.load(k, team, loaded);
#pragma unroll
        for (const uint32_t word : loaded) {
          maxima = max_of_words<scalar_t>(word, maxima);
        }
      });
      float own_max = max_of_elements<scalar_t>(maxima);
      if (has_last) {
        own_max = math::max_number(to_acc<float>(own[last]), own_max);
      }
      OnlineSoftmax<float> softmax;
      softmax.max = team > 1 ? warp_max(own_max, team) : own_max;
      const RowTerms<kExact> terms(softmax.max);
      TermSum sum;
      for_each_word(kBatch, [&](int k, auto count) {
        constexpr int kWords = decltype(count)::value;
        uint32_t loaded[kWords];
        own.load(k, team, loaded);
        float x[kWords * kPerWord];
        float q[kWords * kPerWord] = {};
#pragma unroll
        for (int n = 0; n < kWords * kPerWord; ++n) {
          x[n] = word_element<scalar_t>(loaded[n / kPerWord], n % kPerWord);
        }
        if constexpr (!kIsSmooth) {
          coefficients.load(k, team, q);
        }
        add_logits<kKind, true>(sum, terms, x, q, GivenCoefficients());
      });
      if (has_last) {
        const float x[1] = {to_acc<float>(own[last])};
        const float q[1] = {kIsSmooth ? 0.0f : coefficients.of(last)};
        add_logits<kKind, true>(sum, terms, x, q, GivenCoefficients());
      }
      float below = sum.all_below();
      float distance = sum.all_distance();
      float q_sum = kIsSmooth ? SmoothedIndex::kSum : sum.q_sum;
      if (team > 1) {
        below = warp_sum(below, team);
        sum.ones = warp_sum(sum.ones, team);
        distance = warp_sum(distance, team);
        q_sum = kIsSmooth ? q_sum : warp_sum(q_sum, team);
      }
      // The same with a gradient and without one: not part of an FMA.
      softmax.below = __fmul_rn(below, terms.correction());
      softmax.ones = static_cast<float>(sum.ones);
      if constexpr (kIsSmooth) {
        // The sum may be infinite where it is not times a coefficient.
        const bool again = !(distance < math::infinity<float>());
        distance = smooth.weighted(distance, softmax.max, x_at_index);
        if (__any_sync(kAllLanes, again)) {
          float others = 0;
#pragma unroll 1
          for (int c = member; c < num_classes; c += team) {
            others += smooth.other * (terms.shift - to_acc<float>(own[c]));
          }
          others = smooth.with_index(warp_sum(others, team), softmax.max, x_at_index);
          distance = again ? others : distance;
        }
      }
      if (exists && member == 0) {
        float weight = index == kIgnoredRow ? 0.0f : 1.0f;  // as row_weight()
        if (has_weights && has_indices) {
          weight = index >= 0 ? weights[index] : 0.0f;
        }
        finish_indexed_row<RowKind::kProbability>(
            args, smooth, index, weight, softmax, distance, q_sum, x_at_index, first_row + r,
            [&](int64_t number) { return row_offset_by_call(args.rows, args.output, number); },
            partial);
      }
      if (wants_gradient) {
        const float scale = exists ? grad_output.scale_of_row(first_row + r, unit.get()) : 0;
        const auto state = RowSoftmax<float>::of(softmax.max, softmax.rest(), scale, q_sum);
        const LogitGradient<float, kExact> gradient(state, scale * q_sum);
        const auto replace = [&](auto may_outweigh, float x, float q) {
          return gradient.template dense<decltype(may_outweigh)::value>(
              x, scale, q_sum, kIsSmooth ? smooth.other : q);
        };
        // Only the largest logit can outweigh all others. If it is at the class index of a smooth
        // row it need not be found, as that gradient is written last anyway.
        int largest = -1;  // among this lane's elements
        if (exists && state.one_may_outweigh() && !(kIsSmooth && x_at_index == softmax.max)) {
          if (has_last && to_acc<float>(own[last]) == softmax.max) {
            largest = last;
          }
#pragma unroll 1
          for (int k = member; k < num_classes / kPerWord; k += team) {
            uint32_t loaded[1];
            own.load(k, team, loaded);
#pragma unroll
            for (int i = 0; i < kPerWord; ++i) {
              const bool is_largest = word_element<scalar_t>(loaded[0], i) == softmax.max;
              largest = is_largest ? k * kPerWord + i : largest;  // fault: soft-largest
            }
          }
        }
        __syncwarp();  // logits that other lanes write have been read
        if (exists && index < 0) {
#pragma unroll 1
          for (int c = member; c < num_classes; c += team) {
            own[c] = from_acc<scalar_t>(gradient_without_loss(index));
          }
        } else if (exists) {
          // A word may have an element of another lane. Who reads it takes its own half, and who
          // writes it writes that half.
          for_each_word(kBatch, [&](int k, auto count) {
            constexpr int kWords = decltype(count)::value;
            uint32_t loaded[kWords];
            own.load(k, team, loaded);
            float q[kWords * kPerWord] = {};
            if constexpr (!kIsSmooth) {
              coefficients.load(k, team, q);
            }
#pragma unroll
            for (int u = 0; u < kWords; ++u) {
              float x[kPerWord];
#pragma unroll
              for (int i = 0; i < kPerWord; ++i) {
                x[i] = replace(std::false_type{}, word_element<scalar_t>(loaded[u], i),
                               q[u * kPerWord + i]);
              }
              loaded[u] = pack_word<scalar_t>(x);
            }
            own.store(k, team, loaded);
          });
          // Two elements by themselves: the last one, if it is no whole word, and then the largest
          // one once more. In a loop, for one copy of the formula.
          int c = has_last ? last : -1;
          float x = has_last ? to_acc<float>(own[last]) : 0.0f;
#pragma unroll 1
          for (int n = 0; n < 2; ++n) {
            if (c >= 0) {
              own[c] = from_acc<scalar_t>(
                  replace(std::true_type{}, x, kIsSmooth ? 0.0f : coefficients.of(c)));
            }
            c = largest;
            x = softmax.max;
          }
        }
        if constexpr (kIsSmooth) {
          __syncwarp();
          if (index >= 0 && member == 0) {
            own[index] =
                from_acc<scalar_t>(gradient.dense(x_at_index, scale, q_sum, smooth.at_index));
          }
        }
      }
    }
    __syncwarp();
    if (wants_gradient) {
      if (shape.gradient_in_run) {
        logits.store_run(args.grad_input.data, first_row);
      } else {
        auto* const to = static_cast<scalar_t*>(args.grad_input.data);
        for_classes<1, 1>(args.rows, args.grad_input, 1, shape.classes, first_row, rows,
                          [&](int r, int c, int64_t offset) {
                            to[offset] = logits.elements()[logits.offset(r) + c];
                          });
      }
      __syncwarp();
    }
  }
  if (args.reduction != Reduction::kNone && !grad_output.exists()) {
    reduce_to_grid(partial, partials, finalize);
  }
}

}  // namespace
}  // namespace soft_tiles

void launch_soft_tiles(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                       const Denominator& denominator, const GradOutput& grad_output,
                       Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  using namespace soft_tiles;
  const bool gradient = args.grad_input.data != nullptr;
  const auto element_bytes = static_cast<int>(element_size(args.input.dtype));
  const int64_t blocks = grad_output.limit_blocks(plan.blocks, kThreads);
  const TileLayout layout = logit_layout(args, plan.team);
  SoftShape shape = {};
  shape.classes = Divisor(static_cast<uint32_t>(args.num_classes));
  shape.logits = CopyShape(layout, args.num_classes, element_bytes);
  shape.tile_rows = plan.steps * (kWarpSize / plan.team);
  shape.smoothing = smoothing_of(args);
  shape.log_team = __builtin_ctz(static_cast<unsigned>(plan.team));
  shape.warp_bytes = plan.warp_bytes;
  shape.logit_bytes = layout.bytes(shape.tile_rows, args.num_classes, element_bytes);
  const auto splits_words = [&](const CopyShape& rows, const void* data) {
    return element_bytes == 2 &&
           (rows.layout.pitch % 2 != 0 ||
            (rows.layout.in_run && reinterpret_cast<uintptr_t>(data) % 4 != 0));
  };
  shape.splits_words = splits_words(shape.logits, args.input.data);
  if (args.target_is_probability) {
    TileLayout probabilities = probability_layout(args, plan.team);
    const int elements = probability_bytes(args) / element_bytes;  // in the place of one
    probabilities.stride *= elements;
    probabilities.pitch *= elements;
    shape.probabilities = CopyShape(probabilities, elements * args.num_classes, element_bytes);
    shape.has_float_probabilities = probability_bytes(args) == 4;
    shape.probabilities_split_words = splits_words(shape.probabilities, args.target.data);
  }
  shape.gradient_in_run = gradient && layout.in_run && layout.stride == args.num_classes &&
                          rows_follow(args, args.grad_input, 1) &&
                          lies_as_input(args, args.grad_input, 1);
  const auto launch = [&](auto kernel) {
    allow_shared_bytes(kernel, plan.shared_bytes, kStaticSharedBytes, kMaxSharedBytes);
    launch_kernel("cross_entropy_forward_soft_kernel", kernel,
                  {blocks, kThreads, plan.shared_bytes, 1,
                   waits_for_previous_kernel(denominator, grad_output)},
                  stream, args, shape, denominator, grad_output, partials, finalize);
  };
  visit_float_or_half(args.input.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    // A kernel without a gradient needs fewer registers, so that more blocks are resident.
    // Probabilities have none, for less machine code.
    if (args.target_is_probability || args.weight != nullptr) {
      launch(cross_entropy_forward_soft_kernel<scalar_t, RowKind::kProbability, true>);
    } else if (gradient) {
      launch(cross_entropy_forward_soft_kernel<scalar_t, RowKind::kSmooth, true>);
    } else {
      launch(cross_entropy_forward_soft_kernel<scalar_t, RowKind::kSmooth, false>);
    }
  });
}

}  // namespace lossops::cuda
