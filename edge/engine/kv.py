"""KV memory on the CPU: two anonymous buffers per layer (keys, values), and their addresses.

A buffer has the shape (max_rows, kv_heads, capacity_tokens, head_dim). It is reserved address space: a page
costs memory only once it is written, so what the arena costs follows the tokens that it holds, and admission
by tokens bounds it.

Invariants
- Every (row, head) begins on a page of its own, so giving back a row never touches a neighbour.
- A released row reads as zeros and costs nothing.
- No huge pages: one written token would otherwise cost two megabytes.

It does not know which rows are in use, nor what runs on them.
"""

from __future__ import annotations

import math
import mmap
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What the graph asks of its KV memory.

    Attributes:
        layers: Attention layers; each has keys and values.
        kv_heads: Key and value heads of a layer.
        head_dim: Numbers of one head and token.
        dtype: Their type, as the graph's inputs say.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: np.dtype[np.generic]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token of one row: keys and values of all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


class KvArena:
    """`2 * layers` buffers: index `2 * layer` holds the keys of a layer, `2 * layer + 1` its values."""

    def __init__(self, shape: KvShape, *, max_rows: int, context_tokens: int) -> None:
        if max_rows < 1 or context_tokens < 1:
            raise ValueError("max_rows and context_tokens must be at least 1")
        self._shape = shape
        self._max_rows = max_rows
        per_page = math.lcm(mmap.PAGESIZE, shape.head_dim * shape.dtype.itemsize) // (
            shape.head_dim * shape.dtype.itemsize
        )
        self._capacity_tokens = -(-context_tokens // per_page) * per_page
        self._head_bytes = self._capacity_tokens * shape.head_dim * shape.dtype.itemsize
        self._row_bytes = shape.kv_heads * self._head_bytes
        self._buffers = [_reserve(max_rows * self._row_bytes) for _ in range(2 * shape.layers)]
        self._arrays: list[npt.NDArray[np.generic]] = [
            np.frombuffer(buffer, dtype=shape.dtype).reshape(
                max_rows, shape.kv_heads, self._capacity_tokens, shape.head_dim
            )
            for buffer in self._buffers
        ]

    @property
    def capacity_tokens(self) -> int:
        """Positions of a row: the context, rounded up to whole pages."""
        return self._capacity_tokens

    @property
    def arrays(self) -> list[npt.NDArray[np.generic]]:
        """The buffers as arrays of shape (max_rows, kv_heads, capacity_tokens, head_dim)."""
        return self._arrays

    def row_shape(self, rows: int) -> list[int]:
        """Shape of `rows` neighbouring rows."""
        return [rows, self._shape.kv_heads, self._capacity_tokens, self._shape.head_dim]

    def address(self, index: int, row: int) -> int:
        """Where `row` begins in buffer `index`. Valid until `close`."""
        return int(self._arrays[index].ctypes.data) + row * self._row_bytes

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of `source` over `target`."""
        for array in self._arrays:
            array[target, :, :length] = array[source, :, :length]

    def release(self, row: int) -> None:
        """Give the pages of a row back to the system."""
        for buffer in self._buffers:
            buffer.madvise(mmap.MADV_DONTNEED, row * self._row_bytes, self._row_bytes)

    def close(self) -> None:
        """Give back everything. Addresses and arrays taken before must not be used any more."""
        self._arrays.clear()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()


def _reserve(size_bytes: int) -> mmap.mmap:
    # Private: MADV_DONTNEED frees such pages. Python's default, shared memory, would keep them.
    buffer = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    buffer.madvise(mmap.MADV_NOHUGEPAGE)
    return buffer
