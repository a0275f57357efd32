// Short rows in the shared memory of a block, as ShortRows of row_cut.h deals them out: how they
// come there, how lanes take their words, and how rows of the same layout are written from there.
//
// Rows that follow one another, or have small gaps, are copied as one run of vectors. Other rows
// are copied each by its lanes: by aligned vectors, and by words or elements at its ends. Rows
// whose classes are no neighbours are copied by elements alone.
#pragma once

#include <cstdint>

#include "kernels/primitives/async_copy.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_pass.cuh"
#include "kernels/rows/row_reader.cuh"
#include "kernels/rows/row_words.cuh"

namespace lossops::cuda {

// Resident blocks of a multiprocessor that the compiler must leave registers for. A block has up to
// 45 KB of shared memory: 228 KB hold five.
constexpr int kShortRowBlocks = row_blocks(5);

// Neighbouring elements of global memory, and their vectors: the aligned 16 bytes that they lie in.
// The first and the last vector may also have elements that are not of the run. In shared memory
// the run begins as far within a vector as in global memory.
template <typename scalar_t>
class VectorRun {
 public:
  static constexpr int kSize = kVectorSize<scalar_t>;

  __device__ __forceinline__ VectorRun(const void* first, int elements)
      : phase_(static_cast<int>(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(first)) %
                                kVectorBytes / sizeof(scalar_t))),
        end_(phase_ + elements),
        whole_begin_(phase_ > 0 ? 1 : 0),
        whole_end_(max(end_ / kSize, whole_begin_)) {}

  // Elements from the first vector's beginning to the run's.
  __device__ __forceinline__ int phase() const { return phase_; }

  // Shares the run among `lanes` lanes. Calls vector(v) for each vector that is the run's alone,
  // word(w) for each other word of 4 bytes that is, and element(e) for each other element. All
  // count from the beginning of the first vector.
  template <typename Vectors, typename Words, typename Elements>
  __device__ __forceinline__ void for_each(int lane, int lanes, const Vectors& vector,
                                           const Words& word, const Elements& element) const {
#pragma unroll 1
    for (int v = whole_begin_ + lane; v < whole_end_; v += lanes) {
      vector(v);
    }
    constexpr int kPerWord = kWordElements<scalar_t>;
    constexpr int kVectorWords = kSize / kPerWord;
    const int end = (end_ + kPerWord - 1) / kPerWord;
    const int head_end = min(whole_begin_ * kVectorWords, end);
    const int skipped = min(whole_end_ * kVectorWords, end) - head_end;  // between head and tail
#pragma unroll 1
    for (int i = phase_ / kPerWord + lane; i < end - skipped; i += lanes) {
      const int w = i < head_end ? i : i + skipped;
      const int e = w * kPerWord;
      if (e >= phase_ && e + kPerWord <= end_) {
        word(w);
      } else {
        element(max(e, phase_));
      }
    }
  }

 private:
  int phase_;
  int end_;
  int whole_begin_;
  int whole_end_;
};

// The rows of a block: where they lie in shared memory, how they come there and are written.
template <typename scalar_t>
class BlockRows {
 public:
  static constexpr int kSize = kVectorSize<scalar_t>;

  // Starts the copies of the logits to `shared`, which has ShortRows::kSharedBytes. Each thread
  // must wait for its own copies. block: whose rows these are.
  __device__ __forceinline__ BlockRows(const RowSource& source, const RowGrid& grid,
                                       const ShortRows& plan, uint32_t block, RowVector* shared)
      : block_(block),
        source_(source),
        grid_(grid),
        plan_(plan),
        shared_(shared),
        rows_(static_cast<int>(min(static_cast<uint32_t>(plan.rows), grid.groups - number(0)))) {
    if (source.class_stride != 1) {
      for_each_element([&](int r, int c) {
        elements()[r * plan_.pitch + c] = logits_of(r)[c * source_.class_stride];
      });
    } else if (plan.run_stride == 0) {
      for_each_row([&](int r, int lane) {
        RowVector* const row = shared_ + r * (plan_.pitch / kSize);
        copy(logits_of(r), plan_.num_classes, lane, plan_.lanes, [&](int v) { return row + v; });
      });
    } else {
      const auto* const first =
          static_cast<const scalar_t*>(source.input.data) + int64_t{number(0)} * plan.run_stride;
      phase_ = copy(first, (rows_ - 1) * plan.run_stride + plan.num_classes,
                    static_cast<int>(threadIdx.x), kRowThreads,
                    [&](int v) { return shared_ + plan_.shared_vector(v); });
    }
  }

  __device__ __forceinline__ int rows() const { return rows_; }
  // The number of row r in the slice.
  __device__ __forceinline__ uint32_t number(int r) const {
    return block_ * static_cast<uint32_t>(plan_.rows) + static_cast<uint32_t>(r);
  }
  __device__ __forceinline__ scalar_t* elements() const {
    return reinterpret_cast<scalar_t*>(shared_);
  }
  // The element where row r begins.
  __device__ __forceinline__ int begin(int r) const {
    const int phase = plan_.has_phases ? VectorRun<scalar_t>(logits_of(r), 0).phase() : phase_;
    return r * plan_.pitch + phase;
  }
  // An element at or behind the end of the last row, by a vector at the most.
  __device__ __forceinline__ int end() const {
    return (rows_ - 1) * plan_.pitch + plan_.num_classes + kSize;
  }
  // Whether rows may begin within a word of 32 bits.
  __device__ __forceinline__ bool splits_words() const {
    // In a register, or each word would ask anew.
    const bool may_begin = plan_.has_phases || phase_ % 2 != 0 || plan_.pitch % 2 != 0;
    return sizeof(scalar_t) == 2 && unfolded(may_begin ? 1 : 0) != 0;
  }

  // Writes the rows in shared memory to the same rows of `to`. lies_as_copied: those rows are one
  // run without gaps, as the logits are, and begin at the same element of a vector.
  __device__ __forceinline__ void write(const Operand& to, int64_t class_stride,
                                        bool lies_as_copied) const {
    auto* const data = static_cast<scalar_t*>(to.data);
    if (lies_as_copied) {
      scalar_t* const first = data + grid_.place(number(0)).offset(to);
      const VectorRun<scalar_t> run(first, rows_ * plan_.num_classes);
      auto* const vectors = reinterpret_cast<RowVector*>(first - run.phase());
      run.for_each(
          static_cast<int>(threadIdx.x), kRowThreads,
          [&](int v) { vectors[v] = shared_[plan_.shared_vector(v)]; },
          [&](int w) {
            reinterpret_cast<uint32_t*>(vectors)[w] = reinterpret_cast<const uint32_t*>(shared_)[w];
          },
          [&](int e) { first[e - run.phase()] = elements()[e]; });
    } else if (class_stride == 1) {
      for_each_row([&](int r, int lane) {
        scalar_t* const row = data + grid_.place(number(r)).offset(to);
        const VectorRun<scalar_t> run(row, plan_.num_classes);
        const int at = begin(r) - run.phase();
        const scalar_t* const from = elements() + at;
        auto* const vectors = reinterpret_cast<RowVector*>(row - run.phase());
        const bool in_vectors = at % kSize == 0;
        run.for_each(
            lane, plan_.lanes,
            [&](int v) {
              vectors[v] = in_vectors ? reinterpret_cast<const RowVector*>(from)[v]
                                      : RowVector::load_by_words(from + v * kSize);
            },
            [&](int w) {
              UnalignedWords<scalar_t, 1> found;
              found.load(from + w * kWordElements<scalar_t>);
              reinterpret_cast<uint32_t*>(vectors)[w] = found.word(0);
            },
            [&](int e) { row[e - run.phase()] = from[e]; });
      });
    } else {
      for_each_element([&](int r, int c) {
        data[grid_.place(number(r)).offset(to) + c * class_stride] = elements()[begin(r) + c];
      });
    }
  }

 private:
  __device__ __forceinline__ const scalar_t* logits_of(int r) const {
    return static_cast<const scalar_t*>(source_.input.data) +
           grid_.place(number(r)).offset(source_.input);
  }

  // Copies neighbouring elements, by one of `lanes` lanes. place(v): where vector v comes to lie;
  // an element lies in its vector. Returns the run's phase.
  template <typename Place>
  static __device__ __forceinline__ int copy(const scalar_t* from, int count, int lane, int lanes,
                                             const Place& place) {
    const VectorRun<scalar_t> run(from, count);
    const scalar_t* const first = from - run.phase();
    run.for_each(
        lane, lanes,
        [&](int v) { start_own_copy(place(v), reinterpret_cast<const RowVector*>(first) + v); },
        [&](int w) {
          start_own_copy(reinterpret_cast<uint32_t*>(place(0)) + w,
                         reinterpret_cast<const uint32_t*>(first) + w);
        },
        [&](int e) { reinterpret_cast<scalar_t*>(place(0))[e] = first[e]; });
    return run.phase();
  }

  // Calls body(r, lane) with the rows of this thread.
  template <typename Body>
  __device__ __forceinline__ void for_each_row(const Body& body) const {
    const int lane = static_cast<int>(threadIdx.x) & (plan_.lanes - 1);
#pragma unroll 1
    for (int r = static_cast<int>(threadIdx.x) >> (__ffs(plan_.lanes) - 1); r < rows_;
         r += plan_.turn_rows) {
      body(r, lane);
    }
  }
  // Calls body(r, c) with every element of the rows.
  template <typename Body>
  __device__ __forceinline__ void for_each_element(const Body& body) const {
#pragma unroll 1
    for (int e = static_cast<int>(threadIdx.x); e < rows_ * plan_.num_classes; e += kRowThreads) {
      const auto r = static_cast<int>(plan_.classes.quotient(static_cast<uint32_t>(e)));
      body(r, e - r * plan_.num_classes);
    }
  }

  uint32_t block_;
  const RowSource& source_;
  const RowGrid& grid_;
  const ShortRows& plan_;
  RowVector* shared_;
  int rows_;
  int phase_ = 0;  // elements from the beginning of shared memory to the first row of a run
};

// How the rows of a slice are dealt out. most_turns: see ShortRows.
template <typename scalar_t>
ShortRows short_rows_of(const RowSlice& slice, const RowSource& source, int64_t num_classes,
                        int most_turns) {
  // Memory reads whole sectors, so small gaps between rows are read as well.
  const int64_t stride = slice.sizes[0] > 1 ? source.input.strides[0] : num_classes;
  const int64_t gap_bytes = (stride - num_classes) * static_cast<int64_t>(sizeof(scalar_t));
  const bool is_strided_run = source.class_stride == 1 && slice.sizes[1] == 1 && gap_bytes >= 0 &&
                              gap_bytes <= kSectorBytes;
  ShortRows::Layout layout;
  layout.are_apart = source.class_stride != 1;
  layout.are_aligned = begin_at_vectors(slice, source.input);
  // A row of one class may have any distance between classes.
  if (source.class_stride == 1 && is_run(slice, source.input, 1, num_classes)) {
    layout.row_stride = num_classes;
  } else if (is_strided_run) {
    layout.row_stride = stride;
  }
  return ShortRows(num_classes, sizeof(scalar_t), layout, most_turns);
}

// The words of 32 bits of a row in shared memory that one of its lanes takes, four at a time. Where
// rows are whole vectors, these are the words of every lanes-th vector; else every lanes-th word.
// So the order follows from the number of classes and the dtype.
template <typename scalar_t>
class LaneWords {
 public:
  // Row r of the block.
  __device__ __forceinline__ LaneWords(const BlockRows<scalar_t>& rows, const ShortRows& plan,
                                       int r, int lane)
      : row_(rows.elements(), rows.begin(r), rows.splits_words()), plan_(plan), lane_(lane) {}

  // Calls body with an array of four words, or of one. absent: has in its upper half what stands
  // for the half of the last word that the row does not have. kReplaces: what body makes of the
  // words is written back. Split words are then read by halves, because another thread may be
  // writing what lies beside them.
  template <bool kReplaces, typename Body>
  __device__ __forceinline__ void for_each_batch(uint32_t absent, const Body& body) const {
    constexpr int kPerWord = kWordElements<scalar_t>;
    constexpr int kBatch = 4;
    // In registers, or each turn would load them again.
    const int lanes = unfolded(plan_.lanes);
    const int whole = unfolded(plan_.num_classes / kPerWord);
    const int distance = unfolded(plan_.in_vectors ? 1 : lanes);
    int k = plan_.in_vectors ? kBatch * lane_ : lane_;
#pragma unroll 1
    for (; k + (kBatch - 1) * distance < whole; k += kBatch * lanes) {
      uint32_t words[kBatch];
      if (plan_.is_aligned) {
        row_.load_vector(k, words);
      } else {
        row_.template load<kReplaces>(k, distance, words);
      }
      body(words);
      if constexpr (kReplaces) {
        if (plan_.is_aligned) {
          row_.store_vector(k, words);
        } else {
          row_.store(k, distance, words);
        }
      }
    }
#pragma unroll 1
    for (; k * kPerWord < plan_.num_classes; k += lanes) {
      const bool is_part = kPerWord == 2 && k == whole;
      uint32_t words[1];
      if (is_part) {
        words[0] = row_.load_half(k) | (absent & 0xffff0000u);
      } else {
        row_.template load<kReplaces>(k, 0, words);
      }
      body(words);
      if constexpr (kReplaces) {
        if (is_part) {
          row_.store_half(k, words[0]);
        } else {
          row_.store(k, 0, words);
        }
      }
    }
  }

 private:
  RowWords<scalar_t> row_;
  const ShortRows& plan_;
  int lane_;
};

}  // namespace lossops::cuda
