// The policy table of cross entropy, and the code that iterates over it.

#include "kernels/rows/policy.h"

#include <algorithm>
#include <string>

#include "kernels/class_index/few_classes_plan.h"
#include "kernels/class_index/float_rows_plan.h"
#include "kernels/class_index/float_tiles_plan.h"
#include "kernels/class_index/half_rows_plan.h"
#include "kernels/class_index/tiles_plan.h"
#include "kernels/rows/few_soft_classes_plan.h"
#include "kernels/rows/long_rows_plan.h"
#include "kernels/rows/plane_gradients_plan.h"
#include "kernels/rows/plane_rows_plan.h"
#include "kernels/rows/plane_words_plan.h"
#include "kernels/rows/probability_rows_plan.h"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/side_by_side_rows_plan.h"
#include "kernels/rows/soft_planes_plan.h"
#include "kernels/rows/soft_tiles_plan.h"
#include "kernels/rows/split_rows_plan.h"
#include "kernels/rows/staged_rows_plan.h"
#include "kernels/rows/team_rows_plan.h"
#include "kernels/rows/two_pass_rows_plan.h"

namespace lossops::cuda {
namespace {

using P = const RowProblem&;

bool always(P) { return true; }
bool never(P) { return false; }
bool contiguous_gradient(P p) { return p.args.grad_input_class_stride == 1; }

}  // namespace

// The first row that takes a problem decides. A loss has the same bits with and without a gradient,
// so takes() asks for a gradient only where two families cut and sum rows alike.
//
// Of contiguous classes unless it says otherwise; "Hopper": sm_90 and sm_100.
const PolicyRow kPolicy[kFamilies] = {
    {Family::kSideBySideRows, "side_by_side_rows", "rows/side_by_side_rows.cu",
     "side by side, at any address (images), at most 88 classes, class indices, with smoothing but "
     "not class weights too",
     "a thread has a group of rows, all of whose classes it copies to shared memory first",
     "16x21x512x512: a thread a row .43 / .37 in fp32, .25 / .24 in fp16; this .88 / .86, .80 / "
     ".79. Smoothing, fp32 8x21x512x512, H100: a thread a row .46 / .40, this .83 / .83; bf16 "
     "16x21x512x512, H200: `soft_planes` .31 / .28, this .63 / .66",
     [](P p) {
       return p.plain && (p.indices || side_by_side::is_smoothed(p.args)) &&
              p.args.input_class_stride != 1 && p.classes <= side_by_side::kMaxColumnClasses &&
              side_by_side::lies_side_by_side(p.args, p.args.input, p.args.input_class_stride);
     },
     side_by_side::plan,
     [](P p) {
       return side_by_side::lies_side_by_side(p.args, p.args.grad_input,
                                              p.args.grad_input_class_stride);
     },
     Again::kForEachOfAnyRows, never},
    {Family::kPlaneRows, "plane_rows", "rows/plane_rows.cu",
     "strided classes (images, transposed logits), class indices: to 88 at any address; more in "
     "aligned groups of which 8 fit shared memory, at most 48 classes a share, with a gradient of "
     "which no two blocks write to the same 32 bytes; without one at most 256 classes of fp32, 720 "
     "of fp16 and bf16",
     "a block copies all classes of 8 to 128 groups of rows to shared memory, and after the sums, "
     "or the gradients, the next ones to the same place; more than 88 are dealt out to 2 to 64 "
     "threads a group",
     "8x150x512x512 of bf16: words of 4 bytes a thread from memory .30 / .33, this .74 / .80 "
     "(H100)",
     [](P p) {
       return p.plain && p.indices && plane_rows::lies_in_planes(p.args) &&
              (p.classes <= side_by_side::kMaxColumnClasses ||
               (plane_words::takes(p) && plane_words::leaves_to_plane_rows(p)));
     },
     plane_rows::plan, plane_rows::writes_gradient, Again::kForAll, never},
    {Family::kPlaneWords, "plane_words", "rows/plane_words.cu",
     "strided classes, class indices, more than 88: all that `plane_rows` does not take; only the "
     "loss, and `plane_gradients` writes the gradient after it",
     "1 to 64 threads share a row of fp32, or two of half types: a word of 4 bytes of each class. "
     "A thread has up to 48 classes of fp32 in registers at a time, and sums half types as it "
     "reads them. Shares and parts are those of `plane_rows`, or larger where a block has no room "
     "for it",
     "on an H200, before it by clusters of blocks: fp32 4x1716x188x188 .39 / .49, this .65 / .52; "
     "33x3145x34x29 without a reduction .31 / .32, this .65 / .45; bf16 9x1280x184x158 .33 / .44, "
     "this .62 / .51",
     plane_words::takes, plane_words::plan, never, Again::kNever, never},
    {Family::kFewSoftClasses, "few_soft_classes", "rows/few_soft_classes.cuh",
     "2 to 8 strided classes (images), probabilities of any dtype but fp64, or smoothing and class "
     "weights; fp32, 5 to 8 contiguous ones with probabilities",
     "a thread has a row in registers",
     "1x7x6172118, probabilities and weights, by `strided_rows` .28 / .21, this .54 / .64; "
     "11x5x3516287, smoothing and weights, .17 / .14, .31 / .38; 15000000x8, probabilities, by "
     "`soft_tiles` .51 / .49, this .62 / .72; bf16 22x3x1163x1628, probabilities, by `soft_planes` "
     ".11 / .09, this .17 / .19",
     few_soft_classes::fits, few_soft_classes::plan, always, Again::kForEachOfAnyRows, always},
    {Family::kSoftPlanes, "soft_planes", "rows/soft_planes.cu",
     "strided classes (images, transposed logits): more than 88 with smoothing; of fp16 and bf16, "
     "from 9 classes on, with smoothing and class weights, or with probabilities; fewer with "
     "probabilities of fp64",
     "a thread reads one row of fp32 or two of half types, 8 classes at a time; 1 to 16 threads a "
     "row; the gradient reads them once more, mostly from a cache",
     "on an H100, by a thread a row bf16 8x150x512x512 with smoothing .39 / .21, fp32 "
     "4x150x512x512 .75 / .54, bf16 4x150x512x512 with probabilities .38 / .21; this .71 / .53, "
     ".84 / .57, .78 / .44",
     soft_planes::fits, soft_planes::plan, soft_planes::writes_gradient, Again::kForEachOfAnyRows,
     never},
    {Family::kFewClasses, "few_classes", "class_index/few_classes.cu",
     "fp32, 2 to 15 classes, class indices; Hopper",
     "a thread has a row in registers, a warp copies the next 64 rows to shared memory "
     "meanwhile; a kernel for each number of classes, one for other layouts and few rows; with "
     "a gradient a kernel before them checks the class indices and leaves them in bytes",
     "4194304x10: tiles .67 / .64, this .82 / .80; 16 classes meet in two banks of shared "
     "memory: tiles .43 / .52, this .41 / .40",
     [](P p) {
       return p.hopper_fp32 && p.indices && p.classes >= 2 && p.classes <= few_classes::kMaxClasses;
     },
     few_classes::plan, always, Again::kForAll, never},
    {Family::kFloatTiles, "float_tiles", "class_index/float_tiles.cu",
     "fp32, class indices, up to 1024 classes where two blocks with tiles of 4 rows a warp fit a "
     "multiprocessor, up to 500 elsewhere; with Hopper up to 700, without 2 to 15",
     "a warp copies a tile of rows, with Hopper in bulk, writes their gradients over them and "
     "copies the gradients back; 1 to 16 lanes a row, each in a part of it, by vectors where rows "
     "are whole ones",
     "by the other tiles: 4194304x16 164 / 271 us, 524288x256 171 / 328 us; this 106 / 214, 134 "
     "/ 291 us. Without Hopper 1048576x100 by a thread a row .25 / .27, 524288x256 by team rows "
     ".53 / .55, 108333x600 by register rows .56 / .52; this .91 / .88, .92 / .89, .78 / .80",
     [](P p) { return p.contiguous_fp32 && p.indices && float_tiles::fits(p); }, float_tiles::plan,
     always, Again::kForAll, never},
    {Family::kHalfRows, "half_rows", "class_index/half_rows.cu",
     "fp16 and bf16, class indices, 1008 to 4096 classes in whole vectors, if a row fills at least "
     "11/16 of its warps (1024 classes a warp); Hopper",
     "a row in the registers of a block, a chunk of 1024 classes a warp, the next row on its way; "
     "rows that are not aligned are read and written by words of 4 bytes; rows whose logit at the "
     "class index is far from the others are read again",
     "fp16, staged: 32768x4096 .72 / .83, 65536x1024 .49 / .69; this, as first built, .83 / "
     ".85, .76 / .77",
     half_rows::fits, half_rows::plan, contiguous_gradient, Again::kNever, always},
    {Family::kTiles, "tiles", "class_index/tiles.cu",
     "fp16 and bf16, class indices, to 16000 bytes; with Hopper to 10240",
     "a warp copies a tile of rows, with Hopper in bulk where they need no padding or are long; "
     "1 to 32 lanes a row, in turn",
     "bf16 262144x64 by a thread a row .08 / .11; 101483x1281 staged .46 / .67, this .73 / .80; "
     "25994x5001 staged .62 / .80, this .76 / .79. Without Hopper 2097152x100 by a thread a row "
     ".33 / .30, by a team a row 130000x1000 .24 / .32 and 31738x4096 .58 / .63; this .83 / .86, "
     ".75 / .78, .77 / .80",
     [](P p) { return p.contiguous_half && p.indices && tiles::fits(p); }, tiles::plan, always,
     Again::kForAll, always},
    {Family::kFloatRows, "float_rows", "class_index/float_rows.cu",
     "fp32, class indices, from 701 classes: whole vectors to 8192; others to 4096, beyond 1024 "
     "only those that leave less than 7/32 of their warps' room empty; Hopper",
     "the same, against the row's maximum, with as many rows a block at a time as 128 threads "
     "hold; beyond 4096 classes a block of up to 256 threads a row; rows that are not whole "
     "vectors word by word",
     "register rows: 262144x1000 .93 / .75, 32768x4096 .92 / .83, 8704x7800 .77 / .71; this .95 / "
     ".91, .94 / .93, .81 / .83. 262144x1030 staged .86 / .83, here .74 / .56",
     [](P p) {
       return p.hopper_fp32 && p.indices && p.bytes >= kMinStagedBytes && float_rows::fills_team(p);
     },
     float_rows::plan, contiguous_gradient, Again::kNever, always},
    {Family::kRegisterRows, "register_rows", "rows/register_rows.cuh",
     "fp32, class indices, to 32 KB a row; without Hopper", "a row in the registers of a block",
     "on an H200, forward of fp32 takes 6 to 12 % less than staged, which is Hopper's",
     [](P p) { return !p.hopper && register_rows::fits(p); }, register_rows::plan,
     contiguous_gradient, Again::kNever, always},
    {Family::kProbabilityRows, "probability_rows", "rows/probability_rows.cu",
     "fp16 and bf16 with probabilities of their dtype, aligned whole vectors, 2 to 64 KB a row, "
     "no weights; without a gradient to 8 KB; Hopper",
     "half of the logits in registers, the rest and the probabilities in shared memory; a block "
     "a row",
     "bf16 8192x32768: staged .88 / .77, this .88 / .95",
     [](P p) {
       return probability_rows::fits(p) && (p.gradient || p.bytes < probability_rows::kLongBytes);
     },
     probability_rows::plan, contiguous_gradient, Again::kNever, never},
    {Family::kLongRows, "long_rows", "rows/long_rows.cu",
     "fp16 and bf16 without a gradient, class indices in pieces of 6 to 8 KB, from 12 KB a row, "
     "with smoothing in aligned whole vectors; probabilities as in the line above from 8 KB; "
     "Hopper",
     "a piece of the row in the registers of a warp, its next one on its way; the pieces and "
     "the order of sums of staged rows",
     "bf16 forward: 16384x32768 staged .90, this .96; 8192x131072 .88, 1.00; 32768x8192 .65, .87",
     long_rows::fits, long_rows::plan, never, Again::kNever, never},
    {Family::kSplitRows, "split_rows", "rows/split_rows.cu",
     "fp16 and bf16 with a gradient, aligned whole vectors, class indices without smoothing, 8 "
     "pieces and more; Hopper",
     "a quarter of a piece in registers and the rest in shared memory, so that blocks hold rows "
     "of 128 KB and clusters are half as large; the pieces and the order of sums of staged rows",
     "bf16 step: 8192x131072 staged .83, this .90; 4096x262144 .79, .87; 8192x128256 .78, .87",
     split_rows::fits, split_rows::plan, always, Again::kNever, always},
    {Family::kStagedRows, "staged_rows", "rows/staged_rows.cu",
     "class indices, with weights from 2 KB, with smoothing but not weights from 4 KB, to 1536 KB "
     "of fp32 and 800 KB of half types; probabilities of the logits' dtype, without weights, from "
     "2 "
     "KB to half as much; Hopper",
     "a piece of a row a warp, a block or a cluster of 2 to 16 blocks a row",
     "each logit is read once, for the gradient too; by team rows fp32 65536x21843 .67 / .41; fp32 "
     "3000x151936 by team rows .97 / .54, this .91 / .90",
     staged_rows::fits, staged_rows::plan, [](P p) { return p.gradient_lies_as_input(); },
     Again::kNever, [](P p) { return p.indices; }},
    {Family::kTwoPassRows, "two_pass_rows", "rows/two_pass_rows.cu",
     "fp32, fp16 and bf16, class indices without smoothing, from 4097 bytes a row; not rows of 32 "
     "KB "
     "or more in whole vectors of which three fit the shared memory of a multiprocessor",
     "some lanes of a warp reduce a piece of a row, and a second kernel merges the pieces; a third "
     "reads the row again for the gradient",
     "without Hopper's kernels, bf16 4096x50257 by team rows .52 / .33, this .82 / .60; fp16 "
     "12000x9001 .35 / .35, .72 / .55; fp32 165x123866 .24 / .22, .57 / .48. With them, fp32 "
     "700x500000 .80 / .49, .97 / .64",
     two_pass_rows::fits, two_pass_rows::plan, never, Again::kNever, never},
    {Family::kSoftTiles, "soft_tiles", "rows/soft_tiles.cu",
     "smoothing, and probabilities of any dtype but fp64; from 2 classes to 4096 bytes a row, with "
     "class indices to 8192",
     "a warp copies a tile of rows, logits and probabilities; 1 to 32 lanes a row, in turn; one "
     "pass over most rows of half types with smoothing, two over others",
     "on an H100, bf16 917504x64 with smoothing by a team a row .30 / .38, bf16 167772160x2 with "
     "probabilities by a thread a row .12 / .09; this .68 / .61, .28 / .27",
     soft_tiles::fits, soft_tiles::plan, contiguous_gradient, Again::kForEachRow, always},
    {Family::kTeamRows, "team_rows", "rows/team_rows.cuh", "from 4097 bytes a row",
     "a block of 64 to 256 threads a row",
     "any row of contiguous classes that the kernels above do not take", team_rows::fits,
     team_rows::plan,
     [](P p) { return contiguous_gradient(p) && !p.args.acc_double && p.classes > 0; },
     Again::kNever, always},
    {Family::kStridedRows, "strided_rows", "rows/strided_rows.cuh",
     "the rest, any layout and dtypes: strided classes of fp32, from 9, with probabilities, or "
     "with "
     "smoothing and class weights; smoothed rows of up to 88 that do not lie side by side; one "
     "class; fp64",
     "a thread a row, so that a warp reads neighbouring rows",
     "10 classes: 6 times as fast as a team a row; 100 classes forward 5 times", always,
     strided_rows::plan, never, Again::kNever, never},
};

// ------------------------------------------------------------------------ the decision

namespace {

// fp32 arithmetic reads 8 bytes of an index beside the logits, a tenth of 10 classes of fp32 and of
// 21 of fp16. So the kernel before it, for the mean, leaves it in a byte. Images gain where class
// indices are read before anyway, for the mean.
int64_t index_bytes(P p, const RowPlan& plan) {
  const bool reads_bytes = plan.family == Family::kFewClasses ||
                           (plan.family == Family::kSideBySideRows && p.device.hopper &&
                            p.args.reduction == Reduction::kMean);
  return reads_bytes && plan.writes_gradient && plan.denominator_blocks > 0
             ? round_up(p.rows, kIndexPadding)
             : 0;
}

const PolicyRow& row_of(P p) {
  return *std::find_if(std::begin(kPolicy), std::end(kPolicy),
                       [&](const PolicyRow& row) { return row.takes(p); });
}

RowPlan plan_of(P p, const PolicyRow& row) {
  RowPlan plan = row.plan(p);
  plan.family = row.family;
  plan.writes_gradient = p.gradient;
  plan.computes_again = p.gradient && row.again != Again::kNever;
  plan.denominator_blocks = denominator_blocks(p);
  plan.index_bytes = index_bytes(p, plan);
  return plan;
}

}  // namespace

RowPlan plan_rows(const CrossEntropyForwardArgs& args, const DeviceLimits& device) {
  const RowProblem problem{args, device, args.grad_input.data != nullptr};
  const PolicyRow& row = row_of(problem);
  const bool writes =
      row.writes_gradient(problem) && (!args.is_in_place() || row.writes_in_place(problem));
  if (!problem.gradient || writes) {
    return plan_of(problem, row);
  }
  // The backward kernels write it, after the loss.
  const RowProblem loss{args, device, false};
  return plan_of(loss, row_of(loss));
}

std::optional<RowPlan> plan_again(const CrossEntropyBackwardArgs& args,
                                  const DeviceLimits& device) {
  const bool has_grad_output_of_rows = args.reduction == Reduction::kNone;
  if ((!args.kept && !has_grad_output_of_rows) || args.grad_target.data != nullptr) {
    return std::nullopt;
  }
  const CrossEntropyForwardArgs forward = forward_of(args);
  const RowPlan plan = plan_rows(forward, device);
  if (!plan.computes_again) {
    return std::nullopt;
  }
  if (args.kept) {
    return plan;
  }
  const Again again = kPolicy[static_cast<int>(plan.family)].again;
  const bool takes_rows =
      again == Again::kForEachOfAnyRows || (again == Again::kForEachRow && args.rows.ndim <= 1);
  return takes_rows ? std::make_optional(plan) : std::nullopt;
}

BackwardFamily choose_backward(const CrossEntropyBackwardArgs& args) {
  if (plane_gradients::takes(args)) {
    return BackwardFamily::kPlaneGradients;
  }
  // Whether the kernels of index_gradients.cu can take the rows. Rows of three or more dimensions
  // would take a launch for each index of the third.
  const bool is_plain = !args.dense() && !args.acc_double && args.input.dtype != DType::kFloat64 &&
                        !args.kept && args.grad_target.data == nullptr && args.rows.ndim <= 2;
  // Steps of "none" by a team a row were at .13 to .25 of the floor for rows of 34 to 586 bytes, at
  // .43 for 1516 and .41 for 3498, and by a thread a row at .18 for 60 bytes. By
  // short_gradients_kernel they are at .44 to .65. (H200, 2026-11)
  if (is_plain && ShortRows::are_short(args.num_classes, element_size(args.input.dtype)) &&
      args.input_class_stride == 1 && args.grad_input_class_stride == 1) {
    return BackwardFamily::kShortGradients;
  }
  if (!rows_are_contiguous(args, kFewClassesBackward) || args.grad_input_class_stride != 1) {
    return BackwardFamily::kStridedRows;
  }
  // Steps of "none" of aligned rows are at .606 of the floor for fp32 16384x32768 by a team a row,
  // at .621 by row_gradients_kernel; .495 and .557 for bf16 60000x5000. (H200, 2026-11) In place
  // that kernel would overwrite the logit at the class index that another warp needs.
  const bool is_in_place = args.grad_input.data == args.input.data;
  return is_plain && !is_in_place ? BackwardFamily::kIndexGradients : BackwardFamily::kTeamRows;
}

const char* name_of(BackwardFamily family) {
  switch (family) {
    case BackwardFamily::kShortGradients:
      return "short_gradients";
    case BackwardFamily::kIndexGradients:
      return "index_gradients";
    case BackwardFamily::kPlaneGradients:
      return "plane_gradients";
    case BackwardFamily::kTeamRows:
      return "team_rows";
    default:
      return "strided_rows";
  }
}

}  // namespace lossops::cuda
