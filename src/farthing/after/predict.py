"""What the model of a run says of many rows: a class with its probabilities, a number, or an answer
with the mean log-probability of its tokens. In batches, in the order of the rows.

A row is read and rendered as in training, by the columns of the run's job. Its target may be
missing. A row that can't be read gets an `error` in place of a prediction.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from farthing.after.chat import Speaker
from farthing.config.job import Job
from farthing.data.chat import asks_for_the_date
from farthing.data.encode import Encoder
from farthing.data.formats import Understood
from farthing.data.read import Source, file_source
from farthing.data.reader import SourceReader
from farthing.data.rows import BadRow, Row, RowValue, Text
from farthing.data.token_set import Recipe
from farthing.device_memory import is_out_of_memory
from farthing.errors import DataError, InputError
from farthing.model.hardware import free_cached
from farthing.model.load import set_languages
from farthing.model.positions import max_positions
from farthing.objectives.columns import Unusable, list_of
from farthing.objectives.objective import class_names
from farthing.objectives.registry import objective_of
from farthing.run.folder import began
from farthing.storage.files import draft_of

WINDOW = 1024  # rows whose lengths are sorted together
ADDED = ("prediction", "score", "scores", "finish_reason", "error")
"""The columns that a prediction adds to its row."""
_ANSWER = "?"  # stands where a target would, and is cut off again


@dataclass
class Predicted:
    """What became of the rows of a file."""

    n_rows: int = 0
    n_failed: int = 0
    """Rows with an error instead of a prediction."""
    n_cut: int = 0
    """Inputs that were longer than in training, and were cut as there."""
    first_errors: list[str] = field(default_factory=list)


@dataclass
class _Asked:
    """A row on its way: its place in the window, its tokens or what is wrong with it."""

    row: RowValue
    ids: list[int] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)
    words: list[int | None] = field(default_factory=list)
    """Where words have labels: the first token of each, if it has one."""


class Predictor:
    def __init__(
        self,
        run: Path,
        *,
        max_new_tokens: int = 256,
        batch_size: int = 16,
        trust_remote_code: bool = False,
    ) -> None:
        self.speaker = Speaker(run, trust_remote_code=trust_remote_code)
        self.job = Job.model_validate(self.speaker.job)
        self.max_new_tokens, self.batch_size = max_new_tokens, batch_size
        self.summary = Predicted()
        task, tokenizer, data = self.speaker.task, self.speaker.tokenizer, self.job.data
        self.scores_answers = task.learns_units and not task.scores_tokens
        """Whether a row's answer is scored, not made."""
        task = objective_of(task.asked_as) if task.asked_as else task
        source, target = set_languages(tokenizer, task.name, data.source_lang, data.target_lang)
        self._longest = max_positions(self.speaker.model.config) or 1 << 30
        limits = [self.job.max_length, self._longest, tokenizer.model_max_length]
        self._max_length = data.max_length or min(limits)
        wants_date = task.predicts_next and asks_for_the_date(tokenizer.chat_template)
        self._recipe = Recipe(
            task.name,
            self._max_length,
            columns=self._of_inputs(data.columns),
            source_lang=source,
            target_lang=target,
            date=began(run) if wants_date else "",
        )
        # a prompt is cut nowhere: where it is too long there is no answer to it
        self._encode = Encoder(
            tokenizer, task.name, 1 << 30 if task.predicts_next else self._max_length, 1 << 30
        )

    def _wanted(self) -> str:
        if self.scores_answers:
            return (
                "give one answer a row (prompt + completion, or messages), without a verdict;"
                " `farthing eval RUN --data FILE` measures pairs"
            )
        return "give rows like those of the training, without the answers; its data.columns apply"

    def _targets(self) -> set[str]:
        """The standard columns that hold what is to be predicted."""
        if self.scores_answers:
            return {"chosen", "rejected"}
        if self.speaker.classes:
            return {name for each in self.speaker.task.formats for name in each.needs[1:]}
        return {"completion", "target", "output", "chosen", "rejected"}

    def _of_inputs(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        targets = self._targets()
        return {name: own for name, own in columns.items() if name not in targets}

    def file(self, path: Path) -> Iterator[RowValue]:
        """The rows of a file with their predictions. Raises `DataError`."""
        source = file_source(path, self.job.data.layout)
        yield from self._predicted(source.rows(), source)

    def rows(self, rows: Iterable[RowValue]) -> Iterator[RowValue]:
        numbered = (Row(number, dict(row)) for number, row in enumerate(rows, 1))
        yield from self._predicted(numbered, Source("rows", "", "jsonl"))

    def _predicted(self, rows: Iterator[Row | BadRow], source: Source) -> Iterator[RowValue]:
        while window := list(itertools.islice(rows, WINDOW)):
            asked = self._asked(window, source)
            ready = sorted((one for one in asked if one.ids), key=lambda one: -len(one.ids))
            self._answer(ready)
            for one in asked:
                self.summary.n_rows += 1
                self.summary.n_failed += "error" in one.found
                yield one.row | one.found

    def row_of(self, text: str) -> RowValue:
        """A text as a row: what is asked in a chat, or the input."""
        if self.speaker.is_chat:
            return {"messages": [{"role": "user", "content": text}]}
        name = "input" if self.speaker.task.is_pair else "prompt"
        if self.speaker.classes:
            name = self.speaker.task.formats[0].needs[0]
        own = self._recipe.columns.get(name, name)
        if not isinstance(own, str) or "{" in own:
            raise InputError(
                f"the run's job makes `{name}` of several columns",
                where="data.columns",
                to_do="give rows with these columns instead of texts",
            )
        return {own: text}

    # ---- rows to tokens ----

    def _asked(self, window: list[Row | BadRow], source: Source) -> list[_Asked]:
        reader = SourceReader(source, self._recipe, self.speaker.tokenizer)
        filled = [self._with_target(row) for row in window]
        try:
            reader.look(filled)
        except DataError as error:
            what = error.what.partition(", of which")[0].partition(", which")[0]
            raise DataError(what, where=error.where, to_do=self._wanted()) from error
        asked = []
        for row, whole in zip(window, filled, strict=True):
            one = _Asked({} if isinstance(row, BadRow) else row.value)
            try:
                if odd := [name for name in ADDED if name in one.row]:
                    raise DataError(
                        f"has a column `{odd[0]}`, which a prediction would overwrite",
                        where=f"{source.name}:{row.line}",
                        to_do="rename it in the file",
                    )
                text = reader.text(self._with_tags(whole, reader.understood))
                one.ids, one.words = self._words(text) if text.words else (self._ids(text), [])
            except Unusable as error:
                one.found = {"error": f"{source.name}:{row.line}: {error}"}
                if len(self.summary.first_errors) < 5:
                    self.summary.first_errors.append(str(one.found["error"]))
            asked.append(one)
        return asked

    def _with_target(self, row: Row | BadRow) -> Row | BadRow:
        """The row with something in place of the target that it lacks."""
        if isinstance(row, BadRow) or self.scores_answers:
            return row
        value = dict(row.value)
        turn = {"role": "assistant", "content": _ANSWER}
        messages: Any = value.get("messages")
        said: Any = value.get("conversations")
        if self.speaker.classes:
            names = class_names(self.speaker.model.config)
            answer: Any = 0.0 if self.speaker.says_a_number else names[0]
            labels = self.speaker.task.labels
            answer = [] if labels is not None and labels.predict else answer
        else:
            answer = [turn] if isinstance(value.get("prompt"), list) else _ANSWER
        if _ends_with_a_question(messages, "role", "assistant"):
            value["messages"] = [*messages, turn]
        elif _ends_with_a_question(said, "from", "gpt"):
            value["conversations"] = [*said, {"from": "gpt", "value": _ANSWER}]
        for name in self._targets() - {"chosen", "rejected"}:
            if not value.get(name) or self.speaker.classes:
                value[name] = answer
        return Row(row.line, value)

    def _with_tags(self, row: Row | BadRow, understood: Understood | None) -> Row | BadRow:
        """The row with as many tags as words, where these have labels."""
        if not self.speaker.task.scores_words or isinstance(row, BadRow) or understood is None:
            return row
        own = understood.columns.get("tokens", "tokens")
        words = list_of(row.value, own) if isinstance(own, str) else []
        return Row(row.line, {**row.value, "tags": ["O"] * len(words)})

    def _words(self, text: Text) -> tuple[list[int], list[int | None]]:
        """The tokens of a text, and the first of each of its words."""
        found = self._encode([text])
        self.summary.n_cut += bool(found.was_cut[0])
        places: list[int | None] = [None] * len(text.words)
        assert found.words is not None
        for word, at in zip(found.words.tolist(), found.is_target.nonzero()[0], strict=True):
            places[word] = int(at)
        return found.ids.tolist(), places

    def _ids(self, text: Text) -> list[int]:
        """The tokens that the model is asked with. Raises `Unusable`."""
        segments = text.segments
        if self.scores_answers:
            found = self._encode([text])
            self.summary.n_cut += bool(found.was_cut[0])
            return [int(index) for index in found.ids]
        learned = [index for index, (_, is_target) in enumerate(segments) if is_target]
        if learned and learned[-1] > 0:
            segments = segments[: learned[-1]]
        prompt = tuple((part, False) for part, _ in segments)
        encoded = self._encode([Text(prompt, is_raw=text.is_raw)])
        ids = [int(index) for index in encoded.ids[encoded.is_target == 0]]
        self.summary.n_cut += bool(encoded.was_cut[0])
        room = self._longest - self.max_new_tokens
        if self.speaker.task.predicts_next and len(ids) > room:
            raise Unusable(
                f"{len(ids):,} tokens and {self.max_new_tokens:,} of an answer are more than the"
                f" model's {self._longest:,} positions"
            )
        if not ids:
            raise Unusable("no text to answer")
        return ids

    # ---- tokens to answers ----

    def _answer(self, ready: list[_Asked]) -> None:
        at, size = 0, self.batch_size
        while at < len(ready):
            batch = ready[at : at + size]
            try:
                found = self._of_batch(batch)
            except Exception as error:
                if not is_out_of_memory(error) or size == 1:
                    raise
                free_cached(self.speaker.model.device)
                size = max(1, size // 2)
                continue
            for one, each in zip(batch, found, strict=True):
                one.found = each or {"error": "the model's scores are no numbers"}
            at += len(batch)

    @torch.no_grad()
    def _of_batch(self, asked: list[_Asked]) -> list[dict[str, Any]]:
        """What is said of each; nothing where scores are no numbers."""
        speaker, rows = self.speaker, [one.ids for one in asked]
        longest, pad = max(map(len, rows)), self._pad_id()
        is_left = speaker.task.predicts_next
        gaps = [[pad] * (longest - len(row)) for row in rows]
        ids = torch.tensor(
            [gap + row if is_left else row + gap for gap, row in zip(gaps, rows, strict=True)]
        )
        lengths = torch.tensor([len(row) for row in rows])[:, None]
        places = torch.arange(longest)
        mask = (places >= longest - lengths) if is_left else (places < lengths)
        given = {
            "input_ids": ids.to(speaker.model.device),
            "attention_mask": mask.long().to(speaker.model.device),
        }
        if not speaker.classes:
            found = self._written(given)
            return [each if math.isfinite(each["score"]) else {} for each in found]
        scores = speaker.model(**given).logits.float().cpu()  # [B, C], or [B, T, C] of words
        if speaker.task.scores_words:
            found = [self._tagged(of, one.words) for of, one in zip(scores, asked, strict=True)]
        else:
            found = self._classified(scores)
        are_finite = scores.isfinite().flatten(1).all(1).tolist()
        return [each if finite else {} for each, finite in zip(found, are_finite, strict=True)]

    def _pad_id(self) -> int:
        config, tokenizer = self.speaker.model.config.get_text_config(), self.speaker.tokenizer
        known = (config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id)
        return next((int(index) for index in known if index is not None and index >= 0), 0)

    def _classified(self, scores: torch.Tensor) -> list[dict[str, Any]]:
        if self.speaker.says_a_number:
            return [{"prediction": float(score)} for score in scores[:, 0]]
        found = []
        for each in scores:
            label, shares = self.speaker.said(each)
            one = {} if isinstance(label, list) else {"score": shares[label]}
            found.append({"prediction": label, **one, "scores": shares})
        return found

    def _tagged(self, scores: torch.Tensor, words: list[int | None]) -> dict[str, Any]:
        """The tag of each word and how sure it is, from scores [T, C]; None of words behind the
        limit. `words`: the first token of each.
        """
        said = [None if at is None else self.speaker.said(scores[at]) for at in words]
        sure = [None if each is None else each[1][each[0]] for each in said]
        return {"prediction": [each and each[0] for each in said], "scores": sure}

    def _written(self, given: dict[str, torch.Tensor]) -> list[dict[str, Any]]:
        speaker, ends, log_probs = self.speaker, self.speaker.ends(), list[torch.Tensor]()

        def note(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            log_probs.append(scores.float().log_softmax(-1).amax(-1))  # of the token that is taken
            return scores

        from transformers import LogitsProcessorList

        written = speaker.model.generate(
            **given,
            do_sample=False,
            num_beams=1,
            use_cache=True,
            max_new_tokens=self.max_new_tokens,
            eos_token_id=ends or None,
            pad_token_id=self._pad_id(),
            logits_processor=LogitsProcessorList([note]),
        )
        answers = written[:, -len(log_probs) :].tolist()
        found = []
        for answer, each in zip(answers, torch.stack(log_probs, 1).tolist(), strict=True):
            stop = next((at for at, index in enumerate(answer) if index in ends), None)
            n = len(answer) if stop is None else stop + 1
            text = speaker.tokenizer.decode(answer[:n], skip_special_tokens=True)
            reason = "length" if stop is None else "stop"
            found.append({"prediction": text, "score": sum(each[:n]) / n, "finish_reason": reason})
        return found


def _ends_with_a_question(turns: Any, key: str, speaker: str) -> bool:
    """Whether a chat ends with a turn that is not the assistant's."""
    last = turns[-1] if isinstance(turns, list) and turns else None
    return isinstance(last, dict) and last.get(key) not in (speaker, "assistant")


def _without_nan(row: RowValue) -> RowValue:
    """A row that JSON can hold: what is no number is missing."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }


def predict_file(predictor: Predictor, path: Path, output: Path) -> Predicted:
    """Write the rows of a file with their predictions as JSON lines; the file appears whole.

    Raises `InputError` where `output` is there already, `DataError` where no row can be used.
    """
    if output.exists():
        raise InputError("the file is there already", where=str(output), to_do="name a new one")
    output.parent.mkdir(parents=True, exist_ok=True)
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
