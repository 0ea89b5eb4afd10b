"""Every exception that rlx_jax raises on purpose, and helpers to write their messages.

All exceptions derive from `RlxError`, and each also from a built-in (`ValueError`, `OSError` ...), for code that does
not import rlx_jax. A message gives the error, its location (block path, weight key, file), the expected and the actual
value, and what to do.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import numbers
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
        # Cut before escaping too, because a message may quote megabytes of an untrusted file.
        super().__init__(_truncate(_printable(message[: MAX_MESSAGE + 1]), MAX_MESSAGE))

    def locate(self, where: str) -> None:
        """Prepend a block path to the message, unless an inner block has already done so."""
        text = str(self)
        if where and not self._located:
            self._located = True
            if not text.startswith((f"{where}:", f"{where}.")):
                self.args = (_truncate(f"{where}: {text}", MAX_MESSAGE),)


# -- the content of a file is wrong ------------------------------------------------------------


class FormatError(RlxError, ValueError):
    """A file does not follow its format."""


class SafetensorsError(FormatError):
    """A `.safetensors` file is malformed."""


class GgufError(FormatError):
    """A `.gguf` file is malformed."""


class TokenizerError(FormatError):
    """A tokenizer file or a chat template is malformed."""


class ProfileError(FormatError):
    """A compile profile has an unknown key, a wrong type or a value out of range."""


class ConfigError(FormatError):
    """A `config.json` (or another file next to it) is malformed, or has a value that is absurd or not handled."""


class CheckpointFormatError(FormatError):
    """A checkpoint directory contradicts its own metadata."""


class ArtifactFormatError(FormatError):
    """An exported artifact (`.rlxa`) is malformed."""


class LimitError(FormatError):
    """A size is over a documented limit. The message names the limit."""


class PathEscapeError(FormatError):
    """A file name points outside of its directory."""


class IntegrityError(FormatError):
    """A digest or a length differs from the manifest."""


class UnsupportedError(RlxError, NotImplementedError):
    """A known feature, model or format is not supported."""


# -- weights -----------------------------------------------------------------------------------


class WeightError(RlxError, ValueError):
    """The weights do not fit the flow."""


class MissingWeightError(WeightError):
    """A weight that the flow reads is not in the source."""


class UnexpectedWeightError(WeightError):
    """The source has a weight that nothing reads."""


class DuplicateWeightError(WeightError):
    """A weight is given twice."""


class NonFiniteWeightError(WeightError):
    """A weight contains NaN."""


# -- graphs built by users or passes -----------------------------------------------------------


class GraphError(RlxError, ValueError):
    """A flow, a graph or a plugin is invalid. `problems` has every finding of the verifier, uncut."""

    problems: tuple[str, ...] = ()


class ShapeError(GraphError):
    """Shapes do not match. `operands` are the positions of the operands at fault, where the op knows them."""

    operands: tuple[int, ...] = ()

    def at_operands(self, *operands: int) -> ShapeError:
        """Set the positions of the operands at fault, and return this error."""
        self.operands = operands
        return self


class WeightShapeError(WeightError, ShapeError):
    """A weight has another shape than the flow expects."""


class DTypeError(GraphError):
    """Dtypes do not match."""


class UnboundInputError(GraphError):
    """An input of the flow is missing, or a call has an input that the flow does not declare."""


class FusionError(GraphError):
    """The profile sets `fusion.assert_clean`, and a pass left a match of its pattern unfused. See `report`."""

    def __init__(self, message: str = "", report: object = None) -> None:
        super().__init__(message)
        self.report = report


class DeriveError(GraphError):
    """A program (prefill, extend) cannot be derived from the flow; the message names the stage."""


# -- requests ----------------------------------------------------------------------------------


class RequestError(RlxError, ValueError):
    """A request to a model is invalid."""


class TokenIdError(RequestError):
    """A token id is not an integer in `[0, vocab_size)`."""


class SequenceLengthError(RequestError):
    """A prompt, or prompt plus new tokens, does not fit."""


# -- running -----------------------------------------------------------------------------------


class NumericsError(RlxError, ArithmeticError):
    """Logits are not finite.

    Attributes:
        rows: for each failed row, the step, from 0, with the first non-finite logits.
        outputs: the result of the request, with failed rows cut before that step and other rows complete.
    """

    def __init__(
        self, message: str = "", rows: Mapping[int, int] | None = None, outputs: Sequence[object] = ()
    ) -> None:
        super().__init__(message)
        self.rows, self.outputs = dict(rows or {}), outputs


class DeviceOutOfMemoryError(RlxError, RuntimeError, MemoryError):
    """The device is out of memory."""


class VersionMismatchError(RlxError, RuntimeError):
    """An exported artifact is of an incompatible version."""


class PlatformMismatchError(RlxError, RuntimeError):
    """An exported artifact is for other platforms than the one that JAX runs on, or for more devices."""


class StorageError(RlxError, OSError):
    """Reading or writing a file failed."""


class MissingFileError(StorageError, FileNotFoundError):
    """A file does not exist."""


class TargetExistsError(StorageError, FileExistsError):
    """A save would replace existing files; the message explains how to allow it."""


class SaveFailedError(StorageError):
    """A save failed; the message names the files that are still valid."""


class NoSpaceError(StorageError):
    """The disk is full."""


class HubError(StorageError):
    """The Hub does not return the requested files."""


class HubUnreachableError(HubError):
    """The Hub cannot be reached: no connection, a timeout, a server in trouble, or `HF_HUB_OFFLINE`."""


class SessionStateError(RlxError, RuntimeError):
    """A state was already consumed by an earlier call, or belongs to another model."""


class RlxCacheWarning(UserWarning):
    """The persistent compile cache has a fault. The program is compiled again, with the same result."""


class RlxNumericsWarning(UserWarning):
    """Numbers are suspicious, such as infinity in weights."""


class RlxWarning(UserWarning):
    """Something was left out on purpose, or takes more memory than planned; the message names it."""


# -- helpers for messages ----------------------------------------------------------------------


def quote(text: object) -> str:
    """Return `text` quoted for a message: escaped, at most 120 characters.

    >>> quote("a\\nb")
    "'a\\\\nb'"
    """
    escaped = repr(integer_text(text) if isinstance(text, int) else str(text))
    return escaped if len(escaped) <= MAX_QUOTED else escaped[: MAX_QUOTED - 2] + "…'"


def one_line(text: str) -> str:
    """Return untrusted `text` escaped for a message, including line ends.

    >>> one_line("no\\nrlx-jax: done")
    'no\\\\nrlx-jax: done'
    """
    return _printable(text).replace("\n", "\\n")


def first_line(error: BaseException) -> str:
    """Return the type and the first line of an error's message."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0] if text else ''}"


def integer_text(value: int) -> str:
    """Return an integer as text for a message. Python refuses to print one of thousands of digits.

    >>> integer_text(-1), integer_text(10**5000)
    ('-1', 'an integer of 16610 bits')
    """
    return str(value) if abs(value) < 2**128 else f"an integer of {int(value).bit_length()} bits"


def shown(value: object) -> str:
    """Return the repr of a caller's value in one line of at most 120 characters; for a tracer, its type.

    >>> shown("auto"), shown(2.5)
    ("'auto'", '2.5')
    """
    if isinstance(value, int) and not isinstance(value, bool):
        text = integer_text(value)
    else:
        if any(kind.__name__ == "Tracer" for kind in type(value).__mro__):  # by name, to not import jax.core
            return f"a traced {str(getattr(value, 'aval', value)).lstrip('~')} (inside jax.jit or the like)"
        scalar = type(value).__module__ == "numpy" and not hasattr(value, "__len__")
        text = str(value) if scalar else repr(value)  # the repr of a NumPy scalar is `np.float32(1.0)`
    return _truncate(" ".join(_printable(text).split()), MAX_QUOTED)


def _truncate(text: str, length: int) -> str:
    return text if len(text) <= length else text[: length - 1] + "…"


def _printable(text: str) -> str:
    """Return `text` with all unprintable characters but line ends escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def wrong_arity(op: str, expected: str, got: int, detail: str = "") -> GraphError:
    """Return the error for an op that got the wrong number of operands."""
    return GraphError(f"{op}: expected {expected} operands, got {got}{detail}")


def describe_type(value: object) -> str:
    """Return a readable name of a value's type; internal classes of JAX become `a JAX array of shape [3]`.

    >>> describe_type([1])
    'list'
    """
    name = type(value).__name__
    if type(value).__module__.partition(".")[0] not in ("jax", "jaxlib"):
        return name
    shape = getattr(value, "shape", None)
    return name if shape is None else f"a JAX array of shape {list(shape)}"


def listing(names: Iterable[object], limit: int = 20) -> str:
    """Return at most `limit` quoted names, then a count of the rest.

    >>> listing(["a", "b", "c"], limit=2)
    "'a', 'b' and 1 more"
    """
    items = list(names)
    shown = ", ".join(quote(n) for n in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


# Arguments of transformers with another name in this library, too different for `did_you_mean`.
EQUIVALENT_KEYWORDS: dict[str, tuple[str, ...]] = {
    "max_length": ("max_new_tokens", "max_tokens", "max_len"), "do_sample": ("temperature",), "device_map": ("mesh",),
    "temp": ("temperature",), **dict.fromkeys(("quantization", "quantization_config", "load_in_8bit"), ("profile",)),
}  # fmt: skip

# For `device=` of other libraries, where a function takes `mesh`.
DEVICE_ADVICE = "; use `with jax.default_device(device):` for one device, mesh= for several"


def check_keywords(caller: str, keywords: Iterable[str], choices: Iterable[str]) -> None:
    """Check the keyword arguments of a call against the function's own, like Python does, but suggest a close name.

    Raises:
        TypeError: an unknown name.
    """
    names = dict.fromkeys(choices)
    for name in keywords:
        if name not in names:
            equivalents = [ours for ours in EQUIVALENT_KEYWORDS.get(name, ()) if ours in names]
            suggestion = f"; did you mean {quote(equivalents[0])}?" if equivalents else did_you_mean(name, names)
            if name in ("device", "devices") and "mesh" in names and not suggestion:
                suggestion = DEVICE_ADVICE
            advice = suggestion or f"; it takes {listing(names, 8)}"
            raise TypeError(f"{caller}() got an unexpected keyword argument {quote(name)}{advice}")


def check_names(
    names: Iterable[str], choices: Iterable[str], prefix: str, suffix: str, error_class: type[RlxError] = GraphError
) -> None:
    """Check that all names of a user are among the `choices`.

    Raises:
        RlxError: of class `error_class`; its message is `prefix`, the first unknown name, `suffix` and the choices.
    """
    choices = list(choices)
    for name in names:
        if name not in choices:
            suggestion = did_you_mean(name, choices)
            raise error_class(f"{prefix} {quote(name)}{suffix} {listing(choices) or 'none'}{suggestion}")


def check_flag(name: str, value: object) -> None:
    """Check that an argument is True or False.

    Raises:
        RequestError: it is something else.
    """
    if not isinstance(value, bool):
        raise RequestError(f"{name} is {shown(value)}; expected True or False")


def check_integer(name: str, value: object, low: int = 1, error_class: type[RlxError] = RequestError) -> int:
    """Return an integer, of Python or NumPy, checked to be at least `low`; `name` is its name in messages.

    Raises:
        RlxError: of class `error_class`: it is no such integer.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < low:
        raise error_class(f"{name} is {shown(value)}; expected an integer of at least {low}")
    return int(value)


def suggest_keywords(*extra_names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that suggests names for misspelt keyword arguments; `extra_names` are names that `**` takes.

    >>> @suggest_keywords()
    ... def generate(max_new_tokens=64): ...
    >>> generate(max_token=8)
    Traceback (most recent call last):
    TypeError: generate() got an unexpected keyword argument 'max_token'; did you mean 'max_new_tokens'?
    """

    def decorated(function: Callable[P, R]) -> Callable[P, R]:
        kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        parameters = [p.name for p in inspect.signature(function).parameters.values() if p.kind in kinds]
        names = (*(name for name in parameters if name != "self"), *extra_names)
        known = frozenset(names)

        @functools.wraps(function)
        def checked(*args: P.args, **named: P.kwargs) -> R:
            if not named.keys() <= known:
                check_keywords(function.__qualname__.removesuffix(".__init__"), named, names)
            return function(*args, **named)

        return checked

    return decorated


def did_you_mean(name: object, choices: Iterable[str], cutoff: float = 0.6) -> str:
    """Return a suggestion to append to a message, or the empty string. Ignores case; `cutoff` is the minimum ratio.

    >>> did_you_mean("polcy", ["policy", "target"])
    "; did you mean 'policy'?"
    """
    if not isinstance(name, str):
        return ""
    folded: dict[str, str] = {}
    for k in choices:
        folded.setdefault(k.casefold(), k)
    matches = [folded[k] for k in difflib.get_close_matches(name.casefold(), list(folded), n=3, cutoff=cutoff)]
    return f"; did you mean {' or '.join(quote(c) for c in matches)}?" if matches else ""
