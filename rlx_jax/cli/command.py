"""What the commands of `rlx-jax` are made of, and the options that several of them have."""

from __future__ import annotations

import argparse
import codecs
import enum
import json
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

import rlx_jax as rlx
from rlx_jax.cli.terminal import Interrupt, Status, in_bytes, whole_input
from rlx_jax.errors import RequestError, listing, quote, shown
from rlx_jax.generate.drafters import SOURCES
from rlx_jax.generate.sampler import OPTIONS, one_sampler
from rlx_jax.io.strict_json import is_text
from rlx_jax.ir.table import TextTable
from rlx_jax.text.tokenizer import Tokenizer


@dataclass
class Session:
    """What a run of the command has: Ctrl-C, the line of progress, and what is said on stderr when it is done."""

    interrupt: Interrupt
    status: Status
    closing: str = ""

    def say(self) -> None:
        """The figures so far, once, where somebody looks."""
        if self.closing and self.status.shown:
            print(self.closing, file=sys.stderr, flush=True)
        self.closing = ""


@dataclass(frozen=True)
class Command:
    """A command: `run` yields what is written to stdout, piece by piece; its docstring is the description. Ctrl-C ends
    it between two pieces, unless it `hears` that itself."""

    name: str
    help: str
    options: tuple[Callable[[argparse.ArgumentParser], None], ...]
    run: Callable[[argparse.Namespace, Session], Iterator[str]]
    hears: bool = False


# -- options -----------------------------------------------------------------------------------


def add_model(parser: argparse.ArgumentParser) -> None:
    """Which checkpoint."""
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
    """How it runs, and where."""
    add = parser.add_argument
    add("--profile", metavar="NAME|FILE", help="a preset, such as llama32_decode, or a *.rlx.toml file")
    add("--dtype", metavar="DTYPE", help="compute in bf16, f32 ...")
    add("--device", metavar="DEVICE", help="cpu, gpu, tpu, or one of several: gpu:1; the first that JAX has")
    add("--devices", type=device_count, metavar="N", help="divide the model over N devices, or auto: over all")
    add("--tensor", type=int, metavar="T", help="of --devices, divide heads and weights over T; the rest have copies")
    add("--quiet", action="store_true", help="no progress and no figures on stderr")


def add_sampling(parser: argparse.ArgumentParser, most: int | None = 64, told: str = "%(default)s") -> None:
    """How tokens are chosen, and at most how many: what `most` is, in words, is `told`."""
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=most, metavar="N", help=f"at most this many ({told})")
    for name, rule in OPTIONS.items():
        kind = int if rule.whole else float
        add(f"--{name.replace('_', '-')}", type=kind, metavar=rule.metavar, help=rule.help)
    add("--seed", type=int, metavar="N", help="of the random draws; without it another one each time")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add(
        "--speculative", metavar="prompt|mtp|DIR",
        help="draft from the text, by the model's MTP module, or by a smaller checkpoint",
    )  # fmt: skip
    add("--draft-tokens", type=int, default=4, metavar="K", help="with --speculative, drafts a step (%(default)s)")


def add_json(parser: argparse.ArgumentParser) -> None:
    """How results are written."""
    parser.add_argument("--json", action="store_true", help="one JSON object for each result, on a line of its own")


def device_count(text: str) -> int | str:
    """A number, or `auto`."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as cause:
        raise argparse.ArgumentTypeError(f"expected a number or auto, got {shown(text)}") from cause


# -- what they mean ----------------------------------------------------------------------------


def open_model(args: argparse.Namespace, session: Session, directory: str | None = None) -> Any:
    """What the directory of a command holds, or another one, to call."""
    own = {"revision": args.revision, "ignore_fields": args.ignore_field} if directory is None else {}
    return rlx.load(
        args.directory if directory is None else directory,
        profile=args.profile, mesh=mesh_of(args.devices, args.tensor), dtype=args.dtype, progress=session.status,
        **own,
    )  # fmt: skip


def language_model(args: argparse.Namespace, session: Session, directory: str | None = None) -> rlx.CausalLM:
    """As `open_model`, of what generates.

    Raises:
        RequestError: it holds something else; the directory of the command has no tokenizer.
    """
    lm = open_model(args, session, directory)
    if not isinstance(lm, rlx.CausalLM):
        raise RequestError(
            f"{quote(directory or args.directory)} is {a_kind(lm)}, which does not generate, nor score texts; rlx-jax "
            "embed takes it"
        )
    if directory is None:
        check_reads_texts(lm.tokenizer, args)
    return lm


def check_reads_texts(tokenizer: Tokenizer | None, args: argparse.Namespace) -> None:
    """The checkpoint of a command has a tokenizer.

    Raises:
        RequestError: it has none.
    """
    if tokenizer is None:
        raise RequestError(
            f"{quote(args.directory)} has no tokenizer.json, which texts need; save_pretrained of transformers' "
            "AutoTokenizer writes one"
        )


def a_kind(model: Any) -> str:
    """What kind of model, in a sentence."""
    kinds = {rlx.Encoder: "an encoder", rlx.VisionEncoder: "an encoder of images", rlx.DualEncoder: "a dual encoder"}
    return kinds.get(type(model), "a language model")


def sampler_of(args: argparse.Namespace) -> rlx.Sampler:
    """How to choose tokens, checked before anything is loaded."""
    return one_sampler(None, {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None})


def request_of(args: argparse.Namespace, session: Session, sampler: rlx.Sampler) -> dict[str, Any]:
    """What `stream` and `chat` are given beside the prompt."""
    source = args.speculative
    return {
        "max_new_tokens": args.max_new_tokens, "sampler": sampler, "stop": args.stop, "seed": args.seed,
        "speculative": source if source in (None, *SOURCES) else language_model(args, session, source),
        "draft_tokens": args.draft_tokens,
    }  # fmt: skip


def check_texts(texts: Mapping[str, Any]) -> None:
    """What was given on the command line is text: UTF-8.

    Raises:
        RequestError: names the option.
    """
    for option, given in texts.items():
        if not all(map(is_text, [given] if isinstance(given, str) else given or [])):
            raise RequestError(f"{option}: not UTF-8")


def text_of(data: bytes, first: int = 0) -> str:
    """Bytes of stdin, of which `first` were read before, as text.

    Raises:
        RequestError: they are not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as cause:
        raise RequestError(f"stdin: not UTF-8 at byte {first + cause.start}") from cause


def texts_of(given: list[str], session: Session) -> list[str]:
    """Texts of the command line; of none, the lines of stdin."""
    check_texts({"TEXT": given})
    if given:
        return given
    return text_of(session.interrupt.waits(lambda: whole_input("a text on each line"))).splitlines()


def chosen_device(name: str | None, devices: int | str | None) -> Any:
    """The `jax.Device` of `--device`; None for the one that JAX takes.

    Raises:
        RequestError: there is none of that name, or `--devices` divides the model over several.
    """
    if name is None:
        return None
    if devices is not None:
        raise RequestError("--device is one device, --devices are several: give one of them")
    platform, _, number = name.partition(":")
    known = jax.devices()
    try:
        found = jax.devices(platform)
    except RuntimeError as cause:
        here = {d.platform: None for d in known} | {"cpu": None}
        raise RequestError(
            f"--device {name}: JAX has no {shown(platform)} here, but {listing(here)}; "
            "rlx-jax doctor says what is missing"
        ) from cause
    if number and not (number.isascii() and number.isdigit() and int(number) < len(found)):
        raise RequestError(f"--device {name}: expected {platform}:0 to {platform}:{len(found) - 1}")
    return found[int(number or 0)]


def mesh_of(devices: int | str | None, tensor: int | None) -> Any:
    """What `mesh=` is given: a number of devices as it is, or with `--tensor` a mesh of data × tensor.

    Raises:
        RequestError: more devices than there are, or a number that does not divide them.
    """
    if devices is None and tensor is not None:
        raise RequestError("--tensor is how many of --devices divide the heads; give --devices too")
    if devices is None:
        return None
    known = jax.devices()
    count = len(known) if isinstance(devices, str) else devices
    if not 1 <= count <= len(known):
        raise RequestError(f"--devices {count}: expected 1 to {len(known)}, JAX has so many ({known[0].platform})")
    if tensor is None:
        return devices
    if tensor < 1 or count % tensor:
        fit = ", ".join(str(t) for t in range(1, count + 1) if count % t == 0)
        raise RequestError(f"--tensor {tensor}: expected what divides {count} devices, one of {fit}")
    return Mesh(np.array(known[:count]).reshape(-1, tensor), ("data", "tensor"))


# -- results -----------------------------------------------------------------------------------


def as_line(result: Mapping[str, Any]) -> str:
    """A result as a line of JSON; None where a number is not known or not finite."""
    every = codecs.lookup(getattr(sys.stdout, "encoding", None) or "utf-8").name.startswith("utf")
    return json.dumps(_plain(dict(result)), ensure_ascii=not every, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(v) for v in value]
    if is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, enum.Enum):
        return _plain(value.value)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not np.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def table(rows: Mapping[str, Any]) -> Iterator[str]:
    """Names and values, a line each."""
    found = [(name, value if isinstance(value, str) else shown(value)) for name, value in rows.items()]
    yield f"{TextTable(found, left=2)}\n"


def peak_memory() -> int:
    """The most bytes that were in use so far: of the device, or on the CPU of this process."""
    stats = jax.local_devices()[0].memory_stats() or {}
    unit = 1 if sys.platform == "darwin" else 1024
    return int(stats.get("peak_bytes_in_use") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit)


def peak_text() -> str:
    """The same, to read."""
    return f"peak memory {in_bytes(peak_memory())}"
