"""A mixture of experts as the feed-forward half of a layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from rlx_jax.blocks.ffn import INTO, OUT_OF
from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.ir.ops.experts import ClampedGate as ClampedGate
from rlx_jax.ir.types import DimLike
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.weight_part import WeightKey, WeightPart, WeightStack


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
