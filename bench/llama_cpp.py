"""llama.cpp itself, from the wheel `xllamacpp`: what it makes of a text and of a model in a GGUF
file.
"""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import torch


class LlamaCpp:
    """A GGUF file served in this process, computing in fp32 on one thread."""

    def __init__(self, path: Path, context: int = 512) -> None:
        import xllamacpp  # type: ignore[import-not-found]

        engine: Any = xllamacpp
        settings = engine.CommonParams()
        settings.model.path, settings.n_ctx, settings.n_parallel = str(path), context, 1
        settings.cpuparams.n_threads, settings.warmup, settings.verbosity = 1, False, -1
        settings.cache_type_k = settings.cache_type_v = engine.ggml_type.GGML_TYPE_F32
        settings.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._server = engine.Server(settings)

    def _ask(self, path: str, **question: Any) -> dict[str, Any]:
        request = urllib.request.Request(
            self._server.listening_address + path,
            json.dumps(question).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request) as answer:
            found: dict[str, Any] = json.loads(answer.read())
        return found

    def tokenize(self, text: str) -> list[int]:
        """Ids of a text, with what begins and ends it."""
        found: list[int] = self._ask(
            "/tokenize", content=text, add_special=True, parse_special=True
        )["tokens"]
        return found

    def greedy(self, prompt: list[int], n: int) -> tuple[list[int], float]:
        """(`n` most likely tokens after a prompt, log-probability of the first)."""
        found = self._ask(
            "/completion",
            prompt=prompt,
            n_predict=n,
            temperature=0,
            top_k=1,
            n_probs=1,
            return_tokens=True,
            ignore_eos=True,
            cache_prompt=False,
        )
        return found["tokens"], found["completion_probabilities"][0]["logprob"]


@torch.no_grad()
def greedy_of(model: Any, prompt: list[int], n: int) -> tuple[list[int], float]:
    """The same of a model in transformers: ends of texts are passed over."""
    ends = model.generation_config.eos_token_id
    ids, first = list(prompt), 0.0
    for i in range(n):
        scores = model(torch.tensor([ids])).logits[0, -1].float().log_softmax(-1)
        if ends is not None:
            scores[ends] = -torch.inf
        ids.append(int(scores.argmax()))
        first = float(scores.max()) if i == 0 else first
    return ids[len(prompt) :], first
