"""No work for frozen weights: what the layers below the first trained one compute is computed once
for each example.

Where adapters sit in upper layers only, everything under them gives the same hidden states in every
epoch.
`find_frozen_layers` says how many layers that are, `hidden_states` runs them alone, and within
`resume` a forward pass of the model, or of its body, begins above them. Modules, their names,
saving, and calls outside of that block stay as they are: a layer that is passed over is only given
another answer for as long as the block runs. `frozen_cache` keeps the states.

Refuses, in words: layers with anything trained, dropout or an adapter in them (one that is frozen
can still be switched off), anything that listens to them, families whose packed batches are not
tested, and layers that hand more upwards than hidden states. Never run on a GPU.

Shapes: T tokens of a packed batch, h hidden size, k frozen layers.
"""

from __future__ import annotations

import contextlib
import hashlib
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farthing.model.attention import NAME, can_go_packed, packed_inputs
from farthing.model.documents import Batch
from farthing.model.last_layer import is_heard, layers_of
from farthing.model.loss import inner_of
from farthing.model.pairs import answering
from farthing.tasks.registry import task_of

AFTER = frozenset(
    {"norm", "ln_f", "final_layer_norm", "final_layernorm", "project_out", "pooler"}
)  # run above layers
HASH_THREADS = 4


@dataclass(frozen=True, eq=False)
class FrozenLayers:
    """The k bottom layers of a model, and the embeddings under them: all frozen."""

    inner: Any
    """The model out of its adapter."""
    task: str
    below: tuple[nn.Module, ...]
    """What runs before the first layer, module by module."""
    layers: tuple[nn.Module, ...]
    """All of the model's."""
    n_layers: int
    """k >= 1."""

    @property
    def body(self) -> Any:
        """The model without its head."""
        return getattr(self.inner, self.inner.base_model_prefix)

    @property
    def width(self) -> int:
        """h."""
        return int(self.inner.config.hidden_size)

    @torch.no_grad()
    def hidden_states(self, batch: Batch) -> Tensor:
        """What layer k is given for a packed batch, [1, T, h]: the embeddings and layers 0 to k-1
        run, and nothing above.

        Under the caller's autocast. The model must have gone flat.
        """
        if self.inner.config._attn_implementation != NAME:
            raise ValueError("documents would see each other: call go_packed on the model first")
        found: list[Tensor] = []
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                answering(self.layers[self.n_layers :], lambda hidden, *_, **__: hidden)
            )
            stack.callback(
                self.layers[self.n_layers - 1]
                .register_forward_hook(lambda _, __, hidden: found.append(hidden))
                .remove
            )
            self.body(**packed_inputs(batch))
        return found[0]

    @contextlib.contextmanager
    def resume(self, hidden: Tensor) -> Iterator[None]:
        """Within the block, a forward pass of the model or of its body begins at layer k with
        `hidden` [1, T, h].

        It is called as ever, with the token ids of the same T tokens. The backward pass may come
        after the block, and compute layers again, as long as nobody writes into `hidden` before.
        """
        embedding = self.body.get_input_embeddings()
        weight = embedding.weight

        def embed(ids: Tensor, *_: Any, **__: Any) -> Tensor:
            if ids.shape != hidden.shape[:-1]:
                raise ValueError(
                    f"hidden states of {list(hidden.shape[:-1])} tokens for a batch of"
                    f" {list(ids.shape)}"
                )
            # a shape and a dtype, for masks and rotary positions; the layer that is resumed at
            # never sees them
            return weight.new_zeros(()).expand(*ids.shape, weight.shape[-1])

        with (
            answering([embedding], embed),
            answering(self.layers[: self.n_layers], lambda *_, **__: hidden),
        ):
            yield

    def sha256(self) -> str:
        """Identity of what the frozen layers compute: its weights to the bit, its kinds of modules,
        the model's settings.
        """
        modules = [
            *self.below,
            *(module for layer in self.layers[: self.n_layers] for module in layer.modules()),
        ]
        tensors: dict[str, Any] = {}
        for number, module in enumerate(
            modules
        ):  # one by one, as it saves itself: quantized weights with their scales
            module._save_to_state_dict(tensors, f"{number}.", False)
        tensors = {name: value for name, value in tensors.items() if torch.is_tensor(value)}
        with ThreadPoolExecutor(HASH_THREADS) as pool:
            digests = sorted(zip(tensors, pool.map(_sha256_of, tensors.values()), strict=True))
        kinds = [f"{type(module).__module__}.{type(module).__qualname__}" for module in modules]
        config = self.inner.config
        content = [self.task, self.n_layers, config.to_json_string(use_diff=False), kinds, digests]
        return hashlib.sha256(repr(content).encode()).hexdigest()


def find_frozen_layers(model: Any, task: str) -> FrozenLayers | str:
    """The most bottom layers of `model`, wrapped by `peft` or not, that are wholly frozen; or why
    there is none.
    """
    why = can_go_packed(model, task)
    if why:
        return why
    if task_of(task).is_pair:
        return "it has an encoder and a decoder"
    inner = inner_of(model)
    config, body = inner.config, getattr(inner, inner.base_model_prefix)
    if getattr(config, "num_kv_shared_layers", None) or getattr(
        config, "hidden_size_per_layer_input", None
    ):
        return f"{config.model_type}: its upper layers take more from below than hidden states"
    if any(one.is_prompt_learning for one in getattr(model, "peft_config", {}).values()):
        return "virtual tokens are trained"
    layers = layers_of(body, config.num_hidden_layers)
    if layers is None:
        return f"{config.model_type}: no list of {config.num_hidden_layers} layers is found in it"
    below = tuple(_below(body, layers))
    why = _why_not_fixed(below)
    if why:
        return f"the embeddings have {why}"
    n_layers = 0
    while n_layers < len(layers) and not (why := _why_not_fixed(layers[n_layers].modules())):
        n_layers += 1
    if n_layers == 0:
        return f"the first layer has {why}"
    return FrozenLayers(inner, task, below, tuple(layers), n_layers)


def _below(body: nn.Module, layers: nn.Module) -> Iterator[nn.Module]:
    """Every module that runs before the layers, and those that hold the layers; what is not known
    to run after does.
    """
    holders = [body]
    for holder in holders:
        yield holder
        for name, child in holder.named_children():
            if child is layers or name in AFTER:
                continue
            if any(module is layers for module in child.modules()):
                holders.append(child)
            else:
                yield from child.modules()


def _why_not_fixed(modules: Iterable[nn.Module]) -> str:
    """What lets the output of these modules, each looked at without its children, change in
    training; empty if nothing.
    """
    adapters: tuple[type, ...] = ()
    if (
        "peft" in sys.modules
    ):  # else nothing here is of it, and to import it takes longer than all the rest
        from peft.tuners.tuners_utils import BaseTunerLayer
        from peft.utils.other import AuxiliaryTrainingWrapper

        adapters = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    for module in modules:
        kind = type(module).__name__
        if any(weight.requires_grad for weight in module.parameters(recurse=False)):
            return f"a trained weight ({kind})"
        if isinstance(module, adapters):
            return f"an adapter ({kind})"
        rates = {
            name: value
            for name, value in vars(module).items()
            if "drop" in name or "jitter" in name
        }
        if isinstance(module, nn.modules.dropout._DropoutNd):
            rates["p"] = module.p
        if any(isinstance(rate, float | int) and rate > 0 for rate in rates.values()):
            return f"dropout at work ({kind})"
        if is_heard(module):
            return f"something that listens to it ({kind})"
    return ""


def _sha256_of(tensor: Tensor) -> str:
    """Of a tensor's bytes, shape and dtype."""
    content = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{content.dtype}{list(content.shape)}".encode())
    if content.numel():
        digest.update(content.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
