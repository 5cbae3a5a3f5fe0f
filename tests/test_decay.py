"""Which weights are decayed: as transformers' own trainer has it, for every family that farthing
claims.
"""

import peft
import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from every_family import small_config
from farthing.model.load import auto_class
from farthing.models.families import (
    CAUSAL_FAMILIES,
    DECODERS,
    ENCODERS,
    FAMILIES,
    SEQ2SEQ_FAMILIES,
)
from farthing.train.optim import decayed_names
from scarce import optimizer_of
from thinned import thinned

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


def model_of(family: str):
    """A small model of the family on the meta device."""
    config = small_config(family, "classification")
    is_decoder = family in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and family != "bert"
    task = "causal-lm" if is_decoder else "classification"
    if config.is_encoder_decoder:
        task = "seq2seq"
    with torch.device("meta"):
        return auto_class(task).from_config(config)


def theirs_of(model) -> set[str]:
    """The names by transformers' own rule."""
    nobody = None
    named = {name for name, _ in model.named_parameters()}
    return named & set(transformers.Trainer.get_decay_parameter_names(nobody, model))


@pytest.mark.parametrize("family", thinned(sorted(CLAIMED | OTHERS), 3))
def test_the_decayed_weights_are_those_of_transformers(family):
    model = model_of(family)
    ours = decayed_names(model)
    assert ours == theirs_of(model)
    assert ours


@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_the_decayed_weights_of_an_adapter_are_those_of_transformers(family):
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


def test_the_groups_of_an_optimizer_hold_each_trained_weight_once():
    model = transformers.AutoModelForCausalLM.from_config(
        CONFIG_MAPPING["gpt2"](n_embd=16, n_layer=1, n_head=2, vocab_size=20)
    )
    groups = optimizer_of(model, "adamw_torch").param_groups
    held = [id(p) for group in groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in model.parameters())
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
