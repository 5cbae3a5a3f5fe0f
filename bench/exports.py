"""What becomes of a trained model in each form: does it load, does it say the same, how large is
it.

    python bench/exports.py [--json] [--families llama,qwen2] [--forms f32,q8_0,fp8]

A small model of each family is trained on real sentences (FARTHING_DATA) and exported. `loads`:
llama.cpp (the wheel xllamacpp) for GGUF, transformers for the others, by reading back what was
written where llama.cpp is not here. `same_tokens`: of 32 that llama.cpp writes, those that the
merged model writes up to the first other one. `formula` is what the file should have by its weights
and their bits.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from exported_families import FAMILIES, make_family
from farthing.after.quantized import Wish, export_quantized
from farthing.config.load import load_job
from farthing.errors import FarthingError
from farthing.export.folders import export_run
from farthing.export.gguf_file import BITS
from farthing.train.run import train
from llama_cpp import LlamaCpp, greedy_of

FORMS = (*BITS, "fp8", "w8a16", "w4a16")
BITS_A_WEIGHT = {"f32": 32.0, "f16": 16.0, "bf16": 16.0, "q8_0": 8.5, "q4_0": 4.5}
"""Of matrices, by the blocks of gguf 0.19; embeddings and output layer of q4_0 have 8.5."""


def trained_run(folder: Path, family: str, n_steps: int) -> Path:
    """A run of a small model of a family on sentences about restaurants."""
    data = Path(os.environ["FARTHING_DATA"])
    texts = [
        json.loads(line)["text"]
        for line in (data / "complaints_narratives.jsonl").read_text().splitlines()[:300]
    ]
    make_family(folder / "base", family, texts)
    rows = [
        json.loads(line)
        for line in (data / "e2e_nlg_dev_test.jsonl").read_text().splitlines()[:400]
    ]
    with open(folder / "data.jsonl", "w", encoding="utf-8") as file:
        for row in rows:
            file.write(
                json.dumps({"prompt": row["input"], "completion": " " + row["target"]}) + "\n"
            )
    values = {
        "task": "causal-lm",
        "model": {"model_name_or_path": "./base"},
        "data": {"train": "data.jsonl", "eval_fraction": 0.2},
        "where": {"device": "cpu"},
        "output_dir": "./run",
        "cache_dir": "./cache",
        "train": {"max_steps": n_steps, "global_batch_size": 8, "learning_rate": 0.01},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(values))
    job = load_job(folder / "job.yaml")
    train(job, lambda event: None)
    return Path(job.output_dir)


def expected_bytes(merged: Path, bits: str) -> float:
    """Of the weights of a GGUF file."""
    total = 0.0
    for path in merged.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                shape = file.get_slice(name).get_shape()
                n = 1
                for size in shape:
                    n *= size
                is_plain = len(shape) < 2 or ".wpe." in name
                is_fine = bits == "q4_0" and (
                    "embed_tokens" in name or "lm_head" in name or ".wte." in name
                )
                total += n * (32.0 if is_plain else 8.5 if is_fine else BITS_A_WEIGHT[bits]) / 8
    return total


def row_of(run: Path, folder: Path, family: str, form: str) -> dict[str, Any]:
    """One form of one family."""
    is_gguf = form in BITS
    wish = Wish("gguf", form, is_forced=True) if is_gguf else Wish(form, is_forced=True)
    said = export_quantized(run, folder / form, wish)
    row = {"family": family, "form": form, "kl": said["judged"]["mean_kl"]}
    row |= {
        "same_first_choice": said["judged"]["top1_agreement"],
        "loads": "transformers",
        "bytes": said["bytes"],
    }
    if is_gguf:
        import gguf

        tensors = gguf.GGUFReader(folder / form / "model.gguf").tensors
        n_bytes, formula = (
            sum(int(tensor.n_bytes) for tensor in tensors),
            expected_bytes(folder / "merged", form),
        )
        row |= {
            "loads": "read back",
            "bytes": n_bytes,
            "formula": formula,
            "off": n_bytes / formula - 1,
        }
        if importlib.util.find_spec("xllamacpp") is not None:
            row |= {
                "loads": "llama.cpp",
                "same_tokens": same_tokens(folder / form / "model.gguf", folder / "merged"),
            }
    return row


def same_tokens(gguf: Path, merged: Path, n: int = 32) -> int:
    """How many tokens llama.cpp and transformers write alike after one prompt, both greedily, in
    fp32.
    """
    tokenizer = AutoTokenizer.from_pretrained(merged)
    prompt = tokenizer("name : The Mill , food : English , area : riverside")["input_ids"]
    expected, _ = greedy_of(AutoModelForCausalLM.from_pretrained(merged), prompt, n)
    found, _ = LlamaCpp(gguf).greedy(prompt, n)
    return next((i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b), n)


def main() -> None:
    """Print a row for each family and form."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--forms", default=",".join(FORMS))
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    rows = []
    for family in arguments.families.split(","):
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            run = trained_run(folder, family, arguments.steps)
            export_run(run, folder / "merged", "merged")
            for form in arguments.forms.split(","):
                try:
                    rows.append(row_of(run, folder, family, form))
                except (
                    FarthingError
                ) as error:  # what a family can't do is refused before a byte is written
                    rows.append(
                        {"family": family, "form": form, "refused": str(error).splitlines()[0]}
                    )
                if not arguments.json:
                    print(
                        {
                            key: round(value, 5) if isinstance(value, float) else value
                            for key, value in rows[-1].items()
                        }
                    )
    if arguments.json:
        json.dump(rows, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
