"""This module defines `CompileProfile`, the options of a compile, and its presets.

A profile is read from TOML, changed by `replace` and compared by `diff`. Its tables are in `rlx_jax.profiles.schema`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib.resources import files
from typing import Any, ClassVar, Union

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import MissingFileError, ProfileError, UnsupportedError, did_you_mean, quote, shown
from rlx_jax.ir.text import TextTable
from rlx_jax.profiles import schema, toml_text
from rlx_jax.profiles.check import Location, Options, Setting, Table, build, field_types, iter_settings
from rlx_jax.profiles.effects import always

_FOLDER = files("rlx_jax.profiles")
# The presets of prompts, each with the one of decoding whose settings it has: all programs of a model share a profile.
ALIASES = {f"{family}_prefill": f"{family}_decode" for family in ("llama32", "qwen3", "qwen35", "gemma")}
# The names of the presets. Each is an alias, or a file in this folder with the measurements that justify its settings.
_FILES = [f.name.removesuffix(".rlx.toml") for f in _FOLDER.iterdir() if f.name.endswith(".rlx.toml")]
PRESETS = tuple(sorted([*_FILES, *ALIASES]))

# Presets of the specification for model families that are not implemented, so that nothing can be measured: an
# `UnsupportedError`.
UNMEASURED = ("llada2_diffusion", "sam2", "sam2_memory_attention", "sam3", "sam_encoder")

# The type of `profile=`: a profile, the name of a preset, or the path of a file; see `CompileProfile.of`.
ProfileLike = Union["CompileProfile", str, os.PathLike[str]]


@dataclass(frozen=True)
class Change:
    """A difference between two profiles: the value `ours` in the profile with the method, `theirs` in the argument."""

    name: str
    ours: str
    theirs: str


@dataclass(frozen=True)
class ProfileDiff:
    """The differences between two profiles.

    Attributes:
        ours, theirs: the names of the profiles.
        fields: the settings that differ, by path such as `precision.compute`.
        program: the differences in the program of a model: the passes that run, its ops and dtypes, fusions, the
            storage of parameters, how layers and ops run, donated arguments, and the sizes that requests are padded to.
            None without a model.
    """

    ours: str
    theirs: str
    fields: tuple[Change, ...]
    program: tuple[Change, ...] | None = None

    def __bool__(self) -> bool:
        """Return whether any setting differs."""
        return bool(self.fields)

    def __str__(self) -> str:
        if not self.fields:
            return f"{self.ours} and {self.theirs} have the same settings"
        lines = [f"{self.ours} → {self.theirs}", *change_lines(self.fields)]
        if self.program is not None:
            lines += ["", "in the program" if self.program else "the program is the same", *change_lines(self.program)]
        return "\n".join(lines)


def change_lines(changes: tuple[Change, ...], indent: str = "  ") -> list[str]:
    """Return a line for each change, wrapped at 80 columns."""
    width = min(34, max((len(change.name) for change in changes), default=0))
    rows = [(change.name, f"{change.ours} → {change.theirs}") for change in changes]
    return [str(TextTable(rows, widths=(width,), indent=indent, wrap=80))] if rows else []


def field_changes(ours: Table, theirs: Table) -> Iterator[Change]:
    """List the settings that differ between two profiles, except their names."""
    for (path, _, a), (_, _, b) in zip(iter_settings(ours), iter_settings(theirs), strict=True):
        if isinstance(a, Options):
            options = dict(a), dict(b)
            yield from (
                Change(f"{path}.{key}", *(setting_text(option.get(key)) for option in options))
                for key in sorted({*a, *b})
                if options[0].get(key) != options[1].get(key)
            )
        elif a != b and path != "name":
            yield Change(path, setting_text(a), setting_text(b))


def setting_text(value: Any) -> str:
    """Return a setting as text similar to TOML; `unset` for a missing option."""
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return f"[{', '.join(map(setting_text, value))}]" if isinstance(value, tuple) else str(value)


@cache
def _preset(name: str) -> CompileProfile:
    """Return a preset; see `CompileProfile.preset`."""
    if name in ALIASES:
        return replace(_preset(ALIASES[name]), name=name)
    if name in PRESETS:
        resource = _FOLDER.joinpath(f"{name}.rlx.toml")
        source = f"preset {quote(name)}"
        return build(CompileProfile, {"name": name} | toml_text.parse(resource.read_bytes(), source), Location(source))
    if name in UNMEASURED:
        raise UnsupportedError(
            f"preset {quote(name)}: its family is not implemented yet, so nothing is measured; use 'auto' for any flow"
        )
    raise _unknown_preset_error(name)


def _unknown_preset_error(name: str, where: str = "", suffix: str = "") -> ProfileError:
    """Return the error for a name that is no preset, with a suggestion."""
    names = ", ".join(PRESETS)
    hint = did_you_mean(name, PRESETS)
    return ProfileError(f"{where}there is no preset {quote(name)}{suffix}; there are {names}{hint}")


@dataclass(frozen=True)
class CompileProfile(Table):
    """The options of a compile. Profiles with the same settings are equal and share compiled programs.

    Every field changes the program, except `name`, which only reports show.

    >>> CompileProfile().replace(precision={"compute": "bf16"}).precision.compute
    'bf16'
    """

    PATH: ClassVar[str] = ""
    name: str = field(default="auto", compare=False, metadata={"row": Setting("auto", always)})
    fusion: schema.Fusion = schema.Fusion()
    passes: schema.Passes = schema.Passes()
    precision: schema.Precision = schema.Precision()
    donation: schema.Donation = schema.Donation()
    layers: schema.Layers = schema.Layers()
    attention: schema.AttentionTable = schema.AttentionTable()
    buckets: schema.BucketTable = schema.BucketTable()
    checks: schema.Checks = schema.Checks()
    sharding: schema.Sharding = schema.Sharding()
    backend: schema.Backends = schema.Backends()

    @classmethod
    def preset(cls, name: str) -> CompileProfile:
        """Return a preset by its name, one of `PRESETS`.

        Raises:
            ProfileError: an unknown name; the message has a suggestion.
            UnsupportedError: one of `UNMEASURED`, for a family that is not implemented.
        """
        return _preset(str(name))

    @classmethod
    def of(cls, profile: ProfileLike, where: str = "") -> CompileProfile:
        """Return the profile that a `profile=` argument means.

        A string is a path if it ends in `.toml` or has a separator. Any other string is the name of a preset, or else
        the path of an existing file.

        Args:
            profile: a profile, which is returned unchanged, the name of a preset, or a path.
            where: the beginning of the message of an error.

        Raises:
            ProfileError: something else; for a name the message has a suggestion. Others as `from_toml` and `preset`.
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
        is_path = profile.endswith(".toml") or os.path.basename(profile) != profile
        if is_path or ("\0" not in profile and os.path.isfile(profile)):
            return cls.from_toml(profile)
        raise _unknown_preset_error(profile, where, ", and no file of that name")

    @classmethod
    def from_toml(cls, path: str | os.PathLike[str]) -> CompileProfile:
        """Return the profile in a file. Missing keys have their defaults; the default of `name` is the file's name.

        Raises:
            MissingFileError: there is no such file; the default profile is never used instead.
            StorageError: it is no regular file, or not readable.
            ProfileError: it exceeds a limit, is not UTF-8 or TOML (with line and column), or does not match the schema.
            UnsupportedError: a setting of the specification that is not implemented.
        """
        if not isinstance(path, str | bytes | os.PathLike):
            raise ProfileError(
                f"compile profile: path is {shown(path)}; expected the path of a *.rlx.toml file "
                "(from_toml_str reads a text, preset(name) gives a preset, CompileProfile() the defaults)"
            )
        source = f"compile profile {quote(os.fspath(path))}"
        name = re.sub(r"[^\w.-]", "_", os.path.basename(os.fsdecode(path)).removesuffix(".toml").removesuffix(".rlx"))
        tables = toml_text.parse(toml_text.read(path), source)
        return build(cls, {"name": name[:64] or "custom"} | tables, Location(source))

    @classmethod
    def near(cls, weights: str | os.PathLike[str], family: str, default: ProfileLike = "auto") -> CompileProfile:
        """Return the profile `<family>.rlx.toml` in the directory of the weights, or a default if there is none.

        Args:
            weights: a checkpoint's directory, or a file in it.
            family: the first part of the file's name, such as `llama32`.
            default: a profile, the name of a preset, or a path.

        Raises:
            MissingFileError: there are no such weights.
            ProfileError, StorageError, UnsupportedError: the file exists and is invalid, as `from_toml`.
        """
        if not isinstance(family, str) or not re.fullmatch(r"[A-Za-z0-9_-]{1,64}", family):
            raise ProfileError(f"profile near weights: family is letters, digits, _ and -, got {quote(family)}")
        if not isinstance(weights, str | os.PathLike):
            raise ProfileError(f"profile near weights: weights is {shown(weights)}; expected the path of a checkpoint")
        path = os.fspath(weights)
        if not os.path.lexists(path):
            raise MissingFileError(f"profile near weights: there is nothing at {quote(path)}")
        directory = path if os.path.isdir(path) else os.path.dirname(path)
        file = os.path.join(directory, f"{family}.rlx.toml")
        if os.path.lexists(file):
            return cls.from_toml(file)
        return cls.of(default, "profile near weights: default: ")

    from_toml_path = from_toml

    @classmethod
    def from_toml_str(cls, toml: str) -> CompileProfile:
        """Return the profile in a TOML text, like `from_toml`; the default of `name` is `custom`."""
        source = "compile profile"
        if not isinstance(toml, str):
            raise ProfileError(f"{source}: expected a string of TOML, found {type(toml).__name__}")
        # A lone surrogate is not UTF-8 either, and is reported as such.
        data = toml.encode("utf-8", "surrogatepass")
        return build(cls, {"name": "custom"} | toml_text.parse(data, source), Location(source))

    def to_toml(self, *, defaults: bool = True) -> str:
        """Return the settings as TOML; `from_toml_str` reads an equal profile of the same name.

        Args:
            defaults: False leaves settings out that have their default.
        """
        tables = _as_dict(self)
        if not defaults:
            tables = {"name": self.name, **_without(tables, _as_dict(replace(CompileProfile(), name=self.name)))}
        return toml_text.dump(tables)

    def replace(self, **changes: object) -> CompileProfile:
        """Return a copy with other settings, which are checked exactly as TOML is.

        Args:
            changes: `name`, or tables by name. A mapping is merged into the present table, including XLA options; a
                table object, such as `Precision(...)`, replaces it.

        Raises:
            ProfileError, UnsupportedError: as `from_toml`.
        """
        return build(CompileProfile, _deep_merge(_as_dict(self), changes), Location("CompileProfile.replace"))

    def diff(self, other: ProfileLike, model: Any = None) -> ProfileDiff:
        """Return the changes from this profile to another one. Nothing is compiled.

        Args:
            other: the other profile, the name of a preset, or a path.
            model: a compiled model, such as `rlx_jax.compile(flow)`, with or without weights, to compare its program
                under both profiles; None to compare only settings.

        Raises:
            ProfileError: `other` is no profile, as `of`; or one of the profiles does not apply to the model.
        """
        theirs = CompileProfile.of(other, "diff: ")
        if model is not None and not callable(getattr(model, "compare", None)):
            raise ProfileError(
                f"diff: model is {shown(model)}; expected the result of compile(flow), or the .model of a CausalLM"
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
    """Return a table as nested dicts of scalars, in the order of the fields."""
    values = {key: getattr(table, key) for key in field_types(type(table))}
    return {
        k: _as_dict(v) if isinstance(v, Table) else dict(v) if isinstance(v, Options) else v for k, v in values.items()
    }


def _without(tables: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts without the values that equal their default."""
    changes = {
        key: _without(value, defaults[key]) if isinstance(value, Mapping) and key in defaults else value
        for key, value in tables.items()
        if value != defaults.get(key)
    }
    return {key: value for key, value in changes.items() if value != {}}


def _deep_merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts with changes merged in, recursively."""
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        merged[key] = _deep_merge(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
