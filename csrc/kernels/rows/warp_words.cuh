// WarpWords: half types of rows that lie side by side at any address, read and written by the words
// of 4 bytes that they lie in.
#pragma once

#include <cstdint>

#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/sizes.h"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/row_groups.cuh"
#include "kernels/rows/side_by_side_rows.cuh"

namespace lossops::cuda::side_by_side {

// The groups of a warp's lanes, which are neighbours: 64 words of each class, or 65 where rows
// begin in the middle of a word. Neighbouring lanes copy and write neighbouring words, whosever
// they are. All lanes of the warp call each function.
template <typename scalar_t>
class WarpWords {
 public:
  using Group = RowGroup<scalar_t>;

  // own: the lane's group of class 0, in shared memory. Those of the other lanes lie beside it, and
  // the next class kWarpSize groups further. last_words: where the 65th words go, one a class.
  __device__ __forceinline__ WarpWords(Group* own, uint32_t* last_words, int classes)
      : words_((own - lane())->words), last_words_(last_words), classes_(classes) {}

  // from: the lane's group of class 0. Where rows begin in the middle of a word, an element must
  // follow those of the warp: the 65th word has it, too.
  __device__ __forceinline__ void start_copies(const scalar_t* from, int64_t class_stride) const {
    from -= lane() * kRows;
    CopyPlace<uint32_t> words(words_ + lane());
    CopyPlace<uint32_t> last(last_words_);
    __syncwarp();  // all lanes have read what is overwritten
#pragma unroll 2
    for (int c = 0; c < classes_; ++c) {
      const uint32_t* const own = word_around(from) + lane();
      words.start_copy(own);
      words += kWarpSize;
      words.start_copy(own + kWarpSize);
      words += kWarpSize;
      if (lane() == 0 && is_odd(from)) {
        last.start_copy(own + kWords);
      }
      last += 1;
      from += class_stride;
    }
  }

  // Brings each group to its lane, after the lane has waited for its copies. from: as of
  // start_copies().
  __device__ __forceinline__ void settle(const scalar_t* from, int64_t class_stride) const {
    auto* const own = reinterpret_cast<Group*>(words_) + lane();
    const bool is_last = lane() == kWarpSize - 1;
    const uint32_t* const next = is_last ? last_words_ : (own + 1)->words;
    const int next_pitch = is_last ? 1 : kWords;
    const uint32_t change = class_stride % 2 == 0 ? 0 : 16;
    uint32_t shift = is_odd(from) ? 16 : 0;
    __syncwarp();
    if ((shift | change) == 0) {
      return;  // all are where they belong
    }
#pragma unroll 1
    for (int c = 0; c < classes_; c += kColumnUnroll) {
      Group x[kColumnUnroll];
#pragma unroll
      for (int u = 0; u < kColumnUnroll; ++u) {
        const int k = min(c + u, classes_ - 1);
        x[u] = own[k * kWarpSize];
        x[u].words[0] = __funnelshift_r(x[u].words[0], x[u].words[1], shift);
        x[u].words[1] = __funnelshift_r(x[u].words[1], next[k * next_pitch], shift);
        shift ^= change;  // fault: columns-odd-stride
      }
      __syncwarp();
#pragma unroll
      for (int u = 0; u < kColumnUnroll; ++u) {
        if (c + u < classes_) {
          own[(c + u) * kWarpSize] = x[u];
        }
      }
    }
  }

  // Writes the groups of all lanes. to: the lane's group of class 0.
  __device__ __forceinline__ void store(scalar_t* to, int64_t class_stride) const {
    to -= lane() * kRows;
    const uint32_t* words = words_ + lane();
    const bool is_first = lane() == 0;
    __syncwarp();
#pragma unroll 2
    for (int c = 0; c < classes_; ++c) {
      const uint32_t low = words[0];
      const uint32_t high = words[kWarpSize];
      if (!is_odd(to)) {
        auto* const own = reinterpret_cast<uint32_t*>(to) + lane();
        own[0] = low;
        own[kWarpSize] = high;
      } else {
        auto* const own = reinterpret_cast<uint32_t*>(to + 1) + lane() - 1;
        if (is_first) {
          reinterpret_cast<uint16_t*>(to)[0] = static_cast<uint16_t>(low);
        } else {
          own[0] = __funnelshift_r(words[-1], low, 16);  // fault: columns-odd-words
        }
        own[kWarpSize] = __funnelshift_r(words[kWarpSize - 1], high, 16);
        if (lane() == kWarpSize - 1) {
          reinterpret_cast<uint16_t*>(to)[2 * kWords - 1] = static_cast<uint16_t>(high >> 16);
        }
      }
      words += kWords;
      to += class_stride;
    }
    __syncwarp();  // a lane may overwrite what others have read
  }

 private:
  static constexpr int kRows = Group::kRows;
  static constexpr int kWords = Group::kWords * kWarpSize;  // of a class
  static_assert(Group::kWords == 2);

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % kWarpSize); }
  static __device__ __forceinline__ bool is_odd(const scalar_t* pointer) {
    return (reinterpret_cast<uintptr_t>(pointer) & 2) != 0;
  }

  uint32_t* words_;  // of class 0, of the warp's first group
  uint32_t* last_words_;
  int classes_;
};

}  // namespace lossops::cuda::side_by_side
