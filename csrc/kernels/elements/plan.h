// What plans of operands in any layout have in common: how they number elements, and in which
// dimension neighbours lie. Host code without CUDA.
//
// - strip_plan.h: rows, whose columns are neighbours in all operands, or nearly so;
// - box_plan.h: operands that disagree on which dimension is contiguous.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "kernels/elements/extents.h"
#include "kernels/elements/operands.h"

namespace lossops::cuda {

// An operand, as plans number its elements. Strides are in bytes, and [0] is that of the columns.
struct PlanOperand {
  char* data = nullptr;  // null: absent
  int64_t strides[kPlanDims] = {};
  DType dtype = DType::kFloat32;
  int32_t bytes = 4;  // of an element
  int8_t slot = 0;    // its number among those that are there
};

// Operands as their plan numbers them.
template <typename Own>
struct PlanOperands {
  Extents extents;
  Own operands[kNumOperands];
  int8_t slots[kNumOperands] = {};  // which operands are there
  int32_t num_slots = 0;

  // The size of the table of addresses where what a block's threads take begins.
  int64_t table_bytes() const {
    return int64_t{kTileThreads} * num_slots * static_cast<int64_t>(sizeof(char*));
  }

  // The number of an operand among those that are there. Known at compile time of input and target,
  // which are in every plan.
  LOSSOPS_HOST_DEVICE int slot_of(Which which) const {
    return which <= kTarget ? static_cast<int>(which) : operands[which].slot;
  }
  // Calls body(operand, own) with each that is there. from: as they were given.
  template <typename Body>
  void for_each(const Operand* from, const Body& body) {
    for_each_operand(from, operands, body);
  }
  void set(const Operand* from) {
    for_each(from, [&](const Operand& operand, Own& own) {
      own.data = static_cast<char*>(operand.data);
      own.dtype = operand.dtype;
      own.bytes = static_cast<int32_t>(element_size(operand.dtype));
      own.slot = static_cast<int8_t>(num_slots);
      slots[num_slots++] = static_cast<int8_t>(&operand - from);
    });
  }
  // Adds a dimension of the space.
  void add(const Operand* from, int64_t size, int dim) {
    for_each(from, [&](const Operand& operand, Own& own) {
      own.strides[extents.ndim] = operand.strides[dim] * own.bytes;
    });
    extents.add(size);
  }
};

// The dimensions of a space along which rows lie.
class Layout {
 public:
  Layout(const IterationSpace& space, const Operand* operands) : space_(space) {
    if (space_.ndim == 0 || space_.numel == 0) {
      space_.ndim = 1;
      space_.sizes[0] = 1;
    }
    lead_ = leading_dim(operands, 0, [](const Operand& /*operand*/) { return true; });
    other_ = leading_dim(operands, lead_,
                         [&](const Operand& operand) { return is_transposed(operand, lead_); });
  }

  const IterationSpace& space() const { return space_; }
  int lead() const { return lead_; }
  // Along which the rows of transposed operands lie; lead(): there are none.
  int other() const { return other_; }

  static bool is_transposed(const Operand& operand, int lead) {
    return operand.strides[lead] != 0 && operand.strides[lead] != 1;
  }

 private:
  // The dimension along which most bytes of operands and losses are neighbours; of several such
  // dimensions, what comes_first(). Gradients do not count, so a plan is the same with one and
  // without.
  // counts(operand): whether one of the others does. If none does, it is `otherwise`.
  template <typename Counts>
  int leading_dim(const Operand* operands, int otherwise, const Counts& counts) const {
    int found = otherwise;
    int64_t most = 0;
    for (int dim = 0; dim < space_.ndim; ++dim) {
      int64_t bytes = 0;
      for (int which = kInput; which <= kOutput; ++which) {
        const Operand& operand = operands[which];
        if (operand.data != nullptr && operand.strides[dim] == 1 && counts(operand)) {
          // Caches hold most of a broadcast operand, so its bytes count a 16th. A choice, not
          // measured.
          constexpr int64_t kMore = 16;
          bytes += element_size(operand.dtype) * (is_broadcast(operand) ? 1 : kMore);
        }
      }
      const bool is_next = bytes == most && comes_first(operands[kInput], dim, found);
      if (bytes > 0 && space_.sizes[dim] > 1 && (bytes > most || is_next)) {
        most = bytes;
        found = dim;
      }
    }
    return found;
  }

  // Whether `dim` comes before `found`, along which as many bytes are neighbours. The input's comes
  // first: where that leads, boxes compute its gradient where it is written. Steps are 1.0 to 1.2
  // times as fast; those with the gradient of the target alone .91 to 1.09. (H100, 2026-11) Of a
  // short dimension and a long one, the long one: rows may be strips.
  bool comes_first(const Operand& input, int dim, int found) const {
    constexpr int64_t kShort = 16;
    const bool is_longer = space_.sizes[dim] > space_.sizes[found];
    return std::min(space_.sizes[dim], space_.sizes[found]) < kShort ? is_longer
           : input.strides[found] == 1                               ? false
           : input.strides[dim] == 1                                 ? true
                                                                     : is_longer;
  }

  bool is_broadcast(const Operand& operand) const {
    return std::any_of(operand.strides, operand.strides + space_.ndim,
                       [](int64_t stride) { return stride == 0; });
  }

  IterationSpace space_;
  int lead_ = 0;
  int other_ = 0;
};

// Whether all operands have the dtype of input.
inline bool have_common_dtype(const Operand* operands) {
  return std::all_of(operands, operands + kNumOperands, [&](const Operand& operand) {
    return operand.data == nullptr || operand.dtype == operands[kInput].dtype;
  });
}

// The half type that all operands have; else float32.
inline DType common_half_type(const Operand* operands) {
  const DType dtype = operands[kInput].dtype;
  return have_common_dtype(operands) && is_half_type(dtype) ? dtype : DType::kFloat32;
}

// Whether 31 bits hold `count` strides along a dimension of the space, in bytes, for each operand.
inline bool are_near(const Operand* operands, int dim, int64_t count = 1) {
  return std::all_of(operands, operands + kNumOperands, [&](const Operand& operand) {
    return operand.data == nullptr ||
           std::abs(count * operand.strides[dim] * element_size(operand.dtype)) <= kMaxDividend;
  });
}

}  // namespace lossops::cuda
