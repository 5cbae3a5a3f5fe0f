"""The processes that share a run, and all that they say to each other.

Words (decisions, counts, plain values) go over gloo, gradients over NCCL where there are GPUs. What
depends on a clock, a disk or a measurement is decided by the first rank and told to all; what
depends on the examples is computed by all alike. A beat in a thread of its own tells within
`patience_s` that a rank has stopped; then this process ends too, as its thread may be inside a
kernel that never returns. Alone (n = 1) nothing is sent, and every answer is one's own.

NCCL was not run on GPUs so far.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from farthing.device_memory import is_out_of_memory
from farthing.dist.rendezvous import JOIN_HERE_S, RankLostError, bounded, lost, meet
from farthing.errors import (
    EXIT_INTERRUPTED,
    EXIT_MISTAKE,
    FarthingError,
    HardwareError,
    RunInterruptedError,
)
from farthing.run.checkpoint import CheckpointPart
from farthing.run.group import EXIT_RANK_LOST, Seat
from farthing.run.ledger import Meter
from farthing.run.parts import Shared
from farthing.run.signals import Notice
from farthing.run.stillness import Stillness

if TYPE_CHECKING:
    from farthing.dist.fsdp import ShardedModel, ShardingSettings

GO_ON, NO_ROOM, LEAVE = range(3)
"""Words of a step, the worst last: all is well; memory ran out; someone asked us to leave."""
BEAT_S = 0.5
LAST_WORDS_S = 3.0
"""What the first rank may take for its ledger and a save under way once another one is lost."""
TENSORS_TIMEOUT, WORDS_TIMEOUT = timedelta(minutes=30), timedelta(days=1)
"""Of collectives within a step, and of words, for which others wait while the first tokenizes. The
beat is quicker: it judges who is lost, and who shows no sign of work."""
STILL_S = 600.0
"""Seconds longer that a rank may show no sign of work while it waits for disks and networks."""
ON_DISKS_AND_NETWORKS = (
    *("start_up", "tokenize", "load_model", "restore", "checkpoint", "export"),
)
"""Spans of a meter in which it may."""
_GONE = 1000
EXIT_NO_ROOM = 77  # what a rank without memory tells the others; no process ends with it


class NoRoomLeft(RankLostError):
    """Memory has run out on this rank while others count on what it computes."""


class Ranks:
    """This process among those that share the run."""

    def __init__(
        self, seat: Seat | None = None, device: torch.device | None = None, patience_s: float = 60.0
    ) -> None:
        self.seat, self.device = seat or Seat(), device or torch.device("cpu")
        self.patience_s = patience_s
        self.index, self.n, self.is_first = self.seat.index, self.seat.n, self.seat.is_first
        self.meter: Meter | None = None  # has the seconds in which this rank waits for others
        self.notice: Notice | None = None  # whether this rank was asked to leave
        self.at_loss: Callable[[], None] = lambda: None
        """Called where another rank is lost, before this process ends."""
        self.leave_less: Callable[[], bool] = lambda: False
        """Called where memory runs out and others count on this rank, and then on the first rank
        before all end: notes that the next attempt takes less at once. Whether it can."""
        self.fsdp: ShardedModel | None = None
        """The model's weights where they are spread over the ranks."""
        self.word = 0
        self._words = [0] * self.n
        self._others_ask = False
        self._stillness = Stillness()
        self._closed = threading.Event()
        self._beats: threading.Thread | None = None
        if self.n > 1:
            self._join()

    @property
    def one_press_s(self) -> float:
        """Signals within so many seconds are one: a launcher hands on the Ctrl-C that the terminal
        has sent to all.
        """
        return 0.0 if self.seat.by in ("", "farthing") else 2.0

    # ---- joining and leaving ----

    def _join(self) -> None:
        """Meet the others. Raises `RankLostError` where they do not come, `InputError`."""
        store = meet(self.seat, self.device, self.patience_s)
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        try:
            with bounded(
                self.seat, self.patience_s + JOIN_HERE_S, "a rank was gone before all were joined"
            ):
                dist.init_process_group(
                    backend,
                    store=store,
                    rank=self.index,
                    world_size=self.n,
                    timeout=TENSORS_TIMEOUT,
                )
                self._to_all = dist.new_group(backend="gloo", timeout=WORDS_TIMEOUT)
                self.of_beats = dist.new_group(
                    backend="gloo", timeout=timedelta(seconds=self.patience_s)
                )
        except (RuntimeError, ValueError, OSError) as error:
            raise lost(self.seat, str(error).splitlines()[0][:200]) from error
        self._beats = threading.Thread(target=self.beat, name="farthing-ranks", daemon=True)
        self._beats.start()

    def beat(self) -> None:
        """Exchange words with all others until every one of them leaves. A rank that is lost ends
        this process.
        """
        while True:
            words = torch.zeros(2 * self.n + 1, dtype=torch.int32)
            words[self.index], words[-1] = self.word, int(bool(self.notice))
            words[self.n + self.index] = 0 if self.word else int(self._still_s())
            began_s = time.monotonic()
            try:
                dist.all_reduce(words, dist.ReduceOp.MAX, group=self.of_beats)
            except RuntimeError as error:
                waits_for_first = self.word == _GONE and not self.is_first
                hangs = waits_for_first and time.monotonic() - began_s > self.patience_s / 2
                self._leave_the_lost(str(error).splitlines()[0][:120], EXIT_INTERRUPTED, hangs)
            told = words.tolist()
            self._words, still_s, asks = told[: self.n], told[self.n : -1], told[-1]
            self._others_ask = bool(asks)
            failed = [code for code in self._words if 0 < code < _GONE]
            if failed and self.word == 0:
                if EXIT_NO_ROOM in failed and self.is_first:
                    last = threading.Thread(target=self.leave_less, daemon=True)
                    last.start()
                    last.join(LAST_WORDS_S)
                code = EXIT_MISTAKE if EXIT_MISTAKE in failed else EXIT_INTERRUPTED
                self._leave_the_lost(f"rank {self._words.index(failed[0])} has failed", code)
            if self.word == 0 and max(still_s) > self.patience_s:
                why = f"rank {still_s.index(max(still_s))} shows no sign of work"
                self._leave_the_lost(f"{why} for {max(still_s)} s", EXIT_INTERRUPTED)
            if all(self._words):
                return
            self._closed.wait(BEAT_S)

    def _still_s(self) -> float:
        """Seconds without a sign of work, as they count: waiting for a disk shows none."""
        may_be_still = self.meter is not None and self.meter.at in ON_DISKS_AND_NETWORKS
        return max(0.0, self._stillness.seconds() - (STILL_S if may_be_still else 0.0))

    def _leave_the_lost(self, why: str, code: int, hangs: bool = False) -> None:
        if self.word and not hangs:  # this one has failed, or is done, and reports that itself
            self._words = [_GONE] * self.n
            raise SystemExit
        last = threading.Thread(target=self.at_loss, daemon=True)
        last.start()
        last.join(LAST_WORDS_S)
        if code != EXIT_MISTAKE:
            text = (
                f"farthing: rank {self.index} of {self.n} ends, as another was lost ({why}); the"
                " last save is whole\n"
            )
            os.write(2, text.encode())
        begins_again = (
            self.seat.by == "farthing" and code == EXIT_INTERRUPTED and not self._others_ask
        )
        os._exit(EXIT_RANK_LOST if begins_again else code)

    def fail(self, exit_code: int, error: BaseException | None = None) -> bool:
        """Tell the others that this one ends with an error, and that they should. Whether this rank
        should speak of it: an error of all is told by the first alone."""
        if self._beats is None:
            return True
        word = EXIT_NO_ROOM if isinstance(error, NoRoomLeft) else exit_code
        self.word = word if word in (EXIT_MISTAKE, EXIT_INTERRUPTED, EXIT_NO_ROOM) else 1
        self._wait_until(lambda: self._words[self.index] != 0, 4 * BEAT_S)
        return self.is_first or self._words[0] in (0, _GONE)

    def close(self) -> None:
        """Wait until every rank is here, and part. A rank that is lost meanwhile ends this process
        as ever.
        """
        if self._beats is None:
            if self.fsdp is not None and dist.is_initialized():
                dist.destroy_process_group()
            return
        if not self.word:
            self.word = _GONE
        self._closed.set()
        self._beats.join(None if self.word == _GONE else self.patience_s)
        self._beats = None
        with contextlib.suppress(RuntimeError, ValueError):
            dist.destroy_process_group()

    def _wait_until(self, is_so: Callable[[], bool], most_s: float) -> None:
        until = time.monotonic() + most_s
        while not is_so() and time.monotonic() < until:
            time.sleep(BEAT_S / 10)

    # ---- weights that are spread ----

    def apply_fsdp(self, model: nn.Module, how: ShardingSettings) -> None:
        """Leave each rank its rows of the weights, by FSDP2; those of a layer are gathered while it
        computes. All come to the device. Raises `ModelError` where the model can't be spread."""
        from farthing.dist.fsdp import ShardedModel

        self.bring(model.buffers())
        self.fsdp = ShardedModel(model, self.device, self.index, self.n, how, self.bring)
        if self.n > 1:
            self._of_saves = dist.new_group(backend="gloo", timeout=WORDS_TIMEOUT)

    @property
    def is_fsdp(self) -> bool:
        """Whether ranks wait for each other in every layer: all must go through the model
        as often.
        """
        return self.fsdp is not None

    @property
    def trains_rows(self) -> bool:
        """Whether a rank has some rows of the trained weights, and not all of them."""
        return self.fsdp is not None and self.fsdp.trains_rows

    @property
    def shard(self) -> int:
        """Which rows of the trained weights this rank has; 0 where each has all."""
        return self.fsdp.shard if self.fsdp is not None and self.trains_rows else 0

    def trained_of(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The trained weights by name, as plain tensors: whole, or the rows of this rank."""
        if self.fsdp is not None:
            return self.fsdp.local
        return {name: weight for name, weight in model.named_parameters() if weight.requires_grad}

    def within(self, compute: Callable[[], Any]) -> Any:
        """What `compute` gives, with the root's weights whole."""
        if self.fsdp is None:
            return compute()
        with self.computing():
            return self.fsdp.within(compute)

    @contextlib.contextmanager
    def computing(self) -> Iterator[None]:
        """What fails may have failed because another rank is gone: then the beat ends this process
        in order."""
        try:
            yield
        except RuntimeError as error:
            if self.n > 1 and not is_out_of_memory(error):
                self._wait_until(lambda: False, 4 * BEAT_S)
            raise

    def rows_of(self, name: str) -> tuple[int, int] | None:
        """(first, end) of the rows that this rank has of a trained weight, or of the state
        `weight|key`; None: all.
        """
        return None if self.fsdp is None else self.fsdp.rows_of(name.partition("|")[0])

    def shared_checkpoints(self) -> Shared | None:
        """This rank's part in checkpoints, where ranks have rows of what is saved."""
        if self.fsdp is None or not self.trains_rows:
            return None
        place = self.is_first, self.fsdp.shard, self.fsdp.n_shards, self.fsdp.is_copy
        return Shared(*place, self.rows_of, self.gather_for_save)

    def clip(self, weights: Sequence[Tensor], most: float) -> Tensor:
        """Scale gradients down to a norm of `most` over all ranks' rows; the norm before."""
        found = [each.grad for each in weights if each.grad is not None]
        if not self.trains_rows:
            norms = torch._foreach_norm(found, 2, torch.float32)  # bf16 has three digits
            norm = torch.linalg.vector_norm(torch.stack(norms))
            torch.nn.utils.clip_grads_with_norm_(weights, most, norm)
            return norm
        assert self.fsdp is not None
        squares = torch.zeros(self.n, dtype=torch.float64, device=self.device)
        if not self.fsdp.is_copy:
            squares[self.index] = sum(
                torch.linalg.vector_norm(each, dtype=torch.float64) ** 2 for each in found
            )
        norm = self.sum_up(squares).sum().sqrt().float()
        torch.nn.utils.clip_grads_with_norm_(weights, most, norm)
        return norm

    def share_overflow(
        self, scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer
    ) -> None:
        """Where a rank's gradients in fp16 have overflowed, those of all have."""
        if self.trains_rows and self.n > 1 and scaler.is_enabled():
            state = scaler._per_optimizer_states[id(optimizer)]
            for found in state["found_inf_per_device"].values():
                dist.all_reduce(found, dist.ReduceOp.MAX)

    def gather_for_save(self, value: Any) -> list[Any]:
        """`gather` for the thread that writes checkpoints. Raises `OSError` where a rank is
        gone.
        """
        try:
            return self._gathered(value, self._of_saves) if self.n > 1 else [value]
        except RuntimeError as error:
            raise OSError(f"another rank of {self.n} is gone") from error

    # ---- words ----

    @property
    def others_ask_to_leave(self) -> bool:
        """Whether any rank was asked to leave, as of a moment ago: no two ranks need see it at the
        same time. Whoever asks is at work.
        """
        self._stillness.poll()
        return self._others_ask

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """What fails in here fails because another rank is gone: wait for the beat, which ends this
        process in order.
        """
        self._stillness.is_waiting = True
        with contextlib.nullcontext() if self.meter is None else self.meter.span("ranks"):
            try:
                yield
            except RuntimeError as error:
                if is_out_of_memory(error):
                    raise self.no_room() from error
                self._wait_until(lambda: False, self.patience_s + 2 * BEAT_S)
                raise RankLostError(
                    f"another rank of {self.n} does not answer: {str(error).splitlines()[0][:200]}",
                    to_do="run the same command again: it resumes from the last checkpoint",
                ) from error
            finally:
                self._stillness.is_waiting = False

    def agree(self, word: int, marks: Sequence[int] = ()) -> tuple[int, list[int]]:
        """(the worst of all ranks' words, the largest of all ranks' marks); marks are as many on
        every rank.
        """
        if self.n == 1:
            return word, list(marks)
        words = torch.tensor([word, *marks], dtype=torch.int32)
        with self.together():
            dist.all_reduce(words, dist.ReduceOp.MAX, group=self._to_all)
        worst, *largest = words.tolist()
        return worst, largest

    def least(self, number: int) -> int:
        """The least of all ranks' numbers."""
        return min(self.gather(number))

    @contextlib.contextmanager
    def all_or_none(self) -> Iterator[None]:
        """Where a rank has no memory left in the block, or was asked to leave, the block has failed
        on every rank. Raises
        `RunInterruptedError`, `torch.OutOfMemoryError`."""
        word = GO_ON
        try:
            yield
        except Exception as error:
            word = self.word_for(error)
        refuse(self.agree(word)[0])

    def word_for(self, error: Exception) -> int:
        """What to tell the others of an error; raises it where there are none, or they can do
        nothing about it.
        """
        if self.n == 1 or not (isinstance(error, RunInterruptedError) or is_out_of_memory(error)):
            raise error
        if self.is_fsdp and is_out_of_memory(error):
            raise self.no_room() from error  # the others are in a layer, and wait for its weights
        return LEAVE if isinstance(error, RunInterruptedError) else NO_ROOM

    def no_room(self) -> FarthingError:
        """What to raise where memory runs out and the others can't take the step again with this
        rank.
        """
        if not self.leave_less():
            return HardwareError(
                f"rank {self.index} has no memory left for one example with every layer"
                " computed again",
                where="where.strategy",
                to_do="lower data.max_length, use more or larger GPUs, or method: lora",
            )
        return NoRoomLeft(
            f"rank {self.index} has no memory left in a step that the other ranks can't take again",
            to_do="run the same command: it resumes from the last save with smaller micro-batches",
        )

    def tell_all(self, value: Any) -> Any:
        """The first rank's plain value, through JSON, on every rank. What others give is not looked
        at.
        """
        return value if self.n == 1 else self.gather(value if self.is_first else None)[0]

    def gather(self, value: Any) -> list[Any]:
        """The plain values of all ranks, by rank. A stack of bytes each: nothing is pickled."""
        if self.n == 1:
            return [value]
        with self.together():
            return self._gathered(value, self._to_all)

    def _gathered(self, value: Any, group: Any) -> list[Any]:
        own = json.dumps(value).encode()
        sizes = torch.zeros(self.n, dtype=torch.int64)
        sizes[self.index] = len(own)
        dist.all_reduce(sizes, group=group)
        texts = [torch.empty(int(sizes.max()), dtype=torch.uint8) for _ in range(self.n)]
        mine = torch.zeros(int(sizes.max()), dtype=torch.uint8)
        mine[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        dist.all_gather(texts, mine, group=group)
        return [
            json.loads(bytes(text[:size].tolist()))
            for text, size in zip(texts, sizes.tolist(), strict=True)
        ]

    # ---- tensors ----

    def sum_up(self, figures: Tensor) -> Tensor:
        """Elementwise sums over all ranks, on the device; each entry must be 0 on all ranks but one
        to be exact.
        """
        if self.n > 1:
            with self.together():
                dist.all_reduce(figures)
        return figures

    def link_bytes_per_s(self) -> float:
        """What each rank sends to others in a second, by one all-reduce of 64 MB behind a short
        one.
        """
        for n in (1 << 10, 1 << 24):
            numbers = torch.zeros(n, device=self.device)
            self.agree(GO_ON)  # all begin
            began_s = time.monotonic()
            self.sum_up(numbers)
            float(numbers[0])  # the device is waited for
            took_s = time.monotonic() - began_s
        return 2 * (self.n - 1) / self.n * numbers.nbytes / max(self.gather(took_s))

    def bring(self, tensors: Iterable[Tensor]) -> None:
        """Bring whole tensors to the device with the values, and in the precision, that the first
        rank has.
        """
        found = list(tensors)
        dtypes = self.tell_all([str(each.dtype).removeprefix("torch.") for each in found])
        for tensor, dtype in zip(found, dtypes, strict=True):
            if self.is_first:
                tensor.data = tensor.data.to(self.device).contiguous()
            else:
                kind = getattr(torch, dtype)
                tensor.data = torch.empty(tensor.shape, dtype=kind, device=self.device)
            if self.n > 1 and tensor.numel():
                with self.together():
                    dist.broadcast(tensor.data.view(-1).view(torch.uint8), 0)

    def bring_together(self, parts: Mapping[str, CheckpointPart]) -> None:
        """Make every rank's state that of the first rank."""
        if self.n == 1:
            return
        for name in sorted(parts):
            if self.trains_rows and name in ("model", "optimizer"):
                continue  # each has restored its own rows
            tensors, values = parts[name].state()
            names, values = self.tell_all([sorted(tensors), values])
            if names != sorted(tensors):
                raise RankLostError(
                    f"the {name} of rank {self.index} has other tensors than that of the first"
                    " rank",
                    to_do="use the same versions and the same job everywhere",
                )
            for each in names:  # in its place: there may be no room for another copy of all
                tensors[each] = whole = tensors[each].contiguous()
                with self.together():
                    dist.broadcast(whole.view(torch.uint8) if whole.ndim else whole, 0)
            if not self.is_first:
                parts[name].restore(tensors, values)


def refuse(word: int) -> None:
    """Raise what the worst of all ranks' words stands for. Raises `RunInterruptedError`,
    `torch.OutOfMemoryError`.
    """
    if word == LEAVE:
        raise RunInterruptedError("a rank was asked to leave")
    if word == NO_ROOM:
        raise torch.OutOfMemoryError("a rank has no memory left")
