"""Forward passes of every family, task, method and precision on tensors of CUDA without data: `make rehearse-gpu`.

    python bench/rehearse_gpu.py [--only WORD ...] [--quiet]

Needs a CUDA build of torch, and no GPU and no driver: `FakeTensorMode` follows devices, dtypes and shapes of each operation
and computes nothing. So it finds a tensor on the wrong device, a dtype that does not fit, an argument that this version of a
library does not take; it finds nothing that a kernel computes. Left out, as they ask for a driver: backward passes, events,
flex attention (compiled on the spot), pinned memory. of varlen its own stand-in for tensors without data is run.

Where Triton and liger-kernel are installed, Liger's kernels are compiled for sm_80 and sm_90 as a forward and a backward pass
would call them; nothing is launched.

One line a case: ok, failed or skipped with the reason, and how often the host read a value off the device. The exit code is 1
where a case failed, 2 where this torch has no CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.cuda.amp import common as autocast
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from farthing.data.token_set import TokenSet
from farthing.errors import FarthingError
from farthing.model import attention_kernels
from farthing.model.adapters import Adapter, add_adapter
from farthing.model.attention_choice import FLASH_ATTN
from farthing.model.forward import Forward
from farthing.model.hardware import Numerics
from farthing.model.load import auto_class, quiet_libraries
from farthing.model.lora_kernels import use_low_rank
from farthing.planner.families import DECODERS, ENCODERS

GPUS = {"T4": (7, 5), "A100": (8, 0), "H100": (9, 0)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": None}
HARD = ("bert", "gemma2", "gpt2", "llama", "mistral", "mixtral", "qwen3", "roberta", "t5")  # tried with more besides
SIZE: dict[str, Any] = {
    **{"vocab_size": 99, "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "num_labels": 3, "embedding_size": 64},
    **{"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "moe_intermediate_size": 16, "num_experts": 4},
    **{"shared_expert_intermediate_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8},
}
NAMED_OTHERWISE: dict[str, dict[str, Any]] = {
    **{name: {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 128} for name in ("gpt2", "gpt_bigcode")},
    **{name: {"d_model": 64, "d_ff": 48, "d_kv": 16, "num_layers": 2, "num_heads": 4} for name in ("t5", "mt5")},
    "distilbert": {"dim": 64, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
    "bloom": {"n_head": 4, "n_layer": 2},
    "falcon": {"num_hidden_layers": 2, "num_attention_heads": 4},
}
RATES = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "dropout_rate", "dropout")


class Skipped(Exception):
    """A case that can't be, with the reason."""


@dataclass(frozen=True)
class Case:
    """What is tried."""

    family: str
    task: str
    method: str
    """full or lora."""
    precision: str
    layout: str
    """packed, shared (beginnings that documents share are computed once) or padded."""
    gpu: str = "A100"
    besides: str = ""
    """dropout, flash-attn."""

    def __str__(self) -> str:
        return " ".join(getattr(self, field.name) for field in fields(self) if getattr(self, field.name))


def all_cases() -> Iterator[Case]:
    """Everything on an A100; on other GPUs, with dropout and with flash-attn, what differs there."""
    tasks = {family: ["causal-lm", "classification"] for family in DECODERS | {"bloom", "falcon"}}
    tasks |= {family: ["classification"] for family in ENCODERS | {"distilbert"}}
    tasks |= {family: ["seq2seq"] for family in ("t5", "mt5")}
    for family in sorted(tasks):
        for task, method, precision in itertools.product(tasks[family], ("full", "lora"), DTYPES):
            for layout in ("packed", "padded"):
                yield Case(family, task, method, precision, layout)
        if "causal-lm" in tasks[family]:
            yield Case(family, "causal-lm", "full", "bf16", "shared")
    for family in HARD:
        for task, layout in itertools.product(tasks[family], ("packed", "shared", "padded")):
            for besides in ("", "dropout"):
                for gpu, precision in (("T4", "fp16"), ("T4", "fp32"), ("H100", "bf16")):
                    yield Case(family, task, "full", precision, layout, gpu, besides)
            yield Case(family, task, "full", "fp32", layout, "A100", "dropout")
            yield Case(family, task, "lora", "bf16", layout, "A100", "dropout")
            yield Case(family, task, "full", "bf16", layout, "A100", "flash-attn")


# ---- a machine that is not here ----


class Reads(TorchDispatchMode):
    """Answers "no" where the host reads a value off the device, and counts it: there is no value."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run it, or answer."""
        if str(func).startswith(("aten._local_scalar_dense", "aten.is_nonzero")):
            self.n += args[0].device.type == "cuda"
            return False if args[0].dtype == torch.bool else args[0].dtype.is_floating_point * 1.0 or 0
        return func(*args, **(kwargs or {}))


def flash_attn(query: Tensor, key: Tensor, value: Tensor, *bounds: Any, **options: Any) -> Tensor:
    """In place of flash-attn, which can't be installed without a GPU: its shapes, and arguments it knows."""
    known = {"dropout_p", "softmax_scale", "causal", "window_size", "softcap", "deterministic"}
    if unknown := set(options) - known:
        raise TypeError(f"flash-attn knows no {unknown}")
    if query.dtype not in (torch.float16, torch.bfloat16) or {key.dtype, value.dtype} != {query.dtype}:
        raise TypeError("flash-attn takes fp16 and bf16, the same for all")
    if query.shape[1] % key.shape[1] or bounds[0].dtype != torch.int32 or bounds[1].dtype != torch.int32:
        raise TypeError("flash-attn takes grouped heads and int32 bounds")
    return torch.empty_like(query)


@contextlib.contextmanager
def machine(gpu: str, besides: str) -> Iterator[Counter[str]]:
    """torch believes in a GPU within the block. Yields the kernels of attention that were taken."""
    taken: Counter[str] = Counter()

    def watched(name: str, kernel: Any) -> Any:
        def call(*args: Any) -> Tensor:
            taken[name] += 1
            out: Tensor = kernel(*args)
            return out

        return call

    kernels = {name: watched(name, kernel) for name, kernel in attention_kernels.KERNELS.items()}
    flash = flash_attn if besides == "flash-attn" else None
    honest = attention_kernels._parameters_of
    answers = {
        (autocast, "amp_definitely_not_available"): lambda: False,
        (torch.cuda, "get_device_capability"): lambda *_: GPUS[gpu],
        (torch.cuda, "is_bf16_supported"): lambda *_, **__: GPUS[gpu] >= (8, 0),
        (torch.cuda, "current_device"): lambda: 0,
        (torch.cuda, "_exchange_device"): lambda *_: -1,
        (torch.cuda, "_maybe_exchange_device"): lambda *_: -1,
        (torch.nn.Module, "to"): to,
        (Tensor, "pin_memory"): lambda self, *_: self,
        (attention_kernels, "_flash"): lambda: flash,
        (attention_kernels, "_flex"): lambda: None,
        (attention_kernels, "_parameters_of"): lambda function: (
            FLASH_ATTN if function is flash_attn else honest(function)
        ),
    }
    attention_kernels.here.cache_clear()
    with contextlib.ExitStack() as stack:
        for (owner, name), answer in answers.items():
            stack.enter_context(mock.patch.object(owner, name, answer))
        stack.enter_context(mock.patch.dict(attention_kernels.KERNELS, kernels))
        yield taken
    attention_kernels.here.cache_clear()


# ---- a case ----


def token_set() -> TokenSet:
    """Texts of several lengths, all but the first with a beginning in common; their last thirds are targets."""
    draw = np.random.default_rng(0)
    common = draw.integers(3, 99, 40).tolist()
    texts = [draw.integers(3, 99, 9).tolist(), *(common + draw.integers(3, 99, n).tolist() for n in (5, 9, 9, 30, 1))]
    rows = [np.array(text, np.int32) for text in texts]
    targets = [np.arange(len(row)) >= 2 * len(row) // 3 for row in rows]
    return TokenSet(
        folder=Path(),
        facts={"label_names": ["a", "b", "c"], "sources": []},
        ids=np.concatenate(rows),
        targets=np.concatenate(targets).astype(np.uint8),
        offsets=np.concatenate([[0], np.cumsum([len(row) for row in rows])]),
        lines=np.arange(len(rows)),
        groups=np.arange(len(rows), dtype=np.uint64),
        labels=np.arange(len(rows), dtype=np.int32) % 3,
    )


def config_of(case: Case) -> Any:
    """A small configuration of the family."""
    rates = dict.fromkeys(RATES, 0.1 if case.besides == "dropout" else 0.0)
    own = NAMED_OTHERWISE.get(case.family, {})
    general = {name: value for name, value in SIZE.items() if not (own and name.startswith(("num_", "head_")))}
    size = general | {"num_labels": SIZE["num_labels"]} | own
    config = AutoConfig.for_model(case.family, **size, **rates)
    if config.is_encoder_decoder:
        config.decoder_start_token_id = 1
    config.use_cache = False
    return config


def model_of(case: Case, dtype: torch.dtype | None) -> Any:
    """The model as the trainer makes it, but for its weights."""
    kind = auto_class(case.task)
    config = config_of(case)
    if type(config) not in kind._model_mapping:
        raise Skipped(f"transformers has no {case.family} for {case.task}")
    held = torch.float32 if case.method == "full" or dtype is None else dtype
    model = kind.from_config(config, dtype=held)
    if case.method == "lora":
        model = add_adapter(model, Adapter(r=4), case.task, 0)
        use_low_rank(model)
    return model.to("cuda").train()


def to(module: Any, *args: Any, **kwargs: Any) -> Any:
    """What `torch.nn.Module.to` does, which writes into tensors: those without data do not take that."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    made: dict[int, torch.nn.Parameter] = {}
    for part in module.modules():
        for name, weight in part._parameters.items():
            if weight is not None and id(weight) not in made:
                new = torch.nn.Parameter(weight.data.to(device, dtype), weight.requires_grad)
                made[id(weight)] = made[id(new)] = new
            part._parameters[name] = None if weight is None else made[id(weight)]
        for name, buffer in part._buffers.items():
            wanted = dtype if buffer is not None and buffer.is_floating_point() else None
            part._buffers[name] = None if buffer is None else buffer.to(device, wanted)
    return module


def rehearse(case: Case) -> str:
    """What happened in words. Raises `Skipped`, or what the forward pass raises."""
    dtype = DTYPES[case.precision]
    numerics = Numerics(torch.device("cuda"), dtype, needs_scaler=case.precision == "fp16")
    tokens = token_set()
    with machine(case.gpu, case.besides) as taken:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            model = model_of(case, dtype)
            forward = Forward(model, case.task, 1, numerics, may_go_packed=case.layout != "padded")
        if case.layout != "padded" and forward.why_padded:
            raise Skipped(forward.why_padded)
        forward.shares = case.layout == "shared"
        if forward.shares and (case.family in ENCODERS):
            raise Skipped("a token's meaning depends on what follows it")
        arrays = forward.collate(tokens, np.arange(len(tokens)))
        with mode, Reads() as reads:
            batch = forward.to_device(arrays)
            scale: Any = torch.full((), 1024.0, device="cuda") if numerics.needs_scaler else 1.0
            loss = forward.loss(batch, scale)
    if (loss.device.type, tuple(loss.shape), loss.dtype) != ("cuda", (), torch.float32):
        raise AssertionError(f"the loss is {loss}")
    if not loss.requires_grad:
        raise AssertionError("the loss has no gradient")
    if case.layout != "padded" and reads.n and "dynamic" not in str(model.config):
        raise AssertionError(f"the host waits for the device, {reads.n} times")
    return f"{'+'.join(taken) or 'sdpa'}, {reads.n} reads"


# ---- Triton ----


class Context:
    """In place of autograd's."""

    saved_tensors: tuple[Any, ...] = ()
    needs_input_grad = (True,) * 9

    def save_for_backward(self, *tensors: Any) -> None:
        """Keep them."""
        self.saved_tensors = tensors


@contextlib.contextmanager
def compiling(capability: tuple[int, int]) -> Iterator[Counter[str]]:
    """Within the block kernels of Triton are compiled for a GPU and not launched. Yields their names."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction, MockTensor

    made: Counter[str] = Counter()
    honest = JITFunction.run
    target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
    stand_in = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        get_current_target=lambda: target,
        get_active_torch_device=lambda: torch.device("cuda"),
    )

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        def mocked(value: Any) -> Any:
            return MockTensor(value.dtype, tuple(value.shape)) if isinstance(value, Tensor) else value

        made[self.fn.__name__] += 1
        self.device_caches.clear()
        kwargs = {name: mocked(value) for name, value in kwargs.items()}
        return honest(self, *map(mocked, args), grid=grid, warmup=True, **kwargs)

    with (
        mock.patch.object(driver, "_active", stand_in),
        mock.patch.object(JITFunction, "run", run),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=SimpleNamespace(multi_processor_count=108)),
    ):
        yield made


def compile_ligers_kernels(gpu: str, dtype: torch.dtype) -> str:
    """Compile what norms, rotations and gated feed-forwards call, forward and backward; says what that was."""
    try:
        import triton
    except ImportError as error:
        raise Skipped(f"{error.name} is not installed") from error
    with machine(gpu, ""), mock.patch.object(torch.cuda, "is_available", return_value=True):
        try:
            from liger_kernel.ops.geglu import LigerGELUMulFunction
            from liger_kernel.ops.rms_norm import LigerRMSNormFunction
            from liger_kernel.ops.rope import LigerRopeFunction
            from liger_kernel.ops.swiglu import LigerSiLUMulFunction
        except ImportError as error:
            raise Skipped(f"{error.name} is not installed") from error
    with machine(gpu, ""), FakeTensorMode(), compiling(GPUS[gpu]) as made:

        def some(*shape: int) -> Tensor:
            return torch.empty(shape, device="cuda", dtype=dtype)

        def both_ways(function: Any, *args: Any) -> None:
            context: Any = Context()
            out = function.forward(context, *args)
            grads = tuple(torch.empty_like(one) for one in out) if isinstance(out, tuple) else (torch.empty_like(out),)
            function.backward(context, *grads)

        weight = torch.empty(4096, device="cuda", dtype=torch.float32)
        for mode, offset in (("llama", 0.0), ("gemma", 1.0)):
            both_ways(LigerRMSNormFunction, some(300, 4096), weight, 1e-6, offset, mode, False, None)
        both_ways(LigerSiLUMulFunction, some(300, 11008), some(300, 11008))
        both_ways(LigerGELUMulFunction, some(300, 11008), some(300, 11008))
        both_ways(LigerRopeFunction, some(1, 32, 300, 128), some(1, 8, 300, 128), some(1, 300, 128), some(1, 300, 128))
    return f"triton {triton.__version__}: {', '.join(sorted(made))}"


# ---- the report ----


def ended(attempt: Callable[[], str]) -> tuple[str, str]:
    """(ok, failed or skipped; what is said of it)."""
    try:
        return "ok", attempt()
    except (Skipped, FarthingError) as reason:
        return "skipped", " ".join(str(reason).split())
    except Exception as error:
        if "Expected inputs of BF16 type" in str(error):
            return (
                "skipped",
                "torch's stand-in for the grouped product of experts takes bf16 alone, its kernel does not",
            )
        at = traceback.extract_tb(error.__traceback__)[-1]
        text = " ".join(str(error).split())[:300]
        return "failed", f"{type(error).__name__}: {text} ({Path(at.filename).name}:{at.lineno})"


def in_children(work: list[tuple[str, Callable[[], str]]]) -> Iterator[tuple[str, str, str]]:
    """(line, end, what is said) of each, in processes of their own: torch crashes now and then when it frees tensors of CUDA
    that were never there, or takes a tensor for another. One that fails, or was at work when its process died, is tried
    again as the first of a process, once."""
    while work:
        n_done, failed = 0, "its process died"
        for end, said in _in_a_child(work):
            if end == "failed":
                failed = said
                break
            yield work[n_done][0], end, said
            n_done += 1
        if n_done == 0:
            yield work[0][0], "failed", failed
            n_done = 1
        work = work[n_done:]


def _in_a_child(work: list[tuple[str, Callable[[], str]]]) -> Iterator[tuple[str, str]]:
    """`ended` of each in one process, as far as it lived."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        gc.disable()
        for _, attempt in work:
            end = ended(attempt)
            os.write(writes, json.dumps(end).encode() + b"\n")
            if end[0] == "failed":
                break
        os._exit(0)
    os.close(writes)
    with open(reads, encoding="utf-8") as pipe:
        for line in pipe:
            end, said = json.loads(line)
            yield end, said
    os.waitpid(child, 0)


def main(arguments: list[str]) -> int:
    """Try every case, or those whose line has all the words of `--only`; print a line of each and the sums."""
    parser = argparse.ArgumentParser(description="forward passes on tensors of CUDA without data")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases whose line has all these words")
    parser.add_argument("--quiet", action="store_true", help="print failures and sums only")
    options = parser.parse_args(arguments)
    if torch.version.cuda is None:
        print(
            f"torch {torch.__version__} is not built for CUDA: `make rehearse-gpu` installs one that is",
            file=sys.stderr,
        )
        return 2
    quiet_libraries()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, built for {', '.join(torch.cuda.get_arch_list())}")
    print(
        "left out, as they ask for a driver: backward passes, events, flex attention, pinned memory; no kernel computes"
    )
    work: list[tuple[str, Any]] = [(str(case), lambda case=case: rehearse(case)) for case in all_cases()]
    for gpu, (name, dtype) in itertools.product(("A100", "H100"), DTYPES.items()):
        work.append(
            (
                f"liger kernels {gpu} {name}",
                lambda gpu=gpu, dtype=dtype: compile_ligers_kernels(gpu, dtype or torch.float32),
            )
        )
    ends: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    work = [(line, attempt) for line, attempt in work if all(word in line.split() for word in options.only)]
    groups = itertools.groupby(work, key=lambda one: one[0].split()[0])
    for line, end, said in itertools.chain.from_iterable(in_children(list(group)) for _, group in groups):
        reasons.update([said] if end == "skipped" else [])
        ends[end] += 1
        if end == "failed" or not options.quiet:
            print(f"{end:8}{line}: {said}", flush=True)
    print(", ".join(f"{n} {end}" for end, n in sorted(ends.items())) or "no such case")
    for reason, n in reasons.most_common():
        print(f"  {n} skipped: {reason}")
    return 1 if ends["failed"] or not ends else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
