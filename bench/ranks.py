"""Several processes against one: the same gradients, as many collectives, the same bits after
kills.

    python bench/ranks.py --json [--seeds 3] [--first-seed 0]

Gradients of the first step: for each task, method, tied or untied embeddings, uneven lengths, and
fewer examples than ranks; the worst relative error of any weight against one process. Bits: a seed
draws a job, on how many processes it begins, which of them is killed and when, and on how many it
goes on; one sha256 of weights, moments and losses is wanted of all, and of 1, 2, 3 and 4 processes
undisturbed, half of them with frozen weights that are spread. Full training whose weights are
spread: killed and resumed in the same way, its losses and last weights are to be those of one
process to rounding. CPU only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from farthing.run.group import Elastic
from farthing.tiny import demo_rows, write_jsonl
from forked import make_job, sha256_of, start_of
from small_models import make_model_folder

TASKS = {"llama": "causal-lm", "t5": "seq2seq", "bert": "classification"}
TOLERANCE = 1e-5


COLLECTIVES = (
    "all_reduce",
    "all_to_all_single",
    "broadcast",
    "all_gather_into_tensor",
    "all_gather_single",
    "reduce_scatter_tensor",
    "reduce_scatter_single",
)
"""Those that carry weights and gradients; some are names of torch 2.13, some of before."""


def note_gradients(folder: str, rank: int, attempt: int) -> None:
    """In a rank: keep the gradients of the first step as they are before clipping, and the number
    of collectives on them.
    """
    import torch
    import torch.distributed as dist
    from safetensors.torch import save_file

    from farthing.train.step import Step

    update, done = Step.update, []
    calls: list[
        str
    ] = []  # appended to: the thread that beats goes through here too, and an addition could be lost  # noqa: E501

    def counted(name: str) -> None:
        plain = getattr(dist, name, None)

        def call(*arguments: Any, **more: Any) -> Any:
            given = (*arguments, *more.values())
            if not done and any(
                isinstance(each, torch.Tensor) and each.is_floating_point() for each in given
            ):
                calls.append(name)
            return plain(*arguments, **more)

        setattr(dist, name, call)

    for name in COLLECTIVES:
        counted(name)

    def noted(steps: Any, *arguments: Any) -> Any:
        if not done:
            done.append(1)
            weights = steps.ranks.trained_of(steps.forward.model)
            found = {
                name: weight.grad.clone()
                for name, weight in weights.items()
                if weight.grad is not None
            }
            save_file(found, Path(folder) / f"gradients-{rank}.safetensors")
            (Path(folder) / f"collectives-{rank}").write_text(str(steps.ranks.n_sums + len(calls)))
        return update(steps, *arguments)

    Step.update = noted


def rows_for(family: str, n: int, seed: int) -> list[dict[str, str]]:
    """Rows of a task, of very uneven lengths."""
    drawn = random.Random(seed)
    rows = demo_rows(n, seed)
    for row in rows:
        row["completion"] = " ".join([row["completion"]] * drawn.choice((1, 1, 1, 2, 5)))
    if family == "t5":
        return [{"input": row["prompt"], "target": row["completion"]} for row in rows]
    if family == "bert":
        return [
            {"text": row["prompt"] + row["completion"], "label": row["prompt"].split(";")[0]}
            for row in rows
        ]
    return rows


def gradient_cases() -> Iterator[dict[str, Any]]:
    """What is compared: (family, method, tied, processes, examples of a step)."""
    for family, method, tied in itertools.product(TASKS, ("full", "lora"), (True, False)):
        if family != "bert" or tied:  # a classifier has no output embeddings
            ways = "replicated", "sharded" if method == "full" else "frozen sharded"
            for way, (n, batch) in itertools.product(ways, ((2, 13), (3, 2))):
                yield {
                    "way": way,
                    "family": family,
                    "method": method,
                    "tied": tied,
                    "n": n,
                    "batch": batch,
                }


def compare_gradients(case: dict[str, Any], folder: Path, seed: int) -> dict[str, Any]:
    """The worst relative error of a weight's gradient on every rank, and the collectives of each."""  # noqa: E501
    rows = rows_for(case["family"], 40, seed)
    base = folder / "base"
    make_model_folder(
        base, (" ".join(row.values()) for row in rows), case["family"], hidden=32, layers=2
    )
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": case["tied"]}))
    method = (
        {"name": case["method"]}
        if case["method"] == "full"
        else {"name": "lora", "lora_r": 2, "lora_dropout": 0.0}
    )
    for n in (1, case["n"]):
        place = folder / str(n)
        make_job(
            place,
            base,
            seed,
            task=TASKS[case["family"]],
            method=method,
            where={
                "gpus": n,
                "same_bits": n > 1 and case["way"] != "sharded",
                "strategy": "fsdp" if n > 1 and case["way"] != "replicated" else "ddp",
            },
            train={
                "max_steps": 1,
                "global_batch_size": case["batch"],
                "max_grad_norm": 0,
                "micro_batch_tokens": 200,
                "eval_strategy": "no",
                "predict_with_generate": False,
            },
            data={"eval": None},
        )
        write_jsonl(place / "data.jsonl", rows)
        code = Elastic(n, start_of(place, note_gradients, str(place)), lambda text: None).wait()
        assert code == 0, (place / "out.txt").read_text()[-2000:]
    return {**case, **_difference(folder / "1", folder / str(case["n"]), case["n"], case["way"])}


def _difference(alone: Path, together: Path, n: int, way: str) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file

    wanted = load_file(alone / "gradients-0.safetensors")
    ranks = [load_file(together / f"gradients-{rank}.safetensors") for rank in range(n)]
    if way == "sharded":  # each has rows
        ranks = [{name: torch.cat([each[name] for each in ranks]) for name in ranks[0]}]
    worst, has_same = 0.0, True
    least = 1e-6 * max(
        float(each.abs().max()) for each in wanted.values()
    )  # below are sums that should be 0
    for found in ranks:
        has_same = has_same and found.keys() == wanted.keys()
        for name in wanted.keys() & found.keys():
            scale = max(float(wanted[name].abs().max()), least)
            worst = max(worst, float((found[name] - wanted[name]).abs().max()) / scale)
    n_sums = [int((together / f"collectives-{rank}").read_text()) for rank in range(n)]
    is_ok = has_same and worst <= TOLERANCE and len(set(n_sums)) == 1 and n_sums[0] > 0
    return {"worst": worst, "same_weights": has_same, "collectives": n_sums, "ok": is_ok}


def kill_at(folder: str, victim: int, step: int, rank: int, attempt: int) -> None:
    """In a rank: the victim ends in the middle of a step of the first attempt."""
    from farthing.train.step import Step

    take = Step.take

    def taken(steps: Any, number: int) -> Any:
        if rank == victim and number == step and not (Path(folder) / "killed").exists():
            (Path(folder) / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return take(steps, number)

    Step.take = taken


def compare_bits(seed: int, folder: Path) -> dict[str, Any]:
    """One digest of runs on 1 to 4 processes, and of one that loses a process and goes on with
    another number.
    """
    drawn = random.Random(seed)
    n_steps = drawn.randint(5, 12)
    train = {
        "max_steps": n_steps,
        "global_batch_size": drawn.randint(2, 17),
        "micro_batch_tokens": drawn.randint(60, 300),
        "save_steps": drawn.randint(1, 4),
        "eval_steps": drawn.randint(2, 5),
    }
    digests, base = {}, folder / "base"
    for n in (1, 2, 3, 4):
        strategy = "fsdp" if n in (2, 4) and seed % 2 else "ddp"
        make_job(
            folder / str(n),
            base,
            seed,
            where={"gpus": n, "strategy": strategy, "same_bits": True},
            train=train,
        )
        code = Elastic(n, start_of(folder / str(n)), lambda text: None).wait()
        assert code == 0, (folder / str(n) / "out.txt").read_text()[-2000:]
        digests[n] = sha256_of(folder / str(n) / "run", n_steps)
    begins, goes_on = drawn.randint(2, 4), drawn.randint(1, 4)
    victim, step = drawn.randrange(begins), drawn.randrange(1, n_steps)
    place = folder / "killed"
    make_job(place, base, seed, where={"gpus": begins, "same_bits": True}, train=train)
    first = Elastic(begins, start_of(place, kill_at, str(place), victim, step), lambda text: None)
    first.group.wait()  # nothing goes on by itself here: another number does
    code = Elastic(goes_on, start_of(place), lambda text: None).wait()
    digests["killed"] = sha256_of(place / "run", n_steps) if code == 0 else f"ended with {code}"
    said = (
        f"began on {begins}, rank {victim} killed in step {step + 1} of {n_steps}, went on with"
        f" {goes_on}"
    )
    return {"seed": seed, "said": said, "sha256": digests[1], "ok": len(set(digests.values())) == 1}


def compare_spread(seed: int, folder: Path) -> dict[str, Any]:
    """Full training on one process, and spread over some, of which one is killed, then over another
    number: how far apart.
    """
    from farthing.run.parts import read_part

    drawn = random.Random(seed + 1000)
    n_steps, base = drawn.randint(5, 10), folder / "base"
    train = {
        "max_steps": n_steps,
        "global_batch_size": drawn.randint(2, 13),
        "micro_batch_tokens": drawn.randint(60, 300),
        "save_steps": drawn.randint(1, 3),
        "eval_steps": drawn.randint(2, 5),
        "learning_rate": 0.001,
        "optim": drawn.choice(("adamw_torch", "adamw_torch_fused", "adamw_torch_offload", "sgd")),
    }
    begins, goes_on = drawn.randint(2, 4), drawn.randint(1, 4)
    victim, step = drawn.randrange(begins), drawn.randrange(1, n_steps)
    where = {"strategy": "fsdp", "reshard_after_forward": drawn.random() < 0.5}
    make_job(
        folder / "alone",
        base,
        seed,
        method={"name": "full", "lora_r": None, "lora_dropout": None},
        where={"gpus": None},
        train=train,
    )
    assert Elastic(1, start_of(folder / "alone"), lambda text: None).wait() == 0
    place = folder / "spread"
    make_job(
        place,
        base,
        seed,
        method={"name": "full", "lora_r": None, "lora_dropout": None},
        where={**where, "gpus": begins},
        train=train,
    )
    Elastic(
        begins, start_of(place, kill_at, str(place), victim, step), lambda text: None
    ).group.wait()
    code = Elastic(goes_on, start_of(place), lambda text: None).wait()
    worst = float("inf")
    if code == 0:
        saves = [
            sorted((each / "run/checkpoints").glob(f"step-{n_steps:08d}-*"))[-1]
            for each in (folder / "alone", place)
        ]
        one, other = (read_part(save, "model") for save in saves)
        worst = max(
            float((one[name] - other[name]).abs().max() / one[name].abs().max()) for name in one
        )
    said = (
        f"{train['optim']}, {begins} ranks, {victim} killed in step {step + 1} of {n_steps}, then"
        f" {goes_on}: {code}"
    )
    return {"seed": seed, "said": said, "worst": worst, "ok": worst < 1e-3}


def main() -> int:
    """Everything that was asked for; 1 where something differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    result: dict[str, Any] = {"gradients": [], "bits": [], "spread": []}
    with tempfile.TemporaryDirectory(prefix="farthing-ranks-") as top:
        for number, case in enumerate(gradient_cases()):
            result["gradients"].append(
                compare_gradients(case, Path(top) / f"gradients-{number}", arguments.first_seed)
            )
            print(json.dumps(result["gradients"][-1]), file=sys.stderr, flush=True)
        for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
            result["bits"].append(compare_bits(seed, Path(top) / f"bits-{seed}"))
            print(json.dumps(result["bits"][-1]), file=sys.stderr, flush=True)
            result["spread"].append(compare_spread(seed, Path(top) / f"spread-{seed}"))
            print(json.dumps(result["spread"][-1]), file=sys.stderr, flush=True)
    n_failed = sum(
        not each["ok"] for each in [*result["gradients"], *result["bits"], *result["spread"]]
    )
    result["n_failed"] = n_failed
    print(json.dumps(result) if arguments.json else f"{n_failed} failed")
    return 1 if n_failed else 0


if __name__ == "__main__":
    sys.exit(main())
