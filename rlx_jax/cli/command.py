"""`Command` and `Session`: the parts of every command of `rlx-jax`, and the options that several commands share."""

from __future__ import annotations

import argparse
import codecs
import enum
import json
import resource
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import rlx_jax as rlx
from rlx_jax.cli.terminal import Interrupt, Status
from rlx_jax.compiler.meshes import select_devices
from rlx_jax.dataclasses import dataclass, fields, is_dataclass
from rlx_jax.errors import RequestError, listing, quote, shown
from rlx_jax.ir.text import TextTable, format_bytes
from rlx_jax.lowering.hir.derive import PROGRAMS


@dataclass
class Session:
    """The context of a running command.

    Attributes:
        interrupt: handler of Ctrl-C.
        status: the progress line.
        summary: a line of figures for stderr, printed at the end.
    """

    interrupt: Interrupt
    status: Status
    summary: str = ""

    def print_summary(self) -> None:
        """Print the line of figures once, if stderr is a terminal and progress is wanted."""
        if self.summary and self.status.enabled:
            print(self.summary, file=sys.stderr, flush=True)
        self.summary = ""


@dataclass(frozen=True)
class Command:
    """A command of `rlx-jax`.

    Attributes:
        name, help: for `argparse`.
        options: functions that add options to the parser.
        run: generator of the text for stdout; its docstring is the description in the help.
        handles_interrupt: whether `run` checks for Ctrl-C itself; otherwise Ctrl-C ends it after the current part of
            the text.
    """

    name: str
    help: str
    options: tuple[Callable[[argparse.ArgumentParser], None], ...]
    run: Callable[[argparse.Namespace, Session], Iterator[str]]
    handles_interrupt: bool = False


# -- options -----------------------------------------------------------------------------------


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that select a checkpoint."""
    parser.add_argument(
        "directory", metavar="DIR|ORG/NAME",
        help="a checkpoint directory: config.json, safetensors ...; or, where there is none, a model of the Hub, "
        "which is fetched (HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT are heeded)",
    )  # fmt: skip
    parser.add_argument(
        "--ignore-field", action="append", default=[], metavar="NAME",
        help="a field of config.json that is refused and that does not change the model; may be given several times",
    )  # fmt: skip
    parser.add_argument("--revision", metavar="REV", help="a branch, tag or commit of a model of the Hub")


def add_compute(parser: argparse.ArgumentParser) -> None:
    """Add the options for profile, dtype and devices."""
    add = parser.add_argument
    add("--profile", metavar="NAME|FILE", help="a preset, such as llama32_decode, or a *.rlx.toml file")
    add("--dtype", metavar="DTYPE", help="compute in bf16, f32 ...")
    add("--device", metavar="DEVICE", help="cpu, gpu, tpu, or one of several: gpu:1; the first that JAX has")
    add("--devices", type=device_count, metavar="N", help="divide the model over N devices, or auto: over all")
    add("--tensor", type=int, metavar="T", help="of --devices, divide heads and weights over T; the rest have copies")
    add("--quiet", action="store_true", help="no progress and no figures on stderr")


def add_program(parser: argparse.ArgumentParser) -> None:
    """Add the options that select a program of a model and its sizes."""
    add = parser.add_argument
    add("--program", choices=PROGRAMS, help="forward, train, or of a language model prefill, extend ...")
    add(
        "--size", action="append", default=[], type=named_size, metavar="NAME=N",
        help="a size of the program, such as batch=1, seq=128 or context=2048; may be given several times",
    )  # fmt: skip


def named_size(text: str) -> tuple[str, int]:
    """Parse a size `NAME=N`."""
    name, _, number = text.partition("=")
    if not name or not (number.isascii() and number.isdigit() and int(number)):
        raise argparse.ArgumentTypeError(f"expected NAME=N with a number of at least 1, got {shown(text)}")
    return name, int(number)


def sizes_by_name(sizes: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return sizes by name.

    Raises:
        RequestError: a name has two numbers.
    """
    result: dict[str, int] = {}
    for name, size in sizes:
        if result.setdefault(name, size) != size:
            raise RequestError(f"the size {quote(name)} is given twice, as {result[name]} and {size}")
    return result


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add the option for the format of results."""
    parser.add_argument("--json", action="store_true", help="one JSON object for each result, on a line of its own")


def device_count(text: str) -> int | str:
    """Parse a number of devices, or `auto`."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as cause:
        raise argparse.ArgumentTypeError(f"expected a number or auto, got {shown(text)}") from cause


# -- values of the options ---------------------------------------------------------------------


def load_model(args: argparse.Namespace, session: Session, directory: str | None = None) -> Any:
    """Load the model of a command, or of another directory."""
    # Revision and ignored fields belong to the command's checkpoint, not to a draft model.
    source_options = {"revision": args.revision, "ignore_fields": args.ignore_field} if directory is None else {}
    return rlx.load(
        args.directory if directory is None else directory,
        profile=args.profile, mesh=mesh_argument(args.devices, args.tensor), dtype=args.dtype, progress=session.status,
        **source_options,
    )  # fmt: skip


def load_kind(args: argparse.Namespace, session: Session, kinds: Any, advice: str, directory: str | None = None) -> Any:
    """Load the model of a command, or of another directory, if it is of one of some classes.

    Raises:
        RequestError: it is not; the message ends with `advice`.
    """
    model = load_model(args, session, directory)
    if isinstance(model, kinds):
        return model
    names = {
        "Encoder": "an encoder", "VisionEncoder": "an encoder of images", "DualEncoder": "a dual encoder",
        "Classifier": "a classifier", "Reranker": "a reranker", "ImageClassifier": "a classifier of images",
        "TokenClassifier": "a classifier of tokens", "QuestionAnswerer": "a model for questions",
        "MaskedLM": "a masked language model",
    }  # fmt: skip
    kind = names.get(type(model).__name__, "a language model")
    raise RequestError(f"{quote(directory or args.directory)} is {kind}{advice}")


def select_device(name: str | None, devices: int | str | None) -> Any:
    """Return the `jax.Device` of `--device`; None for JAX's default.

    Raises:
        RequestError: there is no such device, or `--devices` is given too.
    """
    if name is None:
        return None
    if devices is not None:
        raise RequestError("--device selects one device, --devices several: use only one of them")
    platform, _, number = name.partition(":")
    all_devices = jax.devices()
    try:
        platform_devices = jax.devices(platform)
    except RuntimeError as cause:
        platforms = {d.platform: None for d in all_devices} | {"cpu": None}
        raise RequestError(
            f"--device {name}: JAX has no {shown(platform)} here, but {listing(platforms)}; "
            "rlx-jax doctor lists what is missing"
        ) from cause
    if number and not (number.isascii() and number.isdigit() and int(number) < len(platform_devices)):
        raise RequestError(f"--device {name}: expected {platform}:0 to {platform}:{len(platform_devices) - 1}")
    return platform_devices[int(number or 0)]


def mesh_argument(devices: int | str | None, tensor: int | None) -> Any:
    """Return the argument `mesh=`: a number of devices unchanged, or with `--tensor` a mesh of data × tensor.

    Raises:
        RequestError: there are fewer devices, or `--tensor` does not divide their number.
    """
    if devices is None and tensor is not None:
        raise RequestError("--tensor divides --devices into groups; pass --devices too")
    if devices is None:
        return None
    selected = select_devices(devices, "--devices ")
    count = len(selected)
    if tensor is None:
        return devices
    if tensor < 1 or count % tensor:
        divisors = ", ".join(str(t) for t in range(1, count + 1) if count % t == 0)
        raise RequestError(f"--tensor {tensor}: expected a divisor of {count} devices, one of {divisors}")
    return Mesh(np.array(selected).reshape(-1, tensor), ("data", "tensor"))


# -- results -----------------------------------------------------------------------------------


def json_line(result: Mapping[str, Any]) -> str:
    """Return a result as a line of JSON, with null for numbers that are unknown or not finite."""
    # Escape non-ASCII characters where the encoding of stdout cannot represent them.
    is_unicode = codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name.startswith("utf")
    return json.dumps(_to_json_value(dict(result)), ensure_ascii=not is_unicode, allow_nan=False) + "\n"


def _to_json_value(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _to_json_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_to_json_value(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _to_json_value(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, enum.Enum):
        return _to_json_value(value.value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def table(rows: Mapping[str, Any]) -> Iterator[str]:
    """Yield a table of names and values, one per line."""
    cells = [(name, value if isinstance(value, str) else shown(value)) for name, value in rows.items()]
    yield f"{TextTable(cells, left=2)}\n"


def peak_memory() -> int:
    """Return the peak memory in bytes: of the device, or on the CPU of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, and in KiB on Linux
    return int(stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def peak_text() -> str:
    """Return the peak memory as text."""
    return f"peak memory {format_bytes(peak_memory())}"
