"""Answers of a run's model, or of its base: for rows in batches, and for chats as a stream.

A row is read and rendered as in training, by the columns of the run's job. Its target, or the
answers that a preference compares, may be missing. A row that can't be read gets an `error` in
place of a prediction.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessorList, TextIteratorStreamer

from farthing.data.chat import asks_for_the_date
from farthing.data.encode import Encoder
from farthing.data.foreign import Foreign
from farthing.data.formats import recognise
from farthing.data.read import Source, file_source
from farthing.data.reader import SourceReader
from farthing.data.rows import BadRow, Example, Row, RowValue
from farthing.data.token_set import TokenRecipe
from farthing.device_memory import is_out_of_memory
from farthing.errors import DataError, InputError, UnusableRowError
from farthing.export.folders import trained_model, trusted_job, tuned_config, untrained_model
from farthing.model.hardware import Numerics, choose_numerics, free_cached
from farthing.model.load import PLAIN, ModelChoice, load_tokenizer, set_languages
from farthing.model.loss import predicts_next, reads_token_types, scores_words
from farthing.model.positions import max_positions
from farthing.objectives.objective import class_names
from farthing.objectives.registry import objective_of
from farthing.planner.software import fp16_risk
from farthing.run.folder import MODEL, began, trained_on_chats
from farthing.storage.files import draft_of

Message = dict[str, str]
WINDOW = 1024  # rows whose lengths are sorted together
ADDED = ("prediction", "score", "scores", "finish_reason", "error")
"""The columns that a prediction adds to its row."""
COMPARED = ("chosen", "rejected")
_UNLIMITED = 1 << 30


def numerics_of_run(run: Path) -> Numerics:
    """Device and precision in which the model of a run answers: half precision on a GPU."""
    config = tuned_config(run / MODEL) if (run / MODEL).is_dir() else {}
    return choose_numerics("auto", None, None, fp16_risk=fp16_risk(config))


@dataclass
class Predicted:
    """Counts of the rows that were answered."""

    n_rows: int = 0
    n_failed: int = 0
    """Rows with an error instead of a prediction."""
    n_cut: int = 0
    """Inputs that were longer than in training, and were cut as there."""
    first_errors: list[str] = field(default_factory=list)


@dataclass
class _Prompt:
    """A row with its tokens, if it can be asked, and with its prediction or an `error`."""

    row: RowValue
    line: int
    ids: list[int] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    """Of each token: 1 in the second of two texts."""
    found: dict[str, Any] = field(default_factory=dict)
    words: list[int | None] = field(default_factory=list)
    """Where words have labels: the first token of each, if it has one."""


class Predictor:
    """A model of a run that answers."""

    def __init__(
        self,
        run: Path,
        *,
        is_base: bool = False,
        max_new_tokens: int = 256,
        batch_size: int = 16,
        trust_remote_code: bool = False,
    ) -> None:
        self.job = trusted_job(run, trust_remote_code)
        self.task = objective_of(self.job.task)
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.summary = Predicted()
        numerics, make = numerics_of_run(run), untrained_model if is_base else trained_model
        model = make(run, numerics.base_dtype, trust_remote_code=trust_remote_code)
        self.model = model.to(numerics.device)
        self.tokenizer = load_tokenizer(ModelChoice(str(run / MODEL)), None)
        self.classifies = not scores_words(model)
        self.scores_answers = self.classifies and self.task.learns_units
        """Whether a row's answer is scored, not made."""
        self._reads_types = reads_token_types(model) and not self.scores_answers
        self._continues = predicts_next(model)
        self.is_chat = self._continues and trained_on_chats(run)
        self._names = class_names(model.config)
        known = model.config.get_text_config().pad_token_id, self.tokenizer.pad_token_id
        self._pad_id = next((index for index in known if index is not None and index >= 0), 0)
        data, asked = self.job.data, objective_of(self.task.asked_as or self.task.name)
        languages = set_languages(self.tokenizer, asked.name, data.source_lang, data.target_lang)
        self._longest = max_positions(model.config) or _UNLIMITED
        limits = self.job.max_length, self._longest, self.tokenizer.model_max_length
        max_length = data.max_length or min(limits)
        template = self.tokenizer.chat_template if asked.predicts_next else None
        self._recipe = TokenRecipe(
            asked.name,
            max_length,
            columns={name: own for name, own in data.columns.items() if name not in COMPARED},
            source_lang=languages[0],
            target_lang=languages[1],
            date=began(run) if asks_for_the_date(template) else "",
        )
        # a prompt is never cut: without its end there is no answer to it
        most = _UNLIMITED if asked.predicts_next else max_length
        self._encode = Encoder(self.tokenizer, asked.name, most, _UNLIMITED)

    @cached_property
    def _ends(self) -> list[int]:
        """Tokens that end an answer: the tokenizer's, and those that the model names."""
        named = self.model.generation_config.eos_token_id
        found = [self.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
        return [index for index in dict.fromkeys(found) if index is not None]

    # ---- rows, texts and chats ----

    def file(self, path: Path) -> Iterator[RowValue]:
        """The rows of a file with their predictions. Raises `DataError`."""
        source = file_source(path, self.job.data.layout)
        yield from self._predicted(source.rows(), source)

    def rows(self, rows: Iterable[RowValue]) -> Iterator[RowValue]:
        numbered = (Row(number, dict(row)) for number, row in enumerate(rows, 1))
        yield from self._predicted(numbered, Source("rows", "", "jsonl"))

    def row_of(self, text: str) -> RowValue:
        """A text as a row in the columns of the job. Raises `InputError`."""
        ((name, value),) = self._standard_row([{"role": "user", "content": text}]).items()
        own = name if self.is_chat else self._recipe.columns.get(name, name)
        if not isinstance(own, str) or "{" in own:
            raise InputError(
                f"the run's job makes `{name}` of several columns",
                where="data.columns",
                to_do="give rows with these columns instead of texts",
            )
        return {own: value}

    def classify(self, text: str) -> dict[str, Any]:
        """The likeliest class and the probability of each, the likeliest first; of a number, the
        score. Raises `InputError` for a model that labels words.
        """
        if self.task.scores_words:
            raise InputError(
                f"a model of {self.task.name} reads words, not a text",
                where="the prompt",
                to_do="write rows with `tokens`, and use `farthing predict`",
            )
        prompt = self._prompt_of([{"role": "user", "content": text}])
        self._answer([prompt])
        found = prompt.found
        if "error" in found:
            raise InputError(found["error"], where="the model", to_do="train it with a lower rate")
        if "scores" not in found:
            return {"score": found["prediction"]}
        ordered = dict(sorted(found["scores"].items(), key=lambda item: -item[1]))
        return {"label": found["prediction"], "probabilities": ordered}

    def stream(
        self, messages: list[Message], temperature: float = 0.0, seed: int = 0
    ) -> Iterator[str]:
        """The answer to the last message, piece by piece; temperature 0 takes the likeliest."""
        pieces = TextIteratorStreamer(
            self.tokenizer, skip_prompt=self._continues, skip_special_tokens=True
        )
        batch, errors = self._padded([self._prompt_of(messages)]), list[Exception]()
        how = {"do_sample": True, "temperature": temperature} if temperature > 0 else {}
        torch.manual_seed(seed)

        def generate() -> None:
            try:
                self._generate(batch, streamer=pieces, **how)
            except Exception as error:
                errors.append(error)
                pieces.end()

        thread = threading.Thread(target=generate, name="farthing-answer", daemon=True)
        thread.start()
        yield from filter(None, pieces)
        thread.join()
        if errors:
            raise errors[0]

    def _standard_row(self, messages: list[Message]) -> RowValue:
        """The last message, or the chat, under the standard name of its column."""
        if self.is_chat:
            return {"messages": messages}
        if "text_pair" in self._recipe.columns:
            raise InputError(
                "the run's model reads two texts",
                where="the prompt",
                to_do="write rows with both, and use `farthing predict`",
            )
        name = "prompt" if self._continues else "input"
        if self.classifies:
            name = self.task.formats[0].needs[0]
        return {name: messages[-1]["content"]}

    def _prompt_of(self, messages: list[Message]) -> _Prompt:
        """Raises `InputError`."""
        source = Source("the prompt", "", "jsonl", columns={})
        (prompt,) = self._prompts([Row(1, self._standard_row(messages))], source)
        if not prompt.ids:
            raise InputError(prompt.found["error"], where="the prompt", to_do="write another text")
        return prompt

    def _predicted(self, rows: Iterator[Row | BadRow], source: Source) -> Iterator[RowValue]:
        while window := list(itertools.islice(rows, WINDOW)):
            prompts = self._prompts(window, source)
            self._answer(sorted((one for one in prompts if one.ids), key=lambda one: -len(one.ids)))
            for one in prompts:
                if not one.ids:
                    one.found = {"error": f"{source.name}:{one.line}: {one.found['error']}"}
                    if len(self.summary.first_errors) < 5:
                        self.summary.first_errors.append(one.found["error"])
                self.summary.n_rows += 1
                self.summary.n_failed += "error" in one.found
                yield one.row | one.found

    # ---- rows to tokens ----

    def _prompts(self, window: list[Row | BadRow], source: Source) -> list[_Prompt]:
        def refuse_foreign(row: Row, kind: Foreign) -> None:
            raise DataError(kind.what, where=f"{source.name}:{row.line}")

        compared = self._compared(window)
        reader = SourceReader(
            source,
            compared or self._recipe,
            self.tokenizer,
            on_foreign=refuse_foreign,
            asks=not (compared or self.scores_answers),
        )
        try:
            reader.look(window)
        except DataError as error:
            to_do = "give rows like those of the training, without the answers; data.columns apply"
            if self.scores_answers:
                to_do = (
                    "give one answer a row (prompt + completion, or messages), without a verdict;"
                    " `farthing eval RUN --data FILE` measures pairs"
                )
            raise DataError(error.what, where=error.where, to_do=to_do) from error
        prompts = []
        for row in window:
            one = _Prompt({} if isinstance(row, BadRow) else row.value, row.line)
            if odd := [name for name in ADDED if name in one.row]:
                raise DataError(
                    f"has a column `{odd[0]}`, which a prediction would overwrite",
                    where=f"{source.name}:{row.line}",
                    to_do="rename it in the file",
                )
            try:
                one.ids, one.types, one.words = self._tokens(reader.text(row))
            except UnusableRowError as error:
                one.found = {"error": str(error)}
            prompts.append(one)
        return prompts

    def _compared(self, window: list[Row | BadRow]) -> TokenRecipe | None:
        """How rows are read that have answers to compare, as the training's had."""
        first = next((row.value for row in window if isinstance(row, Row)), None)
        if first is None or not (self._continues and self.task.learns_units):
            return None
        own = replace(self._recipe, task=self.task.name, columns=self.job.data.columns)
        with contextlib.suppress(DataError):
            recognise(set(first), own.task, own.columns, "")
            return own
        return None

    def _tokens(self, text: Example) -> tuple[list[int], list[int], list[int | None]]:
        """The tokens that the model is asked with, their types, and where words have labels the
        first of each. Raises `UnusableRowError`.
        """
        if not self.classifies:
            learned = [index for index, (_, is_target) in enumerate(text.segments) if is_target]
            end = learned[-1] if learned and learned[-1] > 0 else None
            prompt = tuple((part, False) for part, _ in text.segments[:end])
            text = Example(prompt, is_raw=text.is_raw)
        found = self._encode([text])
        self.summary.n_cut += bool(found.was_cut[0])
        if text.words:
            assert found.words is not None
            places: list[int | None] = [None] * len(text.words)
            for word, at in zip(found.words.tolist(), found.is_target.nonzero()[0], strict=True):
                places[word] = int(at)
            return found.ids.tolist(), [], places
        ids = (found.ids if self.classifies else found.ids[found.is_target == 0]).tolist()
        if self._continues and len(ids) + self.max_new_tokens > self._longest:
            raise UnusableRowError(
                f"{len(ids):,} tokens and {self.max_new_tokens:,} of an answer are more than the"
                f" model's {self._longest:,} positions"
            )
        if not ids:
            raise UnusableRowError("no text to answer")
        return ids, found.is_target.tolist(), []

    # ---- tokens to answers ----

    def _answer(self, prompts: list[_Prompt]) -> None:
        at, size = 0, self.batch_size
        while at < len(prompts):
            batch = prompts[at : at + size]
            try:
                found = self._scored(batch) if self.classifies else self._written(batch)
            except Exception as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
                free_cached(self.model.device)
                size = max(1, size // 2)
                continue
            for one, each in zip(batch, found, strict=True):
                one.found = each or {"error": "the model's scores are no numbers"}
            at += len(batch)

    def _padded(self, prompts: list[_Prompt]) -> dict[str, torch.Tensor]:
        """On the left where the model continues its input."""
        side = "left" if self._continues else "right"
        columns = {
            "input_ids": [one.ids for one in prompts],
            "attention_mask": [[1] * len(one.ids) for one in prompts],
        }
        if self._reads_types:
            columns["token_type_ids"] = [one.types for one in prompts]
        return {
            name: torch.nn.utils.rnn.pad_sequence(
                [torch.tensor(row) for row in rows],
                batch_first=True,
                padding_value=self._pad_id if name == "input_ids" else 0,
                padding_side=side,
            ).to(self.model.device)
            for name, rows in columns.items()
        }

    @torch.no_grad()
    def _scored(self, prompts: list[_Prompt]) -> list[dict[str, Any]]:
        """The prediction of each; empty where its scores are no numbers."""
        labels = self.task.labels
        assert labels is not None
        batch = self._padded(prompts)
        scores = self.model(**batch).logits.float().cpu()  # [B, C], or [B, T, C] of words
        return [
            labels.said(of, self._names, one.words) if of.isfinite().all() else {}
            for of, one in zip(scores, prompts, strict=True)
        ]

    def _generate(self, batch: dict[str, torch.Tensor], **how: Any) -> Any:
        return self.model.generate(
            **batch,
            **{"do_sample": False, **how},
            **PLAIN,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=self._ends or None,
            pad_token_id=self._pad_id,
        )

    @torch.no_grad()
    def _written(self, prompts: list[_Prompt]) -> list[dict[str, Any]]:
        """Answers with the mean log-probability of their tokens."""
        log_probs = list[torch.Tensor]()

        def note(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            log_probs.append(scores.float().log_softmax(-1).amax(-1))  # of the token that is taken
            return scores

        batch = self._padded(prompts)
        written = self._generate(batch, logits_processor=LogitsProcessorList([note]))
        answers = written[:, -len(log_probs) :].tolist()
        found: list[dict[str, Any]] = []
        for answer, each in zip(answers, torch.stack(log_probs, 1).tolist(), strict=True):
            stop = next((at for at, index in enumerate(answer) if index in self._ends), None)
            n = len(answer) if stop is None else stop + 1
            text = self.tokenizer.decode(answer[:n], skip_special_tokens=True)
            reason, score = "length" if stop is None else "stop", sum(each[:n]) / n
            one = {"prediction": text, "score": score, "finish_reason": reason}
            found.append(one if math.isfinite(score) else {})
        return found


def _without_nan(value: Any) -> Any:
    """A value that JSON can hold: what is no number is missing."""
    if isinstance(value, dict):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def predict_file(predictor: Predictor, path: Path, output: Path) -> Predicted:
    """Write the rows of a file with their predictions as JSON lines; the file appears whole.

    Raises `DataError` where no row can be used.
    """
    draft = draft_of(output)
    try:
        with open(draft, "w", encoding="utf-8") as file:
            for row in predictor.file(path):
                file.write(json.dumps(_without_nan(row), ensure_ascii=False, default=str) + "\n")
            file.flush()
            os.fsync(file.fileno())
        found = predictor.summary
        if found.n_failed == found.n_rows:
            why = found.first_errors[0] if found.first_errors else "there are none"
            raise DataError(f"no row can be used: {why}", where=str(path), to_do="correct the file")
        os.rename(draft, output)
    finally:
        with contextlib.suppress(FileNotFoundError):
            draft.unlink()
    return found
