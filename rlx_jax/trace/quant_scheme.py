"""The schemes of quantization by the names of the specification (IR 8.1)."""

from __future__ import annotations

import re

from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError, did_you_mean, shown
from rlx_jax.io.ggml import BLOCKS
from rlx_jax.ir.packed import SCHEMES

# The kinds of schemes with codes and scales as separate operands, and the dtypes of codes that are floats.
FLOAT_CODES = {"fp8e4m3": "f8_e4m3", "fp8e5m2": "f8_e5m2"}
BLOCK_KINDS = ("int8", "int8a", "int4")
NVFP4 = "nvfp4/16"
_BLOCKED = re.compile(rf"({'|'.join(BLOCK_KINDS)})/([1-9][0-9]{{0,8}})")


@dataclass(frozen=True)
class QuantScheme:
    """How a weight is quantized: packed in blocks, or as codes `[k, n]` with scales as operands.

    Args:
        name: `gguf_q4k` and the other names of `BLOCKS`; `int8/b`, `int8a/b` (with zero points) and `int4/b` with one
            scale for b rows of a column; `fp8e4m3`, `fp8e5m2`, `nvfp4/16`.

    Raises:
        GraphError: there is no scheme of this name.
    """

    name: str

    def __post_init__(self) -> None:
        names = (*SCHEMES, *FLOAT_CODES, NVFP4)
        if not isinstance(self.name, str) or not (self.name in names or _BLOCKED.fullmatch(self.name)):
            suggestion = did_you_mean(self.name, names) if isinstance(self.name, str) else ""
            choices = suggestion or "; known are int8/b, int8a/b, int4/b, " + ", ".join((*FLOAT_CODES, NVFP4, *SCHEMES))
            raise GraphError(f"unknown scheme of quantization {shown(self.name)}{choices}")

    @property
    def kind(self) -> str:
        """Return the name without the block size."""
        return self.name.partition("/")[0]

    @property
    def is_packed(self) -> bool:
        """Return whether a parameter is declared with this scheme (`is_gguf`); otherwise scales are operands."""
        return self.name in BLOCKS

    is_gguf = is_packed

    @property
    def block(self) -> int | None:
        """Return how many values share a scale; None if all values of a row or column do."""
        return SCHEMES[self.name].block if self.is_packed else int(self.name.partition("/")[2] or 0) or None

    @property
    def operands(self) -> tuple[str, ...]:
        """Return the required operands after the codes."""
        extra = {"int8a": ("zero_point",), "nvfp4": ("global_scale",)}.get(self.kind, ())
        return () if self.is_packed else ("scale", *extra)

    @property
    def optional_operands(self) -> tuple[str, ...]:
        """Return the operands that have a default."""
        return ("zero_point",) if self.kind in ("int8", "int4") else ()

    @property
    def has_scale(self) -> bool:
        """Return whether scales are an operand."""
        return "scale" in self.operands

    @property
    def has_zero_point(self) -> bool:
        """Return whether zero points are a required operand."""
        return "zero_point" in self.operands

    @property
    def scale_is_fp8(self) -> bool:
        """Return whether the scales are bytes of float8."""
        return self.name == NVFP4
