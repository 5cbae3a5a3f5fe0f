"""Answers of a run's model, or of what it began with: text piece by piece, a class with its
probabilities, a target text.

The chat template and the tokens at which an answer ends are those of the training.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from farthing.data.formats import RENDERED, recognise
from farthing.data.read import open_sources
from farthing.data.rows import Layout, Row
from farthing.errors import FarthingError, InputError
from farthing.export.folders import trained_model, trusted_job, tuned_config, untrained_model
from farthing.model.hardware import Numerics, choose_numerics
from farthing.model.load import ModelChoice, load_tokenizer
from farthing.objectives.objective import class_names
from farthing.objectives.registry import objective_of
from farthing.planner.software import fp16_risk
from farthing.run.folder import MODEL
from farthing.storage.files import Json

Message = dict[str, str]


@dataclass(frozen=True)
class Asked:
    max_new_tokens: int = 256
    temperature: float = 0.0
    """0: always the likeliest token."""
    seed: int = 0


def answers_in(run: Path) -> Numerics:
    """Where and in what the model of a run answers: in half precision on a GPU, whose memory it
    would fill twice otherwise.
    """
    config = tuned_config(run / MODEL) if (run / MODEL).is_dir() else {}
    return choose_numerics("auto", None, None, fp16_risk=fp16_risk(config))


class Speaker:
    """A model of a run that answers."""

    def __init__(
        self, run: Path, *, is_base: bool = False, trust_remote_code: bool = False
    ) -> None:
        job = trusted_job(run, trust_remote_code)
        self.job, self.task = job, objective_of(job["task"])
        make = untrained_model if is_base else trained_model
        numerics = answers_in(run)
        self.model = make(run, numerics.base_dtype, trust_remote_code=trust_remote_code).to(
            numerics.device
        )
        self.tokenizer = load_tokenizer(ModelChoice(str(run / MODEL)), None)
        self.is_chat = self.task.predicts_next and trained_on_chats(job)

    @property
    def classes(self) -> bool:
        return not self.task.scores_tokens

    @property
    def says_a_number(self) -> bool:
        labels = self.task.labels
        return self.model.config.num_labels == 1 and labels is not None and labels.shares is None

    def _ids(self, messages: list[Message]) -> dict[str, torch.Tensor]:
        """What the model is asked with, as it was in training."""
        last = messages[-1]["content"]
        if self.is_chat:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            ids = self.tokenizer(
                last, truncation=self.classes, max_length=self.job["data"]["max_length"]
            )["input_ids"]
            if self.task.predicts_next:
                first, end = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
                ids = ids[:-1] if len(ids) > 1 and ids[-1] == end else ids
                ids = (
                    ids
                    if first is None
                    or ids[:1] == [first]
                    or self.tokenizer("a")["input_ids"][:1] != [first]
                    else [first, *ids]
                )
        if not ids:
            raise InputError("no text to answer", where="the prompt", to_do="write a text")
        tensor = torch.tensor([ids], device=self.model.device)
        return {"input_ids": tensor, "attention_mask": torch.ones_like(tensor)}

    @torch.no_grad()
    def classify(self, text: str) -> dict[str, object]:
        """The likeliest class and the probability of each, the likeliest first; of a number alone,
        the number. Raises `InputError` for a model that reads words.
        """
        if self.task.scores_words:
            raise InputError(
                f"a model of {self.task.name} reads words, not a text",
                where="the prompt",
                to_do="write rows with `tokens`, and use `farthing predict`",
            )
        scores = self.model(**self._ids([{"role": "user", "content": text}])).logits[0].float()
        if self.says_a_number:
            return {"score": float(scores[0])}
        label, shares = self.said(scores)
        ordered = dict(sorted(shares.items(), key=lambda item: -item[1]))
        return {"label": label, "probabilities": ordered}

    def said(self, scores: torch.Tensor) -> tuple[Any, dict[str, float]]:
        """What is predicted of scores [C], and the share of each class."""
        labels, names = self.task.labels, class_names(self.model.config)
        assert labels is not None
        of_all = (labels.shares or (lambda each: each.softmax(-1)))(scores.float()).tolist()
        shares = dict(zip(names, of_all, strict=True))
        if labels.predict is not None:
            return labels.predict(of_all, names), shares
        return max(shares, key=lambda name: shares[name]), shares

    def stream(self, messages: list[Message], asked: Asked) -> Iterator[str]:
        """The answer to the last message, piece by piece."""
        from transformers import TextIteratorStreamer

        pieces = TextIteratorStreamer(
            self.tokenizer, skip_prompt=not self.task.is_pair, skip_special_tokens=True
        )
        given, errors = self._ids(messages), []
        sampled = (
            {"do_sample": True, "temperature": asked.temperature}
            if asked.temperature > 0
            else {"do_sample": False}
        )
        torch.manual_seed(asked.seed)

        def generate() -> None:
            try:
                self.model.generate(
                    **given,
                    **sampled,
                    streamer=pieces,
                    max_new_tokens=asked.max_new_tokens,
                    use_cache=True,
                    num_beams=1,
                    eos_token_id=self.ends() or None,
                    pad_token_id=self.tokenizer.pad_token_id,
                )
            except Exception as error:
                errors.append(error)
                pieces.end()

        thread = threading.Thread(target=generate, name="farthing-answer", daemon=True)
        thread.start()
        yield from (piece for piece in pieces if piece)
        thread.join()
        if errors:
            raise errors[0]

    def ends(self) -> list[int]:
        """Tokens that end an answer: the tokenizer's, and those that the model names."""
        named = self.model.generation_config.eos_token_id
        found = [self.tokenizer.eos_token_id, *(named if isinstance(named, list) else [named])]
        return [index for index in dict.fromkeys(found) if index is not None]


def trained_on_chats(job: Json) -> bool:
    """Whether the run's rows are rendered by the chat template; of rows that are gone,
    taken to be.
    """
    data = job["data"]
    try:
        opened = {"split": data["train_split"], "config_name": data["dataset_config_name"]}
        opened["layout"] = Layout.of(data)
        source, *_ = open_sources(
            data["train"][:1], cache_dir=Path(job["cache_dir"] or "."), **opened
        )
        rows = [row.value for row in itertools.islice(source.rows(), 16) if isinstance(row, Row)]
        columns: set[str] = set().union(*rows)
        if objective_of(job["task"]).learns_units:
            values = [value for row in rows for value in row.values()]
            is_asked = "instruction" in columns or "system" in columns
            return is_asked or any(isinstance(value, list | dict) for value in values)
        is_of_messages = any(isinstance(row.get("prompt"), list) for row in rows)
        return (
            is_of_messages
            or recognise(columns, job["task"], data["columns"], source.name).format in RENDERED
        )
    except (FarthingError, OSError, ValueError, KeyError):
        return True
