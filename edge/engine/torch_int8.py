"""LLM.int8 linear layers whose rows do not influence each other.

LLM.int8 (Dettmers et al. 2022, arXiv:2208.07339) multiplies in int8 and takes activations of magnitude 6
and more out, to be multiplied in floating point. bitsandbytes takes out the whole column, for every row of
the batch, once one row has an outlier there. Served in a continuous batch, that makes an answer depend on
who else is being answered: seeds would not reproduce, and a prompt prefilled in chunks would differ from the
same prompt prefilled at once.

Here the outliers are taken out element by element, so each row gets exactly what bitsandbytes would give it
alone. The int8 weights, their scales and the integer product stay bitsandbytes' own.
"""

from __future__ import annotations

from typing import Any

import torch
from bitsandbytes.nn.modules import Linear8bitLt

OUTLIER_MAGNITUDE = 6.0  # the paper's threshold, section 3.2


class RowInt8Linear(torch.nn.Module):
    """A linear layer of int8 weights, shape (out, in), made from a loaded `Linear8bitLt`."""

    def __init__(self, source: Linear8bitLt) -> None:
        super().__init__()
        held: Any = source.weight
        # bitsandbytes moves both from the parameter to its state in the layer's first product.
        codes, scales = (held.CB, held.SCB) if held.CB is not None else (source.state.CB, source.state.SCB)
        if codes is None or scales is None:
            raise ValueError("the layer holds no quantized weights yet")
        self.codes: torch.Tensor
        self.scales: torch.Tensor
        self.register_buffer("codes", codes)
        self.register_buffer("scales", scales)  # largest magnitude of each output row, float32
        self.bias = source.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (…, in) to (…, out), in the dtype of `x`."""
        rows = x.reshape(-1, x.shape[-1])
        is_outlier = rows.abs() >= OUTLIER_MAGNITUDE
        inliers = rows.masked_fill(is_outlier, 0.0)
        # A row of zeros would divide by zero; any positive scale quantizes it to zeros.
        largest = inliers.abs().amax(dim=-1).float().clamp_min(torch.finfo(torch.float16).tiny)
        quantized = torch.round(inliers * (127.0 / largest)[:, None]).to(torch.int8)
        product: torch.Tensor = torch.ops.bitsandbytes.int8_scaled_mm(
            quantized, self.codes, largest, self.scales, bias=None, dtype=x.dtype
        )
        columns = is_outlier.any(dim=0).nonzero()[:, 0]
        if columns.numel():
            outliers = torch.where(is_outlier, rows, 0.0)[:, columns]
            weights = self.codes[:, columns].float() * (self.scales / 127.0)[:, None]
            product = product + outliers @ weights.to(x.dtype).T
        if self.bias is not None:
            product = product + self.bias.to(x.dtype)
        return product.reshape(*x.shape[:-1], product.shape[-1])


def isolate_rows(model: torch.nn.Module) -> None:
    """Replace every `Linear8bitLt` of a loaded model, in place."""
    layers = [(name, module) for name, module in model.named_modules() if isinstance(module, Linear8bitLt)]
    for name, module in layers:
        model.set_submodule(name, RowInt8Linear(module))
