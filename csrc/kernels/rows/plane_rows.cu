// Cross entropy of rows whose classes are not neighbours, such as the pixels of an (N, C, H, W)
// tensor, with class indices. Any number of classes and positions, at any address; it is made for
// rows that lie side by side.
//
// A thread has neighbouring rows, as many as a word of 4 bytes holds. The warps of a team share
// rows, eight classes a warp in turn, and merge what they have in shared memory. With a gradient
// they then read the logits again, most of them from the L2 cache.
#include <algorithm>
#include <cstdint>

#include "kernels/grid/device.cuh"
#include "kernels/grid/grid_reduce.cuh"
#include "kernels/grid/launch.cuh"
#include "kernels/primitives/dispatch.cuh"
#include "kernels/primitives/dynamic_shared.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/primitives/thread_reduce.cuh"
#include "kernels/rows/cross_entropy_row.cuh"
#include "kernels/rows/launches.cuh"
#include "kernels/rows/plane_rows_plan.h"
#include "kernels/rows/row_reader.cuh"
#include "kernels/rows/row_words.cuh"
#include "launchers.h"

namespace lossops::cuda {
namespace {

using namespace plane_rows;

// The groups of rows that threads have, and the team that shares them.
struct PlaneGrid {
  uint32_t groups;
  Divisor groups_of_plane;
  int64_t positions;  // of a plane
  int team;           // warps
  bool words;         // every group is a word, of logits and gradients

  PlaneGrid(const CrossEntropyArgs& args, const Operand& gradient, int64_t gradient_class_stride)
      : groups(static_cast<uint32_t>(groups_of(args))),
        groups_of_plane(static_cast<uint32_t>(plane_rows::groups_of_plane(args))),
        positions(positions_of(args)),
        team(warps_of_row(args.num_classes)),
        words(has_words(args, args.input, args.input_class_stride) &&
              (gradient.data == nullptr || has_words(args, gradient, gradient_class_stride))) {}
};

// A thread's group.
struct PlanePlace {
  const IterationSpace& space;
  int64_t position;  // of the first row, in its plane
  uint32_t plane;
  int rows;  // 0: all groups are others'

  template <int kRows>
  static __device__ __forceinline__ PlanePlace of(const IterationSpace& space,
                                                  const PlaneGrid& grid, uint32_t group) {
    const uint32_t own = group < grid.groups ? group : grid.groups - 1;
    const uint32_t plane = grid.groups_of_plane.quotient(own);
    const int64_t position = int64_t{own - plane * grid.groups_of_plane.value} * kRows;
    const int64_t left = grid.positions - position;
    return {space, position, plane,
            group >= grid.groups ? 0
            : left < kRows       ? static_cast<int>(left)
                                 : kRows};
  }

  __device__ __forceinline__ int64_t row(const PlaneGrid& grid) const {
    return plane * grid.positions + position;
  }
  __device__ __forceinline__ int64_t offset(const Operand& operand) const {
    int64_t offset = position * operand.strides[0];
    if (space.ndim <= 2) {
      return offset + plane * operand.strides[1];
    }
    int64_t rest = plane;
#pragma unroll 1
    for (int dim = 1; dim < space.ndim; ++dim) {
      const int64_t outer = rest / space.sizes[dim];
      offset += (rest - outer * space.sizes[dim]) * operand.strides[dim];
      rest = outer;
    }
    return offset;
  }
};

// The logits of a thread's rows, a class in a word.
template <typename scalar_t>
class PlaneReader {
 public:
  static constexpr int kRows = static_cast<int>(rows_of_thread(sizeof(scalar_t)));
  uint32_t words[kChunk];

  // first: the rows' logits of class 0.
  __device__ __forceinline__ PlaneReader(const RowType<scalar_t>& type, const scalar_t* first,
                                         int64_t row_stride, int64_t class_stride, int num_classes,
                                         bool is_word, int rows)
      : first_(first),
        row_stride_(row_stride),
        class_stride_(class_stride),
        num_classes_(num_classes),
        is_word_(is_word),
        rows_(rows),
        lowest_(type.visit([](auto like) { return lowest_word<decltype(like)>(); })) {}

  // Starts to read a chunk. Classes that do not exist are -inf.
  __device__ __forceinline__ void start(int chunk) {
    const int c = chunk * kChunk;
    const scalar_t* from = first_ + c * class_stride_;
#pragma unroll
    for (int u = 0; u < kChunk; ++u) {
      next_[u] = lowest_;
      if (c + u < num_classes_) {
        next_[u] = word(from + u * class_stride_);
      }
    }
  }
  // What start() has read, and starts to read another chunk.
  __device__ __forceinline__ void move_on(int chunk) {
#pragma unroll
    for (int u = 0; u < kChunk; ++u) {
      words[u] = next_[u];
    }
    start(chunk);
  }
  __device__ __forceinline__ void unpack(const RowType<scalar_t>& type,
                                         float (&x)[kRows][kChunk]) const {
    type.visit([&](auto like) {
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
#pragma unroll
        for (int u = 0; u < kChunk; ++u) {
          x[i][u] = word_element<decltype(like)>(words[u], i);
        }
      }
    });
  }

 private:
  __device__ __forceinline__ uint32_t word(const scalar_t* from) const {
    if (kRows == 1 || is_word_) {
      return *reinterpret_cast<const uint32_t*>(from);
    }
    keep_apart();
    const auto* const halves = reinterpret_cast<const uint16_t*>(from);
    const uint32_t first = halves[0];
    return rows_ == kRows ? first | static_cast<uint32_t>(halves[row_stride_]) << 16
                          : first | first << 16;
  }

  const scalar_t* const first_;
  const int64_t row_stride_;
  const int64_t class_stride_;
  const int num_classes_;
  const bool is_word_;
  const int rows_;
  const uint32_t lowest_;
  uint32_t next_[kChunk];
};

// The sum over the classes of a row but its class index, relative to the largest of their logits.
template <bool kExact>
struct OthersSum {
  float max = -math::infinity<float>();
  ExactSum sum;

  // What sums relative to `from` are to be multiplied by, to be relative to a larger `to`.
  static __device__ __forceinline__ float ratio(float from, float to) {
    if (from == -math::infinity<float>()) {
      return 0;
    }
    if constexpr (kExact) {
      return math::exp(from - to);
    } else {
      const RowTerms<false> before(from);
      const RowTerms<false> after(to);
      return before.scale == after.scale ? math::exp2(after.offset - before.offset) : 0.0f;
    }
  }
  __device__ __forceinline__ void scale(float factor) {
    sum.sum *= factor;
    sum.lost *= factor;
  }
};

// What a thread knows of its rows, and the warps of its team after it has merged.
template <typename scalar_t>
struct PlaneRowsOf {
  static constexpr int kRows = static_cast<int>(rows_of_thread(sizeof(scalar_t)));
  static constexpr bool kExact = kExactExponentials<scalar_t>;
  int indices[kRows];  // checked_index()
  float x_at_index[kRows];

  __device__ __forceinline__ bool any_has_loss() const {
    bool any = false;
#pragma unroll
    for (int index : indices) {
      any = any || index >= 0;
    }
    return any;
  }

  // Those of rows that are not there are ignored.
  __device__ __forceinline__ void load(const CrossEntropyArgs& args, const PlanePlace& place,
                                       const RowType<scalar_t>& type, const scalar_t* first) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      indices[i] = kIgnoredRow;
      x_at_index[i] = 0;
      if (i < place.rows) {
        indices[i] = checked_index(
            args,
            load_class_index(args.target, place.offset(args.target) + i * args.target.strides[0]));
      }
      if (indices[i] >= 0) {
        const scalar_t logit =
            first[indices[i] * args.input_class_stride + i * args.input.strides[0]];
        x_at_index[i] =
            type.visit([&](auto like) { return to_acc<float>(bits_as<decltype(like)>(logit)); });
      }
    }
  }
};

// The rows' sums, in each warp of the team. shared: a team's kRows OthersSum for each thread.
template <typename scalar_t>
__device__ __forceinline__ void sum_of_others(
    PlaneReader<scalar_t>& reader, const RowType<scalar_t>& type, const PlaneRowsOf<scalar_t>& rows,
    int warp, int team, int num_chunks, OthersSum<PlaneRowsOf<scalar_t>::kExact>* shared,
    OthersSum<PlaneRowsOf<scalar_t>::kExact> (&totals)[PlaneReader<scalar_t>::kRows]) {
  constexpr bool kExact = PlaneRowsOf<scalar_t>::kExact;
  constexpr int kRows = PlaneReader<scalar_t>::kRows;
  RowTerms<kExact> terms[kRows];
  OthersSum<kExact> own[kRows];
  reader.start(warp);
#pragma unroll 1
  for (int chunk = warp; chunk < num_chunks; chunk += team) {
    reader.move_on(chunk + team);
    float x[kRows][kChunk];
    reader.unpack(type, x);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int place_of_index = rows.indices[i] - chunk * kChunk;
      float top = -math::infinity<float>();
#pragma unroll
      for (int u = 0; u < kChunk; ++u) {
        x[i][u] = u == place_of_index ? -math::infinity<float>() : x[i][u];
        top = math::max_number(x[i][u], top);
      }
      if (top > own[i].max) {
        own[i].scale(OthersSum<kExact>::ratio(own[i].max, top));
        own[i].max = top;
        terms[i] = RowTerms<kExact>(top);
      }
#pragma unroll
      for (int u = 0; u < kChunk; ++u) {
        x[i][u] = terms[i](x[i][u]);
      }
      own[i].sum.add(pairwise_sum(x[i]));
    }
  }
  if (team == 1) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      totals[i] = own[i];
    }
    return;
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  // Each warp of the team has the same, in the order of its warps.
  OthersSum<kExact>* const of_team =
      shared + (static_cast<int>(threadIdx.x) / kWarpSize - warp) * kWarpSize * kRows;
  __syncthreads();  // what was there has been read
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    of_team[(warp * kRows + i) * kWarpSize + lane] = own[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll 4
    for (int other = 0; other < team; ++other) {
      totals[i].max =
          math::max_number(of_team[(other * kRows + i) * kWarpSize + lane].max, totals[i].max);
    }
  }
#pragma unroll 1
  for (int other = 0; other < team; ++other) {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      OthersSum<kExact> one = of_team[(other * kRows + i) * kWarpSize + lane];
      if (one.max < totals[i].max) {
        one.scale(OthersSum<kExact>::ratio(one.max, totals[i].max));
      }
      totals[i].sum.add(one.sum);
    }
  }
}

// Writes the gradients of a thread's classes.
template <typename scalar_t, typename Gradient>
__device__ __forceinline__ void write_gradients(
    PlaneReader<scalar_t>& reader, const RowType<scalar_t>& type, const PlaneRowsOf<scalar_t>& rows,
    const Gradient (&gradients)[PlaneReader<scalar_t>::kRows],
    const float (&at_index)[PlaneReader<scalar_t>::kRows], scalar_t* to, int64_t row_stride,
    int64_t class_stride, bool is_word, int count, int warp, int team, int num_classes) {
  constexpr int kRows = PlaneReader<scalar_t>::kRows;
  const int num_chunks = (num_classes + kChunk - 1) / kChunk;
  const bool any_has_loss = rows.any_has_loss();
  reader.start(any_has_loss ? warp : num_chunks);
#pragma unroll 1
  for (int chunk = warp; chunk < num_chunks; chunk += team) {
    reader.move_on(any_has_loss ? chunk + team : num_chunks);
    float x[kRows][kChunk];
    reader.unpack(type, x);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      gradients[i].replace(x[i]);
      if (rows.indices[i] < 0) {
        const float value = gradient_without_loss(rows.indices[i]);
#pragma unroll
        for (float& gradient : x[i]) {
          gradient = value;
        }
      }
      const int place_of_index = rows.indices[i] - chunk * kChunk;
#pragma unroll
      for (int u = 0; u < kChunk; ++u) {
        x[i][u] = u == place_of_index ? at_index[i] : x[i][u];
      }
    }
    const int c = chunk * kChunk;
    scalar_t* const own = to + c * class_stride;
#pragma unroll
    for (int u = 0; u < kChunk; ++u) {
      float values[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        values[i] = x[i][u];
      }
      const uint32_t word =
          type.visit([&](auto like) { return pack_word<decltype(like)>(values); });
      if (c + u < num_classes && count > 0) {
        if (kRows == 1 || is_word) {
          *reinterpret_cast<uint32_t*>(own + u * class_stride) = word;
        } else {
          auto* const halves = reinterpret_cast<uint16_t*>(own + u * class_stride);
          halves[0] = static_cast<uint16_t>(word);
          if (count == kRows) {
            halves[row_stride] = static_cast<uint16_t>(word >> 16);
          }
        }
      }
    }
  }
}

// What a backward pass of its own has; without it, the rows are summed.
struct PlaneBackward {
  const void* row_stats = nullptr;
  Operand grad_output;

  __device__ __forceinline__ bool exists() const { return row_stats != nullptr; }
};

// A row, once its sum is known. Not inlined, as it is long and a thread has several.
struct PlaneRow {
  IndexRow reduced;
  float loss;
  float at_index;
  RowSoftmax<float> softmax;
};
template <bool kExact>
__device__ __attribute__((noinline)) PlaneRow finish_plane_row(const OthersSum<kExact>& others,
                                                               const IndexRow& known, bool is_known,
                                                               int index, float x_at_index,
                                                               float scale, float weight) {
  PlaneRow row;
  row.reduced = is_known ? known
                         : IndexRow::of(RowTerms<kExact>(others.max), others.max,
                                        others.sum.total(), x_at_index);
  const auto finished = row.reduced.template finish<!kExact>(x_at_index, scale, weight);
  row.loss = index >= 0 ? finished.loss : gradient_without_loss(index);
  row.at_index = finished.gradient_at_index;
  row.softmax = finished.softmax;
  return row;
}

// Losses, and gradients where args.grad_input exists.
template <typename scalar_t>
__global__ void __launch_bounds__(kMostThreads)
    plane_rows_kernel(const __grid_constant__ CrossEntropyForwardArgs args,
                      const __grid_constant__ PlaneBackward backward,
                      const __grid_constant__ PlaneGrid grid, const RowType<scalar_t> type,
                      Denominator denominator, GradOutput grad_output, Partial* partials,
                      Finalize finalize) {
  using Reader = PlaneReader<scalar_t>;
  using Rows = PlaneRowsOf<scalar_t>;
  constexpr int kRows = Reader::kRows;
  constexpr bool kExact = Rows::kExact;
  LOSSOPS_DYNAMIC_SHARED(uint4, shared);
  float scale = 1;
  if (grad_output.is_one(scale)) {
    return;
  }
  if (backward.exists()) {
    wait_for_previous_kernel();
  }
  let_next_kernel_start();
  if (args.grad_input.data != nullptr && !backward.exists()) {
    UnitScale<float, true> unit(args, denominator, scale);
    unit.wait(args, denominator);
    scale = unit.get();
  }
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp_of_block = static_cast<int>(threadIdx.x) / kWarpSize;
  const int warp = warp_of_block % grid.team;
  const uint32_t teams = blockDim.x / kWarpSize / grid.team;
  const auto num_classes = static_cast<int>(args.num_classes);
  const int num_chunks = (num_classes + kChunk - 1) / kChunk;
  Partial partial;
#pragma unroll 1
  for (uint32_t first = blockIdx.x * teams * kWarpSize; first < grid.groups;
       first += gridDim.x * teams * kWarpSize) {
    const uint32_t group = first + warp_of_block / grid.team * kWarpSize + lane;
    const PlanePlace place = PlanePlace::of<kRows>(args.rows, grid, group);
    const auto* const logits =
        static_cast<const scalar_t*>(args.input.data) + place.offset(args.input);
    Rows rows;
    rows.load(args, place, type, logits);
    Reader reader(type, logits, args.input.strides[0], args.input_class_stride, num_classes,
                  grid.words, place.rows);
    OthersSum<kExact> others[kRows];
    if (!backward.exists()) {
      sum_of_others(reader, type, rows, warp, grid.team, rows.any_has_loss() ? num_chunks : 0,
                    reinterpret_cast<OthersSum<kExact>*>(shared), others);
    }
    LogitGradient<float, kExact> gradients[kRows];
    float at_index[kRows];
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const bool is_there = i < place.rows;
      const int64_t row = place.row(grid) + i;
      IndexRow known;
      float own_scale = scale;
      if (backward.exists() && is_there) {
        const RowStats<float> stats(const_cast<void*>(backward.row_stats), args.rows.numel);
        known = {stats.max[row], stats.rest[row]};
        own_scale =
            load_grad_output<float>(backward.grad_output, place.offset(backward.grad_output) +
                                                              i * backward.grad_output.strides[0]);
        if (args.reduction == Reduction::kMean) {
          own_scale /= static_cast<float>(args.mean_terms[0]);
        }
      }
      const float weight = row_weight(args, rows.indices[i]);
      const PlaneRow finished =
          finish_plane_row<kExact>(others[i], known, backward.exists(), rows.indices[i],
                                   rows.x_at_index[i], own_scale, weight);
      gradients[i] = LogitGradient<float, kExact>(finished.softmax, own_scale * weight);
      at_index[i] = finished.at_index;
      if (warp == 0 && is_there && !backward.exists()) {
        record_row(
            args, finished.loss, weight, finished.reduced.max, finished.reduced.rest, row,
            [&](int64_t) { return place.offset(args.output) + i * args.output.strides[0]; },
            partial);
      }
    }
    if (args.grad_input.data != nullptr) {
      write_gradients(reader, type, rows, gradients, at_index,
                      static_cast<scalar_t*>(args.grad_input.data) + place.offset(args.grad_input),
                      args.grad_input.strides[0], args.grad_input_class_stride, grid.words,
                      place.rows, warp, grid.team, num_classes);
    }
  }
  if (args.reduction != Reduction::kNone && !grad_output.exists() && !backward.exists()) {
    reduce_to_grid(partial, partials, finalize);
  }
}

void launch(const CrossEntropyForwardArgs& args, const PlaneBackward& backward,
            const LaunchShape& shape, const Denominator& denominator, const GradOutput& grad_output,
            Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  const PlaneGrid grid(args, args.grad_input, args.grad_input_class_stride);
  const auto launch_as = [&](auto type) {
    launch_kernel("plane_rows_kernel", plane_rows_kernel<typename decltype(type)::scalar_type>,
                  shape, stream, args, backward, grid, type, denominator, grad_output, partials,
                  finalize);
  };
  args.input.dtype == DType::kFloat32 ? launch_as(RowType<float>(args.input.dtype))
                                      : launch_as(RowType<any_half_t>(args.input.dtype));
}

}  // namespace

void launch_plane_rows(const CrossEntropyForwardArgs& args, const RowPlan& plan,
                       const Denominator& denominator, const GradOutput& grad_output,
                       Partial* partials, const Finalize& finalize, cudaStream_t stream) {
  const LaunchShape shape = {grad_output.limit_blocks(plan.blocks, plan.threads), plan.threads,
                             plan.shared_bytes, 1,
                             waits_for_previous_kernel(denominator, grad_output)};
  launch(args, {}, shape, denominator, grad_output, partials, finalize, stream);
}

void launch_plane_gradients(const CrossEntropyBackwardArgs& args, cudaStream_t stream) {
  CrossEntropyForwardArgs forward;
  static_cast<CrossEntropyArgs&>(forward) = args;
  forward.mean_terms = const_cast<double*>(args.mean_terms);  // read only
  forward.grad_input = args.grad_input;
  forward.grad_input_class_stride = args.grad_input_class_stride;
  const LaunchShape shape = {blocks_of(args, kMaxGrid), threads_of(args.num_classes), 0, 1, true};
  launch(forward, {args.row_stats, args.grad_output}, shape, {}, {}, nullptr, {}, stream);
}

}  // namespace lossops::cuda
