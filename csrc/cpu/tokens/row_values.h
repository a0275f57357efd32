// The values of a block of rows: from their softmax to log-probabilities and entropies.
//
// Only tokens.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/tokens/logit_map.h"
#include "cpu/tokens/walks.h"

namespace lossops::cpu {
namespace {

// The planes of row_stats, (3, rows).
template <typename acc_t>
struct StatsPlanes {
  acc_t* max;
  acc_t* rest;
  acc_t* mean_distance;

  StatsPlanes(void* data, int64_t rows)
      : max(static_cast<acc_t*>(data)), rest(max + rows), mean_distance(rest + rows) {}

  TokenStats<acc_t> operator[](int64_t row) const {
    return {max[row], rest[row], mean_distance[row]};
  }
};

// What is known of a block of rows once they are reduced.
template <typename acc_t>
struct RowBlock {
  acc_t max[kBlock] = {};
  acc_t rest[kBlock] = {};
  acc_t mean_distance[kBlock] = {};
  acc_t is_counted[kBlock];  // 0 or 1: as wide as what it chooses, for the vectors' sake
  bool all_count = true;

  void load_mask(const TokenArgs& args, const BlockOffsets& at, int count) {
    std::fill_n(is_counted, padded(count), acc_t(1));
    for (int j = 0; args.row_mask.data != nullptr && j < count; ++j) {
      const bool counts = load_operand<double>(args.row_mask, at[j]) != 0;
      is_counted[j] = counts ? acc_t(1) : acc_t(0);
      all_count = all_count && counts;
    }
  }

  LOSSOPS_HOST_DEVICE TokenStats<acc_t> stats(int j) const {
    return {max[j], rest[j], mean_distance[j]};
  }

  __attribute__((noinline)) void entropies(int width, acc_t* values) const {
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      for (int j = 0; j < width; ++j) {
        const acc_t entropy = stats(j).normalizer().entropy();
        values[j] = is_counted[j] != acc_t(0) ? entropy : acc_t(0);
      }
    });
  }

  __attribute__((noinline)) void lses(int width, acc_t* values) const {
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      for (int j = 0; j < width; ++j) {
        const acc_t lse = stats(j).normalizer().lse();
        values[j] = is_counted[j] != acc_t(0) ? lse : acc_t(0);
      }
    });
  }

  // Of one class of each row, whose mapped logits are z.
  __attribute__((noinline)) void log_probs(int width, const acc_t* z, acc_t* values) const {
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      for (int j = 0; j < width; ++j) {
        const acc_t log_prob = stats(j).normalizer().log_prob(z[j]);
        values[j] = is_counted[j] != acc_t(0) ? log_prob : acc_t(0);
      }
    });
  }
};

using ForwardWalker = BlockWalker<6>;  // input, index, row_mask, log_probs, entropy, lse

ForwardWalker forward_walker(const TokenForwardArgs& args, int64_t first) {
  return ForwardWalker(
      args.rows,
      {&args.input, &args.index, &args.row_mask, &args.log_probs, &args.entropy, &args.lse}, first);
}

// Writes what forward returns of rows [first, first + count). Returns the first row with an index
// that is no class, or the number of all rows.
template <typename acc_t>
int64_t write_values(const TokenForwardArgs& args, const ForwardWalker& walker, int64_t first,
                     int count, RowBlock<acc_t>& rows) {
  for (int j = 0; j < count && !rows.all_count; ++j) {
    if (rows.is_counted[j] == acc_t(0)) {
      rows.max[j] = rows.rest[j] = rows.mean_distance[j] = acc_t(0);
    }
  }
  if (args.row_stats != nullptr) {
    const StatsPlanes<acc_t> stats(args.row_stats, args.rows.numel);
    std::copy_n(rows.max, count, stats.max + first);
    std::copy_n(rows.rest, count, stats.rest + first);
    std::copy_n(rows.mean_distance, count, stats.mean_distance + first);
  }
  acc_t values[kBlock];
  if (args.entropy.data != nullptr) {
    rows.entropies(padded(count), values);
    store_block(args.entropy, walker[4], count, values);
  }
  if (args.lse.data != nullptr) {
    rows.lses(padded(count), values);
    store_block(args.lse, walker[5], count, values);
  }
  int64_t first_invalid = args.rows.numel;
  for (int64_t k = 0; k < args.num_indices; ++k) {
    int64_t index[kBlock];
    acc_t x[kBlock] = {};
    acc_t z_buffer[kBlock];
    load_indices(args.index, walker[1].shifted(k * args.index_stride), count, index);
    for (int j = 0; j < count; ++j) {
      const bool is_class = index[j] >= 0 && index[j] < args.num_classes;
      if (!is_class && rows.is_counted[j] != acc_t(0)) {
        first_invalid = std::min(first_invalid, first + j);
      }
      index[j] = is_class ? index[j] : 0;
    }
    if (args.num_classes > 0) {
      walker[0].for_each_run(count, [&](int j, int length, int64_t offset) {
        gather(args.input.data, args.input.dtype, offset, walker[0].stride, index + j,
               args.input_class_stride, length, x + j);
      });
    }
    rows.log_probs(padded(count), map_block(args.map, x, padded(count), z_buffer), values);
    store_block(args.log_probs, walker[3].shifted(k * args.log_probs_stride), count, values);
  }
  return first_invalid;
}

}  // namespace
}  // namespace lossops::cpu
