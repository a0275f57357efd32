"""lossops on a torch that lacks the private names it uses: the same results, by public ways.

Child processes remove the names, one by one and all together, before they import lossops. What
torch itself cannot do without a name is left out there, and is counted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from losses import LOSS_IDS, LOSSES, Loss

import lossops
from lossops import _privates

CHILD = """
import json, sys, warnings

warnings.simplefilter("ignore")
import torch
import torch._dynamo
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

for name in sys.argv[1:]:
    *path, last = name.split(".")[1:]
    holder = torch
    for part in path:
        holder = getattr(holder, part)
    delattr(holder, last)

import lossops

# What torch.library builds around an operator may need what was removed.
@torch.library.custom_op("without::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x

square.register_fake(torch.empty_like)
square.register_autograd(
    lambda ctx, grad: 2 * grad * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0]),
)

torch.manual_seed(0)
x = torch.randn(6, 5)
probabilities = torch.rand(6, 5).softmax(1)
classes = torch.randint(5, (6,))
losses = (
    ("mse_loss", probabilities), ("kl_div", probabilities), ("cross_entropy", classes),
)

def leaf(values):
    return values.clone().requires_grad_()

def step(call, target, reduction="mean", second=False):
    def run():
        a = leaf(x)
        t = leaf(target) if second and target.is_floating_point() else target
        value = call(a * 1, t, reduction=reduction)
        wanted = [a, t] if t.requires_grad else [a]
        return [value.detach(), *torch.autograd.grad((value * 3).sum(), wanted)]
    return run

def under_autocast(call, target):
    def run():
        with torch.autocast("cpu", torch.bfloat16):
            value = call(leaf(x).bfloat16(), target)
        assert value.dtype == torch.float32
        return [value.detach()]
    return run

def create_graph(call, target):
    def run():
        a = leaf(x)
        (first,) = torch.autograd.grad(call(a * a, target), a, create_graph=True)
        return [first.detach(), *torch.autograd.grad(first.square().sum(), a)]
    return run

def batched(call, target):
    def run():
        a = leaf(x)
        grads = torch.tensor([1.0, 2.0])
        return torch.autograd.grad(call(a, target), a, grads, is_grads_batched=True)
    return run

def tangent(call, target):
    def run():
        with forward_ad.dual_level():
            return [forward_ad.unpack_dual(call(forward_ad.make_dual(x, x * x), target)).tangent]
    return run

def compiled(call, target):
    def run():
        torch.compiler.reset()
        a = leaf(x)
        square(leaf(x)).sum().backward()
        value = torch.compile(
            lambda a, t: call(square(a), t), fullgraph=True, backend="aot_eager"
        )(a, target)
        return [value.detach(), *torch.autograd.grad(value, a)]
    return run

def recorded(call, target):
    def run():
        a = leaf(x)
        square(leaf(x)).sum().backward()
        with FlopCounterMode(display=False):
            return torch.autograd.grad(call(a, target), a)
    return run

def traced(call, target):
    def run():
        graph = torch.jit.trace(lambda a: call(a, target), (x,))
        a = leaf(x)
        square(leaf(x)).sum().backward()
        return torch.autograd.grad(graph(a), a)
    return run

def made(call, target):
    def run():
        a = leaf(x)
        square(leaf(x)).sum().backward()
        return torch.autograd.grad(make_fx(lambda a: call(a, target))(x)(a), a)
    return run

class Same(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(a):
        return a.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad

def functional(transform):
    return lambda call, target: lambda: [transform(lambda a: call(Same.apply(a), target))]

def mapped(call, target):
    def run():
        square(leaf(x)).sum().backward()
        return [torch.func.vmap(lambda a: call(Same.apply(a), target))(torch.stack([x, 2 * x]))]
    return run

checks = {
    "step": step,
    "step_of_rows": lambda call, target: step(call, target, "none"),
    "step_of_target": lambda call, target: step(call, target, "sum", second=True),
    "autocast": under_autocast,
    "create_graph": create_graph,
    "batched": batched,
    "tangent": tangent,
    "grad": functional(lambda f: torch.func.grad(f)(x)),
    "vmap": mapped,
    "functionalize": lambda call, target: lambda: [
        torch.func.functionalize(lambda a: call(a, target))(x)
    ],
    "compiled": compiled,
    "recorded": recorded,
    "traced": traced,
    "made": made,
}
report = {}

def check(what, ours, theirs):
    try:
        expected = theirs()
    except Exception as error:
        report[what] = f"torch cannot: {type(error).__name__}: {error}"[:200]
        return
    try:
        for found, exact in zip(ours(), expected, strict=True):
            torch.testing.assert_close(found, exact, rtol=1e-2 if "autocast" in what else 1e-5,
                                       atol=1e-2 if "autocast" in what else 1e-6)
        report[what] = "right"
    except Exception as error:
        report[what] = f"wrong: {type(error).__name__}: {error}"[:400]

for name, target in losses:
    ours, theirs = getattr(lossops, name), getattr(F, name)
    for what, make in checks.items():
        check(f"{what} {name}", make(ours, target), make(theirs, target))
    def patched(name=name, target=target):
        with lossops.patched():
            return step(getattr(F, name), target)()
    check(f"patch {name}", patched, step(theirs, target))
    module = {"mse_loss": "MSELoss", "kl_div": "KLDivLoss"}.get(name, "CrossEntropyLoss")
    ours_module, theirs_module = getattr(lossops, module)(), getattr(torch.nn, module)()
    check(
        f"module {name}",
        step(lambda a, t, reduction: ours_module(a, t), target),
        step(lambda a, t, reduction: theirs_module(a, t), target),
    )
    check(f"op {name}", step(getattr(torch.ops.lossops, name), target), step(theirs, target))

counts = {name: lossops.patch_report()[name]["lossops"] for name, _ in losses}
assert all(count == 1 for count in counts.values()), lossops.patch_report()

matrix = torch.randn(5, 5)

def head(a, t, reduction="mean"):
    return lossops.linear_cross_entropy(a, matrix, t, reduction=reduction)

def composed_head(a, t, reduction="mean"):
    return F.cross_entropy(F.linear(a, matrix), t, reduction=reduction)

for what, make in checks.items():
    # A torch.autocast that lacks what was removed may not have left.
    torch.set_autocast_enabled("cpu", False)
    check(f"{what} head", make(head, classes), make(composed_head, classes))

def overwritten():
    a = leaf(x)
    logits = a * 2
    version = logits._version
    value = lossops.cross_entropy(logits, classes, inplace_backward=True)
    grads = torch.autograd.grad(value, a)
    assert logits._version == version + 1
    return grads

def not_overwritten():
    a = leaf(x)
    return torch.autograd.grad(F.cross_entropy(a * 2, classes), a)

check("inplace_backward", overwritten, not_overwritten)
print(json.dumps(report))
"""

# Those of a class in C, which cannot be removed: torch that lacks them is pretended below.
_FIXED = [name for name in _privates.LOOKED_FOR if name.startswith("torch.autograd.Function.")]
NAMES = [name for name in _privates.LOOKED_FOR if name not in _FIXED]
# Training needs none of the privates, whatever other parts of torch need of them.
ALWAYS = ("step", "step_of_rows", "step_of_target", "patch", "op")


def run_without(*names: str) -> dict[str, str]:
    """What came of each check in a process that has removed `names`."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *names], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    wrong = {what: said for what, said in report.items() if said.startswith("wrong")}
    assert not wrong, wrong
    for loss in LOSSES:
        for what in ALWAYS:
            assert report[f"{what} {loss.name}"] == "right", report
    assert report["step head"] == report["step_of_rows head"] == "right", report
    assert report["inplace_backward"] == "right", report
    return report


def test_with_all_of_them() -> None:
    """So the checks are ones that torch passes."""
    assert set(run_without().values()) == {"right"}


@pytest.mark.parametrize("name", NAMES)
def test_without_one(name: str) -> None:
    run_without(name)


def test_without_all() -> None:
    run_without(*NAMES)


def test_names_are_looked_for_in_one_module() -> None:
    """And nowhere else is anything private of torch's."""
    assert len(set(NAMES)) == len(NAMES) >= 11
    package = Path(lossops.__file__).parent
    private = re.compile(
        r"\btorch(?:\.\w+)*\._[a-zA-Z]\w*|forward_ad\._\w+|\._(?:base|cdata|schema)\b"
    )
    for file in [*package.glob("*.py"), *package.glob("_ops/*.py"), *package.glob("_heads/*.py")]:
        if file.name != "_privates.py":
            assert not private.findall(file.read_text()), file


@pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)
def test_schemas_are_read_alike(loss: Loss) -> None:
    """By the private attribute, and from the text that an error quotes."""
    parts = ["", "_forward", "_backward", "_value", "_forward_gradient", "_backward_kept"]
    if loss.elementwise:
        parts += ["_forward_gradients", "_backward_kept_gradients"]
    for part in parts:
        overload = getattr(torch.ops.lossops, f"{loss.name}{part}").default
        arguments, results = _privates.schema_of(overload)
        again, results_again = _privates.parse_schema(_privates._declaration(overload))
        assert list(again.items()) == list(arguments.items())
        if part in ("_forward", "_forward_gradient", "_forward_gradients"):
            assert results_again == results and len(results) >= 2


SHORT = """
import sys
import torch, lossops
from lossops import _privates
from lossops._ops import autograd

# A torch whose contexts have no such attributes, and whose Functions have no class of nodes.
_privates.set_on_nodes = lambda function, **attributes: False
_privates.short_apply = lambda function: function.apply
autograd.CONTEXT_HAS_ATTRIBUTES = False
from lossops._ops.losses import CROSS_ENTROPY, MSE_LOSS
from lossops._ops import calling

x = torch.randn(6, 5)
for registered, target in ((MSE_LOSS, torch.rand(6, 5)), (CROSS_ENTROPY, torch.arange(6) % 5)):
    loss = registered.loss
    slow = object.__new__(autograd.Differentiable)
    slow.loss, slow.gradients = loss, registered.derivatives.gradients
    slow.apply = _privates.short_apply(autograd._make_function(slow))
    slow.apply_keeping = _privates.short_apply(autograd._make_keeping_function(slow))
    call = calling.make_call(slow)
    for reduction in ("mean", "sum", "none"):
        options = registered.options(reduction=reduction)
        for both in {False, target.is_floating_point()}:
            gradients = []
            for way in (call, registered.call):
                leaves = [x.clone().requires_grad_()]
                if both:
                    leaves.append(target.clone().requires_grad_())
                value = way(leaves[0], leaves[-1] if both else target, None, options)
                gradients.append(torch.autograd.grad((value * 3).sum(), leaves))
            assert all(map(torch.equal, *gradients)), (loss.name, reduction, both)
"""


def test_without_attributes_of_contexts() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SHORT], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
