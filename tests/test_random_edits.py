"""Random edits of random flows and of every family, against references that were written without edits.

A flow is a tuple of steps. One function makes its stages; another computes the same with `jax.numpy`, where an edit is a
change of the Python function that computes the block. An edit of a family's product is a change of its weights.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.ir import hir
from rlx_jax.ir.graph import Param
from rlx_jax.ir.param import Key
from rlx_jax.ir.paths import bind_path, path_text
from rlx_jax.lowering.lower import expand_composites
from tests.oracles import checkpoints
from tests.small import compiled, w

H, TOKENS, EDITS = 4, 5, 4
Array = Any
Path = tuple[str | int, ...]
Block = Callable[[Array], Array]

# -- random flows ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step of a flow: a block of this name, or of none; `parts` are the steps inside, those of each layer."""

    kind: str
    name: str = ""
    parts: tuple[tuple[Step, ...], ...] = ()


LEAVES = ("linear", "norm", "tanh", "stream", "store", "optional", "attention", "recurrent")


def random_steps(rng: np.random.Generator, count: int, depth: int = 0, residual: bool = True) -> Iterator[Step]:
    """Yield steps that nest at most two deep; names are drawn, and all differ in practice."""
    for _ in range(count):
        kinds = LEAVES + ("keep",) + ("named", "layers") * (depth < 2) + ("residual",) * (2 * residual)
        kind, name = str(rng.choice(kinds)), f"b{rng.integers(10**9)}"
        inner = residual and kind != "residual"
        many = {"named": 1, "residual": 1, "layers": 2}.get(kind, 0)
        parts = tuple(random_steps(rng, int(rng.integers(1, 3)), depth + 1, inner) for _ in range(min(many, 1)))
        layers = tuple(tuple(part) for part in parts)
        yield Step(kind, name if kind != "keep" else "", tuple(renamed(p, i) for p in layers for i in range(many)))


def renamed(steps: tuple[Step, ...], layer: int) -> tuple[Step, ...]:
    """The steps of another layer: blocks with weights have names of their own, as weights have."""
    return tuple(
        replace(s, name=s.name and f"{s.name}_{layer}", parts=tuple(renamed(p, layer) for p in s.parts)) for s in steps
    )


def stage_of(step: Step) -> blocks.BlockStage:
    """The stage of a step."""
    inner = [blocks.Sequence(map(stage_of, part)) for part in step.parts]
    if step.kind == "attention":
        names = ("q_proj", "k_proj", "v_proj", "o_proj")
        attention = blocks.SelfAttention.hf(step.name, 2, names=names, bias=False, causal=True)
        return replace(attention, name=step.name)
    if step.kind == "residual":
        add = blocks.Named(step.name, blocks.ResidualAdd())
        return blocks.Sequence([blocks.ResidualSave(), *inner, add])
    simple: dict[str, Callable[[], blocks.BlockStage]] = {
        "linear": lambda: blocks.Linear(step.name),
        "norm": lambda: blocks.RmsNorm(f"{step.name}.weight"),
        "keep": lambda: blocks.StoreStream("s"),
        "named": lambda: blocks.Named(step.name, inner[0]),
        "layers": lambda: blocks.Repeat(len(inner), inner.__getitem__, step.name),
    }
    return simple.get(step.kind, lambda: blocks.Custom(CUSTOM[step.kind], step.name))()


def store(emit: rlx.Emit, x: rlx.FlowValue) -> rlx.FlowValue:
    emit.set_stream("s", emit.sin(x))
    return x + 0.25


def optional(emit: rlx.Emit, x: rlx.FlowValue) -> rlx.FlowValue:
    by = emit.optional_input("by")
    return x if by is None else by * x


CUSTOM: dict[str, Callable[[rlx.Emit, rlx.FlowValue], rlx.FlowValue]] = {
    "tanh": lambda emit, x: emit.tanh(x) * 1.5,
    "stream": lambda emit, x: emit.stream("s") * 0.5 + x,
    "store": store,
    "optional": optional,
    "recurrent": lambda emit, x: emit.recurrent(lambda s, t: (s * 0.5 + t, s + t), x, init=np.zeros(H, "f4")),
}

# -- edits -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """What `at(pattern)` does, as a method of the library and as a change of a Python function."""

    name: str
    apply: Callable[[Any], rlx.ModelFlow]
    change: Callable[[Reference, Block], Block]


BY = np.array([0.5, -1.0, 2.0, 1.0], "f4")
KINDS = (
    Edit("scale", lambda at: at.scale(1.5), lambda ref, f: lambda x: f(x) * 1.5),
    Edit("scale input", lambda at: at.scale(BY, of="input"), lambda ref, f: lambda x: f(x * BY)),
    Edit("scale by an input", lambda at: at.scale("by"), lambda ref, f: lambda x: f(x) * (1 if ref.by is None else ref.by)),
    Edit("wrap", lambda at: at.wrap(lambda e, x, inner: inner(x) + x * 0.5), lambda ref, f: lambda x: f(x) + x * 0.5),
    Edit(
        "wrap input", lambda at: at.wrap(lambda e, x, inner: 2 - inner(e.tanh(x))),
        lambda ref, f: lambda x: 2 - f(jnp.tanh(x)),
    ),
    Edit("replace", lambda at: at.replace(blocks.Linear("other")), lambda ref, f: lambda x: x @ ref.weights["other"].T),
    Edit("capture", lambda at: at.capture(), lambda ref, f: f),
)  # fmt: skip


def blocks_of(steps: tuple[Step, ...], around: Path = ()) -> Iterator[tuple[Path, bool]]:
    """Yield the path of each block, and whether it stores a stream."""
    for step in steps:
        here = (*around, step.name)
        layered = [(part, (*here, i) if step.kind == "layers" else here) for i, part in enumerate(step.parts)]
        inside = [b for part, path in layered for b in blocks_of(part, around if step.kind == "residual" else path)]
        stores = step.kind in ("store", "keep")
        if step.kind == "residual":
            yield here, False
        elif step.name:
            yield here, stores or any(found for _, found in inside) or "keep" in str(step)
        if step.kind == "layers":
            yield from ((path, "'keep'" in str(part) or "'store'" in str(part)) for part, path in layered)
        yield from inside
        yield from (((*here, f"{n}_proj"), False) for n in "qkvo" * (step.kind == "attention"))


def random_edits(rng: np.random.Generator, steps: tuple[Step, ...]) -> list[tuple[Path, Edit]]:
    """Draw edits: none inside of a block that was replaced, and no stage that stores a stream is replaced."""
    chosen: list[tuple[Path, Edit]] = []
    every = list(blocks_of(steps))
    while len(chosen) < EDITS:
        (path, stores), edit = every[rng.integers(len(every))], KINDS[rng.integers(len(KINDS))]
        gone = any(e.name == "replace" and path[: len(p)] == p and path != p for p, e in chosen)
        seen = any(e.name == "capture" and p[: len(path)] == path and p != path for p, e in chosen)
        if not gone and not (edit.name == "replace" and (stores or seen)):
            chosen.append((path, edit))
    return chosen


# -- the reference -----------------------------------------------------------------------------


@dataclass
class Reference:
    """The flow in `jax.numpy`."""

    weights: dict[str, Array]
    edits: list[tuple[Path, Edit]]
    by: Array | None
    streams: dict[str, Array] = field(default_factory=dict)
    outputs: dict[str, Array] = field(default_factory=dict)

    def block(self, path: Path, compute: Block, x: Array) -> Array:
        """What an edited block returns."""
        mine = [edit for where, edit in self.edits if where == path]
        for edit in mine:
            compute = edit.change(self, compute)
        y = compute(x)
        if any(edit.name == "capture" for edit in mine):
            self.outputs[path_text(path)] = y
        return y

    def run(self, steps: tuple[Step, ...], x: Array, path: Path = ()) -> Array:
        for step in steps:
            x = self.step(step, x, path)
        return x

    def step(self, step: Step, x: Array, path: Path) -> Array:
        here = (*path, step.name)
        if step.kind == "keep":
            self.streams["s"] = x
            return x
        if step.kind == "residual":
            return self.block(here, lambda v: x + v, self.run(step.parts[0], x, path))
        return self.block(here, functools.partial(self.body, step, here), x)

    def body(self, step: Step, here: Path, x: Array) -> Array:
        if step.kind == "store":
            self.streams["s"] = jnp.sin(x)
        if step.kind == "layers":
            for i, part in enumerate(step.parts):
                x = self.block((*here, i), lambda v, part=part, i=i: self.run(part, v, (*here, i)), x)
            return x
        formulas: dict[str, Callable[[], Array]] = {
            "linear": lambda: x @ self.weights[step.name].T,
            "norm": lambda: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * self.weights[f"{step.name}.weight"],
            "tanh": lambda: jnp.tanh(x) * 1.5,
            "stream": lambda: self.streams["s"] * 0.5 + x,
            "store": lambda: x + 0.25,
            "optional": lambda: x if self.by is None else self.by * x,
            "attention": lambda: self.attention(here, x),
            "recurrent": lambda: recurrent(x),
            "named": lambda: self.run(step.parts[0], x, here),
        }  # fmt: skip
        return formulas[step.kind]()

    def attention(self, here: Path, x: Array) -> Array:
        def product(n: str, x: Array) -> Array:
            return self.block((*here, f"{n}_proj"), lambda v: v @ self.weights[f"{path_text(here[-1:])}.{n}_proj.weight"].T, x)

        q, k, v = (product(n, x).reshape(*x.shape[:2], 2, H // 2) for n in "qkv")
        scores = jnp.einsum("bsnd,btnd->bnst", q, k) / (H / 2) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        return product("o", jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores, -1), v).reshape(x.shape))


def recurrent(x: Array) -> Array:
    state, out = jnp.zeros_like(x[:, 0]), []
    for t in range(x.shape[1]):
        out.append(state + x[:, t])
        state = state * 0.5 + x[:, t]
    return jnp.stack(out, 1)


# -- comparing ---------------------------------------------------------------------------------


def assert_near(got: Array, want: Array, what: str) -> None:
    size = max(1.0, float(np.abs(np.asarray(want)).max()))
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-3, atol=5e-5 * size, err_msg=what)


def named(out: Any) -> dict[str, Array]:
    return dict(out) if isinstance(out, dict) else {"output": out}


def assert_all_near(got: Any, want: Any, what: str) -> None:
    got, want = named(got), named(want)
    assert set(got) == set(want), what
    for name, value in want.items():
        assert_near(got[name], value, f"{name}: {what}")


def total(out: Any) -> Array:
    """A number that depends on every output."""
    return jnp.sum(jnp.stack([jnp.sum(jnp.sin(v)) for v in named(out).values()]))


def in_pieces(model: Any, *inputs: Array) -> dict[str, Array]:
    """What a cached program returns for a prefix and then for the rest."""
    rows, state, outs = len(inputs[0]), model.init_state(len(inputs[0]), 16), []
    for piece in ([x[:, :3] for x in inputs], [x[:, 3:] for x in inputs]):
        lengths = np.full(rows, piece[0].shape[1], "i4")
        out, state = model(*piece, lengths=lengths, state=state)
        outs.append(named(out))
    return {name: np.concatenate([out[name] for out in outs], axis=1) for name in outs[0]}


def weights_of(steps: tuple[Step, ...], seed: int) -> dict[str, Array]:
    """A weight for every key that the steps read."""
    found: dict[str, Array] = {}
    for step in steps:
        matrices = [step.name] * (step.kind == "linear")
        matrices += [f"{step.name}.{n}_proj.weight" for n in "qkvo" if step.kind == "attention"]
        found |= {key: w(H, H, seed=seed + i + len(step.name)) for i, key in enumerate(matrices)}
        found |= {f"{step.name}.weight": 1 + w(H, seed=seed)} if step.kind == "norm" else {}
        for i, part in enumerate(step.parts):
            found |= weights_of(part, seed + i + 1)
    return found


def check_random_flow(seed: int, deep: bool) -> None:
    """Compare one edited flow; with `deep` also gradients, cached programs, two devices, and the weights it needs."""
    rng = np.random.default_rng(seed)
    steps = (Step("keep"), Step("tanh", "first"), *random_steps(rng, int(rng.integers(2, 5))))
    weights, x, edits = weights_of(steps, seed), w(2, TOKENS, H, seed=seed), random_edits(rng, steps)
    if any(edit.name == "replace" for _, edit in edits):
        weights["other"] = w(H, H, seed=seed)
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", H)).input("by", (H,), default=None)
    flow = flow.stage(*map(stage_of, (*steps, END)))
    for path, edit in edits:
        flow = edit.apply(flow.at(path_text(path)))
    what = f"seed {seed}: {[(path_text(p), e.name) for p, e in edits]} of {steps}"

    def reference(weights: Any, x: Array, by: Array | None) -> dict[str, Array]:
        ref = Reference(weights, edits, by)
        with jax.numpy_rank_promotion("allow"):
            return {"output": ref.run((*steps, END), x)} | ref.outputs

    model = compiled(flow, weights)
    want = reference(weights, jnp.asarray(x), BY)
    assert_all_near(model(x, by=BY), want, what)
    assert_all_near(model(x), plain := reference(weights, jnp.asarray(x), None), what)
    if not deep:
        return
    assert_all_near(compiled(flow, model.weights())(x), plain, f"with its own weights: {what}")
    assert_all_near(compiled(flow, weights, mesh=2)(x, by=BY), want, f"on two devices: {what}")
    assert_all_near(in_pieces(compiled(flow, weights, program="extend"), x), plain, f"extend: {what}")
    params = {key: jnp.asarray(weights[key]) for key in model.params}
    got = jax.grad(lambda p, x: total(model.apply(p, x, by=BY)), argnums=(0, 1))(params, jnp.asarray(x))
    like = jax.grad(lambda p, x: total(reference(weights | p, x, BY)), argnums=(0, 1))(params, jnp.asarray(x))
    assert_all_near(got[0] | {"x": got[1]}, like[0] | {"x": like[1]}, f"gradients: {what}")


END = Step("optional", "end")
"""Reads the optional input in every flow; no edit is of this block."""
QUICK, FLOWS = range(10), 110


@pytest.mark.parametrize("seed", QUICK)
def test_random_edits_of_a_random_flow(seed: int) -> None:
    check_random_flow(seed, deep=False)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(len(QUICK), len(QUICK) + FLOWS, 10))
def test_random_edits_of_random_flows_in_all_programs(start: int) -> None:
    for seed in range(start, start + 10):
        check_random_flow(seed, deep=True)
        jax.clear_caches()
