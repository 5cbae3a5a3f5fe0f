"""The last layer of a model for the tokens alone that a classifier reads.

What it makes of any other token reaches nobody. So keys and values are of all tokens, and queries,
the output of attention, the feed-forward and the norms between them of the tokens that are read. It
is the family's own code that computes, called twice: with all tokens, until its attention is handed
keys and values, and with the tokens that are read, whose attention then sees those. Tokens that are
not read are zeros in what the layer gives, so that all behind it stays as it is.

Refuses layers that something listens to or answers for, compiled ones, and attention whose
projections have other names. Dropout draws its masks in the shape of what is computed: of fewer
tokens it drops others. Never run on a GPU.

Shapes: T tokens of N documents, R of them read, h hidden size, K keys, H heads of D.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from farthing.model.documents import Documents
from farthing.model.pairs import answering

QUERY, KEY_VALUE = ("q_proj", "query"), ("k_proj", "v_proj", "key", "value")
RECORDING = "transformers.utils.output_capturing"
FUSED = ("qkv_proj", "query_key_value", "c_attn")


@dataclass(frozen=True, eq=False)
class Read:
    """Tokens of a packed batch that are read behind its last layer."""

    positions: Tensor
    """int64 [R], ascending."""
    documents: Documents
    """Stretches of them, and the keys that each sees."""


class KeysKnown(Exception):
    """A layer has come to its attention, which was asked for its keys and values [1, H, K, D]
    alone.

    Nothing that the layer holds may refer to it: with its traceback it would keep tensors until
    garbage is collected.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        super().__init__()
        self.key, self.value = key, value


class KeysWanted:
    """Stands for documents in a layer that is to stop at its attention."""


@dataclass(frozen=True, eq=False)
class Seen:
    """Stands for documents in a layer of R tokens, whose attention sees keys and values of other
    tokens [1, H, K, D].
    """

    stretches: Documents
    key: Tensor
    value: Tensor


# ---- which tokens ----


def first_of_each(documents: Documents) -> Read:
    """The first token of each document, which looks both ways."""
    lengths, device = documents.lengths, documents.bounds.device
    one_each = Documents.of([1] * len(lengths), device, lengths, reads_others=True)
    return Read(documents.bounds[:-1].long(), one_each)


# ---- the layer ----


def layers_of(body: nn.Module, n_layers: int) -> nn.ModuleList | None:
    """The list of a body's layers: the outermost of that length."""
    lists = (
        module
        for module in body.modules()
        if isinstance(module, nn.ModuleList) and len(module) == n_layers
    )
    return next(lists, None)


def last_layer(inner: Any) -> Any:
    """The last layer of a model without its adapter; None where it can't be computed for some
    tokens alone.
    """
    body = getattr(inner, inner.base_model_prefix, None)
    layers = None if body is None else layers_of(body, inner.config.num_hidden_layers)
    if not layers or _attention_of(layers[-1]) is None:
        return None
    last: Any = layers[-1]
    is_taken = "forward" in vars(last) or last._compiled_call_impl or is_heard(last)
    # versions of transformers whose call checkpoints would compute the whole layer again
    return None if is_taken or type(last).__call__ is not nn.Module.__call__ else last


def is_heard(module: nn.Module) -> bool:
    """Whether something listens to a module, but for transformers' own recording of outputs."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(RECORDING not in str(getattr(hook, "__module__", "")) for hook in hooks)


def of_all_tokens(layer: Any) -> list[nn.Module]:
    """What of a layer is computed for all tokens whichever are read: the projections that keys and
    values come of.
    """
    children = _attention_of(layer)._modules
    return [children[name] for name in (*KEY_VALUE, *FUSED) if name in children]


def _attention_of(layer: Any) -> Any:
    """The module of a layer that makes queries, keys and values; None where none is known."""
    return next((each for each in layer.modules() if {*QUERY, *FUSED} & each._modules.keys()), None)


@contextlib.contextmanager
def computed_for(layer: Any, read: Read) -> Iterator[None]:
    """Within the block the layer gives zeros for all tokens of its batch that are not `read`.

    It is computed again in the backward pass where it is checkpointed.
    """

    def answer(hidden: Tensor, *args: Any, **kwargs: Any) -> Any:
        compute = functools.partial(_compute, layer, read, args, kwargs)
        if layer.training and getattr(layer, "gradient_checkpointing", False):
            return layer._gradient_checkpointing_func(_within_checkpoint, layer, compute, hidden)
        return compute(hidden)

    with answering([layer], answer):
        yield


def _within_checkpoint(layer: Any, compute: Callable[[Tensor], Any], hidden: Tensor) -> Any:
    """What is computed again as a whole: the layer's own forward pass would be a checkpoint of its
    own.
    """
    layer.gradient_checkpointing = False
    try:
        return compute(hidden)
    finally:
        layer.gradient_checkpointing = True


def _compute(
    layer: Any, read: Read, args: tuple[Any, ...], kwargs: dict[str, Any], hidden: Tensor
) -> Any:
    """The layer's output for hidden [1, T, h], as its own forward pass gives it."""
    attention, forward = _attention_of(layer), type(layer).forward
    children = attention._modules
    kept: dict[str, Tensor] = {}
    with contextlib.ExitStack() as first:
        _leave_out(first, attention, QUERY)
        for name in set(FUSED) & children.keys():
            first.enter_context(
                answering(
                    [children[name]], functools.partial(_kept, kept, name, children[name].forward)
                )
            )
        try:
            forward(layer, hidden, *args, **{**kwargs, "documents": KeysWanted()})
        except KeysKnown as known:
            seen = Seen(read.documents, known.key, known.value)
    with contextlib.ExitStack() as second:
        _leave_out(second, attention, KEY_VALUE)
        for name, made in kept.items():
            own = made.index_select(1, read.positions)
            second.enter_context(answering([children[name]], lambda _, own=own: own))
        args, kwargs = _of(read, hidden.shape[1], args), _of(read, hidden.shape[1], kwargs)
        found = forward(
            layer, hidden.index_select(1, read.positions), *args, **{**kwargs, "documents": seen}
        )
    is_plain = torch.is_tensor(found)
    out = found if is_plain else found[0]
    whole = out.new_zeros(hidden.shape).index_copy(1, read.positions, out)
    return whole if is_plain else (whole, *found[1:])


def _leave_out(stack: contextlib.ExitStack, attention: Any, names: tuple[str, ...]) -> None:
    """Until the stack is closed these projections give zeros."""
    for name in set(names) & attention._modules.keys():
        width = attention._modules[name].out_features
        # not one number expanded: OLMo clips what its projections give in place
        zeros = functools.partial(
            lambda width, given: given.new_zeros(*given.shape[:-1], width), width
        )
        stack.enter_context(answering([attention._modules[name]], zeros))


def _kept(kept: dict[str, Tensor], name: str, forward: Any, given: Tensor) -> Tensor:
    kept[name] = forward(given)
    return kept[name]


def _of(read: Read, n_tokens: int, value: Any) -> Any:
    """What a layer is given beside hidden states, for the tokens that are read: tensors [1, T, ...]
    are cut.
    """
    if torch.is_tensor(value):
        is_of_tokens = value.ndim > 1 and value.shape[:2] == (1, n_tokens)
        return value.index_select(1, read.positions) if is_of_tokens else value
    if isinstance(value, dict):
        return {name: _of(read, n_tokens, each) for name, each in value.items()}
    return tuple(_of(read, n_tokens, each) for each in value) if isinstance(value, tuple) else value
