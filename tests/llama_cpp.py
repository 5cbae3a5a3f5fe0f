"""llama.cpp itself, from the wheel `xllamacpp`: what it makes of a text and of a model in a GGUF file."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest


class LlamaCpp:
    """A GGUF file served in this process, computing in fp32 on one thread."""

    def __init__(self, path: Path, context: int = 512) -> None:
        engine: Any = pytest.importorskip("xllamacpp", reason="llama.cpp is not here: pip install xllamacpp")
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
        found: list[int] = self._ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"]
        return found

    def greedy(self, prompt: list[int], n: int) -> tuple[list[int], float]:
        """(`n` most likely tokens after a prompt, log-probability of the first)."""
        found = self._ask(
            "/completion", prompt=prompt, n_predict=n, temperature=0, top_k=1, n_probs=1, return_tokens=True,
            ignore_eos=True, cache_prompt=False,
        )  # fmt: skip
        return found["tokens"], found["completion_probabilities"][0]["logprob"]
