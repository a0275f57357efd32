// How a warp copies the rows of a tile to shared memory, and their gradients back.
#pragma once

#include <cstdint>

#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/tile_layout.h"

namespace lossops::cuda {

// How a warp copies the rows of an operand, as the kernel is told.
struct CopyShape {
  TileLayout layout;
  int classes = 0;   // elements of a row
  Divisor granules;  // of 16 bytes from a row to the next in global memory, where there is padding

  CopyShape() = default;
  CopyShape(const TileLayout& layout_, int64_t num_classes, int element_bytes)
      : layout(layout_), classes(static_cast<int>(num_classes)) {
    if (layout.padding > 0) {
      granules = Divisor(static_cast<uint32_t>(layout.stride * element_bytes / kVectorBytes));
    }
  }

  // Where a granule of the rows lies in shared memory.
  __device__ __forceinline__ int place(int granule) const {
    return layout.padding == 0
               ? granule
               : granule + static_cast<int>(granules.quotient(static_cast<uint32_t>(granule)));
  }
};

// The rows of a tile that are copied as one run, in granules of 16 bytes. A first or last granule
// that also holds elements of others is copied element by element. Granules count from the one
// where the first row begins.
template <typename scalar_t>
class TileRun {
 public:
  static constexpr int kSize = kVectorSize<scalar_t>;

  TileRun() = default;
  // data: of the first row.
  __device__ __forceinline__ TileRun(const CopyShape& shape, const scalar_t* data, int rows)
      : phase_(
            static_cast<int>(reinterpret_cast<uintptr_t>(data) % kVectorBytes / sizeof(scalar_t))),
        end_(phase_ + (rows - 1) * static_cast<int>(shape.layout.stride) + shape.classes) {}

  // Elements between the beginning of the first granule and the first row.
  __device__ __forceinline__ int phase() const { return phase_; }

  // Calls body(g) with this lane's granules that are the tile's alone.
  template <typename Body>
  __device__ __forceinline__ void for_each_whole(const Body& body) const {
#pragma unroll 4
    for (int g = lane() + whole_begin(); g < whole_end(); g += kWarpSize) {
      body(g);
    }
  }
  // An element of a granule that is not the tile's alone, for this lane to copy, counted from the
  // start of the first granule; -1 if there is none.
  __device__ __forceinline__ int edge() const {
    const bool is_head = lane() < kSize;
    const int head_end = min(whole_begin() * kSize, end_);
    const int element = is_head ? lane() : max(whole_end(), whole_begin()) * kSize + lane() - kSize;
    const bool is_there =
        is_head ? element >= phase_ && element < head_end : lane() < 2 * kSize && element < end_;
    return is_there ? element : -1;
  }

 private:
  __device__ __forceinline__ static int lane() { return static_cast<int>(threadIdx.x) % kWarpSize; }
  __device__ __forceinline__ int whole_begin() const { return phase_ > 0 ? 1 : 0; }
  __device__ __forceinline__ int whole_end() const { return end_ / kSize; }

  int phase_ = 0;
  int end_ = 0;
};

// The rows of an operand that a warp copies to its part of the shared memory.
template <typename scalar_t>
class TileCopy {
 public:
  // buffer: aligned to 16 bytes.
  __device__ __forceinline__ TileCopy(const CopyShape& shape, void* buffer)
      : shape_(shape), elements_(static_cast<scalar_t*>(buffer)) {}

  // Starts to copy rows that are a run. data: of the operand.
  __device__ __forceinline__ void start_run(const void* data, int64_t first_row, int rows) {
    const auto* const first = static_cast<const scalar_t*>(data) + first_row * shape_.layout.stride;
    run_ = TileRun<scalar_t>(shape_, first, rows);
    const scalar_t* const base = first - run_.phase();
    edge_ = run_.edge();
    if (edge_ >= 0) {
      at_edge_ = base[edge_];
    }
    run_.for_each_whole([&](int g) {
      start_own_copy(reinterpret_cast<uint4*>(elements_) + shape_.place(g),
                     reinterpret_cast<const uint4*>(base) + g);
    });
  }
  // Puts the elements there that were loaded one by one; after this lane's copies have arrived.
  __device__ __forceinline__ void settle() const {
    if (edge_ >= 0) {
      elements_[place_of(edge_)] = at_edge_;
    }
  }

  // Row r begins at element `offset` of the buffer.
  __device__ __forceinline__ int offset(int r) const {
    return run_.phase() + r * shape_.layout.pitch;
  }
  __device__ __forceinline__ scalar_t* elements() const { return elements_; }

  // Writes the tile, after start_run(), to rows that follow one another without gaps, and whose
  // first row lies in its granule as the copied one did.
  __device__ __forceinline__ void store_run(void* data, int64_t first_row) const {
    scalar_t* const base =
        static_cast<scalar_t*>(data) + first_row * shape_.layout.stride - run_.phase();
    run_.for_each_whole([&](int g) {
      reinterpret_cast<uint4*>(base)[g] =
          reinterpret_cast<const uint4*>(elements_)[shape_.place(g)];
    });
    if (edge_ >= 0) {
      base[edge_] = elements_[place_of(edge_)];
    }
  }
  // Writes the rows one by one, `stride` elements apart. Each row must begin at the same place of a
  // granule as the row that was copied.
  __device__ __forceinline__ void store_rows_in_vectors(void* data, int64_t stride,
                                                        int64_t first_row, int rows) const {
    scalar_t* row = static_cast<scalar_t*>(data) + first_row * stride;
#pragma unroll 1
    for (int r = 0; r < rows; ++r) {
      const TileRun<scalar_t> run(shape_, row, 1);
      const scalar_t* const from = elements_ + offset(r) - run.phase();
      scalar_t* const to = row - run.phase();
      run.for_each_whole([&](int g) { store_vector(to, g, load_vector(from, g)); });
      const int edge = run.edge();
      if (edge >= 0) {
        to[edge] = from[edge];  // fault: tile-row-edges
      }
      row += stride;
    }
  }

 private:
  __device__ __forceinline__ int place_of(int element) const {
    constexpr int kSize = kVectorSize<scalar_t>;
    return shape_.place(element / kSize) * kSize + element % kSize;
  }

  const CopyShape& shape_;
  scalar_t* elements_;
  TileRun<scalar_t> run_;
  int edge_ = -1;
  scalar_t at_edge_ = {};
};

}  // namespace lossops::cuda
