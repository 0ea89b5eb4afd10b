"""Slices to symbolic sizes: a joint sequence is put together and taken apart, and its parts are what they were."""

from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.errors import DeriveError, ShapeError

RNG = np.random.default_rng(3)
TXT, IMG = (RNG.standard_normal((2, n, 4)).astype(np.float32) for n in (3, 5))


def flow(fn: Any) -> rlx.ModelFlow:
    """Of two sequences, with a size for each."""
    made = rlx.ModelFlow("joint").input("txt", ("batch", "words", 4)).input("img", ("batch", "patches", 4))
    return made.custom_named("cut", lambda e, t: fn(e, t, e.flow_input("img")))


def joint(emit: Any, t: Any, i: Any) -> Any:
    return emit.concat([t, i], axis=1)


CUTS: dict[str, tuple[Any, Any]] = {
    "in front": (lambda e, x, t, i: x[:, : t.shape[1]], np.s_[:, :3]),
    "behind": (lambda e, x, t, i: x[:, t.shape[1] :], np.s_[:, 3:]),
    "counted from the end": (lambda e, x, t, i: x[:, -i.shape[1] :, 1:3], np.s_[:, 3:, 1:3]),
    "before the end": (lambda e, x, t, i: x[..., : -i.shape[1], :], np.s_[:, :-5]),
    "a size of x itself": (lambda e, x, t, i: x[:, x.shape[1] - i.shape[1] : x.shape[1]], np.s_[:, 3:8]),
    "and numbers": (lambda e, x, t, i: x[:, 1 + t.shape[1] : -1], np.s_[:, 4:-1]),
    "a size twice": (lambda e, x, t, i: x[:, 1 : 2 * t.shape[1]], np.s_[:, 1:6]),
    "a size and itself": (lambda e, x, t, i: x[:, t.shape[1] : t.shape[1] + t.shape[1]], np.s_[:, 3:6]),
    "a difference": (lambda e, x, t, i: x[:, i.shape[1] - t.shape[1] :], np.s_[:, 2:]),
    "a number less": (lambda e, x, t, i: x[:, t.shape[1] - 2 : 2 * t.shape[1] - 1], np.s_[:, 1:5]),
    "beside a new axis": (lambda e, x, t, i: x[None, :, : t.shape[1], 0], np.s_[None, :, :3, 0]),
    "narrow": (lambda e, x, t, i: e.narrow(x, 1, t.shape[1], i.shape[1]), np.s_[:, 3:]),
    "narrow from the end": (lambda e, x, t, i: e.narrow(x, -2, -i.shape[1], i.shape[1]), np.s_[:, 3:]),
    "narrow to a number": (lambda e, x, t, i: e.narrow(x, 1, t.shape[1], 2), np.s_[:, 3:5]),
    "narrow from a number": (lambda e, x, t, i: e.narrow(x, 1, 2, t.shape[1]), np.s_[:, 2:5]),
}  # fmt: skip


def test_parts_of_a_joint_sequence() -> None:
    """All of them in one program; another pair of sizes too."""

    def cut(emit: Any, t: Any, i: Any) -> Any:
        for name, (fn, _) in CUTS.items():
            emit.output(name, fn(emit, joint(emit, t, i), t, i))
        return joint(emit, t, i)

    model = rlx.compile(flow(cut))
    out, x = model(TXT, IMG), np.concatenate([TXT, IMG], 1)
    for name, (_, key) in CUTS.items():
        np.testing.assert_array_equal(out[name], x[key], err_msg=name)
    longer = np.concatenate([IMG, IMG], 1)
    out = model(TXT, longer)
    np.testing.assert_array_equal(out["behind"], longer)
    np.testing.assert_array_equal(out["counted from the end"], longer[:, :, 1:3])


def test_a_part_has_the_size_it_had() -> None:
    """`words + patches` less `words` is `patches`, so that it can be added to what it was."""
    sizes: dict[str, Any] = {}

    def cut(emit: Any, t: Any, i: Any) -> Any:
        x = emit.tanh(joint(emit, t, i))
        sizes["behind"] = x[:, t.shape[1] :].shape[1]
        return x[:, t.shape[1] :] + i

    model = rlx.compile(flow(cut))
    np.testing.assert_allclose(model(TXT, IMG), np.tanh(IMG) + IMG, atol=1e-6)
    assert sizes["behind"] == "patches"


def test_what_only_sizes_decide() -> None:
    """Whether the text is the longer one is known when sizes are: refused in the call that does not fit."""
    model = rlx.compile(flow(lambda e, t, i: i[:, : t.shape[1]]))
    np.testing.assert_array_equal(model(TXT, IMG), IMG[:, :3])
    with pytest.raises(ShapeError, match="0:5 along axis 1"):
        model(IMG, TXT)


def test_a_cut_of_the_sequence_mixes_positions() -> None:
    """A part of a table as long as the prompt would be the front of it in every step of decoding."""
    model = (
        rlx.ModelFlow("m").input("tokens", ("batch", "seq"), dtype="int32").embed("e")
        .custom_named("wpe", lambda e, x: x + e.param("p")[: x.shape[1]])
        .lm_head(7, 4, tied=True)
    )  # fmt: skip
    weights = {"e": np.ones((7, 4), np.float32), "p": np.ones((9, 4), np.float32)}
    lm = rlx.CausalLM(model, weights)
    assert lm.logits([[1, 2]]).shape == (1, 2, 7)
    with pytest.raises(DeriveError, match="wpe"):
        lm.prefill([[1, 2]])
