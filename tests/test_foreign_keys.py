"""Keys of other tools in a job: understood under another name, or answered in a sentence; never
guessed by spelling.
"""

from pathlib import Path

import pytest

from farthing.config.foreign_keys import ALIASES
from farthing.config.importers.tables import table
from farthing.config.job import KEYS
from farthing.config.load import load_job
from farthing.errors import JobError

ANSWERS = {name: why.reason for why in table("job").reasons for name in why.patterns}
BASE = "task: causal-lm\nmodel: a/b\ndata: rows.jsonl\noutput_dir: out\n"


def job_of(folder: Path, text: str, *overrides: str):
    (folder / "job.yaml").write_text(text)
    return load_job(folder / "job.yaml", list(overrides))


def test_a_flat_job_in_other_words_is_understood(tmp_path):
    job = job_of(
        tmp_path,
        "task: causal-lm\nmodel_name: a/b\ndataset: rows.jsonl\ncheckpoint_dir: out\nuse_lora:"
        " true\nr: 8\nalpha: 16\nepochs: 2\nlr: 1.0e-4\noptimizer: adamw_8bit\nbatch_size:"
        " 4\ngradient_accumulation: 8\nmax_seq_length: 512\nseed: 7\n",
    )
    assert (
        job.model.model_name_or_path,
        job.method.name,
        job.method.lora_r,
        job.method.lora_alpha,
    ) == (
        "a/b",
        "lora",
        8,
        16,
    )
    assert (job.train.num_train_epochs, job.train.learning_rate, job.train.optim) == (
        2,
        1e-4,
        "adamw_8bit",
    )
    assert (job.global_batch_size, job.data.max_length, job.train.seed) == (32, 512, 7)
    assert job.output_dir == str(tmp_path / "out")


def test_aliases_are_understood_within_sections_and_overrides(tmp_path):
    text = (
        BASE
        + "method: {name: lora, rank: 4}\ntrain: {epochs: 1, grad_clip: 0.5, optimizer: adamw}\n"
    )
    job = job_of(tmp_path, text, "train.lr=3e-4")
    assert (job.method.lora_r, job.train.num_train_epochs, job.train.max_grad_norm) == (4, 1, 0.5)
    assert (job.train.optim, job.train.learning_rate) == ("adamw_torch_fused", 3e-4)


@pytest.mark.parametrize(
    ("text", "method"),
    [
        ("use_lora: false", "full"),
        ("use_peft: false", "full"),
        ("use_lora: true\nload_in_4bit: true", "qlora"),
        ("load_in_4bit: true\nuse_peft: true", "qlora"),
    ],
)
def test_switches_of_adapters_and_bits_are_a_method(tmp_path, text, method):
    assert job_of(tmp_path, BASE + text).method.name == method


def test_two_names_for_one_key_are_refused(tmp_path):
    with pytest.raises(
        JobError, match=r"`epochs` means `train.num_train_epochs`, which is 2 already"
    ):
        job_of(tmp_path, BASE + "train: {num_train_epochs: 2, epochs: 3}\n")
    for text, given in (
        ("lr: 0.1\n", "train.learning_rate=1e-4"),
        ("train: {lr: 0.1}\n", "learning_rate=1e-4"),
        ("train: {learning_rate: 0.1}\n", "train={lr: 1e-4}"),
    ):
        assert job_of(tmp_path, BASE + text, given).train.learning_rate == 1e-4


def test_a_wrong_value_of_an_alias_has_its_line(tmp_path):
    with pytest.raises(JobError, match=r"job.yaml:6: `train.num_train_epochs` can't be"):
        job_of(tmp_path, BASE + "train:\n  epochs: many\n")


@pytest.mark.parametrize("form", ["{}: true\n", "train: {{{}: true}}\n"])
def test_each_known_foreign_key_is_answered_in_a_sentence(tmp_path, form):
    for name, answer in ANSWERS.items():
        with pytest.raises(JobError) as caught:
            job_of(tmp_path, BASE + form.format(name))
        assert answer in str(caught.value), name
        assert "did you mean" not in str(caught.value), name


@pytest.mark.parametrize(
    "name",
    ["wandb_project", "flash_attn", "hub_token", "dataloader_prefetch_factor", "fsdp_version"],
)
def test_further_keys_of_others_are_known_by_their_kind(tmp_path, name):
    with pytest.raises(JobError, match="another tool's key"):
        job_of(tmp_path, BASE + f"{name}: x\n")


def test_every_alias_names_a_key_that_a_job_has():
    for key in ALIASES.values():
        section, _, name = key.rpartition(".")
        assert name in KEYS[section]
