// Gradients of short rows that follow one another in memory, for every loss whose gradient of a
// logit depends on that logit and on numbers of its row. A block has a tile of the gradients
// (FlatTiles of row_cut.h). Its threads first compute the numbers of the tile's rows, then write
// the tile, one vector a thread at a time, whatever the number of classes, and finally write the
// gradients at class indices once more.
//
//   struct Gradients {
//     using Gradient = ...;
//     bool begin() const;   // whether there is anything to do
//     int lanes() const;    // neighbours that share a row in of(), a power of two up to 32
//     // By all lanes of a warp. The result of the row's lane 0 counts.
//     Gradient of(place, lane) const;
//     int indices() const;  // class indices of a row, up to 32
//     // By all lanes of a warp: of class index k of the warp's row `own`, if that exists. The
//     // index is negative where nothing is to be written: it is out of range, or repeated.
//
//     IndexedGradient at_index(place, const Gradient&, exists, own, k) const;
//   };
//   struct Gradient {                        // trivially copyable: it lies in shared memory
//     void replace(acc_t (&x)[kCount], map) const;  // logits by their gradients
//   };
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "kernels/rows/row_reader.cuh"

namespace lossops::cuda {

// Resident blocks of a multiprocessor: 40 registers a thread.
constexpr int kFlatBlocks = 12;

// A vector of logits, element by element: of any layout, and where a vector reaches beyond the run.
// Elements outside the run are 0. first: the run's number of its first element, which may be
// negative.
template <typename scalar_t>
__device__ __forceinline__ RowVector gather_run(const RowSource& source, const RowGrid& grid,
                                                const FlatTiles& plan, int first) {
  constexpr int kSize = kVectorSize<scalar_t>;
  const auto num_classes = static_cast<int>(plan.classes.value);
  const auto* const data = static_cast<const scalar_t*>(source.input.data);
  const int row = plan.row_of(max(first, 0));
  const int c = first - row * num_classes;
  const RowGrid::Place place = grid.place(static_cast<uint32_t>(row));
  // Class c + i of the row is at i class strides from here.
  const scalar_t* logits = data + place.offset(source.input) + c * source.class_stride;
  // From a row's end to the next row: in the slice's first dimension, and in its second.
  const int64_t* const strides = source.input.strides;
  const int64_t next = strides[0] - num_classes * source.class_stride;
  const int64_t wrapped = next + strides[1] - grid.size0.value * strides[0];
  int row_end = num_classes - c;
  uint32_t i0 = place.i0;
  scalar_t elements[kSize] = {};
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    if (i == row_end) {
      row_end += num_classes;
      const bool wraps = ++i0 == grid.size0.value;
      logits += wraps ? wrapped : next;
      i0 = wraps ? 0 : i0;
    }
    if (first + i >= 0 && first + i < plan.elements) {
      elements[i] = logits[i * source.class_stride];
    }
  }
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

// A class index and the gradient there. A negative index: there is nothing to write.
template <typename acc_t>
struct IndexedGradient {
  int64_t index = -1;
  acc_t gradient = 0;
};

// The logits of a thread's vectors of gradients, in shared memory. In kInVectors they are on their
// way while the thread does something else. A vector is not loaded where its logits are no
// neighbours or reach beyond the run: what lies there is then undefined.
template <typename scalar_t>
class FlatVectors {
 public:
  static constexpr int kCount = FlatTiles::kThreadVectors;

  // shared: of the block. Starts to load the tile's vectors of this thread whose logits are
  // neighbours.
  __device__ __forceinline__ FlatVectors(const RowSource& source, const RowGrid& grid,
                                         const FlatTiles& plan, const FlatTiles::Tile& tile,
                                         FlatLogits layout,
                                         RowVector (&shared)[kCount * FlatTiles::kThreads])
      : own_(shared + threadIdx.x) {
    constexpr int kThreads = FlatTiles::kThreads;
    const int v = tile.first_vector + static_cast<int>(threadIdx.x);
    const auto* const data = static_cast<const scalar_t*>(source.input.data);
    if (layout == FlatLogits::kInVectors) {
      const auto* const logits = reinterpret_cast<const RowVector*>(data - plan.head);
#pragma unroll
      for (int u = 0; u < kCount; ++u) {
        if (v + u * kThreads < tile.end_vector && plan.is_whole(v + u * kThreads)) {
          loaded_ |= 1u << u;
          start_own_copy(own_ + u * kThreads, logits + v + u * kThreads);
        }
      }
      return;
    }
    RowVector vectors[kCount] = {};
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const int vector = v + u * kThreads;
      const scalar_t* const logits =
          vector < tile.end_vector ? neighbours(source, grid, plan, layout, vector) : nullptr;
      if (logits != nullptr) {
        loaded_ |= 1u << u;
        vectors[u] = RowVector::load_by_words(logits);
      }
    }
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      own_[u * kThreads] = vectors[u];
    }
  }

  __device__ __forceinline__ bool is_loaded(int u) const { return (loaded_ >> u & 1) != 0; }
  // After wait_for_own_copies().
  __device__ __forceinline__ const RowVector& operator[](int u) const {
    return own_[u * FlatTiles::kThreads];
  }

 private:
  // The first logit of a vector of gradients, if its logits are neighbours; else null.
  static __device__ __forceinline__ const scalar_t* neighbours(const RowSource& source,
                                                               const RowGrid& grid,
                                                               const FlatTiles& plan,
                                                               FlatLogits layout, int vector) {
    const auto* const logits = static_cast<const scalar_t*>(source.input.data);
    const int first = plan.first_element(vector);
    if (!plan.is_whole(vector) || layout == FlatLogits::kApart) {
      return nullptr;
    }
    const scalar_t* found = logits + first;
    if (layout != FlatLogits::kInRun) {
      const int row = plan.row_of(first);
      const int c = first - row * static_cast<int>(plan.classes.value);
      if (c + kVectorSize<scalar_t> > static_cast<int>(plan.classes.value)) {
        return nullptr;
      }
      found = logits + grid.place(static_cast<uint32_t>(row)).offset(source.input) + c;
    }
    // The word around the first logit may begin before the logits.
    return first == 0 && reinterpret_cast<uintptr_t>(found) % 4 != 0 ? nullptr : found;
  }

  RowVector* own_;
  unsigned loaded_ = 0;  // bit u: vector u is loaded
};

// Writes a tile of gradients a block. rows: the functor; gradients: element 0 of the run.
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
  __shared__ uint4 memory[FlatTiles::kMostRows * sizeof(Gradient) / sizeof(uint4)];
  __shared__ RowVector logits[kThreads * FlatTiles::kThreadVectors];
  auto* const of_rows = reinterpret_cast<Gradient*>(memory);
  auto* const results = static_cast<scalar_t*>(gradients);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (!rows.begin()) {
    return;
  }
  const FlatTiles::Tile tile = plan.tile(static_cast<int>(blockIdx.x));
  const auto thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpSize;
  const auto place_of = [&](int row) {
    return grid.place(static_cast<uint32_t>(tile.first_row + min(row, tile.rows - 1)));
  };

  const FlatVectors<scalar_t> vectors(source, grid, plan, tile, layout, logits);
  const int lanes = rows.lanes();
  const int shift = __ffs(lanes) - 1;
#pragma unroll 1
  for (int first = 0; first < tile.rows; first += kThreads >> shift) {
    const int i = first + (thread >> shift);
    if (first + ((thread - lane) >> shift) < tile.rows) {  // the warp has a row
      const Gradient gradient = rows.of(place_of(i), thread & (lanes - 1));
      if (i < tile.rows && (thread & (lanes - 1)) == 0) {
        of_rows[i] = gradient;
      }
    }
  }
  __syncthreads();
  wait_for_own_copies();

  // In registers, or each turn would load them again.
  const int end = unfolded(min(plan.first_element(tile.end_vector), plan.elements));
  const int last_whole = unfolded(plan.elements - kSize);
  const int first_row = unfolded(tile.first_row);
  Divisor classes = plan.classes;
  classes.value = unfolded(classes.value);
  classes.multiplier = unfolded(classes.multiplier);
  classes.shift = unfolded(classes.shift);
  const auto row_of = [&](int element) {
    return static_cast<int>(classes.quotient(static_cast<uint32_t>(element)));
  };
  int u = 0;
#pragma unroll 1
  for (int first = unfolded(plan.first_element(tile.first_vector + thread));
       first - lane * kSize < end; first += kThreads * kSize, ++u) {
    const bool exists = first < end;
    const bool is_whole = 0 <= first && first <= last_whole;
    const int row = row_of(min(max(first, 0), end - 1));
    const int left = (row + 1) * static_cast<int>(classes.value) - first;  // elements of the row
    RowVector vector = vectors[u];
    if (exists && !vectors.is_loaded(u)) {
      vector = gather_run<scalar_t>(source, grid, plan, first);
    }
    acc_t x[kSize];
    vector.unpack(type, x);
    if (__all_sync(kAllLanes, (is_whole && left >= kSize) || !exists)) {
      const Gradient gradient = of_rows[row - first_row];
      gradient.replace(x, map);
    } else {
      // Element by element, each with its own row. Row by row, all elements of the vector would be
      // computed once for each row.
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        const Gradient gradient = of_rows[row_of(min(max(first + i, 0), end - 1)) - first_row];
        acc_t element[1] = {x[i]};
        gradient.replace(element, map);
        x[i] = element[0];
      }
    }
    const RowVector packed = RowVector::pack(type, x);
    if (exists && is_whole) {
      *reinterpret_cast<RowVector*>(results + first) = packed;
    } else if (exists) {
      scalar_t elements[kSize];
      memcpy(elements, &packed, sizeof(packed));
#pragma unroll
      for (int i = 0; i < kSize; ++i) {
        if (first + i >= 0 && first + i < plan.elements) {
          results[first + i] = elements[i];
        }
      }
    }
  }

  // A lane has a class index of a row, a warp those of several rows.
  const int indices = rows.indices();
  if (indices == 0) {
    return;
  }
  __syncthreads();  // other threads have written the same elements
  const int warp_rows = kWarpSize / indices;
  const int own = lane / indices;
  const int begin = max(plan.first_element(tile.first_vector), 0);
#pragma unroll 1
  for (int first = thread / kWarpSize * warp_rows; first < tile.rows;
       first += kThreads / kWarpSize * warp_rows) {
    const int i = min(first + own, tile.rows - 1);
    const bool exists = own < warp_rows && first + own < tile.rows;
    const auto at = rows.at_index(place_of(i), of_rows[i], exists, own, lane - own * indices);
    const int64_t element = int64_t{tile.first_row + i} * plan.classes.value + at.index;
    if (exists && at.index >= 0 && begin <= element && element < end) {
      type.visit([&](auto like) {
        results[element] = bits_as<scalar_t>(from_acc<decltype(like)>(at.gradient));
      });
    }
  }
}

// The most rows of a slice: their gradients are one run of at most kMostElements.
inline int64_t most_flat_rows(int64_t num_classes) {
  return std::max<int64_t>(FlatTiles::kMostElements / num_classes, 1);
}

// Launches flat_gradients_kernel for a slice, whose gradients follow one another. rows: the
// functor.
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
