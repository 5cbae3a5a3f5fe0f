"""How a micro-batch goes through the model: documents end to end or padded, and the loss only where
there is a label.

One object that training, evaluation, the memory check and the probe share, so that they compute the
same thing. It says which examples go together (`split`), makes them ready on the host (`collate`,
which any thread may call), brings them to the device (`to_device`) and takes the summed loss
(`loss`), or what an evaluation reads (`measure`).

Shapes: T tokens of N documents, or B x T padded ones; h hidden size, V words, C classes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from farthing.arrays import Ints
from farthing.data import units
from farthing.data.batches import Batches, collate
from farthing.data.encode import sums_of
from farthing.data.packing import (
    ON_CPU,
    MicroBatchCost,
    collate_packed,
    split_by_tokens,
    split_padded,
)
from farthing.data.prefix_sharing import WORTH, collate_shared, saved_by_sharing, split_shared
from farthing.data.token_set import TokenSet, ranges
from farthing.model import cpu
from farthing.model.attention import (
    can_go_packed,
    can_share,
    go_packed,
    packed_logits,
    reads_first_tokens,
)
from farthing.model.batching import batching_rule, refuse_batch_norms
from farthing.model.casts import Casts
from farthing.model.documents import Batch, packed_batch
from farthing.model.embedding_noise import EmbeddingNoise
from farthing.model.hardware import Numerics, pinned
from farthing.model.head import find_head, one_kernel
from farthing.model.last_layer import last_layer
from farthing.model.loss import (
    find_labelled,
    has_decoder,
    inner_of,
    logits_of,
    reads_token_types,
    scores_words,
)
from farthing.model.norms import use_one_gelu
from farthing.model.pairs import collate_pairs
from farthing.model.positions import first_position
from farthing.models.tiles import WRITES_MORE, default_tile_tokens, head_bytes
from farthing.objectives.objective import Answers, Found, ObjectiveSettings, OfStep, filled
from farthing.objectives.registry import objective_of

Host = dict[str, Any]
"""Arrays of a micro-batch by name, int64."""
NO_STEP = OfStep(0, ())
NEARLY = 0.02  # of the tokens: what larger micro-batches must save more to be worth their memory


def _whole(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method where the weights are whole, see `Forward.within`."""

    @functools.wraps(method)
    def computes(self: Forward, *arguments: Any) -> Any:
        return self.within(lambda: method(self, *arguments))

    return computes


class Forward:
    """The forward pass of a model for a task.

    A model that can take documents end to end is set to do so, unless `may_go_packed` says no.
    `why_padded` and `head.why_whole` say what keeps a model from computing useful tokens
    and labelled positions only.
    """

    def __init__(
        self,
        model: Any,
        task: str,
        pad_id: int,
        numerics: Numerics,
        *,
        settings: ObjectiveSettings | None = None,
        label_smoothing: float = 0.0,
        may_go_packed: bool = True,
    ) -> None:
        self.model, self.task, self.pad_id, self.numerics = model, task, pad_id, numerics
        self.settings = settings
        """Of the objective."""
        self.references: dict[Path, NDArray[np.float64]] = {}
        """Of each token set, by its folder: log-probabilities under the reference [n, k], and of
        the mismatched sequence of each unit [n, k + 1].
        """
        self.label_smoothing = label_smoothing
        self.micro_batch_cost: MicroBatchCost = ON_CPU
        """By which padded micro-batches are split."""
        use_one_gelu(inner_of(model))
        other = "the job names another attention, or the run began padded"
        self.why_padded = can_go_packed(model, task) if may_go_packed else other
        if self.why_padded is None:
            go_packed(model)
        if numerics.device.type == "cpu":
            cpu.use(inner_of(model))
        self.of = objective_of(task)
        inner = self._inner = inner_of(model)
        self.has_decoder = has_decoder(inner)
        is_of_words = scores_words(inner) if self.of.loss is not None else self.of.labels is None
        self.head = find_head(model, task) if is_of_words else None
        self._reads_types = reads_token_types(inner)
        self._first_position = first_position(inner.config)
        refuse_batch_norms(inner)
        width, n_layers, n_words = (
            int(getattr(inner.config.get_text_config(), name, 0) or 0)
            for name in ("hidden_size", "num_hidden_layers", "vocab_size")
        )
        self._n_words = n_words if is_of_words else 0
        self.squares_at = 12 * width
        """Tokens of a document whose attention takes about as long as its products with weights; 0
        where not known.
        """
        self.head_at = self._n_words // max(1, n_layers)
        """What a labelled token costs besides, where a token costs `squares_at`: the head beside 12
        x width^2 a layer.
        """
        self.within: Callable[[Callable[[], Any]], Any] = lambda compute: compute()
        """Computes where the weights are whole: several processes may have a part of them each."""
        self.batching_rule = batching_rule(inner, task, is_packed=self.is_packed)
        self.shares = False
        self.shares_units = (
            self.of.n_sequences > 1 and self.is_packed and can_share(model, task) is None
        )
        """Whether what the sequences of a unit begin with is computed once."""
        self.noise: EmbeddingNoise | None = None
        self.n_sent_tokens = 0  # computed tokens of everything that was brought to the device
        self.casts: Casts | None = None
        """Where weights are cast once a step: on a GPU, see `Casts`."""

    @property
    def is_packed(self) -> bool:
        """Whether documents are laid end to end, without padding."""
        return self.why_padded is None

    def share(self, tokens: TokenSet, batches: Batches, budgets: list[int]) -> tuple[float, int]:
        """From now on compute once what examples of a micro-batch begin with, if that saves enough
        of their tokens.

        Returns (the share that it saves, the smallest of `budgets`, tokens of a micro-batch,
        ascending, that saves nearly as much as the largest; 0 where sharing does not pay).
        """
        self.shares = False
        if not (self.of.shares_beginnings and self.is_packed) or self.noise:
            return 0.0, 0
        if can_share(self.model, self.task):
            return 0.0, 0
        most = saved_by_sharing(tokens, batches, budgets[-1])
        self.shares = most >= WORTH
        if not self.shares:
            return most, 0
        found = ((saved_by_sharing(tokens, batches, each), each) for each in budgets)
        return next((saved, budget) for saved, budget in found if saved >= most - NEARLY)

    # ---- on the host ----

    def lengths_of(self, tokens: TokenSet) -> Ints:
        """[n]: the tokens that each example of a set is computed with; of a padded unit as many for
        each of its sequences.
        """
        if tokens.sequences is None:
            return tokens.lengths
        if self.shares_units:
            return tokens.lengths - units.shared_tokens(tokens)
        if self.is_packed:
            return tokens.lengths
        each = tokens.sequences.reshape(len(tokens), -1)
        return each.max(1).astype(np.int64) * each.shape[1]

    def of_step(self, tokens: TokenSet, examples: Ints) -> OfStep:
        """What a step of these examples has."""
        if tokens.sequences is None:
            return OfStep(len(examples), (int(tokens.target_lengths[examples].sum()),))
        starts, lengths = tokens.sequences_of(examples)
        targets = sums_of(tokens.targets[ranges(starts, lengths)], lengths)
        n_targets = targets.reshape(-1, tokens.n_sequences).sum(0)
        return OfStep(len(examples), tuple(n_targets.tolist()))

    def split(self, tokens: TokenSet, examples: Ints, micro_batch_tokens: int) -> list[Ints]:
        """`examples` in micro-batches of at most `micro_batch_tokens` computed tokens; a longer
        example goes alone.
        """
        if self.batching_rule is None:
            return self._split(tokens, examples, micro_batch_tokens)
        classes = self._classes(tokens, examples)
        parts = [examples[classes == each] for each in np.unique(classes)]
        micro_batches = [
            micro_batch
            for part in parts
            for micro_batch in self._split(tokens, part, micro_batch_tokens)
        ]
        return sorted(
            micro_batches, key=lambda micro_batch: -int(tokens.lengths[micro_batch].sum())
        )

    def costs(self, tokens: TokenSet, examples: Ints) -> Ints:
        """[n]: what each example costs beside the others: its tokens in the layers, its attention,
        its targets in the head.

        Going backward, attention takes 2.5 times what it takes forward; products twice, where
        weights are frozen once.
        """
        lengths = tokens.lengths[examples].astype(np.int64)
        of_products = lengths * self.squares_at + self.head_at * tokens.target_lengths[examples]
        if not self.squares_at:
            return lengths + of_products
        products = 4 if hasattr(self.model, "peft_config") else 6
        return products * of_products + 7 * lengths**2

    @property
    def mixes_freely(self) -> bool:
        """Whether a micro-batch costs what its examples do, whichever they are."""
        return self.is_packed and not self.shares and self.batching_rule is None

    def split_to_write(
        self,
        tokens: TokenSet,
        examples: Ints,
        micro_batch_tokens: int,
        max_new_tokens: int,
    ) -> list[Ints]:
        """`examples` of similar inputs in padded micro-batches, for each of which the model writes
        so many tokens.

        Each token that is written is one pass through the decoder, however many examples a
        micro-batch has: they are as many as fit. Nothing is kept to go backward, so they are
        `WRITES_MORE` times as many tokens as in training.
        """
        if self.batching_rule is not None:
            return self.split(tokens, examples, micro_batch_tokens)
        lengths = tokens.lengths[examples] - tokens.target_lengths[examples]
        rest, micro_batches = np.argsort(-lengths, kind="stable"), []
        while len(rest):
            n_each = int(lengths[rest[0]]) + max_new_tokens
            n = max(1, WRITES_MORE * micro_batch_tokens // n_each)
            micro_batches.append(examples[rest[:n]])
            rest = rest[n:]
        return micro_batches

    def last_layer_read(self, tokens: TokenSet, examples: Ints) -> tuple[Any, float]:
        """(the layer that is computed for the tokens alone that are read, which share of all these
        are); None and 1 without.
        """
        if self.is_packed and reads_first_tokens(self._inner):
            last = last_layer(self._inner)
            if last is not None:
                return last, len(examples) / float(tokens.lengths[examples].sum())
        return None, 1.0

    def mixes(self, tokens: TokenSet, examples: Ints) -> bool:
        """Whether some of these examples must not be computed together."""
        return (
            self.batching_rule is not None and len(np.unique(self._classes(tokens, examples))) > 1
        )

    def _classes(self, tokens: TokenSet, examples: Ints) -> Ints:
        """[n]: examples with equal numbers may be computed together."""
        assert self.batching_rule is not None
        return self.batching_rule.classes(*self._sides(tokens, tokens.lengths, examples))

    def _sides(self, tokens: TokenSet, lengths: Ints, examples: Ints) -> tuple[Ints, Ints | None]:
        """([n]: tokens of the inputs of these examples, of their targets where they are apart)."""
        own = lengths[examples]
        if not self.has_decoder:
            return own, None
        targets = tokens.target_lengths[examples]
        return own - targets, targets

    def _split(self, tokens: TokenSet, examples: Ints, micro_batch_tokens: int) -> list[Ints]:
        if self.shares:
            return split_shared(tokens, examples, micro_batch_tokens)
        if self.is_packed:
            return split_by_tokens(examples, self.lengths_of(tokens), micro_batch_tokens)
        lengths, targets = self._sides(tokens, self.lengths_of(tokens), examples)
        micro_batches = split_padded(
            np.arange(len(examples)),
            lengths,
            micro_batch_tokens,
            target_lengths=targets,
            cost=self.micro_batch_cost,
        )
        return [examples[micro_batch] for micro_batch in micro_batches]

    def collate(self, tokens: TokenSet, examples: Ints) -> Host:
        """Arrays of one micro-batch, the labelled positions among them; pinned for a GPU."""
        if self.of.loss is not None:
            own = units.sequences_of(tokens, examples)
            return self._pinned(self._collate_units(tokens, examples, own, 0))
        if self.shares:
            arrays = collate_shared(tokens, examples, self.task, self._first_position)
        elif not self.is_packed:
            arrays = collate(tokens, examples, self.task, self.pad_id)
        elif self.has_decoder:
            arrays = collate_pairs(self._inner, tokens, examples, self.task, self.pad_id)
        else:
            arrays = collate_packed(tokens, examples, self.task, self._first_position)
        if self._reads_types:
            types = tokens.targets[tokens.places_of(examples)[0]].astype(np.int64)
            where = types >= 0 if self.is_packed else arrays["attention_mask"] > 0
            arrays["token_type_ids"] = filled(types, np.atleast_2d(where), 0)
        arrays[units.N_TARGETS] = tokens.target_lengths[examples].astype(np.float32)
        if self.head is not None:
            labels = torch.from_numpy(arrays["labels"])
            labelled = find_labelled(labels, predicts_next=not self.has_decoder)
            positions = labelled.positions.numpy()
            ends = np.cumsum(arrays.get("lengths", [labels.shape[1]] * len(labels)))
            arrays |= {
                units.POSITIONS: positions,
                units.TARGETS: labelled.targets.numpy(),
                units.OWNERS: np.searchsorted(ends, positions, side="right"),
            }
        return self._pinned(arrays)

    def collate_mismatched(self, tokens: TokenSet, examples: Ints) -> Host:
        """Arrays of the mismatched sequences of these examples: see `units.mismatched`."""
        found = units.mismatched(tokens, examples)
        return self._pinned(self._collate_units(tokens, examples, found, tokens.n_sequences))

    def collate_scored(self, tokens: TokenSet, examples: Ints) -> list[Host]:
        """Arrays of all sequences that the reference scores, those of mismatched ones last."""
        more = [self.collate_mismatched(tokens, examples)] if self.of.is_mismatched else []
        return [self.collate(tokens, examples), *more]

    def _collate_units(
        self, tokens: TokenSet, examples: Ints, found: units.Sequences, first: int
    ) -> Host:
        """`first`: of the columns of references."""
        arrays = units.collate_units(
            found,
            first_position=self._first_position,
            shares=self.shares_units,
            pad_id=None if self.is_packed else self.pad_id,
        )
        reference = self.references.get(tokens.folder)
        if reference is not None:
            own = reference[examples, first : first + found.n_sequences]
            arrays[units.REFERENCE] = np.ascontiguousarray(own)
        if tokens.values is not None:
            arrays[units.VALUES] = tokens.values[examples]
        return arrays

    def _pinned(self, arrays: Host) -> Host:
        if self.numerics.device.type != "cuda":
            return arrays
        return {name: pinned(torch.from_numpy(array)).numpy() for name, array in arrays.items()}

    def n_computed(self, arrays: Host) -> int:
        """Tokens that a micro-batch makes the model compute; seq2seq: of both sides."""
        return arrays["input_ids"].size + (arrays["labels"].size if self.has_decoder else 0)

    def n_tokens_of(self, tokens: TokenSet, examples: Ints) -> int:
        """`n_computed` of a micro-batch of these examples, from their lengths."""
        lengths = self.lengths_of(tokens)
        if self.is_packed:
            return int(lengths[examples].sum())
        sides = self._sides(tokens, lengths, examples)
        return len(examples) * sum(int(each.max()) for each in sides if each is not None)

    # ---- on the device ----

    def to_device(self, arrays: Host) -> Batch:
        """The arrays as what the model takes, on its device; nothing is waited for."""
        device = self.numerics.device
        self.n_sent_tokens += self.n_computed(arrays)
        if not self.is_packed:
            return {
                name: torch.from_numpy(array).to(device, non_blocking=True)
                for name, array in arrays.items()
            }
        return packed_batch(arrays, device)

    @contextlib.contextmanager
    def _passing(self, batch: Batch) -> Iterator[None]:
        """A batch goes through the model within the block."""
        if self.noise is not None:
            self.noise.hear(batch)
        with self.numerics.autocasting():
            yield

    @_whole
    def loss(
        self, batch: Batch, step: OfStep = NO_STEP, gradient_scale: float | Tensor = 1.0
    ) -> tuple[Tensor, Tensor]:
        """(sum of the losses of a micro-batch, [2, F]: sums of the objective's figures, and of how
        many).

        `gradient_scale` is what its gradient is expected to be: it changes no result, see
        `head.How`.
        """
        if self.of.loss is not None:
            return self._loss_of_units(batch, step)
        if self.of.labels is not None:
            loss = self.of.labels.loss(self._scores(batch), batch["labels"], self.label_smoothing)
        else:
            assert self.head is not None
            with self._passing(batch):
                loss = self.head.loss(batch, self.label_smoothing, gradient_scale)
        return loss, loss.new_empty(2, 0, dtype=torch.float64)

    @_whole
    def measure(self, batch: Batch, step: OfStep = NO_STEP) -> Found:
        """What an evaluation reads of a micro-batch, without label smoothing."""
        n_targets = batch[units.N_TARGETS]
        if self.of.loss is not None:
            loss, figures = self._loss_of_units(batch, step)
            return {"loss": loss.double()[None], "figures": figures[None]}
        if self.of.labels is not None:
            return self.of.labels.measure(self._scores(batch), batch["labels"], n_targets)
        losses = -self.log_probs(batch)
        documents = (losses / n_targets).sum()
        return {"loss": losses.sum()[None], "each": losses, "documents": documents[None]}

    @_whole
    def log_probs(self, batch: Batch) -> Tensor:
        """[m] in fp64: of all targets of each sequence of a batch together. Losses are of small
        differences of large sums.
        """
        assert self.head is not None
        with self._passing(batch):
            words = self.head.log_probs(batch).double()
        if units.SCORED in batch:
            words = words[batch[units.SCORED]]
        empty = words.new_zeros(len(batch[units.N_TARGETS]))
        return empty.index_add(0, batch[units.OWNERS], words)

    def mismatched_ratio(self, tokens: TokenSet, examples: Ints) -> Tensor:
        """The sum over these examples' mismatched sequences of the log-ratio to the reference."""
        batch = self.to_device(self.collate_mismatched(tokens, examples))
        return (self.log_probs(batch) - batch[units.REFERENCE][:, 0]).sum()

    def _scores(self, batch: Batch) -> Tensor:
        """[N, C]: logits of the examples, or of each token [1, T, C]."""
        with self._passing(batch):
            return (packed_logits if self.is_packed else logits_of)(self.model, batch)

    def _loss_of_units(self, batch: Batch, step: OfStep) -> tuple[Tensor, Tensor]:
        assert self.of.loss is not None
        log_probs = scores = None
        n_targets = batch[units.N_TARGETS].reshape(-1, self.of.n_sequences)
        if self.head is None:
            scores = self._scores(batch).float().reshape(n_targets.shape)
        else:
            log_probs = self.log_probs(batch).reshape(n_targets.shape)
        reference, values = batch.get(units.REFERENCE), batch.get(units.VALUES)
        answers = Answers(log_probs, n_targets, reference, scores, values, step)
        loss, figures = self.of.loss(answers, self.settings)
        found = [torch.stack(figures[name]).detach() for name in self.of.figures]
        return loss, torch.stack(found, 1).double()

    # ---- for those who count memory ----

    @_whole
    def before_head(self, batch: Batch) -> Tensor:
        """A scalar that depends on all that the body computes: autograd keeps for it what it keeps
        of the body.

        Where the head is not known, or small, it is the head's own answer. The last layer is that
        of a batch with labels everywhere.
        """
        if self.head is None:
            return self._scores(batch).float().sum()
        with self._passing(batch):
            is_whole = self.head.why_whole
            found = self.head.log_probs(batch) if is_whole else self.head.hidden_states(batch)
            return found.float().sum()

    def head_bytes(self, n_tokens: int, scored_share: float = 1.0) -> int:
        """What the head takes of so many tokens beside what `before_head` keeps: a tile of logits,
        what it reads [T, h], and gradients of what is scored; where all positions are scored, their
        logits and fp32 copies."""
        size, is_cuda = self.numerics.base_dtype.itemsize, self.numerics.device.type == "cuda"
        n_scored = math.ceil(n_tokens * scored_share)
        n_all = n_scored if self.has_decoder else n_tokens
        if self.head is None or self.head.why_whole:
            return self._n_words * (size * n_all + (size + 4 if size < 4 else 4) * n_scored)
        weight = self.head.linear.weight
        n_words, width = weight.shape
        trained = weight.itemsize if weight.requires_grad else 0
        if not self.head.is_matrix:  # rows in fp32 of what is made again
            tile = default_tile_tokens(n_words, self.numerics.device.type)
            return (size + 12) * min(tile, n_scored) * n_words + size * n_scored * width
        found = head_bytes(
            n_scored,
            n_words,
            width,
            self.numerics.name,
            trained_bytes=trained,
            is_cuda=is_cuda,
            is_one_kernel=one_kernel(weight.device) is not None,
            has_cap=self.head.soft_cap is not None,
        )
        return found + size * n_scored * width + (trained or size) * n_all * width
