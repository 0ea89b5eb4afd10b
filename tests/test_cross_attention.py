"""A decoder that reads another sequence, written with `emit` alone: what that sequence gives is computed once."""

import functools
from typing import Any

import numpy as np

import rlx_jax as rlx
from tests.oracles.comparing import assert_close

H, V, C, LAYERS = 16, 13, 5, 2
RNG = np.random.default_rng(2)


def tower(emit: Any, x: Any) -> Any:
    """Patches that read each other, once for all layers."""
    patches = emit.gelu(emit.linear(emit.flow_input("image"), "tower.in", roles=("hidden", None)))
    with emit.scope("tower"):
        own = emit.attention(patches, patches, patches, heads=4, mask=emit.flow_input("keep"))
    emit.set_named("memory", patches + own)
    return x


def layer(index: int) -> Any:
    """Causal attention, cross-attention of fewer key heads over what is kept, a feed-forward part."""

    def block(emit: Any, x: Any) -> Any:
        def dense(value: Any, name: str, roles: Any = ("heads", "hidden")) -> Any:
            with emit.scope(name):
                return emit.linear(value, f"{index}.{name}", roles=roles)

        with emit.scope("self"):
            q, k, v = (dense(x, n) for n in ("q", "k", "v"))
            x = x + emit.attention(q, k, v, heads=4, causal=True, rope=emit.rotary(emit.positions(x), head_dim=4))
        memory, keep = emit.named("memory"), emit.flow_input("keep")
        with emit.scope("cross"):
            k, v = (dense(memory, n, ("kv_heads", "hidden")) for n in ("mk", "mv"))
            x = x + emit.cross_attention(dense(x, "mq"), k, v, heads=4, kv_heads=2, mask=keep)
        shift = emit.optional_input("shift")
        x = x if shift is None else x + shift[:, None] * emit.tanh(x)
        return x + emit.tanh(dense(x, "f", None))

    return rlx.blocks.Custom(block, "block")


def flow() -> rlx.ModelFlow:
    made = rlx.ModelFlow("reader").input("tokens", ("batch", "seq"), dtype="int32")
    made = made.input("image", ("batch", "patches", C)).input("keep", ("batch", "patches"), dtype="bool")
    made = made.input("shift", ("batch", H), default=None)
    return made.embed("e").custom_named("see", tower).repeat_layers(LAYERS, layer).lm_head(V, H, tied=True)


def normal(*shape: int) -> np.ndarray:
    return (RNG.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)


SHAPES = {"q": (H, H), "k": (H, H), "v": (H, H), "mq": (H, H), "mk": (8, H), "mv": (8, H), "f": (H, H)}
WEIGHTS = {"e": normal(V, H) * 3, "tower.in": normal(H, C)} | {
    f"{i}.{name}": normal(*shape) for i in range(LAYERS) for name, shape in SHAPES.items()
}
TOKENS = RNG.integers(0, V, (3, 8)).astype(np.int32)
IMAGE = RNG.standard_normal((3, 6, C)).astype(np.float32)
KEEP = np.array([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0], [1, 0, 1, 1, 1, 0]], bool)
BESIDE = {"image": IMAGE, "keep": KEEP}


@functools.cache
def lm(roll: str = "unroll") -> Any:
    profile = rlx.CompileProfile().replace(layers={"roll": roll})
    return rlx.CausalLM(flow(), WEIGHTS, profile=profile)


def model(program: str) -> Any:
    return rlx.compile(flow(), WEIGHTS, program=program)


def forward(tokens: np.ndarray, **beside: Any) -> np.ndarray:
    return np.asarray(lm().logits(tokens, inputs=BESIDE | beside))


def recomputed(prompts: list[list[int]], count: int, **beside: Any) -> list[list[int]]:
    """Greedy tokens, the whole sequence every time, a row at a time."""
    out = []
    for row, prompt in enumerate(prompts):
        ids = list(prompt)
        one = {name: value[row : row + 1] for name, value in (BESIDE | beside).items()}
        for _ in range(count):
            padded = np.array([ids + [0] * (12 - len(ids))], np.int32)
            ids.append(int(np.asarray(lm().logits(padded, inputs=one))[0, len(ids) - 1].argmax()))
        out.append(ids[len(prompt) :])
    return out


PROMPTS = [TOKENS[0, :5].tolist(), TOKENS[1, :2].tolist(), TOKENS[2, :7].tolist()]


def test_generate_is_recomputing() -> None:
    """Ragged prompts, each with an image and a mask of its own; streams give the same."""
    want = recomputed(PROMPTS, 4)
    assert lm().generate(PROMPTS, max_new_tokens=4, inputs=BESIDE) == want
    one = {name: value[1:2] for name, value in BESIDE.items()}
    assert list(lm().stream(PROMPTS[1], max_new_tokens=4, inputs=one)) == want[1]
    short = {"image": IMAGE[1:2, :2], "keep": KEEP[1:2, :2]}  # the mask drops the others: another size, the same tokens
    assert lm().generate(PROMPTS[1], max_new_tokens=4, inputs=short) == want[1]


def test_what_the_state_keeps() -> None:
    """Keys and values of each layer, as few as are read, and its mask; `extend` reads no weight of the tower."""
    extend, prefill = model("extend"), model("prefill")
    names = [i.name for i in extend.inputs if not i.optional]
    assert names == ["tokens", "lengths"]
    state = prefill.init_state(3, 8, patches=6)
    kept = {name: a.shape for name, a in state.leaves.items() if "cross" in name}
    assert sorted(kept.values()) == [(3, 6)] * LAYERS + [(3, 6, 8)] * 2 * LAYERS
    assert not any("tower" in line or "mk" in line for line in extend.text("mir").splitlines())
    out, state = prefill(TOKENS[:, :4], IMAGE, KEEP, lengths=np.full(3, 4, np.int32), state=state)
    more, state = extend(TOKENS[:, 4:], lengths=np.full(3, 4, np.int32), state=state)
    np.testing.assert_allclose(np.concatenate([out, more], 1), forward(TOKENS), atol=3e-5)


def derived(read: Any) -> None:
    made = rlx.ModelFlow("m").input("tokens", ("batch", "seq"), dtype="int32").input("image", ("batch", "patches", H))
    made = made.embed("e").custom_named("read", lambda e, x: read(e, x, e.flow_input("image")))
    rlx.compile(made.lm_head(V, H, True), {"e": WEIGHTS["e"]}, program="extend").text("mir")


def test_explicit_reads_the_request_in_every_call() -> None:
    """It has no state: what the request brings is its input again, and attention over it has no cache."""
    step: Any = rlx.compile(flow(), WEIGHTS, program="explicit")
    want = forward(TOKENS, **BESIDE)
    assert [name for name in step.output_names if name.endswith(".k")] == [f"kv.{i}.k" for i in range(LAYERS)]
    exporting: Any = rlx.compile(flow().export_kv(), WEIGHTS)
    read = exporting(TOKENS[:, :5], **BESIDE)
    caches = {f"past_{n}_{i}": read[f"kv.{i}.{n}"] for i in range(LAYERS) for n in "kv"}
    out = step(TOKENS[:, 5:], **BESIDE, **caches)
    assert_close(np.asarray(out["logits"]), want[:, 5:])
