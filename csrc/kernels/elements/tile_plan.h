// How the elements of any layout are cut into tiles. A tile is a box of the iteration space whose
// sides are powers of two. Each operand is copied to shared memory and back in runs along its own
// contiguous dimension, so that its layout, alignment and dtype do not matter to what is computed
// in between. Host code without CUDA.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/elements/operands.h"
#include "kernels/integers.h"

namespace lossops::cuda {

constexpr int kTileThreadBits = 8;
constexpr int kTileThreads = 1 << kTileThreadBits;
// A thread has 2^kStepBits elements of a tile, kTileThreads apart: few, for little machine code.
// This kernel takes what others do not.
constexpr int kStepBits = 1;

// What copies move at once, in bytes.
constexpr int kUnitBytes = 16;
// Shorter runs are copied element by element.
constexpr int kLeastRunBytes = 32;
// Shared memory of a block for which no launch must ask.
constexpr int kTileSharedBytes = 46 << 10;

// One dimension of the space, as tiles cut it.
struct TileDim {
  int64_t size;   // elements
  int64_t tiles;  // along it
  int32_t bits;   // a tile has 2^bits elements of it
  int32_t shift;  // an element's coordinate in its tile: its number in the tile, shifted, by bits
};

// An operand, as tiles copy it. Strides are in bytes.
struct TileOperand {
  char* data = nullptr;            // null: absent
  const char* end = nullptr;       // one past its last element
  int64_t strides[kMaxDims] = {};  // along the plan's dimensions
  DType dtype = DType::kFloat32;
  int32_t bytes = 4;  // of an element
  // Rare dtypes are converted on the way, to the type that losses are computed in.
  bool converts = false;
  // Its contiguous dimension, an index into the plan's; -1: copied element by element.
  int32_t run_dim = -1;
  int32_t run_bits = 0;   // a tile has 2^run_bits runs of it
  int32_t unit_bits = 0;  // of 2^unit_bits units, and one more where it begins within a unit
  int32_t slot = 0;       // bytes from run to run in shared memory
  int32_t offset = 0;     // of the first run, in a stage of shared memory
  int32_t run_shifts[kMaxDims] = {};  // of a dimension's coordinate in the number of a run
  int32_t pitches[kMaxDims] = {};     // bytes in shared memory along a dimension
  // Bytes that a run begins later in its first unit, for each step along a dimension; modulo 16.
  int32_t phases[kMaxDims] = {};
  // The same two for each bit of the number of a thread's step.
  int32_t step_pitches[kStepBits] = {};
  int32_t step_phases[kStepBits] = {};
};

struct TilePlan {
  // Those along which a block walks come first, and of them those of more than one tile.
  TileDim dims[kMaxDims];
  TileOperand operands[kNumOperands];
  int ndim = 0;
  int num_walked = 0;
  int64_t walk = 1;    // tiles along the dimensions that are walked
  int64_t groups = 1;  // tiles along the others
  int stages = 2;      // tiles of inputs in shared memory: one that is computed, and the next
  int stage_bytes = 0;
  int output_bytes = 0;

  int shared_bytes() const { return stages * stage_bytes + output_bytes; }
};

// The dimension along which most bytes are neighbours. operands: kNumOperands of them, of which
// `summed` does not count; null: all do.
inline int leading_dim(const IterationSpace& space, const Operand* operands,
                       const Operand* summed) {
  int lead = 0;
  int64_t most = -1;
  for (int dim = 0; dim < space.ndim; ++dim) {
    int64_t bytes = 0;
    for (int which = 0; which < kNumOperands; ++which) {
      const Operand& operand = operands[which];
      if (operand.data != nullptr && &operand != summed && operand.strides[dim] == 1) {
        bytes += element_size(operand.dtype);
      }
    }
    if (space.sizes[dim] > 1 && bytes > most) {
      most = bytes;
      lead = dim;
    }
  }
  return lead;
}

// Makes a TilePlan.
class TilePlanner {
 public:
  // operands: kNumOperands of them; null data: absent. is_double: computed in fp64. summed: the
  // operand that is added up along the dimensions where its stride is 0, to which a walk then
  // keeps; null: there is none.
  TilePlanner(const IterationSpace& space, const Operand* operands, bool is_double,
              const Operand* summed)
      : space_(space),
        operands_(operands),
        summed_(summed),
        is_double_(is_double),
        bits_left_(kTileThreadBits + kStepBits) {
    if (space_.ndim == 0) {
      space_.ndim = 1;
      space_.sizes[0] = 1;
    }
    lead_ = leading_dim(space_, operands_, summed_);
    choose_box();
    cut();
    place(kLeastRunBytes);
    if (plan_.stages == 1 && plan_.shared_bytes() > kTileSharedBytes) {
      place(INT32_MAX);
    }
  }

  const TilePlan& plan() const { return plan_; }

 private:
  // A side that is twice as long must have no more than this much more of it beyond the tensor.
  static constexpr double kMargin = 0.1;

  template <typename Body>
  void for_each_operand(const Body& body) const {
    for (int which = 0; which < kNumOperands; ++which) {
      if (operands_[which].data != nullptr) {
        body(which, operands_[which]);
      }
    }
  }

  // The part of what tiles of `extent` cover that is there.
  static double share(int64_t size, int64_t extent) {
    return static_cast<double>(size) / static_cast<double>(ceil_div(size, extent) * extent);
  }

  // Gives a dimension as many of the bits that are left as are of use, `most` at the most.
  void give_bits(int dim, int most, int fewest = 0) {
    int best = fewest;
    double best_share = 0;
    for (int bits = std::min(most, bits_left_); bits >= fewest; --bits) {
      const double own = share(space_.sizes[dim], int64_t{1} << bits);
      if (own > best_share + kMargin) {
        best_share = own;
        best = bits;
      }
    }
    bits_[dim] += best;
    bits_left_ -= best;
  }

  void choose_box() {
    constexpr int kRunBits = 5;     // the shortest run that is worth its addresses: 32 elements
    constexpr int kRepeatBits = 3;  // rows that share what is broadcast to them
    const int all = bits_left_;
    int lead_bits = all;
    int next = -1;  // the dimension that comes second
    for_each_operand([&](int, const Operand& operand) {
      for (int dim = 0; dim < space_.ndim; ++dim) {
        if (dim == lead_ || space_.sizes[dim] == 1) {
          continue;
        }
        if (operand.strides[dim] == 1 && operand.strides[lead_] != 1) {
          lead_bits = std::min(lead_bits, all / 2);  // runs along both
          next = dim;
        } else if (operand.strides[dim] == 0 && operand.strides[lead_] != 0 && next < 0) {
          lead_bits = std::min(lead_bits, all - kRepeatBits);
          next = dim;
        }
      }
    });
    int fewest = 0;
    while (fewest < std::min(kRunBits, lead_bits) && (int64_t{1} << fewest) < space_.sizes[lead_]) {
      ++fewest;
    }
    give_bits(lead_, lead_bits,
              (int64_t{1} << fewest) > space_.sizes[lead_] && fewest > 0 ? fewest - 1 : fewest);
    if (next >= 0) {
      give_bits(next, bits_left_);
    }
    for (int dim = 0; dim < space_.ndim; ++dim) {
      if (dim != lead_ && dim != next) {
        give_bits(dim, bits_left_);
      }
    }
    bits_[lead_] += bits_left_;  // of no use, or all that there is
  }

  void cut() {
    int shifts[kMaxDims];
    int shift = bits_[lead_];
    for (int dim = 0; dim < space_.ndim; ++dim) {
      shifts[dim] = dim == lead_ ? 0 : shift;
      shift += dim == lead_ ? 0 : bits_[dim];
    }
    const auto add = [&](int dim, bool walked, bool moves) {
      const int64_t tiles = ceil_div(space_.sizes[dim], int64_t{1} << bits_[dim]);
      const bool is_walked = summed_ == nullptr || summed_->strides[dim] == 0;
      if (is_walked == walked && (tiles > 1) == moves) {
        dims_[plan_.ndim] = dim;
        plan_.dims[plan_.ndim++] = {space_.sizes[dim], tiles, bits_[dim], shifts[dim]};
        (walked ? plan_.walk : plan_.groups) *= tiles;
      }
    };
    for (const bool walked : {true, false}) {
      for (const bool moves : {true, false}) {
        // The leading dimension first: neighbours in memory are read one after the other.
        add(lead_, walked, moves);
        for (int dim = 0; dim < space_.ndim; ++dim) {
          if (dim != lead_) {
            add(dim, walked, moves);
          }
        }
      }
      plan_.num_walked = walked ? plan_.ndim : plan_.num_walked;
    }
  }

  // Where operands lie in shared memory. least_run: in bytes.
  void place(int least_run) {
    plan_.stage_bytes = plan_.output_bytes = 0;
    for_each_operand([&](int which, const Operand& operand) {
      TileOperand own;
      own.data = static_cast<char*>(operand.data);
      own.dtype = operand.dtype;
      own.bytes = static_cast<int32_t>(element_size(operand.dtype));
      own.end = own.data + own.bytes;
      own.converts = is_double_ ? operand.dtype != DType::kFloat64
                                : operand.dtype != DType::kFloat32 && !is_half_type(operand.dtype);
      const bool is_input = which <= kGradOutput;
      const bool is_converted = own.converts && is_input;
      for (int d = 0; d < plan_.ndim; ++d) {
        own.strides[d] = operand.strides[dims_[d]] * own.bytes;
        own.end += own.strides[d] * (plan_.dims[d].size - 1);
        const bool is_run = operand.strides[dims_[d]] == 1 && !is_converted &&
                            own.bytes << plan_.dims[d].bits >= least_run;
        if (is_run && (own.run_dim < 0 || dims_[d] == lead_)) {
          own.run_dim = d;
        }
      }
      const int staged_bytes = is_converted ? (is_double_ ? 8 : 4) : own.bytes;
      own.slot = staged_bytes;
      if (own.run_dim >= 0) {
        // A slot has an odd number of units, so neighbours in other runs are in other banks. One of
        // the units is for the bytes before the run in its first unit.
        const int units = (own.bytes << plan_.dims[own.run_dim].bits) / kUnitBytes;
        own.slot = (units + 1) * kUnitBytes;
        while ((1 << own.unit_bits) < units) {
          ++own.unit_bits;
        }
      }
      for (int d = 0; d < plan_.ndim; ++d) {
        if (d == own.run_dim) {
          own.pitches[d] = staged_bytes;
        } else if (own.strides[d] != 0 && plan_.dims[d].bits > 0) {
          own.run_shifts[d] = own.run_bits;
          own.pitches[d] = own.slot << own.run_bits;
          own.phases[d] = own.run_dim >= 0 ? static_cast<int32_t>(own.strides[d] % kUnitBytes) : 0;
          own.run_bits += plan_.dims[d].bits;
        }
        for (int bit = 0; bit < kStepBits; ++bit) {
          const int own_bit = kTileThreadBits + bit - plan_.dims[d].shift;
          if (own_bit >= 0 && own_bit < plan_.dims[d].bits) {
            own.step_pitches[bit] = own.pitches[d] << own_bit;
            own.step_phases[bit] = (own.phases[d] << own_bit) % kUnitBytes;
          }
        }
      }
      const int bytes = (own.slot << own.run_bits) + kUnitBytes - 1;
      const int rounded = bytes / kUnitBytes * kUnitBytes;
      if (is_input) {
        own.offset = plan_.stage_bytes;
        plan_.stage_bytes += rounded;
      } else if (&operand != summed_) {  // that is written when a walk ends
        plan_.output_bytes = std::max(plan_.output_bytes, rounded);  // one after the other
      }
      plan_.operands[which] = own;
    });
    plan_.stages = 2;
    plan_.stages = plan_.shared_bytes() <= kTileSharedBytes ? 2 : 1;
  }

  IterationSpace space_;
  const Operand* const operands_;
  const Operand* const summed_;
  const bool is_double_;
  int bits_left_;            // of an element's number in a tile
  int lead_ = 0;             // the dimension of the space along which elements are numbered first
  int bits_[kMaxDims] = {};  // by dimension of the space
  int dims_[kMaxDims] = {};  // of the space, by dimension of the plan
  TilePlan plan_;
};

}  // namespace lossops::cuda
