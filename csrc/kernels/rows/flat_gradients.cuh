// Gradients of short rows that follow one another in memory, for every loss whose gradient of a
// logit depends on that logit and on numbers of its row. A block has a tile of the gradients
// (FlatTiles of row_cut.h). Its threads first compute the numbers of the tile's rows, one row a
// thread, and then write the tile, one vector a thread at a time, whatever the number of classes.
//
//   struct Gradients {
//     using Gradient = ...;
//     bool begin() const;            // whether there is anything to do
//     Gradient of(place) const;      // by one thread
//   };
//   struct Gradient {                // trivially copyable: it lies in shared memory
//     int index;                     // the class whose gradient is at_index; negative: none
//     acc_t at_index;
//     void replace(acc_t (&x)[kCount], map) const;  // logits by their gradients
//   };
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/grid/launch.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "kernels/rows/row_reader.cuh"

namespace lossops::cuda {

// Resident blocks of a multiprocessor: 64 registers a thread.
constexpr int kFlatBlocks = 4;

// A vector of logits, element by element: of any layout, and where a vector reaches beyond the run.
// first: the run's number of its first element, which may be negative.
template <typename scalar_t>
__device__ __forceinline__ RowVector gather_run(const RowSource& source, const RowGrid& grid,
                                                const FlatTiles& plan, int first) {
  constexpr int kSize = kVectorSize<scalar_t>;
  const int num_classes = static_cast<int>(plan.classes.value);
  const auto* const data = static_cast<const scalar_t*>(source.input.data);
  scalar_t elements[kSize] = {};
  int row = plan.row_of(first < 0 ? 0 : first);
  int c = first - row * num_classes;
#pragma unroll 1
  do {
    const RowGrid::Place place = grid.place(static_cast<uint32_t>(row));
    const scalar_t* const logits = data + place.offset(source.input) + c * source.class_stride;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      if (c + i >= 0 && c + i < num_classes) {
        elements[i] = logits[i * source.class_stride];
      }
    }
    c -= num_classes;
    ++row;
  } while (c > -kSize && row * num_classes < plan.elements);
  RowVector vector;
  memcpy(&vector, elements, sizeof(vector));
  return vector;
}

// How the logits lie, seen from the vectors of the gradients.
enum class FlatLogits : int8_t {
  kInVectors,  // one run, too, with aligned vectors where the gradients have them
  kInRun,      // one run that begins elsewhere
  kInRows,     // rows with gaps; the classes of a row are neighbours
  kApart,      // classes are not neighbours
};

// gradients: element 0 of the run.
template <typename Gradients, typename scalar_t, typename Map>
__global__ void __launch_bounds__(FlatTiles::kThreads, kFlatBlocks)
    flat_gradients_kernel(const __grid_constant__ Gradients rows,
                          const __grid_constant__ RowSource source, void* gradients,
                          FlatLogits layout, const __grid_constant__ RowGrid grid,
                          const __grid_constant__ FlatTiles plan, const RowType<scalar_t> type,
                          const Map map) {
  using acc_t = acc_type_t<scalar_t>;
  using Gradient = typename Gradients::Gradient;
  constexpr int kSize = kVectorSize<scalar_t>;
  constexpr int kThreads = FlatTiles::kThreads;
  constexpr int kVectors = FlatTiles::kThreadVectors;
  __shared__ uint4 memory[FlatTiles::kMostRows * sizeof(Gradient) / sizeof(uint4)];
  auto* const of_rows = reinterpret_cast<Gradient*>(memory);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (!rows.begin()) {
    return;
  }
  const int num_classes = static_cast<int>(plan.classes.value);
  const FlatTiles::Tile tile = plan.tile(static_cast<int>(blockIdx.x));
  const auto thread = static_cast<int>(threadIdx.x);
  int v = tile.first_vector + thread;

  // The first logit of a vector of gradients, if its logits are neighbours; else null. Not of
  // kInVectors.
  const auto logits_of = [&](int vector) -> const scalar_t* {
    const auto* const logits = static_cast<const scalar_t*>(source.input.data);
    const int first = plan.first_element(vector);
    if (!plan.is_whole(vector) || layout == FlatLogits::kApart) {
      return nullptr;
    }
    if (layout == FlatLogits::kInRun) {
      return logits + first;
    }
    const int row = plan.row_of(first);
    const int c = first - row * num_classes;
    return c + kSize > num_classes
               ? nullptr
               : logits + grid.place(static_cast<uint32_t>(row)).offset(source.input) + c;
  };
  // On their way while the numbers of the rows are computed.
  RowVector vectors[kVectors] = {};
  unsigned loaded = 0;  // bit u: vectors[u] is
  if (layout == FlatLogits::kInVectors) {
    const auto* const logits = reinterpret_cast<const RowVector*>(
        static_cast<const scalar_t*>(source.input.data) - plan.head);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      if (v + u * kThreads < tile.end_vector && plan.is_whole(v + u * kThreads)) {
        loaded |= 1u << u;
        vectors[u] = logits[v + u * kThreads];
      }
    }
  } else {
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      const int vector = v + u * kThreads;
      const scalar_t* const logits = vector < tile.end_vector ? logits_of(vector) : nullptr;
      if (logits != nullptr) {
        loaded |= 1u << u;
        vectors[u] = RowVector::load_by_words(logits);
      }
    }
  }
#pragma unroll 1
  for (int i = thread; i < tile.rows; i += kThreads) {
    of_rows[i] = rows.of(grid.place(static_cast<uint32_t>(tile.first_row + i)));
  }
  __syncthreads();

#pragma unroll 1
  for (; v < tile.end_vector; v += kThreads, loaded >>= 1) {
    const int first = plan.first_element(v);
    if (first >= plan.elements) {
      return;
    }
    if ((loaded & 1) == 0) {
      vectors[0] = gather_run<scalar_t>(source, grid, plan, first);
    }
    acc_t x[kSize];
    vectors[0].unpack(type, x);
    int row = plan.row_of(first < 0 ? 0 : first);
    int c = first - row * num_classes;  // of element 0
    row -= tile.first_row;
    acc_t results[kSize] = {};
    // A row of the vector after the other. Those after the first take over its later elements.
#pragma unroll 1
    do {
      const Gradient gradient = of_rows[row];
      acc_t own[kSize];
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        own[i] = x[i];
      }
      gradient.replace(own, map);
      const int at_index = gradient.index - c;
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        own[i] = i == at_index ? gradient.at_index : own[i];
        results[i] = i >= -c ? own[i] : results[i];
      }
      c -= num_classes;
      ++row;
    } while (c > -kSize && row < tile.rows);

    const RowVector packed = RowVector::pack(type, results);
    scalar_t* const to = static_cast<scalar_t*>(gradients) + first;
    if (plan.is_whole(v)) {
      *reinterpret_cast<RowVector*>(to) = packed;
    } else {
      scalar_t elements[kSize];
      memcpy(elements, &packed, sizeof(packed));
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (first + i >= 0 && first + i < plan.elements) {
          to[i] = elements[i];
        }
      }
    }
#pragma unroll
    for (int u = 0; u + 1 < kVectors; ++u) {
      vectors[u] = vectors[u + 1];
    }
  }
}

// Rows of a slice: its gradients are one run.
inline int64_t most_flat_rows(int64_t num_classes) {
  return std::max<int64_t>(FlatTiles::kMostElements / num_classes, 1);
}

// rows: of the slice. The gradients follow one another.
template <typename Gradients, typename scalar_t, typename Map>
void launch_flat_gradients_of(const RowSlice& slice, const Gradients& rows, const RowSource& source,
                              const Operand& grad_input, int64_t num_classes,
                              const RowType<scalar_t>& type, const Map& map, cudaStream_t stream) {
  const auto address = reinterpret_cast<uintptr_t>(grad_input.data);
  const FlatTiles plan(slice.rows(), num_classes, sizeof(scalar_t),
                       static_cast<int>(address % kVectorBytes / sizeof(scalar_t)));
  const bool in_vectors =
      (address - reinterpret_cast<uintptr_t>(source.input.data)) % kVectorBytes == 0;
  FlatLogits layout = source.class_stride == 1 ? FlatLogits::kInRows : FlatLogits::kApart;
  if (is_run(slice, source.input, source.class_stride, num_classes)) {
    layout = in_vectors ? FlatLogits::kInVectors : FlatLogits::kInRun;
  }
  launch_kernel("flat_gradients_kernel", flat_gradients_kernel<Gradients, scalar_t, Map>,
                {plan.blocks(), FlatTiles::kThreads, 0, 1, true}, stream, rows, source,
                grad_input.data, layout, RowGrid(slice, 1), plan, type, map);
}

}  // namespace lossops::cuda
