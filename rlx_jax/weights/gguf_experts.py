"""`GptOssExperts`: the experts of a gpt-oss GGUF file under the keys and in the layout of its Hugging Face checkpoint.

A file has the gate and the up projection of all experts as one tensor each, `[experts, inner, hidden]`. The checkpoint
has their rows in turn in one weight: MXFP4 as `gate_up_proj_blocks` and `gate_up_proj_scales`, other types as numbers
`[experts, hidden, 2 · inner]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from rlx_jax.ir.packed import PackedSpec, WeightSpec
from rlx_jax.ir.packed_values import decode_packed
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.format import stored_spec
from rlx_jax.weights.named import NamedTensors, check_index
from rlx_jax.weights.views import HostArray, SourceView, read_into

_MXFP4, _BLOCK = "gguf_mxfp4", 32
_EXPERTS = ".mlp.experts."


@dataclass(frozen=True)
class _Weight:
    """A weight of the checkpoint: the keys of its tensors, and what of them it is.

    `blocks` and `scales` are those of MXFP4, `values` the numbers, transposed, and `same` the values unchanged.
    """

    keys: tuple[str, ...]
    part: Literal["blocks", "scales", "values", "same"]


class GptOssExperts(NamedTensors[_Weight], SourceView):
    """A view of a source, in which `gate_proj` and `up_proj` of all experts are one weight `gate_up_proj`."""

    def __init__(self, source: WeightSource) -> None:
        super().__init__(source)
        self._label = "a GGUF file"
        self._tensors = {}
        for key in source.keys():
            stem, _, module = key.rpartition(_EXPERTS)
            name, _, kind = module.partition(".")
            new, keys = f"{stem}{_EXPERTS}{name}", [key]
            if stem and name in ("gate_proj", "up_proj"):
                keys = [f"{stem}{_EXPERTS}{half}.{kind}" for half in ("gate_proj", "up_proj")]
                new = f"{stem}{_EXPERTS}gate_up_proj"
            shapes = {tuple(source.spec(k).shape) if source.has(k) else () for k in keys}
            if not stem or len(shapes) > 1 or len(min(shapes)) != (2 if kind == "bias" else 3):
                self._tensors[key] = _Weight((key,), "same")
            elif kind == "bias":
                self._tensors[f"{new}_bias"] = _Weight(tuple(keys), "same")
            elif all(_is_mxfp4(source.spec(key)) for key in keys):
                self._tensors |= {
                    f"{new}_blocks": _Weight(tuple(keys), "blocks"),
                    f"{new}_scales": _Weight(tuple(keys), "scales"),
                }
            else:
                self._tensors[new] = _Weight(tuple(keys), "values")

    def where(self, key: str) -> str:
        return self.source.where(self._find(key).keys[0])

    def spec(self, key: str) -> WeightSpec:
        weight = self._find(key)
        spec = self.source.spec(weight.keys[0])
        if len(weight.keys) == 1 and weight.part == "same":
            return spec
        experts, rows, *columns = spec.shape
        rows *= len(weight.keys)
        dtype = np.result_type(*(self.source.spec(key).dtype for key in weight.keys))
        if weight.part == "same":
            return stored_spec((experts, rows, *columns), dtype)
        if weight.part == "values":
            return stored_spec((experts, *columns, rows), dtype)
        blocks = columns[0] // _BLOCK
        shape = (experts, rows, blocks) if weight.part == "scales" else (experts, rows, blocks, _BLOCK // 2)
        return stored_spec(shape, np.uint8)

    def is_decoded(self, key: str) -> bool:
        weight = self._find(key)
        return weight.part == "values" and isinstance(self.source.spec(weight.keys[0]), PackedSpec)

    def read_into(self, key: str, index: tuple[slice, ...] | None, out: HostArray | None) -> HostArray:
        weight = self._find(key)
        if len(weight.keys) == 1 and weight.part == "same":
            return read_into(self.source, weight.keys[0], index, out)
        slices = check_index(index, tuple(self.spec(key).shape), key)
        halves = [self._read(name, slices[:1], weight.part) for name in weight.keys]
        # The rows of gate and up in turn.
        values = np.stack(halves, axis=2).reshape(halves[0].shape[0], -1, *halves[0].shape[2:])
        values = values.swapaxes(1, 2) if weight.part == "values" else values
        return np.ascontiguousarray(values[(slice(None), *slices[1:])])

    def _read(self, key: str, experts: tuple[slice, ...], part: str) -> HostArray:
        """Return a part of a tensor, of some experts: `[experts, inner, …]`."""
        values, spec = self.source.read(key, experts), self.source.spec(key)
        if not isinstance(spec, PackedSpec):
            return values
        if part in ("values", "same"):
            decoded: HostArray = decode_packed(values, spec.scheme)
            return decoded
        blocks = values.reshape(*values.shape[:2], -1, 1 + _BLOCK // 2)
        if part == "scales":
            return blocks[..., 0]
        # A byte has the values i and i + 16 of a block in the file, and 2i and 2i + 1 in the checkpoint.
        codes = np.concatenate([blocks[..., 1:] & 0x0F, blocks[..., 1:] >> 4], axis=-1)
        pairs: HostArray = codes[..., ::2] | codes[..., 1::2] << 4
        return pairs


def _is_mxfp4(spec: WeightSpec) -> bool:
    """Return whether a tensor is the weight of experts in MXFP4."""
    return isinstance(spec, PackedSpec) and spec.scheme == _MXFP4
