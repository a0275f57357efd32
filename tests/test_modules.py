"""The modules: drop-ins for torch's, with the functions' results."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
from losses import LOSS_IDS, LOSSES, VARIANT_IDS, VARIANTS, Loss, Sample, Variant, evaluate
from numerics import same_bits

import lossops

per_variant = pytest.mark.parametrize(("loss", "variant"), VARIANTS, ids=VARIANT_IDS)
per_loss = pytest.mark.parametrize("loss", LOSSES, ids=LOSS_IDS)


def module_and_sample(loss: Loss, sample: Sample) -> tuple[torch.nn.Module, Sample]:
    """The module with the sample's options, and the sample without them."""
    options = dict(sample.options)
    tensors = dict(sample.tensors)
    if "weight" in tensors:
        options["weight"] = tensors.pop("weight")
    names = tuple(name for name in sample.differentiable if name in tensors)
    return loss.module(**options), Sample(sample.name, tensors, {}, names)


@per_loss
def test_is_a_subclass_of_torchs(loss: Loss) -> None:
    assert issubclass(loss.module, loss.torch_module)
    assert loss.module is not loss.torch_module
    assert getattr(lossops, loss.module.__name__) is loss.module
    assert getattr(lossops.nn, loss.module.__name__) is loss.module
    assert getattr(lossops.functional, loss.name) is loss.function
    assert loss.module.__name__ == loss.torch_module.__name__
    assert loss.module.__doc__
    assert loss.function.__doc__


@per_loss
def test_arguments_are_the_functions(loss: Loss) -> None:
    """With the same defaults, weight included."""
    function = inspect.signature(loss.function).parameters
    module = inspect.signature(loss.module).parameters
    expected = {n: p.default for n, p in function.items() if n not in ("input", "target")}
    assert {n: p.default for n, p in module.items()} == expected
    for deprecated in ("size_average", "reduce"):
        with pytest.raises(TypeError, match=deprecated):
            loss.module(**{deprecated: True})


@per_variant
def test_result_is_the_functions(loss: Loss, variant: Variant, device: str) -> None:
    for reduction in loss.reductions:
        sample = variant.sample((6, 9), device=device, reduction=reduction)
        expected = evaluate(loss.function, sample)
        module, operands = module_and_sample(loss, sample)
        result = evaluate(module.to(device), operands)
        assert same_bits(result.value, expected.value), sample.name
        for name, gradient in result.gradients.items():
            assert same_bits(gradient, expected.gradients[name]), f"{sample.name}: {name}"


@per_loss
def test_repr_is_torchs(loss: Loss) -> None:
    assert repr(loss.module()) == repr(loss.torch_module())


@per_variant
def test_copies(loss: Loss, variant: Variant) -> None:
    """deepcopy, pickle and torch.save keep the options and the weight."""
    sample = variant.sample((6, 9), reduction=loss.reductions[-1])
    module, operands = module_and_sample(loss, sample)
    expected = operands.call(module)
    saved = io.BytesIO()
    torch.save(module, saved)
    saved.seek(0)
    for other in (
        copy.copy(module),
        copy.deepcopy(module),
        pickle.loads(pickle.dumps(module)),
        torch.load(saved, weights_only=False),
    ):
        assert type(other) is loss.module
        assert same_bits(operands.call(other), expected)


def test_weight_is_a_buffer(device: str) -> None:
    weight = torch.tensor([1.0, 2.0, 4.0])
    module = lossops.CrossEntropyLoss(weight=weight)
    assert list(module.state_dict()) == list(torch.nn.CrossEntropyLoss(weight=weight).state_dict())
    assert same_bits(module.state_dict()["weight"], weight)
    assert list(module.parameters()) == []
    assert [name for name, _ in module.named_buffers()] == ["weight"]

    # to and from torch's module
    other = torch.nn.CrossEntropyLoss(weight=torch.ones(3))
    other.load_state_dict(module.state_dict())
    assert same_bits(other.weight, weight)
    again = lossops.CrossEntropyLoss(weight=torch.zeros(3))
    again.load_state_dict(other.state_dict())

    x, t = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    assert same_bits(again(x, t), lossops.cross_entropy(x, t, weight))
    moved = again.to(device, torch.float64)
    assert moved.weight.device.type == device
    assert moved.weight.dtype == torch.float64
    assert moved(x.to(device, torch.float64), t.to(device)).dtype == torch.float64
    assert torch.nn.CrossEntropyLoss().state_dict() == lossops.CrossEntropyLoss().state_dict()


def test_options_are_attributes() -> None:
    """torch's modules keep their options as attributes, which programs read and set."""
    ce = lossops.CrossEntropyLoss(ignore_index=7, reduction="sum", label_smoothing=0.25)
    assert (ce.ignore_index, ce.reduction, ce.label_smoothing) == (7, "sum", 0.25)
    kl = lossops.KLDivLoss(reduction="batchmean", log_target=True, log_input=False)
    assert (kl.reduction, kl.log_target, kl.log_input) == ("batchmean", True, False)
    assert lossops.MSELoss(reduction="none").reduction == "none"
    x, t = torch.rand(3, 4), torch.rand(3, 4)
    for module in (ce, kl, lossops.MSELoss(reduction="none")):
        module.reduction = "mean"
        assert module(x, t if module is not ce else t.argmax(1)).shape == ()


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
@per_loss
def test_replaces_torchs_in_a_training_step(loss: Loss, device: str) -> None:
    sample = loss.variants[0].sample((16, 8), device=device)
    losses = []
    for module in (loss.module(), loss.torch_module()):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data = torch.randn(16, 8, device=device)
        values = []
        for _ in range(5):
            optimizer.zero_grad()
            output = model(data)
            if loss.name == "kl_div":
                output = output.log_softmax(-1)
            value = module(output, sample.tensors["target"])
            value.backward()
            optimizer.step()
            values.append(value.detach())
        losses.append(torch.stack(values))
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    assert losses[0][-1] < losses[0][0]


def test_linear_cross_entropy_loss_shows_what_is_not_the_default() -> None:
    module = lossops.LinearCrossEntropyLoss(4, 6, softcap=30.0, token_weight=torch.ones(8))
    assert "softcap=30.0, token_weight=Tensor(8,)" in repr(module)
    assert "temperature" not in repr(module)


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [
        (ValueError, {"temperature": 0.0}),
        (TypeError, {"return_lse": 1}),
        (TypeError, {"max_workspace_bytes": "3"}),
        (ValueError, {"max_workspace_bytes": 0}),
        (TypeError, {"accum_dtype": "float32"}),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_linear_cross_entropy_loss_checks_when_it_is_made(
    kind: type[Exception], wrong: dict[str, object]
) -> None:
    with pytest.raises(kind, match=next(iter(wrong))):
        lossops.LinearCrossEntropyLoss(4, 6, **wrong)
