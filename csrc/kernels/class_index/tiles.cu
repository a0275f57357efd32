// Cross entropy of rows of half types: a warp takes a tile at a time, one to hundreds of
// consecutive rows.

#include <algorithm>
#include <cstdint>

#include "kernels/class_index/tiles_plan.h"
#include "kernels/class_index/tiles_rows.cuh"
#include "kernels/grid/device.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/block_reduce.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/row_gradient.cuh"
#include "kernels/rows/row_words.cuh"

namespace lossops::cuda {
namespace tiles {
namespace {

// Elements of a row that a lane adds up, or replaces by their gradients, at a time.
constexpr int kElementsAtATime = 8;
// Granules of a gradient that a lane has in flight.
constexpr int kStoreUnroll = 4;
// Of rows that are copied one by one, those of more granules than these are copied in bulk, one
// copy a row. Shorter ones are copied by all lanes, because a warp starts its
// bulk copies one after the other. Measured on an H200, bf16, 8 lanes a row, forward: 256, 512 and
// 896 classes in bulk .52, .65, .73 of the floor, by lanes .54, .62, .69.
constexpr int kMostGranulesByLanes = 32;

// Where the rows of a tile start in shared memory: at 32-bit words, or in the middle of one.
enum class Rows : int8_t { kAtWords, kWithinWords };

// The gradient of a row that has no loss.
struct ConstantGradient {
  float value;

  template <int kCount>
  __device__ __forceinline__ void replace(float (&x)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = value;
    }
  }
};

// A row that is reduced, and whose loss is left.
struct LeftRow {
  IndexRow reduced;
  float x_at_index = 0;
  int index = kIgnoredRow;
  int64_t number = -1;  // -1: none
};

// kShared: a row has a team of several lanes.
template <typename scalar_t, bool kShared, bool kGradient, Rows kRows>
__global__ void __launch_bounds__(kThreads, min_blocks(kGradient))
    cross_entropy_forward_tile_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                                      const TileShape shape, Denominator denominator,
                                      const __grid_constant__ GradOutput grad_output,
                                      Partial* partials, Finalize finalize) {
  float given = 1;
  if (kGradient && grad_output.is_one(given)) {
    return;
  }
  constexpr int kSize = kVectorSize<scalar_t>;
  constexpr int kPerWord = kWordElements<scalar_t>;
  constexpr bool kOdd = kRows == Rows::kWithinWords;
  const bool by_words = !kOdd && shape.by_words;
  const bool in_bulk = kMayCopyInBulk && shape.in_bulk;
  constexpr int kUnroll = kElementsAtATime / kPerWord;
  constexpr int kGradientUnroll = kUnroll / 2;
  LOSSOPS_DYNAMIC_SHARED(uint4, dynamic);
  __shared__ CopyBarrier barriers[kWarps];
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const int rows_at_a_time = kShared ? shape.rows_of_step : kWarpSize;
  const int member = kShared ? lane & (shape.team - 1) : 0;
  const int tile_rows = shape.steps * rows_at_a_time;
  const int num_classes = static_cast<int>(args.num_classes);
  const int pitch = shape.pitch;
  const auto offset_of = [&](const Operand& operand, int64_t row) {
    return by_words ? row_offset(args.rows, operand, row) : row * operand.strides[0];
  };
  auto* const buffer = reinterpret_cast<char*>(dynamic) + warp * shape.bytes;
  auto* const elements = reinterpret_cast<scalar_t*>(buffer);
  auto* const all_words = reinterpret_cast<uint32_t*>(buffer);
  CopyBarrier& arrived = barriers[warp];
  if (lane == 0) {
    arrived.init();
  }
  let_next_kernel_start();
  std::conditional_t<kGradient, UnitScale<float>, NoScale> unit(args, denominator, given);
  __syncthreads();
  // From one tile of a warp to its next.
  const int64_t row_stride = int64_t{gridDim.x} * kWarps * tile_rows;
  const auto* const input = static_cast<const scalar_t*>(args.input.data);
  auto* const grad_input = static_cast<scalar_t*>(args.grad_input.data);
  Partial partial;
  uint32_t parity = 0;

  // The tile in shared memory: its rows, its elements in global memory, and in granules.
  int64_t first_row = 0;
  int rows = 0;
  int64_t first_element = 0;
  int phase = 0;
  int count = 0;
  int edge = -1;
  scalar_t x_at_edge = {};
  const auto whole_begin = [&] { return phase > 0 ? 1 : 0; };
  const auto whole_end = [&] { return (phase + count) / kSize; };
  // Of the row r of the tile. What is not there is ignored.
  const auto load_target = [&](int r) {
    return r < rows ? load_class_index(args.target, offset_of(args.target, first_row + r))
                    : args.ignore_index;
  };
  // This lane's next row.
  const int first_of_tile = kShared ? lane / shape.team : lane;
  int64_t next_target = args.ignore_index;
  float scale = 0;  // the common factor of gradients
  const auto start = [&] {
    rows = static_cast<int>(min(int64_t{tile_rows}, args.rows.numel - first_row));
    next_target = load_target(first_of_tile);
    if (by_words) {
      load_rows(args, shape.pairs, elements, pitch, first_row, rows);
      return;
    }
    first_element = first_row * shape.stride;
    phase = static_cast<int>(reinterpret_cast<uintptr_t>(input + first_element) % kVectorBytes /
                             sizeof(scalar_t));
    count = (rows - 1) * shape.stride + num_classes;
    const scalar_t* const base = input + first_element - phase;
    edge = -1;
    if (phase > 0 || count % kSize != 0) {
      const bool head = lane < kSize;
      const int e = head ? lane : whole_end() * kSize + lane - kSize;
      const bool is_edge =
          head ? whole_begin() > 0 && e >= phase : lane < 2 * kSize && whole_end() >= whole_begin();
      if (is_edge && e < phase + count) {
        edge = e;
        x_at_edge = base[e];
      }
    }
    if (!shape.by_rows) {
      const int bytes = max(whole_end() - whole_begin(), 0) * kVectorBytes;
      char* const to = buffer + whole_begin() * kVectorBytes;
      const scalar_t* const from = base + whole_begin() * kSize;
      if (!in_bulk) {
        start_warp_copy(to, from, bytes);
      } else if (lane == 0) {
        arrived.expect(static_cast<uint32_t>(bytes));
        arrived.copy(to, from, static_cast<uint32_t>(bytes));
      }
      return;
    }
    // Each row in whole granules, which may also hold elements beside the row. The partial granules
    // at the tile's two ends come from x_at_edge.
    const auto end = static_cast<int>(shape.granules.value);
    const int last_end = (phase + num_classes) / kSize;  // of the last row
    if (in_bulk) {
      if (lane == 0) {
        const int whole = max((rows - 1) * end + last_end - whole_begin(), 0);
        arrived.expect(static_cast<uint32_t>(whole) * kVectorBytes);
      }
      __syncwarp();
#pragma unroll 1
      for (int r = lane; r < rows; r += kWarpSize) {
        const int from = r == 0 ? whole_begin() : 0;
        const int granules = (r + 1 < rows ? end : last_end) - from;
        if (granules > 0) {
          arrived.copy(elements + r * pitch + from * kSize, base + r * shape.stride + from * kSize,
                       static_cast<uint32_t>(granules) * kVectorBytes);
        }
      }
      return;
    }
    // A lane copies the same granules of several rows. unfolded(): the compiler would keep what it
    // derives from `lane` for all tiles, and spill other registers.
    const int own_lane = unfolded(lane);
    const auto first = static_cast<int>(shape.granules.quotient(static_cast<uint32_t>(own_lane)));
    if (first >= shape.rows_at_once) {
      return;
    }
#pragma unroll 1
    for (int g = own_lane - first * end; g < end; g += kWarpSize) {
      // The tile's first granule may be partial, and so may the last one of its last row.
      const int begin = first == 0 && g < whole_begin() ? shape.rows_at_once : first;
      const int copied = g < last_end ? rows : rows - 1;
      const scalar_t* from = base + begin * shape.stride + g * kSize;
      scalar_t* to = elements + begin * pitch + g * kSize;
#pragma unroll 2
      for (int r = begin; r < copied; r += shape.rows_at_once) {
        start_own_copy(reinterpret_cast<uint4*>(to), from);
        from += shape.copy_stride;
        to += shape.copy_pitch;
      }
    }
  };

  // The lanes of a team have its rows in turn. Without a gradient the losses of one row of each
  // lane are computed at once.
  int turn = 0;
  LeftRow left;
  const auto record_loss = [&](const LeftRow& row, float weight, float loss) {
    record_row(
        args, row.index >= 0 ? loss : gradient_without_loss(row.index), weight, row.reduced,
        row.number, [&](int64_t number) { return offset_of(args.output, number); }, partial);
  };
  const auto record = [&](LeftRow& row) {
    if (row.number >= 0) {
      const float weight = row_weight(args, row.index);
      record_loss(row, weight, row.reduced.template finish<true>(row.x_at_index, 1, weight).loss);
    }
    row.number = -1;
  };

  const int64_t first_of_warp = (int64_t{blockIdx.x} * kWarps + warp) * tile_rows;
#pragma unroll 1
  for (first_row = first_of_warp; first_row < args.rows.numel; first_row += row_stride) {
    start();
    if (first_row == first_of_warp) {
      unit.wait(args, denominator);
      scale = unit.get();
    }
    if (!in_bulk) {
      wait_for_own_copies();
    } else if (!by_words) {
      arrived.wait(parity);
      parity ^= 1;
    }
    // An edge behind the first granule belongs to the last row, which lies elsewhere than in a run.
    if (edge >= 0) {
      elements[edge < kSize ? edge : edge + (rows - 1) * (pitch - shape.stride)] = x_at_edge;
    }
    __syncwarp();
#pragma unroll 1
    for (int r = first_of_tile; r - first_of_tile < rows; r += rows_at_a_time) {
      // unfolded(): the compiler would keep multiples of it for all rows, and spill.
      const int team = kShared ? unfolded(shape.team) : 1;
      const int index = checked_index(args, next_target);
      next_target = load_target(r + rows_at_a_time);
      scalar_t* const own = elements + phase + r * pitch;
      // The last class takes the place of the class index, and the row ends before it.
      const int num_others = index >= 0 ? num_classes - 1 : 0;
      float x_at_index = 0;
      if (index >= 0) {
        x_at_index = to_acc<float>(own[index]);
      }
      if constexpr (kShared || kOdd) {
        __syncwarp();  // it is read by the whole team; a word has elements of two rows
      }
      if (index >= 0 && member == 0) {
        own[index] = own[num_others];
      }
      if constexpr (kShared || kOdd) {
        __syncwarp();
      }
      const int words = num_others / kPerWord;
      const bool has_last = num_others % kPerWord != 0 && (words & (team - 1)) == member;
      const int shift = kOdd ? (phase + r * pitch) % kPerWord * 16 : 0;
      uint32_t* const row_words = all_words + (phase + r * pitch) / kPerWord;
      const auto word = [&](const uint32_t* at) {
        return kOdd ? __funnelshift_r(at[0], at[1], shift) : at[0];
      };
      const uint32_t* const first_of_lane = row_words + member;
      // Words of a lane: those of a lane that has the row alone may be vectors.
      constexpr bool kMayBeVectors = !kShared && !kOdd;
      const bool in_vectors = kMayBeVectors && shape.in_vectors;
      const auto sum_of = [&](auto&& term) {
        PlainSum sum;
        int k = member;
        const uint32_t* from = first_of_lane;
#pragma unroll 1
        for (; k + (kUnroll - 1) * team < words; k += kUnroll * team) {
          uint32_t loaded[kUnroll];
          if (in_vectors) {
            load_words(from, loaded);
            from += kUnroll;
          } else {
#pragma unroll
            for (uint32_t& next : loaded) {
              next = word(from);
              from += team;
            }
          }
          float values[kUnroll * kPerWord];
#pragma unroll
          for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
            for (int i = 0; i < kPerWord; ++i) {
              values[u * kPerWord + i] = term(word_element<scalar_t>(loaded[u], i));
            }
          }
          sum.add(pairwise_sum(values));
        }
        float last_terms = 0;
#pragma unroll 1
        for (; k < words; k += team) {
          float values[kPerWord];
          const uint32_t loaded = word(from);
          from += team;
#pragma unroll
          for (int i = 0; i < kPerWord; ++i) {
            values[i] = term(word_element<scalar_t>(loaded, i));
          }
          last_terms += pairwise_sum(values);
        }
        if (has_last) {
          last_terms += term(to_acc<float>(own[num_others - 1]));  // fault: tile-odd-element
        }
        sum.add(last_terms);
        return kShared ? warp_sum(sum.total(), team) : sum.total();
      };
      IndexRow reduced;
      bool plain = index < 0;
      const PlainTerms plain_terms(x_at_index);
      const float plain_others = plain_terms.corrected(sum_of(plain_terms), x_at_index);
      if (IndexRow::may_be_plain(plain_others, x_at_index)) {
        plain = true;
        reduced = IndexRow::plain(plain_others, x_at_index);
      }
      // All of a warp, for the sake of its shuffles.
      if (__any_sync(kAllLanes, !plain)) {
        uint32_t maxima = lowest_word<scalar_t>();
        const uint32_t* from = first_of_lane;
#pragma unroll 4
        for (int k = member; k < words; k += team) {
          maxima = max_of_words<scalar_t>(word(from), maxima);
          from += team;
        }
        float max = max_of_elements<scalar_t>(maxima);
        if (has_last) {
          max = math::max_number(to_acc<float>(own[num_others - 1]), max);
        }
        max = kShared ? warp_max(max, team) : max;
        const RowTerms<false> terms(max);
        const float others = sum_of(terms);
        if (!plain) {
          reduced = IndexRow::of(terms, max, others, x_at_index);
        }
      }
      const bool exists = r < rows;
      const bool is_own = member == turn;
      turn = (turn + 1) & (team - 1);
      if constexpr (!kGradient) {
        if (is_own) {
          left = {reduced, x_at_index, index, exists ? first_row + r : -1};
        }
        const bool is_last =
            r - first_of_tile + rows_at_a_time >= rows && first_row + row_stride >= args.rows.numel;
        if (turn == 0 || is_last) {
          record(left);
        }
      } else {
        const float weight = row_weight(args, index);
        const auto finished = reduced.template finish<true>(x_at_index, scale, weight);
        if (is_own && exists) {
          record_loss({reduced, x_at_index, index, first_row + r}, weight, finished.loss);
        }
        if constexpr (kOdd) {
          __syncwarp();  // a word has elements of two lanes
        }
        const auto replace_element = [&](int c, const auto& gradient) {
          float values[1] = {to_acc<float>(own[c])};
          gradient.replace(values);
          own[c] = from_acc<scalar_t>(values[0]);
        };
        // Elements before the row's first whole word: 1 if it begins in the middle of one, else 0.
        const int lead = kOdd ? (phase + r * pitch) % kPerWord : 0;
        uint32_t* const whole_words = row_words + lead;
        const auto replace_words = [&](int first_word, auto words_at_a_time, auto as_vector,
                                       const auto& gradient) {
          constexpr int kWords = decltype(words_at_a_time)::value;
          uint32_t* const own_words = whole_words + first_word;
          uint32_t words[kWords];
          if constexpr (as_vector) {
            load_words(own_words, words);
          } else {
#pragma unroll
            for (int u = 0; u < kWords; ++u) {
              words[u] = own_words[u * team];
            }
          }
          float values[kWords * kPerWord];
#pragma unroll
          for (int u = 0; u < kWords; ++u) {
#pragma unroll
            for (int i = 0; i < kPerWord; ++i) {
              values[u * kPerWord + i] = word_element<scalar_t>(words[u], i);
            }
          }
          gradient.replace(values);
#pragma unroll
          for (int u = 0; u < kWords; ++u) {
            words[u] = pack_word<scalar_t>(values + u * kPerWord);
          }
          if constexpr (as_vector) {
            store_words(own_words, words);
          } else {
#pragma unroll
            for (int u = 0; u < kWords; ++u) {
              own_words[u * team] = words[u];
            }
          }
        };
        const auto write = [&](int length, const auto& gradient) {
          const int whole = (length - lead) / kPerWord;
          int k = member;
          const auto replace_batches = [&](auto as_vectors) {
#pragma unroll 1
            for (; k + (kGradientUnroll - 1) * team < whole; k += kGradientUnroll * team) {
              replace_words(k, std::integral_constant<int, kGradientUnroll>{}, as_vectors,
                            gradient);
            }
          };
          in_vectors ? replace_batches(std::true_type{}) : replace_batches(std::false_type{});
#pragma unroll 1
          for (; k < whole; k += team) {
            replace_words(k, std::integral_constant<int, 1>{}, std::false_type{}, gradient);
          }
          if (kOdd && member == 0 && lead > 0 && length > 0) {
            replace_element(0, gradient);
          }
          if ((length - lead) % kPerWord > 0 && (whole & (team - 1)) == member) {
            replace_element(length - 1, gradient);
          }
        };
        if (exists && index >= 0) {
          write(num_others, LogitGradient<float, false>(finished.softmax, scale * weight));
        } else if (exists) {
          write(num_classes, ConstantGradient{gradient_without_loss(index)});
        }
        if constexpr (kShared) {
          __syncwarp();
        }
        if (exists && index >= 0 && member == 0) {
          own[num_others] = own[index];
          own[index] = from_acc<scalar_t>(finished.gradient_at_index);
        }
      }
    }
    __syncwarp();
    if constexpr (kGradient) {
      const bool in_rows = kShared && shape.gradient_in_rows;
      if (shape.gradient_in_run || in_rows) {
        // One run of the whole tile, or one of each row: gaps between rows may differ in both
        // memories.
        const int runs = in_rows ? rows : 1;
        const int length = in_rows ? num_classes : count;
        const int64_t run_stride = args.grad_input.strides[0];
        scalar_t* to = grad_input + (in_rows ? first_row * run_stride : first_element);
        int begin = phase;
#pragma unroll 1
        for (int run = 0; run < runs; ++run) {
          scalar_t* const base = to - begin;
          const int end = begin + length;
          const int vectors_end = end / kSize;
          const int vectors_begin = (begin + kSize - 1) / kSize;
          int g = vectors_begin + lane;
          for (; g + (kStoreUnroll - 1) * kWarpSize < vectors_end; g += kStoreUnroll * kWarpSize) {
            Vector<scalar_t> vectors[kStoreUnroll];
#pragma unroll
            for (int u = 0; u < kStoreUnroll; ++u) {
              vectors[u] = load_vector(elements, shape.padded(g + u * kWarpSize));
            }
#pragma unroll
            for (int u = 0; u < kStoreUnroll; ++u) {
              store_vector(base, g + u * kWarpSize, vectors[u]);
            }
          }
#pragma unroll 1
          for (; g < vectors_end; g += kWarpSize) {
            store_vector(base, g, load_vector(elements, shape.padded(g)));
          }
          // The elements before the first whole vector, and those behind the last.
          const bool is_before = lane < kSize;
          const int e = is_before ? begin + lane : vectors_end * kSize + lane - kSize;
          if (e >= begin && e < (is_before ? min(vectors_begin * kSize, end) : end)) {
            base[e] = elements[e];  // fault: tile-gradient-edges
          }
          begin += pitch;
          to += run_stride;
        }
      } else {
        store_rows(args, shape.classes, elements + phase, pitch, shape.gradient_in_quads, first_row,
                   rows);
      }
      __syncwarp();
    }
  }
  if (args.reduction != Reduction::kNone && !grad_output.exists()) {
    reduce_to_grid(partial, partials, finalize);
  }
}

}  // namespace
}  // namespace tiles

void launch_tiles(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                  const Denominator& denominator, const GradOutput& grad_output, Partial* partials,
                  const Finalize& finalize, cudaStream_t stream) {
  using namespace tiles;
  const int64_t blocks = grad_output.limit_blocks(plan.blocks, kThreads);
  const auto num_classes = static_cast<int>(args.num_classes);
  constexpr int kPerWord = kWordElements<half_t>;
  TileShape shape = {};
  shape.team = plan.team;
  shape.rows_of_step = kWarpSize / plan.team;
  shape.steps = plan.steps;
  shape.padding = plan.padding;
  shape.bytes = plan.warp_bytes;
  shape.pitch = plan.row_bytes / static_cast<int>(sizeof(half_t));
  shape.stride = static_cast<int>(row_stride(args, args.input));
  shape.by_rows = plan.by_rows;
  shape.by_words = plan.by_words;
  shape.gradient_in_run = rows_follow(args, args.grad_input, args.grad_input_class_stride) &&
                          !plan.by_words && shape.stride == num_classes &&
                          (plan.padding == 0 || is_vector_aligned(args.input.data)) &&
                          lies_as_input(args, args.grad_input, args.grad_input_class_stride);
  // Rows of smaller teams have at most 40 vectors, too few to be worth a turn of 32 lanes each. (A
  // choice, not measured.)
  shape.gradient_in_rows = plan.team > 2 && !shape.gradient_in_run && !plan.by_words &&
                           args.rows.ndim == 1 &&
                           lies_as_input(args, args.grad_input, args.grad_input_class_stride);
  shape.gradient_in_quads = may_store_quads(args);
  shape.classes = Divisor(static_cast<uint32_t>(num_classes));
  shape.pairs = Divisor(static_cast<uint32_t>(ceil_div(num_classes, kPerWord)));
  shape.in_bulk = current_device_limits().hopper;
  shape.in_vectors =
      !plan.by_words && plan.row_bytes % kVectorBytes == 0 && is_vector_aligned(args.input.data);
  if (plan.by_rows) {  // all rows begin at the same place of a granule
    const auto phase = static_cast<int>(reinterpret_cast<uintptr_t>(args.input.data) %
                                        kVectorBytes / sizeof(half_t));
    const int granules = ceil_div(phase + num_classes, kVectorSize<half_t>);
    shape.granules = Divisor(static_cast<uint32_t>(granules));
    shape.rows_at_once = std::max(kWarpSize / granules, 1);
    shape.copy_stride = shape.rows_at_once * shape.stride;
    shape.copy_pitch = shape.rows_at_once * shape.pitch;
    shape.in_bulk = shape.in_bulk && granules > kMostGranulesByLanes;
    if (shape.gradient_in_run) {  // rows of whole granules
      shape.rows_of_2_20 = ((1u << 20) + shape.granules.value - 1) / shape.granules.value;
    }
  }
  const auto launch = [&](auto kernel) {
    allow_shared_bytes(kernel, plan.shared_bytes, kMaxSharedBytes);
    launch_kernel("cross_entropy_forward_tile_kernel", kernel,
                  {blocks, kThreads, plan.shared_bytes, 1,
                   waits_for_previous_kernel(denominator, grad_output)},
                  stream, args, shape, denominator, grad_output, partials, finalize);
  };
  const auto visit_rows = [&](auto&& body) {
    if (!plan.by_words &&
        (shape.stride % kPerWord != 0 || reinterpret_cast<uintptr_t>(args.input.data) % 4 != 0)) {
      body(std::integral_constant<Rows, Rows::kWithinWords>{});
    } else {
      body(std::integral_constant<Rows, Rows::kAtWords>{});
    }
  };
  visit_half_type(args.input.dtype, [&](auto type) {
    visit_bool(plan.team > 1, [&](auto shared) {
      visit_rows([&](auto rows) {
        visit_bool(args.grad_input.data != nullptr, [&](auto gradient) {
          launch(
              cross_entropy_forward_tile_kernel<typename decltype(type)::type,
                                                decltype(shared)::value, decltype(gradient)::value,
                                                decltype(rows)::value>);
        });
      });
    });
  });
}

}  // namespace lossops::cuda
