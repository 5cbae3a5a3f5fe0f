"""A loss that transformers' models add by their configuration is never left out in silence."""

import json
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from farthing.errors import ModelError
from farthing.models.refused import left_out_loss, refuse_model
from workshop import job_file, make_folder, read_json

EXPERTS = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "dbrx", "jetmoe"]
EXPERTS += ["granitemoe", "phimoe", "switch_transformers", "nllb-moe", "qwen3_vl_moe"]


@pytest.mark.parametrize("family", EXPERTS)
def test_the_balance_of_experts_is_refused_where_it_would_count_and_only_there(family):
    config = CONFIG_MAPPING[family]()
    assert (
        left_out_loss(config.to_dict(), "causal-lm") == ""
    )  # transformers leaves it out too, unless asked
    config.get_text_config().output_router_logits = True
    assert left_out_loss(config.to_dict(), "causal-lm") == "output_router_logits"
    assert left_out_loss(config.to_dict(), "seq2seq") == "output_router_logits"
    assert left_out_loss(config.to_dict(), "classification") == ""  # heads for classes add none


def test_a_weight_of_nothing_leaves_nothing_out():
    config = transformers.MixtralConfig(output_router_logits=True, router_aux_loss_coef=0.0)
    assert left_out_loss(config.to_dict(), "causal-lm") == ""
    dbrx = transformers.DbrxConfig(output_router_logits=True)
    assert left_out_loss(dbrx.to_dict(), "causal-lm")
    dbrx.ffn_config.moe_loss_weight = 0.0
    assert left_out_loss(dbrx.to_dict(), "causal-lm") == ""


def test_a_penalty_on_large_logits_is_refused():
    assert left_out_loss(transformers.BambaConfig().to_dict(), "causal-lm") == ""
    assert (
        left_out_loss(transformers.BambaConfig(z_loss_coefficient=1e-4).to_dict(), "causal-lm")
        == "z_loss_coefficient"
    )


def test_weights_that_are_quantized_already_are_refused():
    config = {"quantization_config": {"quant_method": "bitsandbytes"}}
    refuse_model(config, "causal-lm", "m", "qlora")
    with pytest.raises(ModelError, match="bitsandbytes"):
        refuse_model(config, "causal-lm", "m", "lora")


def mixtral_folder(folder: Path, **keys) -> Path:
    make_folder(folder, "llama")
    config = read_json(folder / "config.json")
    config |= {
        "model_type": "mixtral",
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": 4,
        **keys,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_job_that_would_leave_a_loss_out_is_refused_before_it_starts(tmp_path, cli):
    mixtral_folder(tmp_path / "base", output_router_logits=True)
    path = job_file(tmp_path, max_steps=1)
    for verb in ("train", "doctor"):
        said = " ".join("".join(cli(verb, path, code=2)).split())
        assert (
            "`output_router_logits` in the model's config.json adds the balance of the experts to"
            " the loss" in said
        )
        assert "config.json has `output_router_logits: false`" in said
    assert not (tmp_path / "run/run.json").exists()
    mixtral_folder(tmp_path / "base", output_router_logits=False)
    cli("train", path, "--json")


@pytest.mark.parametrize("kind", ["big_bird", "fnet", "nllb-moe", "rwkv", "xlnet"])
def test_families_whose_result_depends_on_other_texts_are_refused_by_name(kind):
    with pytest.raises(ModelError, match=f"a {kind} is not trained: its?"):
        refuse_model({"model_type": kind}, "classification", "some/model")
