// Tensors of rows of classes: (C,), (N, C) or (N, C, d1, ...). A row is all classes at one place of
// the other dimensions; the rows' shape is the tensor's without the class dimension.
#pragma once

#include "bindings/arguments.h"

namespace lossops::bindings {

inline int class_dim(const Dims& dims) { return dims.size == 1 ? 0 : 1; }

// The number of classes if dims are sizes; the stride of the classes if dims are strides.
inline int64_t class_entry(const Dims& dims) { return dims[class_dim(dims)]; }

inline Dims without_class_dim(const Dims& dims) {
  Dims result;
  for (int i = 0; i < dims.size; ++i) {
    if (i != class_dim(dims)) {
      result.push_back(dims[i]);
    }
  }
  return result;
}

// Returns a new tensor for the gradient of logits. With a reduction, forward may write it. Then
// rows of more than 2000 bytes of padded logits (N, C) get a padded gradient: its vectors of 16
// bytes lie as those of the logits. Most kernels of such rows need this, and tiles are faster with
// it. The padding is less than a vector a row.
// src/lossops/_ops/cross_entropy.py tells the compiler the same.
Tensor empty_gradient(const View& logits, Reduction reduction);

// The rows as one launch runs over them, numbered in the row-major order of their shape. No other
// code fills a space of rows and the strides of its operands.
class RowSpace {
 public:
  explicit RowSpace(const Dims& rows) : order_(row_major_order(rows.size)), builder_(rows) {}

  // Adds an operand with one element a row.
  void add_values(Operand& operand, const Dims& strides) { builder_.add(operand, strides); }

  // Adds an operand with one element for each class of a row.
  void add_classes(Operand& operand, int64_t& class_stride, const Dims& strides) {
    class_stride = class_entry(strides);
    builder_.add(operand, without_class_dim(strides));
  }

  // operands: what an error calls them.
  void finish(const char* op, IterationSpace& rows, const char* operands = "input and target") {
    check_ndim(op, builder_.finish(order_, rows), operands);
  }

 private:
  Dims order_;
  SpaceBuilder builder_;
};

}  // namespace lossops::bindings
