"""Feed-forward stages: SwiGlu, GeGlu, Mlp and GeluFfn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Self

from rlx_jax.blocks.linear import pair
from rlx_jax.ir import hir
from rlx_jax.ir.inits import Init
from rlx_jax.ir.types import DimLike, TensorType
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.weight_part import WeightKey


def mlp_prefix(prefix: str) -> str:
    """`model.layers.0` and `model.layers.0.mlp` both mean the MLP of layer 0."""
    return prefix if prefix.split(".")[-1] == "mlp" else f"{prefix}.mlp"


# What the axes of the first and of the last weights are.
INTO, OUT_OF = ("ffn", "hidden"), ("hidden", "ffn")

# Of gate, up and down.
Keys = tuple[WeightKey | None, WeightKey | None, WeightKey | None]


def mlp_keys(prefix: str, kind: str = "weight") -> tuple[str, str, str]:
    """`{prefix}.mlp.{gate,up,down}_proj.{kind}`."""
    p = mlp_prefix(prefix)
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

        def gate(gate: FlowValue, up: FlowValue) -> FlowValue:
            return emit.add_node(hir.GatedFfn(self.activation), gate, up)

        with emit.scope("mlp"):
            return hir.write_gated_ffn(x, project=project, gate=gate)

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
