"""Every model family of transformers is trained as transformers alone would, or refused in words."""  # noqa: E501

import json
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

from every_family import (
    MAPPINGS,
    look_at,
    small_config,
)
from families import small
from farthing.errors import ModelError
from farthing.model.adapters import Adapter, add_adapter
from farthing.model.head import find_head
from farthing.model.load import ModelChoice, auto_class, check_fits, load_config, load_model
from farthing.model.positions import max_positions
from farthing.models.blocks import block_of
from farthing.models.counted import count_shape
from farthing.models.families import (
    DECODERS,
    ENCODERS,
    FAMILIES,
    PADS_SAFELY,
    POSITIONS_AFTER_PADDING,
    SEQ2SEQ_FAMILIES,
)
from farthing.models.shapes import read_shape
from farthing.objectives.registry import objective_of
from farthing.train.trouble import errors_in_words
from thinned import thinned
from workshop import make_folder, make_job, read_json, train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "family"), [(task, family) for task, known in MAPPINGS.items() for family in known]
)
def test_losses_and_gradients_are_those_of_transformers_alone(task, family, tmp_path):
    row = look_at(family, task, tmp_path)
    is_safe = family in PADS_SAFELY[objective_of(task).head]
    may_be = ["exact", "lora refused"] + ([] if is_safe else ["refused", "not made"])
    assert row["outcome"] in may_be, row


# ---- sizes ----

UNTABLED = [
    *(("seq2seq", name) for name in SEQ2SEQ_FAMILIES - FAMILIES.keys()),
    *(("causal-lm", name) for name in DECODERS - FAMILIES.keys()),
    *(("classification", name) for name in ENCODERS - FAMILIES.keys()),
    ("causal-lm", "deepseek_v3"),
    ("causal-lm", "gemma4_text"),
    ("classification", "modernbert"),
]
ALIKE = (
    "attention",
    "hidden",
    "n_layers",
    "n_decoder_layers",
    "n_heads",
    "n_kv_heads",
    "head_dim",
    "ffn",
    "vocab",
    "max_positions",
    "is_tied",
    "windows",
    "n_active",
    "n_parameters",
    "n_matmul",
    "n_head_matmul",
)


@pytest.mark.parametrize(("task", "family"), sorted(UNTABLED))
def test_a_family_without_a_table_is_counted_on_its_own_code(task, family):
    config = small_config(family, task)
    with torch.device("meta"):
        model = auto_class(task).from_config(config)
    shape = count_shape(config.to_dict(), task, config.num_labels)
    assert shape.n_parameters == sum(weight.numel() for weight in model.parameters())
    lora = shape.with_lora(2, ["all-linear"])
    assert 0 < lora.n_adapter < lora.n_total
    assert not block_of(shape).is_traced, "its ranges are wider"


@pytest.mark.parametrize("family", thinned(sorted(FAMILIES), 2))
def test_what_is_counted_is_what_the_tables_say(family):
    for task, known in MAPPINGS.items():
        if family not in known or objective_of(task).head not in FAMILIES[family].heads:
            continue
        config = small_config(family, task)
        n_labels = 0 if objective_of(task).scores_tokens else config.num_labels
        lengths = (64, 32) if config.is_encoder_decoder else (64, 0)
        counted, read = (
            count(config.to_dict(), task, n_labels) for count in (count_shape, read_shape)
        )
        for name in ALIKE:
            assert getattr(counted, name) == getattr(read, name), name
        flops = [shape.training_flops(*lengths).total for shape in (counted, read)]
        assert flops[0] == pytest.approx(flops[1], rel=1e-12)


# ---- configurations that leave something out ----


def loaded(config, task: str, folder: Path):
    """A model as a job with fresh weights loads it."""
    config.save_pretrained(folder)
    choice = ModelChoice(str(folder), init="random")
    labels = ("food", "sport") if task == "classification" else ()
    how = {"dtype": torch.float32, "seed": 0, "label_names": labels, "pad_id": 7}
    return load_model(choice, load_config(choice), task, **how)


@pytest.mark.parametrize(
    ("family", "task"),
    [("codegen", "causal-lm"), ("gemma3", "classification"), ("qwen3_5", "causal-lm")],
)
def test_padding_is_said_where_a_configuration_leaves_it_open(family, task, tmp_path):
    config = small_config(family, task)
    config.get_text_config().pad_token_id = None
    model = loaded(config, task, tmp_path)
    assert model.config.get_text_config().pad_token_id == 7
    assert not hasattr(type(model.config), "pad_token_id") or model.config.pad_token_id == 7


def test_a_model_without_a_vocabulary_is_refused(tokenizers):
    with pytest.raises(ModelError, match="the model embeds 0"):
        check_fits(
            small_config("canine", "classification"),
            tokenizers["llama"],
            {"data.max_length": 8},
            ModelChoice("canine"),
        )


@pytest.mark.parametrize("family", ["mbart", "plbart"])
def test_padding_may_be_the_first_token(family, tmp_path):
    config = small_config(family, "seq2seq")
    config.pad_token_id = 0
    assert loaded(config, "seq2seq", tmp_path) is not None


def test_a_model_that_hears_is_no_pair_of_encoder_and_decoder(tmp_path):
    config = small_config("qwen3_asr", "seq2seq")
    config.save_pretrained(tmp_path)
    choice = ModelChoice(str(tmp_path), init="meta")
    with pytest.raises(ModelError, match=r"(?s)a qwen3_asr for seq2seq can't be trained.*T5, BART"):
        load_model(choice, load_config(choice), "seq2seq", dtype=torch.float32, seed=0)


def test_what_a_models_own_code_cannot_compute_is_said_in_words(tmp_path):
    model, ids = (
        small("bart", AutoModelForSequenceClassification, num_labels=2),
        torch.tensor([[5, 6, 7]]),
    )
    of_bart = r"modeling_bart.py, forward: the model's own code can't compute this: ValueError"
    with pytest.raises(ModelError, match=f"{of_bart}: .*eos"), errors_in_words(tmp_path):
        model(input_ids=ids, attention_mask=torch.ones_like(ids))
    no_gradient = "no gradient for the weights that are trained"
    with pytest.raises(ModelError, match=no_gradient), errors_in_words(tmp_path):
        torch.zeros(1).backward()
    with pytest.raises(ValueError, match="of our own"), errors_in_words(tmp_path):
        raise ValueError("of our own")


# ---- adapters ----


def test_all_linear_leaves_out_what_is_no_linear_layer(tmp_path):
    plain = loaded(small_config("llama4_text", "causal-lm"), "causal-lm", tmp_path)
    model = add_adapter(plain, Adapter(r=2), "causal-lm", seed=0)
    adapted = {name for name, _ in model.named_modules() if name.endswith(".lora_A")}
    assert any("q_proj" in name for name in adapted)
    assert not any("router" in name for name in adapted)
    ids = torch.tensor([[5, 6, 7]])
    assert model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.shape[:2] == (1, 3)


def test_layers_that_take_no_adapter_are_refused_with_those_that_do(tmp_path):
    model = loaded(small_config("mamba", "causal-lm"), "causal-lm", tmp_path)
    known = "use names among dt_proj, in_proj, lm_head, out_proj, x_proj"
    with pytest.raises(ModelError, match=known):
        add_adapter(model, Adapter(r=2), "causal-lm", seed=0)


# ---- positions ----


@pytest.mark.parametrize("family", sorted(POSITIONS_AFTER_PADDING))
def test_positions_that_begin_after_padding_are_as_many_as_the_table_has(family):
    config = small_config(family, "classification")
    config.pad_token_id = 1
    with torch.device("meta"):
        model = auto_class("classification").from_config(config)
    table = next(
        module for name, module in model.named_modules() if name.endswith(".position_embeddings")
    )
    assert table.padding_idx == 1
    assert max_positions(config) == table.weight.shape[0] - 2


def test_angles_that_follow_the_longest_text_are_kept_to_the_models_own_positions(tokenizers):
    config = small_config("llama", "causal-lm")
    config.vocab_size = 60_000
    dynamic = {"rope_type": "dynamic", "factor": 2.0}
    for rule, most in ((dynamic, 256), (dynamic | {"rope_type": "linear"}, 512)):
        choice = ModelChoice("small", rope_scaling=rule)
        check_fits(config, tokenizers["llama"], {"data.max_length": most}, choice)
        with pytest.raises(ModelError, match=f"more than the model's {most} positions"):
            check_fits(config, tokenizers["llama"], {"data.max_length": most + 1}, choice)


# ---- what a model does to its loss and its weights ----


@pytest.mark.parametrize("key", ["logit_scale", "logits_scaling", "final_logit_softcapping"])
def test_a_key_of_another_family_changes_no_loss(key):
    """transformers keeps keys that a configuration does not know, and its models pay no heed to
    them.
    """
    plain, odd = (small("llama", AutoModelForCausalLM) for _ in range(2))
    setattr(odd.config, key, 0.5)
    ids = torch.tensor([[5, 6, 7]])
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    states, heads = [], [find_head(model, "causal-lm") for model in (plain, odd)]
    for head in heads:
        assert not head.why_whole
        assert head.soft_cap is None
        states.append(head.hidden_states(batch))
    assert torch.equal(*states)


def prophetnet_folder(folder: Path, **keys):
    make_folder(folder, "t5")
    tokenizer = read_json(folder / "config.json")
    config = small_config("prophetnet", "seq2seq").to_dict() | {
        "vocab_size": tokenizer["vocab_size"],
        **keys,
    }
    (folder / "config.json").write_text(json.dumps(config))


def test_a_loss_of_tokens_after_the_next_is_refused(tmp_path):
    prophetnet_folder(tmp_path / "base", disable_ngram_loss=False)
    job = make_job(tmp_path, "t5", max_steps=1)
    with pytest.raises(
        ModelError,
        match=r"(?s)`disable_ngram_loss`.*tokens after the next.*`disable_ngram_loss: true`",
    ):
        train(job)
