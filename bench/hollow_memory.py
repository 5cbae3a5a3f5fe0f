"""What a run promises of a GPU's memory, held against what torch's allocator gives out in it, on a
hollow GPU.

    .venv/rehearse/bin/python bench/hollow_memory.py OUT.json [--only WORD ...] [--blocks] [--steps
    4]

Each case is a `train` of a real model's shapes, in a process of its own on a GPU that computes
nothing (`bench/hollow_gpu.py`): weights are a file with a hole in it, texts are words drawn at
random. Compared are the peak that the plan has (of torch's own allocator, without a measured
factor), the one that the run expects before its first step, and
`torch.cuda.max_memory_allocated` of its steps. So the bytes are what torch's allocator counts; it
was no run on a GPU.

`--blocks` also lists what was alive at the peak by where it was asked for. Needs the configurations
in `FARTHING_DATA`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import random
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hollow_gpu import environment

CONFIGS = Path(os.environ.get("FARTHING_DATA", "data"), "model_configs")
N_WORDS = 1000
MIB = 2**20

# sizes as published, of families that the folder of configurations has none of
OTHERS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
    },
    "gemma-3-1b": {
        "model_type": "gemma3_text",
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "vocab_size": 262144,
        "max_position_embeddings": 32768,
        "sliding_window": 512,
        "tie_word_embeddings": True,
    },
    "OLMo-2-1B": {
        "model_type": "olmo2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "vocab_size": 100352,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "gpt2-medium": {
        "model_type": "gpt2",
        "n_embd": 1024,
        "n_layer": 24,
        "n_head": 16,
        "n_positions": 1024,
    },
    "pythia-1b": {
        "model_type": "gpt_neox",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 8,
        "vocab_size": 50304,
        "max_position_embeddings": 2048,
        "rotary_pct": 0.25,
        "tie_word_embeddings": False,
    },
    "bert-large": {
        "model_type": "bert",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "vocab_size": 30522,
    },
    "ModernBERT-large": {
        "model_type": "modernbert",
        "hidden_size": 1024,
        "intermediate_size": 2624,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "vocab_size": 50368,
        "max_position_embeddings": 8192,
    },
    "small Mixtral": {
        "model_type": "mixtral",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
        "num_local_experts": 8,
        "max_position_embeddings": 4096,
    },
}
TASKS = {
    "bert": "classification",
    "modernbert": "classification",
    "xlm-roberta": "classification",
    "t5": "seq2seq",
}


@dataclass(frozen=True)
class Case:
    """One run."""

    model: str
    method: str = "full"
    precision: str = "bf16"
    gpu: str = "H100"
    lengths: str = "chat"
    """chat (60 to 900 tokens, a third labelled), full (2,048) or long (8,192)."""
    train: dict[str, Any] = field(default_factory=dict)
    batch: int = 32

    @property
    def name(self) -> str:
        """All of it in words."""
        more = [f"{key}={value}" for key, value in self.train.items()]
        return " ".join(
            [
                self.model,
                self.method,
                self.precision,
                self.gpu,
                self.lengths,
                f"b{self.batch}",
                *more,
            ]
        )


def cases() -> Iterator[Case]:
    """Families, methods, precisions, checkpointing, lengths, optimizers and GPUs, each against a
    few of the others.
    """
    small, middle, large, every = (
        "Qwen2.5-0.5B",
        "Llama-3.2-3B",
        "Llama-3.1-8B",
        "gradient_checkpointing",
    )
    for method in ("full", "lora"):
        for value in (False, 2, True):
            yield Case(small, method, train={every: value})
            yield Case(
                small, method, lengths="full", train={every: value, "micro_batch_tokens": 4096}
            )
    for model in ("Qwen3-0.6B", "gpt2-medium", "bert-large", "flan-t5-base", "OLMo-2-1B"):
        yield Case(model)
    for model in (
        "gemma-3-1b",
        "OLMo-2-1B",
        "gpt2-medium",
        "pythia-1b",
        "bert-large",
        "ModernBERT-large",
        "flan-t5-base",
        "small Mixtral",
        "gemma-2-2b",
        "Phi-3-mini-4k-instruct",
        "Mistral-7B-v0.1",
    ):
        yield Case(model, "lora")
    yield Case(large, "lora")
    yield Case(large, "qlora", gpu="L4")
    yield Case(large, "lora", lengths="full", train={every: True})
    yield Case(large, "qlora", lengths="full", train={every: True})
    yield Case(large, "lora", lengths="long", train={every: True})
    yield Case(middle, "full", lengths="full", train={every: True})
    for optim in (
        "adamw_torch",
        "adamw_8bit",
        "paged_adamw_8bit",
        "adamw_torch_offload",
        "adafactor",
        "sgd",
    ):
        yield Case("Qwen3-0.6B", lengths="full", batch=2, train={"optim": optim, every: True})
    for method in ("full", "lora", "qlora"):
        yield Case(small, method, "fp16", "T4")
    yield Case("bert-large", "full", "fp16", "T4")
    yield Case(small, "lora", "fp32", "A100")
    yield Case("gpt2-medium", "full", "fp32", "A100")
    yield Case(small, gpu="L4")
    yield Case(small, "lora", train={"use_liger_kernel": False})
    yield Case("bert-large", "lora", train={every: True})
    yield Case("flan-t5-base", "lora", train={every: True})


# ---- a model without weights, and words ----


def config_of(model: str) -> dict[str, Any]:
    """The configuration of a model by its name."""
    found = OTHERS.get(model) or json.loads(
        (CONFIGS / model / "config.json").read_text(encoding="utf-8")
    )
    for name in ("auto_map", "quantization_config"):
        found.pop(name, None)
    return dict(found) | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def write_model(folder: Path, case: Case) -> str:
    """Configuration, tokenizer and weights; the task."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir(parents=True)
    config = config_of(case.model)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(_words())}, "<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
    ).save_pretrained(
        folder.parent / "words"
    )  # beside it: in the folder its family would read it in its own way
    task = TASKS.get(config["model_type"], "causal-lm")
    is_fp32 = case.method == "full" or case.precision == "fp32"
    write_weights(folder, task, "F32" if is_fp32 else "F16" if case.precision == "fp16" else "BF16")
    return task


def write_weights(folder: Path, task: str, dtype: str) -> None:
    """A file of weights that is a hole, by the configuration in `folder`."""
    import torch
    import transformers

    from farthing.model.load import auto_class

    with torch.device("meta"):
        model = auto_class(task).from_config(transformers.AutoConfig.from_pretrained(folder))
    size = 4 if dtype == "F32" else 2
    at, header, seen = 0, dict[str, Any](), set[int]()
    for key, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            ends = [at, at + size * tensor.numel()]
            header[key] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": ends}
            at = ends[1]
    written = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    written += b" " * (-len(written) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(written).to_bytes(8, "little") + written)
        file.truncate(8 + len(written) + at)


def _words() -> list[str]:
    return ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(N_WORDS - 4))]


def write_job(folder: Path, case: Case) -> Path:
    """The job of a case."""
    task, draw, rows = write_model(folder / "base", case), random.Random(0), []
    words = _words()[4:]
    for _ in range(min(400, 2 * case.batch) if case.lengths == "chat" else max(8, case.batch)):
        n = {"full": 2048, "long": 8192}.get(case.lengths) or min(
            900, int(draw.lognormvariate(5.5, 0.6)) + 60
        )
        text = draw.choices(words, k=n)
        if task == "classification":
            rows.append({"text": " ".join(text[:510]), "label": draw.choice(["a", "b", "c"])})
        elif case.lengths != "chat":
            rows.append({"text": " ".join(text[:-1])})
        else:
            cut = 2 * n // 3
            names = ("input", "target") if task == "seq2seq" else ("prompt", "completion")
            rows.append(
                dict(zip(names, (" ".join(text[:cut]), " " + " ".join(text[cut:])), strict=True))
            )
    if task == "classification":
        for row, label in zip(rows, "abc", strict=False):
            row["label"] = label
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    flags = {
        "bf16": {"bf16": True},
        "fp16": {"fp16": True},
        "fp32": {"bf16": False, "tf32": False},
    }[case.precision]
    job = {
        "task": task,
        "model": {"model_name_or_path": "./base", "tokenizer_name_or_path": "./words"},
        "data": {
            "train": "data.jsonl",
            "max_length": (
                {"long": 8192}.get(
                    case.lengths,
                    512 if task == "classification" else 1024 if "gpt2" in case.model else 2048,
                )
            ),
        },
        "method": case.method,
        "where": {"device": "cuda", "usd_per_hour": 2.0},
        "output_dir": "./run",
        "cache_dir": "./cache",
        "train": {
            "max_steps": 4,
            "global_batch_size": case.batch,
            "probe": False,
            **flags,
            **case.train,
        },
    }
    (folder / "job.yaml").write_text(json.dumps(job), encoding="utf-8")
    return folder / "job.yaml"


# ---- the run ----


def measured(folder: Path, case: Case, n_steps: int, blocks: bool) -> dict[str, Any]:
    """Train for some steps in this process, which sees a GPU; figures in bytes."""
    import torch

    path = write_job(folder, case)
    from farthing.config.load import load_job
    from farthing.train import loop, run
    from farthing.train.attempt import Attempt

    if blocks:
        torch.cuda.memory._record_memory_history(max_entries=4_000_000, stacks="python")
    found: dict[str, Any] = {}
    attempts: list[Attempt] = []
    take = loop.take_step

    def taken(attempt: Attempt) -> Any:
        if not attempts:
            attempts.append(attempt)
            found["before"] = torch.cuda.max_memory_allocated()
            found["resting"] = torch.cuda.memory_allocated()
        if attempt.progress.step == 1:
            found["first"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        if attempt.progress.step >= n_steps:
            raise KeyboardInterrupt
        return take(attempt)

    loop.take_step = taken
    says = []
    job = load_job(path)
    with contextlib.suppress(KeyboardInterrupt):
        run.train(job, lambda event: says.append(repr(event)))
    if not attempts:
        raise SystemExit("the run took no step")
    attempt = attempts[0]
    found |= {
        "peak": max(found.get("first", 0), torch.cuda.max_memory_allocated()),
        "expected": attempt.expected_bytes,
        "need": {name: int(value) for name, value in attempt.memory.moments().items()},
        "need_optimizer": attempt.memory.optimizer_bytes,
        "plan": attempt.estimate and attempt.estimate.peak_bytes,
        "plan_parts": attempt.estimate and attempt.estimate.to_json().get("memory"),
        "settings": str(attempt.settings),
        "tokens": attempt.memory.n_tokens,
        "warned": [text for text in says if text.startswith("Warned")][:6],
    }
    if blocks:
        found["blocks"], found["at_peak"] = blocks_at_peak()
    return found


def blocks_at_peak() -> tuple[list[list[Any]], int]:
    """What was alive when most was: [MiB, number, where from], and the sum in bytes."""
    import torch

    trace = torch.cuda.memory._snapshot()["device_traces"][0]
    start = 0
    alive: dict[int, Any] = {}
    now = most = at = 0
    sizes: dict[int, int] = {}
    for i, event in enumerate(trace[start:]):
        if event["action"] == "alloc":
            sizes[event["addr"]] = -(-event["size"] // 512) * 512
            now += sizes[event["addr"]]
        elif event["action"] == "free_completed":
            now -= sizes.pop(event["addr"], 0)
        if now > most:
            most, at = now, i
    for event in trace[: at + 1]:
        if event["action"] == "alloc":
            alive[event["addr"]] = event
        elif event["action"] == "free_completed":
            alive.pop(event["addr"], None)
    by_place, n_of = Counter[str](), Counter[str]()
    for event in alive.values():
        place = _place(event["frames"])
        by_place[place] += -(-event["size"] // 512) * 512
        n_of[place] += 1
    found = [[round(size / MIB, 1), n_of[place], place] for place, size in by_place.most_common(40)]
    return [["last", 0, _place(trace[at]["frames"])], *found], most


def _place(frames: list[dict[str, Any]]) -> str:
    """The innermost three places that are farthing's or a model's."""
    said = []
    for frame in frames:
        name = frame["filename"]
        if (
            "torch/nn/modules/module" in name
            or "/torch/_" in name
            or "hollow_memory" in name
            or "<" in name
        ):
            continue
        said.append(f"{'/'.join(Path(name).parts[-2:])}:{frame['line']}")
        if len(said) == 4:
            break
    return " < ".join(said)


# ---- all of them ----


def tried(case: Case, n_steps: int, blocks: bool) -> dict[str, Any]:
    """A case in a process of its own, forked from this one, which has imported everything and has
    not looked for a GPU.
    """
    folder = Path(tempfile.mkdtemp(prefix="hollow-memory-"))
    child = os.fork()
    if not child:
        try:
            os.environ.update(environment(case.gpu, copy_mib=1))
            with (folder / "said.txt").open("w") as words:
                os.dup2(words.fileno(), 1)
                os.dup2(words.fileno(), 2)
            found = measured(folder, case, n_steps, blocks)
        except BaseException as error:
            found = {"failed": f"{type(error).__name__}: {error}"[-600:]}
        (folder / "out.json").write_text(json.dumps(found), encoding="utf-8")
        os._exit(0)
    os.waitpid(child, 0)
    try:
        return {"case": case.name, **json.loads((folder / "out.json").read_text(encoding="utf-8"))}
    except OSError:
        return {"case": case.name, "failed": "the process died"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def line_of(row: dict[str, Any]) -> str:
    """One case on a line."""
    if "failed" in row:
        return f"{row['case']}: FAILED {row['failed']}"
    ratios = [
        f"{row[key] / row['peak']:5.2f}" if row[key] else "    -" for key in ("plan", "expected")
    ]
    return (
        f"{row['case']:70} peak {row['peak'] / MIB:9,.0f} MiB  plan {ratios[0]}  expected"
        f" {ratios[1]}  {row['settings']}"
    )


def summed_up(rows: list[dict[str, Any]]) -> str:
    """Median, 90th percentile and worst of both promises."""
    lines = []
    for key in ("plan", "expected"):
        off = sorted(abs(math.log(row[key] / row["peak"])) for row in rows if row.get(key))
        if off:
            p90 = off[min(len(off) - 1, int(0.9 * len(off)))]
            n_good = sum(one <= math.log(1.05) for one in off)
            said = [f"{math.expm1(one):.1%}" for one in (statistics.median(off), p90, off[-1])]
            lines.append(
                f"{key}: {len(off)} cases, {n_good} within 5 %, median {said[0]}, p90 {said[1]},"
                f" worst {said[2]}"
            )
    return "\n".join(lines)


def main() -> None:
    """Try the cases, one after another."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument(
        "--only", nargs="*", default=[], help="words that a case must have, all of them"
    )
    parser.add_argument("--blocks", action="store_true")
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument(
        "--part", nargs=2, type=int, default=(0, 1), help="the I-th of N parts of the cases"
    )
    asked = parser.parse_args()
    if "HOLLOW_NAME" not in os.environ:
        os.execve(
            sys.executable,
            [sys.executable, *sys.argv],
            {**os.environ, **environment("H100", copy_mib=1)},
        )
    import farthing.train.run  # noqa: F401  # once, for all cases

    rows = []
    part, n_parts = asked.part
    chosen = [case for case in cases() if all(word in case.name for word in asked.only)]
    for case in chosen[part::n_parts]:
        rows.append(tried(case, asked.steps, asked.blocks))
        print(line_of(rows[-1]), flush=True)
        asked.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    print(summed_up(rows))


if __name__ == "__main__":
    main()
