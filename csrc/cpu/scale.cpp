// Kept gradients times grad_output, in place, on the CPU.

#include <algorithm>
#include <cstdint>

#include "cpu/parallel.h"
#include "launchers.h"

namespace lossops::cpu {
namespace {

template <typename scalar_t>
void scale(const ScaleArgs& args, const Context& context) {
  using acc_t = acc_type_t<scalar_t>;
  const auto factor = load_as<acc_t>(args.factor, args.factor_dtype, 0);
  if (factor == acc_t(1)) {
    return;
  }
  auto* const data = static_cast<scalar_t*>(args.data);
  parallel_for_each(context, divide_up(args.numel, kChunk), [&](int64_t chunk) {
    const int64_t end = std::min((chunk + 1) * kChunk, args.numel);
    for (int64_t i = chunk * kChunk; i < end; ++i) {
      data[i] = from_acc<scalar_t>(to_acc<acc_t>(data[i]) * factor);
    }
  });
}

}  // namespace

void launch_scale(const ScaleArgs& args, Context context) {
  switch (args.dtype) {
    case DType::kFloat64:
      return scale<double>(args, context);
    case DType::kFloat32:
      return scale<float>(args, context);
    case DType::kFloat16:
      return scale<half_t>(args, context);
    default:
      return scale<bfloat16_t>(args, context);
  }
}

}  // namespace lossops::cpu
