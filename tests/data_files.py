"""Files of rows, and what is read of them."""

import gzip
import json
from pathlib import Path
from typing import Any

from farthing.data.read import BadRow, Row, Source, open_sources


def user(content) -> dict[str, Any]:
    """What a user says in a chat."""
    return {"role": "user", "content": content}


def assistant(content) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


KINDS = ["jsonl", "jsonl.gz", "json", "data.json", "csv", "tsv", "parquet"]


def opened(path: Path | str, cache: Path, split: str = "train", **how) -> Source:
    """The source of one name."""
    (source,) = open_sources((str(path),), cache_dir=cache, split=split, **how)
    return source


def values(source: Source) -> list[dict[str, Any]]:
    """Its usable rows."""
    return [row.value for row in source.rows() if isinstance(row, Row)]


def bad(source: Source) -> list[tuple[int, str]]:
    """Its unusable rows."""
    return [(row.line, row.reason) for row in source.rows() if isinstance(row, BadRow)]


def write_as(kind: str, path: Path, rows: list[dict[str, str]]) -> Path:
    import pandas

    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if kind == "jsonl":
        path.write_text(lines, encoding="utf-8")
    elif kind == "jsonl.gz":
        path.write_bytes(gzip.compress(lines.encode(), mtime=0))
    elif kind == "json":
        path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    elif kind == "data.json":
        path.write_text(json.dumps({"version": 2, "data": rows}), encoding="utf-8")
    elif kind == "parquet":
        pandas.DataFrame(rows).to_parquet(path)
    else:
        pandas.DataFrame(rows).to_csv(path, sep="\t" if kind == "tsv" else ",", index=False)
    return path


def real_tokenizer(data_dir: Path, name: str):
    from farthing.model.load import ModelChoice, load_tokenizer, quiet_libraries

    quiet_libraries()
    return load_tokenizer(ModelChoice(str(data_dir / "tokenizers" / name)), None)
