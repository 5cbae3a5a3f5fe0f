"""Canaries: control characters and markup of data, prices, names and errors never reach a terminal,
a log or a page raw.
"""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from desk import Desk
from farthing.cli import main
from farthing.printable import printable, printable_lines
from farthing.report.safe import SafeConsole, escape
from farthing.tiny import demo_rows
from thinned import thinned

CANARY = "a\x1b]0;owned\x07b\r\n\x9b31mfarthing: finished\u202eevil\u2066\x7f[red]c[/red]\u2028d"
STEERING = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029]")


def is_harmless(text: str) -> bool:
    """Nothing that steers, no line that seems to be ours, and markup as it was written."""
    return not STEERING.search(text) and not any(
        line.startswith("farthing: finished") for line in text.splitlines()
    )


def test_what_steers_is_spelt_out_and_everything_else_left():
    assert printable(CANARY) == (
        r"a\x1b]0;owned\x07b\r\n\x9b31mfarthing: finished\u202eevil\u2066\x7f[red]c[/red]\u2028d"
    )
    for honest in ("Übergröße, naïve café", "日本語 🙂 👩‍👩‍👧", "نمی‌خواهم", "a [b] c", ""):
        assert printable(honest) == honest
    assert printable("\ud800") == r"\ud800", "half a pair can't be printed"
    assert printable_lines("a\nb\n    c\rd") == "a\n  b\n    c\\rd"


def test_a_console_prints_colours_of_its_own_alone():
    for console_of, is_safe in ((SafeConsole, True), (Console, False)):
        file = io.StringIO()
        console = console_of(file=file, force_terminal=True, color_system="standard", width=200)
        console.print(f"[red]{escape('x')}[/]\nand \x1b[2J", highlight=False)
        assert "\x1b[31mx" in file.getvalue()
        assert ("\x1b[2J" not in file.getvalue()) == is_safe


def reason(desk: Desk):
    desk.bytes(
        b'{"text": "a"}\n{"text": 3, "text": 4}\n'.replace(
            b'"text": 3, "text"', b'"\\u001b[31m\\r\\n": 3, "\\u001b[31m\\r\\n"'
        )
    )


def columns(desk: Desk):
    desk.rows([{CANARY: "a", "other": "b"}])


def name_of_a_file(desk: Desk):
    desk.set("data", train=f"{CANARY}.jsonl".replace("/", ""))


def kind_of_file(desk: Desk):
    name = CANARY.replace("/", "") + ".xyz"
    desk.bytes(b"a", name)
    desk.set("data", train=name)


def label(desk: Desk):
    desk.classify()
    desk.rows([{"text": "a", "label": "x"}, {"text": "b", "label": "y"}])
    desk.rows([{"text": "a", "label": CANARY}] * 3, "eval.jsonl")
    desk.set("data", eval="eval.jsonl")


def model(desk: Desk):
    desk.values["model"] = f"./{CANARY.replace('/', '')}"


def template(desk: Desk):
    desk.rows(
        [{"messages": [{"role": "user", "content": CANARY}, {"role": "assistant", "content": "b"}]}]
    )
    desk.bytes(b"{{ raise_exception(messages[0].content) }}", "chat.jinja")
    desk.set("data", chat_template="chat.jinja")


def key(desk: Desk):
    desk.values[CANARY] = 1


SPOILS = [reason, columns, name_of_a_file, kind_of_file, label, model, template, key]


@pytest.mark.parametrize("spoil", thinned(SPOILS, 9), ids=[spoil.__name__ for spoil in SPOILS])
def test_refusals_repeat_nothing_that_steers(spoil, desk, run):
    spoil(desk)
    for verb in ("train", "plan", "doctor"):
        said = run(verb=verb)
        assert said.code == 2 or verb != "train", said
        assert is_harmless(said.out), repr(said.out)
        assert is_harmless(said.err), repr(said.err)


def test_a_run_says_names_as_they_are_spelt(desk, run, cli):
    name = "[red]" + CANARY.replace("/", "") + ".jsonl"
    lines = "".join(
        f'{{"prompt": "{row["prompt"]}", "completion": " x", "[red]\\u001b[0m": 1}}\n'
        for row in demo_rows(60)
    )
    desk.bytes((lines + '{"prompt": \n').encode(), name)
    desk.set("data", train=name, max_bad_rows=0.1)
    desk.values["output_dir"] = "run[bold]\x1b[31m"
    desk.values["model"] = {**desk.values["model"]}
    said = run(code=0)
    assert is_harmless(said.out + said.err), repr(said.out)
    assert r"[red]a\x1b]0;owned" in said.out
    assert r"`[red]\x1b[0m`" in said.out
    assert r"run[bold]\x1b[31m" in said.out.replace("\n", "")
    cli("report", desk.folder / desk.values["output_dir"])
    card = (desk.folder / desk.values["output_dir"] / "model/README.md").read_text(encoding="utf-8")
    assert not STEERING.search(card)
    assert r"# run[bold]\x1b[31m" in card


def test_prices_of_others_steer_no_table_and_no_page(desk, run, cli):
    prices = desk.folder / "prices.csv"
    bad = '"x\x1b[31m\x9b1m\u202e[red]<script>"'
    prices.write_text(
        "provider,instance,gpu,n_gpus,region,zone,kind,unit,usd,source,date\n"
        f"{bad},{bad},RTX 4090,1,{bad},,on-demand,machine_hour,0.4,{bad},2026-11-01\n",
        encoding="utf-8",
    )
    said = run("--prices", str(prices), "--html", "plan.html", verb="plan")
    assert "x\\x1b[31m" in said.out, said
    assert is_harmless(said.out + said.err)
    page = (desk.folder / "plan.html").read_text()
    assert not STEERING.search(page)
    assert "<script" not in page
    assert "x\\x1b[31m" in page
    shown = cli.out("prices", "--prices", prices)
    assert "x\\x1b[31m" in shown
    assert is_harmless(shown)


def test_a_crash_and_a_wrong_argument_are_told_without_it(desk, run, monkeypatch, capsys):
    import farthing.config.preflight

    def crash(*_, **__):
        raise ZeroDivisionError(CANARY)

    monkeypatch.setattr(farthing.config.preflight, "look_over", crash)
    said = run(code=1)
    assert "crashed: ZeroDivisionError" in said.err
    assert is_harmless(said.err), repr(said.err)
    for argv in (["train", "job.yaml", CANARY], [CANARY], ["plan", "job.yaml", "--limit", CANARY]):
        with pytest.raises(SystemExit):
            main(argv)
        assert is_harmless(capsys.readouterr().err)


def test_several_problems_of_a_job_each_have_lines_of_their_own(desk, run):
    desk.values["lerning"] = 1
    desk.values["speed"] = 2
    said = run()
    starts = [line.split(":")[0] for line in said.err.splitlines() if not line.startswith(" ")]
    assert [Path(start).name for start in starts] == ["farthing", "job.yaml"]
