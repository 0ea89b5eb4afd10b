"""Every exception that rlx_jax raises on purpose.

One tree: catch `RlxError` for everything, or the built-in beside it (`ValueError`, `OSError` ...)
where code should not know about rlx_jax. A message says what was wrong, where (block path, weight
key, file), what was expected, what was found and what to do.
"""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
MAX_MESSAGE = 2048
MAX_QUOTED = 120


class RlxError(Exception):
    """Base of all errors of rlx_jax. Messages are printable, and cut to 2 KiB."""

    _located = False

    def __init__(self, message: str = "") -> None:
        # A little more than what is kept: escaping megabytes that a file chose would take time.
        super().__init__(_cut(_printable(message[: MAX_MESSAGE + 1]), MAX_MESSAGE))

    def locate(self, where: str) -> None:
        """Put a block path in front of the message, unless an inner block has done so."""
        text = str(self)
        if where and not self._located:
            self._located = True
            if not text.startswith((f"{where}:", f"{where}.")):
                self.args = (_cut(f"{where}: {text}", MAX_MESSAGE),)


# -- the content of a file is wrong ------------------------------------------------------------


class FormatError(RlxError, ValueError):
    """A file does not follow its format."""


class SafetensorsError(FormatError):
    """A `.safetensors` file is malformed."""


class TokenizerError(FormatError):
    """A tokenizer file or a chat template is malformed."""


class ProfileError(FormatError):
    """A compile profile has an unknown key, a wrong type or a value out of range."""


class ConfigError(FormatError):
    """A `config.json` (or another file beside it) is malformed, absurd or asks for something unhandled."""


class CheckpointFormatError(FormatError):
    """A checkpoint directory contradicts its own metadata."""


class LimitError(FormatError):
    """A size is over a documented limit. The message names the limit."""


class PathEscapeError(FormatError):
    """A file name leads out of the directory it belongs to."""


class IntegrityError(FormatError):
    """A digest or a length differs from the manifest."""


class UnsupportedError(RlxError, NotImplementedError):
    """Known, but not supported."""


# -- weights -----------------------------------------------------------------------------------


class WeightError(RlxError, ValueError):
    """The weights do not fit the flow."""


class MissingWeightError(WeightError):
    """A weight that the flow reads is not in the source."""


class UnexpectedWeightError(WeightError):
    """The source holds a weight that nothing reads."""


class DuplicateWeightError(WeightError):
    """A weight is given twice."""


class NonFiniteWeightError(WeightError):
    """A weight holds NaN."""


# -- graphs built by users or passes -----------------------------------------------------------


class GraphError(RlxError, ValueError):
    """A flow or a graph is wrong. `problems` lists everything that the verifier found, however long."""

    problems: tuple[str, ...] = ()


class ShapeError(GraphError):
    """Shapes that do not fit together. `operands` are the places of the operands at fault, where the op knows them."""

    operands: tuple[int, ...] = ()

    def of(self, *operands: int) -> ShapeError:
        """The same error about these operands of the op."""
        self.operands = operands
        return self


class WeightShapeError(WeightError, ShapeError):
    """A weight has another shape than the flow expects."""


class DTypeError(GraphError):
    """Dtypes that do not fit together."""


class UnboundInputError(GraphError):
    """An input of the flow was not given, or one was given that the flow does not have."""


class PluginError(RlxError, RuntimeError):
    """A plugin cannot be imported, or gives what a plugin does not give. See `rlx_jax.plugins`."""


class FusionError(GraphError):
    """The profile says `fusion.assert_clean`, and a pattern that a pass looks for was not fused. See `report`."""

    def __init__(self, message: str = "", report: object = None) -> None:
        super().__init__(message)
        self.report = report


class DeriveError(GraphError):
    """A program (prefill, extend) cannot be derived from the flow; the message names the stage."""


# -- requests ----------------------------------------------------------------------------------


class RequestError(RlxError, ValueError):
    """A request to a model is wrong."""


class TokenIdError(RequestError):
    """A token id is not an integer in `[0, vocab_size)`."""


class SequenceLengthError(RequestError):
    """A prompt, or prompt plus new tokens, does not fit."""


# -- running -----------------------------------------------------------------------------------


class NumericsError(RlxError, ArithmeticError):
    """Non-finite logits. `rows` has the step (from 0) at which each failed row did; `outputs` is what the request would
    have returned, failed rows cut off before that step. Other rows are whole."""

    def __init__(
        self, message: str = "", rows: Mapping[int, int] | None = None, outputs: Sequence[object] = ()
    ) -> None:
        super().__init__(message)
        self.rows, self.outputs = dict(rows or {}), outputs


class DeviceOutOfMemoryError(RlxError, RuntimeError, MemoryError):
    """The device is out of memory."""


class VersionMismatchError(RlxError, RuntimeError):
    """An exported artefact was made by an incompatible version."""


class StorageError(RlxError, OSError):
    """Reading or writing a file failed."""


class MissingFileError(StorageError, FileNotFoundError):
    """A file does not exist."""


class TargetExistsError(StorageError, FileExistsError):
    """A save would replace something; the message says how to allow it."""


class SaveFailedError(StorageError):
    """A save failed; the message names what is still good."""


class NoSpaceError(StorageError):
    """The disk is full."""


class HubError(StorageError):
    """The Hub does not give what was asked for."""


class HubUnreachableError(HubError):
    """The Hub cannot be reached: no connection, a timeout, a server in trouble, or `HF_HUB_OFFLINE`."""


class SessionStateError(RlxError, RuntimeError):
    """A state was already consumed by an earlier call, or belongs to another model."""


class RlxCacheWarning(UserWarning):
    """The persistent compile cache has a fault; the program is compiled, and its result is the same."""


class RlxNumericsWarning(UserWarning):
    """Suspicious numbers."""


class RlxWarning(UserWarning):
    """Something was left out on purpose; the message says what."""


class DonationWarning(RlxWarning):
    """A compiled program gives right results and takes more memory than its plan: XLA copies the state, or needs more
    temporaries. `donation.strict` makes it a `GraphError`."""


# -- helpers for messages ----------------------------------------------------------------------


def quote(text: object) -> str:
    """`text` as it may stand in a message: escaped, at most 120 characters.

    >>> quote("a\\nb")
    "'a\\\\nb'"
    """
    escaped = repr(number(text) if isinstance(text, int) else str(text))
    return escaped if len(escaped) <= MAX_QUOTED else escaped[: MAX_QUOTED - 2] + "…'"


def one_line(text: str) -> str:
    """`text` of a stranger as part of a message: escaped, line ends too.

    >>> one_line("no\\nrlx-jax: done")
    'no\\\\nrlx-jax: done'
    """
    return _printable(text).replace("\n", "\\n")


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with its type."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def number(value: int) -> str:
    """An integer as it may stand in a message. Python refuses to print one of thousands of digits.

    >>> number(-1), number(10**5000)
    ('-1', 'an integer of 16610 bits')
    """
    return str(value) if abs(value) < 2**128 else f"an integer of {int(value).bit_length()} bits"


def shown(value: object) -> str:
    """The repr of a value that a caller passed, in one line of at most 120 characters; of a tracer what it stands for.

    >>> shown("auto"), shown(2.5)
    ("'auto'", '2.5')
    """
    if isinstance(value, int) and not isinstance(value, bool):
        text = number(value)
    else:  # NumPy's scalars as the numbers that they are
        if any(kind.__name__ == "Tracer" for kind in type(value).__mro__):  # of jax.core, which is not imported here
            return f"a traced {str(getattr(value, 'aval', value)).lstrip('~')} (inside jax.jit or the like)"
        scalar = type(value).__module__ == "numpy" and not hasattr(value, "__len__")
        text = str(value) if scalar else repr(value)
    return _cut(" ".join(_printable(text).split()), MAX_QUOTED)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _printable(text: str) -> str:
    """`text` with everything but lines escaped that a terminal would not show as it is."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def wrong_arity(op: str, expected: str, got: int, detail: str = "") -> GraphError:
    """Return the error for an op that got the wrong number of operands."""
    return GraphError(f"{op}: expected {expected} operands, got {got}{detail}")


def named_kind(value: object) -> str:
    """What a value is, for who does not know the classes inside of JAX: `a JAX array of shape [3]`.

    >>> named_kind([1])
    'list'
    """
    name = type(value).__name__
    if type(value).__module__.partition(".")[0] not in ("jax", "jaxlib"):
        return name
    shape = getattr(value, "shape", None)
    return name if shape is None else f"a JAX array of shape {list(shape)}"


def listing(names: Iterable[object], limit: int = 20) -> str:
    """At most `limit` quoted names, then a count of the rest.

    >>> listing(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    items = list(names)
    shown = ", ".join(quote(n) for n in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


# Arguments of transformers whose name is not like ours: what is meant by them here.
ELSEWHERE: dict[str, tuple[str, ...]] = {
    "max_length": ("max_new_tokens", "max_tokens", "max_len"), "do_sample": ("temperature",), "device_map": ("mesh",),
}  # fmt: skip


def check_keywords(caller: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Names that a function was called with are among those that it has; a twin of Python's own check that suggests.

    Raises:
        TypeError: an unknown one.
    """
    names = dict.fromkeys(known)
    for name in given:
        if name not in names:
            here = [ours for ours in ELSEWHERE.get(name, ()) if ours in names]
            meant = f"; did you mean {quote(here[0])}?" if here else did_you_mean(name, names)
            told = meant or f"; it takes {listing(names, 8)}"
            raise TypeError(f"{caller}() got an unexpected keyword argument {quote(name)}{told}")


def check_known(
    names: Iterable[str], known: Iterable[str], before: str, after: str, kind: type[RlxError] = GraphError
) -> None:
    """Names that a user gave are among those that there are.

    Raises:
        RlxError: one of this kind: `before`, the first unknown name, `after` and the known names.
    """
    known = list(known)
    for name in names:
        if name not in known:
            there = f"{listing(known) or 'none'}{did_you_mean(name, known)}"
            raise kind(f"{before} {quote(name)}{after} {there}")


def suggests(*more: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """A decorator: misspelt keyword arguments get a suggestion. `more` are names that the function takes as `**`.

    >>> @suggests()
    ... def generate(max_new_tokens=64): ...
    >>> generate(max_token=8)
    Traceback (most recent call last):
    TypeError: generate() got an unexpected keyword argument 'max_token'; did you mean 'max_new_tokens'?
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        known = [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]
        names = (*(name for name in known if name != "self"), *more)

        @functools.wraps(function)
        def checked(*args: P.args, **named: P.kwargs) -> R:
            check_keywords(function.__qualname__, named, names)
            return function(*args, **named)

        return checked

    return decorated


def did_you_mean(name: object, known: Iterable[str], alike: float = 0.6) -> str:
    """A suggestion to append to a message, or the empty string. Case does not count; `alike` is the least ratio.

    >>> did_you_mean("polcy", ["policy", "target"])
    "; did you mean 'policy'?"
    """
    if not isinstance(name, str):
        return ""
    folded: dict[str, str] = {}
    for k in known:
        folded.setdefault(k.casefold(), k)
    close = [folded[k] for k in difflib.get_close_matches(name.casefold(), list(folded), n=3, cutoff=alike)]
    return f"; did you mean {' or '.join(quote(c) for c in close)}?" if close else ""
