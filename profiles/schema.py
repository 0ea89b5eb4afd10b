"""The tables of a compile profile and `CompileProfile` itself.

What is here takes effect. A setting whose effect comes later stands in `LATER` and is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from importlib.resources import files
from typing import Any, ClassVar, Literal, Union

from rlx_jax.errors import MissingFileError, ProfileError, UnsupportedError, did_you_mean, quote, shown
from rlx_jax.profiles import text
from rlx_jax.profiles.check import At, Options, Table, build, field_types
from rlx_jax.profiles.diff import Comparing, ProfileDiff, field_changes

LATER = frozenset(
    {
        "backend.metal",
        "backend.mlx",
        "backend.wgpu",
        "backend.*.dispatch",
    }
)
"""Settings that are known and have no effect yet: an `UnsupportedError`. `*` stands for any backend."""

LATER_VALUES = {
    "fusion.target": ("metal", "mlx", "wgpu"),
    "precision.weights": ("i8", "int8", "i4", "int4"),
    "attention.implementation": ("pallas",),
}
"""Values that are known and not supported."""

PRESETS = (
    "auto",
    "encoder",
    "flux2",
    "gemma_decode",
    "gemma_prefill",
    "llama32_decode",
    "llama32_prefill",
    "qwen3_decode",
    "qwen3_prefill",
    "qwen35_decode",
    "qwen35_prefill",
    "train_bf16",
    "train_mixed",
)
"""Presets, a file each in this folder, with what was measured."""

LATER_PRESETS = (
    "llada2_diffusion",
    "sam2",
    "sam2_memory_attention",
    "sam3",
    "sam_encoder",
)
"""Presets of families that are not built: an `UnsupportedError`, for there is nothing to measure."""


Target = Literal[
    "auto", "cpu", "cuda", "rocm", "tpu",
    "a100", "l4", "h100", "h200", "b200", "mi300x", "tpu_v5e", "tpu_v5p", "tpu_v6e",
]  # fmt: skip
"""Platforms, and the devices of `rlx_jax.device.DEVICES` by name."""


class _Table(Table):
    LATER: ClassVar[frozenset[str]] = LATER
    LATER_VALUES: ClassVar[Mapping[str, tuple[str, ...]]] = LATER_VALUES


@dataclass(frozen=True)
class Fusion(_Table):
    """How blocks become tensor ops.

    policy: `direct` takes the better rule of an op where there is one (attention without repeating keys and
        values), `fusable` each op's own expansion. Same numbers.
    target: the platform or the device to compile for; `auto` is the one that JAX runs on. A device by name is planned
        for by what is known of it, wherever that happens: `h200` on a laptop gives the program that an H200 runs.
    assert_clean: a pattern that a pass looks for and cannot fuse is an error (`model.report().fusion` lists them).
    skip: no fusion pass runs. disable: these passes do not, by the names of `docs/adding-a-pass.md`; a name is looked
        up when a program is compiled. A Linear with bias is one op under `direct` even so.
    """

    PATH: ClassVar[str] = "fusion"
    policy: Literal["direct", "fusable"] = "direct"
    target: Target = "auto"
    assert_clean: bool = False
    skip: bool = False
    disable: tuple[str, ...] = ()


@dataclass(frozen=True)
class Passes(_Table):
    """Which passes run over the tensor graph: dead code, common subexpressions, constants.

    verbose: log every step of the pipeline with its node counts, at INFO by the logger `rlx_jax.compile`.
    """

    PATH: ClassVar[str] = "passes"
    dce: bool = True
    cse: bool = True
    constant_folding: bool = True
    verbose: bool = False


Float = Literal["f32", "bf16", "f16"]


@dataclass(frozen=True)
class NumericClasses(_Table):
    """The dtype of each class of ops where `precision.mixed` is `custom`.

    compute: products, attention, JAX functions. reduction: norms, softmax, reductions. elementwise: arithmetic.
    movement: what moves values.
    """

    PATH: ClassVar[str] = "precision.classes"
    compute: Float = "f32"
    reduction: Float = "f32"
    elementwise: Float = "f32"
    movement: Float = "f32"


@dataclass(frozen=True)
class Precision(_Table):
    """compute: the dtype of activations; `auto` is the weights' own on GPU and TPU, and f32 on the CPU.
    matmul: the precision of every matrix product, as in `jax.lax.Precision`.
    mixed: compute in f32 but for ops of some classes, which take a narrow dtype; parameters and gradients stay f32.
        `auto_mixed`: f16 for products, norms, arithmetic and data movement. `always_f16`: the same here, because
        norms and softmax take their statistics in f32 by their own definition. `auto_mixed_conservative`: as
        `auto_mixed`, norms and softmax in f32. `auto_mixed_bf16`: bf16 for all. `auto`: `auto_mixed_bf16` on TPU,
        else `auto_mixed`. `custom`: as `classes` says. Excludes a `compute` of bf16 or f16.
    classes: the dtype of each class of ops, of `mixed = "custom"` alone.
    weights: the dtype that floating parameters are stored in; the program casts where it reads. `keep` stores what
        the program computes in.
    kv: the dtype of cached keys and values; `auto` is that of the keys themselves. They are cast when they are
        written, and back when they are read.
    """

    PATH: ClassVar[str] = "precision"
    compute: Literal["auto", "f32", "bf16", "f16"] = "auto"
    matmul: Literal["default", "high", "highest"] = "default"
    mixed: Literal[
        "none", "auto", "always_f16", "auto_mixed_conservative", "auto_mixed", "auto_mixed_bf16", "custom"
    ] = "none"
    classes: NumericClasses = NumericClasses()
    weights: Literal["keep", "f32", "bf16"] = "keep"
    kv: Literal["auto", "f32", "bf16", "f16"] = "auto"


@dataclass(frozen=True)
class Donation(_Table):
    """state: the cache of a step is written in place, and the old state is gone.
    strict: a compiled program that copies its state, or takes more temporaries than its plan, is a `GraphError`.
        Without it the program runs, and a `DonationWarning` names the bytes.
    inputs: names of inputs whose device arrays a call consumes, so that XLA may reuse their memory. An array that
        was given is gone after the call; `apply` consumes nothing.
    """

    PATH: ClassVar[str] = "donation"
    state: bool = True
    strict: bool = False
    inputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Layers(_Table):
    """roll: equal layers as one `scan` or one after the other (`unroll`); `auto` scans on TPU and in training.
    remat: what a gradient of the `train` program computes again instead of keeping it. `layer` keeps only what
        enters each layer; `dots` keeps the results of products with weights too, `products` those and what cuDNN's
        attention gives, so that only what is cheap is computed again. `offload` keeps what `dots` does, in the memory
        of the host, for sequences whose activations fit no device. Other programs have no gradient to plan for.
    """

    PATH: ClassVar[str] = "layers"
    roll: Literal["auto", "scan", "unroll"] = "auto"
    remat: Literal["none", "layer", "dots", "products", "offload"] = "none"


@dataclass(frozen=True)
class AttentionTable(_Table):
    """implementation: how attention runs. `auto` takes cuDNN where it can compute it and gains, else XLA; the report
    and the LIR name the reason for each block. `cudnn` is an error where it cannot be had.
    """

    PATH: ClassVar[str] = "attention"
    implementation: Literal["auto", "xla", "cudnn"] = "auto"


@dataclass(frozen=True)
class BucketTable(_Table):
    """Sizes that requests to a `CausalLM` or an `Encoder` are padded to, so that few programs serve all of them.
    Without a list, sizes are rounded up to powers of two.

    prompt: tokens of a prompt. A longer one is read in chunks. batch: rows. context: slots of the cache, for a prompt
        and its new tokens.
    on_recompile: what a size outside of the lists, and any compile after `warmup`, is: nothing, a warning, or an
        error before anything runs.
    spare: slots that the ring of a layer with a window has beside it, so many tokens may be taken back from a state.
    programs: compiled programs that a model keeps; of more, the least recently used goes, and compiles when it is asked
        for again. On a CPU one takes some 1.5 MiB and 3 memory mappings of a process's 65,530.
    """

    PATH: ClassVar[str] = "buckets"
    ZERO: ClassVar[frozenset[str]] = frozenset({"spare"})
    prompt: tuple[int, ...] = ()
    batch: tuple[int, ...] = ()
    context: tuple[int, ...] = ()
    on_recompile: Literal["allow", "warn", "error"] = "allow"
    programs: int = 256
    spare: int = 0


@dataclass(frozen=True)
class Checks(_Table):
    """ids: whose token ids and labels are checked against the vocabulary before a call and before a training step:
    those in lists, NumPy arrays and `jax.Array`s on a CPU (`host`), or those on an accelerator too (`all`). Such an
    array is copied to the host: 0.3 ms for 8 x 2048 ids on one H200, 0.7 ms while it runs a step, which the copy
    does not wait for unless it computes the ids. Traced arrays have no values to check.
    """

    PATH: ClassVar[str] = "checks"
    ids: Literal["host", "all"] = "host"


@dataclass(frozen=True)
class Sharding(_Table):
    """For each role that an axis may have (`rlx_jax.ir.roles`) the axes of a mesh that it is divided over, those that
    the mesh has: what `mesh=` means for a model. Without a mesh there is nothing to divide.

    batch: rows. Parameters are not divided along these axes where they are used, only where they are kept; but experts
    are, and rows are brought to them.
    sequence: tokens of a row. heads, kv_heads, groups, ffn: attention, blocks with a state and feed-forward, by head
    and by column. vocab: the output head. embedding: rows of a table, whose lookup then takes a collective. hidden: of
    matrices, where they are kept. experts: of a mixture. channel: norms and biases.
    """

    PATH: ClassVar[str] = "sharding"
    batch: tuple[str, ...] = ("data", "fsdp", "expert")
    sequence: tuple[str, ...] = ("context",)
    heads: tuple[str, ...] = ("tensor",)
    kv_heads: tuple[str, ...] = ("tensor",)
    groups: tuple[str, ...] = ("tensor",)
    ffn: tuple[str, ...] = ("tensor",)
    vocab: tuple[str, ...] = ("tensor",)
    embedding: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ("fsdp",)
    experts: tuple[str, ...] = ("expert",)
    channel: tuple[str, ...] = ()


@dataclass(frozen=True)
class Backend(_Table):
    """weight_layout: the orientation that weights of Linears are stored in, `[in, out]` or `[out, in]`; `auto` is
        that of the flow, which is that of its checkpoint. A weight that other ops read too stays as it is.
    merge: whether projections of one input (q, k, v; gate, up) are stored and multiplied as one; `auto`
        merges where a checkpoint is loaded for generation, and not where leaves keep their checkpoint keys.
    skip_fusion: no fusion pass runs on this backend.
    unfuse_regions: chains of pointwise ops stay single ops, instead of regions; `auto` says so on the CPU.
    products: how a product of one row with a weight `[out, in]` runs: `row` multiplies and sums in one kernel that
        reads the weight once, `xla` is a matrix product as any other; `auto` takes `row` on cuda. Others are not asked.
    experts: how a mixture of experts runs: `dense` computes every expert for every token, `gathered` reads the weights
        of the experts of each token, `blocked` sorts what was chosen into blocks of one expert each, `looped` takes
        these one after the other, `ragged` leaves the sorted groups to `jax.lax.ragged_dot`; `auto` goes by the
        numbers of tokens and experts, and is `looped` on the CPU.
    kernels: whether kernels of our own, in Pallas, run experts and recurrences: `auto` where they were measured, which
        is on one H100 or H200, in programs that are not trained; `off` nowhere.
    steps_per_dispatch: tokens of a row that one call of the generating loop gives; `auto` is 4 on the CPU, else 16.
    stop_early: the loop ends with its last row, and not after so many steps; `auto` says so on the CPU. Where the
        number of turns is known beforehand, a GPU's host thread prepares the next call meanwhile.
    compiler_options: passed to XLA as they are, for this backend.
    """

    PATH: ClassVar[str] = "backend.*"
    weight_layout: Literal["auto", "in_out", "out_in"] = "auto"
    merge: bool | Literal["auto"] = "auto"
    skip_fusion: bool = False
    unfuse_regions: bool | Literal["auto"] = "auto"
    products: Literal["auto", "xla", "row"] = "auto"
    experts: Literal["auto", "dense", "gathered", "blocked", "looped", "ragged"] = "auto"
    kernels: Literal["auto", "off"] = "auto"
    steps_per_dispatch: int | Literal["auto"] = "auto"
    stop_early: bool | Literal["auto"] = "auto"
    compiler_options: Options = field(default_factory=Options)


@dataclass(frozen=True)
class Backends(_Table):
    """One `Backend` for each platform; only the one that is compiled for is read."""

    PATH: ClassVar[str] = "backend"
    cpu: Backend = field(default_factory=Backend)
    cuda: Backend = field(default_factory=Backend)
    rocm: Backend = field(default_factory=Backend)
    tpu: Backend = field(default_factory=Backend)


ProfileLike = Union["CompileProfile", str, os.PathLike[str]]
"""What `profile=` takes: a profile, the name of a preset, or the path of a file; see `CompileProfile.of`."""


@cache
def _preset(name: str) -> CompileProfile:
    if name in PRESETS:
        resource = files("rlx_jax.profiles").joinpath(f"{name}.rlx.toml")
        source = f"preset {quote(name)}"
        return build(CompileProfile, {"name": name} | text.parse(resource.read_bytes(), source), At(source))
    if name in LATER_PRESETS:
        raise UnsupportedError(
            f"preset {quote(name)}: its family is not built yet, so that nothing is measured; 'auto' serves every flow"
        )
    raise _unknown(name)


def _unknown(name: str, where: str = "", nor: str = "") -> ProfileError:
    known = ", ".join(PRESETS)
    return ProfileError(f"{where}there is no preset {quote(name)}{nor}; there are {known}{did_you_mean(name, PRESETS)}")


@dataclass(frozen=True)
class CompileProfile(_Table):
    """What a compile may choose. Every field changes the program, but for `name`, which only reports show:
    profiles with the same settings are equal and share compiled programs.

    >>> CompileProfile().replace(precision={"compute": "bf16"}).precision.compute
    'bf16'
    """

    PATH: ClassVar[str] = ""
    name: str = field(default="auto", compare=False)
    fusion: Fusion = field(default_factory=Fusion)
    passes: Passes = field(default_factory=Passes)
    precision: Precision = field(default_factory=Precision)
    donation: Donation = field(default_factory=Donation)
    layers: Layers = field(default_factory=Layers)
    attention: AttentionTable = field(default_factory=AttentionTable)
    buckets: BucketTable = field(default_factory=BucketTable)
    checks: Checks = field(default_factory=Checks)
    sharding: Sharding = field(default_factory=Sharding)
    backend: Backends = field(default_factory=Backends)

    @classmethod
    def preset(cls, name: str) -> CompileProfile:
        """A preset by name: one of `PRESETS`.

        Raises:
            ProfileError: an unknown name, with a suggestion.
            UnsupportedError: one of `LATER_PRESETS`, whose family is not built.
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
        if profile in PRESETS or profile in LATER_PRESETS:
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
        return build(cls, {"name": name[:64] or "custom"} | text.parse(text.read(path), source), At(source))

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
        return build(cls, {"name": "custom"} | text.parse(data, source), At(source))

    def to_toml(self) -> str:
        """Every setting as TOML, defaults included. `from_toml_str` gives an equal profile of the same name."""
        return text.dump(_as_dict(self))

    def replace(self, **changes: object) -> CompileProfile:
        """A copy with other settings: each keyword is `name` or a table. A mapping is merged into the present
        table, XLA options included; a table object (`Precision(...)`) takes its place. Checked exactly as TOML is.

        Raises:
            ProfileError, UnsupportedError: as `from_toml`.
        """
        return build(CompileProfile, _merged(_as_dict(self), changes), At("CompileProfile.replace"))

    def diff(self, other: ProfileLike, model: Comparing | None = None) -> ProfileDiff:
        """What changes with another profile: the settings, and with a model (`rlx_jax.compile(flow)`, weights or not)
        what becomes of its program. Nothing is compiled.

        Raises:
            ProfileError: `other` is no profile, as `of`; or one of them asks for what the model cannot be.
        """
        theirs = CompileProfile.of(other, "diff: ")
        if model is not None and not callable(getattr(model, "compare", None)):
            raise ProfileError(
                f"diff: model is {shown(model)}; expected what rlx_jax.compile(flow) gives, or .model of a CausalLM"
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
