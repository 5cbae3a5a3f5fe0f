"""Plan a run on this machine after a short one, run it, and hold what was promised against what
happened.

    python bench/plan_local.py [--minutes 10] [--data FILE.jsonl --tokenizer DIR] [--method
    full|lora] [--json]

A Llama of about 8 M parameters (fresh weights) is trained for a few dozen steps; that leaves a
measurement. Then `farthing plan` is asked for a job of about so many minutes, with other steps,
evaluations and checkpoints, and the job is run, both by the command line. Without --data the demo's
rows are used. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from farthing.tiny import write_demo

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
}
SIZES |= {"num_key_value_heads": 4, "head_dim": 32}


def farthing(*words: str) -> Any:
    """A verb with --json, as a person would call it."""
    command = [sys.executable, "-m", "farthing", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ})
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)}: exit {done.returncode}\n{done.stderr[-2000:]}{done.stdout[-2000:]}"
        )
    return json.loads(done.stdout)


def make_job(folder: Path, data: Path | None, tokenizer: Path | None, method: str) -> Path:
    """A job file with its model folder."""
    demo = folder / "demo"
    write_demo(demo)
    model = folder / "model"
    shutil.copytree(
        tokenizer or demo / "model", model, ignore=shutil.ignore_patterns("*.safetensors")
    )
    config = json.loads((demo / "model" / "config.json").read_text(encoding="utf-8"))
    vocab = len(
        json.loads((model / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    )
    config |= SIZES | {"vocab_size": vocab + 64, "max_position_embeddings": 2048}
    (model / "config.json").write_text(json.dumps(config), encoding="utf-8")
    rows = data or demo / "data.jsonl"
    job = folder / "job.yaml"
    job.write_text(
        f"task: causal-lm\nmodel: {{model_name_or_path: {model}, init: random}}\ndata: {{train:"
        f" {rows}, eval_fraction: 0.1, max_length: 256}}\nmethod: {method}\ntrain:"
        " {global_batch_size: 16, learning_rate: 1e-3, max_steps: 40, eval_strategy:"
        " 'no'}\nwhere: {device: cpu, usd_per_hour: 0.10}\noutput_dir:"
        f" {folder}/short\ncache_dir: {folder}/cache\n",
        encoding="utf-8",
    )
    return job


def here(view: dict[str, Any]) -> dict[str, Any]:
    """The plan for this machine among all."""
    found: dict[str, Any] = next(plan for plan in view["plans"] if plan["kind"] == "here")
    return found


def measure(
    folder: Path, minutes: float, data: Path | None, tokenizer: Path | None, method: str
) -> dict[str, Any]:
    """The short run, the plan, the long run."""
    job = make_job(folder, data, tokenizer, method)
    before = here(farthing("plan", str(job), "--limit", "100000"))
    short = farthing("train", str(job))
    after = here(
        farthing("plan", str(job), "--limit", "100000", "--set", f"output_dir={folder}/long")
    )
    n_steps = max(60, round(minutes * 60 / after["step"]["seconds"]))
    each = max(20, n_steps // 4)
    words = ["--set", f"train.max_steps={n_steps}", "--set", "train.eval_strategy=steps"]
    words += ["--set", f"train.eval_steps={each}", "--set", f"output_dir={folder}/long"]
    planned = here(farthing("plan", str(job), "--limit", "100000", *words))
    receipt = farthing("train", str(job), *words)
    promised = receipt["promised"]
    return {
        "steps": {"short": short["steps"], "long": receipt["steps"]},
        "short_run_s": short["wall_s"],
        "uncalibrated_short_ratio": short["wall_s"] / (before["hours_range"][1] * 3600),
        "planned_s": planned["hours_range"][1] * 3600,
        "promised_s": promised["wall_s"]["promised"],
        "happened_s": receipt["wall_s"],
        "time_ratio": receipt["wall_s"] / (planned["hours_range"][1] * 3600),
        "planned_peak_bytes": planned["memory"]["needed_bytes"],
        "happened_peak_bytes": receipt["peak_bytes"],
        "memory_ratio": receipt["peak_bytes"] / planned["memory"]["needed_bytes"],
        "in_range": (
            planned["hours_range"][0] * 3600
            <= receipt["wall_s"]
            <= planned["hours_range"][2] * 3600
        ),
        "seconds": promised["seconds"],
    }


def main() -> None:
    """Run, print."""
    parser = argparse.ArgumentParser(description="promised against happened on this machine")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--data", type=Path)
    parser.add_argument(
        "--tokenizer", type=Path, help="folder with tokenizer.json, when --data is given"
    )
    parser.add_argument("--method", choices=("full", "lora"), default="full")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        result = measure(Path(name), asked.minutes, asked.data, asked.tokenizer, asked.method)
    if asked.json:
        print(json.dumps(result, indent=1))
        return
    print(f"short run: {result['steps']['short']} steps, {result['short_run_s']:.0f} s", end="")
    print(f" (formulas alone were off by {result['uncalibrated_short_ratio']:.2f}x)")
    print(f"planned:   {result['planned_s']:.0f} s, {result['planned_peak_bytes'] / 2**20:.0f} MiB")
    print(
        f"happened:  {result['happened_s']:.0f} s, {result['happened_peak_bytes'] / 2**20:.0f} MiB"
    )
    print(f"ratio:     time {result['time_ratio']:.3f}, peak memory {result['memory_ratio']:.3f}")
    print(f"  {'seconds':14}{'promised':>10}{'happened':>10}{'ratio':>8}")
    for part, pair in result["seconds"].items():
        ratio = "" if pair["ratio"] is None else f"{pair['ratio']:.2f}"
        print(f"  {part:14}{pair['promised']:10.1f}{pair['happened']:10.1f}{ratio:>8}")


if __name__ == "__main__":
    main()
