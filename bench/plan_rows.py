"""Rows of published measurements as the planner would have them: how the code behind each computes,
from its source and notes. What the planner can't express is `NotExpressed` with the reason.
"""

from __future__ import annotations

import csv
import functools
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from farthing.data.lengths import Largest, Lengths, Padded, from_mean
from farthing.models.model_config import known_config, known_models
from farthing.models.shapes import Shape, read_shape
from farthing.models.weights import Weight
from farthing.planner.recipe import DDP, FSDP, NONE
from farthing.planner.speed import Device, device_of
from farthing.prices.gpus import Gpu, find_gpu, gpu_named
from farthing.settings import Settings
from plan_stacks import (
    FUSED,
    QWEN,
    WHOLE,
    OtherCase,
    OtherRecipe,
    attention_share_of,
    meter_of,
    stack_of,
    trains_ends,
)

GPUS_OF_MACHINE = 8
# bytes a second of the network of a machine of eight, where a row does not say: a card of 200 or
# 400 Gbit/s for each GPU (NVIDIA DGX A100 and DGX H100 datasheets); nine tenths of it are reached
NETWORK_BYTES_PER_S = {"Ampere": 200e9, "Hopper": 400e9, "Blackwell": 400e9}
NETWORK_SHARE = 0.9
SPREAD = 0.5  # of ln(length) in questions and worked answers, where only the mean is stated


@functools.cache
def stand_ins() -> dict[str, Shape]:
    """Models that are not in farthing's table, by layers of the same sizes (`stand_ins.csv`)."""
    found = {}
    with open(Path(__file__).parent / "stand_ins.csv", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name, kind = row.pop("name"), row.pop("model_type")
            numbers = {key: int(cell) for key, cell in row.items() if cell}
            n, active = (numbers.pop(key, 0) for key in ("num_experts", "num_experts_per_tok"))
            tied = bool(numbers.pop("tie_word_embeddings", 1))
            shape = read_shape({"model_type": kind, "tie_word_embeddings": tied, **numbers})
            found[name] = mixture(shape, n, active) if n else shape
    return found


SAME_AS = {  # the first Llama has the sizes of the second
    **{"llama-7b": "meta-llama/Llama-2-7b-hf", "llama-13b": "meta-llama/Llama-2-13b-hf"},
    **{"mistral-7b": "mistralai/Mistral-7B-v0.1", "llama-3-8b": "meta-llama/Meta-Llama-3-8B"},
    **{"tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0", "pythia-1b": "EleutherAI/pythia-1b"},
}


class NotExpressed(Exception):
    """Why a row can't be judged."""


@dataclass(frozen=True)
class Published:
    """A row as the planner would have it, with what was measured."""

    case: OtherCase
    gpu: Gpu
    meter: str
    measured_bytes: float | None
    measured_tokens_per_s: float | None
    network_bytes_per_s: float = math.inf  # between machines, for each GPU of a ring over all
    limit: str = ""  # of a row that says what fits and not how much it takes: see `limit_of`
    attention_share: float | None = None  # of the GPU's peak, where attention is not today's
    tf32: bool = False  # the row says so: torch's own default is off

    def device(self) -> Device:
        """The GPU as it computes the row. Raises `NotExpressed` where it has no such precision."""
        gpu, precision = self.gpu, self.case.recipe.precision
        device = device_of(gpu, precision, tf32=self.tf32)
        if device is None:
            raise NotExpressed(f"{gpu.name} has no {precision}")
        if self.attention_share is not None:
            share = self.attention_share * gpu.flops[precision] / device.flops_per_s
            device = device._replace(attention_share=share)
        link = min(device.link_bytes_per_s, self.network_bytes_per_s)
        return device._replace(link_bytes_per_s=link)


_SUFFIXES = "instruct|chat|base|it|hf|pt|gptq|awq|int4|int8|bnb|4bit|8bit|nf4|bf16|fp16|v0.\\d"
_SUFFIXES += "|alpaca|intermediate|step.*"


def plain_name(model: str) -> str:
    """Without owner and words for how it was trained or packed: `qwen1half-7b-chat` is
    `qwen-1.5-7b`.
    """
    name = re.sub(r"(?<=\d)_(?=\d)", ".", model.strip().split("/")[-1].lower())
    name = re.sub(r"[\s_]+", "-", name).replace("meta-", "")
    name = name.replace("qwen1half", "qwen1.5")
    name = re.sub(r"\(.*?\)", "", name).strip("-")
    name = re.sub(r"^(llama|qwen|gemma|phi|mistral|yi|codellama|pythia|smollm)(?=\d)", r"\1-", name)
    return re.sub(rf"-({_SUFFIXES})(?=-|$)", "", name)


def shape_of(model: str) -> Shape:
    """The sizes of a model by the name that a table gives it."""
    plain = plain_name(model)
    plain = "santacoder" if "santacoder" in plain else plain
    if plain in stand_ins():
        return stand_ins()[plain]
    for name in (model, SAME_AS.get(plain, ""), _by_plain_name().get(plain, "")):
        if (config := known_config(name)) is not None:
            return read_shape(config)
    raise NotExpressed(f"no config of {model}")


def mixture(shape: Shape, n_experts: int, n_active: int) -> Shape:
    """With so many experts instead of each feed-forward layer; a token goes to `n_active`."""
    share = n_active / n_experts

    def widened(w: Weight) -> Weight:
        if w.part != "mlp" or w.kind != "linear":
            return w
        side = "n_out" if w.n_out == shape.ffn else "n_in"
        return w._replace(**{side: getattr(w, side) * n_experts}, share=share)

    weights = tuple(widened(w) for w in shape.weights)
    return shape._replace(weights=weights, ffn=shape.ffn * n_active)


@functools.cache
def _by_plain_name() -> dict[str, str]:
    table = known_models()
    return {plain_name(name): name for name in reversed([*table["models"], *table["same_as"]])}


def gpu_of(text: str, peak_gb: float | None = None) -> Gpu:
    """The GPU that a table means: `A100 80G`, `1x RTX4090`, `H100-80GB (SXM5, node of 8)`. What is
    in brackets or not known is left out where the rest names one. Raises `FarthingError`.
    """
    name = re.sub(r"^\s*\d+\s*[x*]\s*", "", text)
    name = re.sub(r"(?i)(?<![a-z\d])(\d+)\s*(?:g|gb|gib)\b", r"\1GB", name).strip()
    name = re.sub(r"(?i)^(\d{4})( ?ti| ?super| ?ada)?$", r"RTX \1\2", name)
    if found := re.match(r"(?i)(?:nvidia )?h100\W*9([46])\s?GB", name):
        # SXM cards of machines of eight, with more memory
        name = "H100-NVL" if found[1] == "4" else "H100-80GB"
    if re.fullmatch(r"(?i)(?:nvidia )?a100", name) and peak_gb and peak_gb > 40:
        name = "A100 80GB"  # more than the smaller one has
    without = re.sub(r"\(.*?\)|\[.*?\]", " ", name)
    beside = r"(?i)\b(sxm\d?|hbm\d?e?|nvlink|nodes?|x\d+|nvidia|geforce|gpu)\b"
    tried = (re.sub(r"[()\[\],]", " ", name), without, re.sub(beside, " ", without))
    tried = [" ".join(one.split()).strip(" -") for one in tried]
    return next(filter(None, map(gpu_named, tried)), None) or find_gpu(tried[0])


_REFUSED = {  # by what a row's words have
    r"lora-fa|bdlora|mica|galore|lisa|lomo": "a variant of LoRA that the trainer has not",
    r"cpu.?off-?load|zero3-offload": "CPU off-load",
    "gptq-int8": "weights in 8 bits",
    r"config not stated \(low|must differ in settings": "its settings are not stated",
    r"\bhsdp\b|hybrid.shard": "weights that are copied between machines, and spread within them",
    r"(?=.*(?:deepspeed|\bzero\b)).*stage (?:is )?not stated": "DeepSpeed, and what it spreads is "
    "not stated",
    "checkpointing not stated": "whether layers are recomputed is not stated",
    "unpacked": "lengths of the unpacked data are not stated",
}


def refuse(row: dict[str, str], words: str, method: str) -> None:
    """Raise `NotExpressed` for what no recipe has."""
    quant = row["quant"].lower()
    if quant and not re.search(r"nf4|bnb|gptq|awq|4-?bit|fp4|int4", quant):
        raise NotExpressed(f"{row['quant']} weights")
    if method not in ("full", "lora", "qlora"):
        raise NotExpressed(f"method {method}")
    if "fp8" in row["precision"]:
        raise NotExpressed("products in fp8, whose peak is twice that of any precision of a recipe")
    for pattern, why in _REFUSED.items():
        if re.search(pattern, f"{words} {quant}", re.DOTALL):
            raise NotExpressed(why)


def read_case(row: dict[str, str]) -> Published:
    """A row, or `NotExpressed`."""
    notes, source = row["notes"], row["source"].lower()
    words = f"{notes} {row['optimizer']} {row.get('grad_ckpt', '')} {row['method']}".lower()
    method = re.sub(r"q-lora", "qlora", re.sub(r"\s*\(.*?\)", "", row["method"].lower())).strip()
    refuse(row, words, method)
    seq_len, micro = (int(_number(row[name]) or 0) for name in ("seq_len", "micro_batch"))
    if not seq_len or not micro:
        raise NotExpressed("no length or no batch size")
    shape, n_gpus = shape_of(row["model"]), int(float(row["n_gpu"] or 1))
    if QWEN in source and (method != "lora" or n_gpus > 1):
        raise NotExpressed("DeepSpeed, with copies of its own in fp32")
    if "torchtune" in source and re.search(r"in.(?:bwd|backward)", words):
        raise NotExpressed("gradients that are freed within the backward pass")
    if "torchtitan" in source and "selective op" in words:
        raise NotExpressed("layers that are recomputed but for every second product")
    all_words = f"{words} {row['quant'].lower()}"
    stack = stack_of(source, all_words, method)
    if "fsdp" in words and stack.autocasts and "fms-acceleration" in source:
        # accelerate makes what is trained fp32
        stack = replace(stack, has_master_weights=True, upcasts_frozen=False)
    if shape.model_type == "gpt_bigcode" and stack.loss == WHOLE and not stack.autocasts:
        stack = replace(stack, loss=FUSED)  # its loss is computed in the precision of the logits
    precision = precision_of(row["precision"])
    if "universal-llm-trainer" in source and method == "qlora":
        precision = "fp32"  # what is not quantized is loaded in fp32 (src/models)
    adapters, r = None, 0
    if method != "full":
        r = rank_of(words, source)
        saved = ("embed_tokens", "lm_head") if trains_ends(words) else ()
        targets = targets_of(words, shape, source)
        adapters = shape.with_lora(r, targets, saved, use_dora="dora" in words)
    n_micro = n_micro_batches_of(words, micro * n_gpus)
    recipe = OtherRecipe(
        method,
        Settings(checkpoint_every=every_of(row["grad_ckpt"], words, source), precision=precision),
        optim_of(row["optimizer"], words, source),
        micro * n_gpus * n_micro,
        r,
        dropout_of(words, source) if r else 0.0,
        "dora" in words,
        n_gpus,
        sharding_of(words, source) if n_gpus > 1 else NONE,
        stack,
        float(n_micro),
    )
    variable = re.search(r"mean (\d+) real tokens", words)
    # the longest is the limit, what is usual is not told
    is_cut = "variable length" in words and not variable
    if is_cut and "swift" not in source and "max_length" not in words:
        raise NotExpressed("lengths of the data are not stated")
    padded, longest, mean = Padded(seq_len, 0.0, float(seq_len**2), 0.0, 0.0), seq_len, seq_len
    if variable:
        lengths = from_mean(20000, float(variable[1]), seq_len, spread=SPREAD)
        padded = padded_by_number(lengths, micro)
        longest, mean = int(np.percentile(lengths.tokens, 99)), lengths.mean
    case = OtherCase(shape, recipe, adapters, Largest(micro, longest, 0), padded, float(mean))
    peak, speed = _number(row["peak_gb"]), _number(row["tokens_per_s"])
    gpu = gpu_of(row["gpu"], peak)
    meter, unit = meter_of(source, words)
    if "suspect" in words or is_cut:
        speed = None
    limit = limit_of(words, f"{row['peak_gb']} {row['tokens_per_s']}".lower())
    if peak is None and speed is None and not limit:
        raise NotExpressed("nothing measured that can be compared")
    return Published(
        case,
        gpu,
        meter,
        peak * unit if peak and not limit else None,
        None if limit else speed,
        network_of(words, gpu) if n_gpus > GPUS_OF_MACHINE else math.inf,
        limit,
        attention_share_of(source, gpu.architecture),
        "tf32" in f"{all_words} {row['precision'].lower()}" or "nvidia" in source,
    )


def padded_by_number(lengths: Lengths, micro: int) -> Padded:
    """A mean example of batches as long as their longest, twenty of them sorted together."""
    drawn = np.random.default_rng(0).choice(lengths.tokens, (1000, 20 * micro))
    longest = np.sort(drawn, axis=1)[:, ::-1][:, ::micro].astype(float)
    return Padded(float(longest.mean()), 0.0, float((longest**2).mean()), 0.0, 0.0)


def sharding_of(words: str, source: str) -> str:
    """Of several GPUs; torchtune's distributed recipes divide everything."""
    if re.search(r"\bddp\b|no_shard", words):
        return DDP
    is_spread = re.search(r"torchtune|fsdp|zero-?3|full.?shard", f"{words} {source}")
    return FSDP if is_spread else DDP


def optim_of(cell: str, words: str, source: str) -> str:
    is_8bit, is_torchtune = re.search("8-?bit", words) is not None, "torchtune" in source
    if not cell and not is_torchtune:
        return "adamw_torch"
    if "paged" in words and is_8bit:
        return "paged_adamw_8bit"
    is_named = re.search(r"foreach|adamw_torch|\badamw\b", words) and "fused" not in cell
    if is_named and not is_torchtune:
        return "adamw_torch"
    return "adamw_8bit" if is_8bit else "adamw_torch_fused"


def network_of(words: str, gpu: Gpu) -> float:
    """Bytes a second between machines of eight, from the row or as the maker's machine has it."""
    said = re.search(r"([\d.]+) ?gbps", words)
    rate = float(said[1]) * 1e9 / 8 if said else NETWORK_BYTES_PER_S.get(gpu.architecture)
    if rate is None:
        raise NotExpressed("GPUs of several machines: the network between them is not stated")
    return NETWORK_SHARE * rate


def limit_of(words: str, cells: str) -> str:
    """What a row says of memory without a figure: `longest` (input that fits) or `too much`."""
    longest = r"boundary|(?:longest|max\w*) (?:sequence|context|seq\w*|length) that fits"
    if re.search(longest, words):
        return "longest"
    over = r"\boom\b|out of memory|does(?:n't| not) fit"
    return "too much" if re.search(over, f"{words.split(';')[0]} {cells}") else ""


def precision_of(text: str) -> str:
    """bf16, fp16 or fp32: `bf16-true`, `amp_bf16`, `bfloat16 mixed`. Raises `NotExpressed`."""
    words = text.lower()
    patterns = "bf16|bfloat16", "fp16|float16|half", "fp32|float32|tf32", "nf4|int4|4-?bit|^\\s*$"
    for name, pattern in zip(("bf16", "fp16", "fp32", "bf16"), patterns, strict=True):
        if re.search(pattern, words):
            return name
    raise NotExpressed(f"precision {text}")


def rank_of(words: str, source: str) -> int:
    """The rank that a row names, else that of its source's scripts."""
    named = r"(?:\br|lora_r|lora_rank|\brank|\brank of)(?:\s?[=:]\s?|\s)([1-9]\d*)"
    found = re.search(rf"{named}|\br([1-9]\d*)\b", words)
    if found:
        return int(found[1] or found[2])
    defaults = {"qwen": 64, "fsdp_qlora": 64, "lit": 8, "swift": 8, "factory": 8}
    return next((r for name, r in defaults.items() if name in source.lower()), 16)


def dropout_of(words: str, source: str) -> float:
    """The dropout of the adapters that a row names, else that of its source's scripts."""
    found = re.search(r"dropout(?:_p)?\s?[=: ]\s?(0?\.\d+|0)", words)
    if found:
        return float(found[1])
    return 0.05 if re.search("qwen|swift|lit-?gpt", source) else 0.0


def every_of(cell: str, words: str, source: str) -> int:
    """Activation checkpointing; where a row says nothing, as the source's scripts have it."""
    said = cell.strip().lower()
    if "selective" in said:  # of every second layer; by operation is about as much
        return 2
    if found := re.match("(true|yes|1|full|on|every|y)|(false|no|0|off)", said):
        return int(found[1] is not None)
    off = r"no (?:gradient |activation )?checkpointing|checkpointing[=: ]*(?:false|off)"
    if re.search(off, words):
        return 0
    on = r"(?:gradient|activation)[_ ]checkpointing"
    usual = r"torchtune|qwen|swift|factory|unsloth|fsdp_qlora"
    return int(bool(re.search(on, words) or re.search(usual, source.lower())))


def n_micro_batches_of(words: str, at_once: int) -> int:
    """Micro-batches of a step, from its accumulation or its effective batch."""
    if re.search(r"no (?:gradient )?accum", words):
        return 1
    found = re.search(r"(?:accum\w*|\bgas\b|grad_acc\w*)(?: steps?)?[ =:x]*(?:of )?(\d+)", words)
    if found:
        return max(1, int(found[1]))
    whole = re.search(r"(?:effective|global|total)[ _]batch(?:[ _]size)?[ =:]*(?:of )?(\d+)", words)
    return max(1, int(whole[1]) // max(1, at_once)) if whole else 1


_OF_QWEN = {  # its names for the layers of the stand-in
    **{"c_attn": ("q_proj", "k_proj", "v_proj"), "c_proj": ("o_proj", "down_proj")},
    **{"w1": ("up_proj",), "w2": ("gate_proj",)},
}


def targets_of(words: str, shape: Shape, source: str) -> tuple[str, ...]:
    """The adapted layers that a row names."""
    names = {layer.name.rsplit(".", 1)[-1] for layer in shape.linear_layers}
    whole = tuple(name for name in ("query_key_value", "c_attn", "qkv_proj") if name in names)
    if listed := re.search(r"targets=\[([^\]]*)\]", words):
        found = re.findall(r"[\w-]+", listed[1])
        plain = [(word,) if word in names else _OF_QWEN.get(word, (word,)) for word in found]
        # PEFT passes over names that a model has not
        return tuple(name for each in plain for name in each if name in names)
    if "q,k,v,o" in words or "qkvo" in words:
        wanted = ("q_proj", "k_proj", "v_proj", "o_proj", "c_attn", "c_proj")
        return tuple(name for name in wanted if name in names)
    if re.search(r"all[- ]linear", words):
        return ("all-linear",)
    if re.search(r"q,\s?v\b|q_proj,? ?v_proj|\bqv\b|query,? ?value", words):
        return whole or shape.query_and_value
    three = r"q_proj,? ?k_proj,? ?v_proj|q,\s?k,\s?v\b|c_attn\b(?!,)"
    if "swift" in source or re.search(three, words):
        return whole or tuple(name for name in ("q_proj", "k_proj", "v_proj") if name in names)
    if "lit-gpt" in source or "litgpt" in source:
        return whole or shape.query_and_value
    # what scripts are known to adapt
    return ("q_proj", "v_proj") if "peft" in source else ("all-linear",)


def _number(text: str | None) -> float | None:
    found = re.match(r"\s*~?([\d,]*\.?\d+)\s*(k\b)?", (text or "").lower())
    return float(found[1].replace(",", "")) * (1024 if found[2] else 1) if found else None
