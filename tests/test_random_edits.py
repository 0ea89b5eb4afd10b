"""Random edits of random flows against a reference in `jax.numpy`, where an edit changes the Python function that
computes a block."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.ir.paths import Path, path_text
from tests.small import compiled, w

H, EDITS, FLOWS, QUICK = 4, 4, 80, 3
BY = np.array([0.5, -1.0, 2.0, 1.0], "f4")
Array = Any
Block = Callable[[Array], Array]


@dataclass(frozen=True)
class Step:
    """One stage of a flow, and the stages inside it: one list, or one for each layer."""

    kind: str
    name: str = ""
    parts: tuple[tuple[Step, ...], ...] = ()


def random_steps(seed: int, count: int, inside: str = "", tag: str = "") -> Iterator[Step]:
    """Yield stages that nest at most two deep. Layers are alike but for the names of their weights."""
    rng = np.random.default_rng(seed)
    nested = {"named": 1, "layers": 2} if inside.count(".") < 2 else {}
    nested |= {"residual": 1} if "residual" not in inside else {}
    for _ in range(count):
        kind, name = str(rng.choice([*LEAVES, *nested, *nested])), f"b{rng.integers(10**9)}{tag}"
        inner, size = int(rng.integers(10**9)), int(rng.integers(1, 3))
        layers = range(nested.get(kind, 0))
        parts = (tuple(random_steps(inner, size, f"{inside}.{kind}", f"{tag}_{i}")) for i in layers)
        yield Step(kind, name, tuple(parts))


def stage_of(step: Step) -> Any:
    """Return the stage of a step."""
    inner = [blocks.Sequence(map(stage_of, part)) for part in step.parts]
    if step.kind == "residual":
        add = blocks.Named(step.name, blocks.ResidualAdd())
        return blocks.Sequence([blocks.ResidualSave(), *inner, add])
    if step.kind == "layers":
        return blocks.Repeat(len(inner), inner.__getitem__, step.name)
    made: Any = LEAVES[step.kind][0](step.name) if not inner else blocks.Named(step.name, inner[0])
    return made if hasattr(made, "emit") else blocks.Custom(made, step.name)


def store(emit: rlx.Emit, x: rlx.FlowValue) -> rlx.FlowValue:
    emit.set_stream("s", emit.sin(x))
    return x + 0.25


def optional(emit: rlx.Emit, x: rlx.FlowValue) -> rlx.FlowValue:
    by = emit.optional_input("by")
    return x if by is None else by * x


def recurrent(emit: rlx.Emit, x: rlx.FlowValue) -> Any:
    return emit.recurrent(lambda s, t: (s * 0.5 + t, s + t), x, init=np.zeros(H, "f4"))


def attention(name: str) -> Any:
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    return replace(blocks.SelfAttention.hf(name, 2, names=names, bias=False, causal=True), name=name)


LEAVES: dict[str, tuple[Callable[[str], Any], Callable[[Reference, str, Array], Array]]] = {
    "linear": (blocks.Linear, lambda ref, n, x: x @ ref.weights[n].T),
    "norm": (
        lambda n: blocks.RmsNorm(f"{n}.gamma"),
        lambda ref, n, x: x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * ref.weights[f"{n}.gamma"],
    ),
    "tanh": (lambda n: lambda emit, x: emit.tanh(x) * 1.5, lambda ref, n, x: jnp.tanh(x) * 1.5),
    "stream": (lambda n: lambda emit, x: emit.stream("s") * 0.5 + x, lambda ref, n, x: ref.stream * 0.5 + x),
    "store": (lambda n: store, lambda ref, n, x: ref.store(jnp.sin(x), x + 0.25)),
    "keep": (lambda n: blocks.Named(n, blocks.StoreStream("s")), lambda ref, n, x: ref.store(x, x)),
    "optional": (lambda n: optional, lambda ref, n, x: x if ref.by is None else ref.by * x),
    "recurrent": (lambda n: recurrent, lambda ref, n, x: jnp.einsum("tu,buh->bth", SUMS, x)),
    "attention": (attention, lambda ref, n, x: ref.attention(n, x)),
}  # fmt: skip
SUMS: Any = np.eye(5, dtype="f4") + sum(np.eye(5, k=-k, dtype="f4") * 0.5 ** (k - 1) for k in range(1, 5))
"""What `recurrent` sums: y_t = x_t + s_t, s_t = s_(t-1) / 2 + x_(t-1)."""
FIRST, LAST = Step("keep", "first"), Step("optional", "last")

Change = Callable[["Reference", Block], Block]
KINDS: dict[str, tuple[Callable[[Any], rlx.ModelFlow], Change]] = {
    "scale": (lambda at: at.scale(1.5), lambda ref, f: lambda x: f(x) * 1.5),
    "input": (lambda at: at.scale(BY, of="input"), lambda ref, f: lambda x: f(x * BY)),
    "by": (lambda at: at.scale("by"), lambda ref, f: lambda x: f(x) * (1 if ref.by is None else ref.by)),
    "wrap": (lambda at: at.wrap(lambda e, x, inner: inner(x) + x * 0.5), lambda ref, f: lambda x: f(x) + x * 0.5),
    "turn": (lambda at: at.wrap(lambda e, x, f: 2 - f(e.tanh(x))), lambda ref, f: lambda x: 2 - f(jnp.tanh(x))),
    "replace": (lambda at: at.replace(blocks.Linear("other")), lambda ref, f: lambda x: x @ ref.weights["other"].T),
    "capture": (lambda at: at.capture(), lambda ref, f: f),
}
"""What `at(pattern)` does, and how it changes the function of a block."""


class Drawn(dict[str, Array]):
    """Weights that are drawn when they are read, each from its key."""

    def __missing__(self, key: str) -> Array:
        seed = zlib.crc32(key.encode())
        return self.setdefault(key, 1 + w(H, seed=seed) if key.endswith("gamma") else w(H, H, seed=seed))


@dataclass
class Reference:
    """A flow with edits in `jax.numpy`; `seen` are its blocks, and whether each stores the stream."""

    weights: dict[str, Array]
    by: Array | None = None
    edits: tuple[tuple[Path, str], ...] = ()
    stream: Array = None
    stored: int = 0
    seen: dict[Path, bool] = field(default_factory=dict)
    outputs: dict[str, Array] = field(default_factory=dict)

    def store(self, value: Array, x: Array) -> Array:
        self.stream, self.stored = value, self.stored + 1
        return x

    def block(self, path: Path, compute: Block, x: Array) -> Array:
        """Return what an edited block returns."""
        mine, before = [kind for where, kind in self.edits if where == path], self.stored
        for kind in mine:
            compute = KINDS[kind][1](self, compute)
        y = compute(x)
        self.seen[path] = self.stored > before
        self.outputs |= {path_text(path): y} if "capture" in mine else {}
        return y

    def run(self, steps: tuple[Step, ...], x: Array, path: Path = ()) -> Array:
        for step in steps:
            here = self.path = (*path, step.name)
            if step.kind == "residual":  # only the sum is a block
                x = self.block(here, partial(jnp.add, x), self.run(step.parts[0], x, path))
            else:
                x = self.block(here, partial(self.body, step, here), x)
        return x

    def body(self, step: Step, here: Path, x: Array) -> Array:
        self.path = here
        if step.kind == "named":
            return self.run(step.parts[0], x, here)
        for i, part in enumerate(step.parts):
            x = self.block((*here, i), partial(self.run, part, path=(*here, i)), x)
        return x if step.parts else LEAVES[step.kind][1](self, step.name, x)

    def attention(self, name: str, x: Array) -> Array:
        here = self.path

        def product(n: str, x: Array) -> Array:
            return self.block((*here, f"{n}_proj"), lambda v: v @ self.weights[f"{name}.{n}_proj.weight"].T, x)

        q, k, v = (product(n, x).reshape(*x.shape[:2], 2, H // 2) for n in "qkv")
        scores = jnp.einsum("bsnd,btnd->bnst", q, k) / (H / 2) ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape, bool)), scores, -jnp.inf)
        return product("o", jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores, -1), v).reshape(x.shape))


def random_edits(seed: int, every: dict[Path, bool]) -> tuple[tuple[Path, str], ...]:
    """Draw edits: none inside a replaced block; what stores a stream, or has a captured block, is not replaced."""
    rng, edits, paths = np.random.default_rng(seed), list[tuple[Path, str]](), list(every)
    while len(edits) < EDITS:
        path, kind = paths[rng.integers(len(paths))], str(rng.choice(list(KINDS)))
        gone = any(k == "replace" and path[: len(p)] == p != path for p, k in edits)
        inner = any(k == "capture" and p[: len(path)] == path != p for p, k in edits)
        if not gone and not (kind == "replace" and (inner or every[path])):
            edits.append((path, kind))
    return tuple(edits)


def named(out: Any) -> dict[str, Array]:
    return dict(out) if isinstance(out, dict) else {"output": out}


def assert_all_near(got: Any, want: Any, what: str) -> None:
    assert set(named(got)) == set(named(want)), what
    for name, value in named(want).items():
        size = max(1.0, float(np.abs(np.asarray(value)).max()))
        np.testing.assert_allclose(named(got)[name], value, rtol=1e-3, atol=5e-5 * size, err_msg=f"{name}: {what}")


def total(out: Any) -> Array:
    """A number that depends on every output."""
    return jnp.sum(jnp.stack([jnp.sum(jnp.sin(v)) for v in named(out).values()]))


def in_pieces(model: Any, x: Array) -> dict[str, Array]:
    """What a cached program returns for three tokens and then for the rest."""
    state, outs = model.init_state(len(x), 16), []
    for piece in (x[:, :3], x[:, 3:]):
        out, state = model(piece, lengths=np.full(len(x), piece.shape[1], "i4"), state=state)
        outs.append(named(out))
    return {name: np.concatenate([out[name] for out in outs], axis=1) for name in outs[0]}


def check_random_flow(seed: int, deep: bool) -> None:
    """Compare an edited flow; with `deep` also on two devices, cached and as gradients. Every other flow has only the
    weights that its edits leave."""
    steps, x, weights = (FIRST, *random_steps(seed, 2 + seed % 3)), w(2, 5, H, seed=seed), Drawn()
    probe = Reference(weights if seed % 2 else Drawn())

    def reference(weights: Any, x: Array, by: Array | None) -> dict[str, Array]:
        ref = Reference(weights, by, edits)
        with jax.numpy_rank_promotion("allow"):
            return {"output": ref.run((*steps, LAST), x)} | ref.outputs

    with jax.numpy_rank_promotion("allow"):
        probe.run(steps, jnp.asarray(x))
    edits = random_edits(seed, probe.seen)
    want, plain = (reference(weights, jnp.asarray(x), by) for by in (BY, None))
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", H)).input("by", (H,), default=None)
    flow = flow.stage(*map(stage_of, (*steps, LAST)))
    for path, kind in edits:
        flow = KINDS[kind][0](flow.at(path_text(path)))
    what = f"seed {seed}: {[(path_text(p), kind) for p, kind in edits]}"
    model = compiled(flow, dict(weights))
    assert_all_near(model(x, by=BY), want, what)
    assert_all_near(model(x), plain, what)
    if deep and seed % 3:
        assert_all_near(compiled(flow, model.weights(), mesh=2)(x, by=BY), want, f"on two devices: {what}")
        assert_all_near(in_pieces(compiled(flow, dict(weights), program="extend"), x), plain, f"cached: {what}")
    elif deep:
        at = ({key: jnp.asarray(weights[key]) for key in model.params}, jnp.asarray(x))
        got = jax.jit(jax.grad(lambda p, x: total(model.apply(p, x, by=BY)), argnums=(0, 1)))(*at)
        like = jax.jit(jax.grad(lambda p, x: total(reference(weights | p, x, BY)), argnums=(0, 1)))(*at)
        assert_all_near(got[0] | {"x": got[1]}, like[0] | {"x": like[1]}, f"gradients: {what}")


@pytest.mark.parametrize("seed", range(QUICK))
def test_random_edits_of_a_random_flow(seed: int) -> None:
    check_random_flow(seed, deep=False)


@pytest.mark.parametrize(
    "seeds",
    [pytest.param(range(QUICK, QUICK + 2), marks=pytest.mark.slow), pytest.param(range(FLOWS), marks=pytest.mark.soak)],
)
def test_random_edits_in_all_programs(seeds: range) -> None:
    for seed in seeds:
        check_random_flow(seed, deep=True)
        if seed % 10 == 9:
            jax.clear_caches()
