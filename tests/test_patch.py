"""patch(): torch.nn.functional's losses in code that nobody edited, and the way back."""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.nn.functional as F
from losses import LOSS_IDS, LOSSES, VARIANTS, Loss, Variant, evaluate
from numerics import same_bits
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import lossops
from lossops import patching

NAMES = ("cross_entropy", "kl_div", "mse_loss")
ORIGINALS = {name: getattr(F, name) for name in NAMES}
# What torch's functions do not have.
OWN_OPTIONS = {"log_input", "inplace_backward"}
PER_TORCH = [
    (loss, variant) for loss, variant in VARIANTS if not OWN_OPTIONS & variant.options.keys()
]
per_loss = pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)
per_variant = pytest.mark.parametrize(
    ("loss", "variant"), PER_TORCH, ids=[f"{loss.name}-{v.name}" for loss, v in PER_TORCH]
)
pytestmark = pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")


def assert_unpatched() -> None:
    for name, original in ORIGINALS.items():
        assert getattr(F, name) is original


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    assert_unpatched()
    yield
    lossops.unpatch()
    assert_unpatched()


def counted(name: str) -> tuple[int, int]:
    report = lossops.patch_report()[name]
    return report["lossops"], sum(report["torch"].values())


def new_reasons(name: str, before: dict[str, Any]) -> set[str]:
    after = lossops.patch_report()[name]["torch"]
    return {
        reason for reason, count in after.items() if count > before[name]["torch"].get(reason, 0)
    }


@per_variant
def test_functions_are_ours(loss: Loss, variant: Variant, device: str) -> None:
    """Values and gradients have lossops' bits; every call is counted as its own."""
    for reduction in loss.reductions:
        sample = variant.sample((33, 65), device=device, reduction=reduction)
        expected = evaluate(loss.function, sample)
        ours, theirs = counted(loss.name)
        with lossops.patched():
            result = evaluate(getattr(F, loss.name), sample)
        assert counted(loss.name) == (ours + 1, theirs)
        assert same_bits(result.value, expected.value)
        for name, gradient in expected.gradients.items():
            assert same_bits(result.gradients[name], gradient)


@per_loss
def test_modules_are_ours(loss: Loss, device: str) -> None:
    """Also those that were made before."""
    module = loss.torch_module()
    sample = loss.variants[0].sample((6, 9), device=device)
    operands = (sample.tensors["input"], sample.tensors["target"])
    ours, theirs = counted(loss.name)
    with lossops.patched():
        value = module(*operands)
        assert same_bits(copy.deepcopy(module)(*operands), value)
    assert counted(loss.name) == (ours + 2, theirs)
    assert same_bits(value, loss.function(*operands))


def test_arguments_by_position() -> None:
    x, t = torch.randn(6, 5), torch.randint(5, (6,))
    w = torch.rand(5)
    with lossops.patched():
        value = F.cross_entropy(x, t, w, None, 2, None, "sum", 0.1)
    options: dict[str, Any] = {"ignore_index": 2, "reduction": "sum", "label_smoothing": 0.1}
    assert same_bits(value, lossops.cross_entropy(x, t, w, **options))
    with lossops.patched():
        assert same_bits(
            F.mse_loss(x, x + 1, None, None, "none"), torch.ones(6, 5).copy_((x - (x + 1)) ** 2)
        )
        assert same_bits(
            F.kl_div(x, x, None, None, "sum", True),
            lossops.kl_div(x, x, reduction="sum", log_target=True),
        )


def test_signatures_are_kept() -> None:
    with lossops.patched():
        for name, original in ORIGINALS.items():
            assert getattr(F, name) is not original
            assert inspect.signature(getattr(F, name)) == inspect.signature(original)
            assert getattr(F, name).__doc__ == original.__doc__


def test_on_and_off() -> None:
    lossops.patch()
    lossops.patch()
    imported_while_patched = F.mse_loss
    assert imported_while_patched is not ORIGINALS["mse_loss"]
    with lossops.patched(), lossops.patched():
        pass
    assert F.mse_loss is imported_while_patched
    lossops.unpatch()
    assert_unpatched()
    before = lossops.patch_report()
    assert imported_while_patched(torch.ones(3), torch.zeros(3)) == 1  # torch's again
    assert lossops.patch_report() == before

    @lossops.patched()
    def step() -> Tensor:
        assert F.mse_loss is not ORIGINALS["mse_loss"]
        raise KeyError("in the block")

    with pytest.raises(KeyError):
        step()
    assert_unpatched()
    with lossops.patched():
        lossops.unpatch()  # undoes patch(), not the block
        assert F.mse_loss is not ORIGINALS["mse_loss"]


def test_others_may_patch_too() -> None:
    """Somebody else's function is what we fall back on, and stays where it came after ours."""
    seen = []

    def other(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs)
        return ORIGINALS["mse_loss"](*args, **kwargs)

    try:
        F.mse_loss = other
        with lossops.patched():
            F.mse_loss(torch.ones(3), torch.zeros(3))
            assert not seen
            F.mse_loss(torch.ones(3), torch.zeros(3), size_average=True)
            assert len(seen) == 1
        assert F.mse_loss is other
        F.mse_loss = ORIGINALS["mse_loss"]
        lossops.patch()
        F.mse_loss = other
        lossops.unpatch()
        assert F.mse_loss is other
    finally:
        F.mse_loss = ORIGINALS["mse_loss"]


def test_mocks_around_and_across() -> None:
    """mock.patch puts back what it found: also where a block has ended or begun since."""
    x, t = torch.ones(3), torch.zeros(3)
    seen = []

    def other(*args: Any, **kwargs: Any) -> Tensor:
        seen.append(kwargs)
        return ORIGINALS["mse_loss"](*args, **kwargs)

    mocked = mock.patch.object(F, "mse_loss", other)
    with mocked:
        with lossops.patched():
            F.mse_loss(x, t)
        assert not seen and F.mse_loss is other
    assert_unpatched()

    block = lossops.patched()
    mocked.start()
    block.__enter__()
    mocked.stop()  # takes the block's function away
    F.mse_loss(x, t)
    block.__exit__(None, None, None)
    assert_unpatched()

    block = lossops.patched()
    block.__enter__()
    mocked.start()
    block.__exit__(None, None, None)
    assert F.mse_loss is other
    mocked.stop()  # puts the function of a block back that has ended
    ours, theirs = counted("mse_loss")
    assert F.mse_loss(x, t) == 1
    assert counted("mse_loss") == (ours, theirs)
    with lossops.patched():
        F.mse_loss(x, t)
        F.mse_loss(x, t, size_average=True)
    assert counted("mse_loss") == (ours + 1, theirs + 1)
    assert_unpatched()


@pytest.mark.filterwarnings("ignore:size_average and reduce args")
def test_what_torch_answers() -> None:
    """The same results as without the patch, counted with the reason."""
    x, t = torch.randn(4, 5), torch.randint(5, (4,))

    class Marked(Tensor):
        pass

    calls: dict[str, Any] = {
        "torch has deprecated": lambda: F.cross_entropy(x, t, size_average=False),
        "label_smoothing is no number from 0": lambda: F.cross_entropy(x, t, label_smoothing=-0.5),
        "label_smoothing is no number": lambda: F.cross_entropy(
            x,
            t,
            label_smoothing=torch.tensor(0.25),  # type: ignore[arg-type]
        ),
        "input is torch.int64": lambda: F.cross_entropy(t[:0, None], x[:0, :1], reduction="sum"),
        "weight is torch.complex64": lambda: F.cross_entropy(x, x, x[0].to(torch.complex64)),
        "input is a Marked": lambda: F.cross_entropy(x.as_subclass(Marked), t),
        "input is on meta": lambda: F.cross_entropy(x.to("meta"), t.to("meta")),
        "torch.func": lambda: torch.func.hessian(lambda a: F.cross_entropy(a, t))(x),
    }
    for reason, call in calls.items():
        expected = call()
        before = lossops.patch_report()
        with lossops.patched():
            found = call()
        assert type(found) is type(expected)
        assert found.is_meta or torch.equal(found, expected), reason
        (new,) = new_reasons("cross_entropy", before)
        assert reason in new, new


def test_what_is_refused_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("not that\none")

    monkeypatch.setitem(patching._LOSSES, "mse_loss", refuse)
    before = lossops.patch_report()
    with lossops.patched():
        assert F.mse_loss(torch.ones(3), torch.zeros(3)) == 1
    assert new_reasons("mse_loss", before) == {"RuntimeError: not that"}


def test_reasons_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those with a shape in them would take more and more memory."""
    monkeypatch.setitem(patching._fallbacks, "cross_entropy", Counter())
    x, t = torch.randn(4, 5), torch.randint(5, (4,))
    kinds = [type(f"Kind{n}", (Tensor,), {}) for n in range(149)]
    with lossops.patched():
        for kind in (*kinds, kinds[7]):
            F.cross_entropy(x.as_subclass(kind), t)
    reasons = lossops.patch_report()["cross_entropy"]["torch"]
    assert len(reasons) == 101
    assert reasons["other reasons"] == 49
    assert reasons["input is a Kind7"] == 2


def test_forward_mode_is_torchs() -> None:
    """By way of lossops, which asks torch."""
    x, t = torch.randn(4, 5), torch.randn(4, 5)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        expected = torch.autograd.forward_ad.unpack_dual(F.mse_loss(dual, t)).tangent
        with lossops.patched():
            found = torch.autograd.forward_ad.unpack_dual(F.mse_loss(dual, t)).tangent
    assert found is not None and expected is not None
    torch.testing.assert_close(found, expected)


def test_errors_are_torchs() -> None:
    """With torch's type and words, and nothing of ours before them."""
    x = torch.randn(4, 5)
    calls: tuple[Any, ...] = (
        lambda: F.mse_loss(x, torch.randn(3)),
        lambda: F.cross_entropy(x, torch.zeros(3, dtype=torch.long)),
        lambda: F.kl_div(x, x, reduction="average"),
        lambda: F.mse_loss(x),
        lambda: F.mse_loss(x, x, nothing=1),
        lambda: F.mse_loss(x, x, None, None, "mean", None, 7),
        lambda: F.mse_loss(x, x, target=x),
        lambda: F.mse_loss(x, x, None, size_average=None),
    )
    for call in calls:
        with pytest.raises(Exception) as expected:  # noqa: PT011 (whatever torch raises)
            call()
        with lossops.patched(), pytest.raises(expected.type) as found:
            call()
        assert str(found.value) == str(expected.value)
        assert found.value.__context__ is None


def test_class_index_out_of_range() -> None:
    with lossops.patched(), pytest.raises(IndexError, match="7"):
        F.cross_entropy(torch.randn(2, 5), torch.tensor([0, 7]))


def test_tables_of_torch_functions() -> None:
    """Classes find their function by torch's, which they may have noted before the patch."""

    class Tagged:
        @classmethod
        def __torch_function__(
            cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> str | None:
            return next((name for name, known in ORIGINALS.items() if known is function), None)

    class Quantity(Tensor):
        __torch_function__ = Tagged.__torch_function__  # type: ignore[assignment]

    x = torch.randn(4, 5)
    for tagged in (Tagged(), x.as_subclass(Quantity)):
        with lossops.patched():
            for name in NAMES:
                theirs = counted(name)[1]
                assert getattr(F, name)(x, tagged) == name
                assert counted(name)[1] == theirs + 1


def test_gradients_of_gradients() -> None:
    """Second derivatives are torch's own: by what was there before the patch."""
    x, t = torch.randn(4, 5, dtype=torch.float64, requires_grad=True), torch.rand(4, 5).double()

    def second(loss: Any) -> Tensor:
        (first,) = torch.autograd.grad(loss(x, t), x, create_graph=True)
        (found,) = torch.autograd.grad(first.square().sum(), x)
        return found

    for name in ("mse_loss", "cross_entropy"):
        expected = second(ORIGINALS[name])
        with lossops.patched():
            torch.testing.assert_close(second(getattr(F, name)), expected)


def test_default_device_and_other_modes() -> None:
    """A mode of torch sees torch's function once, and lossops answers inside it."""
    ours, theirs = counted("mse_loss")
    torch.set_default_device("cpu")
    try:
        with lossops.patched():
            F.mse_loss(torch.ones(3), torch.zeros(3))
    finally:
        torch.set_default_device(None)
    assert counted("mse_loss") == (ours + 1, theirs)


@pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")
@per_loss
def test_compiled(loss: Loss, device: str) -> None:
    """Into one graph, with our operator in it; and torch's once the patch is gone."""
    torch.compiler.reset()
    sample = loss.variants[0].sample((6, 9), device=device)
    graphs: list[set[str]] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    def step(x: Tensor, t: Tensor) -> Tensor:
        return 2 * getattr(F, loss.name)(x * 0.5, t, reduction="sum")

    compiled = torch.compile(step, fullgraph=True, backend=backend)
    operands = (sample.tensors["input"], sample.tensors["target"])
    with lossops.patched():
        assert same_bits(compiled(*operands), step(*operands))
    assert any("lossops" in target for target in graphs[-1]), graphs
    assert same_bits(compiled(*operands), step(*operands))
    assert not any("lossops" in target for target in graphs[-1]), graphs


def test_threads() -> None:
    """No call is lost from the counts."""
    ours, theirs = counted("mse_loss")
    x, t = torch.randn(10), torch.randn(10)

    def work(_: int) -> None:
        for _ in range(200):
            F.mse_loss(x, t)

    with lossops.patched(), ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert counted("mse_loss") == (ours + 1600, theirs)


def test_model_that_nobody_edited(device: str) -> None:
    """A training step of a model that computes its loss inside: the same losses as without."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(16, 7)
            self.criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

        def forward(self, x: Tensor, t: Tensor) -> Tensor:
            logits = self.layer(x)
            loss: Tensor = self.criterion(logits, t) + F.mse_loss(logits, torch.zeros_like(logits))
            return loss

    torch.manual_seed(0)
    x = torch.randn(32, 16, device=device)
    t = torch.randint(7, (32,), device=device)
    models = [Model().to(device)]
    models.append(copy.deepcopy(models[0]))
    losses: list[list[float]] = [[], []]
    for i, model in enumerate(models):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(5):
            if i:
                with lossops.patched():
                    loss = model(x, t)
            else:
                loss = model(x, t)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[i].append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


COMPILED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "torch.func": lambda x, t: torch.func.grad(lambda a: F.cross_entropy(a, t))(x),
    "smoothing": lambda x, t: F.cross_entropy(x, t, label_smoothing=-0.1),  # torch takes it for 0
    "uint16": lambda x, t: F.mse_loss(x, x.to(torch.uint16)),
    "complex-weight": lambda x, t: F.cross_entropy(x, x, x[0].to(torch.complex64)),
    "complex-elements": lambda x, t: F.mse_loss(x, x + 1, weight=x.to(torch.complex64)),
    "integers": lambda x, t: F.cross_entropy(t[:0, None], x[:0, :1], reduction="sum"),
    "numpy": lambda x, t: F.cross_entropy(x, t, ignore_index=numpy.int64(1)),  # ours takes it
}


@pytest.mark.parametrize("function", COMPILED.values(), ids=COMPILED)
def test_compiled_code_falls_back_too(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    """What eager code leaves to torch, compiled code does."""
    x, t = torch.rand(4, 3), torch.tensor([0, 1, 2, 0])
    expected = function(x, t)
    torch.compiler.reset()
    with lossops.patched():
        torch.testing.assert_close(torch.compile(function, backend="eager")(x, t), expected)


@per_loss
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_in_a_checkpoint(loss: Loss, use_reentrant: bool, device: str) -> None:
    """A recomputation that has what it needs is ended by an exception, which is not ours."""
    sample = loss.variants[0].sample((6, 9), device=device)
    x, t = sample.tensors["input"], sample.tensors["target"]

    def gradient() -> Tensor:
        y = x.detach().clone().requires_grad_()
        step = checkpoint(lambda a: getattr(F, loss.name)(a * 2, t), y, use_reentrant=use_reentrant)
        (found,) = torch.autograd.grad(step, y) if not use_reentrant else (None,)
        if found is None:
            step.backward()
            found = y.grad
        assert isinstance(found, Tensor)
        return found

    expected = gradient()
    theirs = counted(loss.name)[1]
    with lossops.patched():
        torch.testing.assert_close(gradient(), expected)
    assert counted(loss.name)[1] == theirs
