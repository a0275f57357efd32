"""Planted faults: mistakes that the suite must find, each built into a copy and tested there.

    python tests/planted_faults.py [--only GLOB] [--all] [--cuda] [--list] [--keep]

Each fault replaces one piece of text, which must occur exactly once in its file: a change of the
sources that moves it stops the script, and the table is to be brought up to date. The tests beside
it are those that should fail, few enough that a run of the table takes minutes; `--all` runs the
whole suite for each fault. A fault that no test notices is a gap in the suite, and ends the script
with 1, as a failure without any fault does. One that can change no result has no place here.

The files that git tracks are copied to a temporary folder, which `--keep` leaves behind, and built
there for the CPU by setup.py: once, with little optimisation, and then only what includes the file
with the fault. Needs what `make test` installs: torch, setuptools, ninja, pytest. The next fault is
compiled while one is tested, so two cores are used.

`--cuda` adds the faults of csrc/kernels/. They take nvcc and a GPU, TORCH_CUDA_ARCH_LIST (default:
the GPUs of this machine) and minutes each; without a GPU they are listed as not run.

Not a test: `pytest` does not collect it.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = Path("src/lossops/_C.so")
# Of a run of some of the tests. One that hangs is noticed, too.
TIME_LIMIT_SECONDS = 1800


class Fault(NamedTuple):
    name: str
    path: str
    old: str
    new: str
    tests: str  # arguments of pytest, from tests/

    @property
    def cuda(self) -> bool:
        """Changes what kernels on a GPU return, and nothing else."""
        return self.name.startswith("cuda:")

    @property
    def compiled(self) -> bool:
        return self.path.startswith("csrc/")


MSE = "csrc/losses/mse.h"
KL = "csrc/losses/kl_div.h"
CE = "csrc/losses/cross_entropy.h"
ROW = "csrc/cross_entropy_row.h"
STRIDED = "csrc/strided.h"
SPACE = "csrc/iteration_space.h"
TYPES = "csrc/scalar_types.h"
BLOCK = "csrc/cpu/block.h"
CPU_ELEMENTWISE = "csrc/cpu/elementwise.cpp"
CPU_CE = "csrc/cpu/cross_entropy.cpp"
BINDING_DTYPES = "csrc/bindings/dtypes.h"
BINDING_ELEMENTWISE = "csrc/bindings/elementwise.cpp"
BINDING_ELEMENTWISE_PROBLEM = "csrc/bindings/elementwise_problem.cpp"
BINDING_CE = "csrc/bindings/cross_entropy.cpp"
BINDING_CE_PROBLEM = "csrc/bindings/cross_entropy_problem.cpp"
OPS = "src/lossops/ops.py"
FUNCTIONAL = "src/lossops/functional.py"
NN = "src/lossops/nn.py"

FAULTS = [
    # ------------------------------------------------------------------ csrc/losses
    Fault(
        "mse: gradient of input without its factor 2",
        MSE,
        "return acc_t(2) * (x - t);",
        "return x - t;",
        "test_mse_loss.py test_values.py",
    ),
    Fault(
        "mse: gradient of target with input's sign",
        MSE,
        "return acc_t(2) * (t - x);",
        "return acc_t(2) * (x - t);",
        "test_mse_loss.py test_values.py",
    ),
    Fault(
        "kl_div: zero target against an input of -inf",
        KL,
        "input == -math::infinity<acc_t>() ? acc_t(0) : acc_t(0) * input;",
        "acc_t(0) * input;",
        "test_kl_div.py",
    ),
    Fault(
        "kl_div: NaN lost under a zero target",
        KL,
        "input == -math::infinity<acc_t>() ? acc_t(0) : acc_t(0) * input;",
        "acc_t(0);",
        "test_kl_div.py",
    ),
    Fault(
        "kl_div: log_target forgotten by the gradient of input",
        KL,
        "    if constexpr (kLogTarget) {\n      return math::exp(target);",
        "    if constexpr (kLogTarget) {\n      return target;",
        "test_kl_div.py test_values.py",
    ),
    Fault(
        "kl_div: gradient of target without + 1",
        KL,
        ": log_ratio + acc_t(1);",
        ": log_ratio;",
        "test_kl_div.py test_values.py",
    ),
    Fault(
        "kl_div: gradient of a zero target is a number",
        KL,
        "target == acc_t(0) ? math::quiet_nan<acc_t>() : log_ratio",
        "target == acc_t(0) ? acc_t(0) : log_ratio",
        "test_kl_div.py",
    ),
    Fault(
        "cross_entropy: smoothing adds no share to each class",
        CE,
        "* probability + smoothing_per_class;",
        "* probability;",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: -inf taken off a row that begins with it",
        CE,
        "return max == -math::infinity<acc_t>() ? acc_t(0) : max;",
        "return max;",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: sum of coefficients forgotten by the loss",
        CE,
        "return q_sum * math::log1p(rest) + dot",
        "return math::log1p(rest) + dot",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: gradient at the class index with the wrong sign",
        CE,
        "return -factor * (rest +",
        "return factor * (rest +",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: coefficient forgotten where a class outweighs all others",
        CE,
        "(scale, q_sum - q, factor, others)",
        "(scale, q_sum, factor, others)",
        "test_cross_entropy.py",
    ),
    # ------------------------------------------------------- csrc, what backends share
    Fault(
        "cross_entropy: gradient of a mean not divided",
        ROW,
        "? grad_output / static_cast<acc_t>(args.mean_terms[0])",
        "? grad_output",
        "test_cross_entropy.py",
    ),
    Fault(
        "elementwise: grad_output ignored",
        STRIDED,
        "return grad_output.data == nullptr ? acc_t(1) : load_operand<acc_t>(grad_output, offset);",
        "return acc_t(1);",
        "test_autograd.py::test_scalar_grad_output",
    ),
    Fault(
        "mse: gradient of a weighted mean divided by the count",
        STRIDED,
        "args.weight.data != nullptr ? args.mean_terms[0] : args.denominator",
        "args.denominator",
        "test_mse_loss.py",
    ),
    Fault(
        "kept gradient taken for right whatever grad_output is",
        STRIDED,
        "return args.kept && load_operand<double>(args.grad_output, 0) == 1;",
        "return args.kept;",
        "test_kept_gradients.py",
    ),
    Fault(
        "layouts: dimensions merged by the strides of one operand",
        SPACE,
        "for (int n = 0; n < count_; ++n) {\n      if (strides_[n][dim] !=",
        "for (int n = 0; n < 1; ++n) {\n      if (strides_[n][dim] !=",
        "test_values.py::test_layouts",
    ),
    Fault(
        "more elements than can be counted are accepted",
        SPACE,
        "return empty || !overflow;",
        "return true;",
        "test_robustness.py",
    ),
    Fault(
        "bfloat16: cut off instead of rounded",
        TYPES,
        "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
        "bits >> 16",
        "test_mse_loss.py",
    ),
    Fault(
        "bfloat16: halves rounded up, not to even",
        TYPES,
        "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
        "(bits + 0x8000u) >> 16",
        "test_mse_loss.py",
    ),
    # --------------------------------------------------------------------- csrc/cpu
    Fault(
        "cpu: padding of a block's last vector added to a sum",
        BLOCK,
        "    std::fill(values + count, values + padded(count), acc_t(0));\n    add(",
        "    add(",
        "test_values.py",
    ),
    Fault(
        "cpu: last vector of a block lost by a sum",
        BLOCK,
        "for (; j < width; j += kVector) {\n      for (int lane = 0; lane < kVector; ++lane) {\n"
        "        sums[lane] +=",
        "for (; j + kVector < width; j += kVector) {\n"
        "      for (int lane = 0; lane < kVector; ++lane) {\n        sums[lane] +=",
        "test_values.py",
    ),
    Fault(
        "cpu: offsets of int32",
        BLOCK,
        "int64_t offsets_[N];",
        "int32_t offsets_[N];",
        "test_offsets.py",
    ),
    Fault(
        "cpu: sums by ranges of threads",
        CPU_ELEMENTWISE,
        """\
    parallel_for_each(context, chunks, [&](int64_t chunk) {
      const int64_t begin = chunk * kChunk;
      const int64_t end = std::min(begin + kChunk, args.space.numel);
      double* partial = none ? nullptr : scratch + 2 * chunk;
      with_widest_vectors([&]() LOSSOPS_ALWAYS_INLINE {
        with_gradient ? forward_chunk<true>(args, term, scale, begin, end, partial)
                      : forward_chunk<false>(args, term, scale, begin, end, partial);
      });
    });
""",
        """\
    if (!none) {
      std::fill_n(scratch, 2 * chunks, 0.0);
    }
    const auto run = [&](int64_t first, int64_t last) {
      const int64_t begin = first * kChunk;
      const int64_t end = std::min(last * kChunk, args.space.numel);
      double* partial = none ? nullptr : scratch + 2 * first;
      with_widest_vectors([&]() LOSSOPS_ALWAYS_INLINE {
        with_gradient ? forward_chunk<true>(args, term, scale, begin, end, partial)
                      : forward_chunk<false>(args, term, scale, begin, end, partial);
      });
    };
    using Run = decltype(run);
    context.parallel_for(
        chunks, 1,
        [](void* data, int64_t first, int64_t last) { (*static_cast<Run*>(data))(first, last); },
        const_cast<void*>(static_cast<const void*>(&run)));
""",
        "test_determinism.py::test_thread_counts_are_equal",
    ),
    Fault(
        "mse: a weighted mean's own share kept in the gradient of weight",
        CPU_ELEMENTWISE,
        "(term.forward(x_[j], t_[j]) - scalars_.mean_share)",
        "term.forward(x_[j], t_[j])",
        "test_mse_loss.py",
    ),
    Fault(
        "mse: each broadcast copy of a weight in the denominator",
        CPU_ELEMENTWISE,
        "? fold_partials(scratch + 1, chunks, 2) / args.weight_copies",
        "? fold_partials(scratch + 1, chunks, 2)",
        "test_mse_loss.py",
    ),
    Fault(
        "half types: rounded before the mean divides",
        CPU_ELEMENTWISE,
        "    result /= args.denominator;",
        "    store_operand(args.output, 0, result);\n"
        "    result = load_operand<double>(args.output, 0) / args.denominator;",
        "test_mse_loss.py test_kl_div.py",
    ),
    Fault(
        "broadcast gradient: the last of several partial sums lost",
        CPU_ELEMENTWISE,
        "fold_partials(scratch + element, plan.splits, plan.kept)",
        "fold_partials(scratch + element, std::max<int64_t>(plan.splits - 1, 1), plan.kept)",
        "test_values.py::test_broadcast_gradients_of_many_terms",
    ),
    Fault(
        "cross_entropy: mean over ignored rows too",
        CPU_CE,
        "targets.without_loss[j] == acc_t(0) ? targets.has_loss[j] : acc_t(1);",
        "acc_t(1);",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: mean without the class weights",
        CPU_CE,
        "args.mean_terms[0] = fold_partials(scratch + 1, chunks, 2);",
        "args.mean_terms[0] = static_cast<double>(args.rows.numel);",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: class index C accepted",
        CPU_CE,
        "(static_cast<uint64_t>(t) < classes ? 1 : 0)",
        "(static_cast<uint64_t>(t) <= classes ? 1 : 0)",
        "test_cross_entropy.py::test_target_out_of_range_on_the_cpu",
    ),
    Fault(
        "cross_entropy: gradient at a class index that begins a block",
        CPU_CE,
        "!args.target_is_probability && index >= 0 && index < count;",
        "!args.target_is_probability && index > 0 && index < count;",
        "test_cross_entropy.py test_cross_entropy_kernels.py test_values.py",
    ),
    Fault(
        "cross_entropy: sum not rescaled when the maximum rises",
        CPU_CE,
        "sum[r].scale(math::exp(-rise));",
        "",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: coefficients of classes before a rise left behind",
        CPU_CE,
        "dot_moved[r] += q_so_far == 0 ? 0 : q_so_far * rise;",
        "dot_moved[r] += 0 * q_so_far;",
        "test_cross_entropy.py test_values.py",
    ),
    Fault(
        "cross_entropy: gradient of probabilities forgets the smoothing",
        CPU_CE,
        "const acc_t factor = scale * coefficients.unsmoothed();",
        "const acc_t factor = scale;",
        "test_autograd.py::test_grad_output_of_any_layout",
    ),
    Fault(
        "cross_entropy: the last of several partial sums of weight's gradient lost",
        CPU_CE,
        "fold_partials(scratch + c, plan.splits, args.num_classes)",
        "fold_partials(scratch + c, std::max<int64_t>(plan.splits - 1, 1), args.num_classes)",
        "test_values.py::test_sizes",
    ),
    Fault(
        "cross_entropy: confident rows from a sum that holds 1",
        CPU_CE,
        "if (with_few_bits != 0) {",
        "if (with_few_bits < 0) {",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: ignored rows of few classes keep a gradient",
        CPU_CE,
        "if (!rows.targets.all_have_loss) {",
        "if (count < 0) {",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: probability 0 times an infinite logit",
        CPU_CE,
        "terms[i] = q[i] == acc_t(0) ? acc_t(0) : term;",
        "terms[i] = term;",
        "test_cross_entropy.py",
    ),
    # ----------------------------------------------------------------- csrc/bindings
    Fault(
        "kl_div: batchmean by the broadcast batch",
        BINDING_ELEMENTWISE_PROBLEM,
        "choice.batch ? (input.sizes.size > 0 ? input.sizes[0] : 1)",
        "choice.batch ? (shape.size > 0 ? shape[0] : 1)",
        "test_kl_div.py",
    ),
    Fault(
        "promotion: a 0-d operand widens one with dimensions",
        BINDING_DTYPES,
        "if (a.dim > 0 && b.dim == 0 && is_floating(a.dtype)) {",
        "if (false) {",
        "test_values.py::test_promotion",
    ),
    Fault(
        "promotion: float16 with bfloat16 is float16",
        BINDING_DTYPES,
        "return ScalarType::Float;  // two different",
        "return a;  // two different",
        "test_values.py::test_promotion",
    ),
    Fault(
        "strides of a result in row-major order",
        BINDING_ELEMENTWISE,
        "dense_strides(problem.shape, problem.order)",
        "dense_strides(problem.shape, row_major_order(problem.shape.size))",
        "test_values.py::test_layouts",
    ),
    Fault(
        "gradients of input and target swapped",
        BINDING_ELEMENTWISE,
        "{&ElementwiseBackwardArgs::grad_input,\n"
        "                                                           "
        "&ElementwiseBackwardArgs::grad_target,",
        "{&ElementwiseBackwardArgs::grad_target,\n"
        "                                                           "
        "&ElementwiseBackwardArgs::grad_input,",
        "test_values.py",
    ),
    Fault(
        "error about the dtype of target names input",
        BINDING_ELEMENTWISE_PROBLEM,
        'check(op, "target", target);',
        'check(op, "input", target);',
        "test_kl_div.py test_mse_loss.py test_robustness.py",
    ),
    Fault(
        "error about a class index shows another one",
        BINDING_CE,
        "offset += index % args.rows.sizes[dim] * args.target.strides[dim];",
        "offset += index % args.rows.sizes[dim];",
        "test_cross_entropy.py",
    ),
    Fault(
        "row_stats of any size accepted",
        BINDING_CE,
        "stats.sizes == stats_shape && stats.dtype",
        "stats.dtype",
        "test_robustness.py",
    ),
    Fault(
        "label_smoothing above 1 accepted",
        BINDING_CE_PROBLEM,
        "label_smoothing >= 0 && label_smoothing <= 1,",
        "label_smoothing >= 0,",
        "test_cross_entropy.py",
    ),
    Fault(
        "ignore_index accepted beside probabilities",
        BINDING_CE_PROBLEM,
        "LOSSOPS_CHECK(kCrossEntropy, ignore_index < 0,",
        "LOSSOPS_CHECK(kCrossEntropy, ignore_index < INT64_MAX,",
        "test_cross_entropy.py",
    ),
    Fault(
        "autocast: result of half types not widened",
        BINDING_DTYPES,
        "return float32_result && is_half ? ScalarType::Float : dtype;",
        "return dtype;",
        "test_autocast.py",
    ),
    # ------------------------------------------------------------------- src/lossops
    Fault(
        "kept gradient given away twice",
        OPS,
        "kept, ctx.kept = ctx.kept, None",
        "kept = ctx.kept",
        "test_kept_gradients.py::test_given_away_once",
    ),
    Fault(
        "kept gradient not scaled by grad_output",
        OPS,
        "if not (grad.is_cpu and _is_one(grad)):",
        "if not grad.is_cpu:",
        "test_kept_gradients.py",
    ),
    Fault(
        "LOSSOPS_KEEP_GRADIENTS=0 ignored",
        OPS,
        "if may_keep and _keeps_gradients:",
        "if may_keep:",
        "test_kept_gradients.py::test_switch",
    ),
    Fault(
        "kept gradient: inputs that have changed go unnoticed",
        OPS,
        "saved = ctx.saved_tensors  # raises where one has changed\n"
        "                if not (grad.is_cpu and _is_one(grad)):",
        "if not (grad.is_cpu and _is_one(grad)):\n                    saved = ctx.saved_tensors",
        "test_kept_gradients.py::test_changed_input_is_an_error",
    ),
    Fault(
        "options cut short by one: sum becomes mean",
        OPS,
        "shortened[options] = options[: position + 1]",
        "shortened[options] = options[:position]",
        "test_values.py",
    ),
    Fault(
        "inplace_backward: leaves and overlapping logits overwritten",
        OPS,
        "_check_overwritable(input, target=target, weight=weight)",
        "pass",
        "test_inplace_backward.py::test_leaf",
    ),
    Fault(
        "inplace_backward: grad_output in the memory of the logits",
        OPS,
        "_check_storage(input, grad_output=grad)",
        "pass",
        "test_inplace_backward.py::test_shared_memory",
    ),
    Fault(
        "inplace_backward: a second backward pass from the first one's result",
        OPS,
        "if ctx.is_overwritten:",
        "if False:",
        "test_inplace_backward.py::test_second_backward",
    ),
    Fault(
        "inplace_backward: versions of the logits not counted",
        OPS,
        "torch.autograd.graph.increment_version(changed)",
        "pass",
        "test_inplace_backward.py::test_operator_counts_versions",
    ),
    Fault(
        "second derivatives forget grad_output",
        OPS,
        "torch.autograd.grad(loss, wanted, grad_output, create_graph=True)",
        "torch.autograd.grad(loss, wanted, torch.ones_like(grad_output), create_graph=True)",
        "test_autograd.py::test_gradcheck",
    ),
    Fault(
        "second derivatives count a tensor in two places twice",
        OPS,
        "    alias = alias.view_as(alias)\n",
        "",
        "test_autograd.py::test_second_derivatives_where_target_depends_on_input",
    ),
    Fault(
        "forward mode: a tangent is lost",
        OPS,
        "if forward_ad._current_level < 0:\n        return False",
        "if forward_ad._current_level < 1:\n        return False",
        "test_autograd.py::test_forward_mode",
    ),
    Fault(
        "forward mode: the tangent of grad_output is lost",
        OPS,
        "                    or forward_ad._current_level >= 0\n",
        "",
        "test_autograd.py::test_tangent_of_grad_output",
    ),
    Fault(
        "is_grads_batched: gradients without a graph",
        OPS,
        "grad(loss, wanted, grad_output, create_graph=create_graph)",
        "grad(loss, wanted, grad_output)",
        "test_autograd.py::test_batched_gradients",
    ),
    Fault(
        "second derivatives under autocast: in half precision",
        OPS,
        "_wide(operands, grad_output.dtype == torch.float32)",
        "_wide(operands, False)",
        "test_autograd.py::test_second_derivatives_under_autocast",
    ),
    Fault(
        "torch.jit.trace: an operator without a formula",
        OPS,
        "if _is_tracing() or _dispatch_modes() > 0:",
        "if _dispatch_modes() > 0:",
        "test_autograd.py::test_traced_losses_keep_their_gradients",
    ),
    Fault(
        "a dual level of any thread sends backward passes to torch",
        OPS,
        "(_is_batched(grad_output) or _has_tangents(grad_output)):",
        "(_is_batched(grad_output) or forward_ad._current_level >= 0):",
        "test_autograd.py::test_dual_level_alone_keeps_ignored_rows_at_zero",
    ),
    Fault(
        "forward mode under autocast: in half precision",
        OPS,
        "x if x is None else x.to(_widened(x.dtype, float32_result))",
        "x",
        "test_autograd.py::test_forward_mode_under_autocast",
    ),
    Fault(
        "vmap along the first dimension, whichever is wanted",
        OPS,
        "return arg.select(dim, index)",
        "return arg.select(0, index)",
        "test_autograd.py::test_vmap",
    ),
    Fault(
        "autocast: the operator's result not widened",
        OPS,
        "return self.public_kernel(True, *args, **kwargs)",
        "return self.public_kernel(False, *args, **kwargs)",
        "test_autocast.py",
    ),
    Fault(
        "fake kernel: dtype under autocast",
        OPS,
        "dtype = _widened(self.result_dtype(input, target, weight, reduction), float32_result)",
        "dtype = self.result_dtype(input, target, weight, reduction)",
        "test_autocast.py::test_fake_tensors",
    ),
    Fault(
        "fake kernel: strides of a result after input's",
        OPS,
        "pair = (target, input) if self.target_first else (input, target)",
        "pair = (input, target)",
        "test_ops.py::test_meta_tensors",
    ),
    Fault(
        "fake kernel: row_stats of float64 arithmetic",
        OPS,
        "return shape, torch.float64 if acc_double else torch.float32",
        "return shape, torch.float32",
        "test_ops.py::test_opcheck",
    ),
    Fault(
        "cross_entropy: weight may require grad beside class indices",
        OPS,
        "if weight is not None and weight.requires_grad and not target.is_floating_point():",
        "if False:",
        "test_cross_entropy.py",
    ),
    Fault(
        "mse: no warning of shapes that broadcast",
        FUNCTIONAL,
        "if not same_shape:",
        "if False:",
        "test_mse_loss.py",
    ),
    Fault(
        "kl_div: log_target and log_input swapped",
        FUNCTIONAL,
        "options = (reduction, is_autocast, log_target, log_input)",
        "options = (reduction, is_autocast, log_input, log_target)",
        "test_kl_div.py",
    ),
    Fault(
        "errors of another type than torch's",
        FUNCTIONAL,
        "return type(torch_error)(message)",
        "return type(error)(message)",
        "test_cross_entropy.py test_mse_loss.py",
    ),
    Fault(
        "CrossEntropyLoss forgets label_smoothing",
        NN,
        "label_smoothing=self.label_smoothing,",
        "",
        "test_modules.py",
    ),
    # ------------------------------------------------------------------ csrc/kernels
    Fault(
        "cross_entropy: distances of a confident row, rounded",
        "csrc/cpu/cross_entropy.cpp",
        "const acc_t term = math::exp_times(acc_t(1), difference, lost);",
        "const acc_t term = math::exp(difference + acc_t(0) * lost);",
        "test_cross_entropy.py",
    ),
    Fault(
        "cuda: last element of a tail",
        "csrc/kernels/elementwise.cu",
        "threadIdx.x; i < numel; i += kThreads) {\n      acc_t value;",
        "threadIdx.x; i < numel - 1; i += kThreads) {\n      acc_t value;",
        "test_values.py",
    ),
    Fault(
        "cuda: NaN lost under a zero target, sums of half types",
        KL,
        "0.0f * math::at_least(x, -1.0f)",
        "0.0f",
        "test_kl_div.py",
    ),
    Fault(
        "cuda: log(0) weighed by a zero target, sums of half types",
        KL,
        "0.0f * math::at_least(x, -1.0f)",
        "0.0f * x",
        "test_kl_div.py",
    ),
    Fault(
        "cuda: offset of int32",
        "csrc/kernels/elementwise.cu",
        "const acc_t x = load_operand<acc_t>(args.input, offsets[0]);\n"
        "    const acc_t t = load_operand<acc_t>(args.target, offsets[1]);\n"
        "    const acc_t weight = element_weight<acc_t>(args, offsets[2]);\n"
        "    const acc_t value",
        "const acc_t x = load_operand<acc_t>(args.input, static_cast<int32_t>(offsets[0]));\n"
        "    const acc_t t = load_operand<acc_t>(args.target, offsets[1]);\n"
        "    const acc_t weight = element_weight<acc_t>(args, offsets[2]);\n"
        "    const acc_t value",
        "test_offsets.py",
    ),
    Fault(
        "cuda: each broadcast copy of a weight in the denominator",
        "csrc/kernels/elementwise.cu",
        "finalize.weight_copies = args.weight_copies;",
        "finalize.weight_copies = 1;",
        "test_mse_loss.py",
    ),
    Fault(
        "cuda: kept gradient taken for right whatever grad_output is",
        "csrc/kernels/elementwise.cu",
        "if (kept_is_right(args)) {\n    return;\n  }\n  const bool full_grad_output",
        "if (args.kept) {\n    return;\n  }\n  const bool full_grad_output",
        "test_kept_gradients.py",
    ),
    Fault(
        "cuda: mean of cross_entropy not divided",
        "csrc/kernels/cross_entropy.cu",
        "finalize.denominator_is_weight = true;",
        "finalize.denominator_is_weight = false;",
        "test_cross_entropy.py",
    ),
    Fault(
        "cuda: last class behind the vectors of a row",
        "csrc/kernels/cross_entropy_team_rows.cuh",
        "for (int c = vectors * kSize + lane; c < num_classes; c += team) {",
        "for (int c = vectors * kSize + lane; c < num_classes - 1; c += team) {",
        "test_cross_entropy.py test_cross_entropy_kernels.py test_values.py",
    ),
    Fault(
        "cuda: gradient of the last class behind the vectors of a row",
        "csrc/kernels/cross_entropy_team_rows.cuh",
        "for (int c = num_classes / kSize * kSize + lane; c < num_classes; c += team) {",
        "for (int c = num_classes / kSize * kSize + lane; c < num_classes - 1; c += team) {",
        "test_cross_entropy.py test_cross_entropy_kernels.py test_values.py",
    ),
    Fault(
        "cuda: the last invalid target instead of the first",
        "csrc/kernels/cross_entropy_targets.cuh",
        "atomicMin(first, static_cast<unsigned long long>(row));",
        "*first = static_cast<unsigned long long>(args.rows.numel - 1);",
        "test_cross_entropy.py",
    ),
    Fault(
        "cuda: ignored rows of strided classes keep a gradient",
        "csrc/kernels/cross_entropy_strided.cuh",
        "target.has_loss() ? gradient.of_logit(x, c) : gradient.without_loss()",
        "gradient.of_logit(x, c)",
        "test_cross_entropy.py test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: images, the last class left in the class index's place",
        "csrc/kernels/cross_entropy_columns.cu",
        "result = from_acc<scalar_t>(at_index[i]);",
        "(void)result;",
        "test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: last element of a row with an odd number of half types",
        "csrc/kernels/cross_entropy_tile.cu",
        "          last_terms += term(values[0]);",
        "",
        "test_cross_entropy_kernels.py test_cross_entropy.py",
    ),
    Fault(
        "cuda: exp(x) of logits of any size",
        "csrc/kernels/cross_entropy_row.cuh",
        "if (::fabsf(softmax.max) <= kMaxDistance && ",
        "if (",
        "test_cross_entropy_kernels.py test_cross_entropy.py",
    ),
    Fault(
        "cuda: the distance of the class index, rounded",
        "csrc/kernels/plain_rows.cuh",
        "scaled = ::fmaf(scaled, is_max ? -lost : lost, scaled);",
        "",
        "test_cross_entropy_kernels.py test_cross_entropy.py",
    ),
    Fault(
        "cuda: what the fold of partials has in flight, added up but for one",
        "csrc/kernels/grid_reduce.cu",
        "for (int u = 0; u < kUnroll; ++u) {\n      total.combine(loaded[u]);",
        "for (int u = 1; u < kUnroll; ++u) {\n      total.combine(loaded[u]);",
        "test_offsets.py test_values.py",
    ),
    Fault(
        "cuda: the last piece of a long row left out",
        "csrc/kernels/cross_entropy_staged.cu",
        "if (pieces.count > 1 && lane == 0) {",
        "if (pieces.count > 1 && lane == 0 && piece + 1 < pieces.count) {",
        "test_cross_entropy_kernels.py test_cross_entropy.py",
    ),
    Fault(
        "cuda: the mean's denominator before its class indices are there",
        "csrc/kernels/cross_entropy_targets.cuh",
        "  wait_for_previous_kernel();\n  let_next_kernel_start();\n  Partial total;",
        "  let_next_kernel_start();\n  Partial total;",
        "test_cuda.py",
    ),
    Fault(
        "cuda: class indices in bytes before they are there",
        "csrc/kernels/cross_entropy_targets.cuh",
        "  wait_for_previous_kernel();\n  let_next_kernel_start();\n  const auto* const targets",
        "  let_next_kernel_start();\n  const auto* const targets",
        "test_cuda.py",
    ),
    Fault(
        "cuda: few classes, the gradient that forward left whatever grad_output is",
        "csrc/kernels/cross_entropy_few.cu",
        "if (kGradient && kAny && grad_output.is_one(given)) {",
        "if (kGradient && kAny && grad_output.exists()) {",
        "test_kept_gradients.py",
    ),
    Fault(
        "cuda: the last row of a block of float32 rows not loaded",
        "csrc/kernels/cross_entropy_float_rows.cu",
        "const bool loads = n + teams < count && rows[n + teams].index >= 0;",
        "const bool loads = n + teams < count - 1 && rows[n + teams].index >= 0;",
        "test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: the last row of a block of rows of half types not loaded",
        "csrc/kernels/cross_entropy_half_rows.cu",
        "const bool loads = n + 1 < count && rows.index[n + 1] >= 0;",
        "const bool loads = n + 2 < count && rows.index[n + 1] >= 0;",
        "test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: long rows, the first row's logit at the class index for all",
        "csrc/kernels/cross_entropy_long_rows.cu",
        "kProbability ? 0.0f : rows.x_at_index[thread],",
        "kProbability ? 0.0f : rows.x_at_index[0],",
        "test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: split rows, each other row left out",
        "csrc/kernels/cross_entropy_split_rows.cu",
        "rows.next[thread] = lowest_bit(with_loss & ~1u << thread);",
        "rows.next[thread] = lowest_bit(with_loss & ~3u << thread);",
        "test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: probabilities taken to add up to 1",
        "csrc/kernels/cross_entropy_probability_rows.cu",
        "rows.q_sums[n] = state.q_sum;",
        "rows.q_sums[n] = 1;",
        "test_cross_entropy_kernels.py test_cross_entropy.py",
    ),
]


def replaced(text: str, fault: Fault) -> str:
    """`text` with the fault, or the end of the script: the table is to fit the sources."""
    found = text.count(fault.old)
    if found != 1:
        sys.exit(f"planted_faults: {fault.name!r}: its text occurs {found} times in {fault.path}")
    return text.replace(fault.old, fault.new)


def tracked_files() -> list[Path]:
    command = ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\0")
    return [Path(name) for name in names if name and (ROOT / name).is_file()]


def copy_sources(folder: Path) -> None:
    for path in tracked_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, folder / path)


class Builder:
    """Builds the library, without a fault and with one: from the same objects each time."""

    def __init__(self, folder: Path, cuda: bool) -> None:
        self.folder = folder
        self.cuda = cuda
        self.tree = folder / "tree"
        self.clean = folder / "clean"
        self.environment = os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",  # ninja
            "LOSSOPS_CUDA": "1" if cuda else "0",
            "CFLAGS": f"{os.environ.get('CFLAGS', '')} -g0",
            "CXXFLAGS": f"{os.environ.get('CXXFLAGS', '')} -g0",
        }
        if cuda:
            self.environment.setdefault("TORCH_CUDA_ARCH_LIST", "native")
        else:
            self.environment["MAX_JOBS"] = "1"

    def build_clean(self) -> Path:
        copy_sources(self.tree)
        setup = self.tree / "setup.py"
        # A third of the compiler's time. The device code's optimisation is another option.
        optimisation = Fault("optimisation", "setup.py", '"-O3"', '"-O1"', "")
        setup.write_text(replaced(setup.read_text(), optimisation))
        jobs = os.environ.get("MAX_JOBS", str(os.cpu_count() if self.cuda else 2))
        library = self.run("clean", {"MAX_JOBS": jobs})
        shutil.move(self.tree, self.clean)
        return library

    def build(self, fault: Fault) -> Path:
        # With times of files, by which ninja tells what is to be compiled again.
        shutil.copytree(self.clean, self.tree, symlinks=True)
        try:
            path = self.tree / fault.path
            path.write_text(replaced(path.read_text(), fault))
            return self.run(f"fault{FAULTS.index(fault)}")
        finally:
            shutil.rmtree(self.tree)

    def run(self, name: str, more: dict[str, str] | None = None) -> Path:
        done = subprocess.run(
            [sys.executable, "setup.py", "build_ext", "--inplace"],
            cwd=self.tree,
            env=self.environment | (more or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise RuntimeError(f"the build failed ({name}):\n{done.stdout[-6000:]}")
        library = self.folder / f"{name}.so"
        shutil.move(self.tree / LIBRARY, library)
        return library


# The builds with faults are optimised less, and their stack frames are larger.
NEED_OPTIMISATION = ("tests/test_robustness.py::test_threads_with_small_stacks",)


class Outcome(NamedTuple):
    killed: bool
    by: str
    seconds: float


def run_tests(tree: Path, tests: Iterable[str], options: Iterable[str]) -> Outcome:
    """Runs tests until one fails. Anything but tests that pass or fail is an error."""
    start = time.time()
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += [f"--deselect={test}" for test in NEED_OPTIMISATION]
    command += options
    try:
        done = subprocess.run(
            [*command, *(f"tests/{test}" for test in tests)],
            cwd=tree,
            env=os.environ
            | {
                "PYTHONPATH": str(tree / "src"),
                "PYTHONDONTWRITEBYTECODE": "1",  # two faults a second would share a .pyc
                "LOSSOPS_GPU_REPORT": str(tree / "gpu_report.json"),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=TIME_LIMIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(True, "a test that does not end", time.time() - start)
    seconds = time.time() - start
    if done.returncode == 0:
        return Outcome(False, "", seconds)
    if done.returncode < 0:
        where = re.search(r"in (test_\w+)", done.stdout)
        name = signal.Signals(-done.returncode).name
        return Outcome(True, f"{name} in {where[1] if where else 'a test'}", seconds)
    failed = re.search(r"^FAILED tests/(.+?)( - |$)", done.stdout, re.MULTILINE)
    if done.returncode != 1 or failed is None:
        raise RuntimeError(f"pytest ended with {done.returncode}:\n{done.stdout[-6000:]}")
    return Outcome(True, failed[1], seconds)


def has_gpu() -> bool:
    code = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def tests_of(faults: Iterable[Fault], everything: bool) -> list[str]:
    if everything:
        return [""]
    tests = {test for fault in faults for test in fault.tests.split()}
    return sorted(test for test in tests if test.split("::")[0] not in tests - {test})


def run_faults(faults: list[Fault], folder: Path, everything: bool, cuda: bool) -> int:
    """Tests the copy without a fault, then with each. Returns how many survived."""
    builder = Builder(folder / "build", cuda)
    tree = folder / "tested"
    copy_sources(tree)
    options = ["-k", "cuda"] if cuda else []

    def test(library: Path, tests: list[str]) -> Outcome:
        shutil.copy2(library, tree / LIBRARY)
        return run_tests(tree, tests, options)

    start = time.time()
    clean = builder.build_clean()
    print(f"built without a fault in {time.time() - start:.0f} s", flush=True)
    outcome = test(clean, tests_of(faults, everything))
    if outcome.killed:
        sys.exit(f"planted_faults: without a fault, {outcome.by} fails")
    print(f"tested without a fault in {outcome.seconds:.0f} s", flush=True)

    survivors = 0
    pool = ThreadPoolExecutor(1)
    try:
        libraries: dict[str, Future[Path]] = {
            fault.name: pool.submit(builder.build, fault) for fault in faults if fault.compiled
        }
        # Meanwhile those without a build.
        for fault in sorted(faults, key=lambda fault: fault.compiled):
            path = tree / fault.path
            original = path.read_text()
            path.write_text(replaced(original, fault))
            try:
                library = libraries[fault.name].result() if fault.compiled else clean
                outcome = test(library, tests_of([fault], everything))
            except RuntimeError as error:
                outcome = Outcome(False, str(error), 0)
            path.write_text(original)
            survivors += not outcome.killed
            verdict = f"killed by {outcome.by}" if outcome.killed else f"SURVIVED {outcome.by}"
            print(f"{fault.name:<72} {outcome.seconds:5.1f} s  {verdict}", flush=True)
    finally:
        pool.shutdown(cancel_futures=True)
    return survivors


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="*", metavar="GLOB", help="faults by name")
    parser.add_argument("--all", action="store_true", help="the whole suite for each fault")
    parser.add_argument("--cuda", action="store_true", help="the faults of csrc/kernels/ too")
    parser.add_argument("--list", action="store_true", help="print the faults and their tests")
    parser.add_argument("--keep", action="store_true", help="leave the copies behind")
    options = parser.parse_args()
    for fault in FAULTS:
        replaced((ROOT / fault.path).read_text(), fault)
    chosen = [fault for fault in FAULTS if fnmatch.fnmatch(fault.name, options.only)]
    if not chosen:
        parser.error(f"no fault is called {options.only!r}")
    if options.list:
        for fault in chosen:
            print(f"{fault.name:<72} {fault.path}: {fault.tests}")
        return 0

    start = time.time()
    runs = {False: [fault for fault in chosen if not fault.cuda]}
    not_run = [fault for fault in chosen if fault.cuda]
    if options.cuda and not_run and has_gpu():
        runs[True] = not_run
        not_run = []
    folder = Path(tempfile.mkdtemp(prefix="planted-faults-"))
    survivors = tested = 0
    try:
        for cuda, faults in runs.items():
            if faults:
                place = folder / ("cuda" if cuda else "cpu")
                survivors += run_faults(faults, place, options.all, cuda)
                tested += len(faults)
    finally:
        if options.keep:
            print(f"the copies are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    for fault in not_run:
        reason = "there is no GPU" if options.cuda else "needs --cuda and a GPU"
        print(f"{fault.name:<72} not run: {reason}")
    print(f"{tested} faults in {time.time() - start:.0f} s: {survivors} survived")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
