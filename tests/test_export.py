"""What a run exports loads in the ordinary ways, answers as it was trained, and is the same
whatever befell the run.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors import safe_open

import farthing.export.folders
import farthing.train.run
from exported import body_of
from farthing.errors import InputError, ModelError
from farthing.events import Exported, StepTaken
from farthing.export.folders import export_run
from farthing.model.adapters import break_ties
from farthing.model.load import auto_class
from farthing.model.same_answers import refuse_other_answers
from farthing.run import folder as run_folder
from farthing.run.exported import damage_of, seal_export
from farthing.run.folder import keep_job, kept_job
from interrupted import LeavesAt
from thinned import thinned
from workshop import TASK, TOPICS, Heard, change_facts, make_job, read_json, train, trained

IDS = torch.tensor([[5, 17, 33, 90, 41, 7]])


def logits(model, family: str = "llama") -> torch.Tensor:
    more = {"decoder_input_ids": IDS[:, :4]} if family == "t5" else {}
    with torch.no_grad():
        found = model.eval()(input_ids=IDS, **more).logits
    return found


# ---- the ordinary ways ----

PEFT_CLASSES = {
    "llama": peft.AutoPeftModelForCausalLM,
    "t5": peft.AutoPeftModelForSeq2SeqLM,
    "bert": peft.AutoPeftModelForSequenceClassification,
}


@pytest.fixture(scope="module")
def lora_run(tmp_path_factory):
    """A run of adapters on a model whose head is its embedding."""
    folder = tmp_path_factory.mktemp("lora")
    return trained(folder, method="lora", pretrained=True, max_steps=2)


@pytest.mark.parametrize("family", thinned(["llama", "t5", "bert"], 9))
def test_an_adapter_and_its_merged_model_load_in_the_ordinary_ways(family, tmp_path):
    body_of(tmp_path / "base", family)
    run = trained(tmp_path, family, method="lora", pretrained=True, max_steps=3, learning_rate=0.05)
    auto = auto_class(TASK[family])
    export_run(run, tmp_path / "adapter", "adapter")
    export_run(run, tmp_path / "merged", "merged")
    expected = logits(auto.from_pretrained(tmp_path / "merged"), family)
    for folder in (run / "model", tmp_path / "adapter"):
        config = transformers.AutoConfig.from_pretrained(folder / "model_config.json")
        assert family != "bert" or config.label2id == {"food": 0, "sport": 1, "weather": 2}
        how = {"config": config, "ignore_mismatched_sizes": True} if family == "bert" else {}
        of_base = {"num_labels": 3, "ignore_mismatched_sizes": True} if family == "bert" else {}
        base = auto.from_pretrained(tmp_path / "base", **of_base)
        for model in (
            auto.from_pretrained(folder, **how),
            PEFT_CLASSES[family].from_pretrained(folder, **of_base),
            peft.PeftModel.from_pretrained(base, folder),
        ):
            torch.testing.assert_close(logits(model, family), expected, rtol=0, atol=1e-4)
    for folder in (run / "model", tmp_path / "adapter", tmp_path / "merged"):
        assert transformers.AutoTokenizer.from_pretrained(folder)("name: The Mill")["input_ids"]
        if family == "llama":
            assert transformers.pipeline("text-generation", model=str(folder), max_new_tokens=2)(
                "name: The"
            )
    if family == "bert":
        said = transformers.pipeline("text-classification", model=str(tmp_path / "merged"))(
            "bread and soup"
        )
        assert said[0]["label"] in TOPICS


# ---- merging where weights are shared ----


@pytest.mark.parametrize(
    ("family", "method"),
    thinned(
        [
            ("llama", {"target_modules": ["q_proj", "embed_tokens"]}),
            ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
            ("t5", {"target_modules": ["q", "lm_head"]}),
        ],
        9,
    ),
)
def test_an_adapter_on_a_shared_weight_changes_its_own_use_alone(family, method, tmp_path):
    run = trained(
        tmp_path, family, method={"name": "lora", **method}, pretrained=True, learning_rate=0.05
    )
    auto = auto_class(TASK[family])
    export_run(run, tmp_path / "merged", "merged")
    base = auto.from_pretrained(tmp_path / "base")
    plain = logits(base, family)
    beside = logits(peft.PeftModel.from_pretrained(base, run / "model"), family)
    merged = auto.from_pretrained(tmp_path / "merged")
    torch.testing.assert_close(logits(merged, family), beside, rtol=1e-4, atol=1e-4)
    assert float((beside - plain).abs().max()) > 1e-2
    with safe_open(tmp_path / "merged/model.safetensors", framework="pt") as file:
        assert "lm_head.weight" in file.keys()  # noqa: SIM118
    config = read_json(tmp_path / "merged/config.json")
    assert config["tie_word_embeddings"] is False
    flip(tmp_path / "base")
    with pytest.raises(ModelError, match="not those that the run began with"):
        export_run(run, tmp_path / "other", "merged")


def test_a_merged_model_keeps_a_tie_that_no_adapter_touches_and_all_may_read_it(tmp_path, lora_run):
    """A container runs under another user; safetensors are written for their owner alone."""
    before = os.umask(0o022)
    try:
        export_run(lora_run, tmp_path / "merged", "merged")
    finally:
        os.umask(before)
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.tie_word_embeddings
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    modes = {oct(path.stat().st_mode & 0o777) for path in (tmp_path / "merged").rglob("*")}
    assert modes == {"0o644"}
    assert (lora_run.stat().st_mode & 0o777) == 0o700
    assert "generation_config.json" in os.listdir(lora_run / "model")
    assert "library_name: peft\n" in (lora_run / "model/README.md").read_text()
    for path in (lora_run / "model/model_config.json", tmp_path / "merged/config.json"):
        assert read_json(path)["use_cache"], "an answer is written with it"
    layers = read_json(lora_run / "model/adapter_config.json")["target_modules"]
    assert len(layers) > 3
    assert layers == sorted(layers), "the same bytes whatever the order of a set"


@pytest.mark.parametrize("family", ["t5", "umt5"])
def test_all_four_uses_of_an_encoder_decoder_embedding_get_their_own(family):
    sizes = {"d_model": 16, "d_ff": 16, "d_kv": 8, "num_layers": 1, "num_heads": 2}
    config = transformers.AutoConfig.for_model(family, **sizes, vocab_size=20)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config).eval()
    asked = {name: torch.tensor([[3, 4]]) for name in ("input_ids", "decoder_input_ids")}
    before = model(**asked).logits
    of_layer = "base_model.model.encoder.block.0.layer.0.SelfAttention.q.lora_A.weight"
    assert not break_ties(model, [of_layer])
    assert break_ties(model, ["base_model.model.lm_head.lora_A.weight"])
    words = [p for p in model.parameters() if p.shape == (20, 16)]
    assert len({p.data_ptr() for p in words}) == len(words) == 4
    assert torch.equal(model(**asked).logits, before)


@pytest.mark.parametrize("dtype", thinned([None, "bfloat16"], 2))
def test_a_merged_model_that_answers_otherwise_is_refused_and_not_kept(
    dtype, tmp_path, monkeypatch
):
    method = {"name": "lora", "target_modules": ["q_proj", "embed_tokens"]}
    job = make_job(tmp_path, method=method, pretrained=True, learning_rate=0.05)
    train(job)
    monkeypatch.setattr(farthing.export.folders, "break_ties", lambda *_: False)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ModelError, match="differ from the trained model's"):
        export_run(Path(job.output_dir), tmp_path / "merged", "merged", dtype)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize(
    ("dtype", "off"), [("float32", 1e-3), ("float16", 0.03), ("bfloat16", 0.1)]
)
def test_answers_may_be_off_by_rounding_alone(dtype, off):
    expected = torch.tensor([9.0, 11.0])
    refuse_other_answers(expected + 0.9 * off, expected, getattr(torch, dtype), "it")
    for other in (expected + 1.1 * off, expected * torch.nan):
        with pytest.raises(ModelError):
            refuse_other_answers(other, expected, getattr(torch, dtype), "it")
    with pytest.raises(ModelError, match="itself answers"):
        refuse_other_answers(expected, expected * torch.inf, torch.float32, "it")


def test_weights_that_a_narrower_dtype_can_not_hold_are_refused(tmp_path):
    run = trained(tmp_path, max_steps=1)
    model = transformers.AutoModelForCausalLM.from_pretrained(run / "model")
    with torch.no_grad():
        model.model.norm.weight.fill_(1e6)
    model.save_pretrained(run / "model")
    seal_export(run / "model")
    with pytest.raises(ModelError, match="not finite; the export was deleted"):
        export_run(run, tmp_path / "half", "merged", "float16")
    assert not (tmp_path / "half").exists()


# ---- the same in every history ----


def files_of(folder: Path) -> dict[str, bytes]:
    """Every file's bytes; of the card, all but the bill."""
    found = {path.name: path.read_bytes() for path in folder.iterdir()}
    found["README.md"] = found["README.md"].split(b"\n## Receipt\n")[0].split(b"\n", 1)[1]
    return found


@pytest.mark.parametrize(
    ("family", "method"), thinned(itertools.product(("llama", "t5", "bert"), ("full", "lora")), 9)
)
def test_what_is_exported_does_not_tell_of_kills_or_of_cached_tokens(family, method, tmp_path):
    keys = {
        "method": method,
        "save_steps": 2,
        "data": {"max_length": 40, "max_target_length": 8},
    }
    if family != "llama":  # shorter than the texts: the tokenizer is asked to truncate
        keys["data"]["max_length"] = 16
    own, other = (
        make_job(tmp_path, family, output_dir=f"./{name}/run", **keys) for name in ("one", "other")
    )
    train(own)  # tokenizes by itself; the other finds the tokens in the cache
    assert train(other, LeavesAt(step=3)).state == "interrupted"
    assert train(other).state == "finished"
    one, two = (files_of(Path(job.output_dir) / "model") for job in (own, other))
    assert sorted(one) == sorted(two)
    assert [name for name in one if one[name] != two[name]] == []
    tokenizer = json.loads(one["tokenizer.json"])
    assert tokenizer["truncation"] is None
    assert tokenizer["padding"] is None


# ---- damage ----


def flip(model: Path):
    content = bytearray((model / "model.safetensors").read_bytes())
    content[-5] ^= 1
    (model / "model.safetensors").write_bytes(content)


DAMAGE: dict[str, tuple[str, str | None]] = {
    "adapter_config.json has": ("adapter_config.json", "{"),
    "tokenizer.json is missing": ("tokenizer.json", None),
    "files that were added later: notes.txt": ("notes.txt", "mine"),
    "manifest.json": ("manifest.json", None),
}


@pytest.mark.parametrize("words", DAMAGE)
def test_a_damaged_model_is_named_and_not_exported(words, tmp_path, lora_run):
    run, (name, content) = Path(shutil.copytree(lora_run, tmp_path / "run")), DAMAGE[words]
    if content is None:
        (run / "model" / name).unlink()
    else:
        (run / "model" / name).write_text(content)
    assert words in str(damage_of(run))
    with pytest.raises(InputError, match="the run's model is damaged"):
        export_run(run, tmp_path / "merged", "merged")


def test_a_merge_needs_no_attention_of_a_gpu_and_says_when_a_model_can_not_be_run(
    tmp_path, monkeypatch, lora_run
):
    run = Path(shutil.copytree(lora_run, tmp_path / "run"))
    kept = kept_job(run)
    kept["model"]["attn_implementation"] = "flash_attention_2"
    keep_job(run, kept, run_folder.kept(run / "run.json"))
    export_run(run, tmp_path / "merged", "merged")

    def forward(*_, **__):
        raise RuntimeError("no kernel for this device")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", forward)
    with pytest.raises(ModelError, match="can't be run here to check"):
        export_run(run, tmp_path / "other", "merged")
    assert not (tmp_path / "other").exists()


def test_a_card_that_is_gone_is_written_anew_and_a_run_at_its_limit_may_mend_its_model(tmp_path):
    job = make_job(tmp_path, max_steps=3, save_steps=1)
    train(job)
    run, heard = Path(job.output_dir), Heard()
    whole = files_of(run / "model")
    (run / "model/README.md").unlink()
    train(job, heard)
    assert "## Receipt" in (run / "model/README.md").read_text()
    assert not heard.warnings
    change_facts(run, finished=False)
    capped = make_job(tmp_path, max_steps=3, save_steps=1, limits={"max_hours": 1e-6})
    heard = Heard()
    assert train(capped, heard).state == "limit"
    assert not heard.of(Exported)
    flip(run / "model")
    assert train(capped, heard).state == "finished"
    assert "model.safetensors differs" in heard.warnings
    assert not heard.of(StepTaken)
    assert files_of(run / "model") == whole
