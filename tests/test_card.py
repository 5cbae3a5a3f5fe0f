"""The card and the receipt tell the same figures."""

import re
from pathlib import Path

import pytest

from interrupted import LeavesAt
from workshop import make_job, read_json, train, trained


def card_rows(run: Path) -> dict[str, list[str]]:
    """The rows of the card's tables by their first cell."""
    lines = [
        line for line in (run / "model/README.md").read_text().splitlines() if line.startswith("| ")
    ]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0]: row[1:] for row in rows if row[0]}


def test_the_card_of_a_run_that_was_interrupted_has_the_figures_of_its_receipt(
    tmp_path, cli, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "200")
    job = make_job(tmp_path, save_steps=2)
    train(job, LeavesAt(step=3))
    train(job)
    run = Path(job.output_dir)
    rows, receipt = card_rows(run), read_json(run / "receipt.json")
    assert rows["epochs"] == ["1.5"], "as many as were trained, of the three that are the default"
    lines = [
        re.split(r"\s{2,}", line.strip())
        for line in cli.out("report", run).splitlines()
        if "$" in line
    ]
    shown = {cells[0]: cells for cells in reversed(lines)}  # the table of seconds stands first
    assert rows["cost"] == [shown["total"][-1]]
    assert rows["time"] == [f"{shown['total'][-3]} s, 1 interruption"]
    spans = [span for span in receipt["spans"] if span["seconds"] >= 0.005]
    assert len(spans) > 3
    for span in spans:
        assert rows[span["what"]] == [shown[span["what"]][-3], shown[span["what"]][-1]]


@pytest.mark.parametrize(
    ("family", "words"), [("llama", "AutoModelForCausalLM"), ("bert", "model_config.json")]
)
def test_the_card_of_an_adapter_says_how_to_load_it(family, words, tmp_path):
    run = trained(tmp_path, family, method="lora", pretrained=True, max_steps=1)
    use = (run / "model/README.md").read_text().split("## Receipt")[0]
    assert words in use
    assert (" labels) |" in use) is (family == "bert")
    if family == "llama":
        code = use.split("```python")[1].split("```")[0]
        code = code.replace('"."', repr(str(run / "model")))
        found = {}
        exec(code, found)  # noqa: S102
        assert found["model"].peft_config
