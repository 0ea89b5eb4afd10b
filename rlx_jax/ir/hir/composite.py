"""Blocks that stand for several others."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace

from rlx_jax.errors import GraphError, ShapeError, wrong_arity
from rlx_jax.ir.graph import Builder, Hir, Value
from rlx_jax.ir.hir.decoder_layer import write_attention, write_gated_ffn, write_layer
from rlx_jax.ir.hir.masks import MASK_KINDS, MaskKind
from rlx_jax.ir.hir.sequence import Rope, attention
from rlx_jax.ir.hir.token_wise import GatedFfn, Linear, RmsNorm
from rlx_jax.ir.ops.attention import check_heads
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.traits import COMPOSITE
from rlx_jax.ir.types import DimLike, TensorType

DECODER_OPERANDS = ("x", "ln1_g", "ln1_b", "q", "k", "v", "o", "ln2_g", "ln2_b", "gate", "up", "down", "cos", "sin")


PROJECTIONS = {n: f"self_attn.{n}_proj" for n in "qkvo"} | {n: f"mlp.{n}_proj" for n in ("gate", "up", "down")}
"""Where in the layer each projection stands."""

DECODER_BIASES = tuple(f"{name}_bias" for name in PROJECTIONS)

NORMS = {
    "before_attention": ("input_layernorm", ("ln1_g", "ln1_b")),
    "before_mlp": ("post_attention_layernorm", ("ln2_g", "ln2_b")),
}
"""Where each norm of `write_layer` that there is stands, and its operands."""


@dataclass(frozen=True)
class LlamaDecoderBlock(Hir):
    """One pre-norm Llama layer (Touvron et al. 2023): h = x + attn(rms(x))·Wo, y = h + swiglu(rms(h)).

    Operands: the 14 of `DECODER_OPERANDS`; `mask` if the mask kind is custom or keep (`[B,T]`)
    or bias (`[B,N,S,T]`); then one operand for each name in `biases`.
    Weights are `[in, out]` (`contract=0`) or the checkpoint's `[out, in]` (`contract=1`); norms `[H]`.
    """

    traits = COMPOSITE

    heads: int
    head_dim: int
    kv_heads: int
    eps: float
    mask: MaskKind = field(default=MASK_KINDS["causal"])
    contract: int = 0
    biases: tuple[str, ...] = ()

    def check(self, *operands: TensorType) -> None:
        expected = 14 + bool(self.mask.operand)
        if len(operands) != expected + len(self.biases):
            detail = f" (mask {self.mask}{f', biases {list(self.biases)}' if self.biases else ''})"
            raise wrong_arity("llama_decoder_block", str(expected + len(self.biases)), len(operands), detail)
        unknown = [n for n in self.biases if n not in DECODER_BIASES]
        if unknown:
            raise GraphError(f"llama_decoder_block: unknown biases {unknown}, known are {list(DECODER_BIASES)}")
        check_heads(self.heads, self.kv_heads)
        self._check_weights(operands)

    def _check_weights(self, operands: tuple[TensorType, ...]) -> None:
        """Hold every weight against x and the sizes of the block, so that the one that does not fit is named."""
        named = dict(zip((*DECODER_OPERANDS, *["mask"] * bool(self.mask.operand), *self.biases), operands, strict=True))
        hidden, q, kv = named["x"].shape[-1], self.heads * self.head_dim, self.kv_heads * self.head_dim
        ffn = self._ffn([named[n].shape for n in ("gate", "up")], named["down"].shape)
        out = {"q": q, "k": kv, "v": kv, "o": hidden, "gate": ffn, "up": ffn, "down": hidden}
        want: dict[str, tuple[DimLike, ...]] = dict.fromkeys(("ln1_g", "ln1_b", "ln2_g", "ln2_b"), (hidden,))
        for name, columns in out.items():
            rows = {"o": q, "down": ffn}.get(name, hidden)
            want[name] = (rows, columns) if self.contract == 0 else (columns, rows)
            want[f"{name}_bias"] = (columns,)
        for place, (name, got) in enumerate(named.items()):
            if name in want and got.shape != want[name]:
                raise ShapeError(
                    f"llama_decoder_block: operand {name} is {got}, expected {list(want[name])} "
                    f"for {self.heads}/{self.kv_heads} heads of width {self.head_dim} and x {named['x']}"
                ).of(place)

    def _ffn(self, wide: list[tuple[DimLike, ...]], down: tuple[DimLike, ...]) -> DimLike:
        """The feed-forward width that most of gate, up and down agree on."""
        sizes = [shape[1 - self.contract] for shape in wide if len(shape) == 2]
        sizes += [down[self.contract]] if len(down) == 2 else []
        return max(sizes, key=sizes.count, default=0)

    def expand(self, b: Builder, *operands: Value) -> Value:
        v = dict(zip(DECODER_OPERANDS, operands, strict=False))
        extra = operands[14 : 14 + bool(self.mask.operand)]
        bias = dict(zip(self.biases, operands[14 + len(extra) :], strict=True))
        origin = b.origin

        def inside(part: str) -> AbstractContextManager[None]:
            return b.at(replace(origin, path=(*origin.path, *part.split("."))))

        def norm(name: str, x: Value) -> Value:
            if name not in NORMS:
                return x
            part, weights = NORMS[name]
            with inside(part):
                return b(RmsNorm(self.eps), x, *(v[w] for w in weights))

        def project(name: str, x: Value) -> Value:
            with inside(PROJECTIONS[name]):
                given = (bias[f"{name}_bias"],) if f"{name}_bias" in bias else ()
                return b(Linear(self.contract, bias=bool(given)), x, v[name], *given)

        def rotate(heads: dict[str, Value]) -> dict[str, Value]:
            rope = Rope(self.head_dim, self.head_dim)
            with inside("self_attn"):
                return heads | {name: b(rope, heads[name], v["cos"], v["sin"]) for name in "qk"}

        def attend(*heads: Value) -> Value:
            with inside("self_attn"):
                return b(attention(self.heads, self.kv_heads, self.mask), *heads, *extra)

        def mixer(x: Value) -> Value:
            with inside("self_attn"):
                x = b.boundary("input", x)
            return project("o", write_attention(x, project=project, rotate=rotate, attend=attend))

        def gate(*values: Value) -> Value:
            with inside("mlp"):
                return b(GatedFfn("silu"), *values)

        return write_layer(
            v["x"], norm=norm, mixer=mixer, mlp=lambda x: write_gated_ffn(x, project=project, gate=gate),
            add=lambda x, change: b(Binary("add"), x, change),
        )  # fmt: skip

    def text(self) -> str:
        return (
            f"llama_decoder_block(heads={self.heads}, dim={self.head_dim}, kv={self.kv_heads}, "
            f"eps={self.eps:g}, mask={self.mask})"
        )
