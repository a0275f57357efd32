// Cross entropy of long rows of half types without gradients: warps hold pieces of a row in their
// registers. The pieces and the order of their sums are those of staged rows, and so are all bits.

#include <algorithm>
#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/primitives/warp_reduce.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/long_rows_plan.h"
#include "kernels/rows/phased_pieces.cuh"
#include "kernels/rows/row_pieces.cuh"

namespace lossops::cuda {
namespace long_rows {
namespace {

// A lane's share of a piece: vectors `lane`, `lane + 32`, ...; -inf where there is none. Rows with
// smoothing or probabilities are whole vectors at aligned addresses.
template <typename scalar_t, RowKind kKind>
struct Share {
  static constexpr bool kPhased = kIsPhased<scalar_t, kKind>;
  static constexpr bool kProbability = kKind == RowKind::kProbability;
  static constexpr int kStreams = kProbability ? 2 : 1;
  static constexpr int kSize = kVectorSize<scalar_t>;
  static constexpr int kVectors = kMaxPieceBytes / kStreams / kVectorBytes / kWarpSize;
  static constexpr int kSure = kProbability ? 0 : kMinPieceBytes / kVectorBytes / kWarpSize;
  // Vectors that are searched for the piece's maximum if the largest of them is that.
  static constexpr int kGroup = kPhased ? 4 : kVectors;
  static constexpr int kGroups = kVectors / kGroup;
  Vector<scalar_t> vectors[kVectors];
  Vector<scalar_t> probabilities[kProbability ? kVectors : 1] = {};  // any where there is no logit

  struct Piece : PhasedPiece<scalar_t, kPhased> {
    const scalar_t* probabilities = nullptr;
    using PhasedPiece<scalar_t, kPhased>::PhasedPiece;
  };

  // What a lane may load of a piece.
  struct Source {
    const scalar_t* first;          // its first vector
    const scalar_t* probabilities;  // likewise
    int vectors;                    // of the piece
    bool wanted;
    bool first_wanted;

    __device__ __forceinline__ Source(const Piece& piece, bool wanted_, int lane)
        : first(unfolded(piece.vectors + lane * kSize)),
          probabilities(kProbability ? unfolded(piece.probabilities + lane * kSize) : nullptr),
          vectors(unfolded(wanted_ ? piece.readable() : 0)),
          wanted(wanted_),
          first_wanted(wanted_ && !(piece.is_first && lane == 0)) {}
  };
  __device__ __forceinline__ void load(const Source& source, int u, int lane) {
    if (u >= kSure) {
      set_lowest(vectors[u]);
    }
    const bool wanted = kPhased && u == 0 ? source.first_wanted
                        : u < kSure       ? source.wanted
                                          : u * kWarpSize + lane < source.vectors;
    load_vector_if(wanted, vectors[u], source.first + u * kWarpSize * kSize);
    if constexpr (kProbability) {
      load_vector_if(wanted, probabilities[u], source.probabilities + u * kWarpSize * kSize);
    }
  }
  __device__ __forceinline__ void load(const Piece& piece, bool wanted, int lane) {
    const Source source(piece, wanted, lane);
#pragma unroll
    for (int u = 0; u < kVectors; ++u) {
      set_lowest(vectors[u]);
      load(source, u, lane);
    }
  }

  // Puts -inf in the place of what is not of the piece, and reads what load() may not.
  __device__ __forceinline__ void trim(const Piece& piece, int lane) {
    if (piece.phase > 0) {
      if (piece.is_first && lane == 0) {
        vectors[0] = load_part(piece.vectors, piece.phase, kSize);
      }
      keep_from(vectors[0], lane == 0 ? piece.phase : 0);
    }
    const int last = piece.whole_end();
    const bool is_tail = lane == last % kWarpSize && piece.tail() > 0;
    Vector<scalar_t> kept;
    Vector<scalar_t> others;
    parts_before(is_tail ? piece.tail() : kSize, kept, others);
    if (piece.is_last && is_tail) {
      kept = {};
      others = load_part(piece.vectors + last * kSize, 0, piece.tail());
    }
#pragma unroll
    for (int u = kSure; u < kVectors; ++u) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t word = vectors[u].word(i);
        vectors[u].set_word(i,
                            u == last / kWarpSize ? (word & kept.word(i)) | others.word(i) : word);
      }
    }
  }

  // The state of the piece. Loads `next`.
  __device__ __forceinline__ PieceState reduce(const Piece& piece, const Piece& next, bool wanted,
                                               const Smoothing& smoothing, int lane) {
    if constexpr (kPhased) {
      trim(piece, lane);
    }
    uint32_t maxima[kGroups];
    uint32_t largest = lowest_word<scalar_t>();
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      maxima[g] = lowest_word<scalar_t>();
#pragma unroll
      for (int u = 0; u < kGroup; ++u) {
        maxima[g] = max_of_vector(vectors[g * kGroup + u], maxima[g]);
      }
      largest = max_of_words<scalar_t>(maxima[g], largest);
    }
    const float own_max = max_of_elements<scalar_t>(largest);
    const float max = warp_max(own_max);
    int ones = 0;
    if constexpr (kPhased) {
      const PieceMaximum<scalar_t> maximum(max, own_max);
      uint32_t counts = 0;
#pragma unroll
      for (int g = 0; g < kGroups; ++g) {
        if (maximum.is_in(maxima[g])) {
#pragma unroll
          for (int u = 0; u < kGroup; ++u) {
            counts += maximum.take_from(vectors[g * kGroup + u]);
          }
        }
      }
      ones = sum_of_halves(counts);
    }
    const Source source(next, wanted, lane);
    // As where there is a gradient, which asks of no lane whether it may have the maximum's terms.
    const float largest_term = kProbability ? max : own_max;
    return reduce_below<scalar_t, kKind>(max, largest_term, [&](TermSum& sum, const auto& terms) {
      [[maybe_unused]] PhasedSum<scalar_t> phased;
#pragma unroll
      for (int u = 0; u < kVectors; ++u) {
        if constexpr (kPhased) {
          phased.add(terms, vectors[u]);
        } else if constexpr (kProbability) {
          if (u * kWarpSize + lane < piece.last()) {
            float x[kSize];
            float p[kSize];
#pragma unroll
            for (int i = 0; i < kSize; ++i) {
              x[i] = to_acc<float>(vectors[u].get(i));
              p[i] = to_acc<float>(probabilities[u].get(i));
            }
            add_logits<kKind>(sum, terms, x, p, smoothing);
          }
        } else {
          // As add_vectors().
          float x[kSize];
#pragma unroll
          for (int i = 0; i < kSize; ++i) {
            x[i] = to_acc<float>(vectors[u].get(i));
          }
          const float distance = sum.distance;
          add_logits<kKind>(sum, terms, x, x, {});
          if (u >= kSure && u * kWarpSize + lane >= piece.last()) {
            sum.distance = distance;
          }
        }
        load(source, u, lane);
        // Else the compiler would move all loads behind the sums.
        __syncwarp();
      }
      if constexpr (kPhased) {
        sum.ones = ones;
        sum.below = phased.total(piece.phase, lane);
      }
    });
  }
};

// What the threads of a block know of its rows.
struct LongRows {
  int64_t logits[kMaxRows];  // offsets
  int64_t probabilities[kMaxRows];
  int64_t outputs[kMaxRows];
  int index[kMaxRows];  // checked_index()
  float weight[kMaxRows];
  float x_at_index[kMaxRows];
  KeptState states[kMaxRows];
  float q_sums[kMaxRows];
  uint32_t with_loss;  // a bit a row
};

// The pieces of the block's rows are the warps' in turn. While a piece is computed, the warp's next
// one is on its way.
template <typename scalar_t, RowKind kKind>
__global__ void __launch_bounds__(kMaxThreads, 1)
    cross_entropy_long_rows_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                   Pieces pieces, RowShares shares, int64_t elements,
                                   Smoothing smoothing, Partial* partials, Finalize finalize) {
#if LOSSOPS_HOPPER_CODE
  constexpr bool kProbability = kKind == RowKind::kProbability;
  using RowShare = Share<scalar_t, kKind>;
  extern __shared__ uint32_t states[];  // [rows of the block][kStateWords<kKind>][pieces.count]
  __shared__ LongRows rows;
  const int thread = static_cast<int>(threadIdx.x);
  const int lane = thread % kWarpSize;
  // The same for all lanes, also to the compiler.
  const int warp = __shfl_sync(kAllLanes, thread / kWarpSize, 0);
  const int warps = static_cast<int>(blockDim.x) / kWarpSize;
  const auto* const input = static_cast<const scalar_t*>(args.input.data);
  const int num_classes = static_cast<int>(args.num_classes);
  const int64_t first_row = shares.first(blockIdx.x);
  const int count = shares.count(blockIdx.x, args.rows.numel);
  const int64_t stride = shares.stride(blockIdx.x);
  if (warp == 0) {
    int index = kIgnoredRow;
    if (thread < count) {
      const int64_t row = first_row + thread * stride;
      const Operand* const operands[] = {&args.target, &args.input, &args.output};
      int64_t offsets[3];
      plain_row_offsets(args.rows, operands, row, offsets);
      index = kProbability ? 0 : checked_index(args, load_class_index(args.target, offsets[0]));
      if constexpr (kProbability) {
        rows.probabilities[thread] = offsets[0];
      }
      rows.index[thread] = index;
      rows.logits[thread] = offsets[1];
      rows.outputs[thread] = offsets[2];
    }
    const uint32_t with_loss = __ballot_sync(kAllLanes, index >= 0);
    if (thread == 0) {
      rows.with_loss = with_loss;
    }
  }
  let_next_kernel_start();
  __syncthreads();
  const auto piece_of = [&](int n, int piece) {
    const int begin = piece * pieces.size;
    typename RowShare::Piece result(input, elements, rows.logits[n] + begin,
                                    max(0, min(pieces.size, num_classes - begin)));
    if constexpr (kProbability) {
      result.probabilities =
          static_cast<const scalar_t*>(args.target.data) + rows.probabilities[n] + begin;
    }
    return result;
  };
  const auto row_of = [](uint32_t left) { return max(__ffs(static_cast<int>(left)) - 1, 0); };
  uint32_t left = rows.with_loss;
  RowShare share;
  auto own = piece_of(row_of(left), warp);
  share.load(own, left != 0, lane);
  if (!kProbability && thread < count) {
    const int index = rows.index[thread];
    const scalar_t x_at_index = index >= 0 ? input[rows.logits[thread] + index] : scalar_t{};
    rows.weight[thread] = row_weight(args, index);
    rows.x_at_index[thread] = to_acc<float>(x_at_index);
  }
  int piece = warp;
#pragma unroll 1
  while (left != 0) {
    int next_piece = piece + warps;
    uint32_t next_left = left;
    if (next_piece >= pieces.count) {
      next_piece -= pieces.count;
      next_left &= left - 1;
    }
    const auto next = piece_of(row_of(next_left), next_piece);
    const PieceState state = share.reduce(own, next, next_left != 0, smoothing, lane);
    if (lane == 0) {
      state.template publish<kKind>(
          states + row_of(left) * kStateWords<kKind> * pieces.count + piece, pieces.count);
    }
    own = next;
    piece = next_piece;
    left = next_left;
  }
  __syncthreads();
  for (int n = warp; n < count; n += warps) {
    PieceState state;
    if (rows.index[n] >= 0) {
      state = combine_pieces<kKind>(states + n * kStateWords<kKind> * pieces.count, pieces,
                                    num_classes, lane);
    }
    if (lane == 0) {
      rows.states[n] = KeptState::of(state);
      if constexpr (kProbability) {
        rows.q_sums[n] = state.q_sum;
      }
    }
  }
  __syncthreads();
  if (warp > 0) {
    return;
  }
  Partial partial;
  if (thread < count) {
    finish_kept_row<kKind>(args, rows.index[thread], kProbability ? 1.0f : rows.weight[thread],
                           rows.states[thread], kProbability ? rows.q_sums[thread] : 0.0f,
                           kProbability ? 0.0f : rows.x_at_index[thread],  // fault: long-rows-index
                           first_row + thread * stride, rows.outputs[thread], partial);
  }
  if (args.reduction != Reduction::kNone) {
    reduce_warp_to_grid(partial, partials, finalize);
  }
#endif
}

}  // namespace
}  // namespace long_rows

void launch_long_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan, const Denominator&,
                      const GradOutput&, Partial* partials, const Finalize& finalize,
                      cudaStream_t stream) {
  using namespace long_rows;
  visit_half_type(args.input.dtype, [&](auto type) {
    visit_row_kind(args, [&](auto kind) {
      launch_kernel(
          "cross_entropy_long_rows_kernel",
          cross_entropy_long_rows_kernel<typename decltype(type)::type, decltype(kind)::value>,
          {plan.blocks, plan.threads, plan.shared_bytes}, stream, args, plan.pieces, plan.shares,
          elements_of(args), smoothing_of(args), partials, finalize);
    });
  });
}

}  // namespace lossops::cuda
