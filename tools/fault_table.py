"""Planted faults, by place: what goes wrong at which marker, and which tests should notice.

A test of the suite holds this table and the markers in the sources together.
"""

from __future__ import annotations

from fault_markers import Fault

# One partial sum for each range of chunks that a thread takes, instead of one for each chunk.
SUMS_BY_RANGES_OF_THREADS = """\
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
        const_cast<void*>(static_cast<const void*>(&run)));"""

FAULTS = [
    # ---------------------------------------------------------------------------------- csrc/losses
    Fault(
        "mse: gradient of input without its factor 2",
        "mse-input",
        "acc_t(2) * ",
        "",
        "test_mse_loss.py test_values.py",
    ),
    Fault(
        "mse: gradient of target with input's sign",
        "mse-target",
        "t - x",
        "x - t",
        "test_mse_loss.py test_values.py",
    ),
    Fault(
        "kl_div: zero target against an input of -inf",
        "kl-zero-target",
        "input == -math::infinity<acc_t>() ? acc_t(0) : ",
        "",
        "test_kl_div.py",
    ),
    Fault(
        "kl_div: NaN lost under a zero target",
        "kl-zero-target",
        "input == -math::infinity<acc_t>() ? acc_t(0) : acc_t(0) * input",
        "acc_t(0)",
        "test_kl_div.py",
    ),
    Fault(
        "kl_div: log_target forgotten by the gradient of input",
        "kl-log-target",
        "math::exp(target)",
        "target",
        "test_kl_div.py test_values.py",
    ),
    Fault(
        "kl_div: gradient of target without + 1",
        "kl-target",
        " + acc_t(1)",
        "",
        "test_kl_div.py test_values.py",
    ),
    Fault(
        "kl_div: gradient of a zero target is a number",
        "kl-target",
        "math::quiet_nan<acc_t>()",
        "acc_t(0)",
        "test_kl_div.py",
    ),
    Fault(
        "cross_entropy: smoothing adds no share to each class",
        "ce-smoothed",
        " + smoothing_per_class",
        "",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: -inf taken off a row that begins with it",
        "softmax-shift",
        "max == -math::infinity<acc_t>() ? acc_t(0) : max",
        "max",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: sum of coefficients forgotten by the loss",
        "ce-loss",
        "q_sum * ",
        "",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: gradient at the class index with the wrong sign",
        "ce-at-index",
        "-factor",
        "factor",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: coefficient forgotten where a class outweighs all others",
        "ce-outweighs",
        "q_sum - q",
        "q_sum",
        "test_cross_entropy.py",
    ),
    # -------------------------------------------------------------------- csrc, what backends share
    Fault(
        "cross_entropy: gradient of a mean not divided",
        "ce-mean-scale",
        " / static_cast<acc_t>(args.mean_terms[0])",
        "",
        "test_cross_entropy.py",
    ),
    Fault(
        "elementwise: grad_output ignored",
        "grad-output",
        "grad_output.data == nullptr ? acc_t(1) : load_operand<acc_t>(grad_output, offset)",
        "acc_t(1)",
        "test_autograd.py::test_scalar_grad_output",
    ),
    Fault(
        "mse: gradient of a weighted mean divided by the count",
        "weighted-mean-scale",
        "args.weight.data != nullptr ? args.mean_terms[0] : args.denominator",
        "args.denominator",
        "test_mse_loss.py",
    ),
    Fault(
        "kept gradient taken for right whatever grad_output is",
        "kept-is-right",
        " && load_operand<double>(args.grad_output, 0) == 1",
        "",
        "test_kept_gradients.py",
    ),
    Fault(
        "layouts: dimensions merged by the strides of one operand",
        "merged-dimensions",
        "n < count_",
        "n < 1",
        "test_values.py::test_layouts",
    ),
    Fault(
        "more elements than can be counted are accepted",
        "numel-overflow",
        "empty || !overflow",
        "true",
        "test_robustness.py",
    ),
    Fault(
        "bfloat16: cut off instead of rounded",
        "bfloat16-rounding",
        " + 0x7fffu + ((bits >> 16) & 1u)",
        "",
        "test_mse_loss.py",
    ),
    Fault(
        "bfloat16: halves rounded up, not to even",
        "bfloat16-rounding",
        "0x7fffu + ((bits >> 16) & 1u)",
        "0x8000u",
        "test_mse_loss.py",
    ),
    # ------------------------------------------------------------------------------------- csrc/cpu
    Fault(
        "cpu: padding of a block's last vector added to a sum",
        "cpu-padding",
        "std::fill(values + count, values + padded(count), acc_t(0));",
        "",
        "test_values.py",
    ),
    Fault(
        "cpu: last vector of a block lost by a sum",
        "cpu-last-vector",
        "j < width",
        "j + kVector < width",
        "test_values.py",
    ),
    Fault("cpu: offsets of int32", "cpu-offsets", "int64_t", "int32_t", "test_offsets.py"),
    Fault(
        "cpu: sums by ranges of threads",
        "cpu-chunks",
        "",
        SUMS_BY_RANGES_OF_THREADS,
        "test_determinism.py::test_thread_counts_are_equal",
    ),
    Fault(
        "mse: a weighted mean's own share kept in the gradient of weight",
        "weight-mean-share",
        " - scalars_.mean_share",
        "",
        "test_mse_loss.py",
    ),
    Fault(
        "mse: each broadcast copy of a weight in the denominator",
        "weight-copies",
        " / args.weight_copies",
        "",
        "test_mse_loss.py",
    ),
    Fault(
        "half types: rounded before the mean divides",
        "mean-divides",
        "result /= args.denominator;",
        "store_operand(args.output, 0, result);\n"
        "    result = load_operand<double>(args.output, 0) / args.denominator;",
        "test_mse_loss.py test_kl_div.py",
    ),
    Fault(
        "broadcast gradient: the last of several partial sums lost",
        "broadcast-splits",
        "plan.splits",
        "std::max<int64_t>(plan.splits - 1, 1)",
        "test_values.py::test_broadcast_gradients_of_many_terms",
    ),
    Fault(
        "cross_entropy: mean over ignored rows too",
        "ce-mean-weight",
        "targets.without_loss[j] == acc_t(0) ? targets.has_loss[j] : acc_t(1)",
        "acc_t(1)",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: mean without the class weights",
        "ce-mean-terms",
        "fold_partials(scratch + 1, chunks, 2)",
        "static_cast<double>(args.rows.numel)",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: class index C accepted",
        "ce-index-range",
        "< classes",
        "<= classes",
        "test_cross_entropy.py::test_target_out_of_range_on_the_cpu",
    ),
    Fault(
        "cross_entropy: gradient at a class index that begins a block",
        "ce-index-in-block",
        "index >= 0",
        "index > 0",
        "test_cross_entropy.py test_cross_entropy_kernels.py test_values.py",
    ),
    Fault(
        "cross_entropy: sum not rescaled when the maximum rises",
        "ce-sum-rescaled",
        "sum[r].scale(math::exp(-rise));",
        "",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: coefficients of classes before a rise left behind",
        "ce-dot-moved",
        "* rise",
        "* 0",
        "test_cross_entropy.py test_values.py",
    ),
    Fault(
        "cross_entropy: gradient of probabilities forgets the smoothing",
        "ce-unsmoothed",
        " * coefficients.unsmoothed()",
        "",
        "test_autograd.py::test_grad_output_of_any_layout",
    ),
    Fault(
        "cross_entropy: the last of several partial sums of weight's gradient lost",
        "ce-weight-splits",
        "plan.splits",
        "std::max<int64_t>(plan.splits - 1, 1)",
        "test_values.py::test_sizes",
    ),
    Fault(
        "cross_entropy: confident rows from a sum that holds 1",
        "ce-few-bits",
        "!= 0",
        "< 0",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: ignored rows of few classes keep a gradient",
        "ce-few-ignored",
        "!rows.targets.all_have_loss",
        "count < 0",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: probability 0 times an infinite logit",
        "ce-zero-probability",
        "q[i] == acc_t(0) ? acc_t(0) : term",
        "term",
        "test_cross_entropy.py",
    ),
    Fault(
        "cross_entropy: distances of a confident row, rounded",
        "ce-distances",
        "math::exp_times(acc_t(1), difference, lost)",
        "math::exp(difference + acc_t(0) * lost)",
        "test_cross_entropy.py",
    ),
    # --------------------------------------------------------------------------------- csrc/kernels
    Fault(
        "cuda: NaN lost under a zero target, sums of half types",
        "kl-half-zero-target",
        " * math::at_least(x, -1.0f)",
        "",
        "test_kl_div.py",
    ),
    Fault(
        "cuda: log(0) weighed by a zero target, sums of half types",
        "kl-half-zero-target",
        "math::at_least(x, -1.0f)",
        "x",
        "test_kl_div.py",
    ),
    Fault(
        "cuda: mean of cross_entropy not divided",
        "ce-cuda-mean",
        "true",
        "false",
        "test_cross_entropy.py",
    ),
    Fault(
        "cuda: last class behind the vectors of a row",
        "team-singles",
        "c < num_classes",
        "c < num_classes - 1",
        "test_cross_entropy.py test_cross_entropy_kernels.py test_values.py",
    ),
    Fault(
        "cuda: gradient of the last class behind the vectors of a row",
        "team-gradient-singles",
        "c < num_classes",
        "c < num_classes - 1",
        "test_cross_entropy.py test_cross_entropy_kernels.py test_values.py",
    ),
    Fault(
        "cuda: the last invalid target instead of the first",
        "first-invalid-target",
        "atomicMin(first, static_cast<unsigned long long>(row))",
        "*first = static_cast<unsigned long long>(args.rows.numel - 1)",
        "test_cross_entropy.py",
    ),
    Fault(
        "cuda: ignored rows of strided classes keep a gradient",
        "strided-ignored",
        "target.has_loss() ? gradient.of_logit(x, c) : gradient.without_loss()",
        "gradient.of_logit(x, c)",
        "test_cross_entropy.py test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: images, the last class left in the class index's place",
        "columns-at-index",
        "result = from_acc<scalar_t>(at_index[i])",
        "(void)result",
        "test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: last element of a row with an odd number of half types",
        "tile-odd-element",
        "last_terms += term(values[0]);",
        "",
        "test_cross_entropy_kernels.py test_cross_entropy.py",
    ),
    Fault(
        "cuda: exp(x) of logits of any size",
        "exp-of-logits",
        "::fabsf(softmax.max) <= kMaxDistance && ",
        "",
        "test_cross_entropy_kernels.py test_cross_entropy.py",
    ),
    Fault(
        "cuda: the distance of the class index, rounded",
        "distance-at-index",
        "scaled = ::fmaf(scaled, is_max ? -lost : lost, scaled);",
        "",
        "test_cross_entropy_kernels.py test_cross_entropy.py",
    ),
    Fault(
        "cuda: what the fold of partials has in flight, added up but for one",
        "fold-in-flight",
        "u = 0",
        "u = 1",
        "test_offsets.py test_values.py",
    ),
    Fault(
        "cuda: the last piece of a long row left out",
        "staged-last-piece",
        "lane == 0",
        "lane == 0 && piece + 1 < pieces.count",
        "test_cross_entropy_kernels.py test_cross_entropy.py",
    ),
    Fault(
        "cuda: the mean's denominator before its class indices are there",
        "denominator-waits",
        "wait_for_previous_kernel();",
        "",
        "test_cuda.py",
    ),
    Fault(
        "cuda: class indices in bytes before they are there",
        "byte-indices-wait",
        "wait_for_previous_kernel();",
        "",
        "test_cuda.py",
    ),
    Fault(
        "cuda: few classes, the gradient that forward left whatever grad_output is",
        "few-kept",
        "is_one(given)",
        "exists()",
        "test_kept_gradients.py",
    ),
    Fault(
        "cuda: the last row of a block of float32 rows not loaded",
        "float-rows-load",
        "n + teams < count",
        "n + teams < count - 1",
        "test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: the last row of a block of rows of half types not loaded",
        "half-rows-load",
        "n + 1 < count",
        "n + 2 < count",
        "test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: long rows, the first row's logit at the class index for all",
        "long-rows-index",
        "x_at_index[thread]",
        "x_at_index[0]",
        "test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: split rows, each other row left out",
        "split-rows-next",
        "~1u",
        "~3u",
        "test_cross_entropy_kernels.py",
    ),
    Fault(
        "cuda: probabilities taken to add up to 1",
        "probability-sums",
        "state.q_sum",
        "1",
        "test_cross_entropy_kernels.py test_cross_entropy.py",
    ),
    # ------------------------------------------------------------------ csrc/kernels/elementwise.cu
    Fault(
        "cuda: last element of a tail",
        "elementwise-tail",
        "i < numel",
        "i < numel - 1",
        "test_values.py",
    ),
    Fault(
        "cuda: offset of int32",
        "elementwise-offset",
        "offsets[0]",
        "static_cast<int32_t>(offsets[0])",
        "test_offsets.py",
    ),
    Fault(
        "cuda: each broadcast copy of a weight in the denominator",
        "elementwise-weight-copies",
        "= args.weight_copies",
        "= 1",
        "test_mse_loss.py",
    ),
    Fault(
        "cuda: kept gradient taken for right whatever grad_output is",
        "elementwise-kept",
        "kept_is_right(args)",
        "args.kept",
        "test_kept_gradients.py",
    ),
]
