// Cross entropy of short rows of fp32: a warp takes a tile of consecutive rows, a lane or a few of
// them a row.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "kernels/class_index/float_tiles_plan.h"
#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/thread_reduce.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_walk.cuh"

namespace lossops::cuda {
namespace float_tiles {
namespace {

// Words of a row that a lane has in registers at a time.
[[maybe_unused]] constexpr int kBatch = 16;
// What stands at the class index while the others are added up: exp(kAbsent - max) is 0, and not a
// NaN as that of an infinity, if max is no less than kLeastMax.
[[maybe_unused]] constexpr float kAbsent = -1e38f;
[[maybe_unused]] constexpr float kLeastMax = -1e37f;

// How a warp cuts and copies the rows.
struct TileShape {
  int tiles;              // of a warp
  int tile_bytes;         // of shared memory
  int log_team;           // 2^log_team lanes share a row
  int share;              // units of a lane; units_of_lane() says what the last lanes have
  int swizzle;            // lane % 8 >> swizzle: the bits that a lane flips in a unit's number
  bool in_bulk;           // the device has bulk copies
  bool input_in_vectors;  // tiles are copied by vectors of 16 bytes; otherwise word by word
  bool gradient_in_vectors;
  Divisor classes;
};

// Gives the shared memory its alignment.
struct alignas(kTileAlignment) TileLine {
  char bytes[kTileAlignment];
};

template <int kWords>
struct alignas(4 * kWords) Unit {
  float values[kWords];
};

// A lane's share of a row in shared memory.
template <Units kUnits>
struct Share {
  static constexpr int kWords = words_of(kUnits);
  static constexpr int kSmallBatch = kUnits == Units::kSwizzledVectors ? 8 : 4;
  using U = Unit<kWords>;

  U* units;
  int count;    // units
  int swizzle;  // bits that are flipped in a unit's number

  __device__ __forceinline__ int place(int unit) const {
    return kUnits == Units::kSwizzledVectors ? unit ^ swizzle : unit;
  }
  template <int kCount>
  __device__ __forceinline__ void load(int unit, float (&x)[kCount]) const {
#pragma unroll
    for (int u = 0; u < kCount / kWords; ++u) {
      const U loaded = units[place(unit + u)];
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        x[u * kWords + i] = loaded.values[i];
      }
    }
  }
  template <int kCount>
  __device__ __forceinline__ void store(int unit, const float (&x)[kCount]) const {
#pragma unroll
    for (int u = 0; u < kCount / kWords; ++u) {
      U stored;
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        stored.values[i] = x[u * kWords + i];
      }
      units[place(unit + u)] = stored;
    }
  }

  __device__ __forceinline__ int words() const { return count * kWords; }
  __device__ __forceinline__ float& word(int i) const { return reinterpret_cast<float*>(units)[i]; }

  // body(unit, words as a constant): a batch at a time, and then what is left.
  template <typename Body>
  __device__ __forceinline__ void for_batches(Body&& body) const {
    int unit = 0;
#pragma unroll 1
    for (; unit + kBatch / kWords <= count; unit += kBatch / kWords) {
      body(unit, std::integral_constant<int, kBatch>{});
    }
#pragma unroll 1
    for (; unit + kSmallBatch / kWords <= count; unit += kSmallBatch / kWords) {
      body(unit, std::integral_constant<int, kSmallBatch>{});
    }
    if constexpr (kWords < kSmallBatch) {
#pragma unroll 1
      for (; unit < count; ++unit) {
        body(unit, std::integral_constant<int, kWords>{});
      }
    }
  }

  // The sum of terms: eight are added up, and from there on with what rounding takes. Two batches
  // are added to each other first: of what is in them a swizzle may change the order.
  template <typename Term>
  __device__ __forceinline__ ExactSum sum(Term&& term) const {
    ExactSum sum;
    ExactSum first;  // of two batches
    for_batches([&](int unit, auto words) {
      constexpr int kCount = decltype(words)::value;
      float values[kCount];
      load(unit, values);
#pragma unroll
      for (float& value : values) {
        value = term(value);
      }
      if constexpr (kCount < kBatch) {
        sum.add(pairwise_sum(values));
      } else {
        float halves[2];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float half[kBatch / 2];
#pragma unroll
          for (int i = 0; i < kBatch / 2; ++i) {
            half[i] = values[h * kBatch / 2 + i];
          }
          halves[h] = pairwise_sum(half);
        }
        ExactSum batch{halves[0]};
        batch.add(halves[1]);
        if (unit & kBatch / kWords) {
          batch.add(first);
          sum.add(batch);
          first = {};
        } else {
          first = batch;
        }
      }
    });
    sum.add(first);
    return sum;
  }
};

template <Units kUnits, bool kGradient>
__global__ void __launch_bounds__(kThreads, min_blocks(kGradient))
    cross_entropy_forward_float_tile_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                            const TileShape shape, Denominator denominator,
                                            const __grid_constant__ GradOutput grad_output,
                                            Partial* partials, Finalize finalize) {
  float given = 1;
  if (kGradient && grad_output.is_one(given)) {
    return;
  }
  LOSSOPS_DYNAMIC_SHARED(TileLine, lines);
  __shared__ CopyBarrier barriers[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int num_classes = static_cast<int>(args.num_classes);
  const int team = 1 << shape.log_team;
  const int member = lane & (team - 1);
  const int own_row = lane >> shape.log_team;
  const int tile_rows = kWarpSize >> shape.log_team;
  auto* const tile =
      reinterpret_cast<float*>(reinterpret_cast<char*>(lines) + warp * shape.tile_bytes);
  float* const row = tile + own_row * num_classes;
  const Share<kUnits> own = {
      reinterpret_cast<Unit<words_of(kUnits)>*>(row) + member * shape.share,
      units_of_lane(num_classes / words_of(kUnits), shape.share, member, team),
      lane % 8 >> shape.swizzle};
  CopyBarrier& arrived = barriers[warp];
  if (lane == 0) {
    arrived.init();
  }
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<float>, NoScale> unit(args, denominator, given);
  __syncthreads();
  const auto* const input = static_cast<const float*>(args.input.data);
  auto* const grad_input = static_cast<float*>(args.grad_input.data);
  const Operand* const operands[] = {&args.target, &args.output};
  uint32_t parity = 0;
  Partial partial;
  // The tiles of a block's warps alternate.
  int64_t first_row = (int64_t{blockIdx.x} * shape.tiles * kWarps + warp) * tile_rows;
#pragma unroll 1
  for (int n = 0; n < shape.tiles && first_row < args.rows.numel;
       ++n, first_row += kWarps * tile_rows) {
    const int rows = static_cast<int>(min(int64_t{tile_rows}, args.rows.numel - first_row));
    const bool exists = own_row < rows;
    const uint32_t bytes = static_cast<uint32_t>(rows * num_classes) * uint32_t{sizeof(float)};
    const bool whole = bytes % kVectorBytes == 0;
    const bool in_bulk = kMayCopyInBulk && shape.in_bulk && whole && shape.input_in_vectors;
    int64_t offsets[2];  // of this lane's row
    row_offsets(args.rows, operands, first_row + (exists ? own_row : 0), offsets);
    if (in_bulk) {
      if (lane == 0) {
        arrived.expect(bytes);
        arrived.copy(tile, input + first_row * num_classes, bytes);
      }
    } else if (whole && shape.input_in_vectors) {
      start_warp_copy(tile, input + first_row * num_classes, static_cast<int>(bytes));
    } else {
      for_classes<1, 2>(args.rows, args.input, 1, shape.classes, first_row, rows,
                        [&](int r, int c, int64_t offset) {
                          start_own_copy(tile + r * num_classes + c, input + offset);
                        });
    }
    const int64_t target = load_class_index(args.target, offsets[0]);
    if (n == 0) {
      unit.wait(args, denominator);
    }
    const int index = exists ? checked_index(args, target) : kIgnoredRow;
    if (in_bulk) {
      arrived.wait(parity);
      parity ^= 1;
    } else {
      wait_for_own_copies();
    }
    // Writes what stands at the class index.
    const auto at_index = [&](float x) {
      __syncwarp();
      if (index >= 0 && member == 0) {
        row[index] = x;
      }
      __syncwarp();
    };
    __syncwarp();
    const float x_at_index = row[max(index, 0)];
    at_index(row[index + 1 < num_classes ? num_classes - 1 : 0]);  // any of the others
    // Of a NaN and a number, the number.
    const auto larger = [](float a, float b) { return math::max_number(a, b); };
    [[maybe_unused]] const auto smaller = [](float a, float b) { return ::fminf(a, b); };
    float max = -math::infinity<float>();
    [[maybe_unused]] float least = math::infinity<float>();
    own.for_batches([&](int u, auto words) {
      float x[decltype(words)::value];
      own.load(u, x);
      max = larger(pairwise_reduce(x, larger), max);
      if constexpr (kGradient) {
        least = smaller(pairwise_reduce(x, smaller), least);
      }
    });
    max = warp_max(max, team);
    at_index(kAbsent);
    const auto term = [&](float x) { return math::exp_of_finite_in_sum(x - max); };
    float others = team_total(own.sum(term), team);
    // Where there are infinities.
    const bool again = math::is_nan(others) || !(max >= kLeastMax);
    if (__any_sync(kAllLanes, again)) {
      at_index(-math::infinity<float>());
      const RowTerms<true> terms(max);
      ExactSum sum;
#pragma unroll 1
      for (int i = 0; i < own.words(); ++i) {
        sum.add(terms(own.word(i)));
      }
      const float total = team_total(sum, team);
      others = again ? total : others;
    }
    IndexRow reduced;
    if (index >= 0) {
      reduced = IndexRow::of(RowTerms<true>(max), max, others, x_at_index);
    }
    const float weight = row_weight(args, index);
    const float scale = unit.get();
    const auto finished = reduced.template finish<false>(x_at_index, scale, weight);
    if (exists && member == 0) {
      const float loss = index >= 0 ? finished.loss : gradient_without_loss(index);
      record_row(
          args, loss, weight, reduced, first_row + own_row, [&](int64_t) { return offsets[1]; },
          partial);
    }
    if constexpr (kGradient) {
      const LogitGradient<float, true> gradient(finished.softmax, scale * weight);
      if (index < 0) {
        own.for_batches([&](int u, auto words) {
          float x[decltype(words)::value];
#pragma unroll
          for (float& value : x) {
            value = gradient_without_loss(index);
          }
          own.store(u, x);
        });
      } else if (gradient.is_direct(least)) {
        own.for_batches([&](int u, auto words) {
          float x[decltype(words)::value];
          own.load(u, x);
          gradient.replace_direct(x);
          own.store(u, x);
        });
      } else {
#pragma unroll 1
        for (int i = 0; i < own.words(); ++i) {
          float value[1] = {own.word(i)};
          gradient.replace(value);
          own.word(i) = value[0];
        }
      }
      at_index(finished.gradient_at_index);
      if (whole && shape.gradient_in_vectors && kMayCopyInBulk && shape.in_bulk) {
        fence_before_bulk_store();
        __syncwarp();
        if (lane == 0) {
          start_bulk_store(grad_input + first_row * num_classes, tile, bytes);
          wait_for_bulk_reads();
        }
      } else if (whole && shape.gradient_in_vectors) {
        float* const gradients = grad_input + first_row * num_classes;
        for (int v = lane; v < static_cast<int>(bytes) / kVectorBytes; v += kWarpSize) {
          store_vector(gradients, v, load_vector(tile, v));
        }
      } else {
        for_classes<1, 1>(args.rows, args.grad_input, args.grad_input_class_stride, shape.classes,
                          first_row, rows, [&](int r, int c, int64_t offset) {
                            grad_input[offset] = tile[r * num_classes + c];
                          });
      }
    }
    __syncwarp();
  }
  if (args.reduction != Reduction::kNone && !grad_output.exists()) {
    reduce_to_grid(partial, partials, finalize);
  }
}

}  // namespace
}  // namespace float_tiles

void launch_float_tiles(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                        const Denominator& denominator, const GradOutput& grad_output,
                        Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  using namespace float_tiles;
  const auto num_classes = static_cast<int>(args.num_classes);
  const Units units = units_of(num_classes);
  const bool gradient = args.grad_input.data != nullptr;
  const int64_t blocks = grad_output.limit_blocks(plan.blocks, kThreads);
  TileShape shape;
  shape.tiles = static_cast<int>(ceil_div(plan.blocks * plan.tiles, blocks));
  shape.tile_bytes = plan.warp_bytes;
  shape.log_team = __builtin_ctz(static_cast<unsigned>(plan.team));
  shape.share = plan.share;
  shape.swizzle = 3 - twos_in(num_classes / words_of(units));
  shape.in_bulk = current_device_limits().hopper;
  shape.input_in_vectors = rows_follow_in_vectors(args, args.input, 1);
  shape.gradient_in_vectors =
      gradient && rows_follow_in_vectors(args, args.grad_input, args.grad_input_class_stride);
  shape.classes = Divisor(static_cast<uint32_t>(num_classes));
  const auto launch = [&](auto kernel) {
    allow_shared_bytes(kernel, plan.shared_bytes, kMaxSharedBytes);
    launch_kernel("cross_entropy_forward_float_tile_kernel", kernel,
                  {blocks, kThreads, plan.shared_bytes, 1,
                   waits_for_previous_kernel(denominator, grad_output)},
                  stream, args, shape, denominator, grad_output, partials, finalize);
  };
  visit_bool(gradient, [&](auto has_gradient) {
    constexpr bool kGradient = decltype(has_gradient)::value;
    switch (units) {
      case Units::kWords:
        return launch(cross_entropy_forward_float_tile_kernel<Units::kWords, kGradient>);
      case Units::kVectors:
        return launch(cross_entropy_forward_float_tile_kernel<Units::kVectors, kGradient>);
      case Units::kSwizzledVectors:
        return launch(cross_entropy_forward_float_tile_kernel<Units::kSwizzledVectors, kGradient>);
    }
  });
}

}  // namespace lossops::cuda
