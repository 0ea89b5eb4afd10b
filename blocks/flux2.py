"""Stages of FLUX.2's transformer: blocks of two streams, then blocks of the joint stream, modulated by time.

Source: Black Forest Labs 2025, as in `diffusers.Flux2Transformer2DModel`. Letters: B batch, T text tokens, I image
tokens, H hidden width N·D, F feed-forward width. Weights are `[out, in]`; projections have no bias and layer norms no
weight. `Flux2Conditioning` and `Flux2Rope` register values that the other stages read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from rlx_jax.blocks import stream_id
from rlx_jax.blocks.control import DualStream
from rlx_jax.blocks.ffn import DOWN_ROLES, UP_ROLES
from rlx_jax.blocks.linear import dense, head_norm
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import ShapeError
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.frequencies import axial_frequencies

__all__ = [
    "Flux2BlockSpec", "Flux2Conditioning", "Flux2DoubleBlock", "Flux2JoinStreams", "Flux2Output", "Flux2Rope",
    "Flux2SingleBlock",
]  # fmt: skip

# Names of registered values: the embedding of time and guidance `[B, H]`; rope tables of the joint sequence
# `[1, T+I, D/2]`.
TEMB, COS, SIN = "flux2.temb", "flux2.cos", "flux2.sin"

# Modulations by name: the module, and the number of vectors `[B, 1, H]` it produces, registered as `flux2.{name}.{i}`.
MODULATIONS = {
    "double_img": ("double_stream_modulation_img", 6),
    "double_txt": ("double_stream_modulation_txt", 6),
    "single": ("single_stream_modulation", 3),
}

# Roles of the axes of weights, by which a mesh shards them.
QKV_ROLES, OUT_ROLES = ("heads", "hidden"), ("hidden", "heads")
HIDDEN_ROLES = (None, "hidden")


@dataclass(frozen=True, kw_only=True)
class Flux2BlockSpec:
    """Sizes of a block; the hidden width is `num_heads · head_dim`, and `ffn` is F."""

    kind: Literal["double", "single"]
    num_heads: int
    head_dim: int
    ffn: int
    eps: float = 1e-6

    @property
    def hidden(self) -> int:
        """The hidden width H."""
        return self.num_heads * self.head_dim


# -- functions that all blocks share -------------------------------------------------------------


def modulate(emit: Emit, x: FlowValue, name: str, first: int, eps: float) -> FlowValue:
    """Return `(1 + scale) ⊙ ln(x) + shift`; vector `first` of the modulation `name` is shift, the next one scale."""
    shift, scale = (emit.named(f"flux2.{name}.{first + i}") for i in range(2))
    return (scale + 1.0) * emit.layer_norm(x, eps=eps) + shift


def gated(emit: Emit, value: FlowValue, name: str, index: int) -> FlowValue:
    """Return `gate ⊙ value`, with vector `index` of the modulation `name` as the gate."""
    return emit.named(f"flux2.{name}.{index}") * value


def swiglu(emit: Emit, x: FlowValue, ffn: int) -> FlowValue:
    """Return `silu(first half) ⊙ second half` of x `[…, 2·ffn]`."""
    gate, up = emit.split(x, (ffn, ffn))
    return emit.gated_ffn(gate=gate, up=up)


def attend(emit: Emit, q: FlowValue, k: FlowValue, v: FlowValue, spec: Flux2BlockSpec) -> FlowValue:
    """Return full (non-causal) attention over the joint sequence with rotated queries and keys, `[B, T+I, H]`."""
    cos, sin = emit.named(COS), emit.named(SIN)
    q, k = (emit.rope(x, cos, sin, head_dim=spec.head_dim, style="interleaved") for x in (q, k))
    return emit.attention(q, k, v, heads=spec.num_heads)


# -- stages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Flux2Conditioning:
    """Embed time and optionally guidance, and register the modulations of the blocks; the active value is unchanged.

    `temb = mlp(sinusoids(timestep)) [+ mlp(sinusoids(guidance))]`, `mlp(x) = silu(x W₁) W₂`. Inputs: `timestep` and
    `guidance` `[B]`. Weights: `time_guidance_embed.{timestep,guidance}_embedder.
    linear_{1,2}.weight` `[H, channels]`, `[H, H]`; `double_stream_modulation_{img,txt}.linear.weight` `[6H, H]`,
    `single_stream_modulation.linear.weight` `[3H, H]`: shift, scale and gate, twice in a double block.
    """

    hidden: int
    channels: int = 256
    guidance: bool = True

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.scope("time_guidance_embed"):
            temb = self._embedded(emit, "timestep", emit.flow_input("timestep"))
            if self.guidance:
                temb = temb + self._embedded(emit, "guidance", emit.flow_input("guidance"))
            emit.set_named(TEMB, temb)
            active = emit.silu(temb)
        for name, (key, count) in MODULATIONS.items():
            with emit.scope(key):
                packed = emit.linear(active, f"{key}.linear.weight", roles=HIDDEN_ROLES, columns=count * self.hidden)
                for i, part in enumerate(emit.split(packed, (self.hidden,) * count)):
                    emit.set_named(f"flux2.{name}.{i}", part.reshape(-1, 1, self.hidden))
        return value

    def _embedded(self, emit: Emit, name: str, value: FlowValue) -> FlowValue:
        """Return the embedding `[B, H]` of the times or guidance values `[B]`, by the MLP `{name}_embedder`."""
        key = f"time_guidance_embed.{name}_embedder"
        with emit.scope(f"{name}_embedder"):
            waves = emit.sinusoids(value, self.channels, scale=1000.0)
            inner = emit.linear(waves, f"{key}.linear_1.weight", roles=("ffn", None), columns=self.hidden)
            return emit.linear(emit.silu(inner), f"{key}.linear_2.weight", roles=DOWN_ROLES, columns=self.hidden)


@dataclass(frozen=True)
class Flux2Rope:
    """Register rope tables of the joint sequence from the inputs `txt_ids` `[1, T, A]` and `img_ids` `[1, I, A]`.

    The active value is unchanged. Coordinate a rotates `axes[a]` columns of each head, with frequencies
    `theta^(−2i/axes[a])`. For ids with several rows, the first row applies to the full batch, as in diffusers.
    """

    axes: tuple[int, ...]
    theta: float = 2000.0

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.scope("pos_embed"):
            ids = [emit.flow_input(name)[:1] for name in ("txt_ids", "img_ids")]  # text first, as in the blocks
            for name, rows in zip(("txt_ids", "img_ids"), ids, strict=True):
                if rows.ndim != 3 or rows.type.shape[2] != len(self.axes):
                    raise ShapeError(f"{emit.path}: input {name} is {rows.type}; expected [rows, S, {len(self.axes)}]")
            frequencies, axes = axial_frequencies(self.axes, self.theta)
            cos, sin = emit.rope_angles(emit.concat(ids, axis=1), frequencies, axes=axes)
            emit.set_named(COS, cos)
            emit.set_named(SIN, sin)
        return value


@dataclass(frozen=True)
class Flux2DoubleBlock:
    """One block of the two streams `img` `[B, I, H]` and `txt` `[B, T, H]`; the active value is unchanged.

    Each stream has separate modulated norms, projections and feed-forward weights. Attention is joint, with text
    first, after an RMSNorm of every query and key head. `x = x + gate ⊙ attn(…)`, `x = x + gate ⊙ ff(…)`. Weights under
    `prefix`: `attn.{to_q,to_k,to_v,to_out.0,add_q_proj,add_k_proj,add_v_proj,to_add_out}` `[H, H]`,
    `attn.norm_{q,k,added_q,added_k}` `[D]`, `{ff,ff_context}.linear_in` `[2F, H]`, `.linear_out` `[H, F]`.
    """

    prefix: str
    spec: Flux2BlockSpec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        return DualStream("joint", stream_id.IMG, stream_id.TXT, self.update_streams).emit(emit, value)

    def update_streams(self, emit: Emit, img: FlowValue, txt: FlowValue) -> tuple[FlowValue, FlowValue]:
        """Return the image stream and the text stream after the block."""
        p, s = f"{self.prefix}.attn", self.spec

        def linear(name: str, x: FlowValue, roles: tuple[str, str] = QKV_ROLES, columns: int = s.hidden) -> FlowValue:
            return dense(emit, self.prefix, name, x, roles, columns, bias=False)

        def heads(x: FlowValue, names: Sequence[str], norms: Sequence[str]) -> list[FlowValue]:
            q, k, v = (linear(f"attn.{name}", x) for name in names)
            q, k = (
                head_norm(emit, a, f"{p}.{n}.weight", s.head_dim, s.eps) for a, n in zip((q, k), norms, strict=True)
            )
            return [q, k, v]

        def feed_forward(x: FlowValue, name: str, key: str) -> FlowValue:
            inner = linear(f"{key}.linear_in", modulate(emit, x, name, 3, s.eps), UP_ROLES, 2 * s.ffn)
            with emit.scope(key):
                inner = swiglu(emit, inner, s.ffn)
            return x + gated(emit, linear(f"{key}.linear_out", inner, DOWN_ROLES), name, 5)

        img_heads = heads(modulate(emit, img, "double_img", 0, s.eps), ("to_q", "to_k", "to_v"), ("norm_q", "norm_k"))
        txt_heads = heads(
            modulate(emit, txt, "double_txt", 0, s.eps),
            ("add_q_proj", "add_k_proj", "add_v_proj"),
            ("norm_added_q", "norm_added_k"),
        )
        q, k, v = (emit.concat(pair, axis=1) for pair in zip(txt_heads, img_heads, strict=True))
        attended = attend(emit, q, k, v, s)
        num_text = txt.shape[1]
        img = img + gated(emit, linear("attn.to_out.0", attended[:, num_text:], OUT_ROLES), "double_img", 2)
        txt = txt + gated(emit, linear("attn.to_add_out", attended[:, :num_text], OUT_ROLES), "double_txt", 2)
        return feed_forward(img, "double_img", "ff"), feed_forward(txt, "double_txt", "ff_context")


@dataclass(frozen=True)
class Flux2SingleBlock:
    """One block of the joint sequence `[B, T+I, H]`: attention and feed-forward in parallel (Dehghani et al. 2023).

    `[q ‖ k ‖ v ‖ m] = modulated(x) W`, `x = x + gate ⊙ [attn(q, k, v) ‖ swiglu(m)] W_o`. Weights under `prefix`:
    `attn.to_qkv_mlp_proj` `[3H + 2F, H]`, `attn.to_out` `[H, H + F]`, `attn.norm_{q,k}` `[D]`.
    """

    prefix: str
    spec: Flux2BlockSpec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, s, p = emit.require(value, "Flux2SingleBlock"), self.spec, f"{self.prefix}.attn"
        with emit.scope("attn"):
            normed = modulate(emit, emit.block_input(x), "single", 0, s.eps)
            columns = (s.hidden, s.hidden, s.hidden, 2 * s.ffn)
            packed = emit.linear(normed, f"{p}.to_qkv_mlp_proj.weight", roles=UP_ROLES, columns=sum(columns))
            q, k, v, inner = emit.split(packed, columns)
            q, k = (head_norm(emit, a, f"{p}.norm_{n}.weight", s.head_dim, s.eps) for a, n in ((q, "q"), (k, "k")))
            merged = emit.concat([attend(emit, q, k, v, s), swiglu(emit, inner, s.ffn)], axis=-1)
            out = emit.linear(merged, f"{p}.to_out.weight", roles=DOWN_ROLES, columns=s.hidden)
        return x + gated(emit, out, "single", 2)


@dataclass(frozen=True)
class Flux2JoinStreams:
    """Concatenate the streams `txt` and `img` to the joint sequence, text first: `[B, T+I, H]`."""

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        with emit.scope("join"):
            return emit.concat([emit.stream(stream_id.TXT), emit.stream(stream_id.IMG)], axis=1)


@dataclass(frozen=True)
class Flux2Output:
    """Output head: modulate and project the image tokens of the joint sequence, `[B, T+I, H]` → `[B, I, C]`.

    `((1 + scale) ⊙ ln(x) + shift) Wᵀ`, with scale and shift from the embedding of time. Weights:
    `norm_out.linear.weight` `[2H, H]` (scale, then shift), `proj_out.weight` `[C, H]`. `channels`, C, is needed only
    for weights that no source has.
    """

    hidden: int
    eps: float = 1e-6
    channels: int | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "Flux2Output")
        with emit.scope("norm_out"):
            image = emit.block_input(x)[:, emit.stream(stream_id.TXT).shape[1] :]
            packed = emit.linear(
                emit.silu(emit.named(TEMB)), "norm_out.linear.weight", roles=HIDDEN_ROLES, columns=2 * self.hidden
            )
            scale, shift = (part.reshape(-1, 1, self.hidden) for part in emit.split(packed, (self.hidden,) * 2))
            image = emit.layer_norm(image, eps=self.eps) * (scale + 1.0) + shift
        with emit.scope("proj_out"):
            return emit.linear(image, "proj_out.weight", roles=HIDDEN_ROLES, columns=self.channels)
