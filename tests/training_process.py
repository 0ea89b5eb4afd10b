"""One process of a small training run that saves every step: what the tests of several processes start, and kill.

    python -m tests.training_process DIRECTORY STEPS PROCESS COUNT PORT FULL

Process 1 can write nothing of the step `FULL`, as if its disk were full then.

It resumes from the newest step, says `ready`, and waits for a line. Then it says `step NUMBER LOSS DIGEST` before each
save, and at its end `ended NUMBER`. The digest is of this process's part of the state.
"""

import errno
import hashlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlx_jax.errors import NoSpaceError
from rlx_jax.train import Checkpoints, step_files

ROOT = Path(__file__).parents[1]
_HEARD: list[TextIO] = [sys.stdout]
DEVICES, HEARTBEAT_S = 8, 5
SHAPE = (1024, 512)


def shardings() -> dict[str, Any]:
    """Where the arrays of a state lie: over all eight devices, in two axes."""
    mesh = Mesh(np.array(jax.devices()[:DEVICES]).reshape(4, 2), ("data", "model"))
    specs = {"w": ("data", "model"), "momentum": ("data", "model"), "half": ("model",), "count": ()}
    return {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}


def like() -> dict[str, Any]:
    """A state without values: arrays over all devices, a number, and an array that each process has for itself."""
    dtypes = {"w": jnp.float32, "momentum": jnp.float32, "half": jnp.bfloat16, "count": jnp.int32}
    places = shardings()
    arrays = {
        name: jax.ShapeDtypeStruct(() if name == "count" else SHAPE, dtype, sharding=places[name])
        for name, dtype in dtypes.items()
    }
    return {"step": 0, "rate": jnp.float32(0), **arrays}


def update(arrays: dict[str, Any], x: Any) -> tuple[dict[str, Any], Any]:
    """One step of momentum on a linear model, and its loss."""

    def loss_of(w: Any) -> Any:
        return ((x @ w - jnp.sin(x[:, : SHAPE[1]])) ** 2).mean()

    loss, gradient = jax.value_and_grad(loss_of)(arrays["w"])
    momentum = 0.9 * arrays["momentum"] + gradient
    w = arrays["w"] - 0.1 * momentum
    return {"w": w, "momentum": momentum, "half": w.astype(jnp.bfloat16), "count": arrays["count"] + 1}, loss


def digest(state: dict[str, Any], devices: Iterable[Any]) -> str:
    """SHA-256 of what lies on some devices."""
    found, wanted = hashlib.sha256(f"{state['step']} {state['rate']}".encode()), {device.id for device in devices}
    for name in sorted(shardings()):
        shards = {shard.device.id: shard.data for shard in state[name].addressable_shards}
        for device in sorted(wanted):
            found.update(np.asarray(shards[device]).tobytes())
    return found.hexdigest()[:16]


def start() -> dict[str, Any]:
    """The state before the first step."""
    places = shardings()
    zeros = {name: jnp.zeros(spec.shape, spec.dtype) for name, spec in like().items() if name in places}
    return {"step": 0, "rate": jnp.float32(0.1), **jax.jit(lambda: zeros, out_shardings=places)()}


def steps_of(state: dict[str, Any], steps: int) -> Iterator[tuple[int, float, dict[str, Any]]]:
    """The steps up to `steps`: the number of each, its loss, and the state after it, which the next one consumes."""
    places = shardings()
    out = places, NamedSharding(places["count"].mesh, PartitionSpec())
    step = jax.jit(update, donate_argnums=0, out_shardings=out)
    while state["step"] < steps:
        x = np.random.default_rng(state["step"]).normal(size=(16, SHAPE[0])).astype("f4")
        arrays, loss = step({name: state[name] for name in places}, x)
        state = {"step": state["step"] + 1, "rate": state["rate"] * 0.5, **arrays}
        yield state["step"], float(loss), state


def train(directory: str, steps: int) -> None:
    """Resume, and train until `steps` or SIGTERM."""
    with Checkpoints(directory, keep=3, timeout_s=60) as checkpoints, checkpoints.preemption() as stop:
        begun = start() if checkpoints.newest() is None else checkpoints.restore(like())
        say("restored", begun["step"], digest(begun, jax.local_devices()))
        say("ready", begun["step"])
        sys.stdin.readline()
        for number, loss, state in steps_of(begun, steps):
            say("step", number, loss.hex(), digest(state, jax.local_devices()))
            save(checkpoints, state)
            if stop.wanted:
                break
    say("ended", number)


def save(checkpoints: Checkpoints, state: dict[str, Any]) -> None:
    """Save a step; if the one before it failed for want of space, say so, and save this one all the same."""
    try:
        checkpoints.save(state["step"], state)
    except NoSpaceError as error:
        say("failed", state["step"] - 1, error)
        checkpoints.save(state["step"], state)


def full_at(step: int) -> None:
    """In this process the disk is full while it writes one step."""
    real = step_files.sync_own_files

    def sync_own_files(directory: str, process: int) -> dict[str, dict[str, Any]]:
        if f".{step}.rlx-save-" in directory:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(directory, process)

    step_files.sync_own_files = sync_own_files


def say(*words: object) -> None:
    print(*words, file=_HEARD[0], flush=True)


def main() -> None:
    """Start this process and its backend, then train."""
    directory, *numbers = sys.argv[1:]
    steps, process, count, port, full = map(int, numbers)
    _HEARD[0] = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo writes to stdout, into our lines
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // count)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", count, process, heartbeat_timeout_seconds=HEARTBEAT_S)
    if process == 1:
        full_at(full)
    train(directory, steps)


class Group:
    """The processes of one run. `start` lets them train; `heard` is what each has said by its end."""

    def __init__(self, directory: Path, steps: int, count: int, full: int = -1) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [sys.executable, "-m", "tests.training_process", str(directory), str(steps)]
        # Files, as nobody reads stderr while processes run, and a full pipe would stop them.
        self.problems = [tempfile.TemporaryFile("w+") for _ in range(count)]
        self.processes = [
            subprocess.Popen(
                [*command, *map(str, (index, count, port, full))],
                cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.problems[index], text=True,
            )
            for index in range(count)
        ]  # fmt: skip
        self.heard: list[list[list[str]]] = [[] for _ in self.processes]

    def listen(self, index: int, word: str) -> list[str]:
        """What process `index` says when it says `word` next."""
        stdout = self.processes[index].stdout
        assert stdout is not None
        while text := stdout.readline():
            self.heard[index].append(text.split())
            if text.startswith(f"{word} "):
                return self.heard[index][-1]
        for process in self.processes:
            process.kill()
            process.communicate()
        told = [self.told(other)[-2000:] for other in range(len(self.processes))]
        raise AssertionError(f"process {index} ended before it said {word!r}: {told}")

    def start(self) -> None:
        """Wait until all are ready, and let them train."""
        for index in range(len(self.processes)):
            self.listen(index, "ready")
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()

    def end(self, index: int, timeout_s: float = 120) -> tuple[int, str]:
        """Wait for the end of a process: its exit status and what it wrote to stderr."""
        out, _ = self.processes[index].communicate(timeout=timeout_s)
        self.heard[index] += [line.split() for line in out.splitlines()]
        return self.processes[index].returncode, self.told(index)

    def told(self, index: int) -> str:
        """What a process has written to stderr."""
        self.problems[index].seek(0)
        return self.problems[index].read()

    def close(self) -> None:
        """End what still runs."""
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.communicate()
        for problems in self.problems:
            problems.close()

    def said(self, index: int, word: str) -> dict[int, list[str]]:
        """By number of the step, the words after it."""
        return {int(line[1]): line[2:] for line in self.heard[index] if line[0] == word and len(line) > 2}


if __name__ == "__main__":
    main()
