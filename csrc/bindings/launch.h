// From an op to its kernels: the device, the stream, the threads and the scratch memory of a
// launch.
#pragma once

#include <torch/csrc/stable/accelerator.h>

#include <optional>
#include <string>

#include "bindings/tensors.h"
#include "launchers.h"

namespace lossops::bindings {

// Why CUDA cannot be used in this process, in one sentence; empty if it can.
std::string cuda_problem();

// Runs body over [0, count) in torch's threads.
void torch_parallel_for(int64_t count, int64_t grain, void (*body)(void*, int64_t, int64_t),
                        void* data);

inline cpu::Context cpu_context() { return cpu::Context{&torch_parallel_for}; }

#if defined(LOSSOPS_WITH_CUDA)
cuda::Context current_stream(const Tensor& tensor);
#endif

// Makes the device of a tensor the current one. Launchers plan and launch for the current device.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) {
    if (tensor.is_cuda()) {
      guard_.emplace(tensor.get_device_index());
    }
  }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
};

// Runs a launcher: its CUDA version on the current stream of the device of `like`, or its CPU
// version. An OnDevice of `like` must exist meanwhile. This holds for the macros below too.
#if defined(LOSSOPS_WITH_CUDA)
#define LOSSOPS_LAUNCH(like, name, ...)                       \
  do {                                                        \
    if ((like).is_cuda()) {                                   \
      cuda::launch_##name(__VA_ARGS__, current_stream(like)); \
    } else {                                                  \
      cpu::launch_##name(__VA_ARGS__, cpu_context());         \
    }                                                         \
  } while (false)
#define LOSSOPS_ASK(like, name, args) ((like).is_cuda() ? cuda::name(args) : cpu::name(args))
#else
#define LOSSOPS_LAUNCH(like, name, ...) cpu::launch_##name(__VA_ARGS__, cpu_context())
#define LOSSOPS_ASK(like, name, args) cpu::name(args)
#endif
#define LOSSOPS_SCRATCH(like, name, args) LOSSOPS_ASK(like, name##_scratch, args)

// Memory for one call. torch's allocator may hand it out again as soon as the stream is past the
// launch. Little memory for the CPU is on the stack: an allocation takes longer than a small loss.
class Scratch {
 public:
  Scratch(int64_t doubles, const Tensor& like) {
    if (doubles <= kOnStack && like.is_cpu()) {
      data_ = on_stack_;
    } else if (doubles > 0) {
      allocated_ = empty_vector(doubles, ScalarType::Double, like);
      data_ = static_cast<double*>(allocated_->mutable_data_ptr());
    }
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  double* data() const { return data_; }

 private:
  static constexpr int64_t kOnStack = 128;
  double on_stack_[kOnStack];
  OptionalTensor allocated_;
  double* data_ = nullptr;
};

#define LOSSOPS_LAUNCH_WITH_SCRATCH(like, name, args)               \
  do {                                                              \
    const Scratch scratch(LOSSOPS_SCRATCH(like, name, args), like); \
    LOSSOPS_LAUNCH(like, name, args, scratch.data());               \
  } while (false)

}  // namespace lossops::bindings
