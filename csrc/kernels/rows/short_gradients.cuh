// Gradients of short rows, for every loss whose gradient of a logit depends on that logit and on
// numbers of its row. A block copies its rows to shared memory (short_rows.cuh) and computes the
// numbers of each row meanwhile. Then the lanes of a row replace its logits by gradients, and those
// at class indices once more. Finally the block writes its rows. Before that it writes nothing, so
// the gradients may lie where the logits are.
//
//   struct Gradients {
//     using Numbers = ...;   // of a row; default-constructible, with any value
//     using Gradient = ...;
//     static constexpr bool kManyIndices;  // whether a row may have several class indices, or none
//     int indices() const;                 // class indices of a row, up to 32
//     int lanes() const;  // lanes that call load() for one row: a power of two up to 32. Must be 1
//                         // if indices() is 1.
//     // What memory has of a row beside its logits, by all lanes of a warp. The result in the
//     row's
//     // lane 0 is used. Loads should not depend on each other: the block waits for them as long as
//     // for its logits.
//     Numbers load(place, lane) const;
//     // logit_of(c): the logit of class c. It must be asked for only in rows with one class index.
//     Gradient of(const Numbers&, logit_of) const;
//     // With kManyIndices, of class index k, if there are several. By all lanes of a warp, for the
//     // warp's row `own` if that exists.
//     GradientAtIndex at_index(place, const Gradient&, exists, own, k) const;
//   };
//   struct Gradient {                               // trivially copyable
//     void replace(acc_t (&x)[kCount], map) const;  // logits by their gradients
//     GradientAtIndex only_index() const;              // of rows with one class index
//   };
#pragma once

#include <cstdint>

#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "kernels/rows/row_reader.cuh"
#include "kernels/rows/short_rows.cuh"

namespace lossops::cuda {

// Writes the gradients of a block's rows. lies_as_copied: see BlockRows::write().
template <typename Gradients, typename scalar_t, typename Map>
__global__ void __launch_bounds__(kRowThreads, kShortRowBlocks)
    short_gradients_kernel(const __grid_constant__ Gradients rows,
                           const __grid_constant__ RowSource source,
                           const __grid_constant__ Operand gradients, int64_t gradient_stride,
                           bool lies_as_copied, const __grid_constant__ RowGrid grid,
                           const __grid_constant__ ShortRows plan, const RowType<scalar_t> type,
                           const Map map) {
  using acc_t = acc_type_t<scalar_t>;
  using Gradient = typename Gradients::Gradient;
  __shared__ RowVector shared[ShortRows::kSharedBytes / kVectorBytes];
  __shared__ uint4 memory[kRowThreads * sizeof(Gradient) / sizeof(uint4)];
  auto* const of_rows = reinterpret_cast<Gradient*>(memory);  // of a turn
  wait_for_previous_kernel();
  let_next_kernel_start();
  const BlockRows<scalar_t> block(source, grid, plan, block_from_the_end(), shared);
  const auto thread = static_cast<int>(threadIdx.x);
  const int warp_lane = thread % kWarpSize;
  const int lane = thread & (plan.lanes - 1);
  const int own = thread >> (__ffs(plan.lanes) - 1);
  const int sum_lanes = rows.lanes();
  const int sum_shift = __ffs(sum_lanes) - 1;
  const int indices = rows.indices();
  const auto store = [&](int r, const GradientAtIndex<acc_t>& at) {
    if (at.index >= 0) {
      type.visit([&](auto like) {
        block.elements()[block.begin(r) + at.index] =
            bits_as<scalar_t>(from_acc<decltype(like)>(at.gradient));
      });
    }
  };
#pragma unroll 1
  for (int first = 0; first < block.rows(); first += plan.turn_rows) {
    const int turn_rows = min(block.rows() - first, plan.turn_rows);
    const auto place_of = [&](int r) {
      return grid.place(block.number(first + min(r, turn_rows - 1)));
    };
    typename Gradients::Numbers numbers;
#pragma unroll 1
    for (int begin = 0; begin < turn_rows; begin += kRowThreads >> sum_shift) {
      if (begin + ((thread - warp_lane) >> sum_shift) < turn_rows) {  // the warp has a row
        const int r = begin + (thread >> sum_shift);
        numbers = rows.load(place_of(r), thread & (sum_lanes - 1));
        if constexpr (Gradients::kManyIndices) {
          if (indices != 1 && r < turn_rows && (thread & (sum_lanes - 1)) == 0) {
            of_rows[r] = rows.of(numbers, [](int64_t /*c*/) { return acc_t(0); });
          }
        }
      }
    }
    if (first == 0) {
      wait_for_own_copies();
      __syncthreads();
    }
    if (indices == 1) {
      if (thread < turn_rows) {
        of_rows[thread] = rows.of(numbers, [&](int64_t c) {
          const scalar_t logit =
              block.elements()[block.begin(first + thread) + static_cast<int>(c)];
          return type.visit(
              [&](auto like) { return to_acc<acc_t>(bits_as<decltype(like)>(logit)); });
        });
      }
      if (plan.lanes > 1) {  // else a thread reads what it wrote, and replaces what it has read
        __syncthreads();
      }
    }
    if (own < turn_rows) {
      // Where there are several turns, a row has one lane and at most one class index: a thread
      // then reads what it wrote.
      const Gradient gradient = of_rows[own];
      const LaneWords<scalar_t> row(block, plan, first + own, lane);
      type.visit([&](auto like) {
        using own_t = decltype(like);
        row.template for_each_batch<true>(0, [&](auto& words) {
          constexpr int kPerWord = kWordElements<own_t>;
          constexpr int kWords = sizeof(words) / sizeof(uint32_t);
          acc_t x[kWords * kPerWord];
#pragma unroll
          for (int i = 0; i < kWords * kPerWord; ++i) {
            x[i] = word_element<own_t>(words[i / kPerWord], i % kPerWord);
          }
          gradient.replace(x, map);
#pragma unroll
          for (int i = 0; i < kWords; ++i) {
            words[i] = pack_word<own_t>(x + i * kPerWord);
          }
        });
      });
    }
    __syncwarp();
    if (own < turn_rows && indices == 1 && lane == 0) {
      store(first + own, of_rows[own].only_index());
    }
  }
  __syncthreads();

  if constexpr (Gradients::kManyIndices) {
    // A lane has a class index of a row, a warp those of several rows.
    if (indices > 1) {
      const int warp_rows = kWarpSize / indices;
      const int warp_row = warp_lane / indices;
#pragma unroll 1
      for (int begin = thread / kWarpSize * warp_rows; begin < block.rows();
           begin += kRowThreads / kWarpSize * warp_rows) {
        const int r = min(begin + warp_row, block.rows() - 1);
        const bool exists = warp_row < warp_rows && begin + warp_row < block.rows();
        const RowGrid::Place place = grid.place(block.number(r));
        store(r,
              rows.at_index(place, of_rows[r], exists, warp_row, warp_lane - warp_row * indices));
      }
      __syncthreads();
    }
  }
  block.write(gradients, gradient_stride, lies_as_copied);
}

// Launches short_gradients_kernel for a slice. rows: the functor; grad_input: of the slice;
// num_indices: rows.indices().
template <typename Gradients, typename scalar_t, typename Map>
void launch_short_gradients_of(const RowSlice& slice, const Gradients& rows,
                               const RowSource& source, const Operand& grad_input,
                               int64_t gradient_stride, int64_t num_classes, int64_t num_indices,
                               const RowType<scalar_t>& type, const Map& map, cudaStream_t stream) {
  // With several class indices, the numbers of a row are read again at the end. Shared memory keeps
  // those of one turn only.
  const ShortRows plan = short_rows_of<scalar_t>(slice, source, num_classes,
                                                 num_indices > 1 ? 1 : ShortRows::kMostTurns);
  const auto distance =
      reinterpret_cast<uintptr_t>(grad_input.data) - reinterpret_cast<uintptr_t>(source.input.data);
  const bool lies_as_copied = plan.run_stride == num_classes && distance % kVectorBytes == 0 &&
                              is_run(slice, grad_input, gradient_stride, num_classes);
  launch_kernel("short_gradients_kernel", short_gradients_kernel<Gradients, scalar_t, Map>,
                {plan.blocks(slice.rows()), kRowThreads, 0, 1, true}, stream, rows, source,
                grad_input, gradient_stride, lies_as_copied, RowGrid(slice, 1), plan, type, map);
}

}  // namespace lossops::cuda
