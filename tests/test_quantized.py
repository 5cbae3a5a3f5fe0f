"""QLoRA and the 8-bit optimizers, end to end on the CPU. Apart from the rest: it needs
bitsandbytes.
"""

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
import transformers

from farthing.errors import ModelError
from farthing.events import Restored
from farthing.export.folders import export_run
from farthing.model.activation_checkpointing import saved_bytes
from farthing.model.adapters import count_parameters
from farthing.model.hardware import Numerics
from farthing.model.lora_kernels import use_low_rank
from farthing.train.build import build_model
from farthing.train.loop import take_step
from heads import one_mask
from interrupted import LeavesAt
from workshop import (
    Heard,
    Watched,
    job_file,
    losses_of,
    make_job,
    opened,
    resolved,
    train,
    weights_in,
)

bitsandbytes = pytest.importorskip("bitsandbytes")
pytestmark = pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
EIGHT_BIT = ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "paged_adamw_32bit")


@pytest.fixture
def watched(monkeypatch):
    return Watched(monkeypatch)


def qlora_job(folder: Path, **keys):
    settings = {"max_steps": 8, "method": {"name": "qlora", "lora_r": 4}} | keys
    return make_job(folder, pretrained=True, **settings)


def test_qlora_keeps_the_base_in_four_bits_and_learns(tmp_path, watched):
    job = qlora_job(tmp_path, max_steps=15)
    assert train(job).state == "finished"
    losses = losses_of(job)
    assert np.mean(losses[-3:]) < np.mean(losses[:3])
    assert all("lora_" in name for name in watched.trainable())
    assert watched.changed() <= watched.trainable()
    layers = [m for m in watched.model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert len(layers) == 2 * 7  # every linear layer of both blocks; the output layer stays whole
    for layer in layers:
        assert layer.weight.quant_type == "nf4"
        assert layer.weight.dtype == torch.uint8
        assert layer.weight.quant_state.nested  # double quantization
    assert all(p.dtype == torch.float32 for p in watched.model.parameters() if p.requires_grad)
    counts = count_parameters(watched.model)
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert counts["total"] - counts["adapter"] == plain.num_parameters(), "what they stand for"


@pytest.mark.parametrize(("is_bf16", "dropout"), [(False, 0.2), (True, 0.0)])
def test_outputs_and_gradients_are_those_of_peft_with_a_matrix_made_whole_once_a_pass(
    is_bf16, dropout, tmp_path, monkeypatch
):
    one_mask(monkeypatch)
    job = qlora_job(tmp_path, bf16=is_bf16, method={"name": "qlora", "lora_dropout": dropout})
    numerics = Numerics(torch.device("cpu"), torch.bfloat16 if is_bf16 else None)
    model = build_model(resolved(job, numerics), ()).train()
    layers = [m for m in model.modules() if isinstance(m, bitsandbytes.nn.Linear4bit)]
    assert {layer.compute_dtype for layer in layers} == {numerics.autocast or torch.float32}
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    torch.manual_seed(1)
    for name, weight in trained.items():
        if "lora_B" in name:
            weight.data.normal_(std=0.02)
    n_whole, dequantize = [0], bitsandbytes.functional.dequantize_4bit

    def counted(*args, **keys):
        n_whole[0] += 1
        return dequantize(*args, **keys)

    def outcome():
        torch.manual_seed(2)
        ids = torch.arange(3, 23)[None]
        with numerics.autocasting():
            logits = model(input_ids=ids).logits.float()
        gradients = torch.autograd.grad(logits.square().mean(), list(trained.values()))
        return logits.detach(), torch.cat([gradient.flatten() for gradient in gradients])

    theirs = outcome()
    assert str(use_low_rank(model)) == "14 LoRA layers fused"
    monkeypatch.setattr(bitsandbytes.functional, "dequantize_4bit", counted)
    ours = outcome()
    assert n_whole == [14 + 14 - 3], "below queries, keys and values of layer 0 nothing is trained"
    for our, their in zip(ours, theirs, strict=True):
        assert float((our - their).norm() / their.norm()) < (3e-2 if is_bf16 else 1e-5)
    kept = saved_bytes(model, lambda: model(input_ids=torch.arange(3, 5)[None]).logits.sum())
    assert kept < 2 * sum(weight.numel() for weight in trained.values()) + 100_000


def test_qlora_takes_dora_and_a_classification_head(tmp_path, watched):
    job = make_job(tmp_path, "bert", pretrained=True, method={"name": "qlora", "use_dora": True})
    train(job)
    trained = watched.changed()
    assert any("lora_magnitude_vector" in name for name in trained)
    assert any("classifier" in name and "modules_to_save" in name for name in trained)
    assert watched.changed() <= watched.trainable()
    written = export_run(Path(job.output_dir), tmp_path / "merged", "merged")
    merged = transformers.AutoModelForSequenceClassification.from_pretrained(
        written["folder"]
    ).eval()
    assert set(merged.config.id2label.values()) == {"food", "sport", "weather"}
    head = next(
        p
        for name, p in watched.model.named_parameters()
        if "modules_to_save" in name and "weight" in name
    )
    assert torch.equal(merged.classifier.weight, head)


def test_qlora_trains_further_modules_whole(tmp_path, watched):
    method = {"name": "qlora", "target_modules": ["q_proj"], "modules_to_save": ["down_proj"]}
    train(make_job(tmp_path, pretrained=True, method=method))
    whole = [name for name in watched.changed() if "modules_to_save" in name]
    assert len(whole) == 2
    assert all(".down_proj." in name for name in whole)


def test_qlora_refuses_random_weights_in_words(tmp_path):
    with pytest.raises(ModelError, match="pretrained"):
        train(make_job(tmp_path, method="qlora"))


def test_a_quantized_run_resumes_to_the_bit(tmp_path):
    size = {"hidden": 128}
    keys = {"optim": "adamw_8bit", "size": size, "method": {"name": "qlora", "lora_r": 32}}
    whole = make_job(tmp_path / "whole", pretrained=True, max_steps=6, **keys)
    train(whole)

    heard = Heard()
    broken = make_job(tmp_path / "broken", pretrained=True, max_steps=6, save_steps=3, **keys)
    assert train(broken, LeavesAt(step=3)).state == "interrupted"
    train(broken, heard)
    assert [event.step for event in heard.of(Restored)] == [3]
    assert losses_of(broken) == losses_of(whole)
    ends = [tmp_path / name / "run/model/adapter_model.safetensors" for name in ("whole", "broken")]
    assert ends[0].read_bytes() == ends[1].read_bytes()


@pytest.mark.parametrize("optim", EIGHT_BIT)
def test_every_bitsandbytes_optimizer_keeps_its_promise_of_size(optim, tmp_path):
    with opened(make_job(tmp_path, optim=optim, size={"hidden": 128})) as run:
        before = weights_in(run.model)
        take_step(run)
        assert not any(torch.equal(p, before[name]) for name, p in run.model.named_parameters())
        states = run.steps.step.optimizer.state
        large = [state for weight, state in states.items() if weight.numel() >= 4096]
    kinds = {state[name].dtype for state in large for name in ("state1", "state2")}
    assert kinds == {torch.float32 if "32bit" in optim else torch.uint8}


def test_a_quantized_adapter_merges_into_the_whole_base(tmp_path, watched):
    job = qlora_job(tmp_path)
    train(job)
    run = Path(job.output_dir)
    adapter = export_run(run, tmp_path / "adapter", "adapter")
    merged = export_run(run, tmp_path / "merged", "merged")
    assert adapter["bytes"] < merged["bytes"]
    whole = transformers.AutoModelForCausalLM.from_pretrained(merged["folder"]).eval()
    assert getattr(whole.config, "quantization_config", None) is None
    assert {p.dtype for p in whole.parameters()} == {torch.float32}

    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    beside = peft.PeftModel.from_pretrained(base, adapter["folder"]).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    with torch.no_grad():
        torch.testing.assert_close(whole(ids).logits, beside(ids).logits, rtol=0, atol=1e-5)
        quantized = watched.model.eval()(ids).logits
        error = float((whole(ids).logits - quantized).abs().max())
    assert error < 0.5  # equal but for the error of four bits


def test_doctor_finds_bitsandbytes_where_it_works(tmp_path, cli):
    path = job_file(tmp_path, pretrained=True, method="qlora")
    assert f"bitsandbytes works: version {bitsandbytes.__version__}" in cli.out("doctor", path)
