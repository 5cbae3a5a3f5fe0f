"""A model whose weights are spread over ranks by FSDP2: each keeps its rows, and a layer is whole
only while it computes.

With an adapter the frozen base is spread and what is trained stays whole on every rank; in full
training everything that is trained is spread. Optimizer, clipping and checkpoints never see a
`DTensor`: `local` has the rows of this rank as plain tensors over the same memory. Gradients are
summed, not averaged.

NCCL was not run on GPUs so far.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from farthing.errors import ModelError
from farthing.model.activation_checkpointing import Gathered
from farthing.model.loss import inner_of
from farthing.model.precision import SUMS, keep_residual_stream


class ShardingSettings(NamedTuple):
    """How weights are spread."""

    reshard_after_forward: bool = True
    """Gathered again for the backward pass (ZeRO-3); else kept from the forward pass on (ZeRO-2).
    """
    n_shards: int = 0
    """Ranks that have all rows together, neighbours; 0: all ranks. As many others have copies of
    them (HSDP).
    """
    gathers_in: torch.dtype | None = None
    """Precision in which trained weights are sent; None: as they are."""
    offloads: bool = False
    """Rows stay in main memory, where trained ones are updated; a layer comes to the device while
    it computes.
    """


class Root(nn.Module):
    """Holds a model whose weights are spread over ranks, and are whole while it computes. The model
    keeps its class, by which its head and its kernels are known."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, compute: Callable[[], Any]) -> Any:
        """What `compute` gives."""
        return compute()


class ShardedModel:
    """A model that was spread. Every rank must go through it as often."""

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        index: int,
        n: int,
        how: ShardingSettings,
        bring: Callable[[Iterable[Tensor]], None] = lambda tensors: None,
    ) -> None:
        """`bring` leaves whole tensors on the device as the first rank has them, who may be alone
        in having any: a layer is spread before the next one comes."""
        layers = [each for each in model.modules() if isinstance(each, GradientCheckpointingLayer)]
        is_adapter = hasattr(model, "peft_config")
        whole = {weight for weight in model.parameters() if weight.requires_grad == is_adapter}
        _refuse_odd(model, layers, whole)
        bring(weight for weight in model.parameters() if weight in whole)
        self.n_shards = how.n_shards or n
        self.shard, self.is_copy = index % self.n_shards, index >= self.n_shards
        self.trains_rows = not is_adapter
        self.casts_rows = self.trains_rows and how.gathers_in is not None
        """Rows of fp32 are cast before they are gathered, and nothing is after."""
        self.gathered = _gathered(model, layers, whole, how, self.trains_rows)
        policy = MixedPrecisionPolicy()
        if how.gathers_in is not None and self.trains_rows:
            policy = MixedPrecisionPolicy(how.gathers_in, SUMS, cast_forward_inputs=False)
            keep_residual_stream(model, next(model.parameters()).dtype)
        offload = (
            CPUOffloadPolicy(pin_memory=device.type == "cuda") if how.offloads else OffloadPolicy()
        )
        mesh, root = _mesh(device, n, self.n_shards), Root(model)
        for unit in (*reversed(layers), root):  # inner ones first
            bring(
                each
                for each in unit.parameters()
                if each not in whole and not isinstance(each, DTensor)
            )
            more = {} if unit is root else {"reshard_after_forward": how.reshard_after_forward}
            fully_shard(
                unit,
                mesh=mesh,
                ignored_params=whole,
                mp_policy=policy,
                offload_policy=offload,
                **more,
            )
        self._root: Any = root
        for unit in self._units():
            unit.set_gradient_divide_factor(
                1.0
            )  # it averages otherwise; and the call does not recurse
            unit.set_force_sum_reduction_for_comms(True)  # gloo has no other
        self._may_skip = any(
            name.rpartition(".")[2] == "experts" and isinstance(each, nn.ModuleList)
            for name, each in model.named_modules()
        )
        if self._may_skip:
            self._units()[-1].set_reduce_scatter_unused_params(True)
        self._is_within = self._has_begun = False
        self._passes_left, self._is_last = 1, True
        self.accumulates_whole = False
        """Gradients of a step are added up whole, in fp32, and sent once."""
        trained = {
            name: weight for name, weight in model.named_parameters() if weight.requires_grad
        }
        self._spread = {
            name: cast(DTensor, weight) for name, weight in trained.items() if weight not in whole
        }
        rows = {
            name: nn.Parameter(weight.detach().to_local()) for name, weight in self._spread.items()
        }
        self.local = {name: rows.get(name, weight) for name, weight in trained.items()}
        """Trained weights by name: of those that are spread the rows of this rank."""

    def _units(self) -> list[Any]:
        """Modules whose weights are gathered together, the root last."""
        return [
            *(each for each in self._root.model.modules() if isinstance(each, FSDPModule)),
            self._root,
        ]

    @property
    def whole_gradients_bytes(self) -> int:
        """Of the trained weights, where no rank sends any before the last pass of a step."""
        return sum(SUMS.itemsize * weight.numel() for weight in self._spread.values())

    def begin_step(self, n_passes: int) -> None:
        """A step of so many passes, as many on every rank: gradients that copies of the rows have
        on other machines (HSDP) are summed in the last one alone, and all of them where
        `accumulates_whole`.
        """
        self._passes_left = n_passes

    def within(self, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, with the root's weights whole."""
        if self._is_within:
            return compute()
        if self.trains_rows and torch.is_grad_enabled():
            self._passes_left -= 1
            if self._is_last != (self._passes_left <= 0):
                self._is_last = not self._is_last
                if self.accumulates_whole:
                    self._root.set_requires_gradient_sync(self._is_last)
                else:
                    self._root.set_requires_all_reduce(self._is_last)
        self._is_within = self._has_begun = True
        try:
            return self._root(compute)
        finally:
            self._is_within = False
            if not torch.is_grad_enabled():  # no backward pass lets go of them
                self.let_go()

    def let_go(self) -> None:
        """Keep no gathered weights: what they were gathered from may change."""
        for unit in self._units():
            unit.reshard()

    def begin_anew(self) -> None:
        """Forget a forward or backward pass that has failed, and its gradients."""
        if self._has_begun:
            self._is_within = False
            self._units()[-1].reset_iter_state()
        for weight in self._spread.values():
            weight.grad = None

    # ---- rows ----

    def rows_of(self, name: str) -> tuple[int, int] | None:
        """(first, end) of the rows that this rank has of a trained weight; None where it is not
        spread.
        """
        weight = self._spread.get(name)
        if weight is None:
            return None
        n = int(weight.shape[0])
        size = -(-n // self.n_shards)
        return min(n, self.shard * size), min(n, (self.shard + 1) * size)

    def take_gradients(self) -> None:
        """Give the rows of `local` their gradients, which FSDP2 has summed over all ranks."""
        for name, weight in self._spread.items():
            gradient = cast(DTensor | None, weight.grad)
            self.local[name].grad = None if gradient is None else gradient.to_local().detach()
            weight.grad = None
        if self._may_skip:
            self._drop_unused()

    def _drop_unused(self) -> None:
        """No gradient where nobody has used a weight, as for one process: FSDP2 has sent zeros for
        it.
        """
        some = [weight for weight in self.local.values() if weight.grad is not None]
        used = torch.stack(
            [weight.grad.count_nonzero() for weight in some if weight.grad is not None]
        )
        dist.all_reduce(used)
        for weight, n_used in zip(some, used.tolist(), strict=True):
            if not n_used:
                weight.grad = None


def _mesh(device: torch.device, n: int, n_shards: int) -> DeviceMesh:
    if not dist.is_initialized():  # one process alone
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    if n_shards == n:
        return init_device_mesh(device.type, (n,))
    return init_device_mesh(
        device.type, (n // n_shards, n_shards), mesh_dim_names=("replicate", "shard")
    )


def _owners(model: nn.Module, layers: list[Any]) -> Iterator[tuple[str, nn.Parameter, int]]:
    """(name, weight, the innermost layer that has it, -1 for none) of every use of a weight."""
    at = {id(layer): number for number, layer in enumerate(layers)}
    places = {name: at[id(each)] for name, each in model.named_modules() if id(each) in at}
    for name, weight in model.named_parameters(remove_duplicate=False):
        path, owner = name, -1
        while path:
            path = path.rpartition(".")[0]
            if path in places:
                owner = places[path]
                break
        yield name, weight, owner


def _refuse_odd(model: nn.Module, layers: list[Any], whole: set[nn.Parameter]) -> None:
    """Refuse what FSDP2 would compute wrongly, or not at all. Raises `ModelError`."""
    owner_of: dict[nn.Parameter, int] = {}
    for name, weight, owner in _owners(model, layers):
        why = ""
        if weight in whole:
            continue
        if weight.ndim == 0:
            why = f"`{name}` is a single number"
        elif owner_of.setdefault(weight, owner) != owner:
            why = f"`{name}` is shared by several layers"
        if why:
            raise ModelError(
                f"the weights can't be spread: {why}",
                where="where.strategy",
                to_do="use ddp, with method: lora if all of it does not fit on each GPU",
            )


def _gathered(
    model: nn.Module,
    layers: list[Any],
    whole: set[nn.Parameter],
    how: ShardingSettings,
    trains: bool,
) -> Gathered:
    """What FSDP2 gathers: the root, from the forward to the end of the backward pass, and the layer
    at work; in the backward pass the next one too (ZeRO-2 keeps all). Where rows are trained their
    gradients are whole, in the precision of the weights, and once more in fp32 while they are
    summed: those of a layer until the next one's are there, of a head and the embeddings to the
    end. `head_loss` sums a head's in fp32 and has no cast to make of one that was gathered in less.
    """
    sent = how.gathers_in.itemsize if trains and how.gathers_in is not None else None
    n_of: dict[int, int] = {}
    bytes_of: dict[int, int] = {}
    seen: set[Tensor] = set(whole)
    for _, weight, owner in _owners(model, layers):
        if weight not in seen:
            seen.add(weight)
            n_of[owner] = n_of.get(owner, 0) + weight.numel()
            n_bytes = weight.numel() * (sent or weight.element_size())
            bytes_of[owner] = bytes_of.get(owner, 0) + n_bytes
    root, of_layers = bytes_of.pop(-1, 0), list(bytes_of.values())
    layer, n_root = max(of_layers, default=0), n_of.pop(-1, 0)
    n_kept = 1 if how.reshard_after_forward else len(of_layers)
    found = Gathered(
        root + n_kept * layer,
        root + max(n_kept, min(2, len(of_layers))) * layer,
        root + n_kept * layer,
    )
    if not trains:
        return found
    ends = getattr(inner_of(model), "get_output_embeddings", lambda: None)()
    n_head = ends.weight.numel() if ends is not None else 0
    size, sums = sent or 4, 4 * max(n_of.values(), default=0)
    return Gathered(
        found.loss + (4 if size == 4 else 4 - size) * n_head,
        found.backward + size * n_head + layer + sums,
        2 * root + 4 * n_root + sums + (0 if how.reshard_after_forward else n_kept * layer),
    )
