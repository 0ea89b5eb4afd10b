"""Nomic's encoder layer of texts (Nussbaum et al. 2024): rotary attention and a gated MLP, norms behind each half. And
what its tower of images has beside layers: tables of patches by row and column, and a query that reads all tokens."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlx_jax.blocks.encoder import add_norm
from rlx_jax.blocks.ffn import INTO, OUT_OF, SwiGlu
from rlx_jax.blocks.linear import dense, pair
from rlx_jax.blocks.self_attention import SelfAttention
from rlx_jax.blocks.vision import read_by_query
from rlx_jax.errors import ShapeError
from rlx_jax.ir import hir
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.frequencies import axial_frequencies
from rlx_jax.trace.weight_part import WeightKey, WeightPart


@dataclass(frozen=True)
class NomicEncoderLayerSpec:
    """Keys and sizes of a NomicBERT layer; the mask input may be absent. `activation` is that of the gate.

    `rope_theta` is the base used when no RopeTables stage ran. `intermediate_size`, the width of the MLP, is needed
    only for weights that no source has.
    """

    layer_prefix: str
    hidden_size: int
    num_heads: int
    head_dim: int
    eps: float = 1e-12
    attention_mask_input: str | None = "attention_mask"
    activation: str = "silu"
    rope_theta: float = 1000.0
    intermediate_size: int | None = None


@dataclass(frozen=True)
class NomicEncoderLayer:
    """`h = ln(attn(x) Wo + x)`, `y = ln((h W₁₁ ⊙ silu(h W₁₂)) W₂ + h)`: `[B,S,H]` → same; queries and keys rotated.

    Weights under the prefix: `attn.Wqkv.weight` (q, k and v one above the other, `[3·N·D, H]`), `attn.out_proj.weight`,
    `norm1.*`, `mlp.fc11.weight`, `mlp.fc12.weight` (the gate), `mlp.fc2.weight`, `norm2.*`.
    """

    spec: NomicEncoderLayerSpec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "NomicEncoderLayer")
        s, p = self.spec, self.spec.layer_prefix
        hidden, own_tables = s.hidden_size, emit.state.rope_cos is None
        attention = SelfAttention(
            f"{p}.attn.Wqkv.weight", f"{p}.attn.out_proj.weight", s.num_heads, head_dim=s.head_dim,
            mask_input=s.attention_mask_input, name="attn", rope=None if own_tables else "",
            rope_theta=s.rope_theta if own_tables else None,
        )  # fmt: skip
        output = attention.emit(emit, x)
        h = add_norm(emit, p, "norm1", output, x, s.eps)
        up = dense(emit, p, "mlp.fc11", h, INTO, s.intermediate_size, bias=False)
        gate = dense(emit, p, "mlp.fc12", h, INTO, int(up.type.shape[-1]), bias=False)
        with emit.scope("mlp"):
            inner = emit.add_node(hir.GatedFfn(s.activation), gate, up)
        return add_norm(emit, p, "norm2", dense(emit, p, "mlp.fc2", inner, OUT_OF, hidden, bias=False), h, s.eps)


@dataclass(frozen=True)
class PatchRope:
    """cos and sin of a grid of patches, row by row, for the stages that follow; the active value passes by. The first
    half of a head of `head_dim` columns, a multiple of 4, turns by the row, the second by the column, each by the
    frequencies of a head of its own width (EVA-02: Fang et al. 2023). `before` tokens in front do not turn.

    With `reference` (rows, columns) places are scaled as if the grid had so many.
    """

    grid: tuple[int, int]
    head_dim: int
    theta: float = 10000.0
    reference: tuple[int, int] | None = None
    before: int = 1

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        half = self.head_dim // 2
        if self.head_dim < 4 or self.head_dim % 4:
            raise ShapeError(f"{emit.path}: PatchRope: head_dim is {self.head_dim}; expected a multiple of 4")
        places = np.indices(self.grid).reshape(2, -1).T
        table = np.concatenate([np.zeros((self.before, 2)), places])[None].astype(np.int32)
        scale = (1.0, 1.0) if self.reference is None else tuple(np.divide(self.reference, self.grid).tolist())
        frequencies, axes = axial_frequencies((half, half), self.theta)
        scaled = [f * scale[axis] for f, axis in zip(frequencies, axes, strict=True)]
        with emit.scope("rotary_emb"):
            emit.state.rope_cos, emit.state.rope_sin = emit.rope_angles(emit.constant(table), scaled, axes=axes)
        return value


@dataclass(frozen=True)
class NomicSelector:
    """`x + mlp(ln(p))` with what a learned query reads of all tokens as p: `[B,S,H]` → same, every token alike.

    Weights under the prefix: `attn.latent` `[1, 1, H]`, `attn.Wq.*`, `attn.Wkv.*` (keys above values),
    `attn.out_proj.*`, `norm1.*`, and `mlp.{fc11,fc12,fc2}.*`, whose gate is `fc12`. `inner`, the width of the MLP, is
    needed only for weights that no source has.
    """

    prefix: str
    num_heads: int
    eps: float = 1e-6
    inner: int | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, p = emit.require(value, "NomicSelector"), self.prefix
        if x.ndim != 3:
            raise ShapeError(f"{emit.path}: NomicSelector needs [B, S, H], got {x.type}")
        with emit.scope("selector"):
            weights: list[WeightKey] = [f"{p}.attn.Wq.weight", *WeightPart.split(f"{p}.attn.Wkv.weight", 2)]
            biases: list[WeightKey] = [f"{p}.attn.Wq.bias", *WeightPart.split(f"{p}.attn.Wkv.bias", 2)]
            out = f"{p}.attn.out_proj"
            pooled = read_by_query(emit, x, f"{p}.attn.latent", weights, biases, out, self.num_heads)
            normed = emit.layer_norm(pooled, *pair(f"{p}.norm1"), self.eps)
            gate, up, down = (pair(f"{p}.mlp.{name}") for name in ("fc12", "fc11", "fc2"))
            mlp = SwiGlu(gate[0], up[0], down[0], (gate[1], up[1], down[1]), self.inner)
            return x + mlp.emit(emit, normed)
