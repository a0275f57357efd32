// Cross entropy of rows that lie side by side, such as the pixels of an (N, C, H, W) tensor: a
// thread takes a few neighbouring rows, a group, and copies all of their classes to shared memory
// first. Half types that are not aligned are copied by the warp, word by word (warp_words.cuh). If
// a plane is not whole groups, its last group is moved back and overlaps the group before it. Both
// threads write the same results for the shared rows, and the first one adds them to the loss. So
// the gradient cannot take the place of the logits.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/column_places.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_groups.cuh"
#include "kernels/rows/side_by_side_rows_plan.h"
#include "kernels/rows/warp_words.cuh"

namespace lossops::cuda {
namespace side_by_side {
namespace {

// Classes of half types that a thread loads at a time where it copies them by itself.
constexpr int kAtOnce = 2;

// kGradient: one may be wanted. kIsSmooth: label smoothing without class weights. One such kernel
// serves calls with a gradient and without one, for less machine code.
template <typename scalar_t, bool kGradient, bool kIsSmooth>
__global__ void __launch_bounds__(kMaxThreads, min_blocks(sizeof(scalar_t), kGradient, kIsSmooth))
    cross_entropy_forward_column_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                        const ColumnShape shape, Denominator denominator,
                                        GradOutput grad_output, Partial* partials,
                                        Finalize finalize) {
  float given = 1;
  if (kGradient && grad_output.is_one(given)) {
    return;
  }
  constexpr bool kExact = kExactExponentials<scalar_t>;
  using Group = RowGroup<scalar_t>;
  constexpr int kRows = Group::kRows;
  using Terms = RowTerms<kExact>;
  LOSSOPS_DYNAMIC_SHARED(uint4, stage);
  const Operand* const operands[3] = {&args.input, &args.target, &args.grad_input};
  const int num_classes = static_cast<int>(args.num_classes);
  const int threads = static_cast<int>(blockDim.x);
  // Class c of this thread's rows is own[c * kWarpSize]. Other lanes of the warp access it only in
  // WarpWords. Each warp has a part of its own: the compiler knows how far a class is from the
  // next.
  const int warp = static_cast<int>(threadIdx.x / kWarpSize);
  Group* const own =
      reinterpret_cast<Group*>(stage) + warp * kWarpSize * num_classes + threadIdx.x % kWarpSize;
  auto* const scalars = reinterpret_cast<scalar_t*>(own);
  constexpr int kPitch = kWarpSize * kRows;
  int64_t group = int64_t{blockIdx.x} * threads + threadIdx.x;
  GroupPlace<kRows> place;
  int64_t offsets[3];
  int64_t targets[kRows];
  const bool are_checked = kGradient && denominator.indices != nullptr;
  const auto load_targets = [&] {
    if (are_checked) {
      const int8_t* const indices = denominator.indices + first_row(args.rows, shape, group, place);
      VectorOf<int8_t, kRows> bytes;
      if (shape.aligned) {
        bytes = *reinterpret_cast<const VectorOf<int8_t, kRows>*>(indices);
      } else {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          bytes.values[i] = indices[i];
        }
      }
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        targets[i] = bytes.values[i];
      }
    } else if (shape.targets_in_line) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        targets[i] = static_cast<const int64_t*>(args.target.data)[offsets[1] + i];
      }
    } else {
      load_class_indices(args.target, offsets[1], args.target.strides[0], targets);
    }
  };
  // The last words of a warp's classes lie behind the groups of all warps.
  uint32_t* const last_words =
      reinterpret_cast<uint32_t*>(reinterpret_cast<Group*>(stage) + threads * num_classes) +
      warp * num_classes;
  const WarpWords<scalar_t> warp_words(own, last_words, num_classes);
  // Whether the groups of this warp are neighbours that are not aligned.
  const auto by_warp = [&] {
    return !kExact && !shape.aligned && place.has_neighbours(shape, threadIdx.x % kWarpSize);
  };
  const auto first_class = [&] {
    return static_cast<const scalar_t*>(args.input.data) + offsets[0];
  };
  const auto start = [&] {
    if (group >= shape.groups) {
      return;
    }
    place = GroupPlace<kRows>::of(shape, group);
    group_offsets(args.rows, shape, operands, group, place, offsets);
    const auto* from = first_class();
    Group* to = own;
    int c = 0;
    if (by_warp()) {
      warp_words.start_copies(from, args.input_class_stride);
      return;
    }
    if (!shape.aligned && kExact) {
#pragma unroll 4
      for (; c < num_classes; ++c) {
#pragma unroll
        for (int i = 0; i < Group::kWords; ++i) {
          start_own_copy(to->words + i, from + i);
        }
        from += args.input_class_stride;
        to += kWarpSize;
      }
      return;
    }
    if (!shape.aligned) {  // warps at the end of a plane, and of planes of less than 129 positions
#pragma unroll 1
      for (; c < num_classes; c += kAtOnce) {
        scalar_t x[kAtOnce][kRows] = {};
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          if (c + u < num_classes) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              x[u][i] = from[i];
            }
          }
          from += args.input_class_stride;
        }
#pragma unroll
        for (int u = 0; u < kAtOnce; ++u) {
          if (c + u < num_classes) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              scalars[(c + u) * kPitch + i] = x[u][i];
            }
          }
        }
      }
      return;
    }
#pragma unroll 1
    for (; c + kColumnUnroll <= num_classes; c += kColumnUnroll) {
#pragma unroll
      for (int u = 0; u < kColumnUnroll; ++u) {
        start_own_copy(to + u * kWarpSize, from);
        from += args.input_class_stride;
      }
      to += kColumnUnroll * kWarpSize;
    }
#pragma unroll 1
    for (; c < num_classes; ++c) {
      start_own_copy(to, from);
      from += args.input_class_stride;
      to += kWarpSize;
    }
  };
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<float>, NoScale> unit(args, denominator, given);
  start();
  const bool writes = kGradient && (!kIsSmooth || args.grad_input.data != nullptr);
  float scale = 1;
  if (writes) {
    unit.wait(args, denominator);
    scale = unit.get();
  }
  [[maybe_unused]] const SmoothedIndex smooth(args);
  Partial partial;
  int counted = 0;  // rows for the mean, if they have no weights
  while (group < shape.groups) {
    load_targets();
    const int counts_from = shape.aligned ? 0 : place.shared_rows(args.rows);
    int indices[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      indices[i] = are_checked ? static_cast<int>(targets[i]) : checked_index(args, targets[i]);
    }
    wait_for_own_copies();
    if (by_warp()) {
      warp_words.settle(first_class(), args.input_class_stride);
    }
    // The last class takes the place of the class index, and rows end before it. What becomes of
    // a row without a loss does not matter.
    const int count = num_classes - 1;
    float x_at_index[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      scalar_t& logit = scalars[max(indices[i], 0) * kPitch + i];
      x_at_index[i] = to_acc<float>(logit);
      logit = scalars[count * kPitch + i];
    }
    const auto sum_terms = [&](auto& totals, auto&& term, auto&& see_row) {
      GroupSum<kExact> sums[kRows];
      sum_group<kExact, scalar_t>(
          own, kWarpSize, count, sums, term, [](const Group&) {}, [](auto&) {}, see_row);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        totals[i] = sums[i].total();
      }
    };
    // Gradients in the place of the logits. replace(x): of one class.
    const auto write = [&](auto&& replace) {
#pragma unroll(kIsSmooth ? 2 : 4)
      for (int k = 0; k < count; ++k) {
        const Group x = own[k * kWarpSize];
        float values[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          values[i] = x.get(i);
        }
        replace(values);
        own[k * kWarpSize] = Group::of(values);
      }
    };
    IndexRow reduced[kRows];
    float others[kRows];
    float losses[kRows];
    float at_index[kRows];
    [[maybe_unused]] float factors[kRows];  // of plain rows
    float scales[kRows];                    // grad_output, and what the mean divides by
    bool all_plain = false;
    bool is_written = false;
    [[maybe_unused]] float distances[kRows] = {};  // sums of q (max - x), of rows with smoothing
    [[maybe_unused]] float subtracted[kRows];      // scale q of most classes, of such plain rows
    [[maybe_unused]] PlainTerms plain_terms[kRows];
#pragma unroll
    for (float& of_row : scales) {
      of_row = scale;
    }
    if (kGradient && grad_output.is_per_row) {
      const Operand* const given_rows[1] = {&grad_output.operand};
      int64_t offset[1];
      group_offsets(args.rows, shape, given_rows, group, place, offset);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        scales[i] = load_grad_output<float>(grad_output.operand,
                                            offset[0] + i * grad_output.operand.strides[0]);
      }
    }
    [[maybe_unused]] float most_rest[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      most_rest[i] = kIsSmooth ? most_rest_of_smooth(smooth.at_index, scales[i]) : kMostPlainRest;
    }
    if constexpr (!kExact) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        plain_terms[i] = PlainTerms(x_at_index[i]);
      }
      [[maybe_unused]] float exponents[kRows] = {};
      sum_terms(
          others, [&](int i, float x) { return plain_terms[i](x); },
          [&](int i, const auto& x) {
            if constexpr (kIsSmooth) {
              exponents[i] += sum_of_exponents(plain_terms[i], x);
            }
          });
      all_plain = true;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        others[i] = plain_terms[i].corrected(others[i], x_at_index[i]);
        all_plain &= IndexRow::may_be_plain(others[i], x_at_index[i], most_rest[i]);
        if constexpr (kIsSmooth) {
          distances[i] = smooth.of_other(
              plain_terms[i].distance(exponents[i], static_cast<float>(count), x_at_index[i]));
          all_plain &= ::fabsf(distances[i]) < math::infinity<float>();
        }
      }
    }
    // Without class weights 1, with them 0 of a row without a loss.
    float weights[kRows];
#pragma unroll
    for (float& weight : weights) {
      weight = 1;
    }
    if (args.weight != nullptr) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        weights[i] = row_weight(args, indices[i]);
        partial.weight += static_cast<double>(i >= counts_from ? weights[i] : 0.0f);
      }
    }
    if constexpr (!kExact && kGradient && !kIsSmooth) {
      if (args.weight == nullptr && !grad_output.is_per_row) {
        all_plain &= gradient_is_plain(scale);
      } else {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          all_plain &= (indices[i] < 0) | gradient_is_plain(scales[i] * weights[i]);
        }
      }
    }
    // The rare way first: the compiler then puts the other one beside what follows, for fewer waits
    // for instructions. Measured on an H200: up to 5 % of steps of half types.
    if (!all_plain) {
      bool shift = kExact;
      if constexpr (!kExact) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (IndexRow::may_be_plain(others[i], x_at_index[i], most_rest[i])) {
            reduced[i] = IndexRow::plain(others[i], x_at_index[i]);
          } else {
            shift = shift || indices[i] >= 0;
          }
        }
      }
      float maxima[kRows] = {};
      float least[kRows] = {};
      if (shift) {
        Group largest = own[0];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          least[i] = own[count * kWarpSize].get(i);
        }
#pragma unroll 4
        for (int c = 0; c < count; ++c) {
          const Group x = own[c * kWarpSize];
          largest.raise_to(x);
          if constexpr (kExact && kGradient) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              least[i] = ::fminf(x.get(i), least[i]);
            }
          }
        }
        Terms terms[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          // Of one class there are no others, and of NaN alone no maximum.
          const float largest_other = count > 0 ? largest.get(i) : -math::infinity<float>();
          maxima[i] = math::max_number(largest_other, -math::infinity<float>());
          terms[i] = Terms(maxima[i]);
        }
        sum_terms(others, [&](int i, float x) { return terms[i](x); }, SeeNoRow());
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (!reduced[i].is_plain()) {
            reduced[i] = IndexRow::of(terms[i], maxima[i], others[i], x_at_index[i]);
          }
        }
      }
      if constexpr (kIsSmooth) {
        float weighed[kRows] = {};
        weigh_distances(smooth, own, count, reduced, x_at_index, weighed);
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          const bool is_plain =
              reduced[i].is_plain() && ::fabsf(distances[i]) < math::infinity<float>();
          distances[i] = is_plain ? distances[i] : weighed[i];
        }
      }
      LogitGradient<float, kExact> gradients[kRows];
      // Whether one formula gives the gradients of all rows: that of plain rows, or the direct one.
      bool all_alike = true;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float weight = weights[i];
        const auto finished = reduced[i].template finish<!kExact>(x_at_index[i], scales[i], weight);
        const bool has_loss = indices[i] >= 0;
        const IndexRow dense = reduced[i].as_dense();
        const float loss = kIsSmooth ? dense_row_loss(dense.rest, SmoothedIndex::kSum, distances[i])
                                     : finished.loss;
        losses[i] = has_loss ? loss : gradient_without_loss(indices[i]);
        gradients[i] = LogitGradient<float, kExact>(
            kIsSmooth ? RowSoftmax<float>::of(dense.reference, dense.rest, scales[i], weight)
                      : finished.softmax,
            scales[i] * weight);
        const float gradient_at_index =
            kIsSmooth
                ? gradients[i].dense(x_at_index[i], scales[i], SmoothedIndex::kSum, smooth.at_index)
                : finished.gradient_at_index;
        at_index[i] = has_loss ? gradient_at_index : gradient_without_loss(indices[i]);
        if constexpr (kExact) {
          if (!has_loss) {
            // Of an ignored row products that are 0: beside such a `round`, logits that are nearer
            // to 0 than this round to no exponent.
            constexpr float kFar = 0x1p15f;
            const bool near = maxima[i] < kFar && !math::is_nan(others[i]);
            gradients[i].multiple = {0, 0, 0x1.8p40f};
            gradients[i].lowest =
                indices[i] == kIgnoredRow && near ? -kFar : math::infinity<float>();
          }
          all_alike = all_alike && gradients[i].is_direct(least[i]);
        } else {
          factors[i] = has_loss ? gradients[i].factor : gradient_without_loss(indices[i]);
          all_alike = all_alike && reduced[i].is_plain() &&
                      (!has_loss || gradient_is_plain(scales[i] * weight));
        }
      }
      if constexpr (kIsSmooth) {
        if (writes) {
          write([&](auto& x) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              const float value =
                  gradients[i].dense(x[i], scales[i], SmoothedIndex::kSum, smooth.other);
              x[i] = indices[i] >= 0 ? value : gradient_without_loss(indices[i]);
            }
          });
          is_written = true;
        }
      } else if constexpr (kGradient) {
        if (!all_alike) {
          write([&](auto& x) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              float value[1] = {x[i]};
              gradients[i].replace(value);
              x[i] = indices[i] >= 0 ? value[0] : gradient_without_loss(indices[i]);
            }
          });
          is_written = true;
        } else if constexpr (kExact) {
          write([&](auto& x) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              x[i] = gradients[i].multiple(x[i]);
            }
          });
        }
      }
    } else {
      // What finish() says of such rows, in half the instructions.
      bool all_have_loss = true;
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        reduced[i] = IndexRow::plain(others[i], x_at_index[i]);
        if constexpr (kIsSmooth) {
          losses[i] = dense_row_loss(others[i], SmoothedIndex::kSum, distances[i]);
          const LogitGradient<float, false> gradient(
              RowSoftmax<float>::of(x_at_index[i], others[i], scales[i], SmoothedIndex::kSum),
              scales[i]);
          factors[i] = gradient.factor;
          subtracted[i] = __fmul_rn(scales[i], smooth.other);
          at_index[i] =
              gradient.dense(x_at_index[i], scales[i], SmoothedIndex::kSum, smooth.at_index);
          all_have_loss &= indices[i] >= 0;
          continue;
        }
        losses[i] = weights[i] * math::log1p(others[i]);
        const float factor = math::divide_by_one_plus(scales[i] * weights[i], others[i]);
        factors[i] = factor * plain_terms[i].correction(x_at_index[i]);
        at_index[i] = -factor * others[i];
        all_have_loss &= indices[i] >= 0;
      }
      if (!all_have_loss) {
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
          if (indices[i] < 0) {
            losses[i] = factors[i] = at_index[i] = subtracted[i] =
                gradient_without_loss(indices[i]);
          }
        }
      }
    }
    bool all_count = counts_from == 0;  // as in most groups: then nothing is selected
#pragma unroll
    for (const int index : indices) {
      all_count &= index != kIgnoredRow;
    }
    if (all_count) {
#pragma unroll
      for (const float loss : losses) {
        partial.sum += static_cast<double>(loss);
      }
      counted += kRows;
    } else {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        // fault: columns-shared-rows
        partial.sum += static_cast<double>(i >= counts_from ? losses[i] : 0.0f);
        counted += i >= counts_from && indices[i] != kIgnoredRow ? 1 : 0;
      }
    }
    if (args.row_stats != nullptr) {
      const RowStats<float> stats(args.row_stats, args.rows.numel);
      const int64_t row = first_row(args.rows, shape, group, place);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        stats.max[row + i] = reduced[i].reference;
        stats.rest[row + i] = kIsSmooth ? reduced[i].as_dense().rest : reduced[i].rest;
        if constexpr (kIsSmooth) {
          stats.q_sum[row + i] = SmoothedIndex::kSum;
        }
      }
    }
    if (args.reduction == Reduction::kNone && !grad_output.exists()) {
      const Operand* const output[1] = {&args.output};
      int64_t offset[1];
      group_offsets(args.rows, shape, output, group, place, offset);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        store_operand<float>(args.output, offset[0] + i * args.output.strides[0], losses[i]);
      }
    }
    if (writes) {
      if constexpr (!kExact) {
        if (!is_written) {
          write([&](auto& x) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
              const float term = plain_terms[i](x[i]);
              x[i] = kIsSmooth ? ::fmaf(factors[i], term, -subtracted[i]) : factors[i] * term;
            }
          });
        }
      }
      // The class index and the last class have each other's places.
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        scalar_t& result = scalars[max(indices[i], 0) * kPitch + i];
        scalars[count * kPitch + i] = result;
        result = from_acc<scalar_t>(at_index[i]);  // fault: columns-at-index
      }
      auto* to = static_cast<scalar_t*>(args.grad_input.data) + offsets[2];
      const auto store = [&](const Group& results) {
        *reinterpret_cast<Group*>(to) = results;
        to += args.grad_input_class_stride;
      };
      if (by_warp()) {
        warp_words.store(to, args.grad_input_class_stride);
      } else if (!shape.aligned) {
#pragma unroll 1
        for (int k = 0; k < num_classes; ++k) {
          const Group results = own[k * kWarpSize];
          scalar_t elements[kRows];
          memcpy(elements, &results, sizeof(results));
#pragma unroll
          for (int i = 0; i < kRows; ++i) {
            to[i] = elements[i];
          }
          to += args.grad_input_class_stride;
        }
      } else {
        int k = 0;
#pragma unroll 1
        for (; k + kColumnUnroll <= num_classes; k += kColumnUnroll) {
          Group results[kColumnUnroll];
#pragma unroll
          for (int u = 0; u < kColumnUnroll; ++u) {
            results[u] = own[(k + u) * kWarpSize];
          }
#pragma unroll
          for (int u = 0; u < kColumnUnroll; ++u) {
            store(results[u]);
          }
        }
#pragma unroll 1
        for (; k < num_classes; ++k) {
          store(own[k * kWarpSize]);
        }
      }
    }
    group += int64_t{gridDim.x} * threads;
    start();
  }
  if (args.weight == nullptr) {
    partial.weight = static_cast<double>(counted);
  }
  if (args.reduction != Reduction::kNone && !grad_output.exists()) {
    reduce_to_grid(partial, partials, finalize);
  }
}

}  // namespace
}  // namespace side_by_side

void launch_side_by_side_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                              const Denominator& denominator, const GradOutput& grad_output,
                              Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  using namespace side_by_side;
  const bool targets_in_line = args.target.dtype == DType::kInt64 && args.target.strides[0] == 1;
  ColumnShape shape = {};
  shape.groups = groups_of(args);
  shape.aligned = are_aligned(args);
  shape.targets_in_line = targets_in_line;
  shape.by_divisor = has_counted_planes(args);
  if (shape.by_divisor) {
    shape.first_dimension = Divisor(static_cast<uint32_t>(groups_of_plane(args)));
    const int64_t followed = (positions_of(args) - 1) / group_rows(element_size(args.input.dtype));
    shape.before_warps = static_cast<uint32_t>(std::max<int64_t>(followed - kWarpSize + 1, 0));
  }
  const LaunchShape launch = {grad_output.limit_blocks(plan.blocks, kMaxThreads), plan.threads,
                              bytes_of_block(args, plan.threads), 1,
                              waits_for_previous_kernel(denominator, grad_output)};
  const auto launch_as = [&](auto kernel) {
    prefer_shared_percent(kernel, leaves_memory_to_l1(args, current_device_limits(), plan.threads)
                                      ? kSharedPercent
                                      : kAnyPercent);
    launch_kernel("cross_entropy_forward_column_kernel", kernel, launch, stream, args, shape,
                  denominator, grad_output, partials, finalize);
  };
  visit_float_or_half(args.input.dtype, [&](auto type) {
    using scalar_t = typename decltype(type)::type;
    if (args.label_smoothing > 0) {
      return launch_as(cross_entropy_forward_column_kernel<scalar_t, true, true>);
    }
    visit_bool(args.grad_input.data != nullptr, [&](auto gradient) {
      launch_as(cross_entropy_forward_column_kernel<scalar_t, decltype(gradient)::value, false>);
    });
  });
}

}  // namespace lossops::cuda
