// What the first pass over a row makes of its logits: differences from the largest, under the logit
// map, and their exponentials.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <type_traits>

#include "kernels/rows/row_cut.h"
#include "kernels/rows/row_reader.cuh"
#include "losses/math.h"
#include "losses/rows/logit_map.h"
#include "losses/rows/softmax_state.h"

namespace lossops::cuda {

// The difference z - max <= 0 of a logit, in units of kUnit, and its exponential. Below kLowest the
// exponential is 0; a difference of -inf is raised to kLowest, so that products with it are 0 too.
template <typename scalar_t>
struct RowTerm {
  using acc_t = acc_type_t<scalar_t>;
  static constexpr bool kIsHalf = sizeof(scalar_t) == 2;
  // Half types have powers of 2, which spares a multiplication for each logit.
  static constexpr acc_t kUnit = kIsHalf ? acc_t(0x1.62e430p-1) : acc_t(1);  // ln 2
  static constexpr acc_t kPerUnit = kIsHalf ? acc_t(0x1.715476p+0) : acc_t(1);
  static constexpr acc_t kLowest = kIsHalf              ? acc_t(-512)
                                   : sizeof(acc_t) == 4 ? acc_t(-256)
                                                        : acc_t(-1024);

  // NaN stays NaN.
  static __device__ __forceinline__ acc_t bounded(acc_t difference) {
    if constexpr (sizeof(acc_t) == 4) {
      return math::at_least(difference, kLowest);
    } else {
      return difference < kLowest ? kLowest : difference;
    }
  }
  static __device__ __forceinline__ acc_t exp(acc_t difference) {
    if constexpr (kIsHalf) {
      return math::exp2(difference);
    } else if constexpr (sizeof(acc_t) == 4) {
      return math::exp_of_finite_in_sum(difference);
    } else {
      return math::exp(difference);
    }
  }
};

// Any map, for kernels that fp64 has once: their arithmetic takes longer than a branch.
template <typename acc_t>
struct AnyMap {
  LinearMap<acc_t> linear;
  SoftcapMap<acc_t> softcap;
  bool has_softcap;

  explicit AnyMap(const LogitMapParams& params)
      : linear(params), softcap(params), has_softcap(params.softcap > 0) {}

  __device__ __forceinline__ acc_t map(acc_t x) const {
    return has_softcap ? softcap.map(x) : linear.map(x);
  }
  __device__ __forceinline__ acc_t derivative(acc_t x) const {
    return has_softcap ? softcap.derivative(x) : linear.derivative(x);
  }
};

// The least number above 0: -inf stands for what a row does not have, and must stay -inf. The
// largest logit times this is 5e-7 of fp32, 9e-16 of fp64.
template <typename acc_t>
constexpr acc_t kLeastFactor = acc_t(sizeof(acc_t) == 4 ? 0x1p-149 : 0x1p-1074);

// A map whose factor is not 0.
template <typename acc_t>
LinearMap<acc_t> map_of_pass(LinearMap<acc_t> map) {
  map.factor = map.factor == 0 ? kLeastFactor<acc_t> : map.factor;
  return map;
}
template <typename acc_t>
SoftcapMap<acc_t> map_of_pass(SoftcapMap<acc_t> map) {
  map.rate = map.rate == 0 ? kLeastFactor<acc_t> : map.rate;
  return map;
}
template <typename acc_t>
AnyMap<acc_t> map_of_pass(AnyMap<acc_t> map) {
  map.linear = map_of_pass(map.linear);
  map.softcap = map_of_pass(map.softcap);
  return map;
}

// A call's map as the first pass takes it: one that rises, so that the largest logit has the
// largest mapped logit. Where the call's map falls, the pass changes the signs of logits and takes
// the map of these: maps are odd, so mapped logits stay the same.
struct RisingMap {
  LogitMapParams params;
  bool changes_signs;

  explicit RisingMap(const LogitMapParams& map) : params(map), changes_signs(map.scale < 0) {
    params.scale = changes_signs ? -map.scale : map.scale;
  }
};

// Calls body(type, map) with the types of logits and of their map. Throws if rows have too many
// vectors to be numbered.
template <typename Body>
void visit_row_types(DType dtype, int64_t num_classes, const LogitMapParams& params, Body&& body) {
  if (num_classes * element_size(dtype) / kRowVectorBytes > kMostVectors) {
    throw std::runtime_error("lossops: CUDA kernels do not take rows of so many classes");
  }
  const auto visit_map = [&](auto like) {
    using scalar_t = decltype(like);
    visit_logit_map<acc_type_t<scalar_t>>(
        params, [&](const auto& map) { body(RowType<scalar_t>(dtype), map); });
  };
  if (dtype == DType::kFloat64) {
    body(RowType<double>(dtype), AnyMap<double>(params));
  } else if (dtype == DType::kFloat32) {
    visit_map(float{});
  } else {
    visit_map(AnyHalf{});
  }
}

// What logits become once the maximum of those seen so far is known.
template <typename scalar_t, typename Map>
class SoftmaxTerms {
 public:
  using acc_t = acc_type_t<scalar_t>;
  using Term = RowTerm<scalar_t>;
  // Else the map of -inf may be finite.
  static constexpr bool kIsLinear = std::is_same_v<Map, LinearMap<acc_t>>;
  // Logits of half types take one multiply-add. What rounding took from its constant makes all
  // differences too large by excess(), which sums of them forgive: it is given back to those.
  static constexpr bool kIsFused = kIsLinear && Term::kIsHalf;

  __device__ __forceinline__ explicit SoftmaxTerms(const Map& map)
      : map_(map), rate_(map_.map(acc_t(1)) * Term::kPerUnit) {}

  // Takes the largest logit, and returns the maximum. What is -inf is subtracted from nothing.
  __device__ __forceinline__ acc_t set_top(acc_t top) {
    const acc_t max = map_.map(top);
    shift_ = softmax_shift(kIsLinear ? top : max);
    if constexpr (kIsFused) {
      // Logits below the largest are then so far below it that their terms are 0, whatever the
      // excess. A constant of -inf would make them infinite.
      const acc_t constant = math::at_least(shift_ * rate_, -0x1.fffffep+127f);
      const acc_t excess = ::fmaf(shift_, rate_, -constant);
      excess_ = ::fminf(::fmaxf(excess, -1.0f), 1.0f);
      shift_ = constant;
    }
    return max;
  }

  // A linear map is taken of the difference, which is exact for logits that are near each other.
  // kBounded: false where a difference of -inf does no harm.
  template <bool kBounded>
  __device__ __forceinline__ acc_t difference(acc_t x) const {
    if constexpr (kIsFused) {
      const acc_t difference = ::fmaf(x, rate_, -shift_);
      return kBounded ? Term::bounded(difference) : difference;
    } else {
      return Term::bounded(kIsLinear ? (x - shift_) * rate_
                                     : (map_.map(x) - shift_) * Term::kPerUnit);
    }
  }

  // In units of RowTerm.
  __device__ __forceinline__ acc_t excess() const { return excess_; }

 private:
  Map map_;
  acc_t rate_;
  acc_t shift_ = 0;
  acc_t excess_ = 0;
};

// kCount logits as terms of the row's sums, but for those of the maximum, which are 0.
template <typename scalar_t, int kCount>
struct TermBatch {
  using acc_t = acc_type_t<scalar_t>;
  static constexpr int kSize = kCount;
  acc_t powers[kCount];       // exp(z - max)
  acc_t differences[kCount];  // (z - max) / kUnit
};

}  // namespace lossops::cuda
