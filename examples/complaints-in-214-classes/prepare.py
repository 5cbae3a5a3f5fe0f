"""Turn the CFPB's complaints.csv into train.jsonl and eval.jsonl: a text and one of 214 labels."""

from __future__ import annotations

import argparse
import collections
import csv
import hashlib
import json
from pathlib import Path

TEXT, LABEL = "Consumer complaint narrative", "Sub-issue"
EVAL_SHARE = 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--classes", type=int, default=214, help="keep the N largest classes")
    parser.add_argument("--rows", type=int, default=120_000, help="keep at most N rows")
    arguments = parser.parse_args()
    texts: dict[str, str] = {}
    with open(arguments.file, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row[TEXT] and row[LABEL]:
                texts.setdefault(row[TEXT], row[LABEL])
    counts = collections.Counter(texts.values())
    kept = {label for label, _ in counts.most_common(arguments.classes)}
    # by a hash of the text: the choice and the split do not depend on the order of the file
    drawn = sorted(
        (hashlib.sha256(text.encode()).hexdigest(), text, label)
        for text, label in texts.items()
        if label in kept
    )[: arguments.rows]
    n_eval = round(EVAL_SHARE * len(drawn))
    for name, rows in (("eval", drawn[:n_eval]), ("train", drawn[n_eval:])):
        with open(f"{name}.jsonl", "w", encoding="utf-8") as file:
            for _, text, label in rows:
                file.write(json.dumps({"text": text, "label": label}) + "\n")
    print(f"{len(drawn):,} complaints in {len(kept)} classes, {n_eval:,} of them held out")


if __name__ == "__main__":
    main()
