"""Feed-forward stages: the gated SwiGlu and GeGlu, the plain Mlp and GeluFfn, and the mixture of experts MoeFfn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal, Self

from rlx_jax.blocks.linear import module_keys
from rlx_jax.dataclasses import dataclass
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.ops.experts import ClampedGate as ClampedGate
from rlx_jax.ir.types import DimLike, Init, TensorType
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightKey, WeightPart, WeightStack

__all__ = [
    "ClampedGate", "ExpertKeys", "GPT_OSS_KEYS", "GeGlu", "GeluFfn", "MIXTRAL_KEYS", "Mlp", "MoeFfn", "MoeSpec",
    "STACKED_KEYS", "SwiGlu",
]  # fmt: skip


# Roles of the axes of the weights into and out of the inner width; the mesh shards axes by role.
UP_ROLES, DOWN_ROLES = ("ffn", "hidden"), ("hidden", "ffn")

BiasKeys = tuple[WeightKey | None, WeightKey | None, WeightKey | None]


def mlp_keys(prefix: str, kind: str = "weight") -> tuple[str, str, str]:
    """Return the keys `{prefix}.mlp.{gate,up,down}_proj.{kind}`.

    The prefix may name the layer or its MLP: `model.layers.0` and `model.layers.0.mlp` give the same keys.
    """
    p = prefix if prefix.split(".")[-1] == "mlp" else f"{prefix}.mlp"
    return f"{p}.gate_proj.{kind}", f"{p}.up_proj.{kind}", f"{p}.down_proj.{kind}"


def inner_shape(emit: Emit, hidden: TensorType, key: WeightKey) -> tuple[DimLike, ...]:
    """Return the inner shape `[…, F]` for an input `[…, H]`; F is the first size of the weight `key` `[F, H]`."""
    return (*hidden.shape[:-1], emit.param(key).type.shape[0])


@dataclass(frozen=True)
class SwiGlu:
    """SwiGLU feed-forward `(silu(x Wg) ⊙ (x Wu)) Wd`.

    Weights: `gate_key` and `up_key` `[F, H]`, `down_key` `[H, F]`; `biases` are optional. For a checkpoint with gate
    and up in one tensor, pass two `WeightPart`s of it. `inner` (F) and `init` (of the matrices) are needed only for
    weights that no source has: see `emit.param`.
    """

    activation: ClassVar[str] = "silu"

    gate_key: WeightKey
    up_key: WeightKey
    down_key: WeightKey
    biases: BiasKeys | None = None
    inner: int | None = None
    init: Init | None = None

    @classmethod
    def hf_mlp(cls, prefix: str, bias: bool = False) -> Self:
        """Return the stage with Hugging Face's keys; the prefix may name the layer or its `.mlp`, see `mlp_keys`."""
        return cls(*mlp_keys(prefix), mlp_keys(prefix, "bias") if bias else None)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, type(self).__name__)
        inner, hidden = self.inner, x.type.shape[-1]
        keys = zip((self.gate_key, self.up_key, self.down_key), self.biases or (None, None, None), strict=True)
        weights = dict(zip(("gate", "up", "down"), keys, strict=True))

        def project(name: str, x: FlowValue) -> FlowValue:
            nonlocal inner
            roles, columns = (DOWN_ROLES, hidden) if name == "down" else (UP_ROLES, inner)
            with emit.scope(f"{name}_proj"):
                y = emit.linear(x, *weights[name], roles=roles, columns=columns, init=self.init)
            inner = inner or y.type.shape[-1]  # gate and up have the same width, so the first fixes the second
            return y

        with emit.scope("mlp"):
            halves = (project(name, x) for name in ("gate", "up"))
            return project("down", emit.add_node(hir.GatedFfn(self.activation), *halves))

    def intermediate_shape(self, emit: Emit, hidden: TensorType) -> tuple[DimLike, ...]:
        """Return the inner shape `[…, F]` for an input `[…, H]`."""
        return inner_shape(emit, hidden, self.gate_key)


@dataclass(frozen=True)
class GeGlu(SwiGlu):
    """GeGLU feed-forward `(gelu_tanh(x Wg) ⊙ (x Wu)) Wd`: SwiGlu with another activation."""

    activation = "gelu_tanh"


@dataclass(frozen=True)
class Mlp:
    """Two-layer MLP `act(x W₁ + b₁) W₂ + b₂`.

    Weights: `[F, H]`, `[F]`, `[H, F]`, `[H]`. `activation` is a name in `UNARY`; `inner` and `init` are as in SwiGlu.
    """

    up_w: WeightKey
    up_b: WeightKey
    down_w: WeightKey
    down_b: WeightKey
    activation: str = "gelu"
    inner: int | None = None
    init: Init | None = None

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "Mlp")
        with emit.scope("mlp"):
            return self.write(emit, x, "fc1", "fc2")

    def write(self, emit: Emit, x: FlowValue, first: str, last: str) -> FlowValue:
        """Write both projections, in blocks with the names `first` and `last`, and return `[…, H]`."""
        with emit.scope(first):
            inner = emit.linear(
                x, self.up_w, self.up_b, activation=self.activation, roles=UP_ROLES, columns=self.inner, init=self.init
            )  # fmt: skip
        with emit.scope(last):
            hidden = x.type.shape[-1]
            return emit.linear(inner, self.down_w, self.down_b, roles=DOWN_ROLES, columns=hidden, init=self.init)

    def intermediate_shape(self, emit: Emit, hidden: TensorType) -> tuple[DimLike, ...]:
        """Return the inner shape `[…, F]` for an input `[…, H]`."""
        return inner_shape(emit, hidden, self.up_w)


@dataclass(frozen=True)
class GeluFfn:
    """GELU feed-forward `gelu(x W₁ + b₁) W₂ + b₂`, with exact GELU, or the tanh approximation with `approx_gelu`.

    Weights: `[F, H]`, `[F]`, `[H, F]`, `[H]`. `inner` and `init` are as in SwiGlu.
    """

    intermediate_w: str
    intermediate_b: str
    output_w: str
    output_b: str
    approx_gelu: bool = False
    inner: int | None = None
    init: Init | None = None

    @staticmethod
    def new(intermediate_w: str, intermediate_b: str, output_w: str, output_b: str) -> GeluFfn:
        """Return the stage with exact GELU."""
        return GeluFfn(intermediate_w, intermediate_b, output_w, output_b)

    @staticmethod
    def hf_bert(prefix: str) -> GeluFfn:
        """Return the stage with BERT's keys, `{prefix}.intermediate.dense.*` and `{prefix}.output.dense.*`."""
        return GeluFfn(*module_keys(f"{prefix}.intermediate.dense"), *module_keys(f"{prefix}.output.dense"))

    @staticmethod
    def dinov2(prefix: str) -> GeluFfn:
        """Return the stage with DINOv2's keys, `{prefix}.mlp.fc1.*` and `{prefix}.mlp.fc2.*`, and its exact GELU."""
        return GeluFfn(*module_keys(f"{prefix}.mlp.fc1"), *module_keys(f"{prefix}.mlp.fc2"))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "GeluFfn")
        weights = (self.intermediate_w, self.intermediate_b, self.output_w, self.output_b)
        mlp = Mlp(*weights, "gelu_tanh" if self.approx_gelu else "gelu", self.inner, self.init)
        return mlp.write(emit, x, "intermediate", "output")

    def intermediate_shape(self, emit: Emit, hidden: TensorType) -> tuple[DimLike, ...]:
        """Return the inner shape `[…, F]` for an input `[…, H]`."""
        return inner_shape(emit, hidden, self.intermediate_w)


@dataclass(frozen=True)
class ExpertKeys:
    """Keys of a layer's router `[E, H]` and of its experts, relative to the layer's prefix.

    Keys with `{}` name the weights of one expert, gate and up `[F, H]` and down `[H, F]`; `{}` is its number. Keys
    without `{}` name stacked weights of all experts, with a leading axis E.

    Args:
        router: the router's weight.
        gate, up, down: the experts' weights. If gate and up have the same key, they are fused: `[E, 2F, H]`, gate
            first, or row by row with `interleaved`.
        router_bias: the router's bias `[E]`.
        biases: biases of gate, up and down, stacked: `[E, F]`, `[E, F]`, `[E, H]`. Gate and up share a key if and only
            if their weights do.
        interleaved: rows of fused gate and up alternate.
        transpose: experts are stored as `[…, out, in]`; otherwise as `[…, in, out]`.
    """

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    router_bias: str | None = None
    biases: tuple[str, str, str] | None = None
    interleaved: bool = False
    transpose: bool = True

    def __post_init__(self) -> None:
        fused = self.gate == self.up
        if (
            self.interleaved
            and not fused
            or self.biases
            and (self.is_per_expert or fused != (self.biases[0] == self.biases[1]))
        ):
            raise GraphError(
                "ExpertKeys: interleaved needs gate and up under one key; biases need keys without {}, and gate and up "
                f"share a bias key if and only if they share a weight key; got {self}"
            )
        has_number = ["{}" in key for key in (self.gate, self.up, self.down)]
        if len(set(has_number)) > 1 or (all(has_number) and self.gate == self.up):
            raise GraphError(
                f"ExpertKeys: the keys of gate, up and down all have {{}} for the number of an expert and "
                f"differ, or none has {{}}; got {self.gate!r}, {self.up!r}, {self.down!r}"
            )

    @property
    def is_per_expert(self) -> bool:
        """Whether every expert is stored as separate tensors, rather than all experts as one stack."""
        return "{}" in self.gate

    def weight_keys(self, prefix: str, count: int) -> tuple[WeightKey | WeightStack, ...]:
        """Return the keys of gate, up and down of `count` experts under a prefix."""
        if self.is_per_expert:
            return tuple(WeightStack(f"{prefix}.{key}", count) for key in (self.gate, self.up, self.down))
        return self._projection_keys(prefix, (self.gate, self.up, self.down), 1 if self.transpose else 2)

    def bias_keys(self, prefix: str) -> tuple[WeightKey, ...]:
        """Return the keys of the biases of gate, up and down under a prefix, or an empty tuple if there are none."""
        return () if self.biases is None else self._projection_keys(prefix, self.biases, 1)

    def _projection_keys(self, prefix: str, keys: tuple[str, str, str], axis: int) -> tuple[WeightKey, ...]:
        """Return the keys of gate, up and down; fused gate and up are the two parts of one tensor along `axis`."""
        gate, up, down = (f"{prefix}.{key}" for key in keys)
        return (*WeightPart.split(gate, 2, axis, self.interleaved), down) if gate == up else (gate, up, down)


# Keys of Mixtral's checkpoints; the defaults of `ExpertKeys` fit most others.
MIXTRAL_KEYS = ExpertKeys(
    "block_sparse_moe.gate.weight", "block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight",
    "block_sparse_moe.experts.{}.w2.weight",
)  # fmt: skip

# Keys of experts in the memory of transformers 5, and in checkpoints that it saves without unstacking them.
STACKED_KEYS = ExpertKeys(
    "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
)


GPT_OSS_KEYS = ExpertKeys(
    "mlp.router.weight", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
    router_bias="mlp.router.bias",
    biases=("mlp.experts.gate_up_proj_bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"),
    interleaved=True, transpose=False,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Sizes and routing of a mixture of experts.

        y = Σₑ wₑ · (act(x Gₑ) ⊙ (x Uₑ)) Dₑ        over the `top_k` experts e of the token, with router weights wₑ

    Experts have no capacity limit, so the result of a token does not depend on the other tokens of the batch.

    Args:
        num_experts, top_k: number of experts, and number of experts per token.
        inner: the width F of an expert.
        scores, normalise, scale: how logits of the router become weights, see `emit.route`.
        choice_bias: key, relative to the layer's prefix, of a bias `[E]` that influences only the choice of experts.
        keys: keys of the weights, and whether there are biases.
        clamp: replaces act(x G) ⊙ (x U) by a clamped gate.
    """

    num_experts: int
    top_k: int
    inner: int
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    choice_bias: str | None = None
    keys: ExpertKeys = ExpertKeys()
    clamp: ClampedGate | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts or self.inner < 1:
            raise GraphError(
                f"MoeSpec: expected 1 <= top_k <= num_experts and inner >= 1; got top_k "
                f"{self.top_k}, num_experts {self.num_experts}, inner {self.inner}"
            )


@dataclass(frozen=True)
class MoeFfn:
    """Mixture of experts, `[…, H]` → same, with the weights under `prefix`; `activation` is a name in `UNARY`.

    The router's logits and the resulting weights of experts are f32.
    """

    prefix: str
    spec: MoeSpec
    activation: str = "silu"

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x, s, p = emit.require(value, "MoeFfn"), self.spec, self.prefix
        hidden = x.type.shape[-1]
        with emit.scope("mlp"):
            x = emit.block_input(x)
            with emit.scope("router"):
                router = emit.param(f"{p}.{s.keys.router}", (s.num_experts, hidden), roles=(None, "hidden"))
                logits = emit.add_node(hir.Linear(1, f32_result=True), x, router)
                if (bias_key := s.keys.router_bias) is not None:
                    logits = logits + emit.param(f"{p}.{bias_key}", (s.num_experts,), roles=(None,))
                bias = None if s.choice_bias is None else emit.param(f"{p}.{s.choice_bias}", (s.num_experts,))
                weights, ids = emit.route(
                    logits, bias, top_k=s.top_k, scores=s.scores, normalise=s.normalise, scale=s.scale
                )
            with emit.scope("experts"):
                x = emit.block_input(x)
                gate, up, down, *biases = self._weights(emit, hidden)
                return emit.experts(
                    x, weights, ids, gate=gate, up=up, down=down, activation=self.activation,
                    transpose=s.keys.transpose, biases=biases or None, clamp=s.clamp,
                )  # fmt: skip

    def _weights(self, emit: Emit, hidden: DimLike) -> Iterator[FlowValue]:
        """Yield the weights gate, up and down, then their biases, if there are any."""
        s, p, axis_order = self.spec, self.prefix, 1 if self.spec.keys.transpose else -1
        sizes = ((s.inner, hidden), (s.inner, hidden), (hidden, s.inner))
        roles = (UP_ROLES, UP_ROLES, DOWN_ROLES)
        for key, size, axes in zip(s.keys.weight_keys(p, s.num_experts), sizes, roles, strict=True):
            yield emit.param(key, (s.num_experts, *size[::axis_order]), ("experts", *axes[::axis_order]))
        for bias, (out, _), (role, _) in zip(s.keys.bias_keys(p), sizes, roles, strict=False):
            yield emit.param(bias, (s.num_experts, out), ("experts", role))
