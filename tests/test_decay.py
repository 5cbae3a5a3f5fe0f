"""Which weights are decayed: as transformers' own trainer has it, for every family that farthing
claims.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import farthing.run.folder
import farthing.train.run
import workshop
from farthing.errors import RunDamagedError, RunInterruptedError
from farthing.events import Event, StepTaken
from farthing.model.load import auto_class
from farthing.models.families import (
    CAUSAL_FAMILIES,
    DECODERS,
    ENCODERS,
    FAMILIES,
    SEQ2SEQ_FAMILIES,
)
from farthing.run.folder import rules_of
from farthing.train.optim import decayed_names, make_optimizer
from workshop import make_job

SMALL: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_layers": 2,
    "n_layer": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
}
SMALL |= {"num_decoder_layers": 2, "num_experts": 4, "num_local_experts": 4, "layer_types": None}
"""Fewer layers, where a configuration has such a key."""
OTHERS = {
    "mamba",
    "mamba2",
    "gpt_oss",
    "bloom",
    "falcon",
    "mpt",
    "bart",
    "jetmoe",
    "granitemoe",
    "phimoe",
    "stablelm",
}
CLAIMED = {*FAMILIES, *DECODERS, *ENCODERS, *CAUSAL_FAMILIES, *SEQ2SEQ_FAMILIES}


def model_of(family: str) -> Any:
    """A model of the family on the meta device, with two layers."""
    kind = CONFIG_MAPPING[family]
    settings = {key: value for key, value in SMALL.items() if key in kind.__dataclass_fields__}
    config = kind(**settings, **({"head_dim": 64} if family == "ministral" else {}))
    task = (
        "causal-lm"
        if family in DECODERS | CAUSAL_FAMILIES | OTHERS - {"bart"}
        else "classification"
    )
    if family in SEQ2SEQ_FAMILIES | {"bart"}:
        task = "seq2seq"
    with torch.device("meta"):
        return auto_class(task).from_config(config)


def theirs_of(model: Any) -> set[str]:
    """The names by transformers' own rule."""
    nobody: Any = None
    named = {name for name, _ in model.named_parameters()}
    return named & set(transformers.Trainer.get_decay_parameter_names(nobody, model))


@pytest.mark.parametrize("family", sorted(CLAIMED | OTHERS))
def test_the_decayed_weights_are_those_of_transformers(family: str) -> None:
    model = model_of(family)
    ours = decayed_names(model)
    assert ours == theirs_of(model)
    assert ours


def test_what_a_rule_by_shapes_gets_wrong() -> None:
    assert not any("relative_attention_bias" in name for name in decayed_names(model_of("t5")))
    oss = decayed_names(model_of("gpt_oss"))
    assert not any(name.endswith("_bias") for name in oss)
    assert any(name.endswith(".sinks") for name in oss)
    assert any(name.endswith(".D") for name in decayed_names(model_of("mamba")))


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_the_decayed_weights_of_an_adapter_are_those_of_transformers(family: str) -> None:
    model = model_of(family)
    config = peft.LoraConfig(
        target_modules="all-linear",
        use_dora=True,
        modules_to_save=["classifier"] if family == "bert" else None,
    )
    wrapped = peft.get_peft_model(model, config)
    ours = decayed_names(wrapped)
    assert ours == theirs_of(wrapped)
    assert any("lora_magnitude_vector" in name for name in ours)


def test_the_groups_of_an_optimizer_hold_each_trained_weight_once() -> None:
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["gpt2"](n_embd=16, n_layer=1, n_head=2, vocab_size=20)
    )
    for rules in (1, 2):
        how: dict[str, Any] = {
            "learning_rate": 1e-3,
            "betas": (0.9, 0.99),
            "epsilon": 1e-8,
            "rules": rules,
        }
        groups = make_optimizer(model, "adamw_torch", weight_decay=0.1, **how).param_groups
        held = [id(p) for group in groups for p in group["params"]]
        assert sorted(held) == sorted(id(p) for p in model.parameters())
        assert [group["weight_decay"] for group in groups] == [0.1, 0.0]


def weights(job: Any) -> dict[str, torch.Tensor]:
    return load_file(Path(job.output_dir) / "model/model.safetensors")


def test_a_run_that_began_under_the_old_rule_goes_on_under_it_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: dict[str, Any] = {"weight_decay": 0.5, "save_steps": 2, "learning_rate": 0.1}

    def stop(event: Event) -> None:
        if isinstance(event, StepTaken) and event.step == 3:
            raise RunInterruptedError("asked to leave")

    with monkeypatch.context() as before:
        before.setattr(farthing.run.folder, "RULES", 1)
        whole = make_job(tmp_path, "t5", output_dir="./whole", **keys)
        workshop.train(whole)
        half = make_job(tmp_path, "t5", output_dir="./half", **keys)
        farthing.train.run.train(half, stop)
    facts = json.loads(Path(half.output_dir, "run.json").read_text())
    del facts["rules"]  # as runs have it that began before there were rules
    Path(half.output_dir, "run.json").write_text(json.dumps(facts))
    workshop.train(half)
    new = make_job(tmp_path, "t5", output_dir="./new", **keys)
    workshop.train(new)
    ends = [weights(job) for job in (whole, half, new)]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])
    biases = [name for name in ends[0] if "relative_attention_bias" in name]
    assert biases
    assert not any(torch.equal(ends[0][name], ends[2][name]) for name in biases)


def test_rules_that_are_not_known_are_refused(tmp_path: Path) -> None:
    assert rules_of(tmp_path) == farthing.run.folder.RULES
    (tmp_path / "run.json").write_text('{"rules": 99}')
    with pytest.raises(RunDamagedError, match="rules 99"):
        rules_of(tmp_path)
