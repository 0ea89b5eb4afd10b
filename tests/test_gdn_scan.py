"""The stage `GdnScan`: the gated delta rule over registered inputs, from zeros or from a state that is handed on."""

from collections.abc import Callable
from typing import Any

import numpy as np

import rlx_jax as rlx
from rlx_jax.blocks import GdnScan
from tests.oracles.comparing import assert_close
from tests.oracles.gated_delta import gated_delta

HEADS, N, S = 2, 3, 5
SHAPES = {"q": (HEADS, N), "k": (HEADS, N), "v": (HEADS, N), "g": (HEADS,), "beta": (HEADS,)}


def arrays() -> dict[str, np.ndarray]:
    """Inputs `[2, S, …]` and a state."""
    rng = np.random.default_rng(4)
    found = {name: rng.normal(size=(2, S, *shape)) for name, shape in SHAPES.items()}
    found["g"] = -np.abs(found["g"])
    return found | {"state": rng.normal(size=(2, HEADS, N, N))}


def register(emit: Any, value: Any) -> Any:
    """The inputs, and the state where the flow has one."""
    emit.set_gdn(*(emit.flow_input(name) for name in SHAPES))
    if "state_in" in emit.state.inputs:
        emit.set_named("layer0.state", emit.flow_input("state_in"))
    return value


def flow(*stages: Any, before: Callable[..., Any] = register, state: bool = False) -> Any:
    """A flow over the inputs."""
    made = rlx.ModelFlow("gdn")
    for name, shape in SHAPES.items():
        made = made.input(name, ("batch", "seq", *shape))
    if state:
        made = made.input("state_in", ("batch", HEADS, N, N))
    return made.custom(before).stage(*stages)


def given(names: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Arrays as f32, by input."""
    found = arrays() | {"state_in": arrays()["state"]}
    return {name: found[name].astype(np.float32) for name in names}


def transcript(a: dict[str, np.ndarray], state: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """Results and the state after, token by token."""
    return gated_delta(a["q"], a["k"], a["v"], a["g"], a["beta"], state)


def test_from_zeros() -> None:
    model: Any = rlx.compile(flow().gdn_scan(GdnScan.prefill(N, ("batch", "seq", HEADS, N))))
    assert_close(model(**given(tuple(SHAPES))), transcript(arrays(), None)[0])


def test_the_state_goes_from_stage_to_stage() -> None:
    """What the second scan gives is what it gives behind the first; the state is there under its key, and as output."""
    scan = GdnScan.prefill(N).with_carry("layer0.state")
    model: Any = rlx.compile(flow(scan, scan, state=True).with_extra_outputs(["layer0.state"]))
    got, found = model(**given((*SHAPES, "state_in"))), arrays()
    twice = transcript(found, transcript(found, found["state"])[1])
    assert_close(got["output"], twice[0])
    assert_close(got["layer0.state"], twice[1])
