// Tiles of rows whose elements are neighbours, or one number a row: four elements a thread and
// access.
#pragma once

#include <cstdint>

#include "kernels/elements/matrix_places.cuh"
#include "kernels/elements/quad.cuh"

namespace lossops::cuda {

// kSteps quads of a thread, kTileThreads apart; all of them are there. kIsHalf: all operands are of
// half types.
template <int kSteps_, bool kIsHalf_>
class QuadTile {
 public:
  using acc_t = float;
  static constexpr int kWidth = kQuad;
  static constexpr int kSteps = kSteps_;
  static constexpr bool kIsHalf = kIsHalf_;
  static constexpr bool kHasSubnormals = true;

  // first: the thread's first element in the chunk.
  __device__ __forceinline__ QuadTile(const MatrixPlan& plan, const ChunkPlaces& chunk,
                                      uint32_t first)
      : places_(plan, chunk, first) {}

  class Values {
   public:
    __device__ __forceinline__ void load(const QuadTile& tile, Which which) {
      tile.is_half(which) ? load<2>(tile, which) : load<4>(tile, which);
    }
    __device__ __forceinline__ void convert(const QuadTile& tile, Which which) {
      const MatrixOperand& operand = tile.places_.operand(which);
      if (!tile.is_half(which)) {
        settle<4>(tile, operand);
        return;
      }
      settle<2>(tile, operand);
      operand.dtype == DType::kBFloat16 ? unpack<bfloat16_t>() : unpack<half_t>();
    }
    __device__ __forceinline__ float at(int step, int i) const {
      return __uint_as_float(quads_[step].cells[i]);
    }

   private:
    template <int kBytes>
    __device__ __forceinline__ void load(const QuadTile& tile, Which which) {
      const QuadKind kind = tile.places_.operand(which).quads;
      if (kind == QuadKind::kVector) {
        tile.for_each_quad(which, kBytes, [&](int step, const char* data) {
          quads_[step].template load_vector<kBytes>(data);
        });
      } else if (kind == QuadKind::kOne) {
        tile.for_each_quad(which, 0, [&](int step, const char* data) {
          quads_[step].template load_one<kBytes>(data);
        });
      } else if constexpr (kBytes == 2) {
        odd_ = 0;
        const int32_t jump = tile.places_.operand(which).gap;
        tile.places_.for_each_step(which, kBytes, [&](int step, const char* data) {
          odd_ |= (reinterpret_cast<uintptr_t>(data) & 2) != 0 ? 1u << step : 0;
          const int left = tile.places_.left(step);
          if (left >= kQuad) {
            quads_[step].load_words(data);
          } else {
            quads_[step].load_halves(data, left, jump);
          }
        });
      }
    }
    template <int kBytes>
    __device__ __forceinline__ void settle(const QuadTile& tile, const MatrixOperand& operand) {
      if (operand.quads == QuadKind::kOne) {
#pragma unroll
        for (QuadCells& quad : quads_) {
          quad.template settle_one<kBytes>();
        }
      } else if (kBytes == 2 && operand.quads == QuadKind::kWords) {
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
          quads_[step].settle_words(tile.places_.left(step) < kQuad, (odd_ >> step & 1) != 0);
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

    QuadCells quads_[kSteps];
    // Of quads of words, a bit for each step: its first element is the second of its word.
    uint32_t odd_;
  };

  __device__ __forceinline__ bool is_half() const { return is_half(kInput); }
  __device__ __forceinline__ bool has(int /*n*/) const { return true; }
  __device__ __forceinline__ bool has_all() const { return true; }

  // Rounds and writes.
  __device__ __forceinline__ void store(Which which, const float (&results)[kSteps * kWidth]) {
    const DType dtype = places_.operand(which).dtype;
    if (dtype == DType::kBFloat16) {
      store_halves<bfloat16_t>(which, results);
    } else if (is_half(which)) {
      store_halves<half_t>(which, results);
    } else {
      for_each_quad(which, 4, [&](int step, char* data) {
        QuadCells::pack<float>(results + step * kWidth).template store_vector<4>(data);
      });
    }
  }

 private:
  __device__ __forceinline__ bool is_half(Which which) const {
    return kIsHalf || is_half_type(places_.operand(which).dtype);
  }

  template <typename scalar_t>
  __device__ __forceinline__ void store_halves(Which which,
                                               const float (&results)[kSteps * kWidth]) const {
    const auto pack = [&](int step) { return QuadCells::pack<scalar_t>(results + step * kWidth); };
    if (places_.operand(which).quads == QuadKind::kVector) {
      for_each_quad(which, 2,
                    [&](int step, char* data) { pack(step).template store_vector<2>(data); });
    } else {
      const int32_t jump = places_.operand(which).gap;
      places_.for_each_step(which, 2, [&](int step, char* data) {
        pack(step).store_halves(data, places_.left(step), jump);
      });
    }
  }

  // stride: bytes from an element of a row to the next.
  template <typename Body>
  __device__ __forceinline__ void for_each_quad(Which which, int32_t stride,
                                                const Body& body) const {
    places_.for_each_step(which, stride, body);
  }

  const MatrixPlaces<kSteps, kWidth> places_;
};

}  // namespace lossops::cuda
