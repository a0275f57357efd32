// What both walks of backward share: what the gradients of a block of rows are made of.
//
// Only tokens.cpp includes this.
#pragma once

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "cpu/tokens/row_values.h"

namespace lossops::cpu {
namespace {

// A class that log-probabilities of a row were wanted of, and the sum of their gradients.
struct IndexedClass {
  int64_t index;
  int row;    // of the block
  int64_t k;  // among the indices of the row
  double grad;
};

// What the gradients of a block of rows need beside their logits.
template <typename acc_t>
struct RowGradients : RowBlock<acc_t> {
  acc_t inverse_sum[kBlock];
  acc_t of_softmax[kBlock];
  double exact_of_softmax[kBlock];  // before it was rounded
  acc_t of_entropy[kBlock];
  std::vector<IndexedClass> indexed;  // by class

  // input, index, row_mask, the gradients of log_probs, entropy and lse, grad_input
  using Walker = BlockWalker<7>;

  static Walker walker(const TokenBackwardArgs& args, int64_t first) {
    return Walker(args.rows,
                  {&args.input, &args.index, &args.row_mask, &args.grad_log_probs,
                   &args.grad_entropy, &args.grad_lse, &args.grad_input},
                  first);
  }

  // Rows [first, first + count).
  void load(const TokenBackwardArgs& args, const Walker& walker, int64_t first, int count) {
    const StatsPlanes<acc_t> stats(const_cast<void*>(args.row_stats), args.rows.numel);
    std::copy_n(stats.max + first, count, this->max);
    std::copy_n(stats.rest + first, count, this->rest);
    std::copy_n(stats.mean_distance + first, count, this->mean_distance);
    this->all_count = true;
    this->load_mask(args, walker[2], count);
    std::fill_n(of_entropy, padded(count), acc_t(0));
    if (args.grad_entropy.data != nullptr) {
      load_block(args.grad_entropy, walker[4], count, of_entropy, acc_t(0));
    }
    std::fill_n(of_softmax, padded(count), acc_t(0));
    if (args.grad_lse.data != nullptr) {
      load_block(args.grad_lse, walker[5], count, of_softmax, acc_t(0));
    }
    load_indexed(args, walker, count);
    for (int j = 0; j < padded(count); ++j) {
      inverse_sum[j] =
          TokenGradient<acc_t>::of(this->stats(j), of_softmax[j], of_entropy[j]).inverse_sum;
    }
  }

  LOSSOPS_HOST_DEVICE TokenGradient<acc_t> operator[](int j) const {
    return {this->stats(j), of_softmax[j], of_entropy[j], inverse_sum[j]};
  }

  // The thread keeps this object. Of rows with many indices it shall not keep their memory.
  void release() {
    if (indexed.capacity() > kBlock) {
      std::vector<IndexedClass>().swap(indexed);
    }
  }

 private:
  void load_indexed(const TokenBackwardArgs& args, const Walker& walker, int count) {
    std::copy_n(of_softmax, padded(count), exact_of_softmax);
    indexed.clear();
    for (int64_t k = 0; args.grad_log_probs.data != nullptr && k < args.num_indices; ++k) {
      int64_t index[kBlock];
      acc_t grad[kBlock];
      load_indices(args.index, walker[1].shifted(k * args.index_stride), count, index);
      load_block(args.grad_log_probs, walker[3].shifted(k * args.grad_log_probs_stride), count,
                 grad);
      for (int j = 0; j < count; ++j) {
        if (this->is_counted[j] != acc_t(0) && index[j] >= 0 && index[j] < args.num_classes) {
          const auto own = static_cast<double>(grad[j]);
          exact_of_softmax[j] -= own;
          indexed.push_back({index[j], j, k, own});
        }
      }
    }
    for (int j = 0; j < padded(count); ++j) {
      of_softmax[j] = static_cast<acc_t>(exact_of_softmax[j]);
    }
    merge_indexed(args);
  }

  // Sorts, and adds up the gradients of repeated indices.
  void merge_indexed(const TokenBackwardArgs& args) {
    if (args.num_indices == 1 && is_short(args)) {
      return;  // nothing repeats, and all classes are in one block
    }
    std::sort(indexed.begin(), indexed.end(), [](const auto& a, const auto& b) {
      return std::tie(a.index, a.row, a.k) < std::tie(b.index, b.row, b.k);
    });
    size_t merged = 0;
    for (size_t i = 0; i < indexed.size(); ++merged) {
      IndexedClass one = indexed[i];
      double sum = 0;
      for (; i < indexed.size() && indexed[i].index == one.index && indexed[i].row == one.row;
           ++i) {
        sum += indexed[i].grad;
      }
      one.grad = sum;
      indexed[merged] = one;
    }
    indexed.resize(merged);
  }
};

// What TokenGradient::at_index() takes, of a vector of indexed classes.
template <typename acc_t>
struct IndexedVector {
  acc_t max[kVector];
  acc_t rest[kVector];
  acc_t mean_distance[kVector];
  acc_t inverse_sum[kVector];
  acc_t of_softmax[kVector];
  acc_t of_entropy[kVector];
  acc_t z[kVector];
  acc_t grad[kVector];
  acc_t common[kVector];

  __attribute__((noinline)) void evaluate(acc_t* results) const {
    with_widest_vectors<acc_t>([&]() LOSSOPS_ALWAYS_INLINE {
      for (int i = 0; i < kVector; ++i) {
        const TokenGradient<acc_t> gradient{
            {max[i], rest[i], mean_distance[i]}, of_softmax[i], of_entropy[i], inverse_sum[i]};
        results[i] = gradient.at_index(z[i], grad[i], common[i]);
      }
    });
  }
};

// Writes the gradients of indexed classes, from number `next` on, up to that of class `end`. Class
// c of row j lies at (c - first_class) * stride + j, in z and in grad.
template <typename acc_t>
void gradients_at_indices(const RowGradients<acc_t>& rows, size_t& next, int64_t first_class,
                          int64_t end, const Columns<acc_t>& z, acc_t* grad, int64_t grad_stride) {
  const size_t size = rows.indexed.size();
  const auto is_left = [&]() { return next < size && rows.indexed[next].index < end; };
  while (is_left()) {
    IndexedVector<acc_t> vector = {};
    acc_t results[kVector];
    const IndexedClass* const batch = rows.indexed.data() + next;
    int count = 0;
    for (; count < kVector && is_left(); ++count, ++next) {
      const int row = batch[count].row;
      vector.max[count] = rows.max[row];
      vector.rest[count] = rows.rest[row];
      vector.mean_distance[count] = rows.mean_distance[row];
      vector.inverse_sum[count] = rows.inverse_sum[row];
      vector.of_softmax[count] = rows.of_softmax[row];
      vector.of_entropy[count] = rows.of_entropy[row];
      vector.z[count] = z.first[(batch[count].index - first_class) * z.stride + row];
      vector.grad[count] = static_cast<acc_t>(batch[count].grad);
      vector.common[count] = static_cast<acc_t>(rows.exact_of_softmax[row] + batch[count].grad);
    }
    vector.evaluate(results);
    for (int i = 0; i < count; ++i) {
      grad[(batch[i].index - first_class) * grad_stride + batch[i].row] = results[i];
    }
  }
}

}  // namespace
}  // namespace lossops::cpu
