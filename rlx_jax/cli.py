"""The command `rlx-jax`: generate from a checkpoint directory or a model of the Hub, or look at one.

Text goes to stdout as it comes; progress, warnings and errors go to stderr. Exit status: 0, 1 for an error, 2 for a
command that is not understood, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

import rlx_jax as rlx
from rlx_jax.errors import RequestError, RlxError, StorageError, quote, shown
from rlx_jax.generate.drafting import SOURCES
from rlx_jax.io.folder import open_folder
from rlx_jax.io.strict_json import is_text
from rlx_jax.ir.packed import stored_bytes
from rlx_jax.models.families import open_pretrained
from rlx_jax.text.tokenizer import load_tokenizer
from rlx_jax.weights.source import open_weights

_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # all but tab and new line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    args = parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # for a terminal that has not all characters
    try:
        with Interrupt() as interrupt, warnings.catch_warnings():
            warnings.showwarning = _warn
            for piece in args.run(args, interrupt):
                _write(piece)
                interrupt.check()
        return 0
    except KeyboardInterrupt:
        print()
        return 128 + signal.SIGINT
    except BrokenPipeError:  # the reader has seen enough, as `head` has
        _leave_stdout()
        return 128 + getattr(signal, "SIGPIPE", 13)
    except RlxError as error:
        if args.debug:
            raise
        print(f"rlx-jax: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def parser() -> argparse.ArgumentParser:
    """What the command understands."""
    top = argparse.ArgumentParser("rlx-jax", description="Transformers in JAX: generate from a checkpoint.")
    top.add_argument("--version", action="version", version=f"rlx-jax {rlx.__version__}, jax {jax.__version__}")
    commands = top.add_subparsers(required=True, metavar="COMMAND")

    generate = commands.add_parser("generate", help="continue a prompt, or answer it", description=_generate.__doc__)
    generate.set_defaults(run=_generate)
    add = generate.add_argument
    add("--prompt", required=True, metavar="TEXT", help="the text to continue; - reads it from stdin")
    add("--chat", action="store_true", help="answer it as one message, by the checkpoint's chat template")
    add("--system", metavar="TEXT", help="a system message before it; means --chat")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="at most this many (%(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0, the default, takes the likeliest token")
    add("--top-k", type=int, metavar="K", help="choose among the K likeliest")
    add("--top-p", type=float, metavar="P", help="choose among the likeliest that make up the probability P")
    add("--min-p", type=float, metavar="P", help="leave out what is less likely than P times the likeliest")
    add("--repetition-penalty", type=float, default=1.0, metavar="R", help="above 1: what was said gets less likely")
    add("--seed", type=int, default=0, metavar="N", help="of the random draws (%(default)s)")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add("--speculative", metavar="prompt|mtp|DIR", help="draft from the text, by an MTP module or a smaller model")
    add("--draft-tokens", type=int, default=4, metavar="K", help="with --speculative, drafts a step (%(default)s)")
    add("--profile", metavar="NAME|FILE", help="a preset, such as llama32_decode, or a *.rlx.toml file")
    add("--dtype", metavar="DTYPE", help="compute in bf16, f32 ...")
    add("--devices", type=_device_count, metavar="N", help="divide the model over N devices, or auto: over all")
    add("--tensor", type=int, metavar="T", help="of --devices, divide heads and weights over T; the rest have copies")
    add("--quiet", action="store_true", help="no progress on stderr")

    inspect = commands.add_parser("inspect", help="what a checkpoint is", description=_inspect.__doc__)
    inspect.set_defaults(run=_inspect)
    for command in (generate, inspect):
        command.add_argument(
            "directory", metavar="DIR|ORG/NAME",
            help="a checkpoint directory: config.json, safetensors ...; or, where there is none, a model of the Hub, "
            "which is fetched (HF_TOKEN, HF_HOME, HF_HUB_OFFLINE, HF_ENDPOINT are heeded)",
        )  # fmt: skip
        command.add_argument("--revision", metavar="REV", help="a branch, tag or commit of a model of the Hub")
        command.add_argument("--debug", action="store_true", help="show where an error comes from")
    return top


# -- commands ----------------------------------------------------------------------------------


def _generate(args: argparse.Namespace, interrupt: Interrupt) -> Iterator[str]:
    """Write the continuation of a prompt, token by token as they come."""
    sampler = rlx.Sampler(
        args.temperature, args.top_k, args.top_p, args.min_p, repetition_penalty=args.repetition_penalty
    )
    for option, texts in (("--prompt", [args.prompt]), ("--system", [args.system or ""]), ("--stop", args.stop)):
        if not all(map(is_text, texts)):
            raise RequestError(f"{option}: not UTF-8")
    profile = None if args.profile is None else rlx.CompileProfile.of(args.profile)
    mesh = _mesh(args.devices, args.tensor)
    prompt = _stdin() if args.prompt == "-" else args.prompt
    status = Status(interrupt, shown=sys.stderr.isatty() and not args.quiet)
    options: dict[str, Any] = {"profile": profile, "mesh": mesh, "dtype": args.dtype, "progress": status}
    try:
        lm = _language_model(args.directory, options | {"revision": args.revision})
        source = args.speculative
        if source not in (None, *SOURCES):
            source = _language_model(source, options)
        request: dict[str, Any] = {
            "max_new_tokens": args.max_new_tokens, "sampler": sampler, "stop": args.stop, "seed": args.seed,
            "speculative": source, "draft_tokens": args.draft_tokens,
        }  # fmt: skip
        if args.chat or args.system is not None:
            system = [] if args.system is None else [{"role": "system", "content": args.system}]
            pieces = lm.chat([*system, {"role": "user", "content": prompt}], stream=True, **request)
        else:
            pieces = lm.stream(prompt, **request)
        for piece in pieces:
            status.clear()
            yield piece
            if sys.stdout.isatty():
                status.end()
    finally:
        status.clear()
    yield "\n"


def _language_model(directory: str, options: dict[str, Any]) -> rlx.CausalLM:
    """What a directory holds, if it generates."""
    lm = rlx.load(directory, **options)
    if not isinstance(lm, rlx.CausalLM):
        raise RequestError(f"{quote(directory)} is an encoder, which does not generate; use rlx_jax.load in Python")
    return lm


def _inspect(args: argparse.Namespace, interrupt: Interrupt) -> Iterator[str]:
    """Write what a checkpoint is: its config as it is understood, its weights, its tokenizer. Reads no weights."""
    folder = open_folder(args.directory, args.revision)
    pretrained = open_pretrained(folder)
    recipe: Any = pretrained.recipe
    source = open_weights(folder.path)
    specs = [source.spec(key) for key in source.keys()]
    size = sum(map(stored_bytes, specs))
    tokenizer = load_tokenizer(folder)
    rows = {
        "recipe": f"{type(recipe).__name__}, {pretrained.kind}",
        "weights": f"{sum(spec.size for spec in specs):,} in {len(specs)} tensors, {_bytes(size)}",
        "dtypes": ", ".join(sorted({str(spec.dtype) for spec in specs})),
        "tokenizer": "none" if tokenizer is None else f"{tokenizer.vocab_size:,} tokens",
        "chat templates": ", ".join(tokenizer.chat_templates) if tokenizer and tokenizer.chat_templates else "none",
        **{name: value if isinstance(value, str) else shown(value) for name, value in vars(recipe.config).items()},
    }
    width = max(map(len, rows))
    yield from (f"{name:<{width}}  {value}\n" for name, value in rows.items())


def _device_count(text: str) -> int | str:
    """A number, or `auto`."""
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as cause:
        raise argparse.ArgumentTypeError(f"expected a number or auto, got {shown(text)}") from cause


def _mesh(devices: int | str | None, tensor: int | None) -> Any:
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


def _stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as cause:
        raise RequestError(f"stdin: not UTF-8 at byte {cause.start}") from cause


# -- Ctrl-C ------------------------------------------------------------------------------------


class Interrupt:
    """Ctrl-C, heard where the work may stop: between weights, programs and pieces of text. A second one counts at once.

    A KeyboardInterrupt at any place may come within a hook of JAX, which drops it, or cut the import of a native module
    short, which crashes when Python ends.
    """

    def __init__(self) -> None:
        self._heard = False
        self._before: Any = None

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else someone wants it otherwise
            self._before = signal.signal(signal.SIGINT, self._hear)
        return self

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def _hear(self, number: int, frame: Any) -> None:
        if self._heard:
            raise KeyboardInterrupt
        self._heard = True

    def check(self) -> None:
        """Stop here if Ctrl-C was pressed."""
        if self._heard:
            raise KeyboardInterrupt


# -- what is written ---------------------------------------------------------------------------


class Status:
    """One line on stderr that is written over: how far loading and compiling are.

    Text in the same terminal stands on that line once it has begun, and is not to be written over: `end` comes first.
    """

    def __init__(self, interrupt: Interrupt, shown: bool) -> None:
        self._interrupt, self._shown, self._line, self._lock = interrupt, shown, "", threading.Lock()

    def __call__(self, what: str, done: int, total: int) -> None:
        """See `rlx_jax.compiler.executable.Progress`."""
        self._interrupt.check()
        moves = what == "load" or what.startswith("download ")
        amount = f" {_bytes(done)} of {_bytes(total)}" if moves else " …" if done < total else ""
        self._write(f"{what}{amount}" if done < total else "")

    def clear(self) -> None:
        """Take the line away."""
        self._write("")

    def end(self) -> None:
        """Show nothing from here on."""
        self.clear()
        self._shown = False

    def _write(self, line: str) -> None:
        with self._lock:
            if self._shown and line != self._line:
                self._line = line
                sys.stderr.write(f"\r\x1b[K{line}")
                sys.stderr.flush()


def _write(piece: str) -> None:
    """A piece of text, at once. What a model writes must not command a terminal."""
    try:
        sys.stdout.write(_CONTROLS.sub("\ufffd", piece) if sys.stdout.isatty() else piece)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as cause:
        _leave_stdout()
        raise StorageError(f"stdout: {cause.strerror}") from cause


def _leave_stdout() -> None:
    """What Python flushes at its end goes nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _warn(
    message: Any, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """A warning in one line."""
    print(f"rlx-jax: {category.__name__}: {message}", file=sys.stderr)


def _bytes(count: int) -> str:
    """A size to read.

    >>> _bytes(999), _bytes(2_471_645_608)
    ('999 B', '2.47 GB')
    """
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} B"
