"""What a task is: plain values and plain functions, from which data, plan, model and evaluation
take what differs.

Everything here is known without torch and numpy, which a plan of a model alone does without:
functions import them when they are called. The docstring of one that takes tensors tells it.
Shapes: n examples of T tokens in all, N examples of a micro-batch, C scores of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from farthing.arrays import Arrays, Bools, Ints
from farthing.metrics import Metrics
from farthing.objectives.columns import Format, Row, text_of

IGNORED = -100  # label of a position the loss does not count, as in transformers


class Rows(NamedTuple):
    """The examples of a micro-batch end to end: ids and is_target [T], lengths [N], and the label
    of each [N, ...], or of each target token, if any.
    """

    ids: NDArray[np.int32]
    is_target: Bools
    lengths: Ints
    labels: NDArray[Any] | None

    def padded(self, pad_id: int) -> dict[str, Ints]:
        """input_ids and attention_mask [N, longest], padded on the right."""
        where = is_within(self.lengths)
        return {
            "input_ids": filled(self.ids, where, pad_id),
            "attention_mask": where.astype("int64"),
        }


def is_within(lengths: Ints) -> Bools:
    """[N, longest]: where a padded batch holds something."""

    return np.arange(lengths.max()) < lengths[:, None]


def filled(values: NDArray[Any], where: Bools, otherwise: int) -> Ints:
    """`values`, in order, where `where` is true; elsewhere `otherwise`."""

    array = np.full(where.shape, otherwise, dtype=np.int64)
    array[where] = values
    return array


class EvaluationSums(NamedTuple):
    loss: float
    """Mean over all targets."""
    document_loss: float
    """Where tokens are scored: mean over the examples of the mean over the targets of each, without
    label smoothing.
    """
    labels: NDArray[Any]
    """Of each example [n], where the task has labels."""
    answers: NDArray[Any]
    """The model's answer to each [n, ...]: see `Labels.answers`."""
    label_names: tuple[str, ...]
    predictions: list[str]
    """Texts that the model wrote, where it was asked to."""
    references: list[str]
    n_each: NDArray[Any]
    """Where tokens have labels: how many of each example [n]."""


def class_names(config: Any) -> tuple[str, ...]:
    """The classes of a model's configuration, in the order of its scores."""
    names = getattr(config, "id2label", None) or {}
    return tuple(str(names[index]) for index in sorted(names, key=int))


def in_models_order(names: Sequence[str], of_model: Sequence[str]) -> list[str] | None:
    """`names` in the order of a model's classes; None where those are other classes.

    Capitals and outer blanks don't count. LABEL_3 is the class 3.
    """
    known = [_bare(name) for name in of_model]
    if all(name == f"label_{number}" for number, name in enumerate(known)):
        known = [name if name in map(_bare, names) else name[6:] for name in known]
    by_name = {_bare(name): name for name in names}
    if len(by_name) != len(names) or len(set(known)) != len(known) or by_name.keys() != set(known):
        return None
    return [by_name[name] for name in known]


def _bare(name: str) -> str:
    return name.strip().casefold()


Found = dict[str, Any]
"""What one micro-batch has shown an evaluation, or all of them, each value a list or a tensor of
one dimension more: `loss`: sums [1]; `each` [N]: of each example; `documents` [1]: the sum of the
mean loss of each; `labels`, `answers` [N, ...]; `figures` [1, 2, F] of an objective of units;
`predictions`, `references`: texts.
"""


class Labels(NamedTuple):
    """How a task reads, learns and judges what each example is scored for, as a whole or word by
    word.
    """

    read: Callable[[Row, Mapping[str, str]], Any]
    """The label of a row with standard columns, under the job's `label_map`; with `per_word` a
    tuple, the label of each word. Raises `UnusableRowError`.
    """
    names: Callable[[set[Any]], list[str]]
    """The names of the classes, in order, from the labels that are there; none where labels are
    numbers.
    """
    number: Callable[[Any, Mapping[str, int]], Any]
    """A label as what is stored and learned, one number or several, by the number of each name.
    Raises `KeyError` for a class without one.
    """
    set_head: Callable[[Any, Sequence[str]], None]
    """Say in the model's configuration, which is changed, how many scores an example gets and what
    they mean.
    """
    loss: Callable[[Any, Any, float], Any]
    """Sum of the losses of scores [N, C] against labels [N, ...] with so much label smoothing:
    tensors, a scalar in fp32. With `per_word` N are all tokens, and `IGNORED` labels most.
    """
    answers: Callable[[Any], Any]
    """What is kept of scores [N, C] for `Objective.judge`: tensors, [N, ...]."""
    dtype: str = "int32"
    """What labels are stored as, by numpy's name."""
    smooths: bool = True
    """Whether `loss` takes label smoothing."""
    per_word: bool = False
    """Whether each word has a label, at its first token."""
    shares: Callable[[Any], Any] | None = None
    """Figures of scores [N, C] beside the prediction: tensors, probabilities [N, C]. None: the
    softmax.
    """
    predict: Callable[[Sequence[float], Sequence[str]], Any] | None = None
    """The answer for the shares of one example, by the names of the classes. None: the likeliest.
    """
    text: Callable[[Row], Any] = lambda row: text_of(row, "text")
    """The input text of a row with standard columns, which may lack the label; with `per_word` a
    tuple of words. Raises `UnusableRowError`.
    """

    def said(
        self, scores: Any, names: Sequence[str], words: Sequence[int | None]
    ) -> dict[str, Any]:
        """The prediction of scores [C] for the classes of these names; or of each word, at its
        place in scores [T, C], None where that is behind the limit.
        """
        if self.per_word:
            each = [None if at is None else self._said(scores[at], names) for at in words]
            return {
                "prediction": [one and one["prediction"] for one in each],
                "scores": [one and one["score"] for one in each],
            }
        return self._said(scores, names)

    def _said(self, scores: Any, names: Sequence[str]) -> dict[str, Any]:
        if len(names) == 1 and self.shares is None:  # a number
            return {"prediction": float(scores[0])}
        found = (scores.softmax(-1) if self.shares is None else self.shares(scores)).tolist()
        shares = dict(zip(names, found, strict=True))
        if self.predict is None:
            likeliest = max(shares, key=lambda name: shares[name])
            return {"prediction": likeliest, "score": shares[likeliest], "scores": shares}
        return {"prediction": self.predict(found, names), "scores": shares}

    def measure(self, scores: Any, labels: Any, n_targets: Any) -> Found:
        """What an evaluation reads of scores [N, ..., C] against labels [N, ...]; `n_targets` [N]
        are the words of each example that have one.
        """
        import torch

        loss = self.loss(scores, labels, 0.0)
        if self.per_word:
            is_labelled = labels != IGNORED
            scores, labels = scores[is_labelled], labels[is_labelled]
        each = torch.vmap(lambda row, label: self.loss(row[None], label[None], 0.0))(scores, labels)
        if self.per_word:
            numbers = torch.arange(len(n_targets), device=each.device)
            owners = numbers.repeat_interleave(n_targets.long())
            each = each.new_zeros(len(n_targets)).index_add(0, owners, each)
        answers = self.answers(scores)
        return {"loss": loss.double()[None], "each": each, "labels": labels, "answers": answers}


Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Swapped = Annotated[float, Field(ge=0, lt=0.5)]
"""A share of pairs whose answers are taken to be swapped."""


class ObjectiveSettings(BaseModel):
    """The keys of an objective in the job: `objective: {name: NAME, ...}`."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )


class OfStep(NamedTuple):
    """What a whole optimizer step has, or a whole evaluation."""

    n_units: int
    n_targets: tuple[int, ...]
    """Target tokens of all first sequences, of all second ones ..."""
    baseline: Any = 0.0
    """Of objectives with a mismatched pass: see `Objective.is_mismatched`. A scalar."""


class Answers(NamedTuple):
    """What the model says of the n units of a micro-batch, k sequences each: tensors."""

    log_probs: Any
    """[n, k] in fp64: of all target tokens of a sequence together; None where it has scores."""
    n_targets: Any
    """[n, k]"""
    reference: Any
    """[n, k] in fp64: `log_probs` of the model as it began; None where the objective needs none."""
    scores: Any
    """[n, k] in fp32; None where it has log-probabilities."""
    values: Any
    """[n]: the number of each unit, see `Objective.value`; None where the data has none."""
    step: OfStep


Figures = Mapping[str, tuple[Any, Any]]
"""Of a micro-batch, by name: (sum, of how many). Scalars."""


class Starter(NamedTuple):
    """What `farthing init` writes for a task."""

    model: str
    learning_rate: str
    metric: str
    formats: str
    """The columns that are found by name."""


class Objective(NamedTuple):
    """A task: what its rows hold, how they are laid out, what of it is scored and judged, and what
    that costs.

    What is scored are tokens (`labels` is None) or whole examples; what is read is one text or,
    with `is_pair`, an input and a target apart, for models with an encoder and a decoder.
    """

    name: str
    formats: tuple[Format, ...]
    """In this order: the first whose columns are all there is taken."""
    example_columns: str
    """An example of `data.columns`."""
    max_length: int
    """Longest input in tokens where the job does not say."""
    metrics: Mapping[str, bool]
    """What an evaluation measures, and whether more of it is better."""
    judge: Callable[[EvaluationSums], Metrics]
    """Those metrics, but for the loss."""
    auto_class: str
    """The class of transformers that loads its model."""
    peft_type: str
    pipeline_tag: str
    """What the Hub calls it."""
    starter: Starter
    targets: Callable[[Rows], NDArray[Any]] | None = None
    """What a micro-batch learns: of each token [T], or of each example [N, ...]. None: the target
    tokens.
    """
    lay_out: Callable[[Rows, int], Arrays] | None = None
    """The arrays of a padded micro-batch, filled up with a token's id; None: those of `pad`."""
    is_pair: bool = False
    labels: Labels | None = None
    same_head_as: str = ""
    """The objective whose head it has, where tables of model families name that one."""
    learning_rates: tuple[float, float] = (2e-5, 2e-4)
    """(of all weights, of an adapter) where the job gives none."""
    asked_as: str = ""
    """The objective whose rows its model is asked with, where that is another one."""
    settings: type[ObjectiveSettings] | None = None
    """Its keys in the job."""
    n_sequences: int = 1
    """Sequences of a unit. A unit is an example of the data: it is never split."""
    loss: Callable[[Answers, Any], tuple[Any, Figures]] | None = None
    """(sum of the losses of n units, figures) under its settings, of tensors. The sum is divided by
    the units of the step. None: the cross-entropy of each target, divided by the targets of the
    step.
    """
    needs_reference: bool = False
    is_mismatched: bool = False
    """Whether `OfStep.baseline` is needed: the mean log-ratio to the reference of inputs with
    answers to others, over all units of the step, at least 0.
    """
    figures: tuple[str, ...] = ()
    """Names of what `loss` finds."""
    value: Callable[[Row], float] | None = None
    """The number of a row's unit, with standard columns. Raises `UnusableRowError`."""

    def pad(self, rows: Rows, pad_id: int) -> Arrays:
        """input_ids and attention_mask [N, longest], labels [N, longest] or [N, ...]."""
        if self.lay_out is not None:
            return self.lay_out(rows, pad_id)
        labels = self.packed_labels(rows)
        if self._labels_tokens:
            labels = filled(labels[0], is_within(rows.lengths), IGNORED)
        return {**rows.padded(pad_id), "labels": labels}

    def packed_labels(self, rows: Rows) -> NDArray[Any]:
        """The labels of a micro-batch whose examples stand end to end: [1, T] or [N, ...]."""
        if self.targets is None:
            labels = np.where(rows.is_target, rows.ids.astype(np.int64), IGNORED)
        else:
            labels = np.array(self.targets(rows))
        if self.predicts_next:  # nothing is predicted across a boundary
            starts = np.cumsum(rows.lengths) - rows.lengths
            labels[starts[rows.lengths > 0]] = IGNORED
        return labels[None] if self._labels_tokens else labels

    def is_learned(self, rows: Rows) -> Bools:
        """[T]: the tokens that a loss of tokens is divided by."""
        if not self._chooses_tokens:
            return rows.is_target
        found: Bools = self.packed_labels(rows)[0] != IGNORED
        return found

    @property
    def _chooses_tokens(self) -> bool:
        return self.targets is not None and self.predicts_next and self.loss is None

    @property
    def _labels_tokens(self) -> bool:
        return self.scores_words or not self.reads_labels

    @property
    def head(self) -> str:
        """Its head, as tables of model families name it."""
        return self.same_head_as or self.name

    @property
    def scores_words(self) -> bool:
        return self.labels is not None and self.labels.per_word

    @property
    def shares_beginnings(self) -> bool:
        """Whether an example may take over what another begins with: there it has no target, so
        that it scores nothing unless the objective chooses others.
        """
        return self.loss is None and not self.scores_words and not self._chooses_tokens

    @property
    def learns_units(self) -> bool:
        """Whether it has a loss of its own, of whole units."""
        return self.loss is not None

    @property
    def counts_units(self) -> bool:
        """Whether the loss of a step is divided by its examples; else by its target tokens."""
        return self.loss is not None or (self.labels is not None and not self.scores_words)

    @property
    def scores_tokens(self) -> bool:
        """Whether tokens are scored, each against all words; else each example once."""
        return self.labels is None

    @property
    def predicts_next(self) -> bool:
        """Whether a token is predicted from those before it in the same text."""
        return self.labels is None and not self.is_pair

    @property
    def reads_labels(self) -> bool:
        return self.labels is not None and self.loss is None

    @property
    def reads_answers(self) -> bool:
        """Whether the data are texts with answers in them; else a text alone, or two apart."""
        return not self.is_pair and not self.reads_labels

    def n_tokens(self, n_input: float, n_target: float) -> float:
        """All tokens, from those of the input (which of one text are all) and those of the
        target.
        """
        return n_input + (n_target if self.is_pair else 0.0)
