// A thread's quads of an operand, whose elements follow each other in an aligned vector, or are one
// number, or lie at equal distances: read, converted, written.
//
// A Tile says how many there are (kSteps), and where they are:
//
// - operand(which): its PlanOperand; kind(which): how the thread takes its quads;
// - row(which, step), column(which, step): the address of a quad's row, the column of its first
//   element;
// - stride(which): bytes from a column to the next; spread(): columns from an element of a quad to
//   the next;
// - turn_read(which, quads), turn_results(which, values): called after values were read, and before
//   they are written.
#pragma once

#include <cstdint>

#include "kernels/elements/plan.h"
#include "kernels/elements/quad.cuh"

namespace lossops::cuda {

template <typename Tile>
class QuadValues {
 public:
  static constexpr int kSteps = Tile::kSteps;
  static constexpr int kCount = kSteps * kQuad;

  __device__ __forceinline__ void load(const Tile& tile, Which which) {
    if (is_half(tile, which)) {
      load<2>(tile, which);
    } else {
      load<4>(tile, which);
    }
  }
  __device__ __forceinline__ void convert(const Tile& tile, Which which) {
    if (is_half(tile, which)) {
      settle<2>(tile.kind(which));
      tile.operand(which).dtype == DType::kBFloat16 ? unpack<bfloat16_t>() : unpack<half_t>();
    } else {
      settle<4>(tile.kind(which));
    }
    tile.turn_read(which, *this);
  }
  __device__ __forceinline__ float at(int step, int i) const {
    return __uint_as_float(quads_[step].cells[i]);
  }
  __device__ __forceinline__ void set(int step, int i, float value) {
    quads_[step].cells[i] = __float_as_uint(value);
  }

  // Rounds and writes.
  static __device__ __forceinline__ void store(const Tile& tile, Which which,
                                               const float (&results)[kCount]) {
    float values[kCount];
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      values[n] = results[n];
    }
    tile.turn_results(which, values);
    const DType dtype = tile.operand(which).dtype;
    if (dtype == DType::kBFloat16) {
      store_as<bfloat16_t>(tile, which, values);
    } else if (is_half(tile, which)) {
      store_as<half_t>(tile, which, values);
    } else {
      store_as<float>(tile, which, values);
    }
  }

 private:
  static __device__ __forceinline__ bool is_half(const Tile& tile, Which which) {
    return is_half_type(tile.operand(which).dtype);
  }

  // The addresses of a thread's quads.
  class Places {
   public:
    __device__ __forceinline__ Places(const Tile& tile, Which which) : tile_(tile), which_(which) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        rows_[step] = tile.row(which, step);
      }
    }
    // Calls body(step, address). stride: bytes from a column to the next.
    template <typename Body>
    __device__ __forceinline__ void for_each(int stride, const Body& body) const {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        char* const address =
            rows_[step] + static_cast<int64_t>(tile_.column(which_, step)) * stride;
        __builtin_assume(__isGlobal(address));
        body(step, address);
      }
    }

   private:
    const Tile& tile_;
    const Which which_;
    char* rows_[kSteps];
  };

  template <int kBytes>
  __device__ __forceinline__ void load(const Tile& tile, Which which) {
    const Places places(tile, which);
    switch (tile.kind(which)) {
      case UnitKind::kVector:
        places.for_each(kBytes, [&](int step, const char* data) {
          quads_[step].template load_vector<kBytes>(data);
        });
        break;
      case UnitKind::kOne:
        places.for_each(
            0, [&](int step, const char* data) { quads_[step].template load_one<kBytes>(data); });
        break;
      case UnitKind::kStrided: {
        const int stride = tile.stride(which);
        const int distance = tile.spread() * stride;
        places.for_each(stride, [&](int step, const char* data) {
          quads_[step].template load_strided<kBytes>(data, distance);
        });
      }
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void settle(UnitKind kind) {
    if (kind == UnitKind::kOne) {
#pragma unroll
      for (QuadCells& quad : quads_) {
        quad.template settle_one<kBytes>();
      }
    } else if (kBytes == 2 && kind == UnitKind::kStrided) {
#pragma unroll
      for (QuadCells& quad : quads_) {
        quad.settle_strided();
      }
    }
  }

  template <typename scalar_t>
  __device__ __forceinline__ void unpack() {
#pragma unroll
    for (QuadCells& quad : quads_) {
      quad.template unpack<scalar_t>();
    }
  }

  template <typename scalar_t>
  static __device__ __forceinline__ void store_as(const Tile& tile, Which which,
                                                  const float (&values)[kCount]) {
    constexpr int kBytes = sizeof(scalar_t);
    const auto packed = [&](int step) { return QuadCells::pack<scalar_t>(values + step * kQuad); };
    const Places places(tile, which);
    if (tile.kind(which) == UnitKind::kVector) {
      places.for_each(
          kBytes, [&](int step, char* data) { packed(step).template store_vector<kBytes>(data); });
    } else {
      const int stride = tile.stride(which);
      const int distance = tile.spread() * stride;
      places.for_each(stride, [&](int step, char* data) {
        packed(step).template store_strided<kBytes>(data, distance);
      });
    }
  }

  QuadCells quads_[kSteps];
};

}  // namespace lossops::cuda
