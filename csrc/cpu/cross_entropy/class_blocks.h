// What both walks class by class share: blocks of rows and classes, and their probabilities.
//
// Only cross_entropy.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "cpu/columns.h"
#include "cpu/rows.h"
#include "losses/rows/cross_entropy.h"

namespace lossops::cpu {
namespace {

// p'_c of a block of rows and classes.
template <typename acc_t>
class ProbabilityColumns {
 public:
  LOSSOPS_HOST_DEVICE explicit ProbabilityColumns(ColumnBuffers<acc_t>& buffers)
      : buffer_(buffers.p), staging_(buffers.staging) {}

  LOSSOPS_HOST_DEVICE void load(const CrossEntropyArgs& args, const BlockOffsets& rows,
                                int64_t first_class, int classes, int count) {
    smoothing_ = static_cast<acc_t>(args.label_smoothing);
    smoothing_per_class_ =
        static_cast<acc_t>(args.label_smoothing / static_cast<double>(args.num_classes));
    if (args.target_is_probability) {
      columns_ =
          load_columns(args.target, {rows, args.target_class_stride, first_class, classes, count},
                       buffer_, staging_);
    } else {
      // The class index comes on top.
      std::fill_n(buffer_, padded(count), acc_t(0));
      columns_ = {buffer_, 0};
    }
  }

  LOSSOPS_HOST_DEVICE acc_t operator()(int c, int j) const {
    return smoothed(columns_.first[c * columns_.stride + j], smoothing_, smoothing_per_class_);
  }

 private:
  acc_t smoothing_ = 0;
  acc_t smoothing_per_class_ = 0;
  Columns<acc_t> columns_ = {};
  acc_t* buffer_;
  acc_t* staging_;
};

// The walk class by class takes blocks of rows and classes.
struct ColumnsPlan {
  int classes;  // of a block at most
  int rows;

  explicit ColumnsPlan(const CrossEntropyArgs& args) {
    // What is read more than once should stay in an L1 cache meanwhile.
    constexpr int64_t kElements = kColumns / 2;
    // Where a class is a run of rows, the run should be long enough to be read at full speed.
    const bool image = std::abs(args.input_class_stride) > kNear;
    const int64_t least_rows = image ? 128 : kVector;
    classes = static_cast<int>(std::clamp<int64_t>(args.num_classes, 1, kColumns / least_rows));
    rows = static_cast<int>(
        std::clamp<int64_t>(kElements / classes / kVector * kVector, least_rows, kBlock));
  }
};

}  // namespace
}  // namespace lossops::cpu
