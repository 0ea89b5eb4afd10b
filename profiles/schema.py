"""The tables of a compile profile: a row for each setting.

A row is the type of the setting, its default with the condition for its effect and its label, and its entry in the
docstring of the table. `settings_for` of `rlx_jax.compiler.settings` resolves `auto`; whoever needs another setting
reads it of `Settings.profile`. `python -m tests.profile_page --write` renews the table of docs/profiles.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from rlx_jax.profiles import effects
from rlx_jax.profiles.check import OTHER_PLATFORMS, Options, Table, setting
from rlx_jax.profiles.effects import always, needs

__all__ = ["AttentionTable", "Backend", "Backends", "BucketTable", "Checks", "Donation", "Fusion", "Layers",
           "NumericClasses", "Passes", "Precision", "Sharding"]  # fmt: skip

# Platforms, and the devices of `rlx_jax.device.DEVICES` by name.
Target = Literal[
    "auto", "cpu", "cuda", "rocm", "tpu",
    "a100", "l4", "h100", "h200", "b200", "mi300x", "tpu_v5e", "tpu_v5p", "tpu_v6e",
]  # fmt: skip


@dataclass(frozen=True)
class Fusion(Table):
    """How blocks become tensor ops.

    policy: whether a block is lowered by a better rule, where there is one, or by its own expansion; same numbers
    target: the platform or the device to compile for; `auto` is the one that JAX runs on; see [Devices](#devices)
    assert_clean: a pattern that a pass looks for and cannot fuse is an error
    skip: no effect: the [fusion passes](fusion.md) leave their ops to XLA
    disable: names of passes that do not run, from [adding a pass](adding-a-pass.md)
    """

    PATH: ClassVar[str] = "fusion"
    policy: Literal["direct", "fusable"] = setting("direct", needs("blocks"), "lowering policy")
    target: Target = setting("auto", always, "planned for", "device", unsupported=OTHER_PLATFORMS)
    assert_clean: bool = setting(False, always, "missed fusions are errors")
    skip: bool = setting(False, effects.left, resolved="without")
    disable: tuple[str, ...] = setting((), effects.disabled, resolved="off")


@dataclass(frozen=True)
class Passes(Table):
    """Which passes run over the tensor graph.

    dce: dead code is removed from the tensor graph
    cse: common subexpressions are computed once
    constant_folding: what depends on constants alone is computed when the program is compiled
    verbose: one line for each step on stderr: nodes and seconds
    """

    PATH: ClassVar[str] = "passes"
    dce: bool = setting(True, always, resolved="off")
    cse: bool = setting(True, always, resolved="off")
    constant_folding: bool = setting(True, always, resolved="off")
    verbose: bool = setting(False, always, "passes print")


Float = Literal["f32", "bf16", "f16"]


@dataclass(frozen=True)
class NumericClasses(Table):
    """The dtype of each class of ops where `precision.mixed` is `custom`.

    compute: of products, attention and JAX functions, where `mixed` is `custom`
    reduction: of norms, softmax and reductions, where `mixed` is `custom`
    elementwise: of arithmetic, where `mixed` is `custom`
    movement: of what moves values, where `mixed` is `custom`
    """

    PATH: ClassVar[str] = "precision.classes"
    compute: Float = setting("f32", effects.custom_alone, "dtypes of op classes", "classes")
    reduction: Float = setting("f32", effects.custom_alone, "dtypes of op classes", "classes")
    elementwise: Float = setting("f32", effects.custom_alone, "dtypes of op classes", "classes")
    movement: Float = setting("f32", effects.custom_alone, "dtypes of op classes", "classes")


@dataclass(frozen=True)
class Precision(Table):
    """Dtypes, of the program, its parameters and its cache. The mixed policies stand in the section Dtypes of
    docs/profiles.md; a policy other than `none` excludes a `compute` of bf16 or f16.

    compute: the dtype of activations; `auto` is the weights' own on GPU and TPU, f32 on the CPU
    matmul: the precision of every matrix product, as in `jax.lax.Precision`: `default` rounds the factors of an f32
        product to ten bits on an NVIDIA GPU (TF32) and to bf16 on a TPU; `highest` keeps f32
    mixed: a narrow dtype for classes of ops, f32 around them; parameters and gradients stay f32
    weights: the dtype that floating parameters are stored in, cast where the program reads them; `keep` is the one that
        the program computes in
    kv: the dtype of cached keys and values, cast when written and when read; `auto` is the one they are computed in
    """

    PATH: ClassVar[str] = "precision"
    compute: Literal["auto", "f32", "bf16", "f16"] = setting("auto", needs("floats"), "compute dtype", "compute")
    matmul: Literal["default", "high", "highest"] = setting("default", needs("products"), "precision of products")
    mixed: Literal[
        "none", "auto", "always_f16", "auto_mixed_conservative", "auto_mixed", "auto_mixed_bf16", "custom"
    ] = setting("none", effects.narrowed, "mixed precision", "mixed")
    classes: NumericClasses = NumericClasses()
    weights: Literal["keep", "f32", "bf16"] = setting(
        "keep", needs("float parameters"), resolved="stored", unsupported=("i8", "int8", "i4", "int4")
    )
    kv: Literal["auto", "f32", "bf16", "f16"] = setting("auto", effects.cached, "dtype of the cache", "kv", of="state")


@dataclass(frozen=True)
class Donation(Table):
    """What a call writes in place.

    state: a step writes its cache in place, and the old state is gone; `lm.extend` takes a state once in any case
    strict: a compiled program that copies its state, or takes more temporaries than planned, is a `GraphError`; `false`
        runs it and warns; see [Updates in place](#updates-in-place)
    inputs: names of inputs whose device arrays a call consumes, where an output can take their memory; `apply` consumes
        nothing
    """

    PATH: ClassVar[str] = "donation"
    state: bool = setting(True, effects.stateful, "state updated in place", of="state")
    strict: bool = setting(False, effects.donated, "copies of the state are errors", of="state")
    inputs: tuple[str, ...] = setting((), effects.consumed, "inputs consumed")


@dataclass(frozen=True)
class Layers(Table):
    """How layers run.

    roll: equal layers as one `lax.scan`, or one after the other; `auto` scans on TPU and in training
    remat: what a gradient of the program `train` computes again: whole layers, all but products with weights, or all
        but these and cuDNN's attention; `offload` keeps what `dots` keeps in the host's memory
    """

    PATH: ClassVar[str] = "layers"
    roll: Literal["auto", "scan", "unroll"] = setting("auto", effects.scanned, resolved="plan.scan")
    remat: Literal["none", "layer", "dots", "products", "offload"] = setting(
        "none", effects.remat, "recomputed in gradients", "plan.remat", of="train"
    )


@dataclass(frozen=True)
class AttentionTable(Table):
    """How attention runs.

    implementation: how attention runs: `auto` takes cuDNN where it can compute it and gains, else XLA, and the report
        says why; `cudnn` is an error where it cannot be had; see [Attention](#attention)
    """

    PATH: ClassVar[str] = "attention"
    implementation: Literal["auto", "xla", "cudnn"] = setting(
        "auto", needs("attention"), "attention asked for", unsupported=("pallas",)
    )


@dataclass(frozen=True)
class BucketTable(Table):
    """Sizes that requests to a `CausalLM` or an `Encoder` are padded to, so that few programs serve all of them; see
    docs/generation.md. Without a list, sizes are rounded up to powers of two.

    prompt: tokens of a prompt or a text that requests are padded to; a longer one is read in chunks
    batch: rows that requests are padded to
    context: slots of the cache that requests are padded to, for a prompt and its new tokens
    on_recompile: what a size outside of those lists, or a compile after `warmup`, is
    programs: compiled programs that a model keeps; of more, the least recently used goes, which `report().evicted`
        counts, and compiles when it is asked for again; on a CPU one takes some 1.5 MiB and 3 memory mappings
    spare: slots that the cache of a layer with a window has beside the window: so many tokens may be taken back from a
        state, as a step that checks drafts does
    """

    PATH: ClassVar[str] = "buckets"
    prompt: tuple[int, ...] = setting((), effects.padded, resolved="buckets")
    batch: tuple[int, ...] = setting((), effects.padded, resolved="buckets")
    context: tuple[int, ...] = setting((), effects.padded_cache, resolved="buckets")
    on_recompile: Literal["allow", "warn", "error"] = setting("allow", effects.recompiled, resolved="buckets")
    programs: int = setting(256, always, resolved="buckets")
    spare: int = setting(0, effects.spared, resolved="buckets", zero=True)


@dataclass(frozen=True)
class Checks(Table):
    """What calls check. A copy of 8 x 2048 ids to the host takes 0.3 ms on one H200, 0.7 ms while it runs a step, which
    the copy does not wait for unless it computes the ids. Traced arrays have no values to check.

    ids: whose token ids and labels are checked before a call and before a training step: those in lists, NumPy arrays
        and arrays of JAX on a CPU, or those on an accelerator too, which are copied to the host; see
        [errors](errors.md)
    """

    PATH: ClassVar[str] = "checks"
    ids: Literal["host", "all"] = setting("host", needs("ids"))


def _axes(*names: str) -> tuple[str, ...]:
    return setting(names, effects.divided, "mesh axes of roles", "sharding")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Sharding(Table):
    """For each role that an axis may have (`rlx_jax.ir.roles`) the axes of a mesh that it is divided over, those that
    the mesh has: what `mesh=` means for a model. Without a mesh there is nothing to divide.

    batch: the axes of a mesh that rows are divided over, and along which parameters other than experts are only kept in
        parts; see [devices](devices.md)
    sequence: those that the tokens of a row are divided over
    heads: those that query heads are divided over
    kv_heads: those that key heads are divided over
    groups: those that what heads with a state share is divided over
    ffn: those that the inside of feed-forward blocks is divided over
    vocab: those that the output head is divided over
    embedding: those that rows of tables are divided over, whose lookup then takes a collective
    hidden: those that the other axis of matrices is divided over, where they are kept
    experts: those that experts of a mixture are divided over
    channel: those that norms and biases are divided over
    """

    PATH: ClassVar[str] = "sharding"
    batch: tuple[str, ...] = _axes("data", "fsdp", "expert")
    sequence: tuple[str, ...] = _axes("context")
    heads: tuple[str, ...] = _axes("tensor")
    kv_heads: tuple[str, ...] = _axes("tensor")
    groups: tuple[str, ...] = _axes("tensor")
    ffn: tuple[str, ...] = _axes("tensor")
    vocab: tuple[str, ...] = _axes("tensor")
    embedding: tuple[str, ...] = _axes()
    hidden: tuple[str, ...] = _axes("fsdp")
    experts: tuple[str, ...] = _axes("expert")
    channel: tuple[str, ...] = _axes()


@dataclass(frozen=True)
class Backend(Table):
    """What holds on one platform alone.

    weight_layout: the orientation that weights of Linears are stored in, unless other ops read them too; `auto` is that
        of the checkpoint
    merge: q, k, v and gate, up as one weight and one product; `auto` merges where a checkpoint is loaded for
        generation, and not where parameters keep their checkpoint keys
    skip_fusion: no effect, as `fusion.skip`
    unfuse_regions: no effect: chains of pointwise ops stay single ops
    products: how a product of one row with a weight `[out, in]` runs: as any other, or as a multiplication and a sum in
        one kernel that reads the weight once; `auto` takes `row` on `cuda`
    experts: how a mixture of experts runs: every expert for every token, the weights of each token's experts read
        apart, choices sorted into blocks of one expert, these one after the other, or sorted groups for
        `jax.lax.ragged_dot`; `auto` goes by the numbers of tokens and experts, and is `looped` on the CPU
    kernels: whether the package's own kernels, in Pallas, run experts and recurrences: where they were measured, on one
        H100 or H200, in programs that are not trained; or nowhere
    steps_per_dispatch: tokens of a row that one call of the generating loop gives, any number; `auto` is 4 on the CPU,
        else 16
    stop_early: the loop ends with its last row, and not after so many steps; `auto` says so on the CPU: where the
        number of turns is known beforehand, a GPU's host thread prepares the next call meanwhile
    compiler_options: options of XLA, passed as they are
    """

    PATH: ClassVar[str] = "backend.*"
    weight_layout: Literal["auto", "in_out", "out_in"] = setting("auto", needs("linears"))
    merge: bool | Literal["auto"] = setting("auto", effects.merged, resolved="merge")
    skip_fusion: bool = setting(False, effects.left, resolved="without")
    unfuse_regions: bool | Literal["auto"] = setting("auto", effects.left, resolved="without")
    products: Literal["auto", "xla", "row"] = setting("auto", needs("products"), "products asked for")
    experts: Literal["auto", "dense", "gathered", "blocked", "looped", "ragged"] = setting(
        "auto", needs("experts"), "experts asked for"
    )
    kernels: Literal["auto", "off"] = setting("auto", effects.kernels, resolved="plan.kernels")
    steps_per_dispatch: int | Literal["auto"] = setting(
        "auto", effects.generated, "generating loop", "loop", of="serves"
    )
    stop_early: bool | Literal["auto"] = setting("auto", effects.generated, "generating loop", "loop", of="serves")
    compiler_options: Options = setting(Options(), always, "options of XLA")


@dataclass(frozen=True)
class Backends(Table):
    """One `Backend` for each platform; only the one that is compiled for is read."""

    PATH: ClassVar[str] = "backend"
    cpu: Backend = Backend()
    cuda: Backend = Backend()
    rocm: Backend = Backend()
    tpu: Backend = Backend()
