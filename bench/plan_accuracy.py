"""Hold the planner's memory and speed against what others measured.

    python bench/plan_accuracy.py --measurements FILE.csv [--json] [--rows] [--all-gpus]

FILE has the columns source, model, params_b, method, precision, quant, optimizer, seq_len, micro_batch, grad_ckpt, gpu,
n_gpu, peak_gb, tokens_per_s, notes. Each row is read into the way its code computes (kernels, loss, dtypes, adapters) from
its source and notes; a row that says too little, or does what the planner can't express, is listed with the reason.

Speed is judged twice: as predicted, and with one row of the same source and GPU calibrating the others (each in turn; the
mean error over all choices of that row). Errors are |predicted / measured - 1|.
"""

from __future__ import annotations

import argparse
import csv
import json
import re
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from farthing.catalog import find_gpu
from farthing.errors import FarthingError
from farthing.lengths import Largest, Padded, from_mean
from farthing.memory import Memory, estimate_memory
from farthing.model_config import find_config
from farthing.recipe import CHUNKED, FUSED, TILED, WHOLE, Recipe, Stack
from farthing.shapes import Adapters, Shape, read_shape
from farthing.speed import device_of, estimate_step

GIB = 2**30
SPREAD = 0.5  # of ln(length) in a set of questions and worked answers, where only the mean is stated
# Models whose code is not in transformers, by one with layers of the same sizes.
QWEN = {"model_type": "qwen2", "vocab_size": 151936, "tie_word_embeddings": False, "max_position_embeddings": 8192}
STAND_INS: dict[str, dict[str, Any]] = {
    name: QWEN | {"hidden_size": h, "intermediate_size": f, "num_hidden_layers": n, "num_attention_heads": a}
    | {"num_key_value_heads": a, "vocab_size": v}
    for name, h, f, n, a, v in (
        ("qwen-1.8b", 2048, 5504, 24, 16, 151936),
        ("qwen-7b", 4096, 11008, 32, 32, 151936),
        ("qwen-14b", 5120, 13696, 40, 40, 152064),
        ("qwen-72b", 8192, 24576, 80, 64, 152064),
    )
}  # fmt: skip
STAND_INS["santacoder"] = {
    "model_type": "gpt_bigcode",
    "n_embd": 2048,
    "n_layer": 24,
    "n_head": 16,
    "n_positions": 2048,
}
STAND_INS["santacoder"] |= {"vocab_size": 49280}
STAND_INS["codellama-34b"] = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 22016}
STAND_INS["codellama-34b"] |= {"num_hidden_layers": 48, "num_attention_heads": 64, "num_key_value_heads": 8}
STAND_INS["codellama-34b"] |= {"vocab_size": 32000, "tie_word_embeddings": False}
NO_FAMILY = ("mixtral", "mpt", "moe", "deepseek", "falcon", "bloom", "glm", "baichuan", "internlm", "stablelm", "vl")
GPUS = {"RTX6000Ada": "RTX 6000 Ada", "6000Ada": "RTX 6000 Ada"}
TARGETS_OF = {  # adapters where a source does not name them: what its scripts are known to adapt
    "peft": ("q_proj", "v_proj"),
    "default": ("all-linear",),
}


class NotExpressed(Exception):
    """Why a row can't be judged."""


@dataclass(frozen=True)
class Case:
    """A row as the planner would have it."""

    shape: Shape
    recipe: Recipe
    adapters: Adapters | None
    largest: Largest
    padded: Padded
    mean_tokens: float
    gpu: str
    meter: str
    measured_bytes: float | None
    measured_tokens_per_s: float | None


def shape_of(model: str) -> Shape:
    """The sizes of a model by the name that a table gives it."""
    short = model.split("/")[-1].lower().replace("_", "-").replace(" ", "-")
    plain = re.sub(r"-(instruct|chat|base|it|hf|gptq|awq|int4|bnb-4bit|4bit|v0\.\d)(?=-|$)", "", short)
    for name, config in STAND_INS.items():
        if re.search(rf"(^|-){re.escape(name)}($|-)", plain) or (name == "santacoder" and name in plain):
            return read_shape(config)
    for family in NO_FAMILY:
        if re.search(rf"(^|[-_]){family}", plain):
            raise NotExpressed(f"no shapes for the family of {model}")
    for name in (model, *sorted(_known_names(), key=len)):
        key = re.sub(r"-(instruct|chat|base|it|hf|v0\.\d)(?=-|$)", "", name.split("/")[-1].lower()).replace("meta-", "")
        if name == model or key == plain.replace("meta-", ""):
            try:
                return read_shape(find_config(name, ask_hub=False)[0])
            except FarthingError:
                continue
    raise NotExpressed(f"no config of {model}")


def _known_names() -> list[str]:
    from farthing.model_config import known_models

    return list(known_models())


def read_case(row: dict[str, str]) -> Case:
    """A row, or `NotExpressed`."""
    notes, source = row["notes"], row["source"]
    words = f"{notes} {row['optimizer']} {row.get('grad_ckpt', '')}".lower()
    if "gptq" in row["quant"].lower() or "gptq" in words:
        raise NotExpressed("GPTQ weights")
    if row["quant"] and not re.search(r"nf4|bnb|4bit|4-bit|fp4", row["quant"].lower()):
        raise NotExpressed(f"{row['quant']} weights")
    method = row["method"].lower()
    if method not in ("full", "lora", "qlora"):
        raise NotExpressed(f"method {method}")
    if any(word in words for word in ("lora-fa", "bdlora", "mica", "galore", "lisa", "lomo")):
        raise NotExpressed("a variant of LoRA that the trainer has not")
    if "fp8" in row["precision"]:
        raise NotExpressed("fp8")
    if re.search(r"cpu.?off-?load", words) or "zero3-offload" in words:
        raise NotExpressed("CPU off-load")
    seq_len, micro = _number(row["seq_len"]), _number(row["micro_batch"])
    if not seq_len or not micro:
        raise NotExpressed("no length or no batch size")
    if "config not stated (low" in words or "must differ in settings" in words:
        raise NotExpressed("its settings are not stated")
    if "unpacked" in words:
        raise NotExpressed("lengths of the unpacked data are not stated")
    if "boundary" in words:
        raise NotExpressed("a boundary (longest that fits), no measurement")
    shape = shape_of(row["model"])
    stack = stack_of(source, words, method)
    precision = {"amp_bf16": "bf16", "bfloat16": "bf16", "float16": "fp16", "amp_fp16": "fp16"}.get(
        row["precision"].lower(), row["precision"].lower() or "bf16"
    )
    if precision not in ("bf16", "fp16", "fp32"):
        raise NotExpressed(f"precision {row['precision']}")
    adapters, r, targets = None, 0, ()
    if method != "full":
        found = re.search(r"\br ?=? ?(\d+)", words) or re.search(r"rank ?=? ?(\d+)", words)
        r = int(found[1]) if found else 16
        targets = targets_of(words, shape, source)
        adapters = shape.with_lora(r, targets, use_dora="dora" in words)
    checkpointed = row["grad_ckpt"].strip().lower()
    every = 1 if checkpointed.startswith(("true", "yes", "1", "full")) else 0
    if not checkpointed and "torchtune" in source:
        every = 1  # the default of its recipes
    n_gpus = int(float(row["n_gpu"] or 1))
    sharding = "none" if n_gpus == 1 else "fsdp" if re.search(r"fsdp|zero-?3|zero3|full shard", words) else "ddp"
    optim = "adamw_8bit" if "8bit" in words or "8-bit" in words else "adamw_torch_fused"
    if (
        re.search(r"foreach|adamw_torch|\badamw\b", words)
        and "torchtune" not in source
        and "fused" not in row["optimizer"]
    ):
        optim = "adamw_torch"
    if "paged" in words and "8bit" in words:
        optim = "paged_adamw_8bit"
    if not row["optimizer"] and "torchtune" not in source:
        optim = "adamw_torch"
    if re.search(r"decoupled_lionw", words):
        raise NotExpressed("optimizer is lion or AdamW, by an unnamed file")
    accumulation = re.search(r"(?:accum\w*|gas|grad_acc\w*)[ =:x]*(\d+)", words)
    n_micro = int(accumulation[1]) if accumulation and "no accum" not in words else 1
    recipe = Recipe(
        method, precision, optim, int(micro) * n_gpus * n_micro, int(micro), every, r,
        0.05 if "dropout 0.05" in words else 0.0, tuple(targets), (), "dora" in words, n_gpus, sharding, stack,
    )  # fmt: skip
    variable = re.search(r"mean (\d+) real tokens", words)
    if "variable length" in words and not variable:
        raise NotExpressed("lengths of the data are not stated")
    if variable:  # batches of similar lengths: twenty of them are sorted together
        lengths = from_mean(20000, float(variable[1]), int(seq_len), spread=SPREAD)
        padded = lengths.padded(int(micro), 20 * int(micro))
        largest = Largest(int(micro), int(lengths.percentile(99)), 0)
        mean = lengths.mean
    else:
        n = int(seq_len)
        padded, largest, mean = Padded(n, 0.0, float(n * n), 0.0, 0.0), Largest(int(micro), n, 0), float(n)
    gpu = find_gpu(GPUS.get(row["gpu"], row["gpu"])).name
    meter = "nvidia-smi" if re.match(r"[^;]*nvidia-smi", words) and "max_memory_allocated" not in words else "allocated"
    if "reserved" in words.split(";")[0] or "torch reserved" in words:
        meter = "reserved"
    unit = 1e9 if re.match(r"\s*gb\b", words) else GIB
    peak, speed = _number(row["peak_gb"]), _number(row["tokens_per_s"])
    if "suspect" in words:
        speed = None
    return Case(shape, recipe, adapters, largest, padded, mean, gpu, meter, peak * unit if peak else None, speed)


def stack_of(source: str, words: str, method: str) -> Stack:
    """How the code behind a row computes."""
    plain = Stack("hf", has_master_weights=False, has_autocast=False, loss=WHOLE)
    if "fms-acceleration" in source:
        is_mixed = "bf16 autocast" in words or method == "qlora"
        stack = replace(plain, has_autocast=is_mixed, is_flash=True, upcasts_frozen="baseline-peft-bnb" in words)
        if "foak" in words:
            stack = replace(stack, loss=FUSED, fused_norms=True)
        return replace(stack, loss=TILED) if "liger" in words else stack
    if "torchtune" in source:
        stack = replace(plain, name="torchtune", adapters_fp32=False, masks_padding=False, is_compiled="compile" in words)
        if re.search(r"chunked|\.\.\.\+|\(same\)", words) or "memory-" in source:
            stack = replace(stack, loss=CHUNKED, is_compiled=True)
        offloads = "offload" in words
        return replace(
            stack, frees_gradients="in bwd" in words or "in-backward" in words, offloads_activations=offloads
        )
    if "unsloth" in source:
        return Stack("unsloth", has_autocast=True, loss=TILED, fused_norms=True, fused_mlp=True, is_flash=True)
    if "lit-gpt" in source or "litgpt" in source:
        return replace(plain, name="litgpt", adapters_fp32=False, is_flash=True, loss=CHUNKED)
    stack = replace(plain, has_autocast=method != "full", is_flash=bool(re.search(r"flash|fa2", words)))
    if "liger" in words or "fused ce" in words:
        stack = replace(stack, loss=TILED, fused_norms="liger" in words, fused_mlp="liger" in words)
    if "master" in words or "fp32 states" in words or ("deepspeed" in words and method == "full"):
        stack = replace(stack, has_master_weights=True, has_autocast=True)
    return stack


def targets_of(words: str, shape: Shape, source: str) -> tuple[str, ...]:
    """The adapted layers that a row names."""
    listed = re.search(r"targets=\[([^\]]*)\]", words)
    if listed:
        return tuple(re.findall(r"\w+", listed[1]))
    names = {layer.name.rsplit(".", 1)[-1] for layer in shape.linear_layers}
    if "q,k,v,o" in words or "qkvo" in words:
        wanted = ("q_proj", "k_proj", "v_proj", "o_proj") if "q_proj" in names else ("c_attn", "c_proj")
        return tuple(name for name in wanted if name in names)
    if re.search(r"q,\s?v\b|q_proj,? ?v_proj|\bqv\b", words):
        return shape.query_and_value
    if "qwen" in source.lower() and "readme" in source.lower():
        return ("all-linear",)
    return TARGETS_OF["peft" if "peft" in source else "default"]


def _number(text: str) -> float | None:
    found = re.fullmatch(r"\s*([\d.]+)\s*", text or "")
    return float(found[1]) if found else None


def predict(case: Case) -> tuple[Memory, float]:
    """(memory, tokens a second)."""
    memory = estimate_memory(case.shape, case.recipe, case.largest, case.adapters)
    device = device_of(find_gpu(case.gpu), case.recipe.precision)
    if device is None:
        raise NotExpressed(f"{case.gpu} has no {case.recipe.precision}")
    step = estimate_step(case.shape, case.recipe, device, case.padded, case.mean_tokens, case.adapters)
    return memory, step.tokens_per_s


def judge(rows: list[dict[str, str]], all_gpus: bool = False) -> dict[str, Any]:
    """Every row predicted, or listed with the reason why not."""
    judged, unexpressed = [], []
    for number, row in enumerate(rows, 2):
        if not all_gpus and row["n_gpu"].strip() not in ("1", "1.0", ""):
            unexpressed.append(
                {"line": number, "model": row["model"], "why": "more than one GPU (judged with --all-gpus)"}
            )
            continue
        try:
            case = read_case(row)
            memory, tokens_per_s = predict(case)
        except (NotExpressed, FarthingError) as error:
            why = str(error).splitlines()[0]
            unexpressed.append({"line": number, "model": row["model"], "why": why})
            continue
        by_meter = {
            "allocated": memory.allocated_bytes,
            "reserved": memory.reserved_bytes,
            "nvidia-smi": memory.total_bytes,
        }[case.meter]
        judged.append(
            {
                "line": number,
                "source": re.sub(r"https?://(github\.com/)?", "", row["source"]).split("/blob")[0][:40],
                "model": row["model"].split("/")[-1],
                "method": row["method"],
                "gpu": case.gpu,
                "meter": case.meter,
                "recipe": f"{case.recipe.stack.name}, {case.recipe.micro_batch} x {row['seq_len']}, {case.recipe.stack.loss}",
                "moment": memory.moment,
                "measured_gib": case.measured_bytes / GIB if case.measured_bytes else None,
                "predicted_gib": by_meter / GIB,
                "memory_error": by_meter / case.measured_bytes - 1 if case.measured_bytes else None,
                "measured_tokens_per_s": case.measured_tokens_per_s,
                "predicted_tokens_per_s": tokens_per_s,
                "speed_error": tokens_per_s / case.measured_tokens_per_s - 1 if case.measured_tokens_per_s else None,
            }
        )
    return {
        "memory": table(judged, "memory_error"),
        "speed": table(judged, "speed_error"),
        "speed, one row of the source calibrates": calibrated_table(judged),
        "rows": judged,
        "not_expressed": unexpressed,
    }


def table(rows: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Median and 90th percentile of the error: of all rows, and by source, method and GPU."""
    groups: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row[key] is not None:
            for group in (("all", "", ""), (row["source"], row["method"], row["gpu"])):
                groups[group].append(row[key])
    return [
        _summary(group, errors) for group, errors in sorted(groups.items(), key=lambda item: item[0] != ("all", "", ""))
    ]


def calibrated_table(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same for tokens/s when each row in turn sets the pace for the others of its source and GPU."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row["speed_error"] is not None:
            groups[row["source"], row["gpu"]].append(row)
    all_errors, found = [], []
    for (source, gpu), members in sorted(groups.items()):
        if len(members) < 2:
            continue
        errors = []
        for reference in members:
            factor = 1 + reference["speed_error"]
            errors += [(1 + row["speed_error"]) / factor - 1 for row in members if row is not reference]
        all_errors += errors
        found.append(_summary((source, "", gpu), errors))
    return [_summary(("all", "", ""), all_errors), *found] if all_errors else []


def _summary(group: tuple[str, str, str], errors: list[float]) -> dict[str, Any]:
    sizes = sorted(abs(error) for error in errors)
    return {
        "source": group[0], "method": group[1], "gpu": group[2], "n": len(sizes),
        "median_percent": 100 * statistics.median(sizes),
        "p90_percent": 100 * sizes[min(len(sizes) - 1, round(0.9 * (len(sizes) - 1)))],
        "bias_percent": 100 * statistics.median(errors),
    }  # fmt: skip


def main() -> None:
    """Read, judge, print."""
    parser = argparse.ArgumentParser(description="the planner's memory and speed against published measurements")
    parser.add_argument("--measurements", type=Path, required=True)
    parser.add_argument("--all-gpus", action="store_true", help="rows with several GPUs too")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    with open(asked.measurements, encoding="utf-8", newline="") as file:
        result = judge(list(csv.DictReader(file)), asked.all_gpus)
    if asked.json:
        print(json.dumps(result, indent=1))
        return
    for name in ("memory", "speed", "speed, one row of the source calibrates"):
        print(f"\n{name}")
        print(f"  {'source':42}{'method':8}{'GPU':14}{'rows':>6}{'median':>10}{'p90':>9}{'bias':>9}")
        for row in result[name]:
            print(
                f"  {row['source']:42}{row['method']:8}{row['gpu']:14}{row['n']:6d}{row['median_percent']:8.1f} %"
                f"{row['p90_percent']:7.1f} %{row['bias_percent']:+7.1f} %"
            )
    if asked.rows:
        print("\nrows")
        for row in result["rows"]:
            gib = f"{row['predicted_gib']:6.1f} / {row['measured_gib'] or 0:6.1f} GiB"
            gib += f" {100 * (row['memory_error'] or 0):+6.1f} %"
            speed = f"{row['predicted_tokens_per_s']:8.0f} / {row['measured_tokens_per_s'] or 0:8.0f} tok/s"
            error = 100 * (row["speed_error"] or 0)
            print(
                f"  {row['line']:4d} {row['model'][:20]:20} {row['method']:5} {row['recipe'][:34]:34} {row['moment'][:9]:9} "
                f"{gib}  {speed} {error:+6.1f} %"
            )
    reasons = Counter(row["why"] for row in result["not_expressed"])
    print(f"\nnot expressed: {sum(reasons.values())} rows")
    for why, n in reasons.most_common():
        print(f"  {n:4d}  {why}")


if __name__ == "__main__":
    main()
