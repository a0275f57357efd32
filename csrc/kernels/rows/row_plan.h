// What is decided for the rows of one call of cross entropy, and what it is decided from. Host code
// without CUDA; policy.h decides.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/grid/device_limits.h"
#include "kernels/grid/row_shares.h"
#include "kernels/primitives/sizes.h"
#include "kernels/rows/pieces.h"
#include "kernels/rows/row_layout.h"
#include "launchers.h"

namespace lossops::cuda {

// The kernels of a forward pass. The table of policy.cpp has a row for each.
enum class Family : int8_t {
  kSideBySideRows,
  kPlaneRows,
  kPlaneWords,
  kFewSoftClasses,
  kSoftPlanes,
  kFewClasses,
  kFloatTiles,
  kHalfRows,
  kTiles,
  kFloatRows,
  kRegisterRows,
  kProbabilityRows,
  kLongRows,
  kSplitRows,
  kStagedRows,
  kTwoPassRows,
  kSoftTiles,
  kTeamRows,
  kStridedRows,
};
constexpr int kFamilies = static_cast<int>(Family::kStridedRows) + 1;

// Rows whose coefficients are all alike, but for that of the class index, and not 0: infinite
// distances times 0 would be NaN.
LOSSOPS_HOST_DEVICE bool is_smooth(const CrossEntropyArgs& args) {
  return !args.target_is_probability && args.weight == nullptr &&
         static_cast<float>(args.label_smoothing / static_cast<double>(args.num_classes)) > 0;
}

// How a family spreads rows over the device. Each family sets the fields that it needs.
struct RowPlan {
  Family family = Family::kStridedRows;
  bool writes_gradient = false;  // the kernel of the loss also writes args.grad_input
  // For another grad_output the kernel computes its gradient again, and so leaves no row_stats.
  // Those of short rows would be a part of what a step writes.
  bool computes_again = false;
  int denominator_blocks = 0;  // of the kernel before it, if it writes the gradient of a mean
  int64_t index_bytes = 0;     // class indices that the kernel before it checks, a byte each
  int64_t state_bytes = 0;     // of pieces' states, which one kernel leaves for the next

  int64_t blocks = 0;
  int threads = 0;           // of a block
  int cluster = 1;           // blocks that share a row
  int team = 1;              // threads that share a row
  int64_t shared_bytes = 0;  // of a block
  int warp_bytes = 0;        // of a warp, where warps have a part of the shared memory each
  bool words = false;        // rows are not whole vectors
  bool aligned = false;      // vectors can access all rows
  bool by_rows = false;      // rows are copied to shared memory one by one, in granules
  bool by_words = false;     // the same, word by word
  int row_bytes = 0;         // from a row to the next in shared memory
  // Which rows a block, a warp or a cluster takes one after the other.
  RowShares shares;
  BlockShares block_shares;
  int rows = 1;     // of a block
  int tiles = 1;    // of a warp
  int steps = 1;    // of a tile: rows that a team takes one after the other
  int share = 0;    // units of a row for each lane of its team, but the last
  int padding = 0;  // granules of 16 bytes between the rows of a tile
  // How a row is cut; the shared memory of a piece.
  Pieces pieces;
  int piece_bytes = 0;
};

// Shorter rows are for tiles. Longer ones are, too, where the fits() of a kind of tiles says so.
constexpr int64_t kMinStagedBytes = 2001;
// Longer rows would overflow the 32-bit indices of a row's classes.
constexpr int64_t kMaxRowClasses = int64_t{1} << 30;

// A forward pass, as the policy sees it.
struct RowProblem {
  const CrossEntropyForwardArgs& args;
  const DeviceLimits& device;
  const bool gradient;  // one kernel shall write args.grad_input too
  const int64_t rows = args.rows.numel;
  const int64_t classes = args.num_classes;
  const int64_t element_bytes = element_size(args.input.dtype);
  const int64_t bytes = classes * element_bytes;  // of a row
  const bool indices = !args.dense();             // class indices without smoothing
  // Rows that fp32 arithmetic can read once.
  const bool plain = rows > 0 && classes > 0 && classes <= kMaxRowClasses && !args.acc_double &&
                     args.input.dtype != DType::kFloat64;
  // Plain rows whose classes are contiguous: of any dtype, of fp32, of a half type.
  const bool contiguous = plain && args.input_class_stride == 1;
  const bool contiguous_fp32 = contiguous && args.input.dtype == DType::kFloat32;
  const bool contiguous_half = contiguous && is_half_type(args.input.dtype);
  // These three on a device that has Hopper's kernels.
  const bool hopper = contiguous && device.hopper;
  const bool hopper_fp32 = contiguous_fp32 && device.hopper;
  const bool hopper_half = contiguous_half && device.hopper;
  const bool whole_vectors = bytes % kVectorBytes == 0;

  // Whether vectors can access all rows of the logits, and of the gradient where there is one.
  bool aligned() const {
    return rows_are_aligned(args, args.input) &&
           (!gradient || rows_are_aligned(args, args.grad_input));
  }
  bool gradient_lies_as_input() const {
    return !gradient || lies_as_input(args, args.grad_input, args.grad_input_class_stride);
  }
};

// ------------------------------------------------------------- the mean's denominator

// Class indices in bytes are of so many rows, or a multiple: those after the last row are ignored.
constexpr int kIndexPadding = 64;
constexpr int kMaxIndexClasses = 128;

// Every warp of the kernel that needs the partial sums adds them up: few, and as many in any case,
// so that all of a lane's are on the way at a time. Measured on an H200, steps: 256 in a loop over
// their count take 1.5 us of 40 (262144x33) and 0.6 of 108 (4194304x10) longer; 128 of 4 million
// rows 2 us.
constexpr int kMaxDenominatorBlocks = 256;
constexpr int kDenominatorThreads = 512;
static_assert(kDenominatorThreads >= kMaxDenominatorBlocks, "Denominator::leave()");

// Memory of the partial sums, up to a boundary of 16 bytes.
constexpr int denominator_doubles(int blocks) {
  return blocks > 1 ? kMaxDenominatorBlocks : 2 * blocks;
}

// Blocks of a kernel that leaves the denominator. 0: every block of the forward kernel adds up the
// weights of so few rows itself, which spares a launch; rows of probabilities are only counted.
// Measured on an H200, whose launches overlap, 1000 rows of 10, 100 and 1000 classes of fp32: steps
// of 21, 22 and 33 us take 17, 19 and 19 with it.
inline int denominator_blocks(const RowProblem& problem) {
  const int64_t few_rows = problem.device.overlaps ? 256 : 1024;
  return problem.args.target_is_probability || problem.rows <= few_rows
             ? 0
             : static_cast<int>(std::min<int64_t>(ceil_div(problem.rows, kDenominatorThreads),
                                                  kMaxDenominatorBlocks));
}

}  // namespace lossops::cuda
