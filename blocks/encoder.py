"""Layers of text encoders: one record for all, and the layers of BERT (Devlin et al. 2018) and NomicBERT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlx_jax.blocks.ffn import DOWN_ROLES, UP_ROLES
from rlx_jax.blocks.linear import TABLE_ROLES, LayerNorm, module_keys, rms_norm
from rlx_jax.blocks.positions import POSITION_BIAS, rope_tables_for
from rlx_jax.blocks.self_attention import head_width
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import UnsupportedError
from rlx_jax.ir import hir
from rlx_jax.ir.ops.pointwise import Binary
from rlx_jax.ir.param import Roles
from rlx_jax.trace.attention import Rotary
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightKey, WeightPart

__all__ = [
    "BertEncoderLayer", "BertEncoderLayerSpec", "DistanceEmbeddings", "EncoderExperts", "EncoderKeys", "EncoderLayer",
    "EncoderLayerSpec", "NomicEncoderLayer", "NomicEncoderLayerSpec", "RelativeKeys",
]  # fmt: skip


# A part of a stored tensor: its name, its index, and the number of equal parts, or the sizes of all.
Part = tuple[str, int, int | tuple[int, ...]]


@dataclass(frozen=True)
class EncoderKeys:
    """Names of the modules of an encoder layer, relative to its prefix.

    Args:
        qkv: the projections q, k and v, or the one that has all three, in this order.
        up, gate: the projections of a gated MLP; with one name they are stored as one tensor. A plain MLP has no gate.
        up_first: up is stored before the gate.
        attention_norm, mlp_norm: the norms of the two halves; empty for none.
    """

    qkv: tuple[str, ...]
    out: str
    attention_norm: str
    up: str
    down: str
    mlp_norm: str
    gate: str = ""
    up_first: bool = False


@dataclass(frozen=True, kw_only=True)
class RelativeKeys:
    """Scores of distances (DeBERTa, He et al. 2021): see `hir.RelativeScores`, which has the last two fields.

    Args:
        embeddings: name of the registered value with the embeddings of distances, `[R, H]`.
        keys, queries: modules that project the embeddings, relative to the layer's prefix; empty without this term.
        keys_bias: whether the projection `keys` has a bias.
    """

    embeddings: str
    keys: str
    queries: str
    keys_bias: bool = True
    buckets: int = 0
    max_distance: int


@dataclass(frozen=True)
class EncoderExperts:
    """Experts in place of the MLP, `Σₑ wₑ · act(x Uₑ) Dₑ + b` over the `top_k` experts e of a token (Nomic Embed v2).

    The weights w are a softmax over all experts and do not add up to 1. Every expert is computed: the stored tensors
    have the rows of all, `[E·F, H]`.

    Args:
        count, top_k: number of experts, and number of experts per token.
        router, up, down, bias: names of the tensors, relative to the layer's prefix.
    """

    count: int
    top_k: int
    router: str
    up: str
    down: str
    bias: str

    def compute(self, emit: Emit, x: FlowValue, spec: EncoderLayerSpec) -> FlowValue:
        """Write the experts of the layer `spec` for the tokens `x`."""
        hidden = spec.hidden_size
        router, up, down, bias = (f"{spec.prefix}.{name}" for name in (self.router, self.up, self.down, self.bias))
        rows = None if spec.intermediate_size is None else self.count * spec.intermediate_size
        with emit.scope("mlp"):
            x = emit.block_input(x)
            with emit.scope("router"):
                weight = emit.param(router, (self.count, hidden), roles=(None, "hidden"))
                logits = emit.add_node(hir.Linear(1, f32_result=True), x, weight)
                weights, ids = emit.route(logits, top_k=self.top_k, normalise=False)
                shares = emit.sum(emit.one_hot(ids, self.count) * weights.reshape(*weights.shape, 1), -2)
            with emit.scope("experts"):
                inner = emit.linear(x, up, activation=spec.activation, roles=UP_ROLES, columns=rows)
                lead = inner.shape[:-1]
                shared = inner.reshape(*lead, self.count, -1)
                shared = shared * emit.cast(shares, inner.dtype).reshape(*lead, self.count, 1)
                weight = emit.param(down, (rows, hidden), UP_ROLES)
                return emit.linear(shared.reshape(*inner.shape), weight, emit.param(bias, (hidden,)))


@dataclass(frozen=True, kw_only=True)
class EncoderLayerSpec:
    """Keys, sizes and options of an encoder layer; the defaults describe BERT's layer.

        post-norm   h = norm(x + attention(x))        y = norm(h + mlp(h))
        pre-norm    h = x + attention(norm(x))        y = h + mlp(norm(h))

    Args:
        prefix: prefix of the layer's parameters.
        num_kv_heads: number of key/value heads; None: as many as heads.
        intermediate_size: width of the MLP, needed only for weights that no source has.
        rms: norms are RMS norms; otherwise LayerNorms, with biases if `norm_bias`.
        qkv_bias, out_bias, up_bias, down_bias: whether the projections have biases; `up_bias` is also the gate's.
        activation: activation of the MLP or of its gate, a name in `UNARY`.
        mask_input: name of an input with a keep mask `[B, S]`; None for no mask. The input may be absent.
        window: keys at a distance of less than this many tokens, on both sides; None for all.
        causal: tokens read no later ones.
        rope: name of the RopeTables that rotate queries and keys, "" for tables without a name; None for no rotation.
        rope_style: how columns pair up, as in `emit.rotary`.
        rope_theta: base of the rotation where `rope` is "" and no RopeTables stage ran.
        score_scale: factor of q kᵀ; None is D^(−1/2).
        position_bias: name of the registered value of a RelativeBias stage, added to the scores.
        relative: scores of distances, added to the scores.
        qkv_by_head: in the one projection `qkv` the rows of each head's q, k and v follow each other. It has no bias,
            and the block that contains it has `q_bias` and `v_bias` (DeBERTa).
        experts: replaces the MLP.
    """

    prefix: str
    keys: EncoderKeys
    hidden_size: int
    num_heads: int
    head_dim: int
    num_kv_heads: int | None = None
    intermediate_size: int | None = None
    eps: float = 1e-12
    pre_norm: bool = False
    rms: bool = False
    norm_bias: bool = True
    qkv_bias: bool = True
    out_bias: bool = True
    up_bias: bool = True
    down_bias: bool = True
    activation: str = "gelu"
    mask_input: str | None = "attention_mask"
    window: int | None = None
    causal: bool = False
    rope: str | None = None
    rope_style: str = "half"
    rope_theta: float = 10000.0
    score_scale: float | None = None
    position_bias: str | None = None
    relative: RelativeKeys | None = None
    qkv_by_head: bool = False
    experts: EncoderExperts | None = None

    @property
    def kv_heads(self) -> int:
        """The number of key/value heads."""
        return self.num_kv_heads or self.num_heads


@dataclass(frozen=True)
class EncoderLayer:
    """An encoder layer, `[B,S,H]` → same: see `EncoderLayerSpec`."""

    spec: EncoderLayerSpec

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, s, k = emit.require(value, type(self).__name__), self.spec, self.spec.keys
        outer = k.qkv[0].split(".")[:1]  # the block of attention; with the norm it also contains the residual sum
        if k.attention_norm.split(".")[0] == outer[0]:
            x = emit.block_input(x, *outer)
        if s.pre_norm:
            attended = self._attention(emit, self._norm(emit, k.attention_norm, x))
            h = emit.add_node(Binary("add"), attended, x)
            return emit.add_node(Binary("add"), self._mlp(emit, self._norm(emit, k.mlp_norm, h)), h)
        h = self._add_norm(emit, k.attention_norm, self._attention(emit, x), x)
        return self._add_norm(emit, k.mlp_norm, self._mlp(emit, h), h)

    def _attention(self, emit: Emit, x: FlowValue) -> FlowValue:
        """Write the attention of `x` with its projections."""
        s, names = self.spec, self.spec.keys
        block, output = (name.split(".")[:-1] for name in (names.qkv[0], names.out))
        x = emit.block_input(x, *block)
        q, k, v = self._heads(emit, x)
        optional = {
            "keep": None if s.mask_input is None else emit.optional_input(s.mask_input),
            "bias": None if s.position_bias is None else emit.named(s.position_bias),
        }
        with emit.scope(*block):
            if s.rope is not None:
                tables = rope_tables_for(emit, x, s.head_dim, s.rope_theta, s.rope)
                rotary = Rotary(*tables, s.head_dim, s.rope_style)
                q, k = (emit.rope(heads, rotary, head_dim=s.head_dim) for heads in (q, k))
        if s.relative is not None:
            optional["bias"] = self._relative_scores(emit, s.relative, q, k)
        with emit.scope(*block):
            extra = {name: value for name, value in optional.items() if value is not None}
            op = hir.Attention(
                s.num_heads, s.kv_heads, s.causal, s.window, s.score_scale, extra=tuple(extra),
                ahead=0 if s.causal or s.window is None else s.window - 1, by_distance="bias" in extra,
            )  # fmt: skip
            context = emit.add_node(op, q, k, v, *extra.values())
        # BERT's output projection has a block, which dumps show; in other styles it belongs to the block of attention.
        context = context if output == block else emit.block_input(context, *output)
        return self._project(emit, names.out, context, ("hidden", "heads"), s.hidden_size, s.out_bias)

    def _heads(self, emit: Emit, x: FlowValue) -> tuple[FlowValue, ...]:
        """Write the projections q `[B,S,N·D]`, k and v `[B,S,K·D]`."""
        s = self.spec
        if s.qkv_by_head:
            return self._heads_by_head(emit, x)
        heads = (s.num_heads, s.kv_heads, s.kv_heads)
        roles = ("heads", *("kv_heads" if s.num_kv_heads else "heads",) * 2)
        parts: tuple[Part | None, ...] = (None, None, None)
        names = s.keys.qkv
        if len(names) == 1:
            sizes = 3 if s.kv_heads == s.num_heads else tuple(n * s.head_dim for n in heads)
            names, parts = names * 3, tuple((name, index, sizes) for index, name in enumerate("qkv"))
        return tuple(
            self._project(emit, name, x, (role, "hidden"), count * s.head_dim, s.qkv_bias, part=part)
            for name, role, count, part in zip(names, roles, heads, parts, strict=True)
        )

    def _heads_by_head(self, emit: Emit, x: FlowValue) -> tuple[FlowValue, ...]:
        """Write the projection whose weight has the rows of each head's q, k and v in turn."""
        s, width = self.spec, self.spec.num_heads * self.spec.head_dim
        fused = self._project(emit, s.keys.qkv[0], x, ("heads", "hidden"), 3 * width, bias=False)
        lead, block = fused.shape[:-1], s.keys.qkv[0].split(".")[:-1]
        with emit.scope(*block):
            heads = emit.split(fused.reshape(*lead, s.num_heads, 3 * s.head_dim), 3)
            q, k, v = (part.reshape(*lead, width) for part in heads)
            keys = (".".join([s.prefix, *block, f"{name}_bias"]) for name in "qv")
            q_bias, v_bias = (emit.param(key, (width,), ("heads",)) for key in keys)
            return q + q_bias, k, v + v_bias

    def _relative_scores(self, emit: Emit, relative: RelativeKeys, q: FlowValue, k: FlowValue) -> FlowValue:
        """Write the scores of distances, `[B,N,S,S]`."""
        s, embeddings, width = self.spec, emit.named(relative.embeddings), self.spec.num_heads * self.spec.head_dim
        biased = {"keys": relative.keys_bias, "queries": True}
        modules = {term: getattr(relative, term) for term in biased if getattr(relative, term)}
        rows = [self._project(emit, m, embeddings, ("heads", "hidden"), width, biased[t]) for t, m in modules.items()]
        scale = s.head_dim**-0.5 if s.score_scale is None else s.score_scale
        op = hir.RelativeScores(s.num_heads, scale, relative.buckets, relative.max_distance, tuple(modules))
        with emit.scope(*s.keys.qkv[0].split(".")[:-1]):
            return emit.add_node(op, q, k, *rows)

    def _mlp(self, emit: Emit, x: FlowValue) -> FlowValue:
        """Write the MLP of `x`, or its experts."""
        if self.spec.experts is not None:
            return self.spec.experts.compute(emit, x, self.spec)
        s, k, inner = self.spec, self.spec.keys, self.spec.intermediate_size
        block, down_block = (name.split(".")[:-1] for name in (k.up, k.down))
        if not k.gate:
            y = self._project(emit, k.up, x, UP_ROLES, inner, s.up_bias, activation=s.activation)
            y = y if down_block == block else emit.block_input(y, *down_block)
        else:
            halves: dict[str, FlowValue] = {}
            for index, half in enumerate(("up", "gate") if k.up_first else ("gate", "up")):
                part = (half, index, 2) if k.gate == k.up else None
                halves[half] = self._project(emit, getattr(k, half), x, UP_ROLES, inner, s.up_bias, part=part)
                inner = int(halves[half].type.shape[-1])
            with emit.scope(*block):
                y = emit.add_node(hir.GatedFfn(s.activation), halves["gate"], halves["up"])
        return self._project(emit, k.down, y, DOWN_ROLES, s.hidden_size, s.down_bias)

    def _project(
        self, emit: Emit, name: str, x: FlowValue, roles: Roles, columns: int | None, bias: bool = True, *,
        activation: str = "", part: Part | None = None,
    ) -> FlowValue:  # fmt: skip
        """Write a projection of `x` in the block `name`, or in a block inside of it with a part of its tensors."""
        keys: tuple[WeightKey, ...] = module_keys(f"{self.spec.prefix}.{name}")
        block = name.split(".")
        if part is not None:
            half, index, sizes = part
            keys, block = tuple(WeightPart.split(str(key), sizes)[index] for key in keys), [*block, half]
        with emit.scope(*block):
            return emit.linear(
                x, keys[0], keys[1] if bias else None, activation=activation, roles=roles, columns=columns
            )  # fmt: skip

    def _norm(self, emit: Emit, name: str, x: FlowValue) -> FlowValue:
        """Write the norm `name`, or return `x` if there is none."""
        if not name:
            return x
        s, (weight, bias) = self.spec, module_keys(f"{self.spec.prefix}.{name}")
        with emit.scope(*name.split(".")):
            if s.rms:
                return rms_norm(emit, x, weight, s.eps)
            return emit.layer_norm(x, weight, bias if s.norm_bias else None, s.eps)

    def _add_norm(self, emit: Emit, name: str, x: FlowValue, residual: FlowValue) -> FlowValue:
        """Write `norm(x + residual)`; the sum is in the block that contains the norm."""
        with emit.scope(*name.split(".")[:-1]):
            total = emit.add_node(Binary("add"), x, residual)
        return self._norm(emit, name, total)


@dataclass(frozen=True)
class DistanceEmbeddings:
    """Register a table of embeddings of distances, `[R,H]`, as the value `name` that `RelativeKeys` names.

    The active value is unchanged. Weight: `weight_key` `[R, H]`, of `shape`; `norm` is applied to its rows.
    """

    name: str
    weight_key: str
    shape: tuple[int, int]
    norm: LayerNorm | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue | None:
        with emit.scope(self.name):
            table = emit.param(self.weight_key, self.shape, TABLE_ROLES)
            emit.set_named(self.name, table if self.norm is None else self.norm.emit(emit, table))
        return value


_FFN = ("intermediate.dense", "output.dense", "output.LayerNorm")
_OUTPUT = ("attention.output.dense", "attention.output.LayerNorm")
STYLES = {
    "bert": EncoderKeys(
        ("attention.self.query", "attention.self.key", "attention.self.value"), *_OUTPUT, *_FFN
    ),
    "mpnet": EncoderKeys(
        ("attention.attn.q", "attention.attn.k", "attention.attn.v"), "attention.attn.o", "attention.LayerNorm", *_FFN
    ),
    "distilbert": EncoderKeys(
        ("attention.q_lin", "attention.k_lin", "attention.v_lin"), "attention.out_lin", "sa_layer_norm", "ffn.lin1",
        "ffn.lin2", "output_layer_norm",
    ),
    "albert": EncoderKeys(
        ("attention.query", "attention.key", "attention.value"), "attention.dense", "attention.LayerNorm", "ffn",
        "ffn_output", "full_layer_layer_norm",
    ),
}  # fmt: skip


class NamedEncoderSpec(EncoderLayerSpec):
    """Base of the specification's records: an EncoderLayerSpec with other `defaults`, and with aliases of some fields.

    The fields in `order` may be passed by position. Subclasses also accept the fields of EncoderLayerSpec, so that
    `dataclasses.replace` works.

    Args:
        layer_prefix: `prefix`.
        attention_mask_input: `mask_input`.
    """

    defaults: ClassVar[Mapping[str, Any]] = {}
    field_aliases: ClassVar[Mapping[str, str]] = {"layer_prefix": "prefix", "attention_mask_input": "mask_input"}
    order: ClassVar[tuple[str, ...]] = (
        "prefix", "hidden_size", "num_heads", "head_dim", "eps", "mask_input", "activation",
    )  # fmt: skip

    def __init__(self, *args: Any, **values: Any) -> None:
        name, limit = type(self).__name__, len(self.order)
        if len(args) > limit:
            raise TypeError(f"{name} takes at most {limit} positional arguments, got {len(args)}; pass others by name")
        positional = dict(zip(self.order, args, strict=False))
        # `dataclasses.replace` passes every field, so that an alias replaces the value of its field.
        values |= {field: values.pop(alias) for alias, field in self.field_aliases.items() if alias in values}
        for repeated in positional.keys() & values:
            raise TypeError(f"{name} got multiple values for {repeated!r}")
        super().__init__(**{**self.defaults, **positional, **values})

    @property
    def layer_prefix(self) -> str:
        """Prefix of the layer's parameters."""
        return self.prefix

    @property
    def attention_mask_input(self) -> str | None:
        """Name of the input with the keep mask; None for no mask."""
        return self.mask_input


class BertEncoderLayerSpec(NamedEncoderSpec):
    """A BERT layer. `qkv_style` is the name of its keys in `STYLES`: `bert`, `mpnet`, `distilbert` or `albert`."""

    defaults = {"keys": STYLES["bert"]}

    def __init__(self, *args: Any, qkv_style: str | None = None, **values: Any) -> None:
        super().__init__(*args, **values | ({} if qkv_style is None else {"keys": STYLES[normalize_style(qkv_style)]}))

    @staticmethod
    def hf(
        prefix: str, hidden_size: int, num_heads: int, eps: float = 1e-12, activation: str = "gelu",
        qkv_style: str = "bert", intermediate_size: int | None = None,
    ) -> BertEncoderLayerSpec:  # fmt: skip
        """Return the spec of a checkpoint in Hugging Face's layout.

        The head width is hidden / heads. The style `mpnet` reads the bias of a RelativeBias stage.
        """
        style, width = normalize_style(qkv_style), head_width(prefix, hidden_size, num_heads)
        return BertEncoderLayerSpec(
            prefix, hidden_size, num_heads, width, eps, activation=activation, qkv_style=style,
            position_bias=POSITION_BIAS if style == "mpnet" else None, intermediate_size=intermediate_size,
        )  # fmt: skip


class BertEncoderLayer(EncoderLayer):
    """BERT's layer, `[B,S,H]` → same: `h = ln(attn(x) Wo + bo + x)`, `y = ln(act(h Wi + bi) Wd + bd + h)`.

    Weights under the prefix: `attention.self.{query,key,value}.{weight,bias}`, `attention.output.dense.*`,
    `attention.output.LayerNorm.*`, `intermediate.dense.*`, `output.dense.*`, `output.LayerNorm.*`. Other styles name
    them as `STYLES` has it.
    """


def bert_layer_prefix(prefix: str, index: int) -> str:
    """Return the prefix of layer `index`: `encoder.layer.{i}`, or `{prefix}.encoder.layer.{i}` in task checkpoints."""
    return f"{prefix}.encoder.layer.{index}" if prefix else f"encoder.layer.{index}"


def normalize_style(style: str) -> str:
    """Return a name of `STYLES` in lower case.

    Raises:
        UnsupportedError: `style` is none of `STYLES`.
    """
    if style.lower() not in STYLES:
        raise UnsupportedError(f"BertEncoderLayer: unknown style {style!r}; styles are {', '.join(STYLES)}")
    return style.lower()


NOMIC_KEYS = EncoderKeys(
    ("attn.Wqkv",), "attn.out_proj", "norm1", "mlp.fc11", "mlp.fc2", "norm2", gate="mlp.fc12", up_first=True
)


class NomicEncoderLayerSpec(NamedEncoderSpec):
    """A NomicBERT layer, with rotated queries and keys and a gated MLP, and without biases."""

    defaults = {
        "keys": NOMIC_KEYS, **dict.fromkeys(("qkv_bias", "out_bias", "up_bias", "down_bias"), False),
        "activation": "silu", "rope": "", "rope_theta": 1000.0,
    }  # fmt: skip


class NomicEncoderLayer(EncoderLayer):
    """NomicBERT's layer, `[B,S,H]` → same: `h = ln(attn(x) Wo + x)`, `y = ln((h W₁₁ ⊙ act(h W₁₂)) W₂ + h)`.

    Queries and keys are rotated. Weights under the prefix: `attn.Wqkv.weight` (rows of q, then k, then v,
    `[3·N·D, H]`), `attn.out_proj.weight`, `norm1.*`, `mlp.fc11.weight`, `mlp.fc12.weight` (the gate),
    `mlp.fc2.weight`, `norm2.*`.
    """
