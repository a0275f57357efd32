// WarpWords: half types of rows that lie side by side at any address, read and written by the words
// of 4 bytes that they lie in.
#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/sizes.h"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/row_groups.cuh"
#include "kernels/rows/side_by_side_rows.cuh"

namespace lossops::cuda::side_by_side {

// The groups of a warp's lanes, which are neighbours: 64 words of each class, or 65 where the first
// element of the class begins in the middle of a word. Neighbouring lanes copy and write
// neighbouring words, whosever they are. All lanes of the warp call each function.
template <typename scalar_t>
class WarpWords {
 public:
  using Group = RowGroup<scalar_t>;

  // own: the lane's group of class 0, in shared memory. Those of the other lanes lie beside it, and
  // the next class kWarpSize groups further. last_words: where the 65th words go, one a class.
  __device__ __forceinline__ WarpWords(Group* own, uint32_t* last_words, int classes)
      : words_((own - lane())->words), last_words_(last_words), classes_(classes) {}

  // from: the lane's group of class 0. Where a class begins in the middle of a word, an element
  // must follow those of the warp: the 65th word has it, too.
  __device__ __forceinline__ void start_copies(const scalar_t* from, int64_t class_stride) const {
    __syncwarp();  // all lanes have read what is overwritten
    for_each_kind(
        from - lane() * kRows, class_stride, [&](const ClassKind& kind, const scalar_t* first) {
          const uint32_t* own = word_around(first) + lane();
          CopyPlace<uint32_t, CopyCaches::kL1AndL2> words(words_ + kind.first * kWords + lane());
          kind.for_each([&] {
            words.start_copy(own);
            words += kWarpSize;
            words.start_copy(own + kWarpSize);
            words += kind.step * kWords - kWarpSize;
            own += kind.stride;
          });
          if (kind.is_odd) {
            for_each_of_lane(kind, [&](int c, int64_t words_before) {
              start_own_copy(last_words_ + c, word_around(first) + words_before + kWords);
            });
          }
        });
  }

  // Brings each group to its lane, after the lane has waited for its copies. from: as of
  // start_copies().
  __device__ __forceinline__ void settle(const scalar_t* from, int64_t class_stride) const {
    const bool is_last = lane() == kWarpSize - 1;
    __syncwarp();
    for_each_kind(from - lane() * kRows, class_stride, [&](const ClassKind& kind, const scalar_t*) {
      if (!kind.is_odd) {
        return;  // they are where they belong
      }
      auto* own = reinterpret_cast<Group*>(words_) + kind.first * kWarpSize + lane();
      const int pitch = kind.step * kWarpSize;
      const uint32_t* next = is_last ? last_words_ + kind.first : (own + 1)->words;
      const int next_pitch = kind.step * (is_last ? 1 : kWords);
      kind.for_each_batch([&](auto count) {
        constexpr int kCount = decltype(count)::value;
        Group x[kCount];
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          x[u] = own[u * pitch];
          x[u].words[0] = joined_words(x[u].words[0], x[u].words[1]);
          x[u].words[1] = joined_words(x[u].words[1], next[u * next_pitch]);
        }
        __syncwarp();
#pragma unroll
        for (int u = 0; u < kCount; ++u) {
          own[u * pitch] = x[u];
        }
        own += kCount * pitch;
        next += kCount * next_pitch;
      });
    });
  }

  // Writes the groups of all lanes. to: the lane's group of class 0.
  __device__ __forceinline__ void store(scalar_t* to, int64_t class_stride) const {
    __syncwarp();
    for_each_kind(to - lane() * kRows, class_stride, [&](const ClassKind& kind, scalar_t* first) {
      const uint32_t* words = words_ + kind.first * kWords + lane();
      if (!kind.is_odd) {
        auto* own = reinterpret_cast<uint32_t*>(first) + lane();
        kind.for_each([&] {
          own[0] = words[0];
          own[kWarpSize] = words[kWarpSize];
          words += kind.step * kWords;
          own += kind.stride;
        });
        return;
      }
      // The whole words, and then the halves of words at both ends.
      auto* own = reinterpret_cast<uint32_t*>(first + 1) + lane();
      const bool is_last = lane() == kWarpSize - 1;
      kind.for_each([&] {
        own[0] = joined_words(words[0], words[1]);
        if (!is_last) {
          // fault: columns-odd-words
          own[kWarpSize] = joined_words(words[kWarpSize], words[kWarpSize + 1]);
        }
        words += kind.step * kWords;
        own += kind.stride;
      });
      for_each_of_lane(kind, [&](int c, int64_t words_before) {
        const auto* const elements = reinterpret_cast<const scalar_t*>(words_ + c * kWords);
        scalar_t* const of_class = first + 2 * words_before;
        of_class[0] = elements[0];
        of_class[2 * kWords - 1] = elements[2 * kWords - 1];
      });
    });
    __syncwarp();  // a lane may overwrite what others have read
  }

 private:
  static constexpr int kRows = Group::kRows;
  static constexpr int kWords = Group::kWords * kWarpSize;  // of a class
  static_assert(Group::kWords == 2);

  // Classes first, first + step, ...: all begin at words, or all in the middle of one.
  struct ClassKind {
    int first;
    int step;
    int count;
    int64_t stride;  // words from one of these classes to the next, in global memory
    bool is_odd;     // they begin in the middle of a word

    // Calls body(integral_constant<int, n>) for the next n classes.
    template <typename Body>
    __device__ __forceinline__ void for_each_batch(const Body& body) const {
      int left = count;
#pragma unroll 1
      for (; left >= kColumnUnroll; left -= kColumnUnroll) {
        body(std::integral_constant<int, kColumnUnroll>());
      }
#pragma unroll 1
      for (; left > 0; --left) {
        body(std::integral_constant<int, 1>());
      }
    }
    template <typename Body>
    __device__ __forceinline__ void for_each(const Body& body) const {
      for_each_batch([&](auto n) {
#pragma unroll
        for (int u = 0; u < decltype(n)::value; ++u) {
          body();
        }
      });
    }
  };

  // Calls body(kind, pointer to class kind.first) for each kind of classes: one kind with an even
  // stride, two with an odd one.
  template <typename Element, typename Body>
  __device__ __forceinline__ void for_each_kind(Element* elements, int64_t class_stride,
                                                const Body& body) const {
    const int step_bits = static_cast<int>(class_stride & 1);
#pragma unroll 1
    for (int first = 0; first <= step_bits; ++first) {
      Element* const of_first = elements + first * class_stride;
      // fault: columns-odd-stride
      const bool is_odd = (reinterpret_cast<uintptr_t>(of_first) & 2) != 0;
      body(ClassKind{first, 1 << step_bits, (classes_ - first + step_bits) >> step_bits,
                     class_stride >> (1 - step_bits), is_odd},
           of_first);
    }
  }
  // Deals out the classes of a kind to the lanes. body(c, words from class kind.first to c).
  template <typename Body>
  __device__ __forceinline__ void for_each_of_lane(const ClassKind& kind, const Body& body) const {
#pragma unroll 1
    for (int k = lane(); k < kind.count; k += kWarpSize) {
      body(kind.first + k * kind.step, k * kind.stride);
    }
  }

  static __device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x % kWarpSize); }
  // The second element of a word and the first one of the next, as one word.
  static __device__ __forceinline__ uint32_t joined_words(uint32_t word, uint32_t next) {
    return __funnelshift_r(word, next, 16);
  }

  uint32_t* words_;  // of class 0, of the warp's first group
  uint32_t* last_words_;
  int classes_;
};

}  // namespace lossops::cuda::side_by_side
