"""The sizes and options of one compile, as hashable records: `ModelVariant`, `ModelComponent`, `ModelExecutionConfig`.

`ModelCompilePipeline` takes them, and `compile_options_for` turns them into keywords of `rlx_jax.compile`. Keys are the
same in every process.
"""

from __future__ import annotations

import hashlib
import os
from enum import StrEnum
from typing import Any, TypedDict, TypeVar

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.device import named_device, running_device
from rlx_jax.errors import GraphError, ProfileError, RequestError, ShapeError, check_integer, did_you_mean, quote, shown
from rlx_jax.ir.types import as_name
from rlx_jax.profiles import CompileProfile, ProfileLike

__all__ = [
    "CompilationMode", "ExecutionPreset", "KernelDispatch", "ModelComponent", "ModelExecutionConfig", "ModelVariant",
    "Phase", "compile_options_for",
]  # fmt: skip

DISPATCH_VARIABLE = "RLX_KERNEL_DISPATCH"


class Phase(StrEnum):
    """What a program of a variant is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    ENCODER = "encoder"
    INFERENCE = "inference"


class CompilationMode(StrEnum):
    """When programs are compiled.

    `EAGER` is before the first run, `LAZY` for each variant at its first use, `AOT` with the planned program on disk.
    """

    EAGER = "eager"
    LAZY = "lazy"
    AOT = "aot"


class KernelDispatch(StrEnum):
    """Which implementation of an op runs: `NATIVE` the fastest of the device, `COMMON` XLA's on every device."""

    NATIVE = "native"
    COMMON = "common"

    @staticmethod
    def from_environment() -> KernelDispatch:
        """Return the value of `RLX_KERNEL_DISPATCH`, or `NATIVE` if it is not set.

        Raises:
            ProfileError: it has another value.
        """
        return choice_of(KernelDispatch, os.environ.get(DISPATCH_VARIABLE, "").lower() or "native", DISPATCH_VARIABLE)


Choice = TypeVar("Choice", bound=StrEnum)


def choice_of(kind: type[Choice], value: str, where: str) -> Choice:
    """Return a value of an enumeration from its text.

    Raises:
        ProfileError: there is no such value.
    """
    choices = [str(choice) for choice in kind]
    if value not in choices:
        hint = did_you_mean(str(value), choices)
        raise ProfileError(f"{where}: expected {' or '.join(choices)}, got {quote(value)}{hint}")
    return kind(value)


def stable_hash(*parts: object) -> int:
    """Return a 64-bit hash of the `repr` of some values, the same in every process."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "big")


@dataclass(frozen=True)
class ModelVariant:
    """The sizes of one program.

    Attributes:
        batch, seq: rows, and tokens of each row.
        past_seq: cached tokens of each row; None for a program without a cache.
        phase: what the program is for.
        extra: sizes of other symbols, in order.
    """

    batch: int
    seq: int
    past_seq: int | None = None
    phase: Phase = Phase.INFERENCE
    extra: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "phase", choice_of(Phase, self.phase, "ModelVariant: phase"))
        for name in ("batch", "seq", "past_seq"):
            if getattr(self, name) is not None or name != "past_seq":
                size = check_integer(f"ModelVariant: {name}", getattr(self, name), error_class=ShapeError)
                object.__setattr__(self, name, size)
        extra = tuple((n, check_integer(f"ModelVariant: {n}", size, error_class=ShapeError)) for n, size in self.extra)
        object.__setattr__(self, "extra", extra)
        names = [*self._named_sizes(), *(name for name, _ in extra)]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise GraphError(f"ModelVariant: extra: {quote(repeated[0])} has a size already")

    @staticmethod
    def prefill(batch: int, seq: int) -> ModelVariant:
        """Return the variant of a prompt."""
        return ModelVariant(batch, seq, phase=Phase.PREFILL)

    @staticmethod
    def decode(batch: int, past_seq: int, new: int = 1) -> ModelVariant:
        """Return the variant of `new` tokens after `past_seq` cached ones."""
        return ModelVariant(batch, new, past_seq, Phase.DECODE)

    @staticmethod
    def encoder(batch: int, seq: int) -> ModelVariant:
        """Return the variant of an encoder."""
        return ModelVariant(batch, seq, phase=Phase.ENCODER)

    def with_extra(self, symbol: str, size: int) -> ModelVariant:
        """Return the variant with the size of another symbol."""
        return replace(self, extra=(*self.extra, (as_name(symbol, "ModelVariant: extra"), size)))

    def dim_binding(self) -> dict[str, int]:
        """Return the size of each symbol; `rows`, the product of rows and tokens, only without a cache."""
        return {**self._named_sizes(), **dict(self.extra)}

    def _named_sizes(self) -> dict[str, int]:
        """Return the sizes without `extra`."""
        binding = {"batch": self.batch, "seq": self.seq}
        if self.phase == Phase.DECODE and self.past_seq is not None:
            binding["past"] = self.past_seq
        elif self.batch > 1:
            binding["rows"] = self.batch * self.seq
        return binding

    def cache_key(self) -> int:
        """Return a 64-bit key of the phase, the sizes and the order of `extra`."""
        return stable_hash("variant", str(self.phase), self.batch, self.seq, self.past_seq, self.extra)


@dataclass(frozen=True)
class ModelComponent:
    """A variant with what else its executable depends on, apart from the graph.

    Attributes:
        variant: the sizes.
        kernel_dispatch: which implementations run.
        compilation_mode: when the program is compiled; `AOT` needs `ModelCompilePipeline.with_aot`.
        profile_key: the key of a preset; 0 without one.
        quant: the scheme that weights are packed in while they are loaded, as `precision.weights` of a profile; None
            leaves it to the profile.
        layer_composition_key: the `cache_key()` of a `LayerComposition`; 0 without one.
    """

    variant: ModelVariant
    kernel_dispatch: KernelDispatch = field(default_factory=KernelDispatch.from_environment)
    compilation_mode: CompilationMode = CompilationMode.EAGER
    profile_key: int = 0
    quant: str | None = None
    layer_composition_key: int = 0

    def __post_init__(self) -> None:
        for name, kind in (("kernel_dispatch", KernelDispatch), ("compilation_mode", CompilationMode)):
            object.__setattr__(self, name, choice_of(kind, getattr(self, name), name))

    def with_kernel_dispatch(self, dispatch: KernelDispatch | str) -> ModelComponent:
        """Return the component with other implementations of ops."""
        return replace(self, kernel_dispatch=choice_of(KernelDispatch, dispatch, "kernel_dispatch"))

    def with_compilation_mode(self, mode: CompilationMode | str) -> ModelComponent:
        """Return the component with another compilation mode."""
        return replace(self, compilation_mode=choice_of(CompilationMode, mode, "compilation_mode"))

    def with_profile_key(self, key: int) -> ModelComponent:
        """Return the component with the key of a preset."""
        return replace(self, profile_key=key)

    def with_quant(self, quant: str | None) -> ModelComponent:
        """Return the component with another packing of weights."""
        return replace(self, quant=quant)

    def with_layer_composition(self, composition: Any) -> ModelComponent:
        """Return the component with the key of a `LayerComposition`.

        Raises:
            GraphError: it is none.
        """
        if not callable(getattr(composition, "cache_key", None)):
            raise GraphError(f"composition: expected a LayerComposition, got {type(composition).__name__}")
        return replace(self, layer_composition_key=composition.cache_key())

    def dim_binding(self) -> dict[str, int]:
        """Return the size of each symbol; see `ModelVariant.dim_binding`."""
        return self.variant.dim_binding()

    def cache_key(self) -> int:
        """Return a 64-bit key of all attributes. The graph is not part of it: use one pipeline for each graph."""
        fields = self.kernel_dispatch, self.compilation_mode, self.profile_key, self.quant, self.layer_composition_key
        return stable_hash("component", self.variant.cache_key(), *(f if f is None else str(f) for f in fields))

    def aot_disk_base(self) -> str:
        """Return the name of the component's planned program on disk: `rlx_` and 16 hex digits."""
        return f"rlx_{self.cache_key():016x}"


class ExecutionPreset(StrEnum):
    """The presets of profiles that the specification names."""

    LLAMA32_PREFILL = "llama32_prefill"
    LLAMA32_DECODE = "llama32_decode"
    QWEN35_PREFILL = "qwen35_prefill"
    QWEN35_DECODE = "qwen35_decode"
    ENCODER = "encoder"

    def profile(self) -> CompileProfile:
        """Return the profile of the preset."""
        return CompileProfile.preset(self.value)

    def profile_key(self) -> int:
        """Return a 64-bit key of the preset's name."""
        return stable_hash("preset", self.value)


@dataclass(frozen=True)
class ModelExecutionConfig:
    """A component and the preset that it is compiled with."""

    component: ModelComponent
    preset: ExecutionPreset

    def __post_init__(self) -> None:
        object.__setattr__(self, "preset", choice_of(ExecutionPreset, self.preset, "preset"))

    @staticmethod
    def prefill(batch: int, seq: int) -> ModelExecutionConfig:
        """Return the configuration of a prompt of a Llama."""
        return _config(ModelVariant.prefill(batch, seq), ExecutionPreset.LLAMA32_PREFILL)

    @staticmethod
    def decode(batch: int, past_seq: int, new: int = 1) -> ModelExecutionConfig:
        """Return the configuration of decoding with a Llama."""
        return _config(ModelVariant.decode(batch, past_seq, new), ExecutionPreset.LLAMA32_DECODE)

    @staticmethod
    def qwen35_prefill(batch: int, seq: int) -> ModelExecutionConfig:
        """Return the configuration of a prompt of a Qwen 3.5."""
        return _config(ModelVariant.prefill(batch, seq), ExecutionPreset.QWEN35_PREFILL)

    @staticmethod
    def qwen35_decode(batch: int, past_seq: int) -> ModelExecutionConfig:
        """Return the configuration of decoding one token with a Qwen 3.5."""
        return _config(ModelVariant.decode(batch, past_seq), ExecutionPreset.QWEN35_DECODE)

    @staticmethod
    def from_component(component: ModelComponent, preset: ExecutionPreset) -> ModelExecutionConfig:
        """Return a configuration, with the key of the preset in its component."""
        return ModelExecutionConfig(component, preset).with_preset(preset)

    def with_preset(self, preset: ExecutionPreset | str) -> ModelExecutionConfig:
        """Return the configuration with another preset, and its key in the component."""
        preset = choice_of(ExecutionPreset, preset, "preset")
        return ModelExecutionConfig(self.component.with_profile_key(preset.profile_key()), preset)

    def with_kernel_dispatch(self, dispatch: KernelDispatch | str) -> ModelExecutionConfig:
        """Return the configuration with other implementations of ops."""
        return replace(self, component=self.component.with_kernel_dispatch(dispatch))

    def with_compilation_mode(self, mode: CompilationMode | str) -> ModelExecutionConfig:
        """Return the configuration with another compilation mode."""
        return replace(self, component=self.component.with_compilation_mode(mode))

    def with_quant(self, quant: str | None) -> ModelExecutionConfig:
        """Return the configuration with another packing of weights."""
        return replace(self, component=self.component.with_quant(quant))

    def with_layer_composition(self, composition: Any) -> ModelExecutionConfig:
        """Return the configuration with the key of a `LayerComposition`."""
        return replace(self, component=self.component.with_layer_composition(composition))

    @property
    def variant(self) -> ModelVariant:
        """Return the sizes."""
        return self.component.variant

    def cache_key(self) -> int:
        """Return the key of the component."""
        return self.component.cache_key()

    def dim_binding(self) -> dict[str, int]:
        """Return the size of each symbol; see `ModelVariant.dim_binding`."""
        return self.component.dim_binding()

    def compile_profile(self) -> CompileProfile:
        """Return the profile of the preset with what the component changes."""
        return compile_options_for(self.preset.profile(), self)["profile"]


def _config(variant: ModelVariant, preset: ExecutionPreset) -> ModelExecutionConfig:
    return ModelExecutionConfig.from_component(ModelComponent(variant), preset)


class CompileKeywords(TypedDict):
    """Keywords of `rlx_jax.compile`."""

    profile: CompileProfile


def compile_options_for(profile: ProfileLike, config: ModelExecutionConfig | ModelComponent) -> CompileKeywords:
    """Return the keywords of `rlx_jax.compile` for a profile and a configuration: `compile(flow, weights, **options)`.

    The component's `quant` becomes `precision.weights`; the dispatch `COMMON` turns custom kernels and cuDNN off,
    unless the profile requires them.

    Raises:
        ProfileError: there is no such profile or packing. RequestError: `config` is no configuration.
    """
    component = config.component if isinstance(config, ModelExecutionConfig) else config
    if not isinstance(component, ModelComponent):
        raise RequestError(f"config is {shown(config)}; expected a ModelExecutionConfig or a ModelComponent")
    compile_profile = with_dispatch(CompileProfile.of(profile), component.kernel_dispatch)
    if component.quant is not None:
        compile_profile = compile_profile.replace(precision={"weights": component.quant})
    return {"profile": compile_profile}


def with_dispatch(profile: CompileProfile, dispatch: KernelDispatch) -> CompileProfile:
    """Return the profile, for the dispatch `COMMON` with XLA's implementation of every op that leaves it open."""
    target = profile.fusion.target
    kind = (running_device() if target == "auto" else named_device(target)).kind
    if dispatch == KernelDispatch.NATIVE or kind == "cpu":  # a CPU runs XLA's implementations alone
        return profile
    attention = {"implementation": "xla"} if profile.attention.implementation == "auto" else {}
    products = {"products": "xla"} if getattr(profile.backend, kind).products == "auto" else {}
    return profile.replace(attention=attention, backend={kind: {"kernels": "off", **products}})
