"""KV memory: what is touched costs, what is released does not."""

from __future__ import annotations

import mmap

import numpy as np
import psutil
import pytest

from edge.engine.kv import KvArena, KvShape

SHAPE = KvShape(layers=2, kv_heads=3, head_dim=64, dtype=np.dtype(np.float32))


def _arena(rows: int = 4, context: int = 1000, shape: KvShape = SHAPE) -> KvArena:
    return KvArena(shape, max_rows=rows, context_tokens=context)


def test_bytes_of_a_token_count_keys_and_values_of_all_layers() -> None:
    assert SHAPE.token_bytes == 2 * 2 * 3 * 64 * 4
    half = KvShape(layers=2, kv_heads=3, head_dim=64, dtype=np.dtype(np.float16))
    assert half.token_bytes == SHAPE.token_bytes // 2


@pytest.mark.parametrize("head_dim", [64, 80, 96, 128])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_every_head_of_a_row_begins_on_a_page(head_dim: int, dtype: type[np.generic]) -> None:
    shape = KvShape(layers=1, kv_heads=3, head_dim=head_dim, dtype=np.dtype(dtype))
    arena = _arena(context=1001, shape=shape)
    assert arena.capacity_tokens >= 1001
    for row in range(4):
        assert arena.address(0, row) % mmap.PAGESIZE == 0
        assert arena.arrays[1][row, 1].ctypes.data % mmap.PAGESIZE == 0


def test_addresses_are_those_of_the_arrays() -> None:
    arena = _arena()
    assert arena.address(3, 2) == arena.arrays[3][2].ctypes.data
    assert list(arena.arrays[0][:2].shape) == arena.row_shape(2)


def test_a_moved_row_has_the_first_positions_of_its_source() -> None:
    arena = _arena()
    for index, array in enumerate(arena.arrays):
        array[3, :, :10] = index + 1
        array[0, :, :20] = -1
    arena.move(3, 0, 7)
    for index, array in enumerate(arena.arrays):
        assert (array[0, :, :7] == index + 1).all()
        assert (array[0, :, 7:20] == -1).all()


def test_a_released_row_reads_as_zeros_and_its_neighbours_stay() -> None:
    arena = _arena(context=1001)
    for array in arena.arrays:
        array[:] = 1
    arena.release(1)
    for array in arena.arrays:
        assert not array[1].any()
        assert (array[0] == 1).all()
        assert (array[2] == 1).all()


def test_memory_is_taken_by_the_tokens_that_are_written_and_comes_back() -> None:
    arena = _arena(rows=8, context=16384)
    process = psutil.Process()
    empty = process.memory_info().rss
    row_bytes = 16384 * SHAPE.token_bytes
    for array in arena.arrays:
        array[5, :, :8192] = 1
    half = process.memory_info().rss - empty
    assert 0.45 * row_bytes <= half <= 0.6 * row_bytes
    arena.release(5)
    assert process.memory_info().rss - empty <= 0.05 * row_bytes


def test_an_arena_without_rows_or_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        _arena(rows=0)
    with pytest.raises(ValueError, match="at least 1"):
        _arena(context=0)
