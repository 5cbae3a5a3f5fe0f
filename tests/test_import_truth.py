"""Imports that would train something else are refused; what changes a result is named."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from command import Cli
from farthing.cli import main
from farthing.config.importers.recognise import import_file
from farthing.errors import InputError
from importing import imported, says


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


BASE = "model_name_or_path: org/m\ndataset_name: org/d\nlearning_rate: 5.0e-7\n"


@pytest.mark.parametrize(
    "settings",
    [
        "beta: 0.1\nloss_type: sigmoid\nmax_length: 1024\nmax_prompt_length: 512\n",
        "beta: 0.05\nmax_length: 2048\n",
        "num_generations: 16\nuse_vllm: true\nmax_completion_length: 768\n",
        "max_prompt_length: 1792\nmax_length: 2048\n",
        "reward_funcs: [accuracy, format]\nmax_length: 512\n",
        "precompute_ref_log_probs: true\nmax_length: 512\n",
        "feature_extractor_name: org/f\nmax_length: 512\n",
    ],
)
def test_a_recipe_of_another_objective_makes_no_job(settings: str, tmp_path: Path) -> None:
    found = imported(tmp_path, BASE + settings)
    assert len(found.blockers) == 1
    assert main(["import", str(tmp_path / "config.yaml")]) == 2


def test_a_setting_that_is_off_blocks_nothing(tmp_path: Path) -> None:
    text = BASE + "max_length: 512\nuse_vllm: false\nnum_generations: null\n"
    assert imported(tmp_path, text).blockers == []


def test_what_stands_in_a_quoted_variable_is_read(tmp_path: Path) -> None:
    script = """#!/bin/bash
MODEL="org/model"   # which one
ARGS="
  --learning_rate 1e-5
  --num_train_epochs 7
"
OUT='runs/x y'
python run_clm.py --model_name_or_path "$MODEL" $ARGS --output_dir "${OUT}" --seed ${SEED:-13} \\
  --train_file data.json \\"""
    found = imported(tmp_path, script, "run.sh")
    assert says(found, train_learning_rate=1e-5, train_num_train_epochs=7, train_seed=13)
    assert says(found, model_model_name_or_path="org/model")
    assert found.job["output_dir"] == "runs/x y"


def test_a_loop_by_hand_is_refused(tmp_path: Path) -> None:
    script = """import torch
from transformers import AutoModelForCausalLM
lr = 3e-3
num_epochs = 20
model = AutoModelForCausalLM.from_pretrained("org/m")
optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
for epoch in range(num_epochs):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
"""
    with pytest.raises(InputError, match="a training loop of its own"):
        imported(tmp_path, script, "train.py")


def test_what_needs_evaluation_data_is_named_where_there_is_none(tmp_path: Path) -> None:
    text = BASE.replace("dataset_name: org/d", "datasets: [{path: org/d}]") + (
        "max_length: 512\neval_strategy: steps\neval_steps: 50\nload_best_model_at_end: true\n"
        "metric_for_best_model: loss\n"
    )
    found = imported(tmp_path, text)
    assert not {key for key in found.job if "eval" in key or "best" in key} - {
        "train.load_best_model_at_end"
    }
    assert found.job.get("train.load_best_model_at_end") is not True
    named = {line.key: line.effect for line in found.named}
    assert named["load_best_model_at_end"] == "differs"
    assert named["eval_strategy"] == "none"
    with_data = imported(
        tmp_path,
        (
            "python run_glue.py --model_name_or_path org/m --train_file a.csv"
            " --validation_file b.csv"
            " --load_best_model_at_end --eval_strategy epoch --save_strategy epoch\n"
        ),
        "run.sh",
    )
    assert with_data.job["train.load_best_model_at_end"] is True


def test_keys_that_were_lost_are_mapped_or_named(tmp_path: Path) -> None:
    glue = imported(
        tmp_path,
        (
            "python run_glue.py --model_name_or_path bert-base-cased --task_name MRPC"
            " --report_to wandb tensorboard\n"
        ),
        "glue.sh",
    )
    assert glue.job["data.train"][0]["name"] == "mrpc"
    assert glue.job["data.train"][0]["columns"]["text"] == "{sentence1}\n{sentence2}"
    assert glue.job["train.report_to"] == ["wandb", "tensorboard"]
    clm = imported(
        tmp_path,
        ("python run_clm.py --model_name_or_path gpt2 --train_file a.txt --block_size 512\n"),
        "clm.sh",
    )
    assert clm.job["data.max_length"] == 512
    assert {line.key: line.effect for line in clm.named}["block_size"] == "differs"
    fireworks = imported(
        tmp_path,
        '{"baseModel": "accounts/fireworks/models/qwen2p5-7b", "dataset": "d",'
        ' "displayName": "x", "earlyStop": true, "jinjaTemplate": "{{ messages }}"}',
        "fw.json",
    )
    assert {line.key: line.effect for line in fireworks.named}["earlyStop"] == "differs"
    assert fireworks.job["data.chat_template"] == "chat_template.jinja"
    mt0 = imported(
        tmp_path,
        ("model_name_or_path: bigscience/mt0-small\nuse_peft: true\ndataset_name: d\n"),
        "mt0.yaml",
    )
    assert mt0.job["method.target_modules"] == ["q", "v"]


def test_jobs_of_services_are_read_from_their_python_clients(tmp_path: Path) -> None:
    openai = imported(
        tmp_path,
        """from openai import OpenAI
client = OpenAI()
client.fine_tuning.jobs.create(
    training_file="file-abc", model="gpt-4o-mini-2024-07-18", seed=7,
    hyperparameters={"n_epochs": 2, "batch_size": 4},
)
""",
        "openai.py",
    )
    assert openai.source == "openai"
    assert says(openai, train_num_train_epochs=2, train_seed=7)
    together = imported(
        tmp_path,
        """from together import Together
client = Together()
client.fine_tuning.create(
    training_file="file-abc.jsonl", model="meta-llama/Meta-Llama-3.1-8B-Instruct-Reference",
    n_epochs=3, lora=True, learning_rate=1e-5,
)
""",
        "together.py",
    )
    assert (together.source, together.job["train.learning_rate"]) == ("together", 1e-5)
    assert together.job["method.name"] == "lora"


@pytest.mark.parametrize(
    ("settings", "row", "expected"),
    [
        ("", {"messages": []}, True),
        ("", {"prompt": "a", "completion": "b"}, None),
        ("assistant_only_loss: true\n", {"messages": []}, False),
        ("completion_only_loss: false\n", {"messages": []}, True),
    ],
)
def test_which_tokens_trl_learns(
    settings: str, row: dict[str, object], expected: bool | None, tmp_path: Path
) -> None:
    write(tmp_path, "rows.jsonl", json.dumps(row))
    text = f"model_name_or_path: org/m\ndataset_name: rows.jsonl\nmax_length: 512\n{settings}"
    found = imported(tmp_path, text)
    assert found.job.get("data.train_on_prompt") is expected


def test_schedules_with_a_least_rate_are_imported(tmp_path: Path) -> None:
    found = imported(
        tmp_path,
        BASE + "max_length: 512\nlr_scheduler_type: cosine_with_min_lr\noptim: adafactor\n"
        "lr_scheduler_kwargs: {min_lr_rate: 0.1}\n",
    )
    assert found.job["train.lr_scheduler_type"] == "cosine_with_min_lr"
    assert found.job["train.lr_scheduler_kwargs"] == {"min_lr_rate": 0.1}
    assert found.job["train.optim"] == "adafactor"
    found = imported(
        tmp_path,
        "from transformers import Trainer, TrainingArguments\n"
        "args = TrainingArguments('out', lr_scheduler_type='warmup_stable_decay',\n"
        "    lr_scheduler_kwargs={'num_decay_steps': 10})\nTrainer(model='org/m', args=args)\n",
        "train.py",
    )
    assert found.job["train.lr_scheduler_kwargs"] == {"num_decay_steps": 10}
    found = imported(
        tmp_path,
        "base_model: org/m\nsequence_len: 64\nlr_scheduler: cosine\ncosine_min_lr_ratio: 0.2\n",
        "ax.yaml",
    )
    assert found.job["train.lr_scheduler_type"] == "cosine_with_min_lr"
    assert found.job["train.lr_scheduler_kwargs"] == {"min_lr_rate": 0.2}
    without = BASE + "max_length: 512\nlr_scheduler_type: cosine_with_min_lr\n"
    found = imported(tmp_path, without)
    assert found.lines["lr_scheduler_type"].effect == "differs"


def test_new_tokens_are_imported_with_what_trains_them(tmp_path: Path) -> None:
    text = "base_model: org/m\nsequence_len: 64\nadapter: lora\ntokens: [<a>, <b>]\n"
    found = imported(tmp_path, text, "ax.yaml")
    assert found.lines["tokens"].effect == "differs"
    saved = text + "lora_modules_to_save: [embed_tokens, lm_head]\n"
    found = imported(tmp_path, saved, "ax.yaml")
    assert found.job["model.new_tokens"] == ["<a>", "<b>"]
    text = "model_name_or_path: org/m\nstage: sft\nfinetuning_type: lora\nadd_tokens: <a>,<b>\n"
    found = imported(tmp_path, text + "resize_vocab: true\n", "lf.yaml")
    assert found.job["model.new_tokens"] == ["<a>", "<b>"]
    assert found.job["method.modules_to_save"] == ["embed_tokens", "lm_head"]
    assert imported(tmp_path, text, "lf.yaml").lines["add_tokens"].effect == "differs"


@pytest.mark.parametrize(
    ("keys", "key"),
    [
        ("plugins: [axolotl.integrations.kd.KDPlugin]", "plugins"),
        ("use_onebitllms: true", "use_onebitllms"),
        ("shuffle_merged_datasets: false", "shuffle_merged_datasets"),
        ("datasets: [{path: a/b, type: chat_template, roles_to_train: [user]}]", "roles_to_train"),
        ("datasets: [{path: a/b, type: chat_template, train_on_eos: all}]", "train_on_eos"),
    ],
)
def test_what_changes_a_result_of_axolotl_is_named(keys: str, key: str, tmp_path: Path) -> None:
    found = imported(tmp_path, f"base_model: org/m\nsequence_len: 64\n{keys}\n", "ax.yaml")
    effects = {line.key.rpartition(".")[2]: line.effect for line in found.named}
    assert effects[key] == "differs"
    harmless = (
        "base_model: org/m\nsequence_len: 64\nplugins: [axolotl.integrations.liger.LigerPlugin]\n"
        "datasets: [{path: a/b, type: chat_template, roles_to_train: [assistant],"
        " train_on_eos: turn}]\n"
    )
    found = imported(tmp_path, harmless, "ax.yaml")
    assert [line for line in found.named if line.effect != "none"] == []


@pytest.mark.parametrize(
    ("setting", "effect"),
    [
        ("bnb_4bit_quant_type: fp4", "differs"),
        ("bnb_4bit_quant_type: nf4", "none"),
        ("train_sampling_strategy: sequential", "differs"),
        ("train_sampling_strategy: group_by_length", "none"),
    ],
)
def test_a_setting_changes_a_result_by_its_value(setting: str, effect: str, tmp_path: Path) -> None:
    found = imported(tmp_path, BASE + f"max_length: 512\n{setting}\n")
    assert found.lines[setting.partition(":")[0]].effect == effect


def test_splits_of_a_recipe_train_and_evaluate(tmp_path: Path) -> None:
    text = (
        "model_name_or_path: org/m\nmax_length: 64\ndataset_mixer: {a/b: 1.0}\n"
        "dataset_splits: [train_x, test_x]\neval_strategy: epoch\n"
    )
    found = imported(tmp_path, text)
    assert found.job["data.eval"] == [{"path": "a/b", "split": "test_x"}]
    other = imported(tmp_path, text.replace("test_x", "more_x"))
    assert other.lines["dataset_splits"].effect == "differs"


def test_a_command_that_trains_nothing_makes_no_job(tmp_path: Path) -> None:
    line = "python measure.py --tasks other --hub_repo_id a/b\n"
    with pytest.raises(InputError, match="no settings of"):
        imported(tmp_path, line, "run.sh")


def test_reinforcement_learning_is_named_before_what_preferences_share(tmp_path: Path) -> None:
    text = BASE + "beta: 0.04\nmax_length: 64\nnum_generations: 8\n"
    (line,) = imported(tmp_path, text).blockers
    assert line.key == "num_generations"


def test_a_second_training_of_a_script_is_named(tmp_path: Path) -> None:
    script = """from transformers import Trainer, TrainingArguments
one = load_dataset("org/a", split="train")
two = load_dataset("org/b", split="train")
Trainer(model="org/m", args=TrainingArguments("a", max_steps=5), train_dataset=one).train()
Trainer(model="org/m", args=TrainingArguments("b", max_steps=9), train_dataset=two).train()
"""
    found = imported(tmp_path, script, "train.py")
    assert found.job["train.max_steps"] == 5
    effects = {line.key: line.effect for line in found.named}
    assert effects["TrainingArguments#2.max_steps"] == "differs"
    assert effects["load_dataset#2.path"] == "differs"


def test_what_scripts_say_beside_their_arguments_is_read(tmp_path: Path) -> None:
    script = """from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
from trl import DataCollatorForCompletionOnlyLM, SFTTrainer
trainer = SFTTrainer(
    model="org/m", args=TrainingArguments("out"), dataset_text_field="story",
    train_dataset=load_dataset("org/d", split="train"), optimizers=(mine, None),
    data_collator=DataCollatorForCompletionOnlyLM("### Answer:"),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
"""
    found = imported(tmp_path, script, "train.py")
    assert found.job["data.train_on_prompt"] is False
    assert found.lines["SFTTrainer.optimizers"].effect == "differs"
    assert found.lines["EarlyStoppingCallback.early_stopping_patience"].effect == "differs"
    assert found.job["data.train"] == [
        {"path": "org/d", "split": "train", "columns": {"text": "story"}}
    ]


def test_aliases_that_expand_without_end_are_refused_at_once(tmp_path: Path) -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 11)]
    path = write(tmp_path, "bomb.yaml", "base_model: org/m\ndatasets: []\n" + "\n".join(rows))
    assert len(path.read_text()) < 900
    with pytest.raises(InputError, match="aliases that expand"):
        import_file(path)


def test_two_recipes_with_templates_share_a_folder(tmp_path: Path) -> None:
    for name, template in (("one", "{{ messages }}1"), ("two", "{{ messages }}2")):
        recipe = write(tmp_path, f"{name}.in.yaml", BASE + f"chat_template: '{template}'\n")
        assert main(["import", str(recipe), "-o", str(tmp_path / f"{name}.yaml")]) == 0
    for name, template in (("one", "{{ messages }}1"), ("two", "{{ messages }}2")):
        job = yaml.safe_load((tmp_path / f"{name}.yaml").read_text())
        assert (tmp_path / job["data"]["chat_template"]).read_text() == template


HOME_MADE = """model: distilgpt2
dataset: data.jsonl
batch_size: 8
gradient_accumulation: 4
epochs: 3
learning_rate: 3e-4
optimizer: AdamW
checkpoint_dir: ./ckpt
"""


def test_a_configuration_of_ones_own_is_read_by_its_words(tmp_path: Path) -> None:
    found = imported(tmp_path, HOME_MADE)
    assert found.blockers == found.named == []
    assert says(found, model_model_name_or_path="distilgpt2", method_name="full")
    assert says(found, task="causal-lm", data_train=[{"path": "data.jsonl"}])
    assert says(found, train_per_device_train_batch_size=8, train_gradient_accumulation_steps=4)
    assert says(found, train_num_train_epochs=3, train_learning_rate=3e-4)
    assert says(found, train_optim="adamw_torch")
    assert found.job["output_dir"] == "./ckpt"


@pytest.mark.parametrize(
    "setting",
    [
        "objective: dpo\n",
        "beta: 0.1\n",
        "method: grpo\n",
        "training:\n  beta: 0.1\n",
        "loss: dpo\n",
        "algorithm: ppo\n",
        "trainer: DPOTrainer\n",
        "training_type: orpo\n",
    ],
)
def test_no_other_objective_of_ones_own_makes_a_job(setting: str, tmp_path: Path) -> None:
    assert imported(tmp_path, HOME_MADE + setting).blockers


def test_an_unknown_or_other_word_of_ones_own_is_named(tmp_path: Path) -> None:
    text = HOME_MADE + "eval:\n  batch_size: 64\nfancy_noise: 0.5\n"
    found = imported(tmp_path, text)
    assert {line.key: line.effect for line in found.named} == {
        "eval.batch_size": "differs",
        "fancy_noise": "differs",
    }


@pytest.mark.parametrize(
    ("head", "task"),
    [
        ("SequenceClassification", "classification"),
        ("SequenceClassification, num_labels=1", "regression"),
        (
            "SequenceClassification, problem_type='multi_label_classification'",
            "multi-label-classification",
        ),
        ("TokenClassification, num_labels=9", "token-classification"),
    ],
)
def test_a_head_says_the_task(head: str, task: str, tmp_path: Path) -> None:
    kind, _, keys = head.partition(", ")
    text = (
        "from transformers import Trainer, TrainingArguments\n"
        f"model = AutoModelFor{kind}.from_pretrained('org/m', {keys})\n"
        "args = TrainingArguments('out', learning_rate=1e-5)\n"
        "Trainer(model=model, args=args, train_dataset=load_dataset('org/d')['train']).train()\n"
    )
    assert imported(tmp_path, text, "train.py").job["task"] == task


@pytest.mark.parametrize(
    ("line", "task"),
    [
        ("run_glue.py --task_name stsb", "regression"),
        ("run_glue.py --task_name mrpc", "classification"),
        ("run_classification.py --train_file t.csv --do_regression True", "regression"),
        ("run_ner.py --dataset_name conll2003", "token-classification"),
    ],
)
def test_a_script_says_the_task(line: str, task: str, tmp_path: Path) -> None:
    text = f"python {line} --model_name_or_path org/m --output_dir o --do_train\n"
    assert imported(tmp_path, text, "run.sh").job["task"] == task


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("class Own(Trainer):\n    def compute_loss(self, *a): ...", "Own.compute_loss"),
        ("for p in model.parameters():\n    p.requires_grad = False", "parameters.requires_grad_"),
        ("model.roberta.requires_grad_(False)", "model.roberta.requires_grad_"),
        ("ds = ds.filter(f)", "ds.filter"),
        ("ds = ds.select(range(500))", "ds.select"),
    ],
)
def test_code_of_a_script_that_changes_what_is_learned_is_named(
    line: str, named: str, tmp_path: Path
) -> None:
    text = (
        "from transformers import Trainer, TrainingArguments\n"
        "ds = load_dataset('org/d')['train']\n"
        "model = AutoModelForSequenceClassification.from_pretrained('org/m')\n"
        f"{line}\n"
        "args = TrainingArguments('out', learning_rate=1e-5)\n"
        "Trainer(model=model, args=args, train_dataset=ds).train()\n"
    )
    found = imported(tmp_path, text, "train.py")
    assert [line.effect for key, line in found.lines.items() if key == named] == ["differs"]


def test_a_text_that_doubles_with_each_line_of_a_script_is_left_open(tmp_path: Path) -> None:
    text = (
        "from transformers import Trainer, TrainingArguments\n"
        "s = 'x'\n" + "s = s + s\n" * 60 + "args = TrainingArguments(s)\n"
        "Trainer(model='org/m', args=args)\n"
    )
    assert "output_dir" not in imported(tmp_path, text, "train.py").job


def test_what_blocks_a_job_is_said_with_its_value(tmp_path: Path, cli: Cli) -> None:
    path = write(tmp_path, "ax.yaml", "base_model: a/b\nadapter: ia3\ndatasets: [{path: c/d}]\n")
    assert "adapter: ia3 (farthing has no adapter of this kind)" in cli.err("import", path)


def test_a_method_beside_a_preference_of_together_is_mapped(tmp_path: Path) -> None:
    asked = {
        "training_file": "a.jsonl",
        "model": "org/m",
        "training_type": {"type": "Full"},
        "training_method": {"method": "dpo"},
    }
    found = imported(tmp_path, json.dumps(asked), "job.json")
    assert found.lines["training_type.type"].became == "method.name"
    assert found.job["method.name"] == "full"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("lf.yaml", "model_name_or_path: a/b\nstage: sft\ndataset: x\nenable_thinking: false\n"),
        ("ax.yaml", "base_model: a/b\ndatasets: [{path: c/d}]\nchat_template: x\n1: {2: 3}\n"),
    ],
)
def test_what_is_off_and_still_changes_the_text_is_named(
    name: str, text: str, tmp_path: Path
) -> None:
    found = imported(tmp_path, text, name)
    key = "enable_thinking" if name == "lf.yaml" else "1.2"
    assert found.lines[key].effect == "differs"


def test_a_setting_that_only_running_tells_is_not_taken_as_its_source(tmp_path: Path) -> None:
    text = (
        "from transformers import Trainer, TrainingArguments\n"
        "args = TrainingArguments('out', lr_scheduler_type='warmup_stable_decay',\n"
        "    lr_scheduler_kwargs={'num_decay_steps': n})\nTrainer(model='org/m', args=args)\n"
    )
    found = imported(tmp_path, text, "train.py")
    assert "train.lr_scheduler_kwargs" not in found.job
    assert found.lines["TrainingArguments.lr_scheduler_kwargs"].effect == "differs"


@pytest.mark.parametrize(
    "text",
    [
        "base_model: a/b\ndatasets: 2.5\nplugins: 3\nlora_target_modules: 1\n",
        "model_name_or_path: a/b\nstage: sft\ndataset: x\ntemplate: {a: 1}\n",
        "model_name_or_path: a/b\ndataset_mixer: {x: 1}\ndataset_splits: [[1]]\nmax_length: 9\n",
        "model_name_or_path: a/b\ndataset_name: x\nobjective: dpo\nrpo_alpha: {a: 1}\n",
    ],
)
def test_a_value_of_an_odd_kind_is_named_or_refused(text: str, tmp_path: Path) -> None:
    path = write(tmp_path, "odd.yaml", text)
    assert main(["import", str(path)]) in (0, 2)


SCRIPT = """from unsloth import FastLanguageModel, PatchDPOTrainer
from trl import SFTConfig, SFTTrainer
PatchDPOTrainer()
model, tokenizer = FastLanguageModel.from_pretrained("org/m", load_in_4bit=False)
model = FastLanguageModel.get_peft_model(model, r=8, target_modules=["q_proj", "lm_head"])
tokenizer.chat_template = text
rows = load_dataset("org/d", split="train").train_test_split(test_size=0.1)
args = SFTConfig("out", learning_rate=1e-5)
args.max_steps = 50
SFTTrainer(model=model, args=args, train_dataset=rows["train"]).train()
"""


def test_what_a_script_sets_beside_its_calls_is_read_or_named(tmp_path: Path) -> None:
    found = imported(tmp_path, SCRIPT, "train.py")
    assert found.blockers == []
    assert says(found, data_eval_fraction=0.1, method_target_modules=["q_proj"])
    assert says(found, method_modules_to_save=["lm_head"])  # Unsloth trains it in full
    effects = {line.key: line.effect for line in found.named}
    assert effects["SFTConfig#2.max_steps"] == "differs"
    assert effects["get_chat_template.chat_template"] == "differs"


@pytest.mark.parametrize(
    ("line", "key", "effect"),
    [
        ("torchrun --nproc_per_node 8 run_clm.py", "launcher.nproc_per_node", "differs"),
        ("torchrun --nproc_per_node 1 run_clm.py", "launcher.nproc_per_node", "none"),
        ("torchrun --master_port 1 run_clm.py", "launcher.master_port", "none"),
        ("python my_train.py", "(script)", "differs"),
        ("trl sft --config sft.yaml", "config", "blocks"),
    ],
)
def test_what_a_command_says_beside_its_settings(
    line: str, key: str, effect: str, tmp_path: Path
) -> None:
    found = imported(tmp_path, f"{line} --model_name_or_path org/m --seed 3\n", "run.sh")
    assert found.lines[key].effect == effect


def test_pairs_of_glue_are_kept_apart_otherwise(tmp_path: Path) -> None:
    line = "python run_glue.py --model_name_or_path org/m --task_name {}\n"
    notes = [imported(tmp_path, line.format(of), "run.sh").notes for of in ("mrpc", "sst2")]
    assert ["separator" in " ".join(each) for each in notes] == [True, False]


def test_services_are_known_in_every_case_of_their_keys(tmp_path: Path) -> None:
    text = "base-model: accounts/fireworks/models/m\ndataset: d\nlora-rank: 4\nepochs: 2\n"
    found = imported(tmp_path, text)
    assert (found.source, found.job["method.lora_r"]) == ("fireworks", 4)
    text = (
        "from together import Together\nTogether().fine_tuning.create(training_file='a.jsonl',"
        " model='org/m', training_method='dpo', dpo_beta=0.3)\n"
    )
    assert imported(tmp_path, text, "together.py").job["objective.beta"] == 0.3


def test_attention_that_is_shifted_changes_the_result(tmp_path: Path) -> None:
    text = "model_name_or_path: a/b\nstage: sft\ndataset: x\nshift_attn: true\n"
    assert imported(tmp_path, text).lines["shift_attn"].effect == "differs"


TRAINER = """from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from datasets import load_dataset
data = load_dataset("org/d")
model = AutoModelForCausalLM.from_pretrained("org/m"{weights})
args = TrainingArguments("out", eval_strategy="epoch"{precision})
Trainer(model, args, train_dataset=data["train"], eval_dataset=data["test"]).train()
"""


@pytest.mark.parametrize(
    ("precision", "weights", "expected"),
    [
        ("", "", (False, None, False)),
        (", fp16=False", "", (False, False, False)),
        (", bf16=True", "", (True, None, None)),
        (", fp16=True", "", (None, True, None)),
        (", bf16=torch.cuda.is_bf16_supported()", "", (None, None, None)),
        ("", ", torch_dtype=torch.bfloat16", (None, None, None)),
    ],
)
def test_a_trainer_script_keeps_its_precision(
    precision: str, weights: str, expected: tuple[bool | None, ...], tmp_path: Path
) -> None:
    script = TRAINER.format(precision=precision, weights=weights)
    found = imported(tmp_path, script, "train.py")
    keys = ("train.bf16", "train.fp16", "train.tf32")
    assert tuple(found.job.get(key) for key in keys) == expected
    differs = {line.key for line in found.named if line.effect == "differs"}
    of_weights = {"AutoModelForCausalLM.from_pretrained.torch_dtype"} if weights else set()
    assert differs == of_weights


def test_a_script_evaluates_on_the_split_it_names(tmp_path: Path) -> None:
    found = imported(tmp_path, TRAINER.format(precision="", weights=""), "train.py")
    assert found.job["data.train"] == [{"path": "org/d", "split": "train"}]
    assert found.job["data.eval"] == [{"path": "org/d", "split": "test"}]


@pytest.mark.parametrize(
    ("name", "text", "bf16", "fp16"),
    [
        ("run.sh", "python run_clm.py --model_name_or_path m --train_file a.txt", False, None),
        (
            "run.sh",
            "accelerate launch --mixed_precision fp16 run_clm.py --model_name_or_path m"
            " --train_file a.txt",
            None,
            True,
        ),
        ("c.yaml", "stage: sft\nmodel_name_or_path: m\nfinetuning_type: full\n", False, None),
        ("c.yaml", "stage: sft\nmodel_name_or_path: m\nfinetuning_type: lora\n", None, None),
        ("c.yaml", "base_model: m\nmicro_batch_size: 2\n", None, None),
        ("c.yaml", "model: m\ndata: a.jsonl\nlr: 1.0e-4\nprecision: 16-mixed\n", None, True),
        ("c.yaml", "model: m\ndata: a.jsonl\nlr: 1.0e-4\ndtype: float32\n", False, None),
    ],
)
def test_a_tool_that_computes_in_fp32_by_default_is_taken_at_its_word(
    name: str, text: str, bf16: bool | None, fp16: bool | None, tmp_path: Path
) -> None:
    found = imported(tmp_path, text, name)
    assert found.job.get("train.bf16") is bf16
    assert found.job.get("train.fp16") is fp16


def test_trl_evaluates_on_its_default_split(tmp_path: Path) -> None:
    found = imported(tmp_path, BASE + "max_length: 64\neval_strategy: epoch\n")
    assert found.job["data.eval"] == [{"path": "org/d", "split": "test"}]


def test_accumulated_batches_of_tokens_are_named(tmp_path: Path) -> None:
    keys = {"displayName": "j", "dataset": "d", "baseModel": "accounts/f/models/m"}
    text = json.dumps(keys | {"gradientAccumulationSteps": 2, "learningRate": 1e-4})
    found = imported(tmp_path, text, "job.json")
    assert found.lines["gradientAccumulationSteps"].effect == "differs"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "base_model: m\nmicro_batch_size: 0x" + "f" * 5000),
        ("c.yaml", "base_model: m\nmicro_batch_size: " + "1:" * 3000 + "30"),
        ("c.json", '{"base_model": "m", "micro_batch_size": ' + "9" * 400 + "}"),
        ("c.yaml", "base_model: m\nmicro_batch_size: 2024-13-45"),
    ],
)
def test_a_number_that_no_job_holds_is_a_mistake_on_its_line(
    name: str, text: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match="can't be read"):
        imported(tmp_path, text, name)


def test_a_huge_number_of_a_script_is_unknown(tmp_path: Path) -> None:
    script = TRAINER.format(precision=", max_steps=0x" + "f" * 5000, weights="")
    assert "train.max_steps" not in imported(tmp_path, script, "train.py").job


def test_lists_within_lists_of_a_script_are_not_written_out(tmp_path: Path) -> None:
    lists = [f"a{i} = [{','.join([f'a{i - 1}'] * 10)}]" for i in range(1, 13)]
    script = TRAINER.format(precision=", report_to=a12, seed=7", weights="")
    script = "\n".join(['a0 = ["x"]', *lists, f"a{'.b' * 1500} = 1", script])
    found = imported(tmp_path, script, "train.py")
    assert found.job["train.seed"] == 7
    assert len(str(found.lines["TrainingArguments.report_to"].value)) < 1000


def test_variables_of_a_shell_script_are_not_written_out_without_bound(tmp_path: Path) -> None:
    plain = "python run_clm.py --model_name_or_path m --learning_rate 1e-4 --train_file a.txt\n"
    bomb = f'A="{"x" * 3000}"\n{plain.strip()} --seed {"$A" * 3000}\n'
    found = imported(tmp_path, bomb + plain, "run.sh")
    assert found.job["train.learning_rate"] == 1e-4
    assert "train.seed" not in found.job


@pytest.mark.parametrize(
    ("program", "keys"),
    [
        ("run_glue.py --task_name sst2", {"data.max_length": 128}),
        ("run_glue.py --task_name sst2 --max_seq_length 64", {"data.max_length": 64}),
        (
            "run_summarization.py --train_file a.json",
            {"data.max_length": 1024, "data.max_target_length": 128},
        ),
        (
            "run_glue_no_trainer.py --train_file a.csv",
            {"data.max_length": 128, "train.max_grad_norm": 0},
        ),
        ("run_clm.py --train_file a.txt", {"data.max_length": 1024}),
    ],
)
def test_a_program_keeps_its_defaults(program: str, keys: dict[str, float], tmp_path: Path) -> None:
    text = f"python {program} --model_name_or_path org/m --learning_rate 1e-4\n"
    found = imported(tmp_path, text, "run.sh")
    assert {key: found.job.get(key) for key in keys} == keys


def test_pre_training_packs_where_nothing_is_said(tmp_path: Path) -> None:
    text = "stage: pt\nmodel_name_or_path: m\nfinetuning_type: full\n"
    assert imported(tmp_path, text).lines["packing"].effect == "differs"
