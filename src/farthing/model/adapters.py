"""Full fine-tuning or an adapter through `peft`: which weights are trained, counted, saved and put
back.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from farthing.errors import ModelError
from farthing.model.adapter_start import START, base_is_kept, start_tensors, take_start_away
from farthing.model.loss import drawn_batch, inner_of, logits_of, scores_words
from farthing.models.counted import QUERY_AND_VALUE
from farthing.models.shapes import PEFT_ADAPTS_EXPERTS
from farthing.models.weights import begins_from_base
from farthing.objectives.registry import objective_of


@dataclass(frozen=True)
class Adapter:
    """The settings of an adapter, in the words of `peft`."""

    r: int = 16
    alpha: float = 32.0
    dropout: float = 0.0
    target_modules: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    use_dora: bool = False
    use_rslora: bool = False
    init: str = "true"
    """peft's `init_lora_weights`, true and false as words."""
    bias: bool = False
    """peft's `lora_bias`."""


def add_adapter(model: Any, adapter: Adapter, task: str, seed: int) -> Any:
    """Freeze the model and give it a LoRA adapter (Hu et al. 2021, arXiv 2106.09685), its weights
    drawn from `seed`.

    Heads that sit on the encoder are trained whole and saved with the adapter. Raises `ModelError`.
    """
    import peft

    _must_know(model, "modules_to_save", adapter.modules_to_save)
    has_new_head = not scores_words(model)
    heads = new_heads(model) if has_new_head else []
    if has_new_head and not adapter.target_modules:
        targets: str | list[str] = _query_and_value(model)
    elif not adapter.target_modules or adapter.target_modules == ("all-linear",):
        targets = "all-linear"
    else:
        targets = list(adapter.target_modules)
        converted = PEFT_ADAPTS_EXPERTS.get(inner_of(model).config.model_type, ())
        known = tuple(name for name in adapter.target_modules if not name.endswith(converted))
        _must_know(model, "target_modules", known)
    config = peft.LoraConfig(
        r=adapter.r,
        lora_alpha=adapter.alpha,
        lora_dropout=adapter.dropout,
        target_modules=targets,
        modules_to_save=sorted({*heads, *adapter.modules_to_save}) or None,
        use_dora=adapter.use_dora,
        use_rslora=adapter.use_rslora,
        init_lora_weights={"true": True, "false": False}.get(adapter.init, adapter.init),
        lora_bias=adapter.bias,
        task_type=objective_of(task).peft_type,
    )
    if targets == "all-linear" and (others := _not_linear(model)):
        config.exclude_modules = others
    linear = _linear_names(model)
    if begins_from_base(adapter.init) and (odd := _embeddings_among(model, targets)):
        raise ModelError(
            f"`{odd[0]}` is an embedding: {adapter.init} takes the weights of linear layers apart",
            where="method.init_lora_weights",
            to_do=(f"leave {odd[0]} out of method.target_modules, or use init_lora_weights: true"),
        )
    torch.manual_seed(seed)
    try:
        with warnings.catch_warnings(), base_is_kept():
            warnings.simplefilter("ignore")
            wrapped = peft.get_peft_model(model, config)
    except (ValueError, KeyError) as error:
        raise ModelError(
            f"no adapter can be made: {str(error).splitlines()[0][:200]}",
            where=(
                "method.init_lora_weights"
                if "initialization" in str(error)
                else "method.target_modules"
            ),
            to_do=(
                f"use {'' if targets == 'all-linear' else 'all-linear, or '}names among"
                f" {', '.join(linear)}"
            ),
        ) from error
    if adapter.bias:
        _refuse_without_bias(wrapped)
    if begins_from_base(adapter.init):
        take_start_away(wrapped)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # masters in fp32 whatever the base is in
    return wrapped


def _embeddings_among(model: Any, targets: str | list[str]) -> list[str]:
    """The embeddings that `targets` name."""
    return [
        wanted
        for wanted in (targets if isinstance(targets, list) else [])
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and f".{name}".endswith(f".{wanted}")
    ]


def _not_linear(model: Any) -> list[str]:
    """Modules whose class is made from a linear layer and that compute something else, such as
    routers of experts.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and type(module).forward.__module__.startswith(
            "transformers"
        ):
            out: Any = None
            with contextlib.suppress(Exception), torch.no_grad():
                out = module(module.weight.new_zeros(1, 1, module.in_features))
            if not torch.is_tensor(out) or out.shape != (1, 1, module.out_features):
                found.append(name)
    return found


def _refuse_without_bias(wrapped: Any) -> None:
    """A bias of an adapter is merged into that of its layer. Raises `ModelError` where there is
    none.
    """
    for name, module in wrapped.named_modules():
        if hasattr(module, "lora_bias") and getattr(module.get_base_layer(), "bias", None) is None:
            raise ModelError(
                f"layers such as {name.split('.')[-1]} have no bias, into which that of an adapter"
                " could be merged",
                where="method.lora_bias",
                to_do="leave it out, or name layers with a bias in method.target_modules",
            )


def _must_know(model: Any, key: str, wanted_names: tuple[str, ...]) -> None:
    """Refuse names that `peft` would ignore without a word. Raises `ModelError`."""
    names = [
        name for name, module in model.named_modules() if any(True for _ in module.parameters())
    ]
    begin = "." if key == "target_modules" else ""
    for wanted in wanted_names:
        if not any(f".{name}".endswith(begin + wanted) for name in names):
            known = sorted({name.split(".")[-1] for name in names} - {""})
            raise ModelError(
                f"this model has no module `{wanted}`",
                where=f"method.{key}",
                to_do=f"use names among {', '.join(name for name in known if not name.isdigit())}",
            )


def refuse_unreached(model: Any, adapter: Adapter) -> None:
    """Compute a few made-up tokens and their gradients: each module that the job names must get
    one.

    A module that the forward pass goes around (T5's `shared`, where encoder and decoder have
    embeddings of their own) would be kept, counted and saved, and never change. Experts are left
    out, as few tokens reach few of them. Raises `ModelError`.
    """
    named = {
        name for name in (*adapter.target_modules, *adapter.modules_to_save) if name != "all-linear"
    }
    if not named:
        return
    was_training = model.training
    model.eval()
    try:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        score = logits_of(model, drawn_batch(model, 1, 8)).float().sum()
        found = (None,) * len(trained)
        if score.requires_grad:
            found = torch.autograd.grad(score, tuple(trained.values()), allow_unused=True)
        idle = {name for name, gradient in zip(trained, found, strict=True) if gradient is None}
    finally:
        model.train(was_training)
    for name in sorted(named):
        own = name.removeprefix("model.")
        if any(f".{own}." in path and "expert" not in path for path in idle):
            key = "target_modules" if name in adapter.target_modules else "modules_to_save"
            raise ModelError(
                f"the model is computed without `{name}`: nothing of it would be trained",
                where=f"method.{key}",
                to_do="remove it, or name a module that is used",
            )


def word_layers(model: Any) -> tuple[tuple[str, ...], ...]:
    """The names of embeddings with a row for each word, and of output layers with a score for each,
    where there are such.
    """
    n_words = model.get_input_embeddings().num_embeddings
    embeddings, outputs = dict[str, None](), dict[str, None]()
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if isinstance(module, nn.Embedding) and module.num_embeddings == n_words:
            embeddings[leaf] = None
        elif module is model.get_output_embeddings():
            outputs[leaf] = None
    return tuple(tuple(names) for names in (embeddings, outputs) if names)


def refuse_untrained_words(model: Any, layers: Iterable[Iterable[str]]) -> None:
    """Refuse an adapter that leaves the rows of new words as they were drawn: of each of `layers`
    one name has to be trained. Raises `ModelError`.
    """
    trained = {
        part
        for name, weight in model.named_parameters()
        if weight.requires_grad
        for part in name.split(".")
    }
    lacking = [next(iter(names)) for names in layers if not trained & set(names)]
    if lacking:
        raise ModelError(
            f"the new tokens would stay as they were drawn: `{'`, `'.join(lacking)}` is not"
            " trained",
            where="model.new_tokens",
            to_do=f"set method.modules_to_save: [{', '.join(lacking)}], or method: full",
        )


def new_heads(model: Any) -> list[str]:
    """Top-level modules outside the pretrained body: what a task put on top of it."""
    body = getattr(model, "base_model_prefix", "")
    return [
        name
        for name, module in model.named_children()
        if name != body and any(True for _ in module.parameters())
    ]


def _query_and_value(model: Any) -> list[str]:
    """The names this family gives to the query and value projections (Hu et al. 2021,
    section 4.2).
    """
    names = _linear_names(model)
    for pair in QUERY_AND_VALUE:
        if set(pair) <= set(names):
            return list(pair)
    raise ModelError(
        "the query and value layers of this model are not known",
        where="method.target_modules",
        to_do=f"name them, or use all-linear; its linear layers: {', '.join(names)}",
    )


def _linear_names(model: Any) -> list[str]:
    """The last parts of the names of a model's linear layers."""
    named = model.named_modules()
    return sorted({name.split(".")[-1] for name, m in named if isinstance(m, nn.Linear | Conv1D)})


@torch.no_grad()
def break_ties(model: Any, adapter_names: Iterable[str]) -> bool:
    """Give each use of a shared weight a weight of its own, where an adapter changes one of the
    uses; whether it did.

    `adapter_names` are those of the adapter's tensors (`base_model.model.lm_head.lora_A.weight`).
    In training the other uses kept the frozen weight: merged into a shared one, the adapter would
    change them too.
    """
    tied = {
        name: dict(model.named_parameters(remove_duplicate=False))[name]
        for name in _tied_names(model)
    }
    places = tuple(f"base_model.model.{name.rpartition('.')[0]}." for name in tied)
    if not places or not any(name.startswith(places) for name in adapter_names):
        return False
    for name, parameter in tied.items():
        module, _, leaf = name.rpartition(".")
        own = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        setattr(model.get_submodule(module), leaf, own)
    model.all_tied_weights_keys = {}  # what saving and loading in transformers 5 go by
    for config in (model.config, model.config.get_text_config()):
        # UMT5 scales its outputs by this key, and is read with both weights where they differ
        config.tie_word_embeddings = config.model_type == "umt5"
    return True


def _tied_names(model: Any) -> list[str]:
    """Every name of the parameters that have more than one."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [name for shared in names.values() if len(shared) > 1 for name in shared]


def count_parameters(model: Any) -> dict[str, int]:
    """Numbers of parameters: total, trainable, adapter, and modules trained whole beside it
    (`saved_modules`).

    Each weight counts once: `peft` keeps the frozen original of a module it trains whole, which is
    left out here. Quantized weights count as what they stand for.
    """
    counts = {"total": 0, "trainable": 0, "adapter": 0, "saved_modules": 0}
    for name, parameter in model.named_parameters():
        if ".original_module." in name or f".{START}." in name:
            continue
        n = parameter.numel()
        if parameter.__class__.__name__ == "Params4bit":
            n = n * 2 * parameter.element_size() if parameter.quant_state is not None else n
        counts["total"] += n
        counts["trainable"] += n if parameter.requires_grad else 0
        if ".lora_" in name:
            counts["adapter"] += n
        elif ".modules_to_save." in name:
            counts["saved_modules"] += n
    return counts


def trained_tensors(model: Any, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What training changes, by name: the trained `weights` (tied ones once) and, in a full
    fine-tune, buffers.
    """
    tensors = {name: weight.detach() for name, weight in weights.items()}
    if not hasattr(model, "peft_config"):
        persistent = set(model.state_dict())
        tensors |= {name: b.detach() for name, b in model.named_buffers() if name in persistent}
    return tensors | start_tensors(model)


@torch.no_grad()
def put_back(own: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    """Copy saved tensors into a model's own. Raises `ModelError` when names or shapes differ."""
    if set(own) != set(tensors):
        odd = sorted(set(own) ^ set(tensors))
        raise ModelError(
            f"the checkpoint is of another model: {len(odd)} tensors differ, e.g. {odd[0]}",
            where="model",
        )
    for name, tensor in own.items():
        if tensor.shape != tensors[name].shape:
            raise ModelError(
                f"the checkpoint's {name} is {list(tensors[name].shape)}, not {list(tensor.shape)}",
                where="model",
            )
        tensor.copy_(tensors[name])
