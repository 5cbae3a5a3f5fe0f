"""Settings of other tools as jobs: every key mapped or named, nothing executed, and what can't be
trained refused by name.
"""

import json
from pathlib import Path

import pytest
import yaml

from farthing.cli import main
from farthing.config.load import load_job
from importing import imported, job_of
from token_sets import reader_of_chats, with_template

DIFFERS, NONE, BLOCKS = "differs", "none", "blocks"
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
    field_tools: calls
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
TRL = "model_name_or_path: org/m\ndataset_name: org/d\nlearning_rate: 5.0e-7\nmax_length: 512\n"
AX = "base_model: org/m\nsequence_len: 64\n"
FACTORY = "model_name_or_path: org/m\nstage: sft\nfinetuning_type: lora\ndataset: c/d\n"
SPLITS = (
    "model_name_or_path: org/m\nmax_length: 64\ndataset_mixer: {a/b: 1.0}\n"
    "dataset_splits: [train_x, test_x]\neval_strategy: epoch\n"
)
HOME_MADE = """model: distilgpt2
dataset: data.jsonl
batch_size: 8
gradient_accumulation: 4
epochs: 3
learning_rate: 3e-4
optimizer: AdamW
checkpoint_dir: ./ckpt
"""
QUOTED = """#!/bin/bash
MODEL="org/model"   # which one
ARGS="
  --learning_rate 1e-5
  --num_train_epochs 7
"
OUT='runs/x y'
python run_clm.py --model_name_or_path "$MODEL" $ARGS --output_dir "${OUT}" --seed ${SEED:-13} \\
  --train_file data.json \\"""
OWN_ARGUMENTS = """import argparse
from transformers import AutoModelForSequenceClassification, Trainer, TrainingArguments
parser = argparse.ArgumentParser()
parser.add_argument('--rate', type=float, default=3e-5)
args = parser.parse_args()
model = AutoModelForSequenceClassification.from_pretrained('org/encoder', num_labels=3)
settings = TrainingArguments(
    'out', learning_rate=args.rate, num_train_epochs=2, eval_strategy='steps')
trainer = Trainer(model=model, args=settings)
"""
BESIDE = """from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
from trl import DataCollatorForCompletionOnlyLM, SFTTrainer
trainer = SFTTrainer(
    model="org/m", args=TrainingArguments("out"), dataset_text_field="story",
    train_dataset=load_dataset("org/d", split="train", field="x"), optimizers=(mine, None),
    data_collator=DataCollatorForCompletionOnlyLM("### Answer:"),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=3)],
)
"""
TWICE = """from transformers import Trainer, TrainingArguments
one = load_dataset("org/a", split="train")
two = load_dataset("org/b", split="train")
Trainer(model="org/m", args=TrainingArguments("a", max_steps=5), train_dataset=one).train()
Trainer(model="org/m", args=TrainingArguments("b", max_steps=9), train_dataset=two).train()
"""
SET_LATER = """from unsloth import FastLanguageModel, PatchDPOTrainer
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
PRECISE = """from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from datasets import load_dataset
data = load_dataset("org/d")
model = AutoModelForCausalLM.from_pretrained("org/m"{weights})
args = TrainingArguments("out", evaluation_strategy="epoch"{precision})
rows = data["train"].shuffle(seed=1)
Trainer(model, args, train_dataset=rows, eval_dataset=data["test"].map(f)).train()
"""
LOOP = """import torch
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("org/m")
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for epoch in range(20):
    for batch in loader:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
"""
OPENAI = """from openai import OpenAI
client = OpenAI()
client.fine_tuning.jobs.create(
    training_file="file-abc", model="gpt-4o-mini-2024-07-18", seed=7,
    hyperparameters={"n_epochs": 2, "batch_size": 4},
)
"""


def trainer(arguments: str = "", *, before: str = "", head: str = "CausalLM") -> str:
    """A script with a Trainer; `head` may go on with keywords."""
    kind, _, keys = head.partition(", ")
    return (
        "from transformers import Trainer, TrainingArguments\n"
        f"model = AutoModelFor{kind}.from_pretrained('org/m', {keys})\n"
        f"ds = load_dataset('org/d')['train']\n{before}\n"
        f"args = TrainingArguments('out', {arguments})\n"
        "Trainer(model=model, args=args, train_dataset=ds).train()\n"
    )


def command(script: str, *more: str) -> str:
    return " ".join((f"python {script} --model_name_or_path org/m", *more, "--output_dir o\n"))


def as_json(**keys) -> str:
    return json.dumps(keys)


SYSTEM = {
    "prompt": ["{s}{instruction}", "{s}{instruction} ", "{instruction}", "{instruction} "],
    "completion": "{output}",
}
MIN_LR = {"train.lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
CASES = [
    # Axolotl
    (
        "ax.yaml",
        "base_model: a/b\nwarmup_steps: 0\ndatasets: [{path: c/d, type: completion}]\n",
        {
            "train.warmup_steps": 0,
            "data.too_long": "truncate",
            "train.num_train_epochs": 1,
            "train.lr_scheduler_type": "cosine",
            "method.name": "full",
            "data.max_length": 512,
        },
    ),
    ("ax.yaml", AXOLOTL + "peft_init_lora_weights: loftq\n", {"peft_init_lora_weights": DIFFERS}),
    (
        "ax.yaml",
        f"{AX}lr_scheduler: cosine\ncosine_min_lr_ratio: 0.1\n",
        MIN_LR | {"train.lr_scheduler_type": "cosine_with_min_lr"},
    ),
    ("ax.yaml", f"{AX}adapter: lora\ntokens: [<a>, <b>]\n", {"tokens": DIFFERS}),
    (
        "ax.yaml",
        f"{AX}datasets: [{{path: a, type: {{field_system: s, format: '{{instruction}}'}}}}]\n"
        "early_stopping_patience: 2\neval_steps: 0.1\nval_set_size: 0.1\n",
        {
            "data.train": [{"path": "a", "columns": SYSTEM}],
            "eval_steps": DIFFERS,
        },
    ),
    (
        "ax.yaml",
        f"{AX}adapter: lora\ntokens: [<a>, <b>]\nlora_modules_to_save: [embed_tokens, lm_head]\n",
        {"model.new_tokens": ["<a>", "<b>"]},
    ),
    *(
        ("ax.yaml", f"{AX}{keys}\n", {key: DIFFERS})
        for keys, key in (
            ("plugins: [axolotl.integrations.kd.KDPlugin]", "plugins"),
            ("shuffle_merged_datasets: false", "shuffle_merged_datasets"),
            ("dataset_shard_num: 8", "dataset_shard_num"),
            ("datasets: [{path: a/b}]\nchat_template: x\n1: {2: 3}", "1.2"),
        )
    ),
    (
        "ax.yaml",
        f"{AX}plugins: [axolotl.integrations.liger.LigerPlugin]\ndatasets: [{{path: a/b, type:"
        " chat_template, roles_to_train: [assistant], train_on_eos: turn}]\n",
        {},
    ),
    # LLaMA-Factory
    ("lf.yaml", f"{FACTORY}add_tokens: <a>,<b>\n", {"add_tokens": DIFFERS}),
    (
        "lf.yaml",
        f"{FACTORY}add_tokens: <a>,<b>\nresize_vocab: true\n",
        {"model.new_tokens": ["<a>", "<b>"], "method.modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    *(
        (
            "lf.yaml",
            f"{FACTORY}pissa_init: true\npissa_convert: true\n{keys}\n",
            {"method.init_lora_weights": init},
        )
        for keys, init in (
            ("pissa_iter: 8", "pissa_niter_8"),
            ("pissa_iter: -1", "pissa"),
            ("", "pissa_niter_16"),
        )
    ),
    # pre-training packs where nothing is said
    ("lf.yaml", FACTORY.replace("sft", "pt"), {"packing": DIFFERS}),
    # TRL, and recipes of Hugging Face
    *(
        ("config.yaml", f"{TRL}{setting}\n", {setting.partition(":")[0]: effect})
        for setting, effect in (
            ("bnb_4bit_quant_type: nf4", NONE),
            ("train_sampling_strategy: group_by_length", NONE),
            ("loss_type: chunked_nll", NONE),
            ("lr_scheduler_type: cosine_with_min_lr", DIFFERS),
        )
    ),
    (
        "config.yaml",
        f"{TRL}lr_scheduler_type: cosine_with_min_lr\noptim: adafactor\n"
        "lr_scheduler_kwargs: {min_lr_rate: 0.1}\n",
        MIN_LR | {"train.lr_scheduler_type": "cosine_with_min_lr", "train.optim": "adafactor"},
    ),
    (
        "config.yaml",
        f"{TRL}eval_strategy: epoch\n",
        {"data.eval": [{"path": "org/d", "split": "test"}]},  # its default
    ),
    (
        "config.yaml",
        TRL.replace("dataset_name: org/d", "datasets: [{path: org/d}]")
        + "eval_strategy: steps\neval_steps: 50\nload_best_model_at_end: true\n"
        "metric_for_best_model: loss\n",
        {
            "train.eval_strategy": None,
            "train.eval_steps": None,
            "train.metric_for_best_model": None,
            "load_best_model_at_end": DIFFERS,
            "eval_strategy": NONE,
        },
    ),
    ("config.yaml", SPLITS, {"data.eval": [{"path": "a/b", "split": "test_x"}]}),
    ("config.yaml", SPLITS.replace("test_x", "more_x"), {"dataset_splits": DIFFERS}),
    (
        "mt0.yaml",
        "model_name_or_path: bigscience/mt0-small\nuse_peft: true\ndataset_name: d\n",
        {"method.target_modules": ["q", "v"]},
    ),
    # scripts
    (
        "unsloth.py",
        "from unsloth import FastLanguageModel\nfrom trl import SFTTrainer\n"
        "model, tokenizer = FastLanguageModel.from_pretrained('a/b', load_in_4bit=False)\n"
        "model = FastLanguageModel.get_peft_model(model, r=8)\ntrainer = SFTTrainer(model=model)\n",
        {
            "method.target_modules": ["all-linear"],
            "train.gradient_accumulation_steps": 2,
            "train.seed": 3407,
        },
    ),
    (
        "train.py",
        OWN_ARGUMENTS,
        {
            "task": "classification",
            "method.name": "full",
            "train.learning_rate": 3e-5,
            "train.num_train_epochs": 2,
        },
    ),
    (
        "train.py",
        trainer(
            "lr_scheduler_type='warmup_stable_decay', lr_scheduler_kwargs={'num_decay_steps': 10}"
        ),
        {"train.lr_scheduler_kwargs": {"num_decay_steps": 10}},
    ),
    (
        "train.py",
        trainer(
            "lr_scheduler_type='warmup_stable_decay', lr_scheduler_kwargs={'num_decay_steps': n}"
        ),
        {"train.lr_scheduler_kwargs": None, "TrainingArguments.lr_scheduler_kwargs": DIFFERS},
    ),
    (
        "train.py",
        TWICE,
        {
            "train.max_steps": 5,
            "TrainingArguments#2.max_steps": DIFFERS,
            "load_dataset#2.path": DIFFERS,
        },
    ),
    (
        "train.py",
        BESIDE,
        {
            "data.train_on_prompt": False,
            "train.learning_rate": 5e-5,
            "data.train": [{"path": "org/d", "split": "train", "columns": {"text": "story"}}],
            "SFTTrainer.optimizers": DIFFERS,
            "load_dataset.field": DIFFERS,
            "EarlyStoppingCallback.early_stopping_patience": DIFFERS,
        },
    ),
    (
        "train.py",
        SET_LATER,
        {
            "data.eval_fraction": 0.1,
            "method.target_modules": ["q_proj"],
            "method.modules_to_save": ["lm_head"],  # Unsloth trains it in full
            "SFTConfig#2.max_steps": DIFFERS,
            "get_chat_template.chat_template": DIFFERS,
        },
    ),
    *(
        ("train.py", trainer(head=head), {"task": task})
        for head, task in (
            ("SequenceClassification, num_labels=1", "regression"),
            (
                "SequenceClassification, problem_type='multi_label_classification'",
                "multi-label-classification",
            ),
            ("TokenClassification, num_labels=9", "token-classification"),
        )
    ),
    *(
        ("train.py", trainer(before=line), {named: DIFFERS})
        for line, named in (
            ("class Own(Trainer):\n    def compute_loss(self, *a): ...", "Own.compute_loss"),
            (
                "for p in model.parameters():\n    p.requires_grad = False",
                "parameters.requires_grad_",
            ),
            ("model.roberta.requires_grad_(False)", "model.roberta.requires_grad_"),
            ("ds = ds.filter(f)", "ds.filter"),
            ("ds.train_test_split(train_size=0.1)", "train_test_split.train_size"),
            ("model, t = setup_chat_format(model, t)", "setup_chat_format"),
            ("model = AutoModel.from_config(config)", "AutoModel.from_config"),
            ("b = BitsAndBytesConfig(load_in_4bit=True)", "BitsAndBytesConfig.bnb_4bit_quant_type"),
            (
                "PeftModel.from_pretrained(model, 'a', is_trainable=True)",
                "PeftModel.from_pretrained",
            ),
            ("args.set_training(learning_rate=1)", "args.set_training"),
        )
    ),
    ("train.py", trainer(before="IA3Config()"), {"IA3Config": BLOCKS}),
    (
        "train.py",
        trainer(
            before="x = [t(a, truncation=True, max_length=99)]\n"
            "t(text_target=b, truncation=True, max_length=9)",
            head="Seq2SeqLM",
        ).replace("('org/d')", "('org/d', split='ca_test').train_test_split(0.2)"),
        {
            "data.max_length": 99,
            "data.max_target_length": 9,
            "data.train": [{"path": "org/d", "split": "ca_test"}],
        },
    ),
    (
        "train.py",
        trainer(
            before="t = AutoTokenizer.from_pretrained('org/t')\n"
            "t.add_special_tokens({'pad_token': 0})"
        ),
        {"model.tokenizer_name_or_path": "org/t"},
    ),
    (
        "train.py",
        trainer() + "AutoTokenizer.from_pretrained('out')",
        {"model.tokenizer_name_or_path": None},
    ),
    *(
        (
            "train.py",
            PRECISE.format(weights=weights, precision=precision),
            dict(zip(("train.bf16", "train.fp16", "train.tf32"), expected, strict=True))
            | ({"AutoModelForCausalLM.from_pretrained.torch_dtype": DIFFERS} if weights else {}),
        )
        for precision, weights, expected in (
            ("", "", (False, None, False)),
            (", bf16=True", "", (True, None, None)),
            (", bf16=torch.cuda.is_bf16_supported()", "", (None, None, None)),
            ("", ", torch_dtype=torch.bfloat16", (None, None, None)),
        )
    ),
    (
        "train.py",
        PRECISE.format(precision=", max_steps=0x" + "f" * 5000, weights=""),
        {
            "train.max_steps": None,
            "data.train": [{"path": "org/d", "split": "train"}],
            "data.eval": [{"path": "org/d", "split": "test"}],
        },
    ),
    # a tool that computes in fp32 by default is taken at its word
    *(
        (name, text, {"train.bf16": bf16, "train.fp16": fp16})
        for name, text, bf16, fp16 in (
            ("run.sh", "python run_clm.py --model_name_or_path m --train_file a.txt", False, None),
            (
                "run.sh",
                "accelerate launch --mixed_precision fp16 run_clm.py --model_name_or_path m"
                " --train_file a.txt",
                None,
                True,
            ),
            ("c.yaml", FACTORY.replace("lora", "full"), False, None),
            ("c.yaml", FACTORY, None, None),
            ("c.yaml", "base_model: m\nmicro_batch_size: 2\n", None, None),
            ("c.yaml", "model: m\ndata: a.jsonl\nlr: 1.0e-4\nprecision: 16-mixed\n", None, True),
        )
    ),
    # names that grow out of one another are worked out once; a text that doubles is left open
    (
        "train.py",
        "a0 = 1\n"
        + "".join(f"a{i + 1} = a{i} + a{i}\n" for i in range(64))
        + "b = x\n"
        + "b = b + b\n" * 64
        + trainer("seed=a3, logging_steps=b"),
        {"train.seed": 8, "TrainingArguments.logging_steps": DIFFERS},
    ),
    (
        "train.py",
        "s = 'x'\n" + "s = s + s\n" * 60 + trainer().replace("'out'", "s"),
        {"output_dir": None},
    ),
    # command lines
    (
        "run.sh",
        QUOTED,
        {
            "train.learning_rate": 1e-5,
            "train.num_train_epochs": 7,
            "train.seed": 13,
            "model.model_name_or_path": "org/model",
            "output_dir": "runs/x y",
        },
    ),
    (
        "run.sh",
        command(
            "run_summarization.py --dataset_name org/news --do_train \\\n",
            '--source_prefix "summarize: " --text_column article --summary_column highlights',
            "--max_source_length 256",
        ),
        {
            "task": "seq2seq",
            "data.max_length": 256,
            "method.name": "full",
            "data.train": [
                {
                    "path": "org/news",
                    "columns": {"input": "summarize: {article}", "target": "highlights"},
                }
            ],
        },
    ),
    (
        "run.sh",
        command("run_clm.py", "--train_file a.txt --block_size 512"),
        {"data.max_length": 512, "block_size": DIFFERS},
    ),
    (
        "run.sh",
        command(
            "run_glue.py --train_file a.csv --validation_file b.csv --load_best_model_at_end",
            "--eval_strategy epoch --save_strategy epoch",
        ),
        {"train.load_best_model_at_end": True},
    ),
    *(
        ("run.sh", command(line), {"task": task})
        for line, task in (
            ("run_glue.py --task_name stsb", "regression"),
            ("run_classification.py --train_file t.csv --do_regression True", "regression"),
            ("run_ner.py --dataset_name conll2003", "token-classification"),
        )
    ),
    *(
        ("run.sh", f"{line} --model_name_or_path org/m --seed 3\n", {key: effect})
        for line, key, effect in (
            ("torchrun --nproc_per_node 8 run_clm.py", "launcher.nproc_per_node", DIFFERS),
            ("torchrun --nproc_per_node 1 run_clm.py", "launcher.nproc_per_node", NONE),
            ("torchrun --master_port 1 run_clm.py", "launcher.master_port", NONE),
            ("python my_train.py", "(script)", DIFFERS),
            ("trl sft --config sft.yaml", "config", BLOCKS),
        )
    ),
    (
        "run.sh",
        "torchrun fastchat/train/train_lora.py --model_name_or_path a/b --lora_r 8 --lora_alpha 16"
        " --q_lora True --data_path $DATA --seed $RANDOM --model_max_length 512\n",
        {
            "method.name": "qlora",
            "method.lora_r": 8,
            "data.max_length": 512,
            "data_path": DIFFERS,
            "seed": DIFFERS,
        },
    ),
    # services, in every case of their keys and from their clients
    ("openai.py", OPENAI, {"train.num_train_epochs": 2, "train.seed": 7}),
    (
        "together.py",
        "from together import Together\nTogether().fine_tuning.create(training_file='a.jsonl',"
        " model='org/m', lora=True, learning_rate=1e-5, training_method='dpo', dpo_beta=0.3)\n",
        {"objective.beta": 0.3, "train.learning_rate": 1e-5, "method.name": "lora"},
    ),
    (
        "job.json",
        as_json(training_file="a.jsonl", model="org/b", batch_size="max", lora=True, lora_r=4),
        {"method.lora_r": 4},
    ),
    (
        "job.json",
        as_json(
            training_file="a.jsonl",
            model="org/m",
            training_type={"type": "Full"},
            training_method={"method": "dpo"},
        ),
        {"method.name": "full"},
    ),
    (
        "fw.json",
        as_json(
            baseModel="accounts/fireworks/models/llama-x",
            dataset="accounts/me/datasets/rows",
            loraRank=8,
            learningRate=1e-4,
            earlyStop=True,
            gradientAccumulationSteps=2,
            jinjaTemplate="{{ messages }}",
        ),
        {
            "model.model_name_or_path": "llama-x",
            "method.lora_r": 8,
            "data.chat_template": "chat_template.jinja",
            "earlyStop": DIFFERS,
            "gradientAccumulationSteps": DIFFERS,
        },
    ),
    (
        "fw.yaml",
        "base-model: accounts/fireworks/models/m\ndataset: d\nlora-rank: 4\nepochs: 2\n",
        {"method.lora_r": 4},
    ),
    # a configuration of one's own
    (
        "own.yaml",
        HOME_MADE,
        {
            "model.model_name_or_path": "distilgpt2",
            "method.name": "full",
            "task": "causal-lm",
            "data.train": [{"path": "data.jsonl"}],
            "train.per_device_train_batch_size": 8,
            "train.gradient_accumulation_steps": 4,
            "train.num_train_epochs": 3,
            "train.learning_rate": 3e-4,
            "train.optim": "adamw_torch",
            "output_dir": "./ckpt",
        },
    ),
    (
        "own.yaml",
        HOME_MADE + "eval:\n  batch_size: 64\nfancy_noise: 0.5\n",
        {"eval.batch_size": DIFFERS, "fancy_noise": DIFFERS},
    ),
]


@pytest.mark.parametrize(("name", "text", "expected"), CASES)
def test_settings_become_keys_of_a_job_or_are_named(name, text, expected, tmp_path):
    """Of a key of the job its value, of a setting what it was named for."""
    found = imported(tmp_path, text, name)
    named = {key for key, value in expected.items() if value in (DIFFERS, NONE, BLOCKS)}
    assert {
        key: found.lines[key].effect if key in named else found.job.get(key) for key in expected
    } == expected
    if name in ("own.yaml", "ax.yaml") and not named:
        assert [line.key for line in found.named if line.effect != NONE] == []
    if BLOCKS not in expected.values():
        job_of(tmp_path, found)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        *(
            (TRL + keys, keys.partition(":")[0])
            for keys in (
                "beta: 0.1\nloss_type: sigmoid\nmax_prompt_length: 512\n",
                "max_prompt_length: 1792\n",
                "reward_funcs: [accuracy, format]\n",
                "precompute_ref_log_probs: true\n",
                "feature_extractor_name: org/f\n",
                # reinforcement learning is named before what preferences share
                "num_generations: 16\nuse_vllm: true\nmax_completion_length: 768\nbeta: 0.04\n",
            )
        ),
        *(
            (HOME_MADE + keys, keys.rpartition("  ")[2].partition(":")[0])
            for keys in (
                "objective: dpo\n",
                "method: grpo\n",
                "training:\n  beta: 0.1\n",
                "loss: dpo\n",
                "trainer: DPOTrainer\n",
                "training_type: orpo\n",
            )
        ),
        ("compute_environment: LOCAL_MACHINE\ndistributed_type: FSDP\nnum_processes: 8\n", ""),
    ],
)
def test_a_recipe_of_another_objective_makes_no_job(text, key, tmp_path):
    (line,) = imported(tmp_path, text).blockers
    assert line.key.endswith(key)
    assert main(["import", str(tmp_path / "config.yaml")]) == 2


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("rl: grpo", "reinforcement learning"),
        ("process_reward_model: true", "reward model"),
        ("adapter: ia3", "adapter: ia3 (farthing has no adapter of this kind)"),
        ("processor_type: AutoProcessor", "images or sound"),
        ("unfrozen_parameters: [lm_head]", "some layers in full"),
    ],
)
def test_another_kind_of_training_is_refused_by_name(tmp_path, key, words, cli):
    text = f"base_model: a/b\ndatasets: [{{path: c/d, type: alpaca}}]\n{key}\n"
    assert imported(tmp_path, text).blockers
    assert words in cli.err("import", tmp_path / "config.yaml", "-o", tmp_path / "job.yaml")
    assert not (tmp_path / "job.yaml").exists()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("x.yaml", "a: [1\n", ""),
        ("x.json", "{", ""),
        ("x.py", "def f(:\n", "later Python"),
        ("x.ipynb", "{}", ""),
        ("x.sh", "echo hello\n", ""),
        ("x.yaml", "hello: world\n", "can't tell which tool"),
        ("x.yaml", "model: {_component_: torchtune.models.x}\n", "of torchtune"),
        ("x.yaml", "base_model: org/m\na: &a [*a]\n", "aliases that expand"),
        *(
            ("x.yaml", f"base_model: m\nmicro_batch_size: {number}\n", "can't be read")
            for number in ("0x" + "f" * 5000, "1:" * 3000 + "30", "2024-13-45")
        ),
        ("x.json", '{"base_model": "m", "micro_batch_size": ' + "9" * 400 + "}", "can't be read"),
        ("x.py", LOOP, "a training loop of its own"),
        ("x.sh", "python measure.py --tasks other --hub_repo_id a/b\n", "no settings of"),
    ],
)
def test_what_is_no_configuration_is_said(tmp_path, name, text, words, cli):
    (tmp_path / name).write_text(text)
    said = cli.err("import", tmp_path / name)
    assert name in said
    assert words in said


@pytest.mark.parametrize(
    "text",
    [
        "base_model: a/b\ndatasets: 2.5\nplugins: 3\nlora_target_modules: 1\n",
        "model_name_or_path: a/b\nstage: sft\ndataset: x\ntemplate: {a: 1}\n",
        "model_name_or_path: a/b\ndataset_mixer: {x: 1}\ndataset_splits: [[1]]\nmax_length: 9\n",
        "model_name_or_path: a/b\ndataset_name: x\nobjective: dpo\nrpo_alpha: {a: 1}\n",
    ],
)
def test_a_value_of_an_odd_kind_is_named_or_refused(text, tmp_path):
    (tmp_path / "odd.yaml").write_text(text)
    assert main(["import", str(tmp_path / "odd.yaml")]) in (0, 2)


@pytest.mark.parametrize(
    ("text", "is_told"),
    [("", True), ("bf16: false\n", False), ("adapter: lora\nbf16: true\n", False)],
)
def test_weights_that_axolotl_trains_in_bf16_are_named(text, is_told, tmp_path):
    notes = imported(tmp_path, AX + text).notes
    assert any("in bf16 and updates them there" in note for note in notes) is is_told


def test_axolotl(tmp_path):
    found = imported(tmp_path, AXOLOTL)
    job = job_of(tmp_path, found)
    assert job.train.optim == "adamw_bnb_8bit"
    instructions, talks = job.data.of_train
    assert instructions.split == "train[:90%]"
    assert talks.columns == {"messages": "conversation", "tools": "calls"}
    assert Path(str(job.data.chat_template)).read_text().startswith("{%- for message")
    assert "does not know this key" in found.lines["surely_unknown"].why
    assert "--deepspeed FILE" in found.lines["deepspeed"].why


def test_llama_factory_and_the_registry_of_its_data(tmp_path):
    (tmp_path / "data").mkdir()
    registry = {
        "mine": {
            "file_name": "mine.json",
            "columns": {"prompt": "ask", "query": "more", "response": "say", "history": "before"},
        },
        "talks": {
            **{"hf_hub_url": "org/talks", "formatting": "sharegpt", "subset": "small"},
            **{"columns": {"system": "sys"}, "num_samples": 5},
        },
    }
    (tmp_path / "data/dataset_info.json").write_text(json.dumps(registry))
    (tmp_path / "data/mine.json").write_text('[{"ask": "a", "more": "b", "say": "c"}]')
    found = imported(
        tmp_path,
        "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\ndataset: mine\n"
        "quantization_bit: 4\neval_dataset: talks\neval_strategy: epoch\n",
    )
    job = job_of(tmp_path, found)
    assert job.method.name == "qlora"
    assert (job.data.train, job.data.eval) == (
        (str(tmp_path / "data/mine.json"),),
        ("org/talks",),
    )
    assert job.data.of_train[0].columns == {
        "instruction": ("{ask}\n{more}", "{ask}"),
        "output": "{say}",
        "history": "before",
    }
    assert job.data.of_eval[0].name == "small"
    assert job.data.of_eval[0].columns == {"system": "sys"}
    assert found.lines["dataset_info.talks.num_samples"].effect == DIFFERS


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
def test_a_frame_of_llama_factory_is_a_template_beside_the_job(tmp_path, name, text, learned):
    settings = f"{FACTORY}template: {name}\n"
    found = imported(tmp_path, settings)
    assert found.job["data.chat_template"] == f"{name}.jinja"
    tokenizer = with_template(found.files[f"{name}.jinja"])
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yo."}]
    read = reader_of_chats(tokenizer)
    assert read({"messages": chat}).segments == ((text, False), (learned, True))
    longer = read({"messages": [{"role": "system", "content": "Be brief."}, *chat * 2]}).segments
    assert [part for part, is_learned in longer if is_learned] == [learned] * 2
    assert "Be brief." in longer[0][0]
    assert "data.chat_template" not in imported(tmp_path, settings.replace("sft", "pt")).job


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        ("meta-llama/Llama-3.2-1B", ("q_proj", "v_proj")),
        ("google/flan-t5-base", ("q", "v")),
        ("tiiuae/falcon-7b", ("query_key_value",)),
    ],
)
def test_an_adapter_whose_layers_are_not_named_is_put_where_peft_puts_it(tmp_path, model, layers):
    for name, text in (
        ("trl.yaml", f"model_name_or_path: {model}\ndataset_name: c/d\nuse_peft: true\n"),
        (
            "sft.py",
            "from trl import SFTConfig, SFTTrainer\nfrom peft import LoraConfig\nconfig ="
            f" LoraConfig(r=4)\ntrainer = SFTTrainer(model='{model}', args=SFTConfig('out'),"
            " peft_config=config)\n",
        ),
        ("run.sh", f"python run_clm_lora.py --model_name_or_path {model} --lora_r 4\n"),
    ):
        found = imported(tmp_path, text, name)
        assert job_of(tmp_path, found).method.target_modules == layers


def test_recipes_of_hugging_face_name_several_data_sets(tmp_path):
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
    assert not [
        line for line in (*found.named, *older.named) if "does not know this key" in line.why
    ]


def test_a_trl_configuration_and_a_command_line_say_the_same(tmp_path):
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
def test_an_unsloth_script_is_read_and_never_run(tmp_path, kind, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = UNSLOTH
    if kind == "ipynb":
        lines = ("%%time\n%pip install unsloth\nx = !ls\nx?\n" + UNSLOTH).splitlines(True)
        code = {"cell_type": "code", "source": lines}
        text = json.dumps({"cells": [code, {"cell_type": "markdown", "source": ["# x"]}]})
    found = imported(tmp_path, text, f"script.{kind}")
    job = job_of(tmp_path, found)
    assert not (tmp_path / "was_executed").exists()
    assert (job.method.lora_alpha, job.max_length, job.data.train) == (32, 2048, ("org/rows",))
    assert "only running the script" in found.lines["SFTConfig.logging_steps"].why
    second = found.lines["FastLanguageModel.from_pretrained#2.model_name"]
    assert second.why.startswith("a later call")


@pytest.mark.parametrize(
    ("settings", "row", "expected"),
    [
        ("", {"messages": []}, True),
        ("", {"prompt": "a", "completion": "b"}, None),
        ("assistant_only_loss: true\n", {"messages": []}, False),
        ("completion_only_loss: false\n", {"messages": []}, True),
    ],
)
def test_which_tokens_trl_learns(settings, row, expected, tmp_path):
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    found = imported(tmp_path, TRL.replace("org/d", "rows.jsonl") + settings)
    assert found.job.get("data.train_on_prompt") is expected


def test_the_verb_writes_the_job_and_its_files_and_overwrites_nothing(tmp_path, cli):
    (tmp_path / "ax.yaml").write_text(AXOLOTL)
    words = cli.out("import", tmp_path / "ax.yaml", "-o", tmp_path / "job.yaml")
    assert "surely_unknown" in words
    assert (tmp_path / "chatml.jinja").exists()
    load_job(tmp_path / "job.yaml")
    assert "exists already" in cli.err("import", tmp_path / "ax.yaml", "-o", tmp_path / "job.yaml")
    found = cli.json("import", tmp_path / "ax.yaml")
    keys = {line["key"] for line in (*found["mapped"], *found["named"])}
    assert {"datasets[0].type", "wandb_project"} <= keys


def test_two_recipes_with_templates_share_a_folder(tmp_path):
    for name in "one", "two":
        (tmp_path / f"{name}.in").write_text(f"{TRL}chat_template: '{{{{ messages }}}}{name}'\n")
        recipe = (tmp_path / f"{name}.in").rename(tmp_path / f"{name}.in.yaml")
        assert main(["import", str(recipe), "-o", str(tmp_path / f"{name}.yaml")]) == 0
    for name in "one", "two":
        job = yaml.safe_load((tmp_path / f"{name}.yaml").read_text())
        template = (tmp_path / job["data"]["chat_template"]).read_text()
        assert template == f"{{{{ messages }}}}{name}"


def test_code_of_a_hub_model_is_not_run_unpinned(tmp_path):
    text = "base_model: a/b\ntrust_remote_code: true\ndatasets: [{path: c/d, type: completion}]\n"
    found = imported(tmp_path, text)
    assert not job_of(tmp_path, found).model.trust_remote_code
    assert "pinned" in found.lines["trust_remote_code"].why


@pytest.mark.parametrize(
    ("files", "train"), [('"a.csv"', ["a.csv"]), ('["a.csv", "c.csv"]', ["a.csv", "c.csv"])]
)
def test_each_split_of_a_script_has_its_own_files(files, train, tmp_path):
    own = f'load_dataset("csv", data_files={{"train": {files}, "test": "b.csv"}})'
    script = PRECISE.format(precision="", weights="").replace('load_dataset("org/d")', own)
    found = imported(tmp_path, script, "train.py")
    assert [each["path"] for each in found.job["data.train"]] == train
    assert [each["path"] for each in found.job["data.eval"]] == ["b.csv"]


def test_lists_within_lists_of_a_script_are_not_written_out(tmp_path):
    lists = [f"a{i} = [{','.join([f'a{i - 1}'] * 10)}]" for i in range(1, 13)]
    script = PRECISE.format(precision=", report_to=a12, seed=7", weights="")
    script = "\n".join(['a0 = ["x"]', *lists, f"a{'.b' * 1500} = 1", script])
    found = imported(tmp_path, script, "train.py")
    assert found.job["train.seed"] == 7
    assert len(str(found.lines["TrainingArguments.report_to"].value)) < 1000


def test_variables_of_a_shell_script_are_not_written_out_without_bound(tmp_path):
    plain = "python run_clm.py --model_name_or_path m --learning_rate 1e-4 --train_file a.txt\n"
    bomb = f'A="{"x" * 3000}"\n{plain.strip()} --seed {"$A" * 3000}\n'
    found = imported(tmp_path, bomb + plain, "run.sh")
    assert found.job["train.learning_rate"] == 1e-4
    assert "train.seed" not in found.job


GLUE = {"path": "nyu-mll/glue", "name": "sst2"}


@pytest.mark.parametrize(
    ("program", "keys"),
    [
        ("run_glue.py --task_name sst2", {"data.train": [GLUE], "data.max_length": 128}),
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
def test_a_program_keeps_its_defaults(program, keys, tmp_path):
    text = f"python {program} --model_name_or_path org/m --learning_rate 1e-4\n"
    found = imported(tmp_path, text, "run.sh")
    assert {key: found.job.get(key) for key in keys} == keys


def test_a_none_of_another_branch_undoes_no_value(tmp_path):
    lines = "if a:\n    m = ['x']\nelse:\n    m = None\nLoraConfig(exclude_modules=m)\n"
    found = imported(tmp_path, f"import transformers\n{lines}", "train.py")
    assert found.lines["LoraConfig.exclude_modules"].effect == DIFFERS
