"""fuse_head: models of transformers, of random small weights, against themselves without it."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from ranks import run_two_ranks
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lossops

transformers = pytest.importorskip("transformers", reason="these tests need transformers")

from lossops.integrations import transformers as fused  # noqa: E402
from lossops.integrations._deferred import DeferredLogits  # noqa: E402
from lossops.integrations.transformers import fuse_head  # noqa: E402

CLASSES = 97
SMALL = {
    "vocab_size": CLASSES,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": CLASSES,
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 32,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# The class of a model ahead of "ForCausalLM", and its configuration.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama-tied": ("Llama", {**SMALL, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", SMALL),
    "qwen3": ("Qwen3", {**SMALL, "head_dim": 8}),
    # 0.05: the softcap bends the logits of random weights, and is no power of 2
    "gemma2": ("Gemma2", {**SMALL, "head_dim": 8, "final_logit_softcapping": 0.05}),
    "gpt2": ("GPT2", GPT2),
    "granite": ("Granite", {**SMALL, "logits_scaling": 0.3}),
    "cohere": ("Cohere", {**SMALL, "logit_scale": 3.7}),
}
MIXTURE = {**SMALL, "moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    yield
    transformers.logging.set_verbosity(level)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The keywords of each call of linear_cross_entropy that a fused model makes."""
    found: list[dict[str, Any]] = []

    def recorded(*args: Any, **kwargs: Any) -> Any:
        found.append(kwargs)
        return lossops.linear_cross_entropy(*args, **kwargs)

    monkeypatch.setattr(fused, "linear_cross_entropy", recorded)
    return found


def make(name: str, suffix: str = "ForCausalLM", **more: Any) -> Any:
    family, config = MODELS[name]
    return build(family, "LMHeadModel" if family == "GPT2" else suffix, {**config, **more})


def build(family: str, suffix: str, config: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    made = getattr(transformers, f"{family}Config")(**config)
    return getattr(transformers, f"{family}{suffix}")(made)


def make_batch(tokens: int = 9, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, CLASSES, (3, tokens), generator=generator)
    labels = ids.clone()
    labels[0, 4:] = -100
    return {"input_ids": ids, "labels": labels}


def gradients(model: Any) -> dict[str, Tensor]:
    return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    """Within rtol of the largest element of each tensor."""
    assert found.keys() == expected.keys() and len(found) > 0
    for name, wanted in expected.items():
        atol = rtol * wanted.abs().max().item() + 1e-12
        torch.testing.assert_close(
            found[name], wanted, rtol=0, atol=atol, msg=lambda text, n=name: f"{n}: {text}"
        )


# ---------------------------------------------------------------- calls of a model


KEYWORDS: dict[str, Callable[[Tensor], dict[str, Any]]] = {
    "mean": lambda labels: {},
    "num_items": lambda labels: {"num_items_in_batch": 31},
    "num_items-tensor": lambda labels: {"num_items_in_batch": torch.tensor(31)},
    "shift_labels": lambda labels: {"shift_labels": labels.roll(-2, 1)},
    "ignore_index": lambda labels: {"ignore_index": 5},
    "tuple": lambda labels: {"return_dict": False},
}


@pytest.mark.parametrize("keywords", KEYWORDS)
@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients(
    name: str, keywords: str, calls: list[dict[str, Any]], device: str
) -> None:
    plain, model = make(name).to(device), make(name).to(device)
    fuse_head(model)
    batch = {key: value.to(device) for key, value in make_batch().items()}
    if keywords == "ignore_index":
        batch["labels"][batch["labels"] == -100] = 5
    batch |= KEYWORDS[keywords](batch["labels"])
    expected, found = plain(**batch), model(**batch)
    assert len(calls) == 1
    expected, found = (x if isinstance(x, tuple) else (x.loss, x.logits) for x in (expected, found))
    assert type(found[1]) is DeferredLogits and found[1].shape == expected[1].shape
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=0)
    expected[0].backward()
    found[0].backward()
    assert_same(gradients(model), gradients(plain), rtol=1e-5)
    torch.testing.assert_close(found[1].detach(), expected[1], rtol=1e-6, atol=1e-7)


def test_logit_maps_are_exact(calls: list[dict[str, Any]]) -> None:
    """A softcap of c is logits / c, tanh, logits * c: c * (1 / c) is not 1 for every c."""
    for name, logit_scale, softcap in (
        ("llama", 1.0, None),
        ("gemma2", 1.0, 0.05),
        ("granite", 1 / 0.3, None),
        ("cohere", 3.7, None),
    ):
        model = make(name)
        with fuse_head(model):
            model(**make_batch())
        keywords = calls.pop()
        assert (keywords["logit_scale"], keywords["softcap"]) == (logit_scale, softcap), name


def test_options_reach_the_head(calls: list[dict[str, Any]], device: str) -> None:
    options = {"accum_dtype": torch.bfloat16, "max_workspace_bytes": 4096}
    batch = {key: value.to(device) for key, value in make_batch().items()}
    for more in ({}, {"logits_dtype": torch.float32}):
        model = make("llama").to(device).bfloat16()
        fuse_head(model, **options, **more)
        assert model(**batch).loss.dtype == torch.float32
        found = calls.pop()
        assert {name: found[name] for name in options | more} == options | more
    with pytest.raises(TypeError, match="logits_dtype"):
        fuse_head(make("llama"), logits_dtype="float32")  # type: ignore[arg-type]


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
def test_bfloat16(name: str, autocast: bool, device: str) -> None:
    """The loss is float32, as transformers' is, and nearer to that of the model in float32."""
    exact, plain, model = (make(name, tie_word_embeddings=False).to(device) for _ in range(3))
    fuse_head(model)
    batch = {key: value.to(device) for key, value in make_batch().items()}
    for each in (exact, plain, model):
        each.bfloat16()
    exact.float()
    if autocast:
        plain.float()
        model.float()
    results = []
    for each in (exact, plain, model):
        with torch.autocast(device, torch.bfloat16, enabled=autocast and each is not exact):
            output = each(**batch)
        assert output.loss.dtype is torch.float32
        output.loss.backward()
        results.append((output.loss, each.get_output_embeddings().weight.grad, output.logits))
    (loss, grad, _), (_, of_plain, plains), (found, of_fused, deferred) = results
    torch.testing.assert_close(found, loss, rtol=2e-3, atol=0)
    assert deferred.dtype is plains.dtype is torch.bfloat16
    torch.testing.assert_close(deferred.float(), plains.float(), rtol=2**-8, atol=1e-6)
    assert of_fused.dtype is of_plain.dtype
    error = (of_fused.float() - grad).norm() / grad.norm()
    assert error < 1.5 * (of_plain.float() - grad).norm() / grad.norm() + 1e-3


class _Largest(TorchDispatchMode):
    """The largest number of elements that an operator returns."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(each, Tensor) and each.untyped_storage().nbytes() > 0:
                held = each.untyped_storage().nbytes() // each.element_size()
                self.elements = max(self.elements, held)
        return result


def test_no_tensor_of_all_logits() -> None:
    """Outside of linear_cross_entropy, whose workspace has tests of its own."""
    largest = {}
    batch = make_batch(tokens=128)
    for fuse in (False, True):
        model = make("gemma2", vocab_size=1000)
        if fuse:
            fuse_head(model)
        with _Largest() as mode:
            model(**batch).loss.backward()
        largest[fuse] = mode.elements
    assert largest[False] == 3 * 128 * 1000
    assert largest[True] < largest[False] // 2


def test_calls_without_labels_are_as_before(calls: list[dict[str, Any]]) -> None:
    plain, model = make("gemma2"), make("gemma2")
    fuse_head(model)
    ids = make_batch()["input_ids"]
    assert type(model(ids).logits) is Tensor
    torch.testing.assert_close(model(ids).logits, plain(ids).logits, rtol=0, atol=0)
    options = {"max_new_tokens": 4, "do_sample": False}
    assert model.generate(ids, **options).equal(plain.generate(ids, **options))
    assert calls == []
    position = list(inspect.signature(plain.forward).parameters).index("labels")
    by_position = [ids, *[None] * (position - 1), ids]
    torch.testing.assert_close(model(*by_position).loss, plain(*by_position).loss)
    assert len(calls) == 1


def test_losses_that_are_added_to(calls: list[dict[str, Any]]) -> None:
    """Mixtures of experts add a loss in place."""
    config = {**MIXTURE, "head_dim": 8, "output_router_logits": True, "router_aux_loss_coef": 0.5}
    plain, model = (build("Qwen3Moe", "ForCausalLM", config) for _ in range(2))
    fuse_head(model)
    expected, found = plain(**make_batch()), model(**make_batch())
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    expected.loss.backward()
    found.loss.backward()
    assert_same(gradients(model), gradients(plain), rtol=1e-5)
    assert len(calls) == 1


def test_a_frozen_head_has_no_gradient() -> None:
    model = make("llama")
    fuse_head(model)
    model.lm_head.weight.requires_grad_(False)
    model(**make_batch()).loss.backward()
    assert model.lm_head.weight.grad is None
    assert model.model.embed_tokens.weight.grad is not None


# ---------------------------------------------------------------- logits that are read


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere"])
def test_gradients_of_logits(name: str) -> None:
    """Alone, beside the loss, and by way of a Function, which __torch_function__ does not see."""

    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x * 1)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * ctx.saved_tensors[0] * grad

    uses: list[Callable[[Any], Tensor]] = [
        lambda output: output.logits.logsumexp(-1).mean(),
        lambda output: output.loss + output.logits[..., :3].square().mean(),
        lambda output: output.loss + torch.cat([output.logits, output.logits]).square().mean(),
        lambda output: Square.apply(output.logits).mean(),
    ]
    for use in uses:
        plain, model = make(name), make(name)
        fuse_head(model)
        expected, found = use(plain(**make_batch())), use(model(**make_batch()))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        expected.backward()
        found.backward()
        assert_same(gradients(model), gradients(plain), rtol=1e-5)


def test_logits_behave_as_logits() -> None:
    plain, model = make("gemma2"), make("gemma2")
    fuse_head(model)
    expected, found = plain(**make_batch()).logits, model(**make_batch()).logits
    assert found.shape == expected.shape and len(found) == len(expected)
    assert (found.dtype, found.device, found.requires_grad) == (
        expected.dtype,
        expected.device,
        True,
    )
    assert found._values is None  # nothing has read them
    assert type(found.float()) is DeferredLogits  # accelerate converts what a model returns
    with torch.no_grad():
        assert found.argmax(-1).equal(expected.argmax(-1))
    assert found.read() is found.read() and found.read().requires_grad
    torch.testing.assert_close(found.detach().numpy(), expected.detach().numpy())
    seen = []
    found = model(**make_batch()).logits
    found.register_hook(seen.append)
    found.retain_grad()
    (3 * found.float()).sum().backward()
    assert seen[0].equal(torch.full(expected.shape, 3.0)) and found.grad.equal(seen[0])
    with torch.inference_mode():
        output = model(**make_batch())
        torch.testing.assert_close(output.logits + 0, expected.detach())


def test_logits_of_other_weights_are_not_computed() -> None:
    model = make("llama")
    fuse_head(model)
    early, late = model(**make_batch()), model(**make_batch())
    values = early.logits.sum().item()
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    assert early.logits.sum().item() == values
    for read in (lambda logits: logits.sum(), lambda logits: logits.double().sum()):
        with pytest.raises(
            RuntimeError, match=r"logits of LlamaForCausalLM .* weight .* was changed"
        ):
            read(late.logits)


@pytest.mark.parametrize("cast", ["float", "double"])
def test_casts_of_logits_that_were_read(cast: str) -> None:
    """Values may be changed in place. A cast is of the values, or of their storage itself."""
    results = []
    for fuse in (False, True):
        model = make("llama")
        if fuse:
            fuse_head(model)
        with torch.no_grad():
            early, logits = model(**make_batch()).logits, model(**make_batch()).logits
        cast_early = getattr(early, cast)()  # nothing has read these yet
        early.div_(0.1)
        logits[..., 50:] = -torch.inf
        same = getattr(logits, cast)()
        same.mul_(2)
        results.append([value + 0 for value in (early, cast_early, logits, same)])
    torch.testing.assert_close(results[1], results[0])


def test_logits_have_no_second_derivatives() -> None:
    model = make("llama")
    fuse_head(model)
    logits = model(**make_batch()).logits
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(logits.square().sum(), model.lm_head.weight, create_graph=True)


# ---------------------------------------------------------------- the handle


def test_undoing() -> None:
    model = make("llama")
    cls = type(model)
    handle = fuse_head(model)
    assert type(model) is not cls and type(model).__name__ == cls.__name__
    with pytest.raises(RuntimeError, match="LlamaForCausalLM is fused already"):
        fuse_head(model)
    other = copy.deepcopy(model)
    handle.remove()
    handle.remove()
    assert type(model) is cls and not any("lossops" in name for name in vars(model))
    assert type(model(**make_batch()).logits) is Tensor
    # A copy keeps its own head fused, with its own weights.
    with torch.no_grad():
        other.lm_head.weight.mul_(2)
    output = other(**make_batch())
    assert type(output.logits) is DeferredLogits
    expected = F.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), make_batch()["labels"][:, 1:].flatten()
    )
    torch.testing.assert_close(output.loss, expected)
    with pytest.raises(ZeroDivisionError), fuse_head(model):
        raise ZeroDivisionError
    assert type(model) is cls


def test_an_error_within_a_call_leaves_no_trace() -> None:
    model = make("llama")
    fuse_head(model)
    with pytest.raises(IndexError):
        model(input_ids=torch.full((1, 4), CLASSES), labels=torch.zeros(1, 4, dtype=torch.long))
    assert "forward" not in vars(model.lm_head)
    assert model(**make_batch()).loss.isfinite()


def test_compiled_decoder(calls: list[dict[str, Any]]) -> None:
    """The fused head runs outside of compiled code. The decoder may be compiled."""
    plain, model = make("llama"), make("llama")
    fuse_head(model)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model.model.compile(backend=backend)
    found = torch.compile(model, backend=backend)(**make_batch())
    torch.testing.assert_close(found.loss, plain(**make_batch()).loss, rtol=1e-5, atol=0)
    assert len(calls) == 1 and len(graphs) > 0
    torch._dynamo.reset()


# ---------------------------------------------------------------- what does not fit


class QuantisedLinear(torch.nn.Linear):
    """As those of bitsandbytes, a subclass."""


def with_lora(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["lm_head"]))


def with_saved_module(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(model, config)


def with_quantised_head(model: Any) -> None:
    model.lm_head = QuantisedLinear(16, CLASSES, bias=False)


def with_zero3(model: Any) -> None:
    model.lm_head.weight.ds_id = 0  # DeepSpeed's mark of a partitioned parameter


def with_forward(model: Any) -> None:
    model.lm_head.forward = lambda x: x @ model.lm_head.weight.T


def with_own_loss(model: Any) -> None:
    model.loss_function = lambda logits, labels, **_: logits.sum()


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "lora": (with_lora, "adapter"),
    "modules_to_save": (with_saved_module, "adapter"),
    "quantised": (with_quantised_head, "QuantisedLinear"),
    "zero3": (with_zero3, "ZeRO-3"),
    "forward": (with_forward, "forward was replaced"),
    "loss": (with_own_loss, "ForCausalLMLoss, but is <lambda>"),
    "pre-hook": (lambda m: m.lm_head.register_forward_pre_hook(lambda *_: None) and None, "hook"),
    "hook": (lambda m: m.lm_head.register_forward_hook(lambda *_: None) and None, "hook"),
    "backward-hook": (
        lambda m: m.lm_head.register_full_backward_hook(lambda *_: None) and None,
        "hook",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_when_fused_and_when_called(kind: str) -> None:
    change, message = REFUSED[kind]
    message = f"fuse_head: .*LlamaForCausalLM.*{message}"
    model = make("llama")
    model = change(model) or model
    with pytest.raises(NotImplementedError, match=message):
        fuse_head(model)
    model = make("llama")
    fuse_head(model)
    model = change(model) or model
    with pytest.raises(NotImplementedError, match=message):
        model(**make_batch())


def prepared(model: Any) -> Any:
    """The model as accelerate's prepare leaves it under bf16: its forward is wrapped."""
    accelerate = pytest.importorskip("accelerate")
    state = accelerate.state.AcceleratorState
    state._reset_state(reset_partial_state=True)  # of the process, which others may have set
    model = accelerate.Accelerator(mixed_precision="bf16", cpu=True).prepare(model)
    state._reset_state(reset_partial_state=True)
    return model


def test_casts_have_the_graph_of_their_logits() -> None:
    model = make("llama")
    fuse_head(model)
    logits = model(**make_batch()).logits
    cast, seen = logits.double(), []
    logits.register_hook(seen.append)
    logits.retain_grad()
    (2 * cast).sum().backward()
    assert cast.dtype is torch.float64 and cast._values is not None
    assert seen[0].dtype is torch.float32 and logits.grad.equal(torch.full(logits.shape, 2.0))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            logits = model(**make_batch()).logits
        assert not logits.double().requires_grad
        logits.double().numpy()
        student = torch.zeros(logits.shape, requires_grad=True)
        (student - logits.double()).square().sum().backward()


def test_logits_that_inference_mode_reads_first_have_a_graph() -> None:
    results = []
    for fuse in (False, True):
        model = make("llama")
        if fuse:
            fuse_head(model)
        output = model(**make_batch())
        with torch.inference_mode():
            output.logits.argmax(-1)
        (output.loss + output.logits.square().mean()).backward()
        results.append(gradients(model))
    assert_same(results[1], results[0], rtol=1e-5)


def test_a_forward_without_the_loss_function_is_refused() -> None:
    class Own(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **_: Any) -> Any:
            hidden = self.model(input_ids).last_hidden_state
            return transformers.modeling_outputs.CausalLMOutput(loss=hidden.sum())

    model = Own(make("llama").config)
    fuse_head(model)
    with pytest.raises(NotImplementedError, match="calls no loss function"):
        model(**make_batch())


def test_a_replaced_forward_is_refused_ahead() -> None:
    """A forward that was bound before would never see the fused head."""
    model = prepared(make("llama"))
    with pytest.raises(NotImplementedError, match="forward of this LlamaForCausalLM is replaced"):
        fuse_head(model)
    model = make("llama")
    handle = fuse_head(model)
    model = prepared(model)
    assert type(model(**make_batch()).logits) is DeferredLogits
    handle.remove()
    assert type(model(**make_batch()).logits) is Tensor
    fuse_head(model)  # the wrapper has the forward that was fused
    assert type(model(**make_batch()).logits) is DeferredLogits


def test_replicas_are_refused() -> None:
    model = make("llama")
    fuse_head(model)
    weight = model.lm_head._parameters.pop("weight")
    model.lm_head.weight = weight.detach().clone()  # as nn.DataParallel does
    with pytest.raises(NotImplementedError, match="DataParallel"):
        model(**make_batch())


def test_models_that_do_more_with_their_logits_are_refused() -> None:
    batch = make_batch()
    model = build("GPT2", "DoubleHeadsModel", {**GPT2, "num_labels": 1})
    fuse_head(model)
    with pytest.raises(
        NotImplementedError, match=r"GPT2DoubleHeadsModel does not fit.*__getitem__"
    ):
        model(**batch)
    bart = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2}
    model = build("Bart", "ForCausalLM", {"vocab_size": CLASSES, "decoder_ffn_dim": 16, **bart})
    fuse_head(model)
    with pytest.raises(NotImplementedError, match=r"BartForCausalLM does not fit.*view"):
        model(**batch)
    with pytest.raises(TypeError, match="must be a PreTrainedModel, but is Linear"):
        fuse_head(torch.nn.Linear(3, 4))
    model = make("llama")
    fuse_head(model)
    model.config.vocab_size = CLASSES + 1
    with pytest.raises(NotImplementedError, match="98 classes, and the head has 97"):
        model(**batch)


# ---------------------------------------------------------------- trainers


def texts(count: int = 24) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        tokens = torch.randint(3, CLASSES, (12,), generator=generator)
        labels = torch.where(torch.arange(12) < 3 + 5 * index % 10, tokens, -100)
        found.append({"input_ids": tokens, "labels": labels})
    return found


ARGUMENTS = {
    "max_steps": 20,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "learning_rate": 0.5,
    "optim": "sgd",  # Adam would amplify the rounding of gradients that are 0
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": "none",
    "disable_tqdm": True,
    "use_cpu": True,
}


def trained(model: Any, path: Path, **more: Any) -> tuple[list[float], Any]:
    pytest.importorskip("accelerate")
    options = {key: more.pop(key) for key in list(more) if key in ("compute_metrics",)}
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(output_dir=str(path), **{**ARGUMENTS, **more}),
        train_dataset=texts(),
        eval_dataset=texts(6),
        **options,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer


def assert_same_training(found: Any, expected: Any, steps: int = 20) -> None:
    assert len(found[0]) == len(expected[0]) == steps
    torch.testing.assert_close(
        torch.tensor(found[0]), torch.tensor(expected[0]), rtol=1e-5, atol=1e-6
    )
    weights, wanted = (x[1].model.state_dict() for x in (found, expected))
    assert_same(weights, wanted, rtol=1e-4)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "llama-tied"])
def test_trainer(name: str, tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    expected = trained(make(name), tmp_path)
    model = make(name)
    fuse_head(model)
    assert_same_training(trained(model, tmp_path), expected)
    assert len(calls) == 40
    assert expected[0][0] != expected[0][-1]


def test_trainer_in_bfloat16(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    """accelerate converts the outputs to float32, which must not read the logits."""
    expected, _ = trained(make("llama"), tmp_path, bf16=True)
    model = make("llama")
    fuse_head(model)
    found, _ = trained(model, tmp_path, bf16=True)
    assert len(calls) == 40
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=2e-3, atol=0)


def test_trainer_with_metrics_and_smoothing(tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    """Metrics read the logits. For label smoothing the trainer calls the model without labels."""

    def metrics(prediction: Any) -> dict[str, float]:
        return {"top": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}

    results = []
    for fuse in (False, True):
        model = make("gemma2")
        if fuse:
            fuse_head(model)
        trainer = trained(model, tmp_path, max_steps=3, compute_metrics=metrics)[1]
        results.append(trainer.evaluate())
    assert results[0]["eval_top"] == results[1]["eval_top"]
    assert results[1]["eval_loss"] == pytest.approx(results[0]["eval_loss"], rel=1e-5)
    assert len(calls) > 6
    calls.clear()
    smooth = {"label_smoothing_factor": 0.2, "max_steps": 5}
    expected = trained(make("gemma2"), tmp_path, **smooth)
    model = make("gemma2")
    fuse_head(model)
    assert_same_training(trained(model, tmp_path, **smooth), expected, steps=5)
    assert calls == []


@pytest.mark.parametrize("order", ["fused-first", "adapter-first"])
def test_lora(order: str, tmp_path: Path, calls: list[dict[str, Any]]) -> None:
    peft = pytest.importorskip("peft")

    def adapted(model: Any) -> Any:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config)

    expected = trained(adapted(make("llama")), tmp_path)
    model = make("llama")
    if order == "fused-first":
        fuse_head(model)
    model = adapted(model)
    if order == "adapter-first":
        fuse_head(model)
    assert_same_training(trained(model, tmp_path), expected)
    assert len(calls) == 40


# ---------------------------------------------------------------- several processes

PROCESSES = """
import sys, warnings
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import lossops
from lossops.integrations import transformers as fused

warnings.simplefilter("error", UserWarning)
transformers.logging.set_verbosity_error()
dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))
calls = []

def counted(*args, **kwargs):
    calls.append(kwargs)
    return lossops.linear_cross_entropy(*args, **kwargs)

fused.linear_cross_entropy = counted

def make(tied):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=97, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=tied,
    ))

def wrap(model, kind):
    if kind.startswith("ddp"):
        return DistributedDataParallel(model, find_unused_parameters=kind == "ddp-unused")
    decoder, head = model.model, model.lm_head
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh)
    if kind == "fsdp-tail":  # as accelerate does
        tail = [decoder.norm, head]
        if model.config.tie_word_embeddings:
            tail.insert(1, decoder.embed_tokens)
        fully_shard(tail, mesh=mesh, reshard_after_forward=False)
    if kind == "fsdp-head":
        fully_shard(head, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)

def weights(model):
    return {
        name.removeprefix("module."): x.full_tensor() if hasattr(x, "full_tensor") else x.detach()
        for name, x in model.named_parameters()
    }

def batches():
    generator = torch.Generator().manual_seed(5 + rank)
    for step in range(4):
        ids = torch.randint(97, (2, 9), generator=generator)
        labels = ids.clone()
        labels[0, : 4 * rank] = -100
        yield {"input_ids": ids, "labels": labels}

def train(tied, kind, fuse):
    model = make(tied)
    calls.clear()
    if fuse == "before":
        fused.fuse_head(model)
    model = wrap(model, kind)
    if fuse == "after":
        fused.fuse_head(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step, batch in enumerate(batches()):
        output = model(**batch)
        loss = output.loss
        if step == 2:  # the logits beside the loss, and alone
            loss = loss + output.logits.square().mean()
        if step == 3:
            loss = output.logits.logsumexp(-1).mean()
        loss.backward()
        found.append(output.loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        output = model(**batch)
        found += [output.loss, output.logits.sum()]
    assert len(calls) == (0 if fuse is None else 5)
    return torch.stack(found), weights(model)

for tied in (False, True):
    for kind in ("ddp", "ddp-unused", "fsdp", "fsdp-tail"):
        expected = train(tied, kind, None)
        for fuse in ("before", "after"):
            losses, found = train(tied, kind, fuse)
            torch.testing.assert_close(losses, expected[0], rtol=1e-5, atol=1e-5)
            for name, wanted in expected[1].items():
                torch.testing.assert_close(found[name], wanted, rtol=1e-4, atol=1e-5)
        print(f"rank {rank}: {kind} is the same, tied: {tied}", flush=True)

# FSDP2 casts what a module returns. The logits stay uncomputed.
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
found = []
for fuse in (False, True):
    model = make(False)
    if fuse:
        fused.fuse_head(model)
    model = fully_shard(model, mesh=mesh, mp_policy=policy)
    calls.clear()
    output = model(**next(batches()))
    output.loss.backward()
    assert len(calls) == fuse and (type(output.logits) is not torch.Tensor) == fuse
    assert output.loss.dtype == output.logits.dtype == torch.float32
    found.append([output.loss.detach(), *(x.grad.full_tensor() for x in model.parameters())])
for unfused, own in zip(*found):
    torch.testing.assert_close(own, unfused, rtol=0.05, atol=0.01 * unfused.abs().max().item())
print(f"rank {rank}: mixed precision is the same", flush=True)

model = make(False)
fused.fuse_head(model)
model = wrap(model, "fsdp-head")
try:
    model(**next(batches()))
except NotImplementedError as error:
    print(f"rank {rank}: {error}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
def test_two_processes(tmp_path: Path) -> None:
    """DDP and FSDP2, fused before and after wrapping, with and without tied weights."""
    (tmp_path / "train.py").write_text(PROCESSES)
    printed = run_two_ranks(tmp_path / "train.py", timeout=180)
    for rank in (0, 1):
        assert printed.count(f"rank {rank}: ") == 10, printed
        assert (
            f"rank {rank}: fuse_head: the weight of LlamaForCausalLM's head is sharded" in printed
        )
