# SPDX-License-Identifier: Apache-2.0
"""The table of a checkpoint's chunks: what ranks write is joined and read again, whatever the shapes of the tensors."""

from pathlib import Path

import numpy as np
import pytest

from mindvl_train.checkpoints.chunk_table import Chunk, ChunkTable

MATRIX = [Chunk("w", [4, 6], "bfloat16", [2 * row, 0], [2, 6], f"__{row}_0.distcp", 8, 99, 7 + row) for row in range(2)]
VECTOR = Chunk("b", [5], "float32", [0], [5], "__1_0.distcp", 200, 30, 2**32 - 1)
SCALAR = Chunk("s", [], "float32", [], [], "__1_0.distcp", 1 << 40, 4, 0)
CUBE = Chunk("e", [2, 3, 4], "float32", [1, 0, 0], [1, 3, 4], "__2_0.distcp", 0, 50, 5)


def chunks_of(table: ChunkTable) -> list[Chunk]:
    return [table.chunk(row) for row in range(len(table.rows))]


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [[], [SCALAR], [VECTOR, SCALAR], [CUBE, *MATRIX, VECTOR, SCALAR]], ids=len)
def test_what_is_written_is_read(chunks: list[Chunk], tmp_path: Path) -> None:
    ChunkTable.of(chunks).write(tmp_path / "table")
    assert chunks_of(ChunkTable.read(tmp_path / "table")) == chunks
    assert [path.name for path in tmp_path.iterdir()] == ["table"]


def test_the_tables_of_ranks_are_joined_in_their_order() -> None:
    by_rank = [[MATRIX[0]], [SCALAR, VECTOR, MATRIX[1]], [], [CUBE]]
    joined = ChunkTable.join([ChunkTable.of(chunks) for chunks in by_rank])
    assert chunks_of(joined) == [chunk for chunks in by_rank for chunk in chunks]
    assert {key: rows.tolist() for key, rows in joined.tensor_rows().items()} == {
        "w": [0, 3],
        "s": [1],
        "b": [2],
        "e": [4],
    }
    offsets, sizes = joined.boxes("w", np.array([0, 3]))
    assert (offsets.tolist(), sizes.tolist()) == ([[0, 0], [2, 0]], [[2, 6], [2, 6]])


def test_ranks_that_disagree_about_a_tensor_are_an_error() -> None:
    other = Chunk("w", [4, 8], "bfloat16", [0, 0], [1, 8], "__9_0.distcp", 0, 1, 1)
    with pytest.raises(ValueError, match=r"w: is \('bfloat16', \(4, 6\)\) on one rank"):
        ChunkTable.join([ChunkTable.of(MATRIX), ChunkTable.of([other])])


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (Chunk("a", [2], "float32", [0], [2], "../etc/__0_0.distcp", 0, 9, 0), "not the name of a .distcp file"),
        (Chunk("a", [2], "float32", [0], [2], "passwd", 0, 9, 0), "not the name of a .distcp file"),
        (Chunk("a", [2], "float32", [0], [2], "__0_0.distcp", -1, 9, 0), "invalid position"),
        (Chunk("a", [2], "float32", [0], [2], "__0_0.distcp", 0, 1 << 62, 0), "invalid position"),
        (Chunk("a", [2], "float32", [0], [2], "__0_0.distcp", 0, 9, 1 << 32), "invalid position"),
        (Chunk("a", [2], "float32", [-1], [2], "__0_0.distcp", 0, 9, 0), "invalid position"),
        (Chunk("a", [2], "float32", [1], [2], "__0_0.distcp", 0, 9, 0), "a: a chunk ends outside"),
        (
            Chunk("a", [2], "float32", [(1 << 62) - 1], [(1 << 62) - 1], "__0_0.distcp", 0, 9, 0),
            "a: a chunk ends outside",
        ),
    ],
)
def test_a_chunk_in_an_impossible_place_is_refused(chunk: Chunk, message: str, tmp_path: Path) -> None:
    ChunkTable.of([*MATRIX, chunk]).write(tmp_path / "table")
    with pytest.raises(ValueError, match=message):
        ChunkTable.read(tmp_path / "table")


def test_a_file_that_was_cut_is_refused(tmp_path: Path) -> None:
    ChunkTable.of(MATRIX).write(tmp_path / "table")
    content = (tmp_path / "table").read_bytes()
    for length in range(len(content)):
        (tmp_path / "table").write_bytes(content[:length])
        with pytest.raises(ValueError, match="table: is not the index of a mindvl checkpoint"):
            ChunkTable.read(tmp_path / "table")
