"""Qwen 3.5 and Mamba-2, whose state has a fixed size, against the formulas; their records are in test_families.py."""

import functools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.io.folder import Folder
from rlx_jax.models.config import read_config
from rlx_jax.models.mamba2 import Mamba2Config
from tests.oracles import checkpoints, hugging_face, hybrid, numpy_reference
from tests.oracles.comparing import assert_close
from tests.oracles.recorded import Case, load_case, load_record

BLOCKS = checkpoints.FIXTURES / "qwen3_5_text" / "blocks_v5"
TIED = checkpoints.FIXTURES / "qwen3_5_text" / "tied_v5"
QUICK = ("qwen3_5_text/blocks_v5", "mamba2/groups_v5")


@functools.cache
def case(name: str) -> Case:
    """A recorded checkpoint, loaded once for the tests that follow each other."""
    return load_case(checkpoints.FIXTURES / name)


@functools.cache
def formulas(directory: Path) -> tuple[dict[str, Any], Any]:
    """The config and the weights of a checkpoint in float64."""
    return numpy_reference.read_config(directory), numpy_reference.read_weights(directory)


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_many_tokens(name: str) -> None:
    """60 tokens, which run in chunks, of rows that end anywhere."""
    config, weights = formulas(checkpoints.FIXTURES / name)
    lm, lengths = case(name).lm, np.array([60, 17])
    tokens = np.random.default_rng(3).integers(0, config["vocab_size"], (2, 60)).astype(np.int32)
    got = np.asarray(lm.logits(tokens, lengths))
    for b, n in enumerate(lengths):
        assert_close(got[b, :n], hybrid.row(config, weights, tokens[b, :n].tolist())[1], tolerance=5e-5)


def test_no_most_time_step_is_written_in_three_ways(tmp_path: Path) -> None:
    """Published checkpoints have Python's bare Infinity; newer releases of transformers write JSON."""
    source = checkpoints.FIXTURES / "mamba2" / "groups_v5"
    want = Mamba2Config.from_hf(read_config(Folder(source)))
    assert want.mixer.time_step_limit == (0.0, None)
    for n, most in enumerate((math.inf, "inf", {"__float__": "Infinity"})):
        directory = checkpoints.edited(source, tmp_path / str(n), {"time_step_limit": [0.0, most]})
        assert Mamba2Config.from_hf(read_config(Folder(directory))) == want


@pytest.mark.parametrize(
    "changes",
    [pytest.param({"hidden_act": "gelu"}, marks=pytest.mark.slow), {"time_step_limit": [0.3, 0.6]}],
    ids=["another activation", "steps in limits"],
)
def test_fields_of_mamba2_that_change_its_numbers(changes: dict[str, Any], tmp_path: Path) -> None:
    """`hidden_act` is that of the convolution alone: the gate of the norm is silu whatever it says."""
    directory = checkpoints.edited(checkpoints.FIXTURES / "mamba2" / "groups_v5", tmp_path / "m", changes)
    tokens = load_record(checkpoints.FIXTURES / "mamba2" / "groups_v5")["tokens"][0]
    config, weights = formulas(checkpoints.FIXTURES / "mamba2" / "groups_v5")
    assert_close(rlx.load(directory).logits([tokens])[0], hybrid.row(config | changes, weights, tokens)[1])


@pytest.mark.oracle
@pytest.mark.parametrize("name", QUICK)
def test_bf16(name: str) -> None:
    """bfloat16 departs from float32 by at most 1.5 times what `transformers` does, root mean square; 44 tokens."""
    directory = checkpoints.FIXTURES / name
    tokens = np.tile(load_record(directory)["tokens"], (1, 4))
    exact = hugging_face.llama_batch(hugging_face.load(directory, "AutoModelForCausalLM"), tokens)[1]
    theirs = hugging_face.bf16_logits(directory, tokens)
    profile = rlx.CompileProfile().replace(precision={"compute": "bf16"})
    ours = np.asarray(rlx.load(directory, profile=profile).logits(tokens))
    departures = [float(np.sqrt(np.mean(np.square(x - exact)))) for x in (ours, theirs)]
    assert departures[0] <= 1.5 * departures[1]
