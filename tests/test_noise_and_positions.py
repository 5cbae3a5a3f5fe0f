"""NEFTune, rotary positions of the job's own, biases of adapters: as transformers and peft have
them, and in the export.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from torch.testing import assert_close
from transformers.integrations.neftune import neftune_post_forward_hook

from farthing.errors import ModelError
from farthing.export.folders import trained_model
from farthing.model.documents import packed_batch
from farthing.model.embedding_noise import EmbeddingNoise
from farthing.model.load import ModelChoice, load_config
from workshop import job_file, make_folder, make_job, read_json, train, trained

IDS = torch.arange(4, 20)[None]


def model_in(folder: Path):
    """A small Llama with weights, in training."""
    return transformers.AutoModelForCausalLM.from_pretrained(
        make_folder(folder, "llama", pretrained=True)
    ).train()


def test_noise_is_that_of_transformers_in_training_alone(tmp_path):
    ours, theirs = model_in(tmp_path / "base"), model_in(tmp_path / "base")
    noise = EmbeddingNoise(ours, 5.0)
    theirs.get_input_embeddings().neftune_noise_alpha = 5.0
    theirs.get_input_embeddings().register_forward_hook(neftune_post_forward_hook)
    noise.hear({"attention_mask": torch.ones_like(IDS)})
    found = []
    for model in (ours, theirs):
        torch.manual_seed(3)
        found.append(model(input_ids=IDS, labels=IDS).loss)
    assert_close(found[0], found[1], rtol=1e-5, atol=1e-5)
    plain = model_in(tmp_path / "base")
    assert abs(float((found[0] - plain(input_ids=IDS, labels=IDS).loss).detach())) > 1e-3
    assert torch.equal(ours.eval()(input_ids=IDS).logits, plain.eval()(input_ids=IDS).logits)


@pytest.mark.parametrize("is_packed", [True, False])
def test_each_document_has_noise_by_its_own_length(is_packed, tmp_path):
    model = model_in(tmp_path / "base")
    embedding, lengths = model.get_input_embeddings(), (4, 64)
    plain = embedding(torch.arange(68)[None] % 50 + 4)
    noise = EmbeddingNoise(model, 3.0)
    if is_packed:
        ids = torch.arange(68)[None] % 50 + 4
        noise.hear(packed_batch({"lengths": np.array(lengths)}))
        parts = (embedding(ids) - plain)[0].split(lengths)
    else:
        ids = torch.zeros(2, 64, dtype=torch.long)
        mask = torch.stack([torch.arange(64) < length for length in lengths]).long()
        noise.hear({"attention_mask": mask})
        parts = tuple(embedding(ids) - embedding.weight[0])
    for part, length in zip(parts, lengths, strict=True):
        most = 3.0 / (length * embedding.embedding_dim) ** 0.5
        assert 0.9 * most < float(part.detach().abs().max()) <= most * (1 + 1e-4)


def test_two_stacks_are_refused(tmp_path):
    with pytest.raises(ModelError, match="encoder and a decoder"):
        train(make_job(tmp_path, "t5", max_steps=1, neftune_noise_alpha=5))


@pytest.mark.slow
def test_positions_of_the_job_are_trained_and_exported(tmp_path, cli):
    path = job_file(tmp_path, pretrained=True, method="lora", max_steps=2)
    cli("train", path, "--set", "model.rope_scaling={rope_type: linear, factor: 4.0}")
    run = tmp_path / "run"
    values = read_json(run / "model/model_config.json")
    assert values["rope_parameters"]["rope_type"] == "linear"
    assert (
        'AutoConfig.from_pretrained("model_config.json")  # its positions'
        in (run / "model/README.md").read_text()
    )
    cli("export", run, "--output", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.rope_parameters["factor"] == 4.0
    expected = trained_model(run)(input_ids=IDS).logits
    assert_close(merged(input_ids=IDS).logits, expected, rtol=1e-4, atol=1e-4)
    cli("train", path, code=2)  # another model


@pytest.mark.parametrize(
    ("family", "rope", "words"),
    [
        ("gpt2", {"rope_type": "linear", "factor": 2.0}, "no rotary positions"),
        ("gemma3_text", {"rope_type": "linear", "factor": 2.0}, "a rule for each kind of layer"),
        ("llama", {"rope_type": "elastic", "factor": 2.0}, "no rope_type 'elastic'"),
        ("llama", {"rope_type": "linear"}, "cannot scale positions with rope_type 'linear'"),
        ("llama", {"type": "yarn"}, "cannot scale positions with rope_type 'yarn'"),
    ],
)
def test_positions_that_a_family_does_not_know_are_refused(family, rope, words, tmp_path):
    transformers.AutoConfig.for_model(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=words):
        load_config(ModelChoice(str(tmp_path), init="random", rope_scaling=rope))


@pytest.mark.slow
def test_biases_of_an_adapter_are_trained_and_merged(tmp_path, cli):
    method = {
        "name": "lora",
        "lora_r": 4,
        "lora_bias": True,
        "target_modules": ["q_proj", "v_proj"],
    }
    make_folder(tmp_path / "base", "llama")
    config = read_json(tmp_path / "base/config.json")
    config |= {"model_type": "qwen2", "architectures": None, "vocab_size": config["vocab_size"] + 8}
    (tmp_path / "base/config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(tmp_path / "base")
    )
    model.save_pretrained(tmp_path / "base")
    run = trained(tmp_path, pretrained=True, method=method, max_steps=3)
    tuned = trained_model(run)
    assert any(
        bool(p.any())
        for name, p in tuned.named_parameters()
        if "lora_B" in name and name.endswith("bias")
    )
    cli("export", run, "--output", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_close(merged(input_ids=IDS).logits, tuned(input_ids=IDS).logits, rtol=1e-4, atol=1e-4)
    other = make_job(tmp_path / "other", method=method, max_steps=1)
    with pytest.raises(ModelError, match="have no bias"):
        train(other)
