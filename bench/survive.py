"""Kill a training run at random moments, again and again, and hold the result against one that was
left alone.

    python bench/survive.py --seeds 50 --first-seed 0 [--data FILE.jsonl] [--anywhere]
    [--new-machine [EVERY]]
                            [--next-day] [--spawn] [--full-determinism] [--json]

For each seed a small model is trained twice: once uninterrupted, once through a chain of 3 to 5
SIGKILLs, then to the end by the same command. Most kills are aimed at a part of the run (a training
step, a save, an evaluation, tokenization, with a store an upload), the others strike at any time;
with `--anywhere` all do. Where each struck is told by the run itself. Dropout is on. Equal means to
the bit: every logged (step, example ids, loss, gradient norm, metrics), the final weights, the
optimizer's state and every file of the exported model, the bill on its card apart. A last run of
the same command must train nothing. Exits with 1 if anything differs.

The attempts are forked from a parent that has the libraries imported, so that a kill costs a second
and not ten;
`--spawn` starts a fresh Python each time instead. With `--new-machine` (in every EVERYth run) each
kill takes the machine: the next attempt starts on an empty disk, from a store (a folder beside it)
alone, with another path of everything else (job, model, data, cache, run folder, home), as another
user and under another hostname.

With `--next-day` chats are learned by a template that asks for the date, and after each kill it is
the next day and the token cache is empty.

"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import date, timedelta
from importlib.metadata import version
from pathlib import Path
from typing import Any

from common import command, seeds_of, write_job
from farthing.tiny import demo_rows, write_jsonl
from kills import PLACES, Forked, Whereabouts, finish, kill_at, moments, patched
from small_models import make_model_folder

N_STEPS = 18
JOB = """
model: {init: random}
data:
  {eval_fraction: 0.2, max_length: 128, max_target_length: 24, max_train_samples: 64,
  max_eval_samples: 8, max_bad_rows: 0.2}
method: {lora_r: 4, lora_dropout: 0.1}
train:
  {max_steps: 18, global_batch_size: 8, per_device_train_batch_size: 3, learning_rate: 0.003,
  save_steps: 2, save_total_limit: 3, eval_steps: 6}
"""
PACKAGES = ("torch", "transformers", "peft", "safetensors", "numpy")
DATED = "dated.jinja"
MORE_KEYS: dict[str, bool] = {}
"""Of `train` in every job."""
FAMILY = {
    **{"causal-lm": "llama", "seq2seq": "t5", "classification": "bert"},
    **dict.fromkeys(("dpo", "kto", "reward"), "llama"),
}


@dataclass
class Chain:
    """What happened to one seed."""

    seed: int
    task: str
    method: str
    new_machine: bool = False
    kills: list[int] = field(default_factory=list)
    """Step that each kill struck in, as far as the log tells."""
    places: list[str] = field(default_factory=list)
    """Part of the run that each kill struck in."""
    resumed_at: list[int] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    failure: str = ""
    """Last words of an attempt that could not go on."""
    went_further: bool = False
    """Whether the same command, once the run was finished, changed something."""
    repeated: int = 0
    skipped: int = 0
    """Steps that the finished log has twice, and has not."""

    @property
    def outcome(self) -> str:
        """In a word or two."""
        return "could not go on" if self.failure else "differs" if self.differences else "identical"

    @property
    def has_survived(self) -> bool:
        """Whether nothing was lost."""
        return self.outcome == "identical" and not (
            self.went_further or self.repeated or self.skipped
        )


def prepare(where: Whereabouts) -> None:
    """Import what an attempt needs, and have it say where it is."""
    modules = ["farthing.cli", "farthing.train.run", "peft", "transformers.integrations.peft"]
    modules += [f"transformers.models.{each}.modeling_{each}" for each in set(FAMILY.values())]
    for module in modules:
        importlib.import_module(module)
    with contextlib.suppress(ImportError):  # seq2seq jobs want it, and say where it is missing
        importlib.import_module("rouge_score.rouge_scorer")
    say_where(where)


def train(job: Path) -> int:
    """`farthing train`."""
    import torch

    from farthing.cli import main

    torch.set_num_threads(1)  # the model is tiny: a second thread would only wait
    return main(["train", str(job)])


def steps_of(run: Path) -> list[int]:
    """The steps in a run's log."""
    return [row["step"] for row in _rows(run / "log.jsonl", "examples")]


def resumed_at(run: Path) -> list[int]:
    """The first step of each attempt."""
    from farthing.run.accounts import read_ledger

    accounts = read_ledger(run / "ledger.jsonl").accounts
    return [account.first_step for account in accounts if account.began]


def say_where(where: Whereabouts) -> None:
    """Have this process note in `where` what its meter, its saves and its uploads are at."""
    from farthing.run import accounts, checkpoint
    from farthing.run import ledger as meter
    from farthing.run import mirror as mirror

    spans = {
        "tokenize": "tokenization",
        "checkpoint": "save",
        "evaluation": "evaluation",
        "export": "export",
    }
    spans |= {"start_up": "start", "load_model": "start", "restore": "restore"}
    spans |= dict.fromkeys(accounts.WORK, "training step")

    def switched(switch: Callable[..., str], of: Any, name: str) -> str:
        where.enter(spans.get(name, "between"))
        return switch(of, name)

    def meanwhile(place: str) -> Callable[..., Any]:
        def around(function: Callable[..., Any], *args: Any) -> Any:
            with where.meanwhile(place):
                return function(*args)

        return around

    patched(meter.Meter, "enter", switched)
    patched(checkpoint, "commit_folder", meanwhile("save"))
    patched(mirror.Mirror, "send", meanwhile("upload"))


def result_of(run: Path) -> dict[str, bytes | str]:
    """Everything about a finished run that has to be equal, by name."""
    rows = []
    for line in (run / "log.jsonl").read_text("utf-8", errors="replace").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:  # a bit of it was flipped
            rows.append({"damaged": line})
    newest = max((run / "checkpoints").glob("step-*"), key=lambda path: path.name[:13])
    result: dict[str, bytes | str] = {
        f"log line {index}": json.dumps(row) for index, row in enumerate(rows)
    }
    exported = [path for path in (run / "model").rglob("*") if path.is_file()]
    for path in sorted([*newest.glob("*.safetensors"), newest / "state.json", *exported]):
        result[f"{path.parent.name[:13]}/{path.name}"] = path.read_bytes()
    if (
        adapter := run / "model" / "adapter_config.json"
    ).exists():  # it names the folder of its base, as peft does
        names = json.loads(adapter.read_text("utf-8")) | {"base_model_name_or_path": ""}
        files = json.loads((run / "model" / "manifest.json").read_text("utf-8"))["files"]
        result["model/adapter_config.json"] = json.dumps(names)
        result["model/manifest.json"] = json.dumps(
            [file for file in files if file["name"] != adapter.name]
        )
    card = (run / "model" / "README.md").read_text("utf-8")
    card = card[: card.index("\n## Receipt\n")]  # from there on it is the bill, which kills raise
    result["model/README.md"] = card.replace(f"# {run.name}\n", "")
    return result


def differences(left: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Names of what differs, at most ten."""
    return [name for name in {**left, **right} if left.get(name) != right.get(name)][:10]


def _rows(path: Path, key: str) -> list[dict[str, Any]]:
    """Lines of a JSONL file that have a key; one torn by a kill is no line."""
    rows = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        rows += [row] if key in row else []
    return rows


# ---- a chain of kills ----


def _attempt(job: Path, home: Path | None, where: Path | None) -> Any:
    """An attempt at `job`: a fork of this process, or a new one that tells `where` it is."""
    words = job.with_suffix(".out")
    if where is None:
        return Forked(lambda: [become(home), train(job)][1], words)  # type: ignore[list-item, return-value]
    command = [sys.executable, __file__, "--attempt", str(job), "--where", str(where)]
    command += ["--home", str(home)] if home else []
    with open(words, "wb") as output:
        return subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)


def survive(
    seed: int,
    folder: Path,
    where: Whereabouts,
    data: Path | None = None,
    *,
    spawn: bool = False,
    new_machine: bool = False,
    anywhere: bool = False,
    next_day: bool = False,
) -> Chain:
    """Run one seed in `folder`; the chain says what differed (nothing, if all is well)."""
    folder.mkdir(parents=True, exist_ok=True)
    train_file, task = _chats(folder, seed) if next_day else _data(folder, data, seed)
    method = ["full", "lora"][seed // 3 % 2]
    with open(train_file, encoding="utf-8-sig", errors="replace") as file:
        some_text = list(itertools.islice(file, 500))
    # in a child: training a tokenizer starts threads, and a process with threads must not be forked
    # from
    _in_a_child(
        lambda: make_model_folder(
            folder / "model", some_text, FAMILY[task], hidden=32, layers=2, dropout=0.1
        )
    )
    alone = _job(folder, "alone", train_file, task, method, seed)

    def job_on_machine(number: int) -> Path:
        """The killed run's job file; on a machine of its own where each kill takes it."""
        if not new_machine:
            return _job(folder, "killed", train_file, task, method, seed)
        home = folder / f"machine-{number}" / f"user{number}"
        shutil.copytree(folder / "model", home / "model")
        (home / f"rows{number}").mkdir()
        shutil.copy(train_file, data_there := home / f"rows{number}" / train_file.name)
        return _job(home, f"run{number}", data_there, task, method, seed, folder / "store")

    killed = job_on_machine(0)
    chain = Chain(seed, task, method, new_machine)

    def start(job: Path) -> Any:
        where.begin()
        if next_day:
            today = date(2026, 2, 26) + timedelta(days=len(chain.kills))
            os.environ["FARTHING_TODAY"] = today.isoformat()
        home = job.parent if job != alone and new_machine else None
        return _attempt(job, home, folder.parent / "where" if spawn else None)

    def has_ended_well(job: Path) -> bool:
        code = finish(start(job))
        chain.failure = _last_words(job, code) if code else ""
        return code == 0

    started = time.monotonic()
    if not has_ended_well(alone):
        return chain
    duration_s = time.monotonic() - started
    for number, moment in enumerate(moments(seed, with_upload=new_machine, anywhere=anywhere), 1):
        run = killed.with_suffix("")
        cache = killed.parent / "cache" / run.name
        if moment.aim == "tokenization":
            shutil.rmtree(cache, ignore_errors=True)  # else nothing is tokenized twice
        left_s = duration_s * max(0.2, 1 - len(steps_of(run)) / N_STEPS)
        attempt = start(killed)
        if not kill_at(moment, left_s, attempt, where):
            if finish(attempt) != 0:
                chain.failure = _last_words(killed, finish(attempt))
                return chain
            break  # it had reached the end before the moment came
        chain.kills.append(len(steps_of(run)))
        chain.places.append(where.now())
        if new_machine:
            shutil.rmtree(killed.parents[1])
            killed = job_on_machine(number)
        elif next_day:
            shutil.rmtree(cache, ignore_errors=True)
    if not has_ended_well(killed):
        return chain
    run = killed.with_suffix("")
    before, steps = result_of(run), Counter(steps_of(run))
    chain.differences = differences(result_of(folder / "alone"), before)
    chain.repeated = sum(count - 1 for count in steps.values())
    chain.skipped = len(set(range(1, N_STEPS + 1)) - set(steps))
    chain.resumed_at = resumed_at(run)
    if has_ended_well(killed):
        chain.went_further = result_of(run) != before
    return chain


LEASE_S = 4.0


def become(home: Path | None) -> None:
    """Have this process see another user's home, name and hostname, where one is given."""
    if home is not None:
        from farthing.run import mirror as replica

        # a machine that is gone is waited for: not for a minute each time
        object.__setattr__(replica.PACE, "lease_s", LEASE_S)
        object.__setattr__(replica.PACE, "renew_s", LEASE_S / 4)
        os.environ |= {"HOME": str(home), "USER": home.name, "LOGNAME": home.name}
        socket.gethostname = lambda: home.parent.name  # type: ignore[assignment]


def _data(folder: Path, data: Path | None, seed: int) -> tuple[Path, str]:
    """The file to train on and its task; without `data` the tasks take turns."""
    if data is not None:
        with open(data, encoding="utf-8-sig") as file:
            columns = set(json.loads(file.readline()))
        if {"text", "label"} <= columns:
            return data, "classification"
        if {"chosen", "rejected"} <= columns:
            return data, ("dpo", "reward")[seed % 2]
        if "label" in columns:
            return data, "kto"
        return data, "seq2seq" if {"input", "target"} <= columns else "causal-lm"
    task = list(FAMILY)[seed % len(FAMILY)]
    rows: list[dict[str, Any]] = []
    for row in demo_rows(80, seed):
        if task == "classification":
            rows.append(
                {"text": row["prompt"], "label": row["completion"].split(" food")[0].split()[-1]}
            )
        elif task == "seq2seq":
            rows.append({"input": row["prompt"], "target": row["completion"]})
        elif task == "kto":
            rows.append({**row, "label": len(rows) % 3 != 0})
        elif FAMILY[task] == "llama" and task != "causal-lm":
            words = row["completion"].split()
            other = " " + " ".join(reversed(words))
            rows.append({"prompt": row["prompt"], "chosen": row["completion"], "rejected": other})
        else:
            rows.append(row)
    return write_jsonl(folder / "data.jsonl", rows), task


def _chats(folder: Path, seed: int) -> tuple[Path, str]:
    """Chats, and beside them the template that asks for the date; causal-lm."""
    (folder / DATED).write_text(
        "{{ strftime_now('%A %d %B') }}\n{% for m in messages %}{{ '# ' + m['role'] + '\n' +"
        " m['content'] + eos_token }}{% endfor %}{% if add_generation_prompt %}{{ '# assistant\n'"
        " }}{% endif %}",
        encoding="utf-8",
    )
    roles = (("user", "prompt"), ("assistant", "completion"))
    chats = (
        [{"role": role, "content": row[column]} for role, column in roles]
        for row in demo_rows(80, seed)
    )
    return write_jsonl(folder / "data.jsonl", ({"messages": chat} for chat in chats)), "causal-lm"


def _job(
    folder: Path,
    name: str,
    train_file: Path,
    task: str,
    method: str,
    seed: int,
    store: Path | None = None,
) -> Path:
    template = {"chat_template": str(folder / DATED)} if (folder / DATED).exists() else {}
    return write_job(
        folder,
        JOB,
        name,
        task=task,
        model={"model_name_or_path": str(folder / "model")},
        data={"train": str(train_file), **template},
        method={"name": method},
        train={"seed": seed, **MORE_KEYS},
        output_dir=str(folder / name),
        output_store=store and str(store),
        cache_dir=str(folder / "cache" / name),
    )


def _in_a_child(work: Callable[[], object]) -> None:
    """Do something that only leaves files behind."""
    with tempfile.NamedTemporaryFile() as words:
        if finish(Forked(lambda: [work(), 0][1], Path(words.name))) != 0:  # type: ignore[arg-type, return-value]
            raise SystemExit(f"the model folder could not be made: {words.read().decode()[-500:]}")


def _last_words(job: Path, code: int) -> str:
    words = job.with_suffix(".out").read_text("utf-8", errors="replace").strip()
    return f"exit {code}: {words[-1000:]}"


# ---- the figures ----


def figures(chains: list[Chain], seconds: float) -> dict[str, Any]:
    """What came of all chains."""
    places = Counter(place for chain in chains for place in chain.places)
    n_kills = [len(chain.kills) for chain in chains]
    return {
        "versions": {
            "python": sys.version.split()[0],
            **{name: version(name) for name in PACKAGES},
        },
        "seeds": len(chains),
        "survived": sum(chain.has_survived for chain in chains),
        "lost": sum(not chain.has_survived for chain in chains),
        "identical": sum(chain.outcome == "identical" for chain in chains),
        "differ": sum(chain.outcome == "differs" for chain in chains),
        "could_not_go_on": sum(chain.outcome == "could not go on" for chain in chains),
        "finished_runs_trained_further": sum(chain.went_further for chain in chains),
        "steps_repeated": sum(chain.repeated for chain in chains),
        "steps_skipped": sum(chain.skipped for chain in chains),
        "new_machines": sum(chain.new_machine for chain in chains),
        "kills": sum(n_kills),
        "kills_a_chain": {str(n): n_kills.count(n) for n in sorted(set(n_kills))},
        "kills_by_place": {place: places[place] for place in PLACES if places[place]},
        "seconds": round(seconds, 1),
        "chains": [vars(chain) for chain in chains],
    }


def _line(chain: Chain) -> str:
    verdict = {"identical": "identical", "differs": f"DIFFERS: {'; '.join(chain.differences)}"}.get(
        chain.outcome, f"COULD NOT GO ON: {' | '.join(chain.failure.splitlines())}"
    )
    struck = ", ".join(
        f"{place} ({step})" for place, step in zip(chain.places, chain.kills, strict=True)
    )
    return (
        f"seed {chain.seed}: {chain.task}, {chain.method}{', new machines' * chain.new_machine};"
        f" killed in {struck}; resumed at {chain.resumed_at}:"
        f" {verdict}{', but TRAINED FURTHER when run again' * chain.went_further}"
    )


def main() -> int:
    """The command."""
    parser = command(__doc__)
    parser.add_argument(
        "--data", type=Path, help="train on this JSONL file instead of made-up rows"
    )
    parser.add_argument(
        "--next-day",
        action="store_true",
        help="after each kill it is the next day, the cache empty",
    )
    parser.add_argument(
        "--anywhere", action="store_true", help="aim no kill: all strike at any time"
    )
    parser.add_argument(
        "--full-determinism",
        action="store_true",
        help="on a GPU nothing else gives the same bits twice",
    )
    parser.add_argument("--spawn", action="store_true", help="a fresh Python for each attempt")
    parser.add_argument(
        "--new-machine",
        type=int,
        nargs="?",
        const=1,
        default=0,
        metavar="EVERY",
        help=(
            "in every EVERYth run (1) each kill takes the machine: only a store is left, and every"
            " path is another"
        ),
    )
    for inner in ("--attempt", "--where", "--home"):  # how this file starts itself
        parser.add_argument(inner, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    MORE_KEYS["full_determinism"] = arguments.full_determinism
    chains = []
    if arguments.attempt:
        become(Path(arguments.home) if arguments.home else None)
        prepare(Whereabouts(Path(arguments.where)))
        return train(Path(arguments.attempt))
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="farthing-survive-") as folder:
        where = Whereabouts(Path(folder) / "where")
        if not arguments.spawn:
            prepare(where)
        for seed in seeds_of(arguments):
            new_machine = bool(arguments.new_machine) and seed % arguments.new_machine == 0
            its_folder = Path(folder) / str(seed)
            chains.append(
                survive(
                    seed,
                    its_folder,
                    where,
                    arguments.data,
                    spawn=arguments.spawn,
                    new_machine=new_machine,
                    anywhere=arguments.anywhere,
                    next_day=arguments.next_day,
                )
            )
            shutil.rmtree(its_folder, ignore_errors=True)
            print(_line(chains[-1]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    found = figures(chains, time.monotonic() - started)
    if arguments.json:
        print(json.dumps(found, indent=1))
    else:
        for name, value in found.items():
            if name not in ("chains", "versions"):
                print(f"{name.replace('_', ' '):30} {value}")
        print(
            f"{found['survived']} of {found['seeds']} runs survived {found['kills']} kills,"
            f" {found['seconds']:.0f} s"
        )
    return 0 if found["lost"] == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
