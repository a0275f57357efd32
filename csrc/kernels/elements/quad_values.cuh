// A thread's quads of an operand, whose elements follow each other in an aligned vector, or are one
// number, lie in words, or at equal distances: read, converted, written.
//
// A Tile says how many there are (kSteps), and where they are:
//
// - operand(which): its PlanOperand; kind(which): how the thread takes its quads;
// - locate(which, addresses): the addresses of their first elements;
// - stride(which): bytes from an element of a quad to the next;
// - kHasWords: half types may be read by words; then joins_next(step) and joins_previous(step) say
//   whether the neighbouring lanes have what lies beside a quad;
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
    return Tile::kIsHalf || is_half_type(tile.operand(which).dtype);
  }

  template <int kBytes>
  __device__ __forceinline__ void load(const Tile& tile, Which which) {
    char* addresses[kSteps];
    tile.locate(which, addresses);
    const auto for_each = [&](auto&& body) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        body(quads_[step], addresses[step]);
      }
    };
    const UnitKind kind = tile.kind(which);
    if (kind == UnitKind::kVector) {
      for_each([](QuadCells& quad, const char* data) { quad.template load_vector<kBytes>(data); });
    } else if (kind == UnitKind::kOne) {
      for_each([](QuadCells& quad, const char* data) { quad.template load_one<kBytes>(data); });
    } else if (kHasWords<kBytes>) {  // no other kind is read
      odd_ = 0;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        odd_ |= is_odd(addresses[step]) ? 1u << step : 0;
        quads_[step].load_words(addresses[step]);
      }
    } else {
      const int stride = tile.stride(which);
      for_each([stride](QuadCells& quad, const char* data) {
        quad.template load_strided<kBytes>(data, stride);
      });
    }
  }

  template <int kBytes>
  __device__ __forceinline__ void settle(UnitKind kind) {
    if (kind == UnitKind::kOne) {
#pragma unroll
      for (QuadCells& quad : quads_) {
        quad.template settle_one<kBytes>();
      }
    } else if (kBytes == 2 && kind != UnitKind::kVector) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        kHasWords<kBytes> ? quads_[step].settle_words((odd_ >> step & 1) != 0)
                          : quads_[step].settle_strided();
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
    char* addresses[kSteps];
    tile.locate(which, addresses);
    const auto for_each = [&](auto&& body) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        body(step, QuadCells::pack<scalar_t>(values + step * kQuad), addresses[step]);
      }
    };
    if (tile.kind(which) == UnitKind::kVector) {
      for_each([](int /*step*/, const QuadCells& quad, char* data) {
        quad.template store_vector<kBytes>(data);
      });
      return;
    }
    if constexpr (kHasWords<kBytes>) {
      if (tile.kind(which) == UnitKind::kWords) {
        for_each([&](int step, const QuadCells& quad, char* data) {
          quad.store_words(data, tile.joins_previous(step), tile.joins_next(step));
        });
        return;
      }
    }
    const int stride = tile.stride(which);
    for_each([stride](int /*step*/, const QuadCells& quad, char* data) {
      quad.template store_strided<kBytes>(data, stride);
    });
  }

  template <int kBytes>
  static constexpr bool kHasWords = Tile::kHasWords && kBytes == 2;

  QuadCells quads_[kSteps];
  // Of quads of words, a bit for each step: its first element is the second of its word.
  uint32_t odd_;
};

}  // namespace lossops::cuda
