"""KV memory of the torch engine: one arena per layer, which transformers' models see as a cache layer.

Invariants
- An arena has a fixed size from its first use on, and a row never reaches into another.
- On the CPU an arena is anonymous memory: a page costs nothing until a row writes it, and `release` gives the
  row's pages back to the system.
- Positions that no row has written yet hold finite numbers, so that a masked key cannot become NaN.

The masks that hide a row's unwritten or stale positions are `edge.engine.torch_model`'s part.
"""

from __future__ import annotations

import mmap
import os
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin


class ArenaLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """Keys and values of one layer for all rows: two of (max_rows, kv_heads, context_tokens, head_dim)."""

    is_sliding = False

    def __init__(self, max_rows: int, context_tokens: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._max_rows = max_rows
        self._context_tokens = context_tokens
        self._arenas: tuple[_Arena, ...] = ()
        self._rows = slice(0, 0)
        self._positions = torch.zeros(0, dtype=torch.int64)
        self._width = 0

    @property
    def token_bytes(self) -> int:
        return sum(arena.token_bytes for arena in self._arenas)

    def aim(self, rows: slice, positions: torch.Tensor, width: int) -> None:
        """Say where the next `update` goes: one row and n positions, or n rows and a position for each."""
        self._rows, self._positions, self._width = rows, positions, width

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        shape = (self._max_rows, self._context_tokens)
        self._arenas = tuple(_Arena(*shape, like=states) for states in (key_states, value_states))
        self.keys, self.values = (arena.tensor for arena in self._arenas)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        rows, positions = self._rows, self._positions
        seen = []
        for arena, states in zip(self._arenas, (key_states, value_states), strict=True):
            if states.shape[2] == 1:
                each = torch.arange(rows.start, rows.stop, device=states.device)
                arena.tensor[each, :, positions] = states[:, :, 0]
            else:
                first = self._width - states.shape[2]
                arena.tensor[rows, :, first : self._width] = states
            seen.append(arena.tensor[rows, :, : self._width])
        return seen[0], seen[1]

    def move(self, source: int, target: int, length: int) -> None:
        with torch.inference_mode():
            for arena in self._arenas:
                arena.tensor[target, :, :length] = arena.tensor[source, :, :length]

    def release(self, row: int) -> None:
        for arena in self._arenas:
            arena.release(row)

    # What transformers asks a cache about sizes. Masks and positions are ours, so these only have to be true.
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._width, 0

    def get_seq_length(self) -> int:
        return self._width

    def get_max_length(self) -> int:
        return self._context_tokens


class _Arena:
    """One tensor of shape (max_rows, heads, context_tokens, width), each row on pages of its own."""

    def __init__(self, max_rows: int, context_tokens: int, *, like: torch.Tensor) -> None:
        heads, width, item_bytes = like.shape[1], like.shape[3], like.element_size()
        self.token_bytes = heads * width * item_bytes
        self._row_bytes = -(-context_tokens * self.token_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory: mmap.mmap | None = None
        shape = (max_rows, heads, context_tokens, width)
        if like.device.type == "cpu" and os.name == "posix":
            # Private: MADV_DONTNEED frees such pages. Python's default, shared memory, would keep them.
            self._memory = mmap.mmap(
                -1, max_rows * self._row_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
            flat = torch.frombuffer(self._memory, dtype=like.dtype)
            strides = (self._row_bytes // item_bytes, context_tokens * width, width, 1)
            self.tensor = flat.as_strided(shape, strides)
        else:
            # Zeros, not garbage: a masked NaN would still poison the weighted sum of the values.
            self.tensor = torch.zeros(shape, dtype=like.dtype, device=like.device)

    def release(self, row: int) -> None:
        """Give the row's pages back; on an accelerator the arena is allocated once and kept."""
        if self._memory is not None:
            self._memory.madvise(mmap.MADV_DONTNEED, row * self._row_bytes, self._row_bytes)
