// The gradients of a tile of rows whose classes are not neighbours, written by aligned vectors.
//
// A lane of a warp has a vector of the strip. The warp has every eighth class: their addresses
// differ by multiples of a vector, so that a lane has the same rows in all of them, and keeps their
// numbers in registers. Its next vectors are copied to shared memory while it works on these.
// Gradients at class indices are written over what the lanes have written, one a row.
#pragma once

#include <cstdint>

#include "kernels/primitives/async_copy.cuh"
#include "kernels/primitives/integers.h"
#include "kernels/primitives/vectorized.cuh"
#include "kernels/rows/index_gradient.cuh"
#include "kernels/rows/plane_gradients_plan.h"
#include "kernels/rows/plane_place.cuh"
#include "kernels/rows/row_reader.cuh"

namespace lossops::cuda::plane_gradients {

using plane_rows::PlaneRowPlace;

// A strip, for the kernel.
struct Strip {
  uint32_t first_plane;
  int planes;
  int64_t begin;  // position
  int length;

  __device__ __forceinline__ int64_t end() const { return begin + length; }
};

// How planes are cut, for the kernel.
struct StripGrid {
  int64_t positions;
  int planes;
  int length;
  int planes_of_strip;
  Divisor strips_of_plane;
  Divisor tiles_of_strip;
  int tile_classes;
  bool reads_vectors;  // logits begin a vector wherever gradients do

  StripGrid(const Strips& strips, const CrossEntropyBackwardArgs& args)
      : positions(strips.positions),
        planes(static_cast<int>(strips.planes)),
        length(strips.length),
        planes_of_strip(strips.planes_of_strip),
        strips_of_plane(static_cast<uint32_t>(strips.of_plane)),
        tile_classes(plane_gradients::tile_classes(args.num_classes)) {
    tiles_of_strip = Divisor(static_cast<uint32_t>(ceil_div(args.num_classes, tile_classes)));
    const int64_t vector = kVectorBytes / element_size(args.input.dtype);
    const auto distance = reinterpret_cast<uintptr_t>(args.input.data) -
                          reinterpret_cast<uintptr_t>(args.grad_input.data);
    reads_vectors = distance % kVectorBytes == 0 &&
                    (args.input_class_stride - args.grad_input_class_stride) % vector == 0;
    for (int dim = 1; dim < args.rows.ndim; ++dim) {
      reads_vectors =
          reads_vectors && (args.input.strides[dim] - args.grad_input.strides[dim]) % vector == 0;
    }
  }

  __device__ __forceinline__ Strip strip(uint32_t number) const {
    // Of strips with whole planes, strips_of_plane is 1, and the quotient the strip's own number.
    const uint32_t first = strips_of_plane.quotient(number);
    const int64_t begin = int64_t{number - first * strips_of_plane.value} * length;
    const uint32_t plane = first * planes_of_strip;
    return {plane, min(planes_of_strip, planes - static_cast<int>(plane)), begin,
            static_cast<int>(min(int64_t{length}, positions - begin))};
  }
};

// IndexGradients of the rows of a strip in shared memory. Neighbouring lanes ask for rows that are
// a vector's rows apart, and find them in different banks.
template <typename scalar_t>
struct StripNumbers {
  using Gradient = IndexGradient<kExactExponentials<scalar_t>>;
  static constexpr int kVector = kVectorSize<scalar_t>;
  static constexpr int kRows = kWarpSize * kVector;
  static constexpr int kPitch = kRows + kVector;
  static constexpr int kFloats = sizeof(Gradient) / sizeof(float) * kPitch;

  float* numbers;

  __device__ __forceinline__ void put(int row, const Gradient& gradient) const {
    plane_rows::put_numbers(numbers + place(row), kPitch, gradient);
  }
  __device__ __forceinline__ Gradient get(int row) const {
    return plane_rows::get_numbers<Gradient>(numbers + place(row), kPitch);
  }

 private:
  static __device__ __forceinline__ int place(int row) {
    return row % kVector * (kPitch / kVector) + row / kVector;
  }
};

// The numbers of LogitNumbers that the gradients of a usual row take, for few registers. Usual is a
// row whose gradients are multiples of exp(x) in fp32's normal range, and of half types a row whose
// logits are not scaled. Of a row that is not there, every logit counts as a usual one.
template <bool kExact>
struct UsualGradient {
  math::MultipleOfExp multiple;
  float lowest = math::quiet_nan<float>();

  // Whether the row is a usual one. It has no NaN then.
  __device__ __forceinline__ bool take(const LogitNumbers<kExact>& numbers) {
    multiple = numbers.multiple;
    lowest = numbers.lowest;
    return lowest < math::infinity<float>();
  }
  // Whether a logit is a usual one.
  __device__ __forceinline__ bool holds_of(float x) const { return !(x <= lowest); }
  __device__ __forceinline__ float operator()(float x) const { return multiple(x); }
};
template <>
struct UsualGradient<false> {
  float offset = 0;
  float factor = 0;

  __device__ __forceinline__ bool take(const LogitNumbers<false>& numbers) {
    offset = numbers.offset;
    factor = numbers.factor;
    return numbers.scale == math::kLog2E;
  }
  __device__ __forceinline__ bool holds_of(float) const { return true; }
  __device__ __forceinline__ float operator()(float x) const {
    return factor * math::exp2(__fmaf_rn(x, math::kLog2E, offset));
  }
};

// The classes of a tile.
struct TileClasses {
  int first;
  int end;

  __device__ __forceinline__ TileClasses(const StripGrid& grid, int64_t num_classes, int tile)
      : first(tile * grid.tile_classes),
        end(min(first + grid.tile_classes, static_cast<int>(num_classes))) {}
};

template <typename scalar_t>
class GradientTile {
 public:
  static constexpr bool kExact = kExactExponentials<scalar_t>;
  using Gradient = IndexGradient<kExact>;
  static constexpr int kVector = kVectorSize<scalar_t>;
  // Vectors of a thread that are copied to shared memory at a time.
  static constexpr int kCopies = 4;
  using Copies = RowVector[kCopies][kThreads];

  // Rows before the strip that its vectors may have.
  static __device__ __forceinline__ int rows_before(const Strip& strip) {
    return strip.begin > 0 ? kVector - 1 : 0;
  }

  // numbers: of the rows of the strip and, before those, rows_before().
  __device__ __forceinline__ GradientTile(const CrossEntropyBackwardArgs& args,
                                          const StripGrid& grid, const Strip& strip,
                                          const TileClasses& classes,
                                          const StripNumbers<scalar_t>& numbers, Copies& copies)
      : args_(args),
        grid_(grid),
        numbers_(numbers),
        copies_(copies),
        first_class_(classes.first + static_cast<int>(threadIdx.x) / kWarpSize),
        end_class_(classes.end) {
    const int lanes = kWarpSize / grid.planes_of_strip;
    const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
    const int plane = lane / lanes;
    const int vector = lane - plane * lanes;
    const bool is_there = plane < strip.planes;
    const PlaneRowPlace first = {args.rows, 0, strip.first_plane + (is_there ? plane : 0)};
    logits_ = static_cast<const scalar_t*>(args.input.data) + first.offset(args.input) +
              first_class_ * args.input_class_stride;
    gradients_ = static_cast<scalar_t*>(args.grad_input.data) + first.offset(args.grad_input) +
                 first_class_ * args.grad_input_class_stride;
    // Elements from a vector to position 0.
    const int phase =
        static_cast<int>(reinterpret_cast<uintptr_t>(gradients_) / sizeof(scalar_t) % kVector);
    const auto aligned = [&](int64_t position) {
      return position - static_cast<int>((position + phase) % kVector);
    };
    // A vector with rows of two strips belongs to the one that its last row is in.
    position_ = aligned(strip.begin) + vector * kVector;
    const int64_t end = strip.end() < grid.positions ? aligned(strip.end()) : strip.end();
    begin_ = position_ < 0 ? static_cast<int>(-position_) : 0;
    end_ = is_there ? static_cast<int>(min(end - position_, int64_t{kVector})) : 0;
    row_ = plane * grid.length + static_cast<int>(position_ - strip.begin) + rows_before(strip);
  }

  // Starts to copy what write() takes first.
  __device__ __forceinline__ void start() const {
    if (takes_vectors() && grid_.reads_vectors) {
      copy_from(first_class_, logits_ + position_);
    }
  }

  // Writes all gradients, those at class indices as any others. write_at_index() corrects these.
  __device__ __forceinline__ void write(const RowType<scalar_t>& type) const {
    if (begin_ >= end_ || first_class_ >= end_class_) {
      return;
    }
    UsualGradient<kExact> usual[kVector];
    unsigned zeros = 0;  // a bit for each row whose gradients are 0, but for the class index's
    bool is_usual = true;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (i >= begin_ && i < end_) {
        const Gradient gradient = numbers_.get(row_ + i);
        if (gradient.is_zero()) {
          zeros |= 1u << i;
        } else {
          is_usual = is_usual && gradient.index >= 0 && usual[i].take(gradient.of_logit);
        }
      }
    }
    const auto replace = [&](float (&x)[kVector]) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        is_usual = is_usual && usual[i].holds_of(x[i]);
        x[i] = usual[i](x[i]);
      }
      if (zeros != 0) {
        keep_apart();
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
          x[i] = (zeros & 1u << i) != 0 ? 0.0f : x[i];
        }
      }
    };
    if (takes_vectors()) {
      write_vectors(type, replace);
    } else {
      write_elements(replace);
    }
    if (!is_usual) {
      write_any();  // fault: plane-gradients-unusual
    }
  }

 private:
  __device__ __forceinline__ bool takes_vectors() const {
    return begin_ == 0 && end_ == kVector && args_.input.strides[0] == 1;
  }
  // The vectors of class c and those after it of the warp, as far as the tile has them.
  __device__ __forceinline__ void copy_from(int c, const scalar_t* from) const {
#pragma unroll
    for (int u = 0; u < kCopies; ++u) {
      if (c + u * kWarps < end_class_) {
        start_own_copy<CopyCaches::kL1AndL2>(&copies_[u][threadIdx.x],
                                             reinterpret_cast<const RowVector*>(from));
      }
      from += kWarps * args_.input_class_stride;
    }
  }

  // replace(x): a vector's logits by their gradients.
  template <typename Replace>
  __device__ __forceinline__ void write_vectors(const RowType<scalar_t>& type,
                                                Replace&& replace) const {
    const int64_t from_step = kWarps * args_.input_class_stride;
    const int64_t to_step = kWarps * args_.grad_input_class_stride;
    const scalar_t* from = logits_ + position_;
    scalar_t* to = gradients_ + position_;
#pragma unroll 1
    for (int c = first_class_; c < end_class_; c += kCopies * kWarps) {
      RowVector vectors[kCopies];
      if (grid_.reads_vectors) {
        wait_for_own_copies();
#pragma unroll
        for (int u = 0; u < kCopies; ++u) {
          vectors[u] = copies_[u][threadIdx.x];
        }
        from += kCopies * from_step;
        copy_from(c + kCopies * kWarps, from);
      } else {
#pragma unroll
        for (int u = 0; u < kCopies; ++u) {
          if (c + u * kWarps < end_class_) {
            vectors[u] = RowVector::load_by_words(from);
          }
          from += from_step;
        }
      }
#pragma unroll
      for (int u = 0; u < kCopies; ++u) {
        if (c + u * kWarps < end_class_) {
          float x[kVector];
          vectors[u].unpack(type, x);
          replace(x);
          *reinterpret_cast<RowVector*>(to) = RowVector::pack(type, x);
        }
        to += to_step;
      }
    }
  }
  // Writes a part of a vector, or the gradients of logits whose rows are not neighbours.
  template <typename Replace>
  __device__ __forceinline__ void write_elements(Replace&& replace) const {
    const DType dtype = args_.input.dtype;
    const int64_t row_stride = args_.input.strides[0];
    const scalar_t* from = logits_ + position_ * row_stride;
    scalar_t* to = gradients_ + position_;
#pragma unroll 1
    for (int c = first_class_; c < end_class_; c += kWarps) {
      float x[kVector] = {};
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (i >= begin_ && i < end_) {
          x[i] = to_acc_of<float>(from[i * row_stride], dtype);
        }
      }
      replace(x);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (i >= begin_ && i < end_) {
          to[i] = from_acc_of<scalar_t>(x[i], dtype);
        }
      }
      from += kWarps * args_.input_class_stride;
      to += kWarps * args_.grad_input_class_stride;
    }
  }
  // Writes the gradients of any rows and logits once more.
  __device__ __forceinline__ void write_any() const {
    const DType dtype = args_.input.dtype;
#pragma unroll 1
    for (int i = begin_; i < end_; ++i) {
      const Gradient gradient = numbers_.get(row_ + i);
      const scalar_t* from = logits_ + (position_ + i) * args_.input.strides[0];
      scalar_t* to = gradients_ + position_ + i;
#pragma unroll 1
      for (int c = first_class_; c < end_class_; c += kWarps) {
        float x[1] = {to_acc_of<float>(*from, dtype)};
        gradient.replace(x);
        *to = from_acc_of<scalar_t>(x[0], dtype);
        from += kWarps * args_.input_class_stride;
        to += kWarps * args_.grad_input_class_stride;
      }
    }
  }

  const CrossEntropyBackwardArgs& args_;
  const StripGrid& grid_;
  const StripNumbers<scalar_t>& numbers_;
  Copies& copies_;
  const int first_class_;   // of the warp
  const int end_class_;     // of the tile
  const scalar_t* logits_;  // at position 0 of the warp's first class
  scalar_t* gradients_;
  int64_t position_;  // of element 0 of the vector
  int begin_;         // elements that are to be written
  int end_;
  int row_;  // of element 0, among `numbers`
};

// Writes the gradient at a row's class index, if this tile owns it: the class is one of the tile,
// and the vector that holds the gradient belongs to the strip, as in GradientTile. A row without a
// loss has a negative index, which no tile has.
template <typename scalar_t>
__device__ __forceinline__ void write_at_index(const CrossEntropyBackwardArgs& args,
                                               const StripGrid& grid, const Strip& strip,
                                               const TileClasses& classes, const PlaneRowPlace& row,
                                               int index, float value) {
  if (index < classes.first || index >= classes.end) {
    return;
  }
  constexpr int kVector = kVectorSize<scalar_t>;
  scalar_t* const to = static_cast<scalar_t*>(args.grad_input.data) + row.offset(args.grad_input) +
                       index * args.grad_input_class_stride;
  const int before = static_cast<int>(reinterpret_cast<uintptr_t>(to) / sizeof(scalar_t) % kVector);
  const int64_t last = min(row.position - before + kVector, grid.positions) - 1;  // of the vector
  if (last >= strip.begin && last < strip.end()) {
    *to = from_acc_of<scalar_t>(value, args.input.dtype);  // fault: plane-gradients-index
  }
}

}  // namespace lossops::cuda::plane_gradients
