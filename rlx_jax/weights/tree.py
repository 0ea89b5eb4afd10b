"""`TreeSource`: weights of a tree of parameters under checkpoint keys, and weights of a model as such a tree.

A tree is any pytree of arrays, such as the parameters of flax, or a source with their paths as keys, such as an orbax
checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlx_jax.dataclasses import dataclass, field, replace
from rlx_jax.errors import DuplicateWeightError, UnsupportedError, WeightError, WeightShapeError, listing, quote, shown
from rlx_jax.ir.packed import PackedSpec, WeightSpec
from rlx_jax.ir.weight_reads import WeightSource
from rlx_jax.weights.format import stored_spec
from rlx_jax.weights.views import HostArray, NamedTensors, SourceView, check_index, find_tensor

_INDEX = re.compile(r"\{(\w+)\}")
_GROUP = re.compile(r"\(([\w ]+)\)|(\w+)")


class _Axes(NamedTuple):
    """The axes of a leaf and of a weight as groups of names, the sizes, and the names that number weights."""

    leaf: list[list[str]]
    weight: list[list[str]]
    sizes: Mapping[str, int]
    numbering: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return tuple(math.prod(self.sizes[name] for name in group) for group in self.weight)

    def to_weight(self, values: Any) -> Any:
        """Return the weight of a leaf from which the axes that number weights are removed."""
        names = [name for group in self.leaf for name in group if name not in self.numbering]
        order = [names.index(name) for group in self.weight for name in group]
        return values.reshape([self.sizes[name] for name in names]).transpose(order).reshape(self.shape)

    def to_leaf(self, weights: Sequence[Any]) -> Any:
        """Return the leaf of its weights, in the order of the axes that number them."""
        names = [*self.numbering, *(name for group in self.weight for name in group)]
        stack = jnp.stack if any(isinstance(weight, jax.Array) for weight in weights) else np.stack
        order = [names.index(name) for group in self.leaf for name in group]
        shape = [math.prod(self.sizes[name] for name in group) for group in self.leaf]
        return stack(weights).reshape([self.sizes[name] for name in names]).transpose(order).reshape(shape)


@dataclass(frozen=True)
class TreeWeight:
    r"""How a checkpoint stores a leaf of a tree.

    Args:
        key: the checkpoint key. `\1` stands for a group of the regular expression of the path, and `{layer}` for the
            position on the axis `layer` of the leaf, if it holds the weights of several layers.
        pattern: the axes of the leaf and of the weight, as in einops: `"in heads dim -> (heads dim) in"`. Axes in
            braces in the key are missing on the right. By default the axes are the same.
        sizes: sizes of axes that the shape of the leaf does not determine.
        scale: factor from the leaf to the weight.
    """

    key: str
    pattern: str = ""
    sizes: Mapping[str, int] = field(default_factory=dict)
    scale: float = 1.0

    def axes(self, shape: Sequence[int]) -> _Axes:
        """Return the axes of a leaf of this shape.

        Raises:
            WeightError: the pattern is malformed. WeightShapeError: the shape does not fit it.
        """
        where = f"names: pattern {quote(self.pattern)} of {quote(self.key)}"
        if not isinstance(self.scale, Real) or not math.isfinite(self.scale) or self.scale == 0:
            raise WeightError(f"{where}: expected a finite scale other than 0, got {shown(self.scale)}")
        sides = self.pattern.split("->") if self.pattern else [" ".join(f"axis{i}" for i in range(len(shape)))] * 2
        if len(sides) != 2 or any(_GROUP.sub("", side).strip() for side in sides):
            raise WeightError(f"{where}: expected axes, '->' and axes, such as 'in heads dim -> (heads dim) in'")
        leaf, weight = ([(group or name).split() for group, name in _GROUP.findall(side)] for side in sides)
        numbering = tuple(dict.fromkeys(_INDEX.findall(self.key)))
        names = [name for group in leaf for name in group]
        on_right = [*numbering, *(name for group in weight for name in group)]
        if sorted(names) != sorted(on_right) or len({*names}) < len(names) or any([n] not in leaf for n in numbering):
            raise WeightError(
                f"{where}: expected every axis once on both sides, except those in braces in the key, which stand alone"
            )
        if not isinstance(self.sizes, Mapping) or not all(
            name in names and isinstance(size, int | np.integer) and size > 0 for name, size in self.sizes.items()
        ):
            raise WeightError(f"{where}: expected the sizes of its axes, positive integers, got {shown(self.sizes)}")
        sizes = dict(self.sizes)
        for group, size in zip(leaf, shape, strict=False):
            others = math.prod(sizes.get(name, 1) for name in group)
            missing = [name for name in group if name not in sizes]
            sizes |= {missing[0]: size // max(others, 1)} if len(missing) == 1 else {}
        if [math.prod(sizes.get(name, -1) for name in group) for group in leaf] != list(shape):
            raise WeightShapeError(f"{where}: the leaf has shape {list(shape)}, and sizes are {dict(self.sizes)}")
        return _Axes(leaf, weight, sizes, numbering)


# For paths that match a regular expression in full: the checkpoint key, or how the checkpoint stores the leaf, or None
# to leave the leaf out. The first expression that matches counts.
Names = Mapping[str, str | TreeWeight | None]


class _Entry(NamedTuple):
    """A weight in a leaf: the path, how it is stored, the axes, and its position on those that number weights."""

    path: str
    rule: TreeWeight
    axes: _Axes
    at: tuple[int, ...]


class TreeSource(NamedTensors[_Entry], SourceView):
    """The weights of `source`, whose keys are paths, under checkpoint keys. `to_tree` is the inverse.

    Args:
        source: the leaves by path.
        rules: how each leaf is stored; see `match_names`.
        unflatten: returns the tree with these leaves by path, and its others as they are.

    Raises:
        DuplicateWeightError: two leaves are the same weight. WeightError, WeightShapeError: as `TreeWeight.axes`.
        UnsupportedError: a leaf is packed.
    """

    def __init__(
        self, source: WeightSource, rules: Mapping[str, TreeWeight], unflatten: Callable[[Mapping[str, Any]], Any]
    ) -> None:
        super().__init__(source)
        self._unflatten, self._label = unflatten, "the tree of parameters"
        self._tensors: dict[str, _Entry] = {}
        for path, rule in rules.items():
            if isinstance(spec := source.spec(path), PackedSpec):
                raise UnsupportedError(f"names: leaf {quote(path)} is packed ({spec.scheme}); it is not renamed")
            axes = rule.axes(spec.shape)
            for at in np.ndindex(*(axes.sizes[name] for name in axes.numbering)):
                position = dict(zip(axes.numbering, map(str, at), strict=True))
                key = _INDEX.sub(partial(_position, position), rule.key)
                if key in self._tensors:
                    other = self._tensors[key].path
                    raise DuplicateWeightError(
                        f"names: leaves {quote(other)} and {quote(path)} are the same weight {quote(key)}"
                    )
                self._tensors[key] = _Entry(path, rule, axes, at)

    def where(self, key: str) -> str:
        entry = self._find(key)
        return f"{self.source.where(entry.path)}: {entry.path}"

    def spec(self, key: str) -> WeightSpec:
        entry = self._find(key)
        return stored_spec(entry.axes.shape, self.source.spec(entry.path).dtype)

    def read(self, key: str, index: tuple[slice, ...] | None = None) -> HostArray:
        """Return a weight or a part of it. Only the weight's part of a leaf is read."""
        path, rule, axes, at = self._find(key)
        slices, position = check_index(index, axes.shape, key), dict(zip(axes.numbering, at, strict=True))
        starts = [position.get(group[0]) for group in axes.leaf]
        leaf = self.source.read(path, tuple(slice(None) if i is None else slice(i, i + 1) for i in starts))
        values: HostArray = _scaled(axes.to_weight(leaf), rule.scale)
        return values[slices]

    def to_tree(self, weights: Mapping[str, Any]) -> Any:
        """Return weights by checkpoint key, such as `model.weights()`, in the structure of the tree.

        The tree's values are used for leaves that were left out. Arrays of JAX remain such, also traced ones.

        Raises:
            MissingWeightError: a weight is missing. WeightShapeError: one has another shape.
        """
        parts: dict[str, list[Any]] = {}
        for key, entry in self._tensors.items():
            value = find_tensor(weights, key, "the weights")
            if tuple(value.shape) != entry.axes.shape:
                raise WeightShapeError(
                    f"weight {quote(key)}: expected shape {list(entry.axes.shape)}, got {list(value.shape)}"
                )
            parts.setdefault(entry.path, []).append(_scaled(value, 1 / entry.rule.scale))
        entries = {entry.path: entry for entry in self._tensors.values()}
        return self._unflatten({path: entries[path].axes.to_leaf(values) for path, values in parts.items()})


def _position(position: Mapping[str, str], match: re.Match[str]) -> str:
    """Return the position on the axis in braces."""
    return position[match[1]]


def _scaled(values: Any, scale: float) -> Any:
    """Return values times a factor, in their dtype."""
    return values if scale == 1 else (values * scale).astype(values.dtype)


def match_names(paths: Iterable[str], names: Names) -> dict[str, TreeWeight]:
    """Return how the leaf at each path is stored; leaves that are left out are missing.

    Raises:
        WeightError: `names` is malformed, a path matches nothing, or an expression matches no path.
    """
    if not isinstance(names, Mapping) or not all(isinstance(v, str | TreeWeight | None) for v in names.values()):
        raise WeightError(f"names: expected regular expressions with a key, a TreeWeight or None, got {shown(names)}")
    rules: dict[str, TreeWeight] = {}
    used, unmatched, name = set[str](), list[str](), ""
    try:
        patterns = [(name := pattern, re.compile(pattern)) for pattern in names]
        for path in paths:
            match = next((match for _, pattern in patterns if (match := pattern.fullmatch(path))), None)
            if match is None:
                unmatched.append(path)
                continue
            used.add(name := match.re.pattern)
            if (value := names[name]) is not None:
                rule = value if isinstance(value, TreeWeight) else TreeWeight(value)
                rules[path] = replace(rule, key=match.expand(rule.key))
    except (re.error, TypeError, IndexError) as cause:
        raise WeightError(f"names: {shown(name)}: {cause}") from cause
    if unmatched:
        raise WeightError(f"names: no expression matches {listing(unmatched, 8)}; map to None what is to be left out")
    if unused := [pattern for pattern in names if pattern not in used]:
        raise WeightError(f"names: {listing(unused)} matches no path; paths are {listing(paths, 4)}")
    return rules


def flatten_tree(tree: Any) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], Any]]:
    """Return the leaves of a pytree by dotted path, and a function that returns the tree with other leaves by path.

    The variables of flax.nnx count as leaves: their paths do not end in `value`.

    Raises:
        WeightError: two leaves have the same path.
    """
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    unflatten = partial(jax.tree_util.tree_unflatten, structure)
    leaves: dict[str, Any] = {}
    for path, leaf in pairs:
        is_variable = path and isinstance(path[-1], jax.tree_util.GetAttrKey) and path[-1].name == "value"
        name = jax.tree_util.keystr(path[:-1] if is_variable else path, simple=True, separator=".")
        if name in leaves:
            raise WeightError(f"weights: two leaves of the tree have the path {quote(name)}")
        leaves[name] = leaf
    return leaves, lambda new: unflatten([new.get(name, leaf) for name, leaf in leaves.items()])
