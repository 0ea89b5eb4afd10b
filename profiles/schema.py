"""This module defines the tables of a compile profile, with a row for each setting.

A row is the type of the setting, its default with the condition for its effect and its label, and its entry in the
docstring of the table. `settings_for` of `rlx_jax.compiler.settings` resolves `auto`; settings without `auto` are read
from `Settings.profile`. `python -m tests.profile_page --write` renews the table of docs/profiles.md.
"""

from __future__ import annotations

from typing import ClassVar, Literal

from rlx_jax.dataclasses import dataclass
from rlx_jax.profiles import effects
from rlx_jax.profiles.check import UNSUPPORTED_PLATFORMS, Options, Table, setting
from rlx_jax.profiles.effects import always, needs

__all__ = ["AttentionTable", "Backend", "Backends", "BucketTable", "Checks", "Donation", "Fusion", "Layers",
           "NumericClasses", "Passes", "Precision", "Sharding"]  # fmt: skip

# Platforms, and the devices of `rlx_jax.device.DEVICES` by name.
Target = Literal[
    "auto", "cpu", "cuda", "rocm", "tpu",
    "a100", "l4", "t4", "rtx4090", "h100", "h200", "b200", "mi300x", "tpu_v5e", "tpu_v5p", "tpu_v6e",
]  # fmt: skip


@dataclass(frozen=True)
class Fusion(Table):
    """Settings of how blocks become tensor ops.

    policy: `direct` lowers a block by its optimized rule, if there is one; `fusable` by its plain expansion into tensor
        ops. Both compute the same numbers
    target: the platform or device to compile for; `auto` is the one that JAX runs on; see [Devices](#devices)
    assert_clean: raise an error if a pass matches a pattern that it cannot fuse
    skip: no effect: the [fusion passes](fusion.md) leave their ops to XLA
    disable: names of passes that do not run; see [adding a pass](adding-a-pass.md)
    """

    PATH: ClassVar[str] = "fusion"
    policy: Literal["direct", "fusable"] = setting("direct", needs("blocks"), "lowering policy")
    target: Target = setting("auto", always, "planned for", "device", unsupported=UNSUPPORTED_PLATFORMS)
    assert_clean: bool = setting(False, always, "missed fusions are errors")
    skip: bool = setting(False, effects.never, resolved_as="disabled_kinds")
    disable: tuple[str, ...] = setting((), effects.needs_running_passes, resolved_as="disabled_passes")


@dataclass(frozen=True)
class Passes(Table):
    """Switches of the passes over the tensor graph.

    dce: remove dead code from the tensor graph
    cse: compute common subexpressions once
    constant_folding: compute values that depend only on constants at compile time
    verbose: print one line for each pass on stderr: nodes and seconds
    """

    PATH: ClassVar[str] = "passes"
    dce: bool = setting(True, effects.needs_pass("dce"), resolved_as="disabled_passes")
    cse: bool = setting(True, effects.needs_pass("cse"), resolved_as="disabled_passes")
    constant_folding: bool = setting(True, effects.needs_pass("constant_folding"), resolved_as="disabled_passes")
    verbose: bool = setting(False, always, "passes print")


Float = Literal["f32", "bf16", "f16"]
# The values of `precision.weights` for one block path.
SCHEMES_BY_PATH = ("keep", "int8", "int4", "int8/128", "int4/128")


@dataclass(frozen=True)
class NumericClasses(Table):
    """The dtype of each class of ops if `precision.mixed` is `custom`.

    compute: dtype of matrix products, attention and JAX functions if `mixed` is `custom`
    reduction: dtype of norms, softmax and reductions if `mixed` is `custom`
    elementwise: dtype of arithmetic if `mixed` is `custom`
    movement: dtype of ops that only move values, such as reshapes, if `mixed` is `custom`
    """

    PATH: ClassVar[str] = "precision.classes"
    compute: Float = setting("f32", effects.needs_custom_policy, "dtypes of op classes", "classes")
    reduction: Float = setting("f32", effects.needs_custom_policy, "dtypes of op classes", "classes")
    elementwise: Float = setting("f32", effects.needs_custom_policy, "dtypes of op classes", "classes")
    movement: Float = setting("f32", effects.needs_custom_policy, "dtypes of op classes", "classes")


@dataclass(frozen=True)
class Precision(Table):
    """The dtypes of the program, its parameters and its cache.

    The section Dtypes of docs/profiles.md describes the mixed policies. A policy other than `none` cannot be combined
    with a `compute` of bf16 or f16.

    compute: dtype of activations; `auto` is the dtype of the weights on GPU and TPU, and f32 on the CPU
    matmul: precision of every matrix product, as in `jax.lax.Precision`: `default` rounds the factors of an f32
        product to ten bits on an NVIDIA GPU (TF32) and to bf16 on a TPU; `highest` keeps f32
    mixed: policy of mixed precision: a narrow dtype for classes of ops, f32 for the others; parameters and gradients
        stay f32
    weights: storage of floating parameters: `keep` stores them in the dtype that the program computes in, and those
        that are packed in the checkpoint packed; `f32` and `bf16` decode packed ones, and cast them where the program
        reads them; `int8` and `int4` round the matrices of products, embeddings and experts while they are loaded, in
        groups of 32 values with one scale, `int8/128` and `int4/128` in groups of 128; a table has one of these, or
        `keep`, for each glob of block paths: `{"layers.*.mlp.*" = "int4", lm_head = "int8"}`
    kv: dtype of cached keys and values, which are cast when written and when read; `auto` is the dtype that they are
        computed in; `int8` and `fp8` (float8_e4m3fn) store codes and one f32 scale for each token and head
    """

    PATH: ClassVar[str] = "precision"
    compute: Literal["auto", "f32", "bf16", "f16"] = setting("auto", needs("floats"), "compute dtype", "compute")
    matmul: Literal["default", "high", "highest"] = setting("default", needs("products"), "precision of products")
    mixed: Literal[
        "none", "auto", "always_f16", "auto_mixed_conservative", "auto_mixed", "auto_mixed_bf16", "custom"
    ] = setting("none", effects.needs_narrow_class, "mixed precision", "mixed")
    classes: NumericClasses = NumericClasses()
    weights: Literal["keep", "f32", "bf16", "int8", "int4", "int8/128", "int4/128"] | Options = setting(
        "keep", effects.needs_weights, resolved_as="param_dtype", table_values=SCHEMES_BY_PATH
    )
    kv: Literal["auto", "f32", "bf16", "f16", "int8", "fp8"] = setting(
        "auto", effects.needs_kv_cache, "dtype of the cache", "kv_dtype", applies_to="state"
    )


@dataclass(frozen=True)
class Donation(Table):
    """The arguments that a call donates, so that results are written in place.

    state: a step updates its cache in place and consumes the old state; `lm.extend` consumes its state in any case
    strict: raise a `GraphError` if a compiled program copies its state, or takes more temporaries than planned; `false`
        runs it and warns; see [Updates in place](#updates-in-place)
    inputs: names of inputs with device arrays that a call consumes if an output can reuse their memory; `apply`
        consumes nothing
    """

    PATH: ClassVar[str] = "donation"
    state: bool = setting(True, effects.needs_state, "state updated in place", applies_to="state")
    strict: bool = setting(False, effects.needs_checked_memory, "memory beyond the plan is an error")
    inputs: tuple[str, ...] = setting((), effects.needs_device_inputs, "inputs consumed")


@dataclass(frozen=True)
class Layers(Table):
    """Settings of how layers run.

    roll: run repeated layers as one `lax.scan`, or one after the other; `auto` scans on TPU, and in training other
        than on `cuda`
    remat: activations that the gradient of the program `train` recomputes: `layer` all of a layer, `dots` all except
        products with weights, `products` all except these and cuDNN's attention; `offload` is `dots` with the retained
        activations in host memory; `auto` is `products` on `cuda`, else `none`
    """

    PATH: ClassVar[str] = "layers"
    roll: Literal["auto", "scan", "unroll"] = setting("auto", effects.needs_repeated_layers, resolved_as="plan.scan")
    remat: Literal["auto", "none", "layer", "dots", "products", "offload"] = setting(
        "auto", effects.needs_gradients, "recomputed in gradients", "plan.remat", applies_to="train"
    )


@dataclass(frozen=True)
class AttentionTable(Table):
    """Settings of how attention runs.

    implementation: `auto` uses cuDNN where it is possible and faster, else XLA, and the report has the reason; `cudnn`
        is an error where it is not possible; see [Attention](#attention)
    """

    PATH: ClassVar[str] = "attention"
    implementation: Literal["auto", "xla", "cudnn"] = setting(
        "auto", needs("attention"), "attention requested", unsupported=("pallas",)
    )


@dataclass(frozen=True)
class BucketTable(Table):
    """The sizes that requests to a `CausalLM` or an `Encoder` are padded to, so that few programs serve all requests.

    See docs/generation.md. Without a list, sizes are rounded up to powers of two.

    prompt: lengths in tokens that prompts and texts are padded to; a longer prompt is processed in chunks
    batch: numbers of rows that requests are padded to
    context: numbers of cache slots that requests are padded to, for a prompt and its new tokens
    on_recompile: reaction to a size outside of these lists, or to a compile after `warmup`
    programs: number of compiled programs that a model retains; the least recently used ones are evicted, which
        `report().evicted` counts, and compile again on demand; on a CPU a program takes about 1.5 MiB and 3 memory
        mappings
    spare: slots that the cache of a layer with an attention window has in addition to the window: the number of tokens
        that can be rolled back from a state, as a step that verifies drafts does
    """

    PATH: ClassVar[str] = "buckets"
    prompt: tuple[int, ...] = setting((), effects.needs_padding, resolved_as="buckets")
    batch: tuple[int, ...] = setting((), effects.needs_padding, resolved_as="buckets")
    context: tuple[int, ...] = setting((), effects.needs_padded_cache, resolved_as="buckets")
    on_recompile: Literal["allow", "warn", "error"] = setting("allow", effects.needs_buckets, resolved_as="buckets")
    programs: int = setting(256, always, resolved_as="buckets")
    spare: int = setting(0, effects.needs_ring_buffers, resolved_as="buckets", allows_zero=True)


@dataclass(frozen=True)
class Checks(Table):
    """The checks of calls.

    A copy of 8 x 2048 ids to the host takes 0.3 ms on one H200, and 0.7 ms while it runs a step; the copy waits for the
    step only if the step computes the ids. Traced arrays have no values to check.

    ids: token ids and labels that are checked before a call and before a training step: `host` checks lists, NumPy
        arrays and JAX arrays on a CPU; `all` also copies JAX arrays on an accelerator to the host; see
        [errors](errors.md)
    """

    PATH: ClassVar[str] = "checks"
    ids: Literal["host", "all"] = setting("host", needs("ids"))


def _axes(*names: str) -> tuple[str, ...]:
    """Return the field of a role, with its default mesh axes."""
    return setting(names, effects.needs_mesh_axes, "mesh axes of roles", "sharding")  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Sharding(Table):
    """The mesh axes that each role of an array axis (`rlx_jax.ir.roles`) is sharded over.

    Axes that the mesh of a model (`mesh=`) does not have are ignored. Without a mesh nothing is sharded.

    batch: mesh axes that rows are sharded over; along these, parameters other than experts are sharded only for
        storage; see [devices](devices.md)
    sequence: mesh axes that the tokens of a row are sharded over
    heads: mesh axes that query heads are sharded over
    kv_heads: mesh axes that key and value heads are sharded over
    groups: mesh axes that key heads, which heads with a recurrent state share, are sharded over
    ffn: mesh axes that the inner dimension of feed-forward blocks is sharded over
    vocab: mesh axes that the output head is sharded over
    embedding: mesh axes that rows of embedding tables are sharded over; a lookup then takes a collective
    hidden: mesh axes that the other axis of matrices is sharded over, for storage
    experts: mesh axes that the experts of a mixture are sharded over
    channel: mesh axes that norms and biases are sharded over
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
    """Settings that apply to one platform.

    weight_layout: orientation in which weights of Linears are stored, unless other ops read them too; `auto` is the
        orientation in the checkpoint
    merge: fuse the projections q, k, v and gate, up into one weight and one product each; `auto` fuses when a
        checkpoint is loaded for generation, and not when parameters keep their checkpoint keys
    skip_fusion: no effect, like `fusion.skip`
    unfuse_regions: no effect: chains of pointwise ops stay single ops
    products: implementation of a product of one row with a weight `[out, in]`: `xla` as any other product, `row` as a
        multiplication and a sum in one kernel that reads the weight once; `auto` is `row` on `cuda`, and on a CPU for
        large weights of 16 bits, with two rows too
    experts: implementation of a mixture of experts: `dense` computes every expert for every token, `gathered` reads the
        weights of each token's experts separately, `blocked` sorts choices into blocks of one expert, `looped` runs
        these blocks one after the other, `ragged` sorts groups for `jax.lax.ragged_dot`; `auto` depends on the numbers
        of tokens and experts, and is `looped` on the CPU
    kernels: `auto` runs the package's own Pallas kernels where they were measured: on one H100 or H200 with jax
        0.11 (and with later releases), in programs that are not trained, for experts, recurrences, products of 9 to 128
        rows with packed weights, and bf16 attention of up to 64 and products of up to 8 decoded rows with the ops
        around them; over a mesh, in decode steps that can be the program of one device; `off` never; `on` as `auto`,
        and an error where no kernel can run
    steps_per_dispatch: tokens per row that one call of the generation loop produces, any number; `auto` is 4 on the
        CPU, else 16; a stream takes one by one, or two by two from 16 on
    stop_early: end a call of the loop when its last row has ended, and not after a fixed number of steps; `auto` does
        so on the CPU; with a fixed number the host thread of a GPU prepares the next call meanwhile
    compiler_options: options of XLA, passed unchanged; they precede the package's own, which are
        `xla_gpu_graph_min_graph_size = 2` for kernels over a mesh, `xla_gpu_enable_triton_gemm = false` in its place
        from 64 rows on, unless kernels multiply packed weights, and `xla_gpu_enable_triton_gemm = false` and
        `xla_gpu_dot_merger_threshold_mb = 0` for training in bf16 on an H100 or H200, unless `XLA_FLAGS` names the
        option
    """

    PATH: ClassVar[str] = "backend.*"
    weight_layout: Literal["auto", "in_out", "out_in"] = setting("auto", needs("linears"))
    merge: bool | Literal["auto"] = setting("auto", effects.needs_shared_projections, resolved_as="merge")
    skip_fusion: bool = setting(False, effects.never, resolved_as="disabled_kinds")
    unfuse_regions: bool | Literal["auto"] = setting("auto", effects.never, resolved_as="disabled_kinds")
    products: Literal["auto", "xla", "row"] = setting("auto", needs("products"), "products requested")
    experts: Literal["auto", "dense", "gathered", "blocked", "looped", "ragged"] = setting(
        "auto", needs("experts"), "experts requested"
    )
    kernels: Literal["auto", "off", "on"] = setting("auto", effects.needs_kernels, resolved_as="plan.kernels")
    steps_per_dispatch: int | Literal["auto"] = setting(
        "auto", effects.needs_generation, "generation loop", "loop", applies_to="serves"
    )
    stop_early: bool | Literal["auto"] = setting(
        "auto", effects.needs_generation, "generation loop", "loop", applies_to="serves"
    )
    compiler_options: Options = setting(Options(), always, "options of XLA")


@dataclass(frozen=True)
class Backends(Table):
    """One `Backend` for each platform; only the table of the target platform is read."""

    PATH: ClassVar[str] = "backend"
    cpu: Backend = Backend()
    cuda: Backend = Backend()
    rocm: Backend = Backend()
    tpu: Backend = Backend()
