"""Feed-forward stages: SwiGlu, GeGlu, Mlp and GeluFfn, and a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, Self

from rlx_jax.blocks.linear import pair
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.initializers import Init
from rlx_jax.ir.ops.experts import ClampedGate as ClampedGate
from rlx_jax.ir.types import DimLike, TensorType
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.parameters import WeightKey, WeightPart, WeightStack

__all__ = [
    "ClampedGate", "ExpertKeys", "GPT_OSS_KEYS", "GeGlu", "GeluFfn", "MIXTRAL_KEYS", "Mlp", "MoeFfn", "MoeSpec",
    "STACKED_KEYS", "SwiGlu",
]  # fmt: skip


# What the axes of the first and of the last weights are.
INTO, OUT_OF = ("ffn", "hidden"), ("hidden", "ffn")

# Of gate, up and down.
Keys = tuple[WeightKey | None, WeightKey | None, WeightKey | None]


def mlp_keys(prefix: str, kind: str = "weight") -> tuple[str, str, str]:
    """`{prefix}.mlp.{gate,up,down}_proj.{kind}`: `model.layers.0` and `model.layers.0.mlp` both mean its MLP."""
    p = prefix if prefix.split(".")[-1] == "mlp" else f"{prefix}.mlp"
    return f"{p}.gate_proj.{kind}", f"{p}.up_proj.{kind}", f"{p}.down_proj.{kind}"


def inner_shape(emit: Emit, hidden: TensorType, key: WeightKey) -> tuple[DimLike, ...]:
    """`[…, F]` for an input `[…, H]`, from the weight `[F, H]` under `key`."""
    return (*hidden.shape[:-1], emit.param(key).type.shape[0])


@dataclass(frozen=True)
class SwiGlu:
    """`(silu(x Wg) ⊙ (x Wu)) Wd`. Weights: `gate_key`, `up_key` `[F, H]`, `down_key` `[H, F]`; biases are optional.

    Gate and up that are stored as one are two `WeightPart`s of it. `inner`, F, and `init`, of the matrices, are needed
    only for weights that no source has: see `emit.param`.
    """

    activation: ClassVar[str] = "silu"

    gate_key: WeightKey
    up_key: WeightKey
    down_key: WeightKey
    biases: Keys | None = None
    inner: int | None = None
    init: Init | None = None

    @classmethod
    def hf_mlp(cls, prefix: str, bias: bool = False) -> Self:
        """`{prefix}.mlp.{gate,up,down}_proj.weight`; the prefix may name the layer or its `.mlp`."""
        return cls(*mlp_keys(prefix), mlp_keys(prefix, "bias") if bias else None)

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, type(self).__name__)
        inner, hidden = self.inner, x.type.shape[-1]
        keys = zip((self.gate_key, self.up_key, self.down_key), self.biases or (None, None, None), strict=True)
        weights = dict(zip(("gate", "up", "down"), keys, strict=True))

        def project(name: str, x: FlowValue) -> FlowValue:
            nonlocal inner
            roles, columns = (OUT_OF, hidden) if name == "down" else (INTO, inner)
            with emit.scope(f"{name}_proj"):
                y = emit.linear(x, *weights[name], roles=roles, columns=columns, init=self.init)
            inner = inner or y.type.shape[-1]  # gate and up are as wide as each other
            return y

        with emit.scope("mlp"):
            halves = (project(name, x) for name in ("gate", "up"))
            return project("down", emit.add_node(hir.GatedFfn(self.activation), *halves))

    def intermediate_shape(self, emit: Emit, hidden: TensorType) -> tuple[DimLike, ...]:
        """`[…, F]`."""
        return inner_shape(emit, hidden, self.gate_key)


@dataclass(frozen=True)
class GeGlu(SwiGlu):
    """`(gelu_tanh(x Wg) ⊙ (x Wu)) Wd`: SwiGlu with another activation."""

    activation = "gelu_tanh"


@dataclass(frozen=True)
class Mlp:
    """`act(x W₁ + b₁) W₂ + b₂`. Weights `[F, H]`, `[F]`, `[H, F]`, `[H]`; `activation` is a name in `UNARY`; `inner`
    and `init` as in SwiGlu."""

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
        """Write both products as blocks of these names."""
        with emit.scope(first):
            wide = emit.linear(
                x, self.up_w, self.up_b, activation=self.activation, roles=INTO, columns=self.inner, init=self.init
            )  # fmt: skip
        with emit.scope(last):
            hidden = x.type.shape[-1]
            return emit.linear(wide, self.down_w, self.down_b, roles=OUT_OF, columns=hidden, init=self.init)

    def intermediate_shape(self, emit: Emit, hidden: TensorType) -> tuple[DimLike, ...]:
        """`[…, F]`."""
        return inner_shape(emit, hidden, self.up_w)


@dataclass(frozen=True)
class GeluFfn:
    """`gelu(x W₁ + b₁) W₂ + b₂`, exact GELU unless `approx_gelu`. Weights `[F, H]`, `[F]`, `[H, F]`, `[H]`.
    `inner` and `init` as in SwiGlu."""

    intermediate_w: str
    intermediate_b: str
    output_w: str
    output_b: str
    approx_gelu: bool = False
    inner: int | None = None
    init: Init | None = None

    @staticmethod
    def new(intermediate_w: str, intermediate_b: str, output_w: str, output_b: str) -> GeluFfn:
        """With exact GELU."""
        return GeluFfn(intermediate_w, intermediate_b, output_w, output_b)

    @staticmethod
    def hf_bert(prefix: str) -> GeluFfn:
        """`{prefix}.intermediate.dense.*` and `{prefix}.output.dense.*`."""
        return GeluFfn(*pair(f"{prefix}.intermediate.dense"), *pair(f"{prefix}.output.dense"))

    @staticmethod
    def dinov2(prefix: str) -> GeluFfn:
        """`{prefix}.mlp.fc1.*` and `{prefix}.mlp.fc2.*`; exact, as DINOv2 has it."""
        return GeluFfn(*pair(f"{prefix}.mlp.fc1"), *pair(f"{prefix}.mlp.fc2"))

    def emit(self, emit: Emit, value: FlowValue | None) -> FlowValue:
        x = emit.require(value, "GeluFfn")
        weights = (self.intermediate_w, self.intermediate_b, self.output_w, self.output_b)
        mlp = Mlp(*weights, "gelu_tanh" if self.approx_gelu else "gelu", self.inner, self.init)
        return mlp.write(emit, x, "intermediate", "output")

    def intermediate_shape(self, emit: Emit, hidden: TensorType) -> tuple[DimLike, ...]:
        """`[…, F]`."""
        return inner_shape(emit, hidden, self.intermediate_w)


@dataclass(frozen=True)
class ExpertKeys:
    """Where a layer keeps its router `[E, H]` and its experts, by their keys inside of the layer.

    Keys with `{}` are those of one expert, gate and up `[F, H]` and down `[H, F]`; without it they are of all experts,
    with a leading axis E. One key for gate and up is that of both, one behind the other, `[E, 2F, H]`, or
    `interleaved`, row by row. Without `transpose` experts are `[…, in, out]`. Biases are `[E]` of the router, and of
    all experts those of gate, up and down, `[E, F]` and `[E, H]`, gate and up under one key where their weights are.
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
        both = self.gate == self.up
        if self.interleaved and not both or self.biases and (self.apart or both != (self.biases[0] == self.biases[1])):
            raise GraphError(
                "ExpertKeys: interleaved are gate and up under one key, biases stand under keys without {}, and those "
                f"of gate and up under one where their weights do; got {self}"
            )
        apart = ["{}" in key for key in (self.gate, self.up, self.down)]
        if len(set(apart)) > 1 or (all(apart) and self.gate == self.up):
            raise GraphError(
                f"ExpertKeys: the keys of gate, up and down have {{}} for the number of an expert, each its own, or "
                f"none has; got {self.gate!r}, {self.up!r}, {self.down!r}"
            )

    @property
    def apart(self) -> bool:
        """Whether experts are stored one by one."""
        return "{}" in self.gate

    def weights(self, prefix: str, count: int) -> tuple[WeightKey | WeightStack, ...]:
        """Gate, up and down of `count` experts under a prefix."""
        if self.apart:
            return tuple(WeightStack(f"{prefix}.{key}", count) for key in (self.gate, self.up, self.down))
        return self._three(prefix, (self.gate, self.up, self.down), 1 if self.transpose else 2)

    def added(self, prefix: str) -> tuple[WeightKey, ...]:
        """The biases of gate, up and down under a prefix, if there are any."""
        return () if self.biases is None else self._three(prefix, self.biases, 1)

    def _three(self, prefix: str, keys: tuple[str, str, str], axis: int) -> tuple[WeightKey, ...]:
        gate, up, down = (f"{prefix}.{key}" for key in keys)
        return (*WeightPart.split(gate, 2, axis, self.interleaved), down) if gate == up else (gate, up, down)


# As Mixtral's checkpoints have it; `ExpertKeys()` is what most others have.
MIXTRAL_KEYS = ExpertKeys(
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{}.w1.weight",
    "block_sparse_moe.experts.{}.w3.weight",
    "block_sparse_moe.experts.{}.w2.weight",
)

# As transformers 5 holds experts in memory, and saves them where it is told to keep them so.
STACKED_KEYS = ExpertKeys(
    "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
)


# As gpt-oss has it.
GPT_OSS_KEYS = ExpertKeys(
    "mlp.router.weight", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj",
    router_bias="mlp.router.bias",
    biases=("mlp.experts.gate_up_proj_bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"),
    interleaved=True, transpose=False,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class MoeSpec:
    """Experts of a layer, and how tokens get to them.

        y = Σⱼ wⱼ · (act(x Gₑ) ⊙ (x Uₑ)) Dₑ        e the `top_k` experts of the token, w their weights

    No expert has a capacity, so that a token is computed alone, whatever stands beside it.

    Args:
        num_experts, top_k: how many there are, and how many a token goes to.
        inner: the width F of an expert.
        scores, normalise, scale: what the router's logits become, see `emit.route`.
        choice_bias: the key, inside of the layer, of a bias `[E]` that has a part in the choice of experts alone.
        keys: where the layer keeps its weights, and whether there are biases.
        clamp: another middle than act(x G) ⊙ (x U).
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
                f"MoeSpec: a token goes to top_k experts of num_experts, at least one, of a width of at least one; got "
                f"{self.top_k} of {self.num_experts}, {self.inner} wide"
            )


@dataclass(frozen=True)
class MoeFfn:
    """`[…, H]` → same through the experts of `spec`, whose weights stand under `prefix`; `activation` is a name in
    `UNARY`. The router's logits and the weights of experts are f32."""

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
                if (added := s.keys.router_bias) is not None:
                    logits = logits + emit.param(f"{p}.{added}", (s.num_experts,), roles=(None,))
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
        """Gate, up and down, and their biases."""
        s, p, turn = self.spec, self.prefix, 1 if self.spec.keys.transpose else -1
        sizes = ((s.inner, hidden), (s.inner, hidden), (hidden, s.inner))
        for key, size, roles in zip(s.keys.weights(p, s.num_experts), sizes, (INTO, INTO, OUT_OF), strict=True):
            yield emit.param(key, (s.num_experts, *size[::turn]), ("experts", *roles[::turn]))
        for bias, (out, _), (role, _) in zip(s.keys.added(p), sizes, (INTO, INTO, OUT_OF), strict=False):
            yield emit.param(bias, (s.num_experts, out), ("experts", role))
