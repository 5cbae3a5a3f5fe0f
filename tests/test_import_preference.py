"""Preference jobs of other tools become such jobs; what is not offered is refused by name."""

import json
from pathlib import Path

import pytest

from command import sets
from farthing.config.job import Job
from farthing.tiny import make_model_folder, write_jsonl
from importing import imported, job_of

TRL = "model_name_or_path: org/m\ndataset_name: org/d\nmax_length: 1024\n"
AXOLOTL = "base_model: org/m\nsequence_len: 512\nlearning_rate: 5e-6\nmicro_batch_size: 4\n"
FACTORY = "model_name_or_path: org/m\nfinetuning_type: lora\ndataset: pairs\ntemplate: qwen\n"


def settings(job: Job):
    """The objective, without what is its default."""
    return {"name": job.task, **job.objective.model_dump(exclude_defaults=True)}


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ("objective: dpo\nbeta: 0.05\n", {"name": "dpo", "beta": 0.05}),
        (
            "rpo_alpha: 0.5\n",
            {"name": "dpo", "loss_type": ("sigmoid", "sft"), "loss_weights": (1.0, 0.5)},
        ),
        (
            "objective: dpo\nloss_type: [ipo, sft]\nloss_weights: [1.0, 2.0]\n",
            {"name": "dpo", "loss_type": ("ipo", "sft"), "loss_weights": (1.0, 2.0)},
        ),
        ("discopop_tau: 0.1\nloss_type: discopop\n", {"name": "dpo", "loss_type": "discopop"}),
        ("objective: dpo\nloss_type: robust\n", {"name": "dpo"}),
        ("desirable_weight: 1.5\nbeta: 0.2\n", {"name": "kto", "beta": 0.2}),
        ("cpo_alpha: 0.5\nloss_type: hinge\n", {"name": "cpo", "loss_type": "hinge"}),
        (
            "cpo_alpha: 0.0\nsimpo_gamma: 1.5\nbeta: 2.0\nloss_type: simpo\n",
            {"name": "simpo", "beta": 2.0, "simpo_gamma": 1.5},
        ),
        ("center_rewards_coefficient: 0.01\n", {"name": "reward"}),
    ],
)
def test_objectives_of_trl(keys, expected, tmp_path):
    found = settings(job_of(tmp_path, imported(tmp_path, TRL + keys)))
    assert {key: found.get(key) for key in expected} == expected


def test_a_folder_names_the_objective(tmp_path):
    folder = tmp_path / "orpo"
    folder.mkdir()
    found = imported(folder, TRL + "beta: 0.1\nmax_prompt_length: 512\n")
    assert job_of(folder, found).task == "orpo"
    assert found.lines["max_prompt_length"].effect == "differs"
    assert any("learns the prompt of the chosen answer" in note for note in found.notes)


def test_trl_trains_preferences_without_dropout_and_at_its_own_rates(tmp_path):
    text = TRL + "objective: dpo\nuse_peft: true\nlora_dropout: 0.1\nlabel_smoothing: 0.1\n"
    found = imported(tmp_path, text)
    job = job_of(tmp_path, found)
    assert (job.train.learning_rate, job.method.lora_dropout, job.too_long) == (1e-6, 0.0, "skip")
    assert settings(job) == {"name": "dpo", "label_smoothing": 0.1}
    assert any("ignores it since 0.29" in note for note in found.notes)
    reward = job_of(tmp_path, imported(tmp_path, TRL + "objective: reward\n"))
    assert reward.train.learning_rate == 1e-4


def test_simpo_is_said_to_have_other_defaults(tmp_path):
    found = imported(tmp_path, TRL + "cpo_alpha: 1.0\nloss_type: simpo\n")
    assert settings(job_of(tmp_path, found)) == {"name": "simpo", "beta": 0.1, "simpo_gamma": 0.5}
    assert found.lines["cpo_alpha"].effect == "differs"
    assert any("not SimPO's" in note for note in found.notes)


def test_command_lines_and_scripts_of_trl(tmp_path):
    for start in ("trl dpo", "accelerate launch -m trl dpo", "python -m trl.scripts.dpo"):
        command = imported(
            tmp_path,
            f"{start} --model_name_or_path org/m --dataset_name org/d --beta 0.2 --use_peft\n",
            "run.sh",
        )
        assert settings(job_of(tmp_path, command)) == {"name": "dpo", "beta": 0.2}
    script = imported(
        tmp_path,
        "from datasets import load_dataset\nfrom trl import KTOConfig, KTOTrainer\n"
        "from peft import LoraConfig\nrows = load_dataset('org/d', split='train')\n"
        "args = KTOConfig('out', beta=0.3, undesirable_weight=0.5, learning_rate=5e-7)\n"
        "trainer = KTOTrainer(model='org/m', args=args, train_dataset=rows,\n"
        "                     peft_config=LoraConfig(r=4, lora_dropout=0.05))\n",
        "train.py",
    )
    job = job_of(tmp_path, script)
    assert settings(job) == {"name": "kto", "beta": 0.3, "undesirable_weight": 0.5}
    assert (job.train.learning_rate, job.method.lora_r, job.method.lora_dropout) == (5e-7, 4, 0.0)
    older = imported(
        tmp_path,
        "from unsloth import FastLanguageModel\nfrom trl import DPOTrainer\n"
        "from transformers import TrainingArguments\n"
        "model, tok = FastLanguageModel.from_pretrained('org/m', load_in_4bit=True)\n"
        "model = FastLanguageModel.get_peft_model(model, r=8)\n"
        "trainer = DPOTrainer(model=model, ref_model=None, beta=0.25, max_length=512,\n"
        "                     args=TrainingArguments('out', learning_rate=5e-6))\n",
        "older.py",
    )
    job = job_of(tmp_path, older)
    assert settings(job) == {"name": "dpo", "beta": 0.25}
    assert (job.method.name, job.data.max_length) == ("qlora", 512)


def test_a_script_of_two_trainings_is_refused(tmp_path):
    text = (
        "from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer\n"
        "SFTTrainer(model='org/m', args=SFTConfig('a'))\n"
        "DPOTrainer(model='a', args=DPOConfig('b'))\n"
    )
    assert "several trainings" in imported(tmp_path, text, "both.py").blockers[0].why


@pytest.mark.parametrize(
    ("keys", "expected", "columns"),
    [
        (
            "rl: dpo\nrl_beta: 0.3\ndatasets: [{path: a/b, type: chat_template.default,"
            " field_messages: talk}]\ndpo_loss_type: [ipo, sft]\ndpo_loss_weights: [1, 0.5]\n",
            {"name": "dpo", "beta": 0.3, "loss_type": ("ipo", "sft"), "loss_weights": (1, 0.5)},
            {"messages": "talk"},
        ),
        (
            "rl: ipo\ndatasets: [{path: a/b, type: chatml.intel}]\n",
            {"name": "dpo", "loss_type": "ipo"},
            {
                "prompt": (
                    "<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{question}<|im_end|>\n"
                    "<|im_start|>assistant\n",
                    "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n",
                ),
                "chosen": "{chosen}<|im_end|>",
                "rejected": "{rejected}<|im_end|>",
            },
        ),
        (
            "rl: kto\nkto_undesirable_weight: 0.5\ndatasets:\n- path: a/b\n  type:"
            ' {field_prompt: ask, field_label: good, prompt_format: "Q: {prompt}"}\n',
            {"name": "kto", "undesirable_weight": 0.5},
            {"prompt": "Q: {ask}", "completion": "{completion}", "label": "good"},
        ),
        (
            "rl: orpo\norpo_alpha: 0.4\ndatasets: [{path: a/b, type: chat_template.argilla}]\n",
            {"name": "orpo", "beta": 0.4},
            {},
        ),
        (
            "rl: simpo\nrl_beta: 2.0\nsimpo_gamma: 1.0\ncpo_alpha: 0\ndatasets: [{path: a/b}]\n",
            {"name": "simpo", "beta": 2.0, "simpo_gamma": 1.0},
            {},
        ),
        (
            "reward_model: true\ndatasets: [{path: a/b, type: bradley_terry.chat_template}]\n",
            {"name": "reward"},
            {"prompt": "input"},
        ),
    ],
)
def test_objectives_of_axolotl(keys, expected, columns, tmp_path):
    job = job_of(tmp_path, imported(tmp_path, AXOLOTL + keys))
    assert settings(job) == expected
    assert job.data.columns == columns


def _registry(folder: Path):
    pairs = {"messages": "talk", "chosen": "good", "rejected": "bad"}
    known = {
        "pairs": {
            "file_name": "a.json",
            "ranking": True,
            "formatting": "sharegpt",
            "columns": pairs,
        },
        "plain": {"hf_hub_url": "org/plain"},
        "asked": {
            "hf_hub_url": "org/asked",
            "ranking": True,
            "columns": {"prompt": "question", "chosen": "chosen", "rejected": "rejected"},
        },
        "judged": {
            "hf_hub_url": "org/judged",
            "columns": {"prompt": "ask", "response": "answer", "kto_tag": "good"},
        },
    }
    (folder / "data").mkdir()
    (folder / "data/dataset_info.json").write_text(json.dumps(known))
    (folder / "data/a.json").write_text("[]")


def test_stages_of_llama_factory(tmp_path):
    _registry(tmp_path)
    found = imported(tmp_path, FACTORY + "stage: dpo\npref_beta: 0.2\npref_ftx: 0.5\n")
    job = job_of(tmp_path, found)
    assert settings(job) == {
        "name": "dpo",
        "beta": 0.2,
        "loss_type": ("sigmoid", "sft"),
        "loss_weights": (1.0, 0.5),
    }
    assert job.data.columns == {"conversations": "talk", "chosen": "good", "rejected": "bad"}
    found = imported(
        tmp_path, FACTORY + "stage: dpo\npref_loss: simpo\nsimpo_gamma: 1\npref_ftx: 1\npref_x: 1\n"
    )
    assert {found.lines[key].effect for key in ("pref_ftx", "pref_x")} == {"differs"}
    assert settings(job_of(tmp_path, found)) == {"name": "simpo", "beta": 0.1, "simpo_gamma": 1.0}
    found = imported(tmp_path, FACTORY.replace("pairs", "asked") + "stage: rm\n")
    job = job_of(tmp_path, found)
    assert (job.task, job.data.columns) == ("reward", {"instruction": "{question}"})
    text = FACTORY.replace("pairs", "judged") + "stage: kto\nkto_rejected_weight: 0.5\n"
    job = job_of(tmp_path, imported(tmp_path, text))
    assert settings(job) == {"name": "kto", "undesirable_weight": 0.5}
    assert job.data.columns == {"instruction": "{ask}", "output": "{answer}", "label": "good"}


def test_an_imported_job_of_chats_is_trained(tmp_path, cli):
    answers = {"chosen": "twice as much", "rejected": "no idea"}
    asked = [("What is 1 and 1?", "Be brief."), *[("And 2 and 2?", "")] * 3]
    rows = [{"ask": ask, "frame": frame, **answers} for ask, frame in asked]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    make_model_folder(tmp_path / "model", [str(row) for row in rows] * 9, hidden=16, layers=1)
    columns = {"prompt": "ask", "system": "frame", "chosen": "chosen", "rejected": "rejected"}
    known = {"asked": {"file_name": "rows.jsonl", "ranking": True, "columns": columns}}
    (tmp_path / "dataset_info.json").write_text(json.dumps(known))
    settings = (
        "model_name_or_path: ./model\nstage: dpo\nfinetuning_type: full\ndataset: asked\n"
        "dataset_dir: .\nmax_steps: 1\ncutoff_len: 256\noutput_dir: run\n"
    )
    (tmp_path / "lf.yaml").write_text(settings)
    job = tmp_path / "job.yaml"
    cli.out("import", tmp_path / "lf.yaml", "-o", job)
    own = sets("model.init=random", "where.device=cpu", f"cache_dir={tmp_path / 'cache'}")
    cli.out("train", job, *own)


def test_services_of_preferences(tmp_path):
    method = {"type": "dpo", "dpo": {"hyperparameters": {"beta": 0.2, "n_epochs": 2}}}
    asked = {"training_file": "file-a", "model": "gpt-4.1", "method": method}
    job = job_of(tmp_path, imported(tmp_path, json.dumps(asked), "job.json"))
    assert (settings(job), job.train.num_train_epochs) == ({"name": "dpo", "beta": 0.2}, 2)
    how = {"method": "dpo", "dpo_beta": 0.3, "dpo_normalize_logratios_by_length": True}
    asked = {"training_file": "a.jsonl", "model": "org/m", "lora": True, "training_method": how}
    job = job_of(tmp_path, imported(tmp_path, json.dumps(asked), "job.json"))
    assert settings(job) == {"name": "dpo", "beta": 0.3, "loss_type": "sigmoid_norm"}
    how["dpo_reference_free"] = True
    found = imported(tmp_path, json.dumps(asked), "job.json")
    assert [line.key for line in found.blockers] == ["training_method.dpo_reference_free"]


OF_ONE = AXOLOTL.replace("micro_batch_size: 4", "micro_batch_size: 1")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        *(
            (f"{TRL}objective: dpo\n{keys}\n", why)
            for keys, why in (
                ("loss_type: aot", "aot"),
                ("loss_type: [sigmoid, aot_pair]", "aot_pair"),
                ("use_weighting: true", "changes the loss"),
                ("ld_alpha: 0.5", "changes the loss"),
                ("f_divergence_type: js_divergence", "changes the loss"),
                ("sync_ref_model: true", "the reference"),
            )
        ),
        (f"{TRL}beta: 0.1\nmax_prompt_length: 512\n", "add a line `objective: dpo`"),
        (f"{AXOLOTL}rl: dpo\ndatasets: [{{path: a/b, type: alpaca}}]\n", "no pairs"),
        (f"{AXOLOTL}datasets: [{{path: a/b, type: chatml.intel}}]\n", "no `rl`"),
        (f"{OF_ONE}rl: kto\ndatasets: [{{path: a/b}}]\n", "kto compares the examples of a step"),
        *(
            (f"{FACTORY}{keys}\n", why)
            for keys, why in (
                ("stage: ppo", "ppo"),
                ("stage: dpo\npref_loss: kto_pair", "kto_pair"),
                ("stage: dpo\npref_bco_weight: 0.5", "changes the loss"),
                ("stage: dpo\nref_model: org/other", "the reference"),
                ("stage: sft", "pairs of answers"),
                ("stage: kto", "verdict"),
            )
        ),
    ],
)
def test_what_farthing_does_not_train_is_refused(text, why, tmp_path):
    _registry(tmp_path)
    assert any(why in line.why for line in imported(tmp_path, text).blockers)
