// The policy table of cross entropy: every family is reached, what it decides can be launched, and
// the decision keeps the promises about bits.

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <iterator>
#include <random>
#include <set>
#include <string>

#include "kernels/class_index/float_tiles_plan.h"
#include "kernels/class_index/tiles_plan.h"
#include "kernels/rows/long_rows_plan.h"
#include "kernels/rows/plane_gradients_plan.h"
#include "kernels/rows/plane_rows_plan.h"
#include "kernels/rows/plane_words_plan.h"
#include "kernels/rows/policy.h"
#include "kernels/rows/soft_planes_plan.h"
#include "kernels/rows/soft_tiles_plan.h"
#include "kernels/rows/split_rows_plan.h"
#include "kernels/rows/staged_rows_plan.h"
#include "tests/check.h"

namespace lossops::cuda {
namespace {

// Memory that no plan reads. Plans see its alignment, and whether a gradient is in place.
alignas(64) char memory[128];

using Random = std::mt19937_64;

int64_t below(Random& random, int64_t end) {
  return static_cast<int64_t>(random() % static_cast<uint64_t>(end));
}

// 1 to 2^bits.
int64_t any_size(Random& random, int bits) {
  return 1 + below(random, int64_t{1} << (1 + below(random, bits)));
}

struct Layout {
  int64_t class_stride;
  int64_t row_stride;
};

CrossEntropyForwardArgs problem(Random& random) {
  CrossEntropyForwardArgs args;
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};
  args.input.dtype = dtypes[below(random, 20) == 0 ? 3 : below(random, 3)];
  args.num_classes = any_size(random, 19);
  args.num_classes = (args.num_classes + 7) / (below(random, 2) == 0 ? 8 : 1);
  args.rows.ndim = 1;
  args.rows.sizes[0] = args.rows.numel = any_size(random, 24) / 2 * 2 * below(random, 40);
  args.reduction = static_cast<Reduction>(below(random, 3));
  args.label_smoothing = below(random, 5) == 0 ? 0.1 : 0;
  args.weight = below(random, 5) == 0 ? memory : nullptr;
  args.weight_dtype = args.input.dtype;
  args.acc_double = args.input.dtype == DType::kFloat64;
  args.target_is_probability = below(random, 4) == 0;
  args.target.dtype = args.target_is_probability ? args.input.dtype : DType::kInt64;
  args.target.data = memory;
  args.target_class_stride = 1;
  args.target.strides[0] = args.target_is_probability ? args.num_classes : 1;
  const Layout layouts[] = {{1, args.num_classes},
                            {1, args.num_classes + 1},
                            {1, (args.num_classes + 63) / 64 * 64},
                            {args.rows.numel, 1}};
  const Layout layout = layouts[std::max<int64_t>(0, below(random, 6) - 2)];
  const int64_t size = element_size(args.input.dtype);
  args.input.data = memory + (below(random, 4) == 0 ? size : 0);
  args.input_class_stride = layout.class_stride;
  args.input.strides[0] = layout.row_stride;
  if (args.reduction != Reduction::kNone && below(random, 2) == 0) {
    args.grad_input = args.input;
    args.grad_input.data =
        memory + (below(random, 2) == 0 ? 64 : 0);  // apart from the logits, or in place
    args.grad_input_class_stride = args.input_class_stride;
  }
  return args;
}

int64_t covered(const RowPlan& plan, int64_t rows) {
  int64_t count = 0;
  for (int64_t worker = 0; worker < plan.shares.workers(); ++worker) {
    count += plan.shares.count(worker, rows);
  }
  return count;
}

void check_can_be_launched(const RowPlan& plan, const CrossEntropyForwardArgs& args,
                           const DeviceLimits& device) {
  CHECK(plan.blocks >= 1 && plan.blocks < int64_t{1} << 31);
  CHECK(plan.threads >= kWarpSize && plan.threads <= 1024 && plan.threads % kWarpSize == 0);
  CHECK(plan.cluster >= 1 && plan.cluster <= staged_rows::kMaxCluster &&
        plan.blocks % plan.cluster == 0);
  // The driver keeps 1 KB of each block.
  CHECK(plan.shared_bytes <= device.shared_bytes - 1024);
  CHECK(plan.family != Family::kStagedRows || plan.shared_bytes <= staged_rows::kMaxSharedBytes);
  CHECK(plan.family != Family::kSplitRows || plan.shared_bytes <= split_rows::kMaxSharedBytes);
  CHECK(plan.family != Family::kLongRows || plan.shared_bytes <= long_rows::kMaxSharedBytes);
  CHECK(plan.state_bytes == 0 || plan.family == Family::kTwoPassRows);
  CHECK(plan.denominator_blocks <= kMaxDenominatorBlocks);
  CHECK(plan.index_bytes % kIndexPadding == 0 &&
        (plan.index_bytes == 0 || plan.index_bytes >= args.rows.numel));
  CHECK(!plan.writes_gradient || args.grad_input.data != nullptr);
  CHECK(!plan.computes_again || plan.writes_gradient);
  if (plan.pieces.count > 0) {
    CHECK(int64_t{plan.pieces.count} * plan.pieces.size >= args.num_classes);
    CHECK(int64_t{plan.pieces.count - 1} * plan.pieces.size < args.num_classes);
  }
  if (plan.shares.workers() > 0 && plan.shares.workers() < 4096) {
    CHECK(covered(plan, args.rows.numel) == args.rows.numel);
  }
}

// A loss has the same bits with and without a gradient. So one family computes it, or two that cut
// rows into the same pieces, or plane_rows and plane_words, which sum the same shares.
void check_bits(const RowPlan& plan, CrossEntropyForwardArgs args, const DeviceLimits& device) {
  if (!plan.writes_gradient) {
    return;
  }
  args.grad_input.data = nullptr;
  const RowPlan loss = plan_rows(args, device);
  CHECK(loss.pieces.count == plan.pieces.count && loss.pieces.size == plan.pieces.size);
  if (plan.family == Family::kPlaneRows && loss.family == Family::kPlaneWords) {
    const plane_rows::Cut cut = plane_words::cut_of(args, device);
    CHECK(cut.fits() && args.num_classes <= int64_t{cut.shares} * plane_words::kTurnClasses);
  } else if (plan.pieces.count == 0) {
    CHECK(loss.family == plan.family && loss.team == plan.team);
  }
}

void test_random_problems() {
  std::set<Family> reached;
  Random random(7);
  for (int i = 0; i < 40000; ++i) {
    const CrossEntropyForwardArgs args = problem(random);
    for (const NamedDevice& device : kNamedDevices) {
      const RowPlan plan = plan_rows(args, device.limits);
      const PolicyRow& row = kPolicy[static_cast<int>(plan.family)];
      test::subject() = std::string(row.name) + " on " + device.name + ", " +
                        std::to_string(args.rows.numel) + "x" + std::to_string(args.num_classes);
      check_can_be_launched(plan, args, device.limits);
      check_bits(plan, args, device.limits);
      CHECK(device.limits.hopper || std::string(row.rows).find("; Hopper") == std::string::npos);
      reached.insert(plan.family);
    }
  }
  test::subject() = "";
  CHECK(static_cast<int>(reached.size()) == kFamilies);
}

void test_table() {
  for (int i = 0; i < kFamilies; ++i) {
    CHECK(static_cast<int>(kPolicy[i].family) == i);
  }
  const CrossEntropyForwardArgs nothing;
  CHECK(kPolicy[kFamilies - 1].takes({nothing, kNamedDevices[0].limits, false}));
}

// Rows of many classes: few of them, as many as fit a device, and more; also the longest of all.
void test_long_rows() {
  CrossEntropyForwardArgs args;
  args.rows.ndim = 1;
  args.input_class_stride = args.grad_input_class_stride = args.target_class_stride = 1;
  args.input.data = args.target.data = memory;
  const auto check = [&](int64_t classes) {
    args.num_classes = classes;
    args.input.strides[0] = args.grad_input.strides[0] = args.target.strides[0] = classes;
    for (const NamedDevice& device : kNamedDevices) {
      test::subject() = device.name + (", " + std::to_string(args.rows.numel)) + "x" +
                        std::to_string(classes) + (args.target_is_probability ? ", soft" : "");
      const RowPlan plan = plan_rows(args, device.limits);
      check_can_be_launched(plan, args, device.limits);
      check_bits(plan, args, device.limits);
    }
  };
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const bool probability : {false, true}) {
      for (const bool gradient : {false, true}) {
        for (const int64_t rows : {5, 40'000, 4'000'000}) {
          args.input.dtype = args.grad_input.dtype = dtype;
          args.target.dtype = probability ? dtype : DType::kInt64;
          args.target_is_probability = probability;
          args.grad_input.data = gradient ? memory + 64 : nullptr;
          args.rows.sizes[0] = args.rows.numel = rows;
          for (int64_t classes = 8192; classes < 450'000; classes += 1016) {
            check(classes);
            check(classes + 3);
          }
          for (int64_t classes = (int64_t{1} << 30) - 4096; classes <= kMaxRowClasses;
               classes += 64) {
            check(classes);
          }
        }
      }
    }
  }
  test::subject() = "";
}

// The table's words, held to its code: the first and the last number of classes of each range.
void test_edges() {
  const auto edges = [](DType dtype, const char* name) {
    const auto device =
        std::find_if(std::begin(kNamedDevices), std::end(kNamedDevices),
                     [&](const NamedDevice& d) { return name == std::string(d.name); });
    return policy_edges(dtype, device->limits);
  };
  const auto expect = [](const std::vector<int64_t>& found, std::initializer_list<int64_t> wanted) {
    CHECK(std::is_sorted(found.begin(), found.end()));
    for (const int64_t edge : wanted) {
      test::subject() = std::to_string(edge);
      CHECK(std::binary_search(found.begin(), found.end(), edge));
    }
    test::subject() = "";
  };
  expect(edges(DType::kFloat32, "h200"),
         {1, 2, 15, 16, 128, 129, 700, 701, 1023, 1025, 4096, 4097, 8192, 8196, 153600, 153604});
  expect(edges(DType::kBFloat16, "h200"),
         {160,  168,  320,  328,  640,  648,  1000,  1008,  2559,   2561,
          4096, 4104, 5119, 5120, 5121, 5128, 32768, 32776, 294912, 294920});
  expect(edges(DType::kFloat32, "a100"), {128, 129, 1024, 1025, 8192, 8193});
  expect(edges(DType::kFloat32, "l40s"), {96, 97, 8192, 8193});
  expect(edges(DType::kFloat32, "t4"), {500, 501, 8192, 8193});
  expect(edges(DType::kBFloat16, "t4"),
         {160, 168, 320, 328, 640, 648, 1280, 1288, 2560, 2568, 7999, 8000, 8001, 8008});
}

// How strided classes are dealt out, on devices of any shared memory.
void test_plane_cuts() {
  for (const int kilobytes : {0, 64, 100, 164, 228}) {
    const int64_t most = plane_rows::most_shared_bytes(int64_t{kilobytes} << 10);
    CHECK(most >= int64_t{60} << 10);
    for (const int64_t element_bytes : {2, 4}) {
      for (int64_t classes = 1; classes <= 100'000; classes += classes < 4000 ? 1 : 97) {
        test::subject() = std::to_string(kilobytes) + " KB, " + std::to_string(classes);
        const plane_rows::Cut cut(classes, element_bytes, int64_t{kilobytes} << 10);
        CHECK(cut.threads() <= plane_rows::kMostThreads && cut.threads() % kWarpSize == 0);
        CHECK(cut.shares % cut.parts() == 0 && cut.shares / cut.parts() <= 4);
        using plane_rows::PlaneReads;
        for (const PlaneReads reads :
             {PlaneReads::kPairs, PlaneReads::kGroups, PlaneReads::kElements}) {
          CHECK(cut.bytes(reads) > 0 && (!cut.fits() || cut.bytes(reads) <= most));
        }
        if (!cut.fits()) {
          CHECK(cut.shares == cut.parts());
          CHECK(cut.shares >= plane_rows::kLeastWordShares &&
                cut.shares <= plane_rows::kMostWordShares);
        }
        CHECK((cut.shares == 1) == (classes <= side_by_side::kMaxColumnClasses));
        // Two blocks fit, unless a block has kLeastLanes.
        CHECK(cut.lanes == plane_rows::kLeastLanes ||
              2 * (cut.bytes(PlaneReads::kPairs) + plane_rows::kBlockOverhead) <=
                  most + plane_rows::kBlockOverhead);
      }
    }
  }
  test::subject() = "";
}

CrossEntropyForwardArgs short_rows(DType dtype, int64_t classes, int64_t stride) {
  CrossEntropyForwardArgs args;
  args.rows.ndim = 1;
  args.rows.sizes[0] = args.rows.numel = 1000;
  args.input.dtype = dtype;
  args.input.data = memory;
  args.input.strides[0] = stride;
  args.input_class_stride = 1;
  args.num_classes = classes;
  return args;
}

// How side_by_side_rows spreads rows, and where it leaves memory to L1.
void test_side_by_side() {
  for (const NamedDevice& device : kNamedDevices) {
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      for (int64_t classes = 1; classes <= side_by_side::kMaxColumnClasses; ++classes) {
        test::subject() = device.name + (" " + std::to_string(classes));
        CrossEntropyForwardArgs args = short_rows(dtype, classes, 1);
        args.input_class_stride = 1000;
        const RowPlan plan = side_by_side::plan({args, device.limits, false});
        CHECK(plan.threads % kWarpSize == 0 && plan.threads <= side_by_side::kMaxThreads);
        CHECK(plan.threads * classes * side_by_side::kGroupBytes <= side_by_side::kMaxSharedBytes);
        CHECK(plan.shared_bytes == plan.threads * classes * side_by_side::kGroupBytes);
        CHECK(plan.threads == (classes <= 36 ? 128 : classes <= 72 ? 64 : 32));
        for (const bool gradient : {false, true}) {
          args.grad_input.data = gradient ? memory : nullptr;
          const bool leaves = side_by_side::leaves_memory_to_l1(args, device.limits, plan.threads);
          const int from = dtype == DType::kFloat32 ? 27 : gradient ? 37 : 32;
          CHECK(device.limits.shared_bytes != 228 << 10 || leaves == (classes >= from));
        }
      }
    }
  }
  test::subject() = "";
}

// How plane_words spreads rows: a block has whole warps, whose lanes merge parts together, and
// each of its threads has as many parts as another.
void test_plane_words() {
  for (const NamedDevice& device : kNamedDevices) {
    for (const int64_t positions : {2, 169, 1008, 100'000}) {
      for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        for (int64_t classes = 89; classes <= 40'000; classes += classes < 4000 ? 7 : 97) {
          test::subject() =
              device.name + (" " + std::to_string(classes)) + "x" + std::to_string(positions);
          CrossEntropyForwardArgs args = short_rows(dtype, classes, 1);
          args.rows.sizes[0] = args.rows.numel = positions;
          args.input_class_stride = positions;
          const RowProblem problem{args, device.limits, false};
          CHECK(plane_words::takes(problem));
          const plane_rows::Cut cut = plane_words::cut_of(args, device.limits);
          const RowPlan plan = plane_words::plan(problem);
          CHECK(plan.threads <= plane_words::kMostThreads && plan.threads % kWarpSize == 0);
          const bool shifts = dtype != DType::kFloat32 && positions == 169;
          CHECK(plane_words::shifts(args) == shifts);
          CHECK(cut.shares % 2 == 0);
          CHECK(cut.parts() % plan.team == 0);
          CHECK(plan.threads / plan.team >= plane_words::kLeastLanes);
          const int rows =
              plan.threads / plan.team * plane_words::rows_of_word(element_size(dtype));
          CHECK(cut.merging_bits() == 0 || (rows << cut.merging_bits()) % kWarpSize == 0);
          CHECK(plan.shared_bytes <= plane_words::kMostBytes);
          CHECK(plan.blocks > 0);
          // Large blocks only where one round takes all words.
          const int lanes = plan.threads / plan.team;
          const int64_t finished = lanes - (shifts ? ceil_div(lanes, kWarpSize) : 0);
          CHECK(plan.threads <= plane_words::kUsualThreads ||
                plan.blocks * finished >= plane_words::words_of(args));
        }
      }
    }
  }
  test::subject() = "";
}

// Of which planes plane_words may read a last word whole.
void test_planes_before_last() {
  CrossEntropyForwardArgs args = short_rows(DType::kBFloat16, 100, 1);
  args.rows.ndim = 3;
  const int64_t sizes[] = {7, 3, 2};
  const int64_t strides[] = {1, 700, 2100};
  for (int dim = 0; dim < 3; ++dim) {
    args.rows.sizes[dim] = sizes[dim];
    args.input.strides[dim] = strides[dim];
  }
  args.rows.numel = 7 * 3 * 2;
  args.input_class_stride = 7;
  CHECK(plane_words::planes_before_last(args) == 5);
  args.input.strides[1] = 0;
  CHECK(plane_words::planes_before_last(args) == 0);
  args.rows.sizes[1] = 1;
  args.rows.numel = 7 * 2;
  CHECK(plane_words::planes_before_last(args) == 1);
}

// How plane_gradients cuts planes into strips: each position and each plane once, in no more
// vectors than a warp has lanes, wherever a strip begins in its first one.
void test_strips() {
  using namespace plane_gradients;
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    const int64_t vector = kVectorBytes / element_size(dtype);
    for (int64_t positions = 2; positions <= 70'000; positions += positions < 3000 ? 1 : 331) {
      for (const int64_t planes : {1, 2, 5, 100}) {
        test::subject() = std::to_string(planes) + " of " + std::to_string(positions);
        CrossEntropyForwardArgs args = short_rows(dtype, 89, 1);
        args.input_class_stride = positions;
        args.rows.sizes[0] = positions;
        args.rows.sizes[1] = planes;
        args.rows.ndim = 2;
        args.rows.numel = positions * planes;
        args.input.strides[1] = positions * args.num_classes;
        const Strips strips(args);
        CHECK(strips.positions == positions && strips.planes == planes);
        CHECK(strips.length * strips.of_plane >= positions);
        CHECK(strips.length * (strips.of_plane - 1) < positions);
        CHECK(strips.planes_of_strip == 1 || strips.of_plane == 1);
        CHECK(strips.planes_of_strip >= 1 && strips.planes_of_strip <= planes);
        CHECK(strips.planes_of_strip * ceil_div(strips.length + vector - 1, vector) <= kWarpSize);
        CHECK(strips.count == strips.of_plane * ceil_div(planes, int64_t{strips.planes_of_strip}));
      }
    }
  }
  for (int64_t classes = 2; classes <= 70'000; classes += classes < 2000 ? 1 : 97) {
    test::subject() = std::to_string(classes);
    const int of_tile = tile_classes(classes);
    CHECK(of_tile % kWarps == 0 && of_tile <= kTileClasses);
    CHECK(of_tile * (ceil_div(classes, of_tile) - 1) < classes);
  }
  test::subject() = "";
}

// The lanes that share a short row of fp32 have all of its units, and none has much more than its
// part of them. Two blocks fit a multiprocessor.
void test_float_tile_lanes() {
  using namespace float_tiles;
  for (const NamedDevice& device : kNamedDevices) {
    for (int classes = 1; classes <= kMaxClasses; ++classes) {
      test::subject() = device.name + (" " + std::to_string(classes));
      const CrossEntropyForwardArgs args = short_rows(DType::kFloat32, classes, classes);
      if (!fits({args, device.limits, false})) {
        continue;
      }
      const RowPlan plan = float_tiles::plan({args, device.limits, false});
      const int units = classes / words_of(units_of(classes));
      int sum = 0;
      int most = 0;
      for (int member = 0; member < plan.team; ++member) {
        const int own = units_of_lane(units, plan.share, member, plan.team);
        sum += own;
        most = std::max(most, own);
      }
      CHECK(sum == units && most * plan.team < 2 * units + plan.team);
      CHECK(device.limits.resident_blocks(
                kThreads, static_cast<int>(plan.shared_bytes) + kStaticSharedBytes) >= 2);
      CHECK(plan.shared_bytes <= kMaxSharedBytes);
      if (device.limits.hopper) {
        CHECK(plan.team == (classes <= 128 ? 1 : classes <= 256 ? 2 : classes <= 512 ? 4 : 8));
      }
    }
  }
  test::subject() = "";
}

// Tiles of half types fit in the shared memory that their launch allows, with any gap between rows.
// A gap does not change the team. Every size of a team occurs.
void test_tile_bytes() {
  for (const NamedDevice& device : {kNamedDevices[0], kNamedDevices[3]}) {
    const int64_t most = device.limits.hopper ? tiles::kMaxHopperRowBytes : tiles::kMaxRowBytes;
    std::set<int> teams;
    for (int64_t classes = 1; classes <= most / 2; classes += classes < 1400 ? 1 : 13) {
      const CrossEntropyForwardArgs dense = short_rows(DType::kBFloat16, classes, classes);
      const int team = tiles::plan({dense, device.limits, false}).team;
      CHECK(classes <= team * tiles::kMaxLaneWords * 2 || team == kWarpSize);
      teams.insert(team);
      for (int64_t stride = classes; stride <= 2 * classes + 16; stride += classes / 400 + 1) {
        test::subject() = std::to_string(classes) + " " + std::to_string(stride);
        const CrossEntropyForwardArgs args = short_rows(DType::kBFloat16, classes, stride);
        const RowPlan plan = tiles::plan({args, device.limits, false});
        CHECK(plan.shared_bytes <= tiles::kMaxSharedBytes && plan.team == team);
      }
    }
    CHECK(teams == std::set<int>({1, 2, 4, 8, 16, 32}));
  }
  test::subject() = "";
}

// Rows of 191 half elements lie 95 words and a half apart, so at most two rows of a warp begin in
// one bank.
void test_bank_conflicts() {
  CHECK(bank_conflict(4, 1) == 1 && bank_conflict(128, 1) == 32 && bank_conflict(128, 32) == 1);
  CHECK(bank_conflict(2 * 191, 1) == 2 && bank_conflict(2 * 192, 1) == 32);
  CHECK(padding_of(128, 1) == 1 && padding_of(132, 1) == 0 && padding_of(48, 1) == 0);
}

// Tiles of rows with more than one coefficient: their lanes depend on the row alone, and their
// shared memory is what the launch allows, also where there are gaps between rows.
void test_soft_tiles() {
  using namespace soft_tiles;
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16};
  for (const NamedDevice& device : kNamedDevices) {
    for (const DType dtype : dtypes) {
      for (int64_t classes = 2; classes * element_size(dtype) <= kMaxIndexRowBytes; ++classes) {
        test::subject() = device.name + (" " + std::to_string(classes));
        for (const bool has_probabilities : {false, true}) {
          if (has_probabilities && classes * element_size(dtype) > kMaxRowBytes) {
            continue;
          }
          CrossEntropyForwardArgs args = short_rows(dtype, classes, classes);
          args.label_smoothing = 0.1;
          args.target_is_probability = has_probabilities;
          args.target.dtype = has_probabilities ? DType::kFloat32 : DType::kInt64;
          args.target.strides[0] = has_probabilities ? classes : 1;
          args.target_class_stride = 1;
          args.weight = memory;
          const int team = soft_tiles::plan({args, device.limits, false}).team;
          for (const int64_t stride : {classes, classes + 8, classes * 3 / 2, 3 * classes}) {
            args.input.strides[0] = stride;
            args.target.strides[0] = has_probabilities ? stride : 1;
            const RowPlan plan = soft_tiles::plan({args, device.limits, false});
            CHECK(plan.team == team && plan.steps >= 1);
            CHECK(plan.shared_bytes <= kMaxSharedBytes);
            CHECK(plan.shared_bytes + kStaticSharedBytes <= device.limits.shared_bytes);
          }
        }
      }
    }
  }
  test::subject() = "";
}

// Threads that share a row of strided classes depend on the classes alone, whatever rows there are;
// a block's shared memory needs no permission (48 KB, and 1 KB of it is static).
void test_soft_planes() {
  using namespace soft_planes;
  const DType dtypes[] = {DType::kFloat32, DType::kFloat16};
  Random random(13);
  for (const NamedDevice& device : kNamedDevices) {
    for (const DType dtype : dtypes) {
      for (int64_t classes = 2; classes < 100000; classes += 1 + classes / 7) {
        test::subject() = device.name + (" " + std::to_string(classes));
        std::set<int> teams;
        for (int i = 0; i < 8; ++i) {
          CrossEntropyForwardArgs args = short_rows(dtype, classes, 1);
          args.rows.sizes[0] = args.rows.numel = any_size(random, 24);
          args.input_class_stride = args.rows.numel;
          args.label_smoothing = 0.1;
          args.target_is_probability = i % 2 == 0;
          const RowPlan plan = soft_planes::plan({args, device.limits, false});
          teams.insert(plan.team);
          CHECK(plan.threads % kWarpSize == 0 && plan.threads <= kMostThreads);
          CHECK(plan.shared_bytes <= 47 << 10);
          CHECK(soft_planes::fits({args, device.limits, false}) ==
                (args.input_class_stride > 1 &&
                 (args.target_is_probability ? dtype != DType::kFloat32
                                             : classes > side_by_side::kMaxColumnClasses)));
          const int64_t lanes = plan.threads / plan.team;
          CHECK((lanes & (lanes - 1)) == 0);
          // Lanes of a warp merge the sums of a row, and all of them have one as often.
          const int bits = team_bits(plan.team, element_size(dtype));
          CHECK(1 << bits <= std::min(plan.team, kWarpSize));
          CHECK(lanes * rows_of_word(element_size(dtype)) % (plan.threads >> bits) == 0);
          CHECK((plan.blocks - 1) * lanes < words_of(args));
        }
        CHECK(teams.size() == 1);
      }
    }
  }
  test::subject() = "";
}

// A gradient for each row's grad_output is computed again only by kernels that take one.
void test_gradients_of_rows() {
  Random random(11);
  for (int i = 0; i < 20000; ++i) {
    const CrossEntropyForwardArgs forward = problem(random);
    CrossEntropyBackwardArgs args;
    static_cast<CrossEntropyArgs&>(args) = forward;
    args.reduction = Reduction::kNone;
    args.grad_input = below(random, 2) == 0 ? forward.grad_input : forward.input;
    args.grad_input_class_stride = args.input_class_stride;
    for (const NamedDevice& device : kNamedDevices) {
      const auto plan = plan_again(args, device.limits);
      CHECK(!plan || kPolicy[static_cast<int>(plan->family)].again >= Again::kForEachRow);
    }
  }
}

}  // namespace
}  // namespace lossops::cuda

int main() {
  lossops::cuda::test_table();
  lossops::cuda::test_random_problems();
  lossops::cuda::test_long_rows();
  lossops::cuda::test_edges();
  lossops::cuda::test_plane_cuts();
  lossops::cuda::test_side_by_side();
  lossops::cuda::test_plane_words();
  lossops::cuda::test_planes_before_last();
  lossops::cuda::test_strips();
  lossops::cuda::test_float_tile_lanes();
  lossops::cuda::test_tile_bytes();
  lossops::cuda::test_bank_conflicts();
  lossops::cuda::test_soft_tiles();
  lossops::cuda::test_soft_planes();
  lossops::cuda::test_gradients_of_rows();
  return lossops::test::exit_status();
}
