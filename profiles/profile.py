"""`CompileProfile` and its presets: reading, replacing and comparing the tables of `rlx_jax.profiles.schema`."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from typing import Any, ClassVar, Union

from rlx_jax.errors import MissingFileError, ProfileError, UnsupportedError, did_you_mean, quote, shown
from rlx_jax.ir.table import TextTable
from rlx_jax.profiles import toml_text
from rlx_jax.profiles.check import At, Options, Setting, Table, build, field_types, rows
from rlx_jax.profiles.effects import always
from rlx_jax.profiles.schema import (
    AttentionTable,
    Backends,
    BucketTable,
    Checks,
    Donation,
    Fusion,
    Layers,
    Passes,
    Precision,
    Sharding,
)

_FOLDER = files("rlx_jax.profiles")
# Presets, a file each in this folder, with what was measured.
PRESETS = tuple(sorted(f.name.removesuffix(".rlx.toml") for f in _FOLDER.iterdir() if f.name.endswith(".rlx.toml")))

# Presets of the specification whose families are not built: an `UnsupportedError`, for there is nothing to measure.
UNMEASURED = ("llada2_diffusion", "sam2", "sam2_memory_attention", "sam3", "sam_encoder")

# What `profile=` takes: a profile, the name of a preset, or the path of a file; see `CompileProfile.of`.
ProfileLike = Union["CompileProfile", str, os.PathLike[str]]


@dataclass(frozen=True)
class Change:
    """Something that two profiles make different: `ours` with the profile that was asked, `theirs` with the other."""

    what: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class ProfileDiff:
    """Two profiles beside each other.

    Attributes:
        ours, theirs: their names.
        fields: settings that differ, by path: `precision.compute`.
        program: what they change in a program: passes that run, its ops and dtypes, fusions, parameters as they are
            stored, how layers and ops run, what is donated, the sizes that requests are padded to. None where no model
            was given.
    """

    ours: str
    theirs: str
    fields: tuple[Change, ...]
    program: tuple[Change, ...] | None = None

    def __bool__(self) -> bool:
        """Whether a setting differs."""
        return bool(self.fields)

    def __str__(self) -> str:
        if not self.fields:
            return f"{self.ours} and {self.theirs} have the same settings"
        lines = [f"{self.ours} → {self.theirs}", *_lines(self.fields)]
        if self.program is not None:
            lines += ["", "in the program" if self.program else "the program is the same", *_lines(self.program)]
        return "\n".join(lines)


def _lines(changes: tuple[Change, ...]) -> list[str]:
    """A line for each change, broken at 80 columns."""
    width = min(34, max((len(change.what) for change in changes), default=0))
    rows = [(change.what, f"{change.ours} → {change.theirs}") for change in changes]
    return [str(TextTable(rows, widths=(width,), indent="  ", wrap=80))] if rows else []


def field_changes(ours: Table, theirs: Table) -> Iterator[Change]:
    """The settings in which two profiles differ, their names aside."""
    for (place, _, a), (_, _, b) in zip(rows(ours), rows(theirs), strict=True):
        if isinstance(a, Options):
            options = dict(a), dict(b)
            yield from (
                Change(f"{place}.{key}", *(written(option.get(key)) for option in options))
                for key in sorted({*a, *b})
                if options[0].get(key) != options[1].get(key)
            )
        elif a != b and place != "name":
            yield Change(place, written(a), written(b))


def written(value: Any) -> str:
    """A setting as TOML has it; `unset` for an option that is not there."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(written, value))}]" if isinstance(value, tuple) else str(value)


@cache
def _preset(name: str) -> CompileProfile:
    if name in PRESETS:
        resource = _FOLDER.joinpath(f"{name}.rlx.toml")
        source = f"preset {quote(name)}"
        return build(CompileProfile, {"name": name} | toml_text.parse(resource.read_bytes(), source), At(source))
    if name in UNMEASURED:
        raise UnsupportedError(
            f"preset {quote(name)}: its family is not built yet, so that nothing is measured; 'auto' serves every flow"
        )
    raise _unknown(name)


def _unknown(name: str, where: str = "", nor: str = "") -> ProfileError:
    known = ", ".join(PRESETS)
    return ProfileError(f"{where}there is no preset {quote(name)}{nor}; there are {known}{did_you_mean(name, PRESETS)}")


@dataclass(frozen=True)
class CompileProfile(Table):
    """What a compile may choose. Every field changes the program, but for `name`, which only reports show:
    profiles with the same settings are equal and share compiled programs.

    >>> CompileProfile().replace(precision={"compute": "bf16"}).precision.compute
    'bf16'
    """

    PATH: ClassVar[str] = ""
    name: str = field(default="auto", compare=False, metadata={"row": Setting("auto", always)})
    fusion: Fusion = Fusion()
    passes: Passes = Passes()
    precision: Precision = Precision()
    donation: Donation = Donation()
    layers: Layers = Layers()
    attention: AttentionTable = AttentionTable()
    buckets: BucketTable = BucketTable()
    checks: Checks = Checks()
    sharding: Sharding = Sharding()
    backend: Backends = Backends()

    @classmethod
    def preset(cls, name: str) -> CompileProfile:
        """A preset by name: one of `PRESETS`.

        Raises:
            ProfileError: an unknown name, with a suggestion.
            UnsupportedError: one of `UNMEASURED`, whose family is not built.
        """
        return _preset(str(name))

    @classmethod
    def of(cls, profile: ProfileLike, where: str = "") -> CompileProfile:
        """What `profile=` means: a profile is itself, a string the preset of that name or else the file at that path.

        A string is a path if it ends in `.toml` or has a separator; a bare name that is no preset's is one if a file of
        that name is there. `where` begins the message about what is none of them.

        Raises:
            ProfileError: neither, with a suggestion for a name. Others: as `from_toml` and `preset`.
        """
        if isinstance(profile, cls):
            return profile
        if isinstance(profile, os.PathLike):
            return cls.from_toml(profile)
        if not isinstance(profile, str):
            raise ProfileError(
                f"{where}profile is {shown(profile)}; expected a CompileProfile, such as "
                "CompileProfile.preset('auto'), the name of a preset, or the path of a *.rlx.toml file"
            )
        if profile in PRESETS or profile in UNMEASURED:
            return _preset(profile)
        path = profile.endswith(".toml") or os.path.basename(profile) != profile
        if path or ("\0" not in profile and os.path.isfile(profile)):
            return cls.from_toml(profile)
        raise _unknown(profile, where, ", and no file of that name")

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> CompileProfile:
        """The profile in a file. Missing keys take their defaults, a missing `name` the file's.

        Raises:
            MissingFileError: no such file (never the default instead).
            StorageError: not a regular file, or not readable.
            ProfileError: over a limit, not UTF-8 or TOML (with line and column), or not in the schema.
            UnsupportedError: a known setting that has no effect yet.
        """
        if not isinstance(path, str | bytes | os.PathLike):
            raise ProfileError(
                f"compile profile: path is {shown(path)}; expected that of a *.rlx.toml file "
                "(from_toml_str reads a text, preset(name) gives a preset, CompileProfile() the defaults)"
            )
        source = f"compile profile {quote(os.fspath(path))}"
        name = re.sub(r"[^\w.-]", "_", os.path.basename(os.fsdecode(path)).removesuffix(".toml").removesuffix(".rlx"))
        return build(cls, {"name": name[:64] or "custom"} | toml_text.parse(toml_text.read(path), source), At(source))

    @classmethod
    def near(cls, weights: str | os.PathLike[str], family: str, default: ProfileLike = "auto") -> CompileProfile:
        """The profile that lies beside the weights: `<family>.rlx.toml` in their directory. Without one, the default.

        Args:
            weights: a checkpoint's directory, or a file in it.
            family: the first part of the file's name, such as `llama32`.
            default: a profile, the name of a preset, or a path.

        Raises:
            MissingFileError: there are no such weights.
            ProfileError, StorageError, UnsupportedError: the file is there and wrong, as `from_toml`.
        """
        if not isinstance(family, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", family):
            raise ProfileError(f"profile near weights: family is letters, digits, _ and -, got {quote(family)}")
        if not isinstance(weights, str | os.PathLike):
            raise ProfileError(f"profile near weights: weights is {shown(weights)}; expected the path of a checkpoint")
        if not isinstance(default, str | os.PathLike | CompileProfile):
            raise ProfileError(
                f"profile near weights: default is {shown(default)}; expected a profile, the name of a preset or a path"
            )
        place = os.fspath(weights)
        if not os.path.lexists(place):
            raise MissingFileError(f"profile near weights: there is nothing at {quote(place)}")
        directory = place if os.path.isdir(place) else os.path.dirname(place)
        file = os.path.join(directory, f"{family}.rlx.toml")
        if os.path.lexists(file):
            return cls.from_toml(file)
        return cls.of(default)

    from_toml_path = from_toml

    @classmethod
    def from_toml_str(cls, toml: str) -> CompileProfile:
        """The profile in a text; as `from_toml`, and a missing `name` is `custom`."""
        source = "compile profile"
        if not isinstance(toml, str):
            raise ProfileError(f"{source}: expected a string of TOML, found {type(toml).__name__}")
        # A lone surrogate is not UTF-8 either, and is reported as such.
        data = toml.encode("utf-8", "surrogatepass")
        return build(cls, {"name": "custom"} | toml_text.parse(data, source), At(source))

    def to_toml(self) -> str:
        """Every setting as TOML, defaults included. `from_toml_str` gives an equal profile of the same name."""
        return toml_text.dump(_as_dict(self))

    def replace(self, **changes: object) -> CompileProfile:
        """A copy with other settings: each keyword is `name` or a table. A mapping is merged into the present
        table, XLA options included; a table object (`Precision(...)`) takes its place. Checked exactly as TOML is.

        Raises:
            ProfileError, UnsupportedError: as `from_toml`.
        """
        return build(CompileProfile, _merged(_as_dict(self), changes), At("CompileProfile.replace"))

    def diff(self, other: ProfileLike, model: Any = None) -> ProfileDiff:
        """What changes with another profile: the settings, and with a model (`rlx_jax.compile(flow)`, weights or not)
        what becomes of its program. Nothing is compiled.

        Raises:
            ProfileError: `other` is no profile, as `of`; or one of them asks for what the model cannot be.
        """
        theirs = CompileProfile.of(other, "diff: ")
        if model is not None and not callable(getattr(model, "compare", None)):
            raise ProfileError(
                f"diff: model is {shown(model)}; expected what compile(flow) gives, or a CausalLM's .model"
            )
        program = None if model is None else model.compare(self, theirs)
        return ProfileDiff(self.name, theirs.name, tuple(field_changes(self, theirs)), program)

    auto = staticmethod(partial(_preset, "auto"))
    encoder = staticmethod(partial(_preset, "encoder"))
    flux2 = staticmethod(partial(_preset, "flux2"))
    gemma_decode = staticmethod(partial(_preset, "gemma_decode"))
    gemma_prefill = staticmethod(partial(_preset, "gemma_prefill"))
    llama32_decode = staticmethod(partial(_preset, "llama32_decode"))
    llama32_prefill = staticmethod(partial(_preset, "llama32_prefill"))
    qwen3_decode = staticmethod(partial(_preset, "qwen3_decode"))
    qwen3_prefill = staticmethod(partial(_preset, "qwen3_prefill"))
    qwen35_decode = staticmethod(partial(_preset, "qwen35_decode"))
    qwen35_prefill = staticmethod(partial(_preset, "qwen35_prefill"))
    train_bf16 = staticmethod(partial(_preset, "train_bf16"))
    train_mixed = staticmethod(partial(_preset, "train_mixed"))


def _as_dict(table: Table) -> dict[str, Any]:
    """Nested dicts of scalars, in the order of the fields."""
    values = {key: getattr(table, key) for key in field_types(type(table))}
    return {
        k: _as_dict(v) if isinstance(v, Table) else dict(v) if isinstance(v, Options) else v for k, v in values.items()
    }


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
