// The two passes over rows of logits that every loss of a row is made of, for any dtype and layout.
//
//   row_states_kernel     reduces the pieces of each row to states, which merge_states() merges
//   row_gradients_kernel  replaces each logit by a gradient, once its row is known
//
// A loss is a functor, and the logit map another. row_cut.h says how rows are cut.
//
//   struct Row {           // of row_states_kernel
//     using State = ...;   // has max, ones, raise_max(), add(); State{} is the identity
//     struct Sums {        // of the terms below the maximum; Sums{} is the identity
//       template <bool kProducts> void add(const TermBatch&);
//       void move_to(State&, unit, excess) const;  // differences were in units, and too large
//     };
//     bool wants_products;  // of powers and differences; else half types spare them
//   };
//   struct Gradients {     // of row_gradients_kernel
//     static constexpr int kPartVectors;  // RowParts::of() takes it; more where of() takes long
//     static constexpr int kBlocks;       // of a multiprocessor: as many as spill no registers
//     auto of(place) const -> Gradient;
//     void finish(place, part, const Gradient&) const;  // by all lanes of a warp, after the part
//   };
//   struct Gradient {      // what it takes of a row
//     void replace(acc_t (&x)[kCount], map) const;  // logits by their gradients
//   };
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/thread_reduce.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/mapped_terms.cuh"
#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_merge.cuh"
#include "kernels/rows/row_reader.cuh"
#include "losses/rows/logit_map.h"
#include "losses/rows/softmax_state.h"

namespace lossops::cuda {

// Rows of logits, from the first one of a slice on.
struct RowSource {
  Operand input;
  int64_t class_stride = 1;
  // An element for each row. A row whose element is `skipped` does not count: its logits are not
  // read, and its results are 0. Null: all rows count.
  Operand mask;
  uint64_t skipped = 0;
  int mask_bytes = 1;      // of an element
  uint64_t mask_bits = 0;  // of an element, those that are compared: not the sign of a float

  RowSource(const RowSlice& slice, const Operand& logits, int64_t stride, const Operand& row_mask,
            int64_t skipped_ = 0)
      : input(slice(logits)),
        class_stride(stride),
        mask(slice(row_mask)),
        skipped(static_cast<uint64_t>(skipped_)) {
    mask_bytes = static_cast<int>(element_size(mask.dtype));
    const bool has_sign = mask.dtype <= DType::kBFloat16;  // of 0 too
    mask_bits = ~uint64_t{0} >> (64 - 8 * mask_bytes + (has_sign ? 1 : 0));
  }

  __device__ __forceinline__ bool counts(const RowGrid::Place& place) const {
    if (mask.data == nullptr) {
      return true;
    }
    const int64_t offset = place.offset(mask);
    uint64_t bits = 0;
    switch (mask_bytes) {
      case 8:
        bits = static_cast<const uint64_t*>(mask.data)[offset];
        break;
      case 4:
        bits = static_cast<const uint32_t*>(mask.data)[offset];
        break;
      case 2:
        bits = static_cast<const uint16_t*>(mask.data)[offset];
        break;
      default:
        bits = static_cast<const uint8_t*>(mask.data)[offset];
    }
    return ((bits ^ skipped) & mask_bits) != 0;
  }
};

// A class index and the gradient there. The index is negative where nothing is to be written: it is
// out of range, or repeated.
template <typename acc_t>
struct GradientAtIndex {
  int index = -1;
  acc_t gradient = 0;
};

// The number of this thread's group of lanes, of which there are a power of two.
__device__ __forceinline__ uint32_t group_of_thread(int lanes, uint32_t thread = threadIdx.x,
                                                    uint32_t block = blockIdx.x) {
  const int shift = __ffs(lanes) - 1;
  return block * static_cast<uint32_t>(kRowThreads >> shift) + (thread >> shift);
}

// Blocks of row_states_kernel on a multiprocessor: 64 registers a thread, or 128 for fp64.
template <typename scalar_t>
constexpr int kRowBlocks = sizeof(scalar_t) == 8 ? 2 : 4;

// `wanted` blocks, or as many as fit: a multiprocessor of compute capability 7.5 has 1024 threads.
constexpr int row_blocks(int wanted) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
  return std::min(wanted, 1024 / kRowThreads);
#else
  return wanted;
#endif
}

// Whether the arithmetic of a logit takes longer than its load, and much code: that of a softcap,
// and of fp64.
template <typename scalar_t, typename Map>
constexpr bool kIsLong =
    sizeof(scalar_t) == 8 || std::is_same_v<Map, SoftcapMap<acc_type_t<scalar_t>>>;

// Vectors of a round.
template <typename scalar_t, typename Map>
constexpr int kVectorsOf = kIsLong<scalar_t, Map> ? 1 : kRowVectors;
// The same of a kernel that writes as much as it reads. Four would spill.
template <typename scalar_t, typename Map>
constexpr int kGradientVectorsOf = std::min(kVectorsOf<scalar_t, Map>, 2);

// Blocks of row_gradients_kernel on a multiprocessor.
template <typename Gradients, typename scalar_t, typename Map>
constexpr int kGradientBlocks =
    row_blocks(kIsLong<scalar_t, Map> ? kRowBlocks<scalar_t> : Gradients::kBlocks);

// A thread's share of the sums of a piece.
template <typename Row, typename scalar_t, typename Map>
class PieceSum {
 public:
  using acc_t = acc_type_t<scalar_t>;
  using State = typename Row::State;
  using Term = RowTerm<scalar_t>;
  static constexpr bool kIsLinear = SoftmaxTerms<scalar_t, Map>::kIsLinear;

  __device__ __forceinline__ PieceSum(const Row& row, const Map& map, int lanes)
      : row_(row), terms_(map), lanes_(lanes) {
    // Logits of -inf may all be above that.
    state_.max = terms_.set_top(top_);
  }

  // Adds the logits of a round. count(u): so many of vector u's elements exist; the others are
  // -inf. By all lanes of a warp.
  template <int kVectors, typename Count>
  __device__ __forceinline__ void add(const RowType<scalar_t>& type, RowVector (&vectors)[kVectors],
                                      const Count& count) {
    constexpr int kSize = kVectorSize<scalar_t>;
    LargestOfVector<scalar_t> largest[kVectors];
    const acc_t own = largest_of(type, vectors, largest);
    if (__any_sync(kAllLanes, own >= top_)) {
      raise(own);
      if constexpr (kIsLinear) {
        if (own == top_ && -math::infinity<acc_t>() < own && own < math::infinity<acc_t>()) {
          state_.ones += static_cast<acc_t>(take_equals(type, vectors, largest, top_));
        }
      }
    }
    if constexpr (kIsLong<scalar_t, Map>) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        acc_t x[kSize];
        vectors[u].unpack(type, x);
        add_vector<true>(x, count(u));
      }
    } else if (!Term::kIsHalf || row_.wants_products) {
      add_vectors<true>(type, vectors);
    } else {
      keep_apart();
      add_vectors<false>(type, vectors);
    }
  }

  // All lanes have the same maximum.
  __device__ __forceinline__ State finish() {
    move_sums();
    return state_;
  }

 private:
  // No logit of the round is larger than `own` in this thread.
  __device__ __forceinline__ void raise(acc_t own) {
    const acc_t top = max_over_lanes(own, lanes_);
    if (top > top_) {
      move_sums();
      top_ = top;
      state_.raise_max(terms_.set_top(top));
    }
  }

  // One branch for all vectors, so that their arithmetic overlaps.
  template <bool kProducts, int kVectors>
  __device__ __forceinline__ void add_vectors(const RowType<scalar_t>& type,
                                              const RowVector (&vectors)[kVectors]) {
    type.visit([&](auto like) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        acc_t x[kVectorSize<scalar_t>];
        vectors[u].template unpack_as<decltype(like)>(x);
        add_vector<kProducts>(x, kVectorSize<scalar_t>);
      }
    });
  }

  template <bool kProducts, int kSize>
  __device__ __forceinline__ void add_vector(const acc_t (&x)[kSize], int count) {
    TermBatch<scalar_t, kSize> batch;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      batch.differences[i] = terms_.template difference<kProducts>(x[i]);
      if constexpr (!kIsLinear) {
        const bool is_top = batch.differences[i] == acc_t(0);
        const bool is_there = i < count;
        state_.ones += is_top && is_there ? acc_t(1) : acc_t(0);
        batch.differences[i] = is_top || !is_there ? Term::kLowest : batch.differences[i];
      }
      batch.powers[i] = Term::exp(batch.differences[i]);
    }
    sums_.template add<kProducts>(batch);
  }

  __device__ __forceinline__ void move_sums() {
    sums_.move_to(state_, Term::kUnit, terms_.excess());
    sums_ = {};
  }

  Row row_;
  SoftmaxTerms<scalar_t, Map> terms_;
  int lanes_;
  State state_;
  typename Row::Sums sums_;
  acc_t top_ = -math::infinity<acc_t>();
};

// Leaves the states of rows, (rows, pieces). changes_signs: of logits, first (RisingMap). Where a
// row has no element, -inf stands for one.
template <typename Row, typename scalar_t, typename Map>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<scalar_t>)
    row_states_kernel(const __grid_constant__ RowSource source,
                      const __grid_constant__ RowGrid grid, const __grid_constant__ RowCut cut,
                      const Row loss, const RowType<scalar_t> type, const Map map,
                      bool changes_signs, typename Row::State* states) {
  using acc_t = acc_type_t<scalar_t>;
  constexpr int kVectors = kVectorsOf<scalar_t, Map>;
  constexpr int kSize = kVectorSize<scalar_t>;
  let_next_kernel_start();
  const int lanes = cut.lanes;
  const int lane = static_cast<int>(threadIdx.x) & (lanes - 1);
  const RowGrid::Place place = grid.place(group_of_thread(lanes));
  const scalar_t* const row =
      static_cast<const scalar_t*>(source.input.data) + place.offset(source.input);
  const bool counts = source.counts(place);
  const bool is_contiguous = source.class_stride == 1;
  const int end = counts ? cut.vectors : 0;
  const int inner = counts && is_contiguous ? cut.inner : end;

  const acc_t infinity = math::infinity<acc_t>();
  const scalar_t absent = type.visit([&](auto like) {
    return bits_as<scalar_t>(from_acc<decltype(like)>(changes_signs ? infinity : -infinity));
  });

  __shared__ RowVector granules[RowReader<scalar_t, kVectors>::kGranules];
  __shared__ RowVector outer_vectors[kRowThreads / kLeastLanes * kOuterVectors];
  // Inner vector 0 is the row's second.
  RowReader<scalar_t, kVectors> reader(row + kSize * source.class_stride, is_contiguous ? inner : 0,
                                       lanes, granules);
  const int step = kVectors * lanes;
  const int distance = step * cut.pieces;
  int v = place.share * step + lane;
  reader.start(v);
  RowVector* const outer =
      outer_vectors + (static_cast<int>(threadIdx.x) >> (__ffs(lanes) - 1)) * kOuterVectors;
  // Of this piece: (of_row - share) / pieces, rounded up. All lanes of a warp have as many.
  const int of_row = (cut.vectors + step - 1) >> (__ffs(step) - 1);
  const auto own_rounds = static_cast<int>(
      grid.shares.quotient(static_cast<uint32_t>(of_row + cut.pieces - 1 - place.share)));
  const int rounds = __any_sync(kAllLanes, counts) ? own_rounds : 0;
  if (is_contiguous && v - lane + (rounds - 1) * distance + step > inner) {
#pragma unroll 1
    for (int i = lane; i < kOuterVectors * kSize; i += lanes) {
      const int64_t c = int64_t{cut.position(inner + i / kSize)} * kSize + i % kSize;
      reinterpret_cast<scalar_t*>(outer)[i] = c < cut.num_classes && counts ? row[c] : absent;
    }
  }
  RowVector nothing = {};
#pragma unroll
  for (int i = 0; i < kSize; ++i) {
    nothing.set<scalar_t>(i, absent);
  }

  PieceSum<Row, scalar_t, Map> sum(loss, map, lanes);
#pragma unroll 1
  for (int round = rounds; round > 0; --round) {
    if (!is_contiguous) {
#pragma unroll 1
      for (int u = 0; u < kVectors; ++u) {
        const int number = v + u * lanes;
        const int position = cut.position(number);
        const int64_t from = int64_t{position - 1} * kSize * source.class_stride;
        const int count = number < end ? cut.elements(position, kSize) : 0;
        reader.put(u, gather(reader.first() + from, count, source.class_stride, absent));
      }
    }
    reader.take();
    // After the last round nothing is copied: no row has as many vectors.
    const int next = round > 1 ? v + distance : static_cast<int>(kMostVectors);
    reader.start(next);
    if (v + (kVectors - 1) * lanes >= inner) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        const int number = v + u * lanes;
        if (number >= inner) {
          reader.vectors[u] = number < end ? outer[number - inner] : nothing;
        }
      }
    }
    if (changes_signs) {
      reader.change_signs();
    }
    sum.add(type, reader.vectors, [&](int u) {
      const int number = v + u * lanes;
      return number < end ? cut.elements(cut.position(number), kSize) : 0;
    });
    v = next;
  }
  auto state = sum.finish();
  // All lanes have the same maximum.
#pragma unroll 1
  for (int bit = lanes / 2; bit > 0; bit /= 2) {
    state.add(exchange(state, bit));
  }
  // Computed once more, for the registers that it would have kept from the rounds.
  const auto thread = static_cast<uint32_t>(unfolded(static_cast<int>(threadIdx.x)));
  const uint32_t own_group = group_of_thread(lanes, thread);
  if (lane == 0 && own_group < grid.groups) {
    const RowGrid::Place own = grid.place(own_group);
    states[own.row * cut.pieces + own.share] = state;
  }
}

// Writes the gradients of a plan's parts, a warp each. rows: knows each row's Gradient. A
// row that does not count gets zeros, and its Gradient is not asked for.
template <typename Gradients, typename scalar_t, typename Map>
__global__ void __launch_bounds__(kRowThreads, kGradientBlocks<Gradients, scalar_t, Map>)
    row_gradients_kernel(const __grid_constant__ Gradients rows,
                         const __grid_constant__ RowSource source,
                         const __grid_constant__ Operand grad_input, int64_t grad_class_stride,
                         const __grid_constant__ RowGrid grid,
                         const __grid_constant__ RowParts plan, const RowType<scalar_t> type,
                         const Map map) {
  using acc_t = acc_type_t<scalar_t>;
  constexpr int kVectors = kGradientVectorsOf<scalar_t, Map>;
  constexpr int kSize = kVectorSize<scalar_t>;
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const uint32_t group = group_of_thread(kWarpSize, threadIdx.x, block_from_the_end());
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (group >= grid.groups) {
    return;
  }
  const RowGrid::Place place = grid.place(group);
  const bool counts = source.counts(place);
  const scalar_t* const logits =
      static_cast<const scalar_t*>(source.input.data) + place.offset(source.input);
  scalar_t* const gradients = static_cast<scalar_t*>(grad_input.data) + place.offset(grad_input);
  const RowPart part =
      RowPart::of(plan, place.share, source.class_stride == 1 && grad_class_stride == 1,
                  static_cast<uint32_t>(reinterpret_cast<uintptr_t>(gradients)));
  scalar_t* const vectors = gradients + part.first_class;
  if (!counts) {
#pragma unroll 1
    for (int v = part.begin + lane; v < part.end; v += kWarpSize) {
      reinterpret_cast<RowVector*>(vectors)[v] = {};
    }
#pragma unroll 1
    for (int64_t i = lane; i < part.singles; i += kWarpSize) {
      gradients[part.class_of_single(i) * grad_class_stride] = {};
    }
    return;
  }

  __shared__ RowVector granules[RowReader<scalar_t, kVectors>::kGranules];
  RowReader<scalar_t, kVectors> reader(logits + part.first_class, part.end, kWarpSize, granules);
  reader.start(part.begin + lane);
  // These load, too, while the first copies are on their way.
  const auto gradient = rows.of(place);
#pragma unroll 1
  for (int64_t i = lane; i < part.singles; i += kWarpSize) {
    const int64_t c = part.class_of_single(i);
    type.visit([&](auto like) {
      using own_t = decltype(like);
      acc_t values[1] = {to_acc<acc_t>(bits_as<own_t>(logits[c * source.class_stride]))};
      gradient.replace(values, map);
      gradients[c * grad_class_stride] = bits_as<scalar_t>(from_acc<own_t>(values[0]));
    });
  }
#pragma unroll 1
  for (int first = part.begin; first < part.end; first += kWarpSize * kVectors) {
    const int v = first + lane;
    reader.take();
    reader.start(v + kWarpSize * kVectors);
    RowVector* const to = reinterpret_cast<RowVector*>(vectors) + v;
    if constexpr (kIsLong<scalar_t, Map>) {
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        acc_t values[kSize];
        reader.vectors[u].unpack(type, values);
        gradient.replace(values, map);
        const RowVector packed = RowVector::pack(type, values);
        if (v + u * kWarpSize < part.end) {
          to[u * kWarpSize] = packed;
        }
      }
    } else {
      // One branch for all vectors, so that their arithmetic overlaps.
      type.visit([&](auto like) {
        using own_t = decltype(like);
#pragma unroll
        for (int u = 0; u < kVectors; ++u) {
          acc_t values[kSize];
          reader.vectors[u].template unpack_as<own_t>(values);
          gradient.replace(values, map);
          if (v + u * kWarpSize < part.end) {
            to[u * kWarpSize] = RowVector::pack_as<own_t>(values);
          }
        }
      });
    }
  }
  rows.finish(place, part, gradient);
}

}  // namespace lossops::cuda
