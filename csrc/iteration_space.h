// From shapes and strides to an IterationSpace: broadcasting, ordering dimensions
// by stride and merging them. Knows nothing of torch.
#pragma once

#include <cstdint>
#include <ostream>

#include "launchers.h"

namespace lossops {

// Tensors of more are refused; numpy's bound, too.
constexpr int kMaxTensorDims = 64;

struct Dims {
  int size = 0;
  int64_t values[kMaxTensorDims];

  // Copies are many, and dimensions few.
  Dims() {}
  Dims(const Dims& other) { *this = other; }
  Dims& operator=(const Dims& other) {
    size = other.size;
    for (int i = 0; i < size; ++i) {
      values[i] = other.values[i];
    }
    return *this;
  }

  int64_t& operator[](int i) { return values[i]; }
  int64_t operator[](int i) const { return values[i]; }
  void push_back(int64_t value) { values[size++] = value; }

  int64_t numel() const {
    int64_t product = 1;
    for (int i = 0; i < size; ++i) {
      product *= values[i];
    }
    return product;
  }

  // Whether numel() fits its type.
  bool has_numel() const {
    int64_t product = 1;
    bool overflow = false;
    bool empty = false;
    for (int i = 0; i < size; ++i) {
      empty = empty || values[i] == 0;
      overflow = __builtin_mul_overflow(product, values[i], &product) || overflow;
    }
    return empty || !overflow;  // fault: numel-overflow
  }

  bool operator==(const Dims& other) const {
    if (size != other.size) {
      return false;
    }
    for (int i = 0; i < size; ++i) {
      if (values[i] != other[i]) {
        return false;
      }
    }
    return true;
  }
  bool operator!=(const Dims& other) const { return !(*this == other); }
};

inline std::ostream& operator<<(std::ostream& out, const Dims& dims) {
  out << '(';
  for (int i = 0; i < dims.size; ++i) {
    out << (i > 0 ? ", " : "") << dims[i];
  }
  return out << (dims.size == 1 ? ",)" : ")");
}

// False where the shapes do not broadcast.
inline bool broadcast_shapes(const Dims& a, const Dims& b, Dims& result) {
  result.size = a.size > b.size ? a.size : b.size;
  for (int i = 1; i <= result.size; ++i) {
    const int64_t size_a = i <= a.size ? a[a.size - i] : 1;
    const int64_t size_b = i <= b.size ? b[b.size - i] : 1;
    if (size_a != size_b && size_a != 1 && size_b != 1) {
      return false;
    }
    result[result.size - i] = size_a == 1 ? size_b : size_a;
  }
  return true;
}

// Strides of a tensor seen through a shape it broadcasts to.
inline Dims broadcast_strides(const Dims& sizes, const Dims& strides, const Dims& shape) {
  Dims result;
  result.size = shape.size;
  const int missing = shape.size - sizes.size;
  for (int i = 0; i < shape.size; ++i) {
    const bool broadcast = i < missing || (sizes[i - missing] == 1 && shape[i] != 1);
    result[i] = broadcast ? 0 : strides[i - missing];
  }
  return result;
}

// Dimensions from fastest to slowest, as torch's TensorIterator orders them: by the
// strides of a, where those do not tell by those of b, else the last dimension first.
inline Dims fastest_first_order(const Dims& shape, const Dims& a, const Dims& b) {
  Dims order;
  order.size = shape.size;
  for (int i = 0; i < shape.size; ++i) {
    order[i] = shape.size - 1 - i;
  }
  const auto compare = [&](int64_t dim0, int64_t dim1) {
    for (const Dims* strides : {&a, &b}) {
      const int64_t stride0 = (*strides)[static_cast<int>(dim0)];
      const int64_t stride1 = (*strides)[static_cast<int>(dim1)];
      if (stride0 == 0 || stride1 == 0) {
        continue;
      }
      if (stride0 != stride1) {
        return stride0 < stride1 ? -1 : 1;
      }
      if (shape[static_cast<int>(dim0)] > shape[static_cast<int>(dim1)]) {
        return 1;
      }
    }
    return 0;
  };
  for (int i = 1; i < shape.size; ++i) {
    int dim1 = i;
    for (int dim0 = i - 1; dim0 >= 0; --dim0) {
      const int comparison = compare(order[dim0], order[dim1]);
      if (comparison > 0) {
        const int64_t swapped = order[dim0];
        order[dim0] = order[dim1];
        order[dim1] = swapped;
        dim1 = dim0;
      } else if (comparison < 0) {
        break;
      }
    }
  }
  return order;
}

inline Dims row_major_order(int ndim) {
  Dims order;
  order.size = ndim;
  for (int i = 0; i < ndim; ++i) {
    order[i] = ndim - 1 - i;
  }
  return order;
}

// Strides of a dense tensor whose dimensions, fastest first, are in the given order.
inline Dims dense_strides(const Dims& shape, const Dims& order) {
  Dims strides;
  strides.size = shape.size;
  int64_t stride = 1;
  for (int i = 0; i < order.size; ++i) {
    const int dim = static_cast<int>(order[i]);
    strides[dim] = stride;
    stride *= shape[dim] > 1 ? shape[dim] : 1;
  }
  return strides;
}

// Whether the elements fill one stretch of memory, each its own place (torch's
// is_non_overlapping_and_dense).
inline bool is_dense(const Dims& sizes, const Dims& strides) {
  int64_t next = 1;  // stride of the dimension that is looked for, fastest first
  int left = 0;
  for (int i = 0; i < sizes.size; ++i) {
    left += sizes[i] > 1 ? 1 : 0;
  }
  for (int i = sizes.size - 1; left > 0; --left) {
    int tried = 0;
    while (tried < sizes.size && (sizes[i] <= 1 || strides[i] != next)) {
      i = (i + sizes.size - 1) % sizes.size;
      ++tried;
    }
    if (tried == sizes.size) {
      return false;
    }
    next *= sizes[i];
  }
  return true;
}

// Collects operands over one shape, then writes the merged space and their strides.
class SpaceBuilder {
 public:
  explicit SpaceBuilder(const Dims& shape) : shape_(shape) {}

  void add(Operand& operand, const Dims& strides) {
    operands_[count_] = &operand;
    strides_[count_] = strides;
    ++count_;
  }

  int size() const { return count_; }
  const Operand& operand(int i) const { return *operands_[i]; }

  // Dimensions in `order`, neighbours merged where every operand allows, except
  // across position `split` of the order. Returns how many merged dimensions lie
  // before the split, or -1 where more than kMaxDims are left.
  int finish(const Dims& order, IterationSpace& space, int split = 0) {
    space.numel = shape_.numel();
    space.ndim = 0;
    int before_split = 0;
    for (int i = 0; i < order.size; ++i) {
      if (i == split) {
        before_split = space.ndim;
      }
      const int dim = static_cast<int>(order[i]);
      const bool group_start = space.ndim == (i >= split ? before_split : 0);
      if (shape_[dim] == 1) {
        continue;
      }
      if (!group_start && mergeable(dim, space)) {
        space.sizes[space.ndim - 1] *= shape_[dim];
        continue;
      }
      if (space.ndim == kMaxDims) {
        return -1;
      }
      space.sizes[space.ndim] = shape_[dim];
      for (int n = 0; n < count_; ++n) {
        operands_[n]->strides[space.ndim] = strides_[n][dim];
      }
      ++space.ndim;
    }
    return split >= order.size ? space.ndim : before_split;
  }

 private:
  static constexpr int kMaxOperands = 8;

  bool mergeable(int dim, const IterationSpace& space) const {
    const int last = space.ndim - 1;
    for (int n = 0; n < count_; ++n) {  // fault: merged-dimensions
      if (strides_[n][dim] != operands_[n]->strides[last] * space.sizes[last]) {
        return false;
      }
    }
    return true;
  }

  Dims shape_;
  int count_ = 0;
  Operand* operands_[kMaxOperands];
  Dims strides_[kMaxOperands];
};

}  // namespace lossops
