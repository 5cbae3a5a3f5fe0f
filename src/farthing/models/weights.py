"""One kind of weight of a model, what is trained of all of them, and what a pass over them costs:
values without a rule.
"""

from __future__ import annotations

from typing import NamedTuple


class Weight(NamedTuple):
    """One module with a weight; `copies` of them in the model, alike but for the number of their
    layer.
    """

    name: str  # as transformers names it; * stands for the number of the layer
    part: str  # embeddings, positions, attention, mlp, norms, pooler or head
    # linear, embedding or norm; experts (of a layer, in one) and router, which are no linear
    # layers; raw
    kind: str
    n_in: int  # features in, or rows of an embedding; 1 for a norm
    n_out: int
    has_bias: bool
    copies: int
    is_tied: bool  # its weight is the embedding's
    # what a linear layer multiplies: all, source or target tokens, or one vector per sequence
    tokens: str
    share: float = 1.0  # of those tokens: experts see those that are sent to them
    n_experts: int = 1  # in it

    @property
    def n_weights(self) -> int:
        """Numbers in one weight, without its bias."""
        return self.n_in * self.n_out * self.n_experts

    @property
    def n_bias(self) -> int:
        """Numbers in one bias."""
        return self.n_out * self.n_experts if self.has_bias else 0

    def n_adapter(self, r: int) -> int:
        """Parameters of a LoRA of rank `r` on it: of each expert, and of two where two layers are
        one.
        """
        n_layers = 2 if self.kind == "experts" and self.name.endswith("gate_up_proj") else 1
        return n_layers * self.n_experts * r * (self.n_in + self.n_out)

    @property
    def n_parameters(self) -> int:
        """Parameters the model has through all of them; a tied weight is counted where it lives."""
        return self.copies * (self.n_bias + (0 if self.is_tied else self.n_weights))

    def names(self) -> list[str]:
        """The names in full."""
        return [self.name.replace("*", str(i)) for i in range(self.copies)]


class Flops(NamedTuple):
    """Floating-point operations for one sequence, 2 for each multiply-add (Kaplan et al. 2020,
    arXiv 2001.08361).

    Matrix products only: norms, activations, softmax, rotary embeddings and the loss are not
    counted.
    """

    body: float  # linear layers but for the head
    attention: float  # scores and their product with the values
    head: float
    adapters: float
    n_tokens: int

    @property
    def total(self) -> float:
        """All of them."""
        return self.body + self.attention + self.head + self.adapters


class Adapters(NamedTuple):
    """A LoRA on a model (Hu et al. 2021, arXiv 2106.09685): what is trained, counted as `peft`
    makes it.
    """

    r: int
    adapted: tuple[tuple[Weight, int], ...]  # with how many of its copies
    saved: tuple[tuple[Weight, int], ...]  # copied and trained whole (`modules_to_save`)
    n_adapter: int  # parameters of A and B, and with DoRA of the magnitudes
    n_saved: int
    # of model and adapters; a module trained whole counts once, its frozen original not at all
    n_total: int
    # the lowest with anything trained in or below it, counted from 0, a decoder's after its
    # encoder's
    first_layer: int = 0
    keeps_start: bool = (
        False  # a frozen copy of A and B as they began, in fp32, is taken away from them
    )

    @property
    def n_start(self) -> int:
        """Weights of that copy, which `n_total` leaves out: it is in no model that is exported."""
        return sum(n * w.n_adapter(self.r) for w, n in self.adapted) if self.keeps_start else 0

    @property
    def n_trainable(self) -> int:
        """Adapters and modules trained whole."""
        return self.n_adapter + self.n_saved

    @property
    def n_merged(self) -> int:
        """Weights of experts with adapters, which peft adds up in whole before every product."""
        return sum(n * w.n_weights for w, n in self.adapted if w.kind == "experts")


def begins_from_base(init: str) -> bool:
    """Whether an adapter of this `init_lora_weights` begins as a part of the weights it is put on,
    which is kept beside it.
    """
    return init == "olora" or init.startswith("pissa")
