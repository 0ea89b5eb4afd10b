"""A mixture of experts as the feed-forward half of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlx_jax.errors import GraphError
from rlx_jax.ir import hir
from rlx_jax.trace.emit import Emit, FlowValue
from rlx_jax.trace.weight_part import WeightKey, WeightPart, WeightStack


@dataclass(frozen=True)
class ExpertKeys:
    """Where a layer keeps its router `[E, H]` and its experts, by their keys inside of the layer.

    Keys with `{}` are those of one expert, gate and up `[F, H]` and down `[H, F]`; without it they are of all experts,
    with a leading axis E. One key for gate and up is that of both, one behind the other: `[E, 2F, H]`.
    """

    router: str = "mlp.gate.weight"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"

    def __post_init__(self) -> None:
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
        gate, up, down = (f"{prefix}.{key}" for key in (self.gate, self.up, self.down))
        if self.apart:
            return tuple(WeightStack(key, count) for key in (gate, up, down))
        return (*WeightPart.split(gate, 2, axis=1), down) if gate == up else (gate, up, down)

    def shapes(self, count: int, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
        """Every weight by its key inside of the layer."""
        shapes: dict[str, tuple[int, ...]] = {self.router: (count, hidden)}
        both = 1 + (self.gate == self.up)
        for key, shape in (
            (self.gate, (both * inner, hidden)),
            (self.up, (both * inner, hidden)),
            (self.down, (hidden, inner)),
        ):
            if self.apart:
                shapes |= {name: shape for name in WeightStack(key, count).keys}
            else:
                shapes[key] = (count, *shape)
        return shapes


MIXTRAL_KEYS = ExpertKeys(
    "block_sparse_moe.gate.weight",
    *(f"block_sparse_moe.experts.{{}}.{name}.weight" for name in ("w1", "w3", "w2")),
)
"""As Mixtral's checkpoints have it; `ExpertKeys()` is what most others have."""

STACKED_KEYS = ExpertKeys(
    "mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
)
"""As transformers 5 holds experts in memory, and saves them where it is told to keep them so."""


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
        keys: where the layer keeps its weights.
    """

    num_experts: int
    top_k: int
    inner: int
    scores: Literal["softmax", "sigmoid", "chosen"] = "softmax"
    normalise: bool = True
    scale: float = 1.0
    choice_bias: str | None = None
    keys: ExpertKeys = ExpertKeys()

    def __post_init__(self) -> None:
        if not 1 <= self.top_k <= self.num_experts or self.inner < 1:
            raise GraphError(
                f"MoeSpec: a token goes to top_k experts of num_experts, at least one, of a width of at least one; got "
                f"{self.top_k} of {self.num_experts}, {self.inner} wide"
            )

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Every weight by its key inside of a layer, for values `[B, S, hidden]`."""
        bias = {} if self.choice_bias is None else {self.choice_bias: (self.num_experts,)}
        return self.keys.shapes(self.num_experts, hidden, self.inner) | bias


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
            with emit.scope("router"):
                shape = (s.num_experts, hidden) if isinstance(hidden, int) else None
                router = emit.param(f"{p}.{s.keys.router}", shape, roles=(None, "hidden"))
                logits = emit.add_node(hir.Linear(1, f32_result=True), x, router)
                bias = None if s.choice_bias is None else f"{p}.{s.choice_bias}"
                weights, ids = emit.route(
                    logits, bias, top_k=s.top_k, scores=s.scores, normalise=s.normalise, scale=s.scale
                )
            with emit.scope("experts"):
                gate, up, down = s.keys.weights(p, s.num_experts)
                return emit.experts(x, weights, ids, gate=gate, up=up, down=down, activation=self.activation)
