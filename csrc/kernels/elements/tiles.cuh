// Tiles of elements as a block reads and writes them: of dense operands of one dtype by whole
// vectors, of any others by a TilePlan. Both have the same members, for process.cuh:
//
//   kSteps, kWidth       a thread's elements: kWidth neighbours in each of kSteps steps
//   Values               of one operand: load(), then convert(), then at(step, i)
//   store(which, step, results), finish_store(which)
//   add(values, sum)     adds a thread's values to a sum in fp64
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/async_copy.cuh"
#include "kernels/elements/tile_plan.h"
#include "kernels/thread_reduce.cuh"
#include "kernels/vectorized.cuh"

namespace lossops::cuda {

// 16-byte vectors a thread and dense operand, all in flight at once: 4, and 2 of half types.
// Measured on an H200: more vectors, more threads or a persistent grid lose 4 to 14 %. fp64 has 1,
// for less machine code.
template <typename scalar_t>
constexpr int kVectors = sizeof(scalar_t) == 8   ? 1
                         : sizeof(scalar_t) == 2 ? 2
                                                 : 4;

template <typename scalar_t>
constexpr int64_t kDenseTile = int64_t{kTileThreads} * kVectors<scalar_t> * kVectorSize<scalar_t>;

// Dense operands of one dtype: element i of each is data[i].
struct DenseOperands {
  void* data[kNumOperands];  // null: absent
  int64_t numel;
};

// A whole tile of dense operands.
template <typename scalar_t_>
class DenseTile {
 public:
  using scalar_t = scalar_t_;
  using acc_t = acc_type_t<scalar_t>;
  static constexpr int kSteps = kVectors<scalar_t>;
  static constexpr int kWidth = kVectorSize<scalar_t>;
  static constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  // Numbers may be subnormal, as float: those of float16 are not.
  static constexpr bool kHasSubnormals = !std::is_same_v<scalar_t, half_t>;

  __device__ __forceinline__ DenseTile(const DenseOperands& operands, int64_t tile)
      : operands_(operands), first_(tile * (kDenseTile<scalar_t> / kWidth) + threadIdx.x) {}

  class Values {
   public:
    __device__ __forceinline__ void load(const DenseTile& tile, Which which) {
      const auto* const data = static_cast<const scalar_t*>(tile.operands_.data[which]);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        vectors_[step] = load_vector(data, tile.first_ + step * kTileThreads);
      }
    }
    __device__ __forceinline__ void convert(const DenseTile& /*tile*/, Which /*which*/) {}
    __device__ __forceinline__ acc_t at(int step, int i) const {
      return to_acc<acc_t>(vectors_[step].get(i));
    }

   private:
    Vector<scalar_t> vectors_[kSteps];
  };

  __device__ __forceinline__ bool is_half() const { return kIsHalf; }

  __device__ __forceinline__ void store(Which which, int step, const acc_t (&results)[kWidth]) {
    store_vector(static_cast<scalar_t*>(operands_.data[which]), first_ + step * kTileThreads,
                 pack<scalar_t>(results));
  }
  __device__ __forceinline__ void finish_store(Which /*which*/) {}

  __device__ __forceinline__ void add(const acc_t (&values)[kSteps * kWidth], double& sum) const {
    sum += static_cast<double>(pairwise_sum(values));
  }

 private:
  const DenseOperands& operands_;
  int64_t first_;  // of this thread, in vectors
};

// An element of dense operands after the last whole tile.
template <typename scalar_t_>
class DenseRest {
 public:
  using scalar_t = scalar_t_;
  using acc_t = acc_type_t<scalar_t>;
  static constexpr int kSteps = 1;
  static constexpr int kWidth = 1;
  static constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  static constexpr bool kHasSubnormals = !std::is_same_v<scalar_t, half_t>;

  __device__ __forceinline__ DenseRest(const DenseOperands& operands, int64_t index)
      : operands_(operands), index_(index) {}

  class Values {
   public:
    __device__ __forceinline__ void load(const DenseRest& tile, Which which) {
      value_ = static_cast<const scalar_t*>(tile.operands_.data[which])[tile.index_];
    }
    __device__ __forceinline__ void convert(const DenseRest& /*tile*/, Which /*which*/) {}
    __device__ __forceinline__ acc_t at(int /*step*/, int /*i*/) const {
      return to_acc<acc_t>(value_);
    }

   private:
    scalar_t value_;
  };

  __device__ __forceinline__ bool is_half() const { return kIsHalf; }

  __device__ __forceinline__ void store(Which which, int /*step*/, const acc_t (&results)[1]) {
    static_cast<scalar_t*>(operands_.data[which])[index_] = from_acc<scalar_t>(results[0]);
  }
  __device__ __forceinline__ void finish_store(Which /*which*/) {}

  __device__ __forceinline__ void add(const acc_t (&values)[1], double& sum) const {
    sum += static_cast<double>(values[0]);
  }

 private:
  const DenseOperands& operands_;
  int64_t index_;
};

// Where a tile is: written by one warp, read by its block.
struct TilePlace {
  char* data[kNumOperands];  // the first element of each operand
  int left[kMaxDims];        // elements along each dimension, as many as the box has at the most
  bool is_partial;           // along some dimension there are fewer
};

// Tiles by a TilePlan, which a block walks along.
template <typename acc_t_>
class PlannedTile {
 public:
  using acc_t = acc_t_;
  static constexpr int kSteps = 1 << kStepBits;
  static constexpr int kWidth = 1;
  static constexpr bool kIsHalf = false;
  // Numbers may be subnormal, as float: those of float16 are not.
  static constexpr bool kHasSubnormals = true;

  // One that is computed, the next, which is copied, and one that is located.
  static constexpr int kPlaces = 3;

  // places: kPlaces. shared: of plan.shared_bytes().
  __device__ __forceinline__ PlannedTile(const TilePlan& plan, TilePlace* places, char* shared)
      : plan_(plan), places_(places), shared_(shared) {
#pragma unroll
    for (int which = 0; which < kNumOperands; ++which) {
      own_[which] = phase_[which] = 0;
    }
    for (int d = 0; d < plan.ndim; ++d) {
      const int coordinate = coordinate_of(static_cast<int>(threadIdx.x), d);
#pragma unroll
      for (int which = 0; which < kNumOperands; ++which) {
        own_[which] += coordinate * plan.operands[which].pitches[d];
        phase_[which] += coordinate * plan.operands[which].phases[d];
      }
    }
  }

  __device__ __forceinline__ const TilePlan& plan() const { return plan_; }

  // Calls body() for tiles [first, last) of the walk in a group, each in turn.
  template <typename Body>
  __device__ __forceinline__ void walk(int64_t first, int64_t last, int64_t group, Body&& body) {
    if (first >= last) {
      return;
    }
    const int64_t ahead = plan_.stages - 1;  // copies are by so many tiles
    const bool locates = threadIdx.x < 32;
    if (locates) {
      locate(first, group, places_[0]);
    }
    __syncthreads();
    for (int64_t copied = 0; copied - ahead < last - first; ++copied) {
      const int64_t tile = copied - ahead;
      if (first + copied < last) {
        copy_inputs(places_[copied % kPlaces], stage_of(copied));
      }
      end_group_of_copies();
      if (locates && first + copied + 1 < last) {
        locate(first + copied + 1, group, places_[(copied + 1) % kPlaces]);
      }
      ahead > 0 ? wait_for_groups_but<1>() : wait_for_groups_but<0>();
      __syncthreads();
      if (tile >= 0) {
        place_ = places_ + tile % kPlaces;
        stage_ = stage_of(tile);
        find_elements();
        body();
        __syncthreads();
      }
    }
  }

  __device__ __forceinline__ bool has(int step, int /*i*/ = 0) const {
    return (there_ >> step & 1u) != 0;
  }
  __device__ __forceinline__ bool is_half() const {
    return is_half_type(plan_.operands[kInput].dtype);
  }

  // How far from its data the sum of a gradient belongs, in bytes, after the last tile.
  __device__ __forceinline__ int64_t distance(Which gradient, int step) const {
    const TileOperand& operand = plan_.operands[gradient];
    int64_t bytes = place_->data[gradient] - operand.data;
    for (int d = 0; d < plan_.ndim; ++d) {
      bytes += coordinate_of(number(step), d) * operand.strides[d];
    }
    return bytes;
  }

  class Values {
   public:
    __device__ __forceinline__ void load(const PlannedTile& tile, Which which) {
      const TileOperand& operand = tile.plan_.operands[which];
      if constexpr (sizeof(acc_t) == 8) {
        load_as_is<double>(tile, which);
      } else if (operand.dtype == DType::kFloat16) {
        load_as_is<half_t>(tile, which);
      } else if (operand.dtype == DType::kBFloat16) {
        load_as_is<bfloat16_t>(tile, which);
      } else {
        load_as_is<float>(tile, which);
      }
    }
    __device__ __forceinline__ void convert(const PlannedTile& /*tile*/, Which /*which*/) {}
    __device__ __forceinline__ acc_t at(int step, int /*i*/) const { return values_[step]; }

   private:
    template <typename scalar_t>
    __device__ __forceinline__ void load_as_is(const PlannedTile& tile, Which which) {
      const char* const from = tile.stage_ + tile.plan_.operands[which].offset;
      const int phase = tile.phase_of(which);
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        values_[step] = to_acc<acc_t>(
            *reinterpret_cast<const scalar_t*>(from + tile.position(which, step, phase)));
      }
    }

    acc_t values_[kSteps];
  };

  __device__ __forceinline__ void store(Which which, int step, const acc_t (&results)[1]) {
    results_[step] = results[0];
  }

  // Writes what store() got.
  __device__ __forceinline__ void finish_store(Which which) {
    const TileOperand& operand = plan_.operands[which];
    if (operand.dtype == DType::kFloat16) {
      stage_results<half_t>(which);
    } else if (operand.dtype == DType::kBFloat16) {
      stage_results<bfloat16_t>(which);
    } else if (sizeof(acc_t) == 4 || operand.dtype == DType::kFloat32) {
      stage_results<float>(which);
    } else {
      stage_results<double>(which);
    }
    __syncthreads();
    copy_output(operand, place_->data[which]);
    __syncthreads();
  }

  __device__ __forceinline__ void add(const acc_t (&values)[kSteps], double& sum) const {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      sum += has(step) ? static_cast<double>(values[step]) : 0.0;
    }
  }

 private:
  __device__ __forceinline__ char* stage_of(int64_t tile) const {
    return shared_ + (plan_.stages == 2 ? tile % 2 * plan_.stage_bytes : 0);
  }
  static __device__ __forceinline__ int number(int step) {
    return static_cast<int>(threadIdx.x) + step * kTileThreads;
  }
  __device__ __forceinline__ int coordinate_of(int element, int d) const {
    return element >> plan_.dims[d].shift & ((1 << plan_.dims[d].bits) - 1);
  }

  // 32-bit division is several times cheaper than 64-bit.
  static __device__ __forceinline__ int64_t divide(int64_t dividend, int64_t divisor) {
    if ((dividend >> 32) == 0 && (divisor >> 32) == 0) {
      return static_cast<uint32_t>(dividend) / static_cast<uint32_t>(divisor);
    }
    return dividend / divisor;
  }

  // By a warp, a lane for each operand.
  __device__ __forceinline__ void locate(int64_t tile, int64_t group, TilePlace& place) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane >= kNumOperands) {
      return;
    }
    const TileOperand& operand = plan_.operands[lane];
    int64_t distance = 0;
    bool is_partial = false;
#pragma unroll 1
    for (int d = 0; d < plan_.ndim; ++d) {
      const TileDim& dim = plan_.dims[d];
      int64_t first = 0;
      if (dim.tiles > 1) {
        const int64_t index = d < plan_.num_walked ? tile : group;
        const int64_t quotient = divide(index, dim.tiles);
        first = (index - quotient * dim.tiles) << dim.bits;
        tile = d < plan_.num_walked ? quotient : tile;
        group = d < plan_.num_walked ? group : quotient;
      }
      distance += first * operand.strides[d];
      const int64_t box = int64_t{1} << dim.bits;
      const int64_t left = dim.size - first;
      is_partial = is_partial || left < box;
      if (lane == 0) {
        place.left[d] = static_cast<int>(left < box ? left : box);
      }
    }
    place.data[lane] = operand.data + distance;
    if (lane == 0) {
      place.is_partial = is_partial;
    }
  }

  // Which of this thread's elements are there.
  __device__ __forceinline__ void find_elements() {
    there_ = (1u << kSteps) - 1;
    if (!place_->is_partial) {
      return;
    }
    for (int d = 0; d < plan_.ndim; ++d) {
      const int left = place_->left[d];
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        there_ &= coordinate_of(number(step), d) < left ? ~0u : ~(1u << step);
      }
    }
  }

  // Where an operand's runs begin within their first units, for this thread.
  __device__ __forceinline__ int phase_of(Which which) const {
    return phase_[which] + static_cast<int>(reinterpret_cast<uintptr_t>(place_->data[which]));
  }
  // Where an element lies in shared memory, in bytes.
  __device__ __forceinline__ int position(Which which, int step, int phase) const {
    const TileOperand& operand = plan_.operands[which];
    int position = own_[which];
#pragma unroll
    for (int bit = 0; bit < kStepBits; ++bit) {
      if ((step >> bit & 1) != 0) {
        position += operand.step_pitches[bit];
        phase += operand.step_phases[bit];
      }
    }
    return position + (operand.run_dim >= 0 ? phase & (kUnitBytes - 1) : 0);
  }

  // A run of an operand: where it begins, and its bytes; 0 where it is not there.
  struct Run {
    char* first;
    int bytes;
  };
  __device__ __forceinline__ Run run_of(const TileOperand& operand, const TilePlace& place,
                                        char* data, int run) const {
    Run found{data,
              operand.run_dim < 0 ? operand.bytes : place.left[operand.run_dim] * operand.bytes};
#pragma unroll 1
    for (int d = 0; d < plan_.ndim; ++d) {
      if (d != operand.run_dim && operand.pitches[d] != 0) {
        const int coordinate = run >> operand.run_shifts[d] & ((1 << plan_.dims[d].bits) - 1);
        found.first += coordinate * operand.strides[d];
        found.bytes = coordinate < place.left[d] ? found.bytes : 0;
      }
    }
    return found;
  }

  // A unit of a run, as copies take it: those before the first element and after the last are of no
  // use.
  template <typename Body>
  __device__ __forceinline__ void for_each_unit(const TileOperand& operand, const TilePlace& place,
                                                char* data, const Body& body) const {
    const int runs = 1 << operand.run_bits;
    const int units = runs << operand.unit_bits;
    // Then the one more of each run.
    for (int index = static_cast<int>(threadIdx.x); index < units + runs; index += kTileThreads) {
      const bool is_more = index >= units;
      const int run = is_more ? index - units : index >> operand.unit_bits;
      const int unit = is_more ? 1 << operand.unit_bits : index & ((1 << operand.unit_bits) - 1);
      const Run found = run_of(operand, place, data, run);
      const int phase =
          static_cast<int>(reinterpret_cast<uintptr_t>(found.first)) & (kUnitBytes - 1);
      const int first = unit * kUnitBytes - phase;  // its distance from the run's first element
      if (first < found.bytes && found.bytes > 0) {
        body(run * operand.slot + unit * kUnitBytes, found, first);
      }
    }
  }

  __device__ __forceinline__ void copy_inputs(const TilePlace& place, char* stage) const {
#pragma unroll 1
    for (int which = kInput; which <= kGradOutput; ++which) {
      const TileOperand& operand = plan_.operands[which];
      if (operand.data == nullptr) {
        continue;
      }
      char* const to = stage + operand.offset;
      char* const data = place.data[which];
      if (operand.run_dim >= 0) {
        for_each_unit(operand, place, data, [&](int at, const Run& run, int first) {
          if (run.first + first + kUnitBytes <= operand.end) {
            start_own_copy(reinterpret_cast<uint4*>(to + at), run.first + first);
            return;
          }
          // The operand's last unit may reach beyond its memory.
          for (int byte = first < 0 ? -first : 0; first + byte < run.bytes; byte += operand.bytes) {
            copy_element(to + at + byte, run.first + first + byte, operand.bytes);
          }
        });
        continue;
      }
      for (int index = static_cast<int>(threadIdx.x); index < 1 << operand.run_bits;
           index += kTileThreads) {
        const Run found = run_of(operand, place, data, index);
        if (found.bytes > 0) {
          char* const own = to + index * operand.slot;
          if (operand.converts) {
            *reinterpret_cast<acc_t*>(own) = load_as<acc_t>(found.first, operand.dtype, 0);
          } else {
            copy_element(own, found.first, operand.bytes);
          }
        }
      }
    }
  }

  static __device__ __forceinline__ void copy_element(char* to, const char* from, int bytes) {
    if (bytes == 4) {
      *reinterpret_cast<uint32_t*>(to) = *reinterpret_cast<const uint32_t*>(from);
    } else if (bytes == 2) {
      *reinterpret_cast<uint16_t*>(to) = *reinterpret_cast<const uint16_t*>(from);
    } else {
      *reinterpret_cast<uint64_t*>(to) = *reinterpret_cast<const uint64_t*>(from);
    }
  }

  __device__ __forceinline__ char* output() const {
    return shared_ + plan_.stages * plan_.stage_bytes;
  }

  template <typename scalar_t>
  __device__ __forceinline__ void stage_results(Which which) const {
    const int phase = phase_of(which);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      *reinterpret_cast<scalar_t*>(output() + position(which, step, phase)) =
          from_acc<scalar_t>(results_[step]);
    }
  }

  __device__ __forceinline__ void copy_output(const TileOperand& operand, char* data) const {
    const char* const from = output();
    if (operand.run_dim < 0) {
      for (int index = static_cast<int>(threadIdx.x); index < 1 << operand.run_bits;
           index += kTileThreads) {
        const Run found = run_of(operand, *place_, data, index);
        if (found.bytes > 0) {
          copy_element(found.first, from + index * operand.slot, operand.bytes);
        }
      }
      return;
    }
    for_each_unit(operand, *place_, data, [&](int at, const Run& run, int first) {
      if (first >= 0 && first + kUnitBytes <= run.bytes) {
        *reinterpret_cast<uint4*>(run.first + first) = *reinterpret_cast<const uint4*>(from + at);
        return;
      }
      for (int byte = 0; byte < kUnitBytes; byte += operand.bytes) {
        if (first + byte >= 0 && first + byte < run.bytes) {
          copy_element(run.first + first + byte, from + at + byte, operand.bytes);
        }
      }
    });
  }

  const TilePlan& plan_;
  TilePlace* const places_;
  char* const shared_;
  const TilePlace* place_ = nullptr;  // of this tile
  char* stage_ = nullptr;
  unsigned there_ = 0;       // bit by bit, the steps whose elements are there
  int own_[kNumOperands];    // of a thread's first element in shared memory, in bytes
  int phase_[kNumOperands];  // of its run, beside that of the tile
  acc_t results_[kSteps];
};

}  // namespace lossops::cuda
