#include "bindings/scale.h"

#include "bindings/arguments.h"
#include "bindings/launch.h"

namespace lossops::bindings {

void scale_kept(Tensor gradient, Tensor factor) {
  constexpr char kName[] = "scale_kept";
  const View view(gradient);
  const View of_factor(factor);
  check_floating(kName, "gradient", view);
  check_floating(kName, "factor", of_factor);
  LOSSOPS_CHECK(kName, gradient.is_contiguous(), "gradient must be contiguous, but has strides ",
                view.strides);
  LOSSOPS_CHECK(kName, of_factor.sizes.numel() == 1, "factor must have one element, but has shape ",
                of_factor.sizes);
  check_device(kName, "factor", of_factor, view, "gradient");
  check_cuda(kName, "gradient", gradient);
  ScaleArgs args;
  args.data = gradient.mutable_data_ptr();
  args.dtype = to_dtype(kName, view.dtype);
  args.numel = view.sizes.numel();
  args.factor = factor.const_data_ptr();
  args.factor_dtype = to_dtype(kName, of_factor.dtype);
  const OnDevice device(gradient);
  LOSSOPS_LAUNCH(gradient, scale, args);
}

}  // namespace lossops::bindings
