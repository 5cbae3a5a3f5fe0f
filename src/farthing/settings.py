"""How a run is computed: the choices that change memory, seconds and rounding, and nothing else of
its result.

The planner decides a `Settings`, a probe improves it, memory that runs out lowers it, `train`
follows it and the receipt prints it. Files of runs have it as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

Count = Annotated[int, Field(ge=0)]


@dataclass(frozen=True)
class Settings:
    """How one run is computed. None: not decided yet."""

    micro_batch_tokens: Count = 0
    """Most computed tokens of a micro-batch on one GPU; a longer example goes alone. 0: a number of
    examples is counted.
    """
    checkpoint_every: Count = 0
    """Activation checkpointing: 0 none, 1 every layer, k every k-th."""
    shares_prefix: bool | None = None
    """Whether what examples of a micro-batch begin with is computed once in it."""
    packed: bool | None = None
    """Whether documents are laid end to end; else they are padded."""
    compiled: bool | None = None
    """Whether layers are compiled by torch."""
    kernels: str | None = None
    """Of norms, rotations and gated feed-forwards: torch or liger."""
    precision: str | None = None
    """Of the forward pass: bf16, fp16 or fp32."""
    slots: Count = 0
    """Columns of a step's micro-batches, whose gradients are added up in a fixed order, whichever
    of several GPUs computes them. 0: one for each GPU, and added up in any order."""
    probed: bool = False
    """Whether tokens and checkpointing are what a probe has found quickest."""
    least_tokens: Count = 0
    """Padded work is cut as if a micro-batch of fewer computed tokens took no less: see
    `data.packing.MicroBatchCost`.
    """
    more_tokens: Count = 32
    """And each as if it had so many more."""

    def with_probed(self, found: Settings) -> Settings:
        """These with what a probe has found: tokens of a micro-batch, and checkpointing."""
        return replace(
            self,
            micro_batch_tokens=found.micro_batch_tokens,
            checkpoint_every=found.checkpoint_every,
            probed=True,
        )

    def lowered_by(self, events: Sequence[Mapping[str, Any]]) -> Settings:
        """These as they are after memory has run out: `events` in their order, as the ledger has
        them.
        """
        if not events:
            return self
        return replace(
            self,
            micro_batch_tokens=min(
                [self.micro_batch_tokens, *(event["micro_batch_tokens"] for event in events)]
            ),
            checkpoint_every=events[-1]["checkpoint_every"] or self.checkpoint_every,
        )

    def to_json(self) -> dict[str, object]:
        """Plain values by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """What `to_json` wrote, or a part of it, among other keys. Raises `ValueError`."""
        own = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        try:
            return TypeAdapter(cls).validate_json(json.dumps(own), strict=True)
        except ValidationError as error:
            raise ValueError(f"these are no settings: {own}") from error

    @property
    def checkpointing(self) -> str:
        """`none`, `every layer`, `every 2nd layer`."""
        every = self.checkpoint_every
        return {0: "none", 1: "every layer", 2: "every 2nd layer"}.get(
            every, f"every {every}th layer"
        )

    def in_words(self) -> str:
        """`up to 8,192 tokens at a time, every layer checkpointed`."""
        words = (
            [f"up to {self.micro_batch_tokens:,} tokens at a time"]
            if self.micro_batch_tokens
            else []
        )
        words.append(
            f"{self.checkpointing} checkpointed" if self.checkpoint_every else "no checkpointing"
        )
        said = {
            "shared prefixes once": self.shares_prefix,
            "compiled": self.compiled,
            "Liger's kernels": self.kernels == "liger",
        }
        return ", ".join([*words, *(what for what, is_so in said.items() if is_so)])
