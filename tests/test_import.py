"""Settings of other tools as jobs: every key mapped or named, nothing executed, and what can't be
trained refused by name.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from command import Cli
from farthing.config.importers.tables import UNKNOWN
from farthing.config.load import load_job
from farthing.data.formats import converter
from farthing.errors import InputError
from importing import imported, job_of, says
from token_sets import with_words

AXOLOTL = """\
base_model: org/base-1b
load_in_8bit: false
load_in_4bit: true
datasets:
  - path: org/instructions
    type: alpaca
    split: train[:90%]
  - path: org/talks
    type: chat_template
    field_messages: conversation
    message_property_mappings: {role: role, content: content}
chat_template: chatml
val_set_size: 0.05
output_dir: ./out
adapter: qlora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
sequence_len: 2048
sample_packing: true
micro_batch_size: 2
gradient_accumulation_steps: 4
num_epochs: 2
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_steps: 10
bf16: auto
deepspeed: zero2.json
wandb_project: tries
evals_per_epoch: 4
surely_unknown: 3
"""


def test_axolotl(tmp_path: Path) -> None:
    found = imported(tmp_path, AXOLOTL)
    job = job_of(tmp_path, found)
    assert (found.source, job.global_batch_size) == ("axolotl", 8)
    assert says(found, method_name="qlora", method_target_modules=["all-linear"])
    assert says(found, train_num_train_epochs=2, train_learning_rate=2e-4, train_warmup_steps=10)
    assert says(found, train_lr_scheduler_type="cosine", train_optim="adamw_bnb_8bit")
    # as Axolotl drops what is too long
    assert says(found, data_max_length=2048, data_eval_fraction=0.05, data_too_long="skip")
    instructions, talks = job.data.of_train
    assert instructions.split == "train[:90%]"
    assert instructions.columns["prompt"][0].endswith("### Input:\n{input}\n\n### Response:\n")
    assert talks.columns == {"messages": "conversation"}
    assert Path(str(job.data.chat_template)).read_text().startswith("{%- for message")
    assert found.lines["surely_unknown"].why == UNKNOWN
    assert found.lines["sample_packing"].effect == "differs"
    assert "--deepspeed FILE" in found.lines["deepspeed"].why


def test_axolotl_says_its_own_defaults(tmp_path: Path) -> None:
    text = "base_model: a/b\ndatasets: [{path: c/d, type: completion}]\n"
    found = imported(tmp_path, text)
    assert job_of(tmp_path, found).global_batch_size == 1
    assert says(found, train_num_train_epochs=1, train_lr_scheduler_type="cosine")
    assert says(found, method_name="full", data_max_length=512)


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rl: grpo", "reinforcement learning"),
        ("process_reward_model: true", "reward model"),
        ("adapter: ia3", "ia3"),
        ("processor_type: AutoProcessor", "images or sound"),
        ("unfrozen_parameters: [lm_head]", "some layers in full"),
    ],
)
def test_another_kind_of_training_is_refused_by_name(
    tmp_path: Path, key: str, words: str, cli: Cli
) -> None:
    text = f"base_model: a/b\ndatasets: [{{path: c/d, type: alpaca}}]\n{key}\n"
    assert imported(tmp_path, text).blockers
    assert words in cli.err("import", tmp_path / "config.yaml", "-o", tmp_path / "job.yaml")
    assert not (tmp_path / "job.yaml").exists()


def test_llama_factory_and_the_registry_of_its_data(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    registry = {
        "mine": {
            "file_name": "mine.json",
            "columns": {"prompt": "ask", "query": "more", "response": "say", "history": "before"},
        },
        "talks": {"hf_hub_url": "org/talks", "formatting": "sharegpt", "subset": "small"},
    }
    (tmp_path / "data" / "dataset_info.json").write_text(json.dumps(registry))
    (tmp_path / "data" / "mine.json").write_text('[{"ask": "a", "more": "b", "say": "c"}]')
    found = imported(
        tmp_path,
        "model_name_or_path: a/b\nstage: sft\ndo_train: true\nfinetuning_type: lora\nlora_rank:"
        " 4\nlora_target: all\ndataset: mine,talks\ntemplate: qwen\ncutoff_len: 512\nlearning_rate:"
        " 1.0e-4\nper_device_train_batch_size: 1\ngradient_accumulation_steps: 8\nquantization_bit:"
        " 4\nwarmup_ratio: 0.1\nval_size: 0.1\n",
    )
    job = job_of(tmp_path, found)
    assert found.source == "llama-factory"
    assert says(found, method_name="qlora", method_lora_alpha=8, data_max_length=512)
    assert says(found, method_target_modules=["all-linear"])
    assert job.data.train == (str(tmp_path / "data" / "mine.json"), "org/talks")
    assert job.data.of_train[0].columns == {
        "instruction": ("{ask}\n{more}", "{ask}"),
        "output": "{say}",
        "history": "before",
    }
    assert job.data.of_train[1].name == "small"
    assert says(found, data_eval_fraction=0.1, train_num_train_epochs=3)


@pytest.mark.parametrize(
    ("name", "text", "learned"),
    [
        (
            "alpaca",
            (
                "Below is an instruction that describes a task. Write a response that appropriately"
                " completes the request.\n\n### Instruction:\nHi?\n\n### Response:\n"
            ),
            "Yo.</s>\n\n",
        ),
        ("default", "Human: Hi?</s>\nAssistant:", "Yo.</s>\n"),
        (
            "vicuna",
            (
                "A chat between a curious user and an artificial intelligence assistant. The"
                " assistant gives helpful, detailed, and polite answers to the user's"
                " questions.USER: Hi? ASSISTANT:"
            ),
            "Yo.</s>",
        ),
    ],
)
def test_a_frame_of_llama_factory_is_a_template_beside_the_job(
    tmp_path: Path, name: str, text: str, learned: str
) -> None:
    settings = (
        "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ndataset: mine\ntemplate:"
        f" {name}\n"
    )
    found = imported(tmp_path, settings)
    assert found.job["data.chat_template"] == f"{name}.jinja"
    tokenizer = SimpleNamespace(
        chat_template=found.files[f"{name}.jinja"],
        special_tokens_map={"eos_token": "</s>"},
        other_templates=(),
        backend_tokenizer=with_words(),
    )
    row = {
        "messages": [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yo."}]
    }
    read = converter("messages", {}, {}, tokenizer, "causal-lm")
    assert read(row).segments == ((text, False), (learned, True))
    more = [{"role": "system", "content": "Be brief."}, *row["messages"] * 2]
    assert [part for part, is_learned in read({"messages": more}).segments if is_learned] == [
        learned
    ] * 2
    assert "Be brief." in read({"messages": more}).segments[0][0]
    assert "data.chat_template" not in imported(tmp_path, settings.replace("sft", "pt")).job


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("meta-llama/Llama-3.2-1B", ("q_proj", "v_proj")),
        ("google/flan-t5-base", ("q", "v")),
        ("tiiuae/falcon-7b", ("query_key_value",)),
        ("openai-community/gpt2", ("c_attn",)),
        ("bigcode/starcoder2-3b", ("q_proj", "v_proj")),
        ("FacebookAI/roberta-base", ("query", "value")),
    ],
)
def test_an_adapter_whose_layers_are_not_named_is_put_where_peft_puts_it(
    tmp_path: Path, model: str, layers: tuple[str, ...]
) -> None:
    of_trl = imported(tmp_path, f"model_name_or_path: {model}\ndataset_name: c/d\nuse_peft: true\n")
    of_script = imported(
        tmp_path,
        "from trl import SFTConfig, SFTTrainer\nfrom peft import LoraConfig\nconfig ="
        f" LoraConfig(r=4)\ntrainer = SFTTrainer(model='{model}', args=SFTConfig('out'),"
        " peft_config=config)\n",
        "sft.py",
    )
    of_command = imported(
        tmp_path, f"python run_clm_lora.py --model_name_or_path {model} --lora_r 4\n", "run.sh"
    )
    for found in (of_trl, of_script, of_command):
        assert job_of(tmp_path, found).method.target_modules == layers


@pytest.mark.parametrize(
    ("keys", "init"),
    [("pissa_iter: 8", "pissa_niter_8"), ("pissa_iter: -1", "pissa"), ("", "pissa_niter_16")],
)
def test_an_adapter_of_llama_factory_begins_as_pissa(tmp_path: Path, keys: str, init: str) -> None:
    text = (
        "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ndataset: c/d\npissa_init:"
        " true\npissa_convert: true\n"
    )
    found = imported(tmp_path, text + keys + "\n")
    assert job_of(tmp_path, found).method.init_lora_weights == init
    assert not [line for line in found.named if line.effect == "differs"]


def test_a_way_to_begin_that_farthing_has_not_is_named(tmp_path: Path) -> None:
    found = imported(tmp_path, AXOLOTL + "peft_init_lora_weights: loftq\n")
    assert found.lines["peft_init_lora_weights"].effect == "differs"


def test_unsloth_puts_an_adapter_on_all_layers(tmp_path: Path) -> None:
    found = imported(
        tmp_path,
        "from unsloth import FastLanguageModel\nfrom trl import SFTTrainer\n"
        "model, tokenizer = FastLanguageModel.from_pretrained('a/b', load_in_4bit=False)\n"
        "model = FastLanguageModel.get_peft_model(model, r=8)\ntrainer = SFTTrainer(model=model)\n",
        "unsloth.py",
    )
    assert job_of(tmp_path, found).method.target_modules == ("all-linear",)


def test_recipes_of_hugging_face_name_several_data_sets(tmp_path: Path) -> None:
    found = imported(
        tmp_path,
        'model_name_or_path: a/b\nuse_peft: false\nmax_length: 64\nchat_template: "{{ messages'
        ' }}"\ndataset_mixture:\n  seed: 1\n  test_split_size: 0.1\n  datasets:\n  - {id: c/d,'
        " config: small, split: train_sft, columns: [messages], weight: 0.5}\n  - {id: e/f}\n",
    )
    job = job_of(tmp_path, found)
    assert (job.data.train, job.data.eval_fraction) == (("c/d", "e/f"), 0.1)
    assert job.data.of_train[0][1:] == (0.5, "train_sft", "small")
    assert found.files["chat_template.jinja"] == "{{ messages }}"
    older = imported(
        tmp_path,
        "model_name_or_path: a/b\nmax_length: 64\ndataset_mixer: {c/d: 0.5, e/f:"
        " 1.0}\ndataset_splits: [train_sft]\n",
    )
    assert [(each.weight, each.split) for each in job_of(tmp_path, older).data.of_train] == [
        (0.5, "train_sft"),
        (1.0, "train_sft"),
    ]
    assert UNKNOWN not in {line.why for line in [*found.named, *older.named]}


def test_a_script_of_another_makes_an_adapter_and_its_shell_variables_are_left_open(
    tmp_path: Path,
) -> None:
    found = imported(
        tmp_path,
        "torchrun fastchat/train/train_lora.py --model_name_or_path a/b --lora_r 8 --lora_alpha 16"
        " --q_lora True --data_path $DATA --seed $RANDOM --model_max_length 512\n",
        "run.sh",
    )
    job = job_of(tmp_path, found)
    assert (job.method.name, job.method.lora_r, job.data.max_length) == ("qlora", 8, 512)
    assert {key: found.lines[key].effect for key in ("data_path", "seed")} == {
        "data_path": "differs",
        "seed": "differs",
    }
    assert "$" not in job.data.train[0]


def test_names_that_grow_out_of_one_another_are_worked_out_once(tmp_path: Path) -> None:
    chain = "".join(f"a{i + 1} = a{i} + a{i}\n" for i in range(64)) + "b = x\n" + "b = b + b\n" * 64
    found = imported(
        tmp_path,
        f"from transformers import TrainingArguments\na0 = 1\n{chain}args ="
        " TrainingArguments(seed=a3, logging_steps=b)\n",
        "train.py",
    )
    assert found.job["train.seed"] == 8
    assert found.lines["TrainingArguments.logging_steps"].effect == "differs"


def test_a_trl_configuration_and_a_command_line_say_the_same(tmp_path: Path) -> None:
    by_yaml = imported(
        tmp_path,
        "model_name_or_path: a/b\ndataset_name: c/d\nuse_peft: true\nlora_r:"
        " 32\nlora_target_modules: q_proj v_proj\nlearning_rate: 2.0e-4\npacking:"
        " false\nmax_length: 2048\n",
    )
    by_command = imported(
        tmp_path,
        "accelerate launch --num_processes 2 sft.py \\\n  --model_name_or_path a/b --dataset_name"
        " c/d --use_peft \\\n  --lora_r 32   --lora_target_modules q_proj v_proj --learning_rate"
        " 2.0e-4 --packing False --max_length 2048\n",
        "run.sh",
    )
    jobs = [job_of(tmp_path, found) for found in (by_yaml, by_command)]
    assert jobs[0] == jobs[1]
    assert (jobs[0].method.name, jobs[0].method.target_modules) == ("lora", ("q_proj", "v_proj"))
    assert (jobs[0].method.lora_dropout, jobs[0].train.per_device_train_batch_size) == (0.05, 8)
    assert "launcher.num_processes" in by_command.lines


UNSLOTH = """\
import os
from unsloth import FastLanguageModel
from trl import SFTTrainer, SFTConfig
from datasets import load_dataset
open("was_executed", "w").write("!")
max_seq_length = 1024 * 2
RANK = 16
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/some-3b-bnb-4bit", max_seq_length=max_seq_length, load_in_4bit=True)
model = FastLanguageModel.get_peft_model(model, r=RANK, lora_alpha=RANK * 2, target_modules=["q_proj", "v_proj"],
    use_rslora=False, random_state=3407)
dataset = load_dataset("org/rows", split="train")
trainer = SFTTrainer(model=model, tokenizer=tokenizer, train_dataset=dataset, args=SFTConfig(
    per_device_train_batch_size=2, gradient_accumulation_steps=4, warmup_steps=5, max_steps=60, learning_rate=2e-4,
    fp16=not torch.cuda.is_bf16_supported(), optim="adamw_8bit", weight_decay=0.01, seed=3407, logging_steps=int(input())))
trainer.train()
model2, _ = FastLanguageModel.from_pretrained(model_name="lora_model", load_in_4bit=True)
"""  # noqa: E501


@pytest.mark.parametrize("kind", ["py", "ipynb"])
def test_an_unsloth_script_is_read_and_never_run(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = UNSLOTH
    if kind == "ipynb":
        lines = [f"{line}\n" for line in ("%pip install unsloth\n" + UNSLOTH).split("\n")]
        text = json.dumps(
            {
                "cells": [
                    {"cell_type": "code", "source": lines},
                    {"cell_type": "markdown", "source": ["# x"]},
                ]
            }
        )
    found = imported(tmp_path, text, f"script.{kind}")
    job = job_of(tmp_path, found)
    assert not (tmp_path / "was_executed").exists()
    assert (found.source, job.model.model_name_or_path) == ("unsloth", "unsloth/some-3b")
    assert says(found, method_name="qlora", method_lora_r=16, method_lora_alpha=32)
    assert says(found, method_target_modules=["q_proj", "v_proj"])
    assert says(found, data_max_length=2048, train_max_steps=60)
    assert (job.global_batch_size, job.train.seed, job.data.train) == (8, 3407, ("org/rows",))
    assert job.data.train_on_prompt  # no train_on_responses_only: every token is learned
    assert "only running the script" in found.lines["SFTConfig.logging_steps"].why
    assert found.lines["FastLanguageModel.from_pretrained#2.model_name"].why.startswith(
        "a later call"
    )


def test_a_trainer_script_with_arguments_of_its_own(tmp_path: Path) -> None:
    found = imported(
        tmp_path,
        "import argparse\nfrom transformers import AutoModelForSequenceClassification, Trainer,"
        " TrainingArguments\nparser = argparse.ArgumentParser()\nparser.add_argument('--rate',"
        " type=float, default=3e-5)\nargs = parser.parse_args()\nmodel ="
        " AutoModelForSequenceClassification.from_pretrained('org/encoder', num_labels=3)\nsettings"
        " = TrainingArguments('out', learning_rate=args.rate, num_train_epochs=2,"
        " eval_strategy='steps')\ntrainer = Trainer(model=model, args=settings)\n",
        "train.py",
    )
    job = job_of(tmp_path, found)
    assert (found.source, job.global_batch_size) == ("hf-trainer", 8)
    assert says(found, task="classification", method_name="full")
    assert says(found, train_learning_rate=3e-5, train_num_train_epochs=2)


def test_a_run_script_of_transformers_by_its_command_line(tmp_path: Path) -> None:
    found = imported(
        tmp_path,
        "python examples/run_summarization.py --model_name_or_path org/t5 --dataset_name org/news"
        ' --do_train \\\n --source_prefix "summarize: " --text_column article --summary_column'
        " highlights --max_source_length 256\n",
        "run.sh",
    )
    job = job_of(tmp_path, found)
    assert (job.task, job.data.max_length, job.method.name) == ("seq2seq", 256, "full")
    assert job.data.columns == {"input": "summarize: {article}", "target": "highlights"}


def test_openai_together_and_fireworks(tmp_path: Path) -> None:
    openai = imported(
        tmp_path,
        '{"training_file": "file-abc", "model": "gpt-4o-mini-2024-07-18", "seed": 7, "method": {'
        '"type": "supervised", "supervised": {"hyperparameters": {"n_epochs": 2,'
        ' "batch_size": "auto", "learning_rate_multiplier": 2}}}}',
        "job.json",
    )
    job = job_of(tmp_path, openai)
    assert openai.source == "openai"
    assert says(openai, train_num_train_epochs=2, train_seed=7, train_learning_rate=4e-4)
    assert "weights that OpenAI keeps" in openai.lines["model"].why
    assert any("never published" in note for note in openai.notes)
    together = imported(
        tmp_path,
        '{"training_file": "rows.jsonl", "model": "org/b", "n_epochs": 2, "batch_size": "max",'
        ' "lora": true, "lora_r": 4}',
        "job2.json",
    )
    assert (together.source, job_of(tmp_path, together).method.lora_r) == ("together", 4)
    fireworks = imported(
        tmp_path,
        '{"baseModel": "accounts/fireworks/models/llama-x", "dataset":'
        ' "accounts/me/datasets/rows", "loraRank": 8, "learningRate": 1e-4}',
        "job3.json",
    )
    assert job_of(tmp_path, fireworks).model.model_name_or_path == "llama-x"
    assert (fireworks.source, fireworks.job["method.lora_r"]) == ("fireworks", 8)
    dpo = imported(
        tmp_path,
        '{"training_file": "file-a", "model": "gpt-4o", "method": {"type": "dpo"}}',
        "job4.json",
    )
    job = job_of(tmp_path, dpo)
    assert (job.task, job.objective.beta) == ("dpo", 0.1)


def test_what_says_where_a_training_runs_is_no_training(tmp_path: Path) -> None:
    found = imported(
        tmp_path, "compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n"
    )
    assert "import the other one" in found.blockers[0].why
    with pytest.raises(InputError, match="can't tell which tool"):
        imported(tmp_path, "hello: world\n")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.yaml", "a: [1\n"),
        ("x.yaml", "- 1\n"),
        ("x.json", "{"),
        ("x.py", "def f(:\n"),
        ("x.py", "print('hello')\n"),
        ("x.ipynb", "{}"),
        ("x.sh", "echo hello\n"),
        ("x.yaml", "a: &a {b: 1}\nc: *a\n"),
        ("x.yaml", "{" * 200),
    ],
)
def test_what_is_no_configuration_is_said(tmp_path: Path, name: str, text: str, cli: Cli) -> None:
    (tmp_path / name).write_text(text)
    assert name in cli.err("import", tmp_path / name)


def test_the_verb_writes_the_job_and_its_files_and_overwrites_nothing(
    tmp_path: Path, cli: Cli
) -> None:
    (tmp_path / "ax.yaml").write_text(AXOLOTL)
    words = cli.out("import", tmp_path / "ax.yaml", "-o", tmp_path / "job.yaml")
    assert "surely_unknown" in words
    assert (tmp_path / "chatml.jinja").exists()
    load_job(tmp_path / "job.yaml")
    assert "exists already" in cli.err("import", tmp_path / "ax.yaml", "-o", tmp_path / "job.yaml")
    found = cli.json("import", tmp_path / "ax.yaml")
    keys = {line["key"] for line in (*found["mapped"], *found["named"])}
    assert {
        "base_model",
        "datasets[0].type",
        "datasets[1].message_property_mappings.role",
        "wandb_project",
    } <= keys


def test_code_of_a_hub_model_is_not_run_unpinned(tmp_path: Path) -> None:
    text = "base_model: a/b\ntrust_remote_code: true\ndatasets: [{path: c/d, type: completion}]\n"
    found = imported(tmp_path, text)
    assert not job_of(tmp_path, found).model.trust_remote_code
    assert "pinned" in found.lines["trust_remote_code"].why
