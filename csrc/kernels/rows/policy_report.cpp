// The policy for people and for tests: why a call has the kernel that it has, the table, and the
// numbers of classes at which kernels change. JSON.

#include <algorithm>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "cross_entropy_row.h"
#include "kernels/rows/policy.h"

namespace lossops::cuda {

namespace {

DeviceLimits limits_of(const std::string& name) {
  std::string names;
  for (const NamedDevice& device : kNamedDevices) {
    if (name == device.name) {
      return device.limits;
    }
    names += std::string(names.empty() ? "" : ", ") + device.name;
  }
  DeviceLimits limits;
#if defined(LOSSOPS_WITH_CUDA)
  if (name.empty()) {
    limits = limits_of_current_device();
  }
#endif
  if (limits.multiprocessors == 0) {
    throw std::runtime_error(
        "lossops: device must be one of " + names +
        (name.empty() ? "; there is no current one" : ", but is '" + name + "'"));
  }
  return limits;
}

class Json {
 public:
  void add(const char* name, const char* text) { add_raw(name, '"' + std::string(text) + '"'); }
  void add(const char* name, bool value) { add_raw(name, value ? "true" : "false"); }
  void add(const char* name, int64_t value) { add_raw(name, std::to_string(value)); }
  void add_raw(const char* name, const std::string& json) {
    text_ += (text_.empty() ? "\"" : ", \"") + std::string(name) + "\": " + json;
  }
  // What a plan does not use is left out.
  void add_used(const char* name, int64_t value, int64_t unused) {
    if (value != unused) {
      add(name, value);
    }
  }
  std::string object() const { return '{' + text_ + '}'; }

 private:
  std::string text_;
};

template <typename Items, typename ToJson>
std::string json_list(const Items& items, ToJson&& to_json) {
  std::string list;
  for (const auto& item : items) {
    list += (list.empty() ? "" : ", ") + to_json(item);
  }
  return '[' + list + ']';
}

Json json_of(const PolicyRow& row) {
  Json json;
  json.add("name", row.name);
  json.add("file", row.file);
  json.add("rows", row.rows);
  json.add("how", row.how);
  json.add("why", row.why);
  return json;
}

Json json_of(const RowPlan& plan) {
  const RowPlan unused;
  Json json;
  json.add("blocks", plan.blocks);
  json.add("threads_of_block", int64_t{plan.threads});
  json.add_used("threads_of_row", plan.team, unused.team);
  json.add_used("blocks_of_row", plan.cluster, unused.cluster);
  json.add_used("shared_bytes_of_block", plan.shared_bytes, unused.shared_bytes);
  json.add_used("pieces_of_row", plan.pieces.count, unused.pieces.count);
  json.add_used("classes_of_piece", plan.pieces.size, unused.pieces.size);
  json.add_used("rows_of_block", plan.rows, unused.rows);
  if (plan.shares.large_workers + plan.shares.small_workers > 0) {
    json.add("rows_of_first_blocks", int64_t{plan.shares.large});
    json.add("rows_of_last_blocks", int64_t{plan.shares.small});
  }
  if (plan.block_shares.large_blocks > 0 || plan.block_shares.small > 1) {
    json.add("turns_of_first_blocks", int64_t{plan.block_shares.large});
    json.add("turns_of_last_blocks", int64_t{plan.block_shares.small});
  }
  json.add_used("tiles_of_warp", plan.tiles, unused.tiles);
  json.add_used("rows_of_team_in_tile", plan.steps, unused.steps);
  json.add_used("padding_of_row_in_tile", plan.padding, unused.padding);
  json.add_used("word_by_word", plan.words, unused.words);
  json.add_used("aligned", plan.aligned, unused.aligned);
  json.add_used("copied_by_rows", plan.by_rows, unused.by_rows);
  json.add_used("copied_by_words", plan.by_words, unused.by_words);
  return json;
}

std::string json_of(const DeviceLimits& limits) {
  Json json;
  json.add("multiprocessors", int64_t{limits.multiprocessors});
  json.add("shared_bytes", int64_t{limits.shared_bytes});
  json.add("hopper", limits.hopper);
  return json.object();
}

// What the edges of the policy are edges of.
using Shape = std::tuple<Family, int, int>;

Shape shape_of(CrossEntropyForwardArgs& args, int64_t classes, const DeviceLimits& device) {
  args.num_classes = classes;
  args.input.strides[0] = args.grad_input.strides[0] = args.target.strides[0] = classes;
  const RowPlan plan = plan_rows(args, device);
  return {plan.family, plan.team, plan.cluster};
}

// Adds the edges among the counts `nth(0)`, `nth(1)`, ... below most. Up to kEvery all of them are
// looked at; beyond, what is alike at both ends of a stretch is taken to be alike within.
template <typename Nth, typename Shapes>
void add_edges(int64_t most, const Nth& nth, const Shapes& shape, std::set<int64_t>& edges) {
  constexpr int64_t kEvery = 8192;
  constexpr int64_t kStretch = 256;
  for (int64_t n = 0; nth(n) < most;) {
    const int64_t step = nth(n) < kEvery ? 1 : kStretch;
    int64_t same = n;
    int64_t other = n + step;
    if (shape(nth(same)) != shape(nth(other))) {
      while (other - same > 1) {
        const int64_t middle = (same + other) / 2;
        (shape(nth(middle)) == shape(nth(n)) ? same : other) = middle;
      }
      edges.insert({nth(same), nth(other)});
    }
    n += step;
  }
}

}  // namespace

std::vector<int64_t> policy_edges(DType dtype, const DeviceLimits& device) {
  // Longer than the rows of every kernel but two_pass_rows and team_rows, which have no such limit.
  constexpr int64_t kMostBytes = 1600 << 10;
  const int64_t most = kMostBytes / element_size(dtype);
  const int64_t vector = kVectorBytes / element_size(dtype);
  alignas(kVectorBytes) char aligned[kVectorBytes];  // never read
  std::set<int64_t> edges;
  for (const bool probability : {false, true}) {
    for (const double smoothing : {0.0, 0.1}) {
      for (const bool gradient : {false, true}) {
        CrossEntropyForwardArgs args;
        args.rows.ndim = 1;
        args.rows.sizes[0] = args.rows.numel = 131;
        args.input.dtype = args.target.dtype = args.grad_input.dtype = dtype;
        args.target_is_probability = probability;
        args.target_class_stride = 1;
        args.label_smoothing = smoothing;
        args.grad_input.data = gradient ? aligned : nullptr;
        const auto shape = [&](int64_t classes) { return shape_of(args, classes, device); };
        // Whole vectors, and all others, take turns: each have edges of their own.
        add_edges(most, [&](int64_t n) { return (n + 1) * vector; }, shape, edges);
        add_edges(
            most, [&](int64_t n) { return n / (vector - 1) * vector + n % (vector - 1) + 1; },
            shape, edges);
      }
    }
  }
  return {edges.begin(), edges.end()};
}

std::string explain_cross_entropy(const CrossEntropyForwardArgs& args, const std::string& device) {
  const DeviceLimits limits = limits_of(device);
  const RowPlan plan = plan_rows(args, limits);
  const auto* const chosen = std::begin(kPolicy) + static_cast<int>(plan.family);
  Json json = json_of(*chosen);
  json.add_raw("parameters", json_of(plan).object());
  json.add_raw("passed_over", json_list(std::vector<PolicyRow>(std::begin(kPolicy), chosen),
                                        [](const PolicyRow& row) {
                                          Json other;
                                          other.add("name", row.name);
                                          other.add("rows", row.rows);
                                          return other.object();
                                        }));
  json.add("writes_gradient", plan.writes_gradient);
  CrossEntropyBackwardArgs backward = unit_backward(args);
  backward.kept = plan.writes_gradient;
  alignas(kVectorBytes) char aligned[kVectorBytes];  // never read
  if (backward.grad_input.data == nullptr) {
    backward.grad_input.data = aligned;  // not the logits', as if it were written over them
  }
  const auto again = plan_again(backward, limits);
  json.add("backward", plan.computes_again ? chosen->name
                       : again             ? kPolicy[static_cast<int>(again->family)].name
                                           : name_of(choose_backward(backward)));
  json.add("denominator_blocks", int64_t{plan.writes_gradient ? plan.denominator_blocks : 0});
  json.add_raw("device", json_of(limits));
  return json.object();
}

std::string explain_cross_entropy_table(const std::string& device) {
  const auto number = [](int64_t value) { return std::to_string(value); };
  Json json;
  json.add_raw("families",
               json_list(kPolicy, [](const PolicyRow& row) { return json_of(row).object(); }));
  json.add_raw("devices", json_list(kNamedDevices, [](const NamedDevice& known) {
                 return '"' + std::string(known.name) + '"';
               }));
  const DeviceLimits limits = limits_of(device);
  Json edges;
  edges.add_raw("float32", json_list(policy_edges(DType::kFloat32, limits), number));
  edges.add_raw("bfloat16", json_list(policy_edges(DType::kBFloat16, limits), number));
  json.add_raw("edges", edges.object());
  return json.object();
}

}  // namespace lossops::cuda
