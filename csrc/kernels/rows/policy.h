// The policy: which kernel takes the rows of a call of cross entropy, and with what parameters.
// Host code without CUDA, asked once a call.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kernels/rows/row_plan.h"

namespace lossops::cuda {

// Whether a kernel of forward computes its gradient again in a backward pass.
enum class Again : int8_t {
  kNever,
  kForAll,           // for one grad_output of all rows, where forward kept the gradient for another
  kForEachRow,       // also for a grad_output of each row, of one dimension
  kForEachOfAnyRows  // also for a grad_output of each row, of any dimensions
};

// A row of the table. The first row that takes a problem decides.
struct PolicyRow {
  Family family;
  const char* name;
  const char* file;  // of csrc/kernels/
  // For people: what takes() asks, how the kernel works, and what it is worth: measured on an H200,
  // fractions of the floor, forward / step.
  const char* rows;
  const char* how;
  const char* why;
  bool (*takes)(const RowProblem&);
  RowPlan (*plan)(const RowProblem&);
  // Whether the kernel can write args.grad_input beside the loss.
  bool (*writes_gradient)(const RowProblem&);
  Again again;
  // Whether the gradient may take the place of the logits: no thread uses a logit, that of the
  // class index included, after another may have written there.
  bool (*writes_in_place)(const RowProblem&);
};

// In the order of Family.
extern const PolicyRow kPolicy[kFamilies];

RowPlan plan_rows(const CrossEntropyForwardArgs& args, const DeviceLimits& device);

// The plan of a backward pass that a kernel of forward computes from the logits. There are two
// cases: a kept gradient, which is computed again only if grad_output is not 1; and "none", which
// has a grad_output for each row, by the families whose `again` says so. nullopt: choose_backward()
// picks the kernel.
std::optional<RowPlan> plan_again(const CrossEntropyBackwardArgs& args, const DeviceLimits& device);

// What takes the rows of a backward pass of its own, which reads what forward left of them.
enum class BackwardFamily : int8_t {
  kShortGradients,  // index_gradients.cu: short_gradients_kernel, rows of at most 4 KB
  kIndexGradients,  // index_gradients.cu: row_gradients_kernel, longer rows, not in place
  kPlaneGradients,  // plane_gradients.cu
  kTeamRows,        // a team of threads a row
  kStridedRows      // a thread a row
};
BackwardFamily choose_backward(const CrossEntropyBackwardArgs& args);
const char* name_of(BackwardFamily family);

// The numbers of classes at which contiguous rows change kernels, the threads that share a row, or
// the blocks that do: the last number of one and the first of the next, sorted.
std::vector<int64_t> policy_edges(DType dtype, const DeviceLimits& device);

// DeviceLimits by a name, from NVIDIA's data sheets and the CUDA programming guide's table of
// compute capabilities.
struct NamedDevice {
  const char* name;
  DeviceLimits limits;
};
constexpr NamedDevice kNamedDevices[] = {
    {"h200", {132, 228 << 10, true, true}},     {"h100", {132, 228 << 10, true, true}},
    {"b200", {148, 228 << 10, true, true}},     {"a100", {108, 164 << 10, false, false}},
    {"l40s", {142, 100 << 10, false, false}},   {"rtx4090", {128, 100 << 10, false, false}},
    {"rtx5090", {170, 100 << 10, false, true}}, {"t4", {40, 64 << 10, false, false}},
};

// In cross_entropy.cu: builds with CUDA only.
DeviceLimits limits_of_current_device();

}  // namespace lossops::cuda
