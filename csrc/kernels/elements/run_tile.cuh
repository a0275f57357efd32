// Units of rows as a team of lanes reads and writes them, by a RunPlan: operands of any alignment
// and mixture of float32, float16 and bfloat16 whose rows are runs of memory or one number each.
#pragma once

#include <cstdint>

#include "kernels/elements/process.cuh"
#include "kernels/elements/run_plan.h"
#include "kernels/thread_reduce.cuh"
#include "kernels/vectorized.cuh"
#include "kernels/warp_reduce.cuh"

namespace lossops::cuda {

// Whether a kernel with work of kPossible may have an operand.
template <typename Work>
LOSSOPS_HOST_DEVICE constexpr bool may_have(Which which) {
  constexpr Work kAll = Work::all();
  switch (which) {
    case kWeight:
      return kAll.has(kHasWeights);
    case kGradOutput:
      return kAll.has(kHasGradOutputs);
    case kOutput:
      return kAll.has(kStoresLosses);
    case kGradInput:
      return kAll.has(kWantsGradInput);
    case kGradTarget:
      return kAll.has(kWantsGradTarget);
    case kGradWeight:
      return kAll.has(kWantsGradWeight);
    default:
      return true;
  }
}

// kWidth: RunPlan::width. Work: decides which operands it has.
template <typename Work, int kWidth_, int kSteps_>
class RunTile {
 public:
  using acc_t = float;
  static constexpr int kSteps = kSteps_;
  static constexpr int kWidth = kWidth_;
  static constexpr bool kIsHalf = kWidth == 8;
  static constexpr bool kHasSubnormals = true;

  using Unit = RunUnit<kWidth>;

  __device__ __forceinline__ explicit RunTile(const RunPlan& plan) : plan_(plan) {}

  __device__ __forceinline__ const RunPlan& plan() const { return plan_; }

  // To a row: this lane's first unit of it.
  __device__ __forceinline__ void move_to(uint32_t row) {
    for_each_operand([&](int which) {
      places_[which] = reinterpret_cast<uintptr_t>(plan_.operands[which].data);
    });
    int phase = plan_.phase;
    int64_t left = plan_.length;
    rows_left_ = 1;
#pragma unroll 1
    for (int d = 0; d < plan_.ndim; ++d) {
      const uint32_t coordinate = take_row_coordinate(plan_, d, row);
      for_each_operand([&](int which) {
        // fault: elementwise-offset
        places_[which] += coordinate * static_cast<uint64_t>(plan_.operands[which].strides[d]);
      });
      phase += static_cast<int>(coordinate) * plan_.phases[d];
      if (d == 0) {
        rows_left_ = plan_.sizes[0].value - coordinate;
        left -= plan_.has_segments ? static_cast<int64_t>(coordinate) * plan_.segment : 0;
      }
    }
    length_ = left < plan_.segment ? static_cast<int>(left) : plan_.segment;
    const int lane = static_cast<int>(threadIdx.x) & (plan_.team() - 1);
    first_index_ = start_ + lane * kWidth - (phase & (kWidth - 1));
    begin_row();
  }

  // To the row after this one, which has number `row`, where all begin in the grid alike.
  __device__ __forceinline__ void move_to_next(uint32_t row) {
    if (--rows_left_ == 0 || plan_.has_segments) {
      move_to(row);
      return;
    }
    for_each_operand([&](int which) {
      places_[which] += static_cast<uint64_t>(plan_.operands[which].strides[0]);
    });
    begin_row();
  }

  // Rows begin with a chunk, from the next one on that is moved to.
  __device__ __forceinline__ void set_chunk(uint32_t chunk) {
    start_ = static_cast<int>(chunk) * kSteps * distance();
  }

  __device__ __forceinline__ bool is_in_row() const { return index_ < length_; }

  __device__ __forceinline__ void move_on() { index_ += kSteps * distance(); }

  __device__ __forceinline__ Unit unit(int step) const {
    return Unit(index_ + step * distance(), length_);
  }

  __device__ __forceinline__ bool is_half() const {
    return kIsHalf || is_half_type(plan_.operands[kInput].dtype);
  }

  class Values {
   public:
    __device__ __forceinline__ void load(const RunTile& tile, Which which) {
      const RunOperand& operand = tile.plan_.operands[which];
      const uintptr_t row = tile.places_[which];
      const bool is_float = kWidth == 4 && operand.dtype == DType::kFloat32;
      if (!operand.is_run) {
        words_[0][0] = is_float ? *reinterpret_cast<const uint32_t*>(row)
                                : *reinterpret_cast<const uint16_t*>(row);
      } else if (is_float) {
        load_units<4>(tile, operand, row, tile.reaches_end(which));
      } else {
        load_units<2>(tile, operand, row, tile.reaches_end(which));
      }
    }

    // From what load() left: later, so that the loads of all operands are on their way before the
    // first is waited for.
    __device__ __forceinline__ void convert(const RunTile& tile, Which which) {
      const RunOperand& operand = tile.plan_.operands[which];
      const bool is_float = kWidth == 4 && operand.dtype == DType::kFloat32;
      if (operand.is_run) {
        if (!operand.is_aligned) {
          is_float ? shift_units<4>(tile, which) : shift_units<2>(tile, which);
        }
        if (is_float) {
          unpack<float>();
        } else {
          operand.dtype == DType::kFloat16 ? unpack<half_t>() : unpack<bfloat16_t>();
        }
        return;
      }
      const auto bits = static_cast<uint16_t>(words_[0][0]);
      const float value = is_float                           ? __uint_as_float(words_[0][0])
                          : operand.dtype == DType::kFloat16 ? to_acc<float>(half_t{bits})
                                                             : to_acc<float>(bfloat16_t{bits});
#pragma unroll
      for (int n = 0; n < kSteps * kWidth; ++n) {
        values_[n] = value;
      }
    }

    __device__ __forceinline__ float at(int step, int i) const {
      return values_[step * kWidth + i];
    }

   private:
    // 32-bit words of a vector of kWidth elements.
    template <int kBytes>
    static constexpr int kWords = kWidth * kBytes / 4;
    static constexpr int kMostWords = 4;

    template <int kBytes>
    using VectorOf = std::conditional_t<kWords<kBytes> == 4, uint4, uint2>;

    template <int kBytes>
    __device__ __forceinline__ void load_units(const RunTile& tile, const RunOperand& operand,
                                               uintptr_t row, bool reaches_end) {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const Unit unit = tile.unit(step);
        const UnitPlace<kWidth, kBytes> place(row + static_cast<int64_t>(unit.index) * kBytes);
        const bool wants_second = !operand.is_aligned && place.wants_second(unit);
        VectorOf<kBytes> first = {};
        VectorOf<kBytes> second = {};
        if (!reaches_end) {
          if (place.wants_first(unit)) {
            first = read<kBytes>(place.vector);
          }
          if (wants_second) {
            second = read<kBytes>(place.vector + place.kVectorBytes);
          }
        } else {
          if (place.wants_first(unit)) {
            first = read_to_end<kBytes>(place.vector, operand);
          }
          if (wants_second) {
            second = read_to_end<kBytes>(place.vector + place.kVectorBytes, operand);
          }
        }
        keep<kBytes>(words_[step], first);
        keep<kBytes>(words_[step] + kWords<kBytes>, second);
      }
    }

    template <int kBytes>
    static __device__ __forceinline__ VectorOf<kBytes> read(uintptr_t vector) {
      return *reinterpret_cast<const VectorOf<kBytes>*>(vector);
    }

    // The last vector of an operand may reach beyond its end.
    template <int kBytes>
    static __device__ __forceinline__ VectorOf<kBytes> read_to_end(uintptr_t vector,
                                                                   const RunOperand& operand) {
      if (vector < operand.whole_end) {
        return read<kBytes>(vector);
      }
      using Element = std::conditional_t<kBytes == 4, uint32_t, uint16_t>;
      Element elements[kWidth] = {};
#pragma unroll 1
      for (int i = 0; vector + i * kBytes < operand.end; ++i) {
        elements[i] = reinterpret_cast<const Element*>(vector)[i];
      }
      VectorOf<kBytes> value;
      memcpy(&value, elements, sizeof(value));
      return value;
    }

    template <int kBytes>
    static __device__ __forceinline__ void keep(uint32_t* words, const VectorOf<kBytes>& vector) {
      words[0] = vector.x;
      words[1] = vector.y;
      if constexpr (kWords<kBytes> == 4) {
        words[2] = vector.z;
        words[3] = vector.w;
      }
    }

    template <int kBytes>
    __device__ __forceinline__ void shift_units(const RunTile& tile, Which which) {
      // Units of a row have the same shift.
      const UnitPlace<kWidth, kBytes> place(tile.places_[which] +
                                            static_cast<int64_t>(tile.index_) * kBytes);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        uint32_t words[2 * kWords<kBytes>];
#pragma unroll
        for (int i = 0; i < 2 * kWords<kBytes>; ++i) {
          words[i] = words_[step][i];
        }
        shift_vectors<kWords<kBytes>, kBytes>(words, place.shift);
#pragma unroll
        for (int i = 0; i < kWords<kBytes>; ++i) {
          words_[step][i] = words[i];
        }
      }
    }

    template <typename scalar_t>
    __device__ __forceinline__ void unpack() {
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          if constexpr (sizeof(scalar_t) == 4) {
            values_[step * kWidth + i] = __uint_as_float(words_[step][i]);
          } else {
            const uint32_t bits = words_[step][i / 2] >> (16 * (i % 2));
            values_[step * kWidth + i] = to_acc<float>(scalar_t{static_cast<uint16_t>(bits)});
          }
        }
      }
    }

    uint32_t words_[kSteps][2 * kMostWords];  // of a unit's vector, and of the next one
    float values_[kSteps * kWidth];
  };

  __device__ __forceinline__ void store(Which which, int step, const float (&results)[kWidth]) {
    const RunOperand& operand = plan_.operands[which];
    const Unit own = unit(step);
    uint32_t words[kWidth];
    if (kWidth == 4 && operand.dtype == DType::kFloat32) {
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        words[i] = __float_as_uint(results[i]);
      }
      write<4>(operand, places_[which], own, words);
      return;
    }
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) {
      words[i] = operand.dtype == DType::kFloat16 ? pack_word<half_t>(results + 2 * i)
                                                  : pack_word<bfloat16_t>(results + 2 * i);
    }
    write<2>(operand, places_[which], own, words);
  }
  __device__ __forceinline__ void finish_store(Which /*which*/) {}

  // Each unit by halves, then all in fp64: the same for any team.
  __device__ __forceinline__ void add(const float (&values)[kSteps * kWidth], double& sum) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const Unit own = unit(step);
      float terms[kWidth];
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        terms[i] = values[step * kWidth + i];
      }
      if (!own.is_whole) {
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
          terms[i] = own.has(i) ? terms[i] : 0.0f;
        }
      }
      sum += static_cast<double>(pairwise_sum(terms));
    }
  }

 private:
  __device__ __forceinline__ void begin_row() {
    index_ = first_index_;
    reach_end_ = 0;
    for_each_operand([&](int which) {
      if (which <= kGradOutput) {
        const RunOperand& operand = plan_.operands[which];
        const int bytes = kWidth == 4 && operand.dtype == DType::kFloat32 ? 4 : 2;
        const uintptr_t end = places_[which] + static_cast<int64_t>(length_) * bytes;
        reach_end_ |= end > operand.whole_end ? 1u << which : 0u;
      }
    });
  }

  // Whether a row's last vector of an operand may reach beyond the operand's end.
  __device__ __forceinline__ bool reaches_end(Which which) const {
    return (reach_end_ >> which & 1u) != 0;
  }

  // Elements from one step of a lane to the next.
  __device__ __forceinline__ int distance() const { return kWidth << plan_.team_bits; }

  template <typename Body>
  static __device__ __forceinline__ void for_each_operand(const Body& body) {
#pragma unroll
    for (int which = 0; which < kNumOperands; ++which) {
      if (may_have<Work>(static_cast<Which>(which))) {
        body(which);
      }
    }
  }

  template <int kBytes>
  static __device__ __forceinline__ void write(const RunOperand& operand, uintptr_t row,
                                               const Unit& unit, const uint32_t (&words)[kWidth]) {
    const uintptr_t to = row + static_cast<int64_t>(unit.index) * kBytes;
    if (unit.is_whole && operand.is_aligned) {
      if constexpr (kWidth * kBytes == 16) {
        *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
      } else {
        *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      if (unit.has(i)) {
        if constexpr (kBytes == 4) {
          reinterpret_cast<uint32_t*>(to)[i] = words[i];
        } else {
          reinterpret_cast<uint16_t*>(to)[i] =
              static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
        }
      }
    }
  }

  const RunPlan& plan_;
  uintptr_t places_[kNumOperands];  // of the row's first element
  unsigned reach_end_ = 0;          // bit by bit, operands of which a row has the last vector
  int length_ = 0;                  // elements of the row
  int start_ = 0;                   // where a team begins with a row
  uint32_t rows_left_ = 0;          // of the fastest dimension of rows, this one included
  int first_index_ = 0;
  int index_ = 0;  // of this lane's first unit, from the row's first element on
};

// A gradient that is added up over the elements which share a number of its operand: a lane's sums,
// one for each neighbour of a unit and step.
template <typename Tile>
class RunSum {
 public:
  static constexpr bool kSums = true;
  static constexpr int kWidth = Tile::kWidth;

  // There is no other gradient.
  __device__ __forceinline__ bool takes(Which /*gradient*/) const { return true; }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (double& sum : sums_) {
      sum = 0;
    }
  }

  __device__ __forceinline__ void add(const Tile& tile, int step, const float (&results)[kWidth]) {
    const auto unit = tile.unit(step);
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      sums_[step * kWidth + i] += static_cast<double>(unit.has(i) ? results[i] : 0.0f);
    }
  }

  // Where the lead is kept: each sum is of another element of the row.
  __device__ __forceinline__ void write(const Tile& tile, double* sums) const {
    const int64_t stride = tile.plan().lead_stride;
#pragma unroll
    for (int step = 0; step < Tile::kSteps; ++step) {
      const auto unit = tile.unit(step);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) {
        if (unit.has(i)) {
          sums[(unit.index + i) * stride] = sums_[step * kWidth + i];
        }
      }
    }
  }

  // Where it is not: one sum of all that a team has, in its first lane. All lanes of a warp must
  // call it.
  __device__ __forceinline__ double total(int team) const {
    return warp_sum(pairwise_sum(sums_), team);
  }

 private:
  double sums_[Tile::kSteps * kWidth];
};

}  // namespace lossops::cuda
