"""Rows from Parquet files and Arrow tables, a few at a time.

Texts stay in the dictionaries that a file keeps them in until a row is known to be within the
limit, so that a million rows of one long text cost one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from farthing.arrays import Ints
from farthing.data.rows import MAX_ROW_BYTES, BadRow, Row, RowBlock, too_large
from farthing.errors import DataError
from farthing.units import say_bytes

BATCH_ROWS, BATCH_BYTES = 1024, 16 << 20
MOST_UNFOLDED_BYTES, MOST_UNFOLDING = 64 << 20, 200
"""Of a column in a row group of a file from elsewhere, and how many times its size that is."""


def open_parquet(path: Path, name: str) -> Any:
    """The `pyarrow.parquet.ParquetFile` of a path, its texts left in their dictionaries. Raises
    `DataError`.
    """
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        leaves, names = file.schema, file.schema_arrow.names
        if twice := next((each for each in names if names.count(each) > 1), ""):
            raise DataError(
                f"there are two columns `{twice}`", where=name, to_do="write it with one of them"
            )
        columns = [leaves.column(i) for i in range(len(leaves))]
        texts = [each.path for each in columns if each.physical_type == "BYTE_ARRAY"]
        return pyarrow.parquet.ParquetFile(path, read_dictionary=texts, pre_buffer=False)
    except (pyarrow.ArrowException, OSError, RecursionError) as error:
        raise _unreadable(error, f"{name}:1") from error


def refuse_parquet_bomb(path: Path, name: str) -> None:
    """Refuse a file from elsewhere that unfolds beyond measure by its own figures. Raises
    `DataError`.
    """
    metadata = open_parquet(path, name).metadata
    figures = [("the file", metadata.num_rows, path.stat().st_size)]
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        for chunk in map(group.column, range(group.num_columns)):
            unfolded = max(chunk.total_uncompressed_size, chunk.num_values)
            packed = max(1, chunk.total_compressed_size)
            figures.append((f"column `{chunk.path_in_schema}`", unfolded, packed))
    for what, unfolded, packed in figures:
        if unfolded > max(MOST_UNFOLDED_BYTES, MOST_UNFOLDING * packed):
            raise DataError(
                f"{what} unfolds from {say_bytes(packed)} to {say_bytes(unfolded)}",
                where=name,
                to_do="look at who made it, or write it again with row_group_size=10000",
            )


def parquet_blocks(path: Path, name: str, most_bytes: int | None) -> Iterator[RowBlock]:
    """The rows of a Parquet file, counted from 1. Raises `DataError`."""
    import pyarrow

    file = open_parquet(path, name)
    metadata = file.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    sizes = [group.total_byte_size for group in groups]
    row_bytes = max(
        (size / max(1, group.num_rows) for size, group in zip(sizes, groups, strict=True)),
        default=1.0,
    )
    n_together = int(min(BATCH_ROWS, max(1, BATCH_BYTES // max(1, row_bytes))))
    starts = np.cumsum([0, *(group.num_rows for group in groups)]).tolist()
    done = 0
    for number in _spread(sizes, most_bytes):
        index = starts[number]
        try:
            for batch in file.iter_batches(batch_size=n_together, row_groups=[number]):
                done += len(batch)
                yield _block(batch, index, done / metadata.num_rows)
                index += len(batch)
        except (pyarrow.ArrowException, OSError, RecursionError) as error:
            raise _unreadable(error, f"{name}:{index + 1}") from error


def _spread(sizes: list[int], most_bytes: int | None) -> list[int]:
    """Row groups of about as many bytes as are to be read, from all over the file; else all."""
    share = 1.0 if most_bytes is None else most_bytes / max(1, sum(sizes))
    n = min(len(sizes), max(1, int(share * len(sizes))))
    return np.linspace(0, len(sizes) - 1, n).round().astype(int).tolist() if sizes else []


def arrow_blocks(paths: Sequence[Path]) -> Iterator[RowBlock]:
    """The rows of Arrow streams as `datasets` keeps them: pictures and sound stay bytes."""
    import pyarrow

    index = 0
    for n_files, path in enumerate(paths):
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            table, before = stream.read_all(), index  # mapped: nothing is copied
            for batch in table.to_batches(max_chunksize=BATCH_ROWS):
                index += len(batch)
                done = n_files + (index - before) / len(table)
                yield _block(batch, index - len(batch), done / len(paths))


def class_names(path: Path, kind: str, column: str) -> list[str]:
    """What the whole numbers of a column mean, by `ClassLabel` of `datasets`; empty where it has no
    such names.
    """
    import pyarrow.parquet

    try:
        if kind == "parquet":
            metadata = pyarrow.parquet.read_schema(path).metadata
        else:
            with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
                metadata = stream.schema.metadata
        feature = json.loads((metadata or {})[b"huggingface"])["info"]["features"][column]
        names = feature.get("feature", feature)["names"]  # of a list, or of each row
    except (pyarrow.ArrowException, OSError, ValueError, LookupError, AttributeError, TypeError):
        return []
    return [str(name) for name in names]


def write_arrow(dataset: Any, path: Path) -> None:
    """A part of a data set as one Arrow stream."""
    import pyarrow

    schema = dataset.with_format("arrow")[:0].schema
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
        for table in dataset.with_format("arrow").iter(batch_size=BATCH_ROWS):
            stream.write_table(table)


def _block(table: Any, n_before: int, share: float) -> RowBlock:
    import pyarrow

    sizes, decode = bytes_of_rows(table), _decoder(pyarrow.struct(list(table.schema)))

    def values(few: list[int]) -> Iterator[Row | BadRow]:
        """Rows as Python's values."""
        try:
            found = table.take(few).to_pylist() if few else []
            found = list(map(decode, found)) if decode else found
            yield from [Row(n_before + i + 1, value) for i, value in zip(few, found, strict=True)]
        except (ValueError, OverflowError, ArithmeticError) as error:
            # bytes that are no text, a date beyond Python's
            if len(few) == 1:
                reason = f"a value that can't be read: {str(error)[:200]}"
                yield BadRow(n_before + few[0] + 1, reason)
                return
            for index in few:
                yield from values([index])

    def read(picked: Sequence[int]) -> Iterator[Row | BadRow]:
        few: list[int] = []
        for index in picked:
            is_large = sizes[index] > MAX_ROW_BYTES
            if is_large or sizes[few].sum() + sizes[index] > BATCH_BYTES:
                yield from values(few)
                few = []
            if is_large:
                yield BadRow(n_before + index + 1, too_large(int(sizes[index])))
            else:
                few.append(index)
        yield from values(few)

    return RowBlock(sizes, read, share)


def _decoder(kind: Any) -> Callable[[Any], Any] | None:
    """What reads the JSON within values of an Arrow type; None where there is none. `datasets`
    keeps so what is of other types from row to row.
    """
    import pyarrow.types

    if getattr(kind, "extension_name", "") == "arrow.json":
        return lambda value: value and json.loads(value)
    if pyarrow.types.is_struct(kind):
        inner = {each.name: read for each in kind if (read := _decoder(each.type))}
        of_row = partial(_with_decoded, inner=inner)
        return of_row if inner else None
    of_item = _decoder(kind.value_type) if hasattr(kind, "value_type") else None
    return of_item and (lambda value: value and list(map(of_item, value)))


def _with_decoded(value: Any, inner: Mapping[str, Callable[[Any], Any]]) -> Any:
    return value and {**value, **{name: read(value[name]) for name, read in inner.items()}}


def _unreadable(error: Exception, where: str) -> DataError:
    import pyarrow

    if isinstance(error, pyarrow.ArrowMemoryError):  # of this machine, not of a GPU
        what, to_do = "this machine has not enough memory to read it", "write smaller row groups"
    else:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        what, to_do = f"not a readable Parquet file: {why}", "it is damaged: copy it again"
    return DataError(what, where=where, to_do=to_do)


def without_missing(value: Any) -> Any:
    """A value without those keys of its objects that have none: in Arrow every object of a column
    has the keys of all.
    """
    if isinstance(value, dict):
        return {key: without_missing(each) for key, each in value.items() if each is not None}
    return [without_missing(each) for each in value] if isinstance(value, list) else value


def bytes_of_rows(table: Any) -> Ints:
    """About how many bytes each row of a table or batch is when it is unfolded [n_rows]."""
    import pyarrow

    sizes = np.zeros(len(table), np.int64)
    for column in table.columns:
        whole = column.combine_chunks() if isinstance(column, pyarrow.ChunkedArray) else column
        sizes += _sizes(whole)
    return sizes


def _sizes(array: Any) -> Ints:
    """Bytes of each value of an Arrow array [n]; those that are no text count 8."""
    import pyarrow
    import pyarrow.compute

    compute, types, kind = pyarrow.compute, pyarrow.types, array.type
    if isinstance(array, pyarrow.ExtensionArray):
        return _sizes(array.storage)
    if types.is_dictionary(kind) and len(array.dictionary):
        indices = array.indices.fill_null(0).to_numpy(zero_copy_only=False)
        return _sizes(array.dictionary)[indices]
    if types.is_string_view(kind) or types.is_binary_view(kind):
        return _sizes(array.cast(pyarrow.large_binary()))
    if str(kind).removeprefix("large_") in ("string", "binary"):
        lengths = compute.binary_length(array).fill_null(0)
        return 1 + lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    if types.is_struct(kind):
        return sum(map(_sizes, array.flatten()), np.full(len(array), 16, np.int64))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        owners = compute.list_parent_indices(array).to_numpy()
        inner = _sizes(compute.list_flatten(array))
        return 16 + np.bincount(owners, inner, len(array)).astype(np.int64)
    return np.full(len(array), 8, np.int64)
