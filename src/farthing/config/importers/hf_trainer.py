"""The arguments of transformers' Trainer, of peft and of `from_pretrained`: what Trainer, TRL,
Unsloth and LLaMA-Factory share.

Defaults are those of transformers 5 (`TrainingArguments`) and peft (`LoraConfig`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from farthing.config.importers.record import (
    Imported,
    Odd,
    To,
    names,
    number,
    optimizer,
    positive,
    rows,
    scheduler,
    text,
    truth,
    whole,
)
from farthing.config.values import known_init


def steps(value: Any) -> int:
    """A number of steps. Raises `Odd` for the share of a run, which Trainer takes too."""
    found = positive(value)
    if found < 1:
        raise Odd(f"a share of the run ({found:g}); farthing counts in steps", "none")
    return whole(found)


def bf16(value: Any) -> bool:
    """`auto` and what is asked of the GPU are what farthing does anyway. Raises `Odd`."""
    if str(value).lower() in ("auto", "full"):
        raise Odd("farthing takes bf16 where the GPU has it natively", "none")
    return truth(value)


def reports(value: Any) -> list[str]:
    """The trackers that farthing has. Raises `Odd`."""
    wanted = [] if value in ("none", "None", False) else names(value)
    known = [name for name in wanted if name in ("tensorboard", "wandb", "mlflow", "trackio")]
    if not known:
        raise Odd("farthing logs to its run folder; trackers are train.report_to", "none")
    return known


def compiled(value: Any) -> bool | str:
    """As asked, or by what is expected to pay."""
    return "auto" if value == "auto" else truth(value)


def kept(value: Any) -> int:
    """Checkpoints to keep: two at least. Raises `Odd`."""
    found = whole(value)
    if found < 2:
        raise Odd("farthing keeps two at least: one may be damaged", "none")
    return found


def strategy(value: Any) -> str:
    """When to evaluate. Raises `Odd`."""
    name = str(value).rpartition(".")[2].lower()
    if name not in ("no", "epoch", "steps"):
        raise Odd(f"farthing has no eval_strategy {name}", "none")
    return name


def scratch(value: Any) -> str:
    """Adapter initialisation of peft, as a word. Raises `Odd` for those that farthing has not."""
    name = value.lower() if isinstance(value, str) else str(truth(value)).lower()
    try:
        return known_init(name)
    except ValueError as error:
        raise Odd(f"{str(error).partition(';')[0]}: it begins as usual") from None


def no_bias(value: Any) -> str:
    """peft's `bias`: which biases are trained. Raises `Odd`: farthing trains none of them."""
    if value == "none":
        raise Odd("none there, and none here", "none")
    raise Odd(f"biases of the base are trained there ({value}); farthing trains the adapter alone")


ARGUMENTS: dict[str, To] = {
    **rows(
        "train",
        whole,
        "max_steps per_device_train_batch_size per_gpu_train_batch_size=per_device_train_batch_size"
        " per_device_eval_batch_size per_gpu_eval_batch_size=per_device_eval_batch_size"
        " gradient_accumulation_steps early_stopping_patience"
        " early_stopping_steps=early_stopping_patience",
    ),
    **rows("train", positive, "num_train_epochs learning_rate adam_epsilon neftune_noise_alpha"),
    **rows(
        "train",
        number,
        "weight_decay max_grad_norm adam_beta1 adam_beta2 label_smoothing_factor"
        " early_stopping_threshold",
    ),
    **rows(
        "train",
        truth,
        "tf32 full_determinism greater_is_better load_best_model_at_end predict_with_generate"
        " push_to_hub hub_private_repo",
    ),
    **rows("train", text, "metric_for_best_model hub_model_id push_to_hub_model_id=hub_model_id"),
    **rows("train", steps, "eval_steps save_steps logging_steps"),
    **rows("train", strategy, "eval_strategy evaluation_strategy=eval_strategy"),
    **rows("train", bf16, "bf16 fp16"),
    "lr_scheduler_type": To("train.lr_scheduler_type", scheduler),
    "optim": To("train.optim", optimizer),
    "seed": To("train.seed", lambda value: int(number(value))),
    "torch_compile": To("train.torch_compile", compiled),
    "save_total_limit": To("train.save_total_limit", kept),
    "generation_max_length": To("data.max_target_length", whole),
    "report_to": To("train.report_to", reports),
    "output_dir": To("output_dir", text),
}
"""`TrainingArguments` and `Seq2SeqTrainingArguments`."""

LORA: dict[str, To] = {
    **rows("method", whole, "r=lora_r"),
    **rows("method", positive, "lora_alpha"),
    **rows("method", number, "lora_dropout"),
    **rows("method", names, "target_modules modules_to_save"),
    **rows("method", truth, "use_dora use_rslora lora_bias"),
    "init_lora_weights": To("method.init_lora_weights", scratch),
    "bias": To("method.bias", no_bias),
}
"""`peft.LoraConfig`."""

ADAPTER: dict[str, To] = {
    **rows("method", whole, "lora_r lora_rank=lora_r"),
    **rows("method", positive, "lora_alpha loraplus_lr_ratio"),
    **rows("method", number, "lora_dropout"),
    **rows("method", names, "lora_modules_to_save=modules_to_save"),
    **rows("method", truth, "use_dora use_rslora"),
}
"""The same as tools have it that write everything into one file."""

MODEL: dict[str, To] = {
    **rows(
        "model",
        text,
        "model_name_or_path pretrained_model_name_or_path=model_name_or_path"
        " model_name=model_name_or_path model_revision=revision revision"
        " tokenizer_name=tokenizer_name_or_path tokenizer_name_or_path",
    ),
    **rows("model", truth, "trust_remote_code"),
}
"""What says which model."""


def warmups(out: Imported, values: Mapping[str, Any]) -> None:
    """Both keys of a warm-up; the number of steps goes before the share."""
    for key in ("warmup_steps", "warmup_ratio"):
        warmup(out, key, values.get(key))


def warmup(out: Imported, key: str, value: Any) -> None:
    """`warmup_steps` and `warmup_ratio`; a number of steps below 1 is a share, as transformers 5
    has it.
    """
    if value is None or key in out.lines:
        return
    try:
        found = number(value)
    except Odd as odd:
        return out.name(key, value, str(odd), odd.effect)
    if found >= 1 and not key.endswith("ratio"):
        out.put(key, value, "train.warmup_steps", int(found))
    elif "train.warmup_steps" in out.job:
        out.name(key, value, "warmup_steps overrides it")
    elif found == 0 and not key.endswith("ratio"):
        out.name(key, value, "0: what warmup_ratio says holds")
    else:
        out.put(key, value, "train.warmup_ratio", float(found))


def positions(out: Imported, values: Mapping[str, Any], before: str = "") -> None:
    """`rope_scaling` as transformers has it: one key of the job for all that stands below it."""
    found = values.get("rope_scaling")
    if isinstance(found, dict) and found:
        for name, value in found.items():
            out.keep(f"{before}rope_scaling.{name}", value, "model.rope_scaling")
        out.job["model.rope_scaling"] = found


def quantized(out: Imported, values: Mapping[str, Any]) -> bool:
    """Whether the base is in 4 bits; the keys that say so are named."""
    eight = values.get("load_in_8bit")
    if eight is True:
        why = "farthing has no 8-bit base: the base stays in 16 bits, which is more exact"
        out.name("load_in_8bit", True, why, "differs")
    elif eight is not None:
        out.name("load_in_8bit", eight, "off there, and farthing has none")
    if "load_in_4bit" in values:
        out.name(
            "load_in_4bit",
            values["load_in_4bit"],
            "method: qlora is the 4-bit base, lora and full are without",
        )
    return values.get("load_in_4bit") is True


def no_adapter(out: Imported, values: Mapping[str, Any], *begins: str) -> None:
    """Name the keys that begin so, where there is no adapter that they could be about."""
    for key in values:
        if key.startswith(begins):
            out.name(key, values[key], "about an adapter, and there is none")


def trainer_defaults(out: Imported) -> None:
    """What Trainer does where nothing is said."""
    out.default_all(
        "train", num_train_epochs=3.0, per_device_train_batch_size=8, learning_rate=5e-5
    )
    out.default("train.lr_scheduler_type", "linear")
    if "train.warmup_steps" not in out.job:
        out.default("train.warmup_ratio", 0.0)
    if "train.eval_strategy" not in out.job and "train.eval_steps" not in out.job:
        out.default("train.eval_strategy", "no")
    out.default("train.load_best_model_at_end", False)


_QUERY_AND_VALUE = (
    (r"(^|[^a-z])m?t[05]|byt5|ul2", "q v"),
    (r"deberta-v[23]", "query_proj value_proj"),
    (r"deberta", "in_proj"),
    (r"bert|electra|xlm-r", "query value"),
    (r"gpt-?2|bigcode|starcoder(base)?(-|$)|santacoder", "c_attn"),
    (r"bloom|falcon|pythia|neox|chatglm", "query_key_value"),
    (r"(^|-)mpt-", "Wqkv"),
    (r"codegen", "qkv_proj"),
    (r"^phi-(1|2)", "q_proj v_proj fc1 fc2"),
    (r"nemotron-h|nemotron.*nano", "q_proj k_proj v_proj o_proj"),
    (r"", "q_proj v_proj"),
)
"""A model's name -> the layers that `peft` adapts where `target_modules` is not said: its table
`TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING`, as of version 0.21."""


def peft_targets(out: Imported) -> None:
    """Which layers an adapter is put on where nothing is said."""
    name = str(out.job.get("model.model_name_or_path", "")).rstrip("/").rpartition("/")[2].lower()
    layers = next(layers for pattern, layers in _QUERY_AND_VALUE if re.search(pattern, name))
    out.default("method.target_modules", layers.split(), "peft for models of this name")
