"""TRL's trainers with the head of lossops, against themselves with TRL's own."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from test_transformers import (
    ARGUMENTS,
    assert_same,
    gradients,
    make,
    make_batch,
    prepared,
    texts,
)

transformers = pytest.importorskip("transformers", reason="these tests need transformers")
trl = pytest.importorskip("trl", reason="these tests need trl")
datasets = pytest.importorskip("datasets")

add_trls_head = pytest.importorskip("trl.trainer").add_fused_lm_head

from lossops.integrations import trl as ours  # noqa: E402
from lossops.integrations.transformers import fuse_head  # noqa: E402

OUTPUTS = {
    "log_probs": ("log_probs",),
    "entropy": ("log_probs", "entropy"),
    "all": ("log_probs", "entropy", "is_top1"),
}


@pytest.mark.parametrize("outputs", OUTPUTS)
@pytest.mark.parametrize("name", ["llama", "gemma2", "granite", "cohere"])
def test_values_and_gradients(name: str, outputs: str) -> None:
    batch = make_batch()
    shifted = {"shift_labels": batch["labels"].roll(-1, 1)}
    for more in ({}, {"num_items_in_batch": 29}, shifted, {**shifted, "labels": None}):
        results = []
        for add in (add_trls_head, ours.add_fused_lm_head):
            model = make(name)
            add(model, temperature=0.7, outputs=OUTPUTS[outputs])
            found = model(**{**batch, **more}, fused_lm_head=True)
            loss = found.loss + (found.log_probs.exp() * 0.1).sum()
            if found.entropy is not None:
                loss = loss + 0.1 * found.entropy.sum()
            loss.backward()
            results.append((found, gradients(model)))
        (expected, wanted), (found, grads) = results
        assert found.label_mask.equal(expected.label_mask)
        for key in ("loss", "log_probs", "entropy", "is_top1"):
            assert (key in found) == (key in expected)
            if key in expected:
                torch.testing.assert_close(
                    found[key].float(), expected[key].float(), rtol=1e-5, atol=1e-6
                )
        assert_same(grads, wanted, rtol=1e-5)


def test_undoing() -> None:
    model = make("llama")
    add_trls_head(model)
    before = model.forward
    with ours.add_fused_lm_head(model) as handle:
        with pytest.raises(RuntimeError, match="fused already"):
            ours.add_fused_lm_head(model)
        other = copy.deepcopy(model)
        assert model(**make_batch(), fused_lm_head=True).log_probs.shape == (3, 8)
        torch.testing.assert_close(model(**make_batch()).loss, make("llama")(**make_batch()).loss)
    handle.remove()
    assert model.forward == before and type(model) is transformers.LlamaForCausalLM
    with torch.no_grad():
        other.lm_head.weight.zero_()
    found = other(**make_batch(), fused_lm_head=True)
    assert found.loss.item() == pytest.approx(torch.tensor(97.0).log().item())


def test_undoing_of_what_accelerate_wrapped() -> None:
    expected = make("llama")(**make_batch()).loss
    for add_first in (False, True):
        model = make("llama")
        if add_first:
            add_trls_head(model)
        handle = ours.add_fused_lm_head(model)
        model = prepared(model)
        handle.remove()
        loss = model(**make_batch()).loss
        assert not loss.equal(expected)  # autocast is still there
        torch.testing.assert_close(loss, expected, rtol=1e-2, atol=0)
        if add_first:
            assert model(**make_batch(), fused_lm_head=True).log_probs.shape == (3, 8)


def test_calls_by_position_and_without_labels() -> None:
    model, batch = make("llama"), make_batch()
    ours.add_fused_lm_head(model)
    with pytest.raises(ValueError, match="needs labels"):
        model(batch["input_ids"], fused_lm_head=True)
    position = [batch["input_ids"], None, None, None, None, batch["labels"]]
    found, expected = model(*position, fused_lm_head=True), model(**batch, fused_lm_head=True)
    assert found.log_probs.equal(expected.log_probs)


def test_refusals() -> None:
    model = make("llama")
    model.forward = functools.partial(type(model).forward, model)
    with pytest.raises(NotImplementedError, match="is replaced"):
        ours.add_fused_lm_head(model)
    model = make("llama")
    add_trls_head(model)
    before = model.forward
    with pytest.raises(NotImplementedError, match=r"lossops\.integrations\.trl"):
        fuse_head(model)
    model.lm_head.forward = lambda hidden: hidden
    with pytest.raises(NotImplementedError, match="forward was replaced"):
        ours.add_fused_lm_head(model)
    assert model.forward == before
    with pytest.raises(NotImplementedError, match="has mean_logits"):
        ours.add_fused_lm_head(make("llama"), outputs=("log_probs", "mean_logits"))
    with pytest.raises(NotImplementedError, match="cast_lm_head_to_fp32"):
        ours.add_fused_lm_head(make("llama"), cast_lm_head_to_fp32=True)
    model = make("llama")
    model._original_forward = model.forward  # as accelerate does
    with pytest.raises(RuntimeError, match="accelerate has prepared the model"):
        ours.add_fused_lm_head(model)


def trained(path: Path, head: str) -> tuple[list[dict[str, float]], Any]:
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.models.WordLevel({f"t{i}": i for i in range(97)}, unk_token="t1")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(words), pad_token="t0", eos_token="t2"
    )
    model = make("gemma2")
    if head == "fuse_head":
        fuse_head(model)
    data = [{key: value.tolist() for key, value in text.items()} for text in texts()]
    trainer = trl.SFTTrainer(
        model=model,
        args=trl.SFTConfig(
            output_dir=str(path), bf16=False, gradient_checkpointing=False, **ARGUMENTS
        ),
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer,
    )
    if head == "lossops":
        ours.add_fused_lm_head(trainer.model, outputs=OUTPUTS["all"])
    trainer.train()
    return [entry for entry in trainer.state.log_history if "loss" in entry], trainer.model


def test_sft_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fuse_head leaves TRL's head in place; add_fused_lm_head replaces it. All train alike."""
    calls = []
    own = ours.linear_cross_entropy

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(kwargs)
        return own(*args, **kwargs)

    monkeypatch.setattr(ours, "linear_cross_entropy", counted)
    expected, plain = trained(tmp_path, "TRL's")
    assert len(expected) == 20
    for head, count in (("fuse_head", 0), ("lossops", 40)):
        calls.clear()
        found, model = trained(tmp_path, head)
        assert len(calls) == count
        for key in ("loss", "entropy", "mean_token_accuracy"):
            values = ([entry[key] for entry in each] for each in (found, expected))
            torch.testing.assert_close(*map(torch.tensor, values), rtol=1e-5, atol=1e-6)
        assert_same(model.state_dict(), plain.state_dict(), rtol=1e-4)
