"""Define the layers that a sentence-transformers pipeline applies to pooled vectors, and read them from a checkpoint.

`Dense`, `VectorNorm` and `UnitLength` are one module each of the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.dataclasses import dataclass, field, fields
from rlx_jax.encode.pooled import Vectors
from rlx_jax.errors import ConfigError, MissingFileError, SafetensorsError, UnsupportedError, WeightError, quote
from rlx_jax.io import limits
from rlx_jax.io.folder import Folder
from rlx_jax.models.config import Fields
from rlx_jax.runtime.programs import Programs
from rlx_jax.weights.format import check_finite
from rlx_jax.weights.tensor_file import read_header
from rlx_jax.weights.torch_file import read_torch_file

WEIGHTS_FILE = "model.safetensors"
# Name of a pooled vector among the features of sentence-transformers.
SENTENCE = "sentence_embedding"
# Epsilon of torch.nn.LayerNorm.
LAYER_NORM_EPS = 1e-5

_FILE_LIMIT = limits.bound("MAX_INDEX_BYTES")

# Number of vectors of one call.
CALL_ROWS = (32, 256, 2048)

# The classes of torch.nn that a Dense layer may name, each with its default arguments.
ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "Identity": lambda x: x,
    "Tanh": jnp.tanh,
    "ReLU": jax.nn.relu,
    "ReLU6": jax.nn.relu6,
    "LeakyReLU": jax.nn.leaky_relu,
    "ELU": jax.nn.elu,
    "GELU": partial(jax.nn.gelu, approximate=False),
    "SiLU": jax.nn.silu,
    "Mish": jax.nn.mish,
    "Sigmoid": jax.nn.sigmoid,
    "Softplus": jax.nn.softplus,
}
_TORCH_PREFIXES = ("torch.nn.modules.activation.", "torch.nn.modules.linear.", "torch.nn.")


@dataclass(frozen=True)
class VectorLayer:
    """A layer over vectors `[n, in]`. Its weights are the fields that are not compared, so that equal layers share a
    program.
    """

    @property
    def widths(self) -> tuple[int, int] | None:
        """The input and output width; None for any width."""
        return None

    def arrays(self) -> dict[str, Vectors]:
        """Return the weights by name."""
        weights = {f.name: getattr(self, f.name) for f in fields(self) if not f.compare}
        return {name: array for name, array in weights.items() if array is not None}

    def apply(self, x: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Return the outputs for vectors `[n, in]`."""
        raise NotImplementedError


@dataclass(frozen=True)
class Dense(VectorLayer):
    """`activation(x Wᵀ + b)`, with `residual` plus `x`, or plus `x Rᵀ`.

    Attributes:
        weight: W `[out, in]`.
        bias: b `[out]`, if there is one.
        activation: a name in `ACTIVATIONS`.
        residual: whether the input is added.
        residual_weight: R `[out, in]`; None adds the input itself.
    """

    weight: Vectors = field(compare=False, repr=False)
    bias: Vectors | None = field(default=None, compare=False, repr=False)
    activation: str = "Identity"
    residual: bool = False
    residual_weight: Vectors | None = field(default=None, compare=False, repr=False)

    @property
    def widths(self) -> tuple[int, int]:
        return self.weight.shape[1], self.weight.shape[0]

    def apply(self, x: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
        product = partial(jnp.matmul, precision=jax.lax.Precision.HIGHEST)
        y = product(x, arrays["weight"].T)
        y = ACTIVATIONS[self.activation](y + arrays["bias"][None] if "bias" in arrays else y)
        if not self.residual:
            return y
        return y + (product(x, arrays["residual_weight"].T) if "residual_weight" in arrays else x)


@dataclass(frozen=True)
class VectorNorm(VectorLayer):
    """Layer normalization with `weight` and `bias` `[width]`."""

    weight: Vectors = field(compare=False, repr=False)
    bias: Vectors = field(compare=False, repr=False)

    @property
    def widths(self) -> tuple[int, int]:
        return len(self.weight), len(self.weight)

    def apply(self, x: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
        centred = x - x.mean(axis=-1, keepdims=True)
        scale = jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + LAYER_NORM_EPS)
        return centred * scale * arrays["weight"][None] + arrays["bias"][None]


@dataclass(frozen=True)
class UnitLength(VectorLayer):
    """Division by the Euclidean length."""

    def apply(self, x: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
        return unit_length(x)


def unit_length(x: jax.Array) -> jax.Array:
    """Return vectors `[…, width]` divided by their Euclidean lengths; zeros stay zeros."""
    # The maximum is inside the root, so that the gradient at a zero vector is zero and not NaN.
    return x / jnp.sqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24))


def apply_layers(
    layers: tuple[VectorLayer, ...], vectors: jax.Array, arrays: Sequence[Mapping[str, jax.Array]]
) -> jax.Array:
    """Apply the layers to vectors `[n, width]` in order; `arrays` has the weights of each layer."""
    for layer, weights in zip(layers, arrays, strict=True):
        vectors = layer.apply(vectors, weights)
    return vectors


@dataclass(frozen=True)
class PlacedLayers:
    """Layers with their weights on the devices of a model."""

    programs: Programs
    layers: tuple[VectorLayer, ...]
    arrays: Sequence[Mapping[str, jax.Array]]

    @staticmethod
    def on(programs: Programs, layers: tuple[VectorLayer, ...]) -> PlacedLayers:
        """Return the layers with their weights on the devices of `programs`."""
        return PlacedLayers(programs, layers, jax.device_put([layer.arrays() for layer in layers], programs.replicated))

    def __call__(self, vectors: Vectors) -> Vectors:
        """Apply the layers to vectors `[n, width]`, in calls of few different sizes."""
        if not self.layers:
            return vectors
        results = []
        for first in range(0, max(len(vectors), 1), CALL_ROWS[-1]):
            chunk = vectors[first : first + CALL_ROWS[-1]]
            rows = next(size for size in CALL_ROWS if size >= len(chunk))
            padded = np.pad(chunk, ((0, rows - len(chunk)), (0, 0)))
            results.append(self.programs.run_helper(apply_layers, padded, self.arrays, static=(self.layers,)))
        return np.concatenate([np.asarray(jax.device_get(y)) for y in results])[: len(vectors)]

    def each(self, texts: Sequence[Vectors]) -> list[Vectors]:
        """Apply the layers to the vectors of several texts, `[tokens, width]` each."""
        ends = np.cumsum([len(vectors) for vectors in texts])[:-1]
        return np.split(self(np.concatenate(texts)), ends) if texts else []

    def warm_up(self, width: int) -> None:
        """Run every program that vectors of this width can need."""
        for rows in CALL_ROWS:
            self(np.zeros((rows, width), np.float32))


def output_width(layers: Sequence[VectorLayer], width: int | None, where: str) -> int | None:
    """Return the width of vectors after the layers, from the width before them; None if it is unknown.

    Raises:
        ConfigError: a layer takes vectors of another width.
    """
    for number, layer in enumerate(layers):
        if layer.widths is None:
            continue
        if width not in (None, layer.widths[0]):
            name = f"layer {number} after pooling, {type(layer).__name__},"
            raise ConfigError(f"{where}: {name} takes vectors of width {layer.widths[0]}, and gets {width}")
        width = layer.widths[1]
    return width


# -- files -------------------------------------------------------------------------------------


def read_layer(
    folder: Folder, kind: str, path: str, feature: str = SENTENCE, default: str = SENTENCE
) -> VectorLayer | None:
    """Return the layer of a module, or None for dropout, which does nothing here.

    Args:
        folder: the checkpoint.
        kind: `Dense`, `LayerNorm`, `Normalize` or `Dropout`.
        path: the module's directory.
        feature: the feature that the module must read and write.
        default: the feature that it reads if its config has no `module_input_name`.

    Raises:
        ConfigError: a malformed config, or weights of other shapes. UnsupportedError: names the setting.
    """
    if kind == "Normalize":
        if path:  # without a path, the config.json in that directory belongs to the transformer
            c = _config(folder, path)
            _check_features(c, kind, feature, default)
            c.finish()
        return UnitLength()
    if not path:
        raise ConfigError(f"{folder.where('modules.json')}: the module {kind} needs its own path")
    c = _config(folder, path)
    if kind == "Dropout":
        c.finish(("dropout",))
        return None
    if kind == "LayerNorm":
        width = c.integer("dimension")
        c.finish()
        arrays = _read_arrays(folder, path, {"norm.weight": (width,), "norm.bias": (width,)})
        return VectorNorm(arrays["norm.weight"], arrays["norm.bias"])
    return _read_dense(folder, path, c, feature, default)


def _config(folder: Folder, path: str) -> Fields:
    name = f"{path}/config.json"
    return Fields(folder.json(name), folder.where(name))


def _check_features(c: Fields, kind: str, feature: str, default: str) -> None:
    """Check that a module reads and writes `feature`; `default` as in `read_layer`."""
    source, target = c.raw("module_input_name", default), c.raw("module_output_name", feature)
    if source != feature or target not in (feature, None):
        used = f"{kind} maps {quote(source)} to {quote(target)}"
        raise UnsupportedError(f"{c.where}: module_input_name: {used}; supported is {feature!r} for both")


def _read_dense(folder: Folder, path: str, c: Fields, feature: str, default: str) -> Dense:
    """Return the layer of a `Dense` module."""
    inputs, outputs = c.integer("in_features"), c.integer("out_features")
    name = c.text("activation_function", "torch.nn.Tanh")
    activation = next((name.removeprefix(p) for p in _TORCH_PREFIXES if name.startswith(p)), "")
    if activation not in ACTIVATIONS:
        names = ", ".join(ACTIVATIONS)
        raise UnsupportedError(f"{c.where}: activation_function {quote(name)}; supported are, of torch.nn, {names}")
    has_bias, residual = c.flag("bias", True), c.flag("use_residual", False)
    _check_features(c, "Dense", feature, default)
    c.finish()
    shapes: dict[str, tuple[int, ...]] = {"linear.weight": (outputs, inputs)}
    shapes |= {"linear.bias": (outputs,)} if has_bias else {}
    shapes |= {"residual.weight": (outputs, inputs)} if residual and inputs != outputs else {}
    arrays = _read_arrays(folder, path, shapes)
    weight, bias, projection = arrays["linear.weight"], arrays.get("linear.bias"), arrays.get("residual.weight")
    return Dense(weight, bias, activation, residual, projection)


def read_linear(folder: Folder, name: str, activation: str = "Identity") -> Dense | None:
    """Return the layer in `name.safetensors` or `name.pt` with `weight` and `bias`, as in FlagEmbedding; or None.

    Raises:
        WeightError: other weights. Others as `read_torch_file`.
    """
    file = next((file for file in (f"{name}.safetensors", f"{name}.pt") if file in folder.names()), "")
    raw, where = folder.read(file, _FILE_LIMIT, SafetensorsError) if file else None, folder.where(file)
    if raw is None:
        return None
    arrays = _finite(read_torch_file(raw, where), where) if file.endswith(".pt") else _parse_arrays(raw, where)
    weight, bias = arrays.get("weight"), arrays.get("bias")
    if weight is None or bias is None or len(arrays) > 2 or weight.ndim != 2 or bias.shape != weight.shape[:1]:
        shapes = {key: array.shape for key, array in arrays.items()}
        raise WeightError(f"{where}: expected weight [out, in] and bias [out], got {shapes}")
    return Dense(weight, bias, activation)


def _read_arrays(folder: Folder, path: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Vectors]:
    """Return the weights of a module, which are exactly these.

    Raises:
        MissingFileError, UnsupportedError: there is no safetensors file. WeightError: other weights.
    """
    name = f"{path}/{WEIGHTS_FILE}"
    raw, where = folder.read(name, _FILE_LIMIT, SafetensorsError), folder.where(name)
    if raw is None:
        if "pytorch_model.bin" in folder.names(path):
            raise UnsupportedError(
                f"{where}: no such file, and pytorch_model.bin is a pickle, which can run code; convert it: "
                "safetensors.torch.save_file(torch.load(file), 'model.safetensors')"
            )
        raise MissingFileError(f"{where}: no such file")
    arrays = _parse_arrays(raw, where)
    stored = {key: array.shape for key, array in arrays.items()}
    if stored != dict(shapes):
        raise WeightError(f"{where}: expected the weights {dict(shapes)}, as {path}/config.json says; got {stored}")
    return arrays


def _parse_arrays(raw: bytes, where: str) -> dict[str, Vectors]:
    """Return the arrays of a safetensors file as float32, after checking that they are finite."""
    header = read_header(lambda count, start, where: raw[start : start + count], len(raw), where)
    parts = {key: raw[info.start : info.start + info.nbytes] for key, info in header.items()}
    arrays = {key: np.frombuffer(parts[key], info.dtype).reshape(info.shape) for key, info in header.items()}
    return _finite(arrays, where)


def _finite(arrays: Mapping[str, np.ndarray[Any, Any]], where: str) -> dict[str, Vectors]:
    """Return arrays of a file as float32, after checking that they are finite."""
    for key, array in arrays.items():
        check_finite(array, key, where, "error")
    return {key: array.astype(np.float32) for key, array in arrays.items()}
