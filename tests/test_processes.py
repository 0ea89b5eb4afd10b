"""A model over the devices of two processes, against the same over those of one."""

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx_jax as rlx
from tests import model_process

ROOT = Path(__file__).parents[1]
CHECKPOINT = ROOT / "tests" / "fixtures" / "llama" / "gqa_tied_llama3_v5"


def both(directory: Path, steps: int, save_at: int) -> list[dict[str, Any]]:
    """What each of two processes says."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tests.model_process", str(CHECKPOINT), str(directory), f"--steps={steps}"]
    command += [f"--save-at={save_at}", "--of=2", f"--port={port}"]
    processes = [
        subprocess.Popen(
            [*command, f"--process={i}"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for i in range(2)
    ]
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=300)
            assert process.returncode == 0, err[-3000:]
            found.append(json.loads(out))
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.mark.slow
def test_a_model_over_two_processes(tmp_path: Path) -> None:
    """Both read the checkpoint, generate the same tokens as one device, and train; one process goes on from their
    checkpoint with the losses that they had."""
    first, second = both(tmp_path / "run", 4, 2)
    assert first == second
    alone = rlx.load(CHECKPOINT)
    assert first["tokens"] == alone.generate(model_process.PROMPTS, max_new_tokens=8)
    sampler = rlx.Sampler(temperature=1.0)
    assert first["sampled"] == alone.generate(model_process.PROMPTS, max_new_tokens=8, sampler=sampler, seed=7)
    losses = [first["losses"][str(number)] for number in range(1, 5)]
    whole = model_process.losses_of(CHECKPOINT, tmp_path / "alone", 4, 0)
    np.testing.assert_allclose([whole[number] for number in range(1, 5)], losses, rtol=1e-5)
    resumed = model_process.losses_of(CHECKPOINT, tmp_path / "run", 4, 0)
    assert sorted(resumed) == [3, 4]
    np.testing.assert_allclose([resumed[number] for number in resumed], losses[2:], rtol=1e-5)
    assert losses[-1] != losses[0]
