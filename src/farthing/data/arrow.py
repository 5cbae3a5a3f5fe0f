"""Rows from Parquet files and Arrow tables, in bounded memory whatever a small file unfolds to.

Texts stay in the dictionaries that a file keeps them in until a row is known to be within the
limit, so that a million rows of one long text cost one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from farthing.data.rows import MAX_ROW_BYTES, BadRow, Block, Reading, Row, too_large
from farthing.errors import DataError
from farthing.units import say_bytes

BATCH_ROWS, BATCH_BYTES = 1024, 16 << 20
_MOST_CHUNK_BYTES, _MOST_UNFOLDING = (
    64 << 20,
    200,
)  # of a column in a row group: unfolded, and how many times its size
_MOST_VALUES, _MANY_VALUES, _MANY_IN_A_ROW = (
    256 << 20,
    32 << 20,
    4096,
)  # of a nested column in a row group
_MANY_ROWS, _ROWS_A_BYTE = 1_000_000, 100
_MOST_FOOTER_BYTES = 64 << 20


def open_parquet(path: Path, name: str) -> Any:
    """The `pyarrow.parquet.ParquetFile` of a path, its texts left in their dictionaries. Raises
    `DataError`.
    """
    import pyarrow
    import pyarrow.parquet

    limits = {
        "thrift_string_size_limit": _MOST_FOOTER_BYTES,
        "thrift_container_size_limit": 10_000_000,
    }
    try:
        file = pyarrow.parquet.ParquetFile(path, **limits)
        metadata, names = file.metadata, file.schema_arrow.names
        leaves = [metadata.schema.column(i) for i in range(len(metadata.schema))]
        _refuse_unfolding(metadata, leaves, path.stat().st_size, name)
        if twice := next((each for each in names if names.count(each) > 1), ""):
            raise DataError(
                f"there are two columns `{twice}`", where=name, to_do="write it with one of them"
            )
        texts = [leaf.path for leaf in leaves if leaf.physical_type == "BYTE_ARRAY"]
        return pyarrow.parquet.ParquetFile(path, read_dictionary=texts, pre_buffer=False, **limits)
    except (pyarrow.ArrowException, OSError, RecursionError) as error:
        raise unreadable(error, f"{name}:1") from error


def _refuse_unfolding(metadata: Any, leaves: list[Any], n_bytes: int, name: str) -> None:
    to_do = (
        "look at who made it; an honest one can be written again in smaller row groups"
        " (row_group_size=10000)"
    )
    if metadata.num_rows > _MANY_ROWS and metadata.num_rows > _ROWS_A_BYTE * n_bytes:
        what = f"{metadata.num_rows:,} rows in {say_bytes(n_bytes)} are more than data can be"
        raise DataError(what, where=name, to_do=to_do)
    for group in range(metadata.num_row_groups):
        of_group = metadata.row_group(group)
        for index, leaf in enumerate(leaves):
            chunk = of_group.column(index)
            unfolded, packed = chunk.total_uncompressed_size, max(1, chunk.total_compressed_size)
            if unfolded > _MOST_CHUNK_BYTES and unfolded > _MOST_UNFOLDING * packed:
                what = (
                    f"column `{leaf.path}` unfolds from {say_bytes(packed)} to"
                    f" {say_bytes(unfolded)}"
                )
                raise DataError(what, where=name, to_do=to_do)
            in_a_row = chunk.num_values / max(1, of_group.num_rows)
            is_dense = chunk.num_values > _MANY_VALUES and in_a_row > _MANY_IN_A_ROW
            if leaf.max_repetition_level and (is_dense or chunk.num_values > _MOST_VALUES):
                what = (
                    f"column `{leaf.path}` has {chunk.num_values:,} values in {of_group.num_rows:,}"
                    " rows"
                )
                raise DataError(what, where=name, to_do=to_do)


def parquet_blocks(path: Path, name: str, reading: Reading) -> Iterator[Block]:
    """The rows of a Parquet file, counted from 1. Raises `DataError`."""
    import pyarrow

    file = open_parquet(path, name)
    metadata = file.metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    mean_bytes = max(
        (group.total_byte_size / max(1, group.num_rows) for group in groups), default=1.0
    )
    n_together = int(min(BATCH_ROWS, max(1, BATCH_BYTES // max(1, mean_bytes))))
    chosen = _spread([group.total_byte_size for group in groups], reading)
    starts = np.concatenate([[0], np.cumsum([group.num_rows for group in groups])]).astype(int)
    done = 0
    reading.share = lambda: done / max(1, metadata.num_rows)
    for number in chosen:
        index = int(starts[number])
        try:
            for batch in file.iter_batches(batch_size=n_together, row_groups=[number]):
                done += len(batch)
                yield _block(batch, index)
                index += len(batch)
        except (pyarrow.ArrowException, OSError, RecursionError) as error:
            raise unreadable(error, f"{name}:{index + 1}") from error


def _spread(sizes: list[int], reading: Reading) -> list[int]:
    """Row groups of about as many bytes as are to be read, from all over the file; else all."""
    most = reading.most_bytes
    if most is None or sum(sizes) <= most:
        return list(range(len(sizes)))
    chosen: list[int] = []
    n_bytes = 0
    for number in sorted(range(len(sizes)), key=lambda i: (i * 0.6180339887) % 1):
        if not chosen or n_bytes + sizes[number] <= most:
            chosen.append(number)
            n_bytes += sizes[number]
    reading.is_whole = len(chosen) == len(sizes)
    return sorted(chosen)


def arrow_blocks(paths: Sequence[Path], reading: Reading) -> Iterator[Block]:
    """The rows of Arrow streams as `datasets` keeps them: pictures and sound stay bytes."""
    import pyarrow

    n_bytes, done, index = sum(path.stat().st_size for path in paths), 0, 0
    reading.share = lambda: done / max(1, n_bytes)
    for path in paths:
        with pyarrow.memory_map(str(path)) as file, pyarrow.ipc.open_stream(file) as stream:
            for batch in stream:
                for start in range(0, len(batch), BATCH_ROWS):
                    some = batch.slice(start, BATCH_ROWS)
                    yield _block(some, index)
                    index += len(some)
        done += path.stat().st_size


def write_arrow(dataset: Any, path: Path) -> None:
    """A part of a data set as one Arrow stream."""
    import pyarrow

    schema = dataset.with_format("arrow")[:0].schema
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as stream:
        for table in dataset.with_format("arrow").iter(batch_size=BATCH_ROWS):
            stream.write_table(table)


def _block(table: Any, n_before: int) -> Block:
    sizes = bytes_of_rows(table)

    def read(picked: Sequence[int]) -> Iterator[Row | BadRow]:
        few: list[int] = []
        n_bytes = 0
        for index in picked:
            n_bytes += int(sizes[index])
            if few and n_bytes > BATCH_BYTES:
                yield from _values(table, few, n_before)
                few, n_bytes = [], int(sizes[index])
            if sizes[index] > MAX_ROW_BYTES:
                yield from _values(table, few, n_before)
                yield BadRow(n_before + index + 1, too_large(int(sizes[index])))
                few, n_bytes = [], 0
            else:
                few.append(index)
        yield from _values(table, few, n_before)

    return Block(sizes, read)


def _values(table: Any, few: list[int], n_before: int) -> Iterator[Row | BadRow]:
    """Rows as Python's values, those after `n_before` others."""
    try:
        values = table.take(few).to_pylist() if few else []
        yield from [Row(n_before + i + 1, value) for i, value in zip(few, values, strict=True)]
    except (
        ValueError,
        OverflowError,
        ArithmeticError,
    ) as error:  # bytes that are no text, a date beyond Python's
        if len(few) == 1:
            reason = f"a value that can't be read: {str(error)[:200]}"
            yield BadRow(n_before + few[0] + 1, reason)
            return
        for index in few:
            yield from _values(table, [index], n_before)


def unreadable(error: Exception, where: str) -> DataError:
    """In words; memory that is not enough is that of this machine, not of a GPU."""
    import pyarrow

    if isinstance(error, pyarrow.ArrowMemoryError):
        return DataError(
            "this machine has not enough memory to read it",
            where=where,
            to_do="write it in smaller row groups",
        )
    why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
    return DataError(
        f"not a readable Parquet file: {why}", where=where, to_do="it is damaged: copy it again"
    )


def without_missing(value: Any) -> Any:
    """A value without those keys of its objects that have none: in Arrow every object of a column
    has the keys of all.
    """
    if isinstance(value, dict):
        return {key: without_missing(each) for key, each in value.items() if each is not None}
    return [without_missing(each) for each in value] if isinstance(value, list) else value


def bytes_of_rows(table: Any) -> NDArray[np.int64]:
    """About how many bytes each row of a table or batch is when it is unfolded [n_rows]."""
    import pyarrow

    sizes = np.zeros(len(table), np.int64)
    for column in table.columns:
        pieces = column.chunks if isinstance(column, pyarrow.ChunkedArray) else [column]
        if pieces:
            sizes += np.concatenate([_sizes(piece) for piece in pieces])
    return sizes


def _sizes(array: Any) -> NDArray[np.int64]:
    """Bytes of each value of an Arrow array [n]; those that are no text count 8."""
    import pyarrow
    import pyarrow.compute

    if isinstance(array, pyarrow.ExtensionArray):
        return _sizes(array.storage)
    kind, types = array.type, pyarrow.types
    if types.is_dictionary(kind):
        if not len(array.dictionary):
            return np.full(len(array), 8, np.int64)
        of_word = _sizes(array.dictionary)
        return np.asarray(of_word[array.indices.fill_null(0).to_numpy(zero_copy_only=False)])
    if types.is_string_view(kind) or types.is_binary_view(kind):
        array = array.cast(pyarrow.large_binary())
        kind = array.type
    texts = pyarrow.string(), pyarrow.binary(), pyarrow.large_string(), pyarrow.large_binary()
    if kind in texts:
        lengths = pyarrow.compute.binary_length(array).fill_null(0)
        return 1 + lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    if types.is_struct(kind):
        return 16 + sum(
            (_sizes(array.field(i)) for i in range(kind.num_fields)), np.zeros(len(array), np.int64)
        )
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        offsets = array.offsets.to_numpy()
        inner = (
            _sizes(array.keys) + _sizes(array.items) if types.is_map(kind) else _sizes(array.values)
        )
        upto = np.concatenate([[0], np.cumsum(inner)])
        return np.asarray(16 + upto[offsets[1:]] - upto[offsets[:-1]])
    if types.is_fixed_size_list(kind):
        inner = _sizes(array.values)[
            array.offset * kind.list_size : (array.offset + len(array)) * kind.list_size
        ]
        return np.asarray(16 + inner.reshape(len(array), kind.list_size).sum(1))
    return np.full(len(array), 8, np.int64)
