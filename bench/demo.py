"""The demo: the bill before the start, a fine-tune that is killed without warning, carries on
exactly, and its receipt.

    make demo

A small Llama and its data are made on the spot; no network and no GPU are needed. The same job is
then run once more without interruption, to show that the two results are equal to the bit.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from survive import differences, result_of

FOLDER = Path("build/demo")
FARTHING = [sys.executable, "-m", "farthing"]


def say(text: str) -> None:
    """A line that stands out."""
    print(f"\n\033[1m== {text}\033[0m" if sys.stdout.isatty() else f"\n== {text}", flush=True)


def train_and_kill(job: Path, at_checkpoint: int) -> None:
    """Start the job and SIGKILL it a moment after its `at_checkpoint`-th checkpoint."""
    process = subprocess.Popen([*FARTHING, "train", str(job)])
    checkpoints = FOLDER / "run" / "checkpoints"
    while process.poll() is None and newest_step(checkpoints) < at_checkpoint:
        time.sleep(0.01)
    time.sleep(0.4)  # some steps further, so that work is lost
    process.kill()
    process.wait()


def newest_step(checkpoints: Path) -> int:
    """Step of the newest committed checkpoint, 0 without one."""
    names = [path.name.split("-") for path in checkpoints.glob("step-*") if "." not in path.name]
    return max((int(parts[1]) for parts in names), default=0)


def write_one(model_folder: Path, prompt: str) -> str:
    """What the trained model says, by plain transformers."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    inputs = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    return str(
        tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    ).strip()


def main() -> int:
    """The five acts."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    say("1. Make a small model, data and a job")
    subprocess.run([*FARTHING, "init", "--demo", str(FOLDER)], check=True)
    job = FOLDER / "job.yaml"
    print("\n" + job.read_text(encoding="utf-8"))
    say(f"2. farthing plan {job}   (the bill before the start)")
    subprocess.run([*FARTHING, "plan", str(job), "--limit", "5"], check=True)
    say(f"3. farthing train {job}   (and kill -9 after a while)")
    train_and_kill(job, at_checkpoint=80)
    say("killed: no warning, no clean-up")
    say(f"4. farthing train {job}   (the same command resumes)")
    subprocess.run([*FARTHING, "train", str(job)], check=True)
    say("5. The same job without interruption, to compare")
    alone = f"output_dir={FOLDER / 'alone'}"
    subprocess.run(
        [*FARTHING, "train", str(job), "--set", alone, "--json"],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    different = differences(result_of(FOLDER / "alone"), result_of(FOLDER / "run"))
    if different:
        print(f"the killed run differs from the uninterrupted one in: {', '.join(different)}")
        return 1
    say(
        "Every loss, every weight and the optimizer's state of the two runs are identical to the"
        " bit."
    )
    prompt = "name: Blue Spice; food: Indian; area: riverside; price: cheap =>"
    print(f"\nprompt: {prompt}\nmodel:  {write_one(FOLDER / 'run' / 'model', prompt)}")
    print(
        f"\nthe model: {FOLDER / 'run' / 'model'}    the receipt again: farthing report"
        f" {FOLDER / 'run'}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
