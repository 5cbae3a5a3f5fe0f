"""The last layer of a model for the tokens alone that are read behind it: by a loss, or by a
classifier.

What it makes of any other token reaches nobody. So keys and values are of all tokens, and queries,
the output of attention, the feed-forward and the norms between them of the tokens that are read. It
is the family's own code that computes, called twice: with all tokens, until its attention is handed
keys and values, and with the tokens that are read, whose attention then sees those. Tokens that are
not read are zeros in what the layer gives, so that all behind it stays as it is.

A loss reads labelled positions. Neighbours among them are taken as a document that goes on from
what stands before them, as examples do that share a beginning; small gaps are read too, as each
stretch has its own copy of the keys that it sees.

Refuses layers that something listens to or answers for, compiled ones, and attention whose
projections have other names. Dropout draws its masks in the shape of what is computed: of fewer
tokens it drops others. Never run on a GPU.

Shapes: T tokens of N documents, R of them read, h hidden size, K keys, H heads of D.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from farthing.data.prefix_sharing import COPY_SHARE
from farthing.model.documents import Documents, sent
from farthing.model.pairs import answering
from farthing.models.families import MOST_READ

QUERY, KEY_VALUE = ("q_proj", "query"), ("k_proj", "v_proj", "key", "value")
RECORDING, SPREADING = "transformers.utils.output_capturing", ".fsdp._fully_shard."
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


@dataclass(frozen=True, eq=False)
class Folded:
    """Stands for documents in a layer of one token a document, which reads the tokens hidden [T, h]
    of its own.
    """

    hidden: Tensor
    lengths: tuple[int, ...]

    def read(self, attention: Any, query: Tensor) -> Tensor:
        """[N, H, D]: what one query of each document [N, H, D] reads of its tokens.

        q (W x + b) = (q W) x + q b: the matrices of keys and values are multiplied with N rows
        instead of with all tokens.
        """
        width = attention.attention_head_size
        query = query * attention.scaling
        key, value = (
            layer.weight.unflatten(0, (-1, width)) for layer in (attention.key, attention.value)
        )  # [H, D, h]
        asked = torch.bmm(query.transpose(0, 1), key).transpose(0, 1)  # [N, H, h]
        shift = (query * attention.key.bias.view(-1, width)).sum(-1, keepdim=True)
        seen, sums = [], []
        for tokens, one, at in zip(
            self.hidden.split(self.lengths), asked.unbind(), shift.unbind(), strict=True
        ):
            weights = torch.softmax(one @ tokens.t() + at, -1)
            weights = nn.functional.dropout(weights, attention.dropout.p, attention.training)
            seen.append(weights @ tokens)
            sums.append(weights.sum(-1, keepdim=True))
        out = torch.bmm(torch.stack(seen, 1), value.transpose(1, 2)).transpose(0, 1)  # [N, H, D]
        return out + torch.stack(sums) * attention.value.bias.view(-1, width)


# ---- which tokens ----


def first_of_each(documents: Documents) -> Read:
    """The first token of each document, which looks both ways."""
    lengths, device = documents.lengths, documents.bounds.device
    one_each = Documents.of([1] * len(lengths), device, lengths, reads_others=True)
    return Read(documents.bounds[:-1].long(), replace(one_each, few_shapes=documents.few_shapes))


def labelled_alone(
    arrays: Mapping[str, NDArray[np.int64]], wanted: NDArray[np.int64], device: torch.device
) -> Read | None:
    """The `wanted` positions [n], ascending, of the arrays of a packed batch; None where it would
    not pay.
    """
    lengths, n_tokens = arrays["lengths"], arrays["input_ids"].size
    if not len(wanted):
        return None
    n_keys, rows = arrays.get("key_lengths", lengths), arrays.get("key_rows")
    stops, key_starts = np.cumsum(lengths), np.cumsum(n_keys) - n_keys
    owners = np.searchsorted(stops, wanted, side="right")
    sees = wanted - stops[owners] + n_keys[owners] + 1  # keys of each, up to itself
    gaps = np.diff(wanted) - 1
    ends = np.append((np.diff(owners) > 0) | (gaps > COPY_SHARE * sees[:-1]), True).nonzero()[0]
    begins = np.append(0, ends[:-1] + 1)
    own, seen = wanted[ends] - wanted[begins] + 1, sees[ends]
    if own.sum() + COPY_SHARE * seen.sum() > MOST_READ * n_tokens:
        return None
    keys = _ranges(key_starts[owners[ends]], seen)
    documents = Documents.of(own, device, seen, keys if rows is None else rows[keys])
    return Read(sent(_ranges(wanted[begins], own), device), documents)


def _ranges(starts: NDArray[np.int64], sizes: NDArray[np.int64]) -> NDArray[np.int64]:
    """`sizes` numbers from each of `starts` on, one after another."""
    return np.arange(sizes.sum()) + np.repeat(starts - np.cumsum(sizes) + sizes, sizes)


# ---- the layer ----


def layers_of(body: nn.Module, n_layers: int) -> nn.ModuleList | None:
    """The list of a body's layers: the outermost of that length."""
    lists = (
        module
        for module in body.modules()
        if isinstance(module, nn.ModuleList) and len(module) == n_layers
    )
    return next(lists, None)


def last_layer(inner: Any, *, may_be_spread: bool = False) -> Any:
    """The last layer of a model without its adapter; None where it can't be computed for some
    tokens alone.

    One whose weights are spread over processes is gathered around its call, whatever it computes
    then: so a run has the same bits on one process and with weights that are spread, but for
    classifiers, of which earlier versions computed it whole.
    """
    body = getattr(inner, inner.base_model_prefix, None)
    layers = None if body is None else layers_of(body, inner.config.num_hidden_layers)
    if not layers or _attention_of(layers[-1]) is None:
        return None
    last: Any = layers[-1]
    is_taken = (
        "forward" in vars(last)
        or last._compiled_call_impl
        or is_heard(last, *[SPREADING] * may_be_spread)
    )
    # versions of transformers whose call checkpoints would compute the whole layer again
    return None if is_taken or type(last).__call__ is not nn.Module.__call__ else last


def is_heard(module: nn.Module, *quiet: str) -> bool:
    """Whether something listens to a module, but for hooks of modules in whose names one of these
    is.

    transformers' own recording of outputs, which nobody asks for, does not count either.
    """
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return any(
        all(name not in str(getattr(hook, "__module__", "")) for name in (RECORDING, *quiet))
        for hook in hooks
    )


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
    if _can_fold(attention, hidden, kwargs["documents"]):
        seen: Seen | Folded = Folded(hidden[0], kwargs["documents"].lengths)
    else:
        with contextlib.ExitStack() as first:
            _leave_out(first, attention, QUERY)
            for name in set(FUSED) & children.keys():
                first.enter_context(
                    answering(
                        [children[name]],
                        functools.partial(_kept, kept, name, children[name].forward),
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


def _can_fold(attention: Any, hidden: Tensor, documents: Documents) -> bool:
    """Whether `Folded` can take this layer's attention: an encoder's with plain matrices, on a CPU
    in fp32.
    """
    is_here = (
        hidden.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        and documents.may_be_short
    )
    plain = (attention._modules.get(name) for name in ("key", "value"))
    return is_here and all(type(each) is nn.Linear for each in plain)
