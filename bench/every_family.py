"""Every model family of transformers for every task: is what farthing computes what plain
transformers computes?

    python bench/every_family.py --task causal-lm                 # all families of the task
    python bench/every_family.py --task classification xlnet bert

Of each family a model of a few thousand weights is made, with a configuration as its own class
makes it, all sizes small. Six documents of uneven lengths go through farthing as it would train
them, and through transformers one at a time: loss, gradients (whole and with an adapter) and
evaluation. Each family gets one line: `exact` (and how), `refused` (in words), or what went wrong.
Needs no network and no data.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import json
import math
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
import yaml
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from farthing.config.load import load_job
from farthing.errors import FarthingError
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.model.load import quiet_libraries
from farthing.objectives.registry import objective_of
from farthing.tiny import make_tokenizer, write_jsonl
from farthing.train.build import build_model
from farthing.train.resolve import open_examples, resolve
from farthing.train.trouble import errors_in_words

MAPPINGS = {
    "causal-lm": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "seq2seq": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "classification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
}
N_WORDS = 320
WORDS = tuple("the a bread cheese soup apple rice goal match race rain storm sun red old".split())  # noqa: SIM905
N_PROMPT, N_ANSWER = (2, 30, 9, 14, 3, 20), (1, 6, 12, 3, 8, 5)
MICRO_BATCH_TOKENS = 110
CLOSE = 1e-5

# ---- small configurations ----

_TABLE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
SIZES: dict[str, Any] = {name: size for size, names in _TABLE["sizes"].items() for name in names}
QUIET = (
    "dropout",
    "layerdrop",
    "drop_rate",
    "pdrop",
    "jitter",
    "attention_probs_dropout_prob",
    "hidden_dropout_prob",
)
LOOKS_BACK = {"is_decoder": True, "causal": True}
OWN: dict[str, dict[str, Any]] = {
    family: row["has"] for row in _TABLE["families"] for family in row["of"]
}
"""What a family needs besides: found by its own checks."""


def known_names(kind: Any) -> set[str]:
    """The names that a configuration class takes."""
    return set(getattr(kind, "__dataclass_fields__", {})) | {
        each
        for each in inspect.signature(kind.__init__).parameters
        if each not in ("self", "kwargs")
    }


def small_values(kind: Any, own: dict[str, Any]) -> dict[str, Any]:
    """Small sizes for a configuration class, those of its parts among them."""
    made: Any = None
    with contextlib.suppress(Exception):
        made = kind()
    names = known_names(kind)
    renamed = set(getattr(kind, "attribute_map", None) or {})
    values = {name: value for name, value in SIZES.items() if name in names - renamed}

    def of_made(name: str) -> Any:
        with contextlib.suppress(Exception):  # some differ from layer to layer
            return getattr(made, name, None)

    for name in names:
        default = of_made(name)
        if any(word in name for word in QUIET) and isinstance(default, float):
            values[name] = 0.0
    for name, of in (getattr(kind, "sub_configs", None) or {}).items():
        part = of_made(name)
        part_kind = type(part) if part is not None else of
        if hasattr(part_kind, "model_type") and part_kind.__name__ != "AutoConfig":
            given = (
                own.get(name)
                or OWN.get(f"{part_kind.model_type}.part")
                or OWN.get(part_kind.model_type, {})
            )
            values[name] = small_values(part_kind, given) | (
                {"model_type": part_kind.model_type} if of.__name__ == "AutoConfig" else {}
            )
    layers = of_made("layer_types")
    if isinstance(layers, list) and "layer_types" in names:
        kinds = list(dict.fromkeys(layers))
        kinds += [kinds[0]] * (len(kinds) < 2)
        values |= {"layer_types": kinds}
        values |= {
            name: len(kinds)
            for name in ("num_hidden_layers", "n_layer", "num_layers")
            if name in values
        }
    return values | own


def small_config(family: str, task: str) -> Any:
    """A small configuration of a family, of its own class; an encoder that is to predict the next
    token looks back only.
    """
    kind = CONFIG_MAPPING[family]
    values = small_values(kind, OWN.get(family, {}))
    if task == "causal-lm":
        names = known_names(kind)
        values |= {key: value for key, value in LOOKS_BACK.items() if key in names}
    config = kind(**values)
    if (
        getattr(config, "is_encoder_decoder", False)
        and getattr(config, "decoder_start_token_id", None) is None
    ):
        config.decoder_start_token_id = 1
    return config


def small_model(family: str, task: str, config: Any) -> Any:
    """A model of it in fp32, each of its weights so large that it matters."""
    if task == "classification":
        objective_of(task).labels.set_head(config, ("food", "sport", "weather"))
    torch.manual_seed(0)
    model = getattr(transformers, objective_of(task).auto_class).from_config(
        config, dtype=torch.float32
    )
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data += 0.1 * torch.randn_like(parameter)
    return model


# ---- the same through transformers alone ----


def still(model: Any) -> Any:
    """The model without any dropout."""
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and any(word in name for word in QUIET):
                setattr(module, name, 0.0)
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    return model


def plain_loss(
    model: Any,
    ids: Tensor,
    is_target: Tensor,
    label: int | None,
    task: str,
    smoothing: float = 0.0,
) -> Tensor:
    """The summed loss of one document: ids [T]."""
    of = objective_of(task)
    if of.is_pair:
        source, labels = ids[is_target == 0][None], ids[is_target == 1][None]
        found = model(
            input_ids=source, attention_mask=torch.ones_like(source), labels=labels, use_cache=False
        )
        if found.logits.shape[1] != labels.shape[1]:
            raise ValueError(
                f"logits of {found.logits.shape[1]} tokens for {labels.shape[1]} targets"
            )
        return F.cross_entropy(
            found.logits[0].float(), labels[0], reduction="sum", label_smoothing=smoothing
        )
    rows = ids[None]
    inputs = {"input_ids": rows, "attention_mask": torch.ones_like(rows)}
    if of.labels is not None:
        logits = model(**inputs).logits
        return F.cross_entropy(logits.float(), torch.tensor([label]), reduction="sum")
    logits = model(**inputs, use_cache=False).logits[0, :-1]
    wanted = is_target[1:] == 1
    return F.cross_entropy(logits[wanted].float(), rows[0, 1:][wanted], reduction="sum")


def documents_of(tokens: Any) -> list[tuple[Tensor, Tensor, int | None]]:
    """(ids, is_target, label) of each example."""
    found = []
    for index in range(len(tokens)):
        ids, is_target = (torch.from_numpy(part.astype(np.int64)) for part in tokens.example(index))
        found.append((ids, is_target, None if tokens.labels is None else int(tokens.labels[index])))
    return found


def gradients(model: Any) -> dict[str, Tensor]:
    """Gradients by name."""
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def off_by(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[float, str]:
    """(the largest relative difference of a gradient, its name): to its own size or a thousandth of
    the whole.
    """
    names = {*ours, *theirs}
    floor = 1e-3 * float(torch.stack([g.norm() for g in theirs.values()]).norm())
    worst = (0.0, "")
    for name in sorted(names):
        zero = torch.zeros(())
        mine, plain = ours.get(name, zero), theirs.get(name, zero)
        gap = float((mine - plain).norm()) / max(float(plain.norm()), floor, 1e-30)
        worst = max(worst, (float("inf") if math.isnan(gap) else gap, name))
    return worst


# ---- one family ----


def rows_of(task: str) -> list[dict[str, str]]:
    """Six rows of uneven lengths."""
    dice = np.random.default_rng(0)
    rows = []
    for index, (n_prompt, n_answer) in enumerate(zip(N_PROMPT, N_ANSWER, strict=True)):
        prompt, answer = (" ".join(dice.choice(WORDS, n)) for n in (n_prompt, n_answer))
        if task == "classification":
            rows.append({"text": prompt, "label": ("food", "sport", "weather")[index % 3]})
        else:
            rows.append({"prompt": prompt, "completion": f" {answer}"})
    return rows


def make_framing_tokenizer(folder: Path, task: str) -> None:
    """A tokenizer that frames texts as those of encoders do, where texts are read whole."""
    tokenizer = make_tokenizer(folder, [" ".join(WORDS)] * 3, N_WORDS - 20)
    if task != "causal-lm":
        frame = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
        tokenizer.backend_tokenizer.post_processor = frame
        tokenizer.save_pretrained(folder)


def write_job(folder: Path, task: str, method: str, **train: Any) -> Path:
    """A job of the model in `folder`."""
    write_jsonl(folder / "data.jsonl", rows_of(task))
    values = {
        "task": task,
        "model": {"model_name_or_path": "./base"},
        "data": {"train": "data.jsonl", "max_length": 200}
        | ({"max_target_length": 60} if task == "seq2seq" else {}),
        "method": {"name": method, "lora_r": 2} if method == "lora" else "full",
        "where": {"device": "cpu", "usd_per_hour": 1.0},
        "output_dir": f"./run-{method}",
        "cache_dir": "./cache",
        "train": {
            "max_steps": 2,
            "global_batch_size": 6,
            "learning_rate": 0.01,
            "lr_scheduler_type": "constant",
        }
        | train,
    }
    path = folder / f"{method}.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def compare(path: Path, row: dict[str, Any], method: str) -> None:
    """Loss, gradients and evaluation of farthing's forward pass against transformers'."""
    job = load_job(path)
    spec, numerics = resolve(job), Numerics(torch.device("cpu"), None)
    vars(spec)["numerics"] = numerics
    examples, _ = open_examples(spec, lambda event: None)
    tokens = examples.tokens
    model = still(build_model(spec, tokens.label_names))
    if method == "lora":
        torch.manual_seed(1)
        for name, parameter in model.named_parameters():
            if "lora_B" in name or "lora_embedding_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    plain = copy.deepcopy(model)
    if method == "lora":
        from farthing.model.lora_kernels import use_low_rank

        use_low_rank(model)
    forward = Forward(model, job.task, spec.pad_id, numerics)
    row["how"] = (
        "packed"
        if forward.is_packed
        else "padded" + ("" if forward.batching_rule is None else ", of one length")
    )
    row["head"] = "all" if forward.head is None or forward.head.why_whole else "labelled"
    pieces = forward.split(tokens, np.arange(len(tokens)), MICRO_BATCH_TOKENS)
    for is_training in (True, False):
        model.train(is_training), plain.train(is_training)
        model.zero_grad(), plain.zero_grad()
        ours = theirs = 0.0
        with torch.set_grad_enabled(is_training):
            for piece in pieces:
                torch.manual_seed(5)
                batch = forward.to_device(forward.collate(tokens, piece))
                if is_training:
                    loss, _ = forward.loss(batch)
                    loss.backward()
                else:
                    loss = forward.measure(batch)["loss"]
                ours += float(loss.detach())
            for ids, is_target, label in documents_of(tokens):
                torch.manual_seed(5)
                loss = plain_loss(plain, ids, is_target, label, job.task)
                if is_training:
                    loss.backward()
                theirs += float(loss.detach())
        key = f"{method} {'training' if is_training else 'evaluation'}"
        row[f"{key} loss off"] = abs(ours - theirs) / max(abs(theirs), 1e-9)
        if is_training:
            row[f"{key} gradients off"] = off_by(gradients(model), gradients(plain))


def problem(error: BaseException) -> str:
    """An error in one line."""
    at = ""
    trace = error.__traceback__
    while trace is not None:
        at = f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return f"{type(error).__name__} at {at}: {' '.join(str(error).split())[:300]}"


def look_at(family: str, task: str, folder: Path) -> dict[str, Any]:
    """Everything about one family."""
    row: dict[str, Any] = {"family": family, "task": task}
    base = folder / "base"
    try:
        still(small_model(family, task, small_config(family, task))).save_pretrained(base)
        make_framing_tokenizer(base, task)
    except Exception as error:
        return row | {"outcome": "not made", "why": problem(error)}
    for method in ("full", "lora"):
        try:
            with errors_in_words(folder):
                compare(write_job(folder, task, method), row, method)
        except FarthingError as error:
            words = " ".join(str(error).split())[:400]
            row[f"{method} refused"] = f"{type(error).__name__}: {words}"
        except Exception as error:
            row[f"{method} crashed"] = problem(error)
    return row | {"outcome": outcome(row), "how": row.get("how", "")}


def outcome(row: dict[str, Any]) -> str:
    """In a word."""
    if any(key.endswith("crashed") for key in row):
        return "crashed"
    for key, value in row.items():
        size = value[0] if isinstance(value, tuple) else value
        if key.endswith(" off") and not size <= (20 * CLOSE if "gradients" in key else CLOSE):
            return "wrong"
    if "full refused" in row or "lora refused" in row:
        return "refused" if "full refused" in row else "lora refused"
    return "exact"


def main_(arguments: list[str] | None = None) -> int:
    """Look at the families that are named, or all of a task."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*")
    parser.add_argument("--task", choices=MAPPINGS, required=True)
    parser.add_argument("--out", type=Path, help="a file of JSON lines")
    asked = parser.parse_args(arguments)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    quiet_libraries()
    names = asked.families or sorted(MAPPINGS[asked.task])
    for family in names:
        start = time.perf_counter()
        folder = Path(tempfile.mkdtemp(prefix="family-"))
        try:
            row = look_at(family, asked.task, folder)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        row["seconds"] = round(time.perf_counter() - start, 2)
        if asked.out:
            with asked.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(
            json.dumps(row)
            if asked.families
            else f"{family:24s} {row['outcome']:12s} {row.get('how', '')} {row['seconds']}s",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main_())
