"""The methods for convolution, pooling, resizing and image norms. Channels come first: `[N, C, spatial …]`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rlx_jax.errors import GraphError, ShapeError, check_integer, shown
from rlx_jax.ir.ops.conv import Conv, ConvTranspose, Pool
from rlx_jax.ir.ops.reduce import Standardize
from rlx_jax.ir.ops.shape import AxisOf, Reshape
from rlx_jax.ir.ops.vision import GridSample, Resize
from rlx_jax.ir.types import as_dim, is_static
from rlx_jax.trace.checks import bind_kind, items_of
from rlx_jax.trace.products import Products
from rlx_jax.trace.writer import Axes, Shape, V, is_integer

# One number for all spatial axes, or one for each.
Counts = int | Sequence[int]
# "VALID", "SAME" or "SAME_LOWER"; one number, one for each spatial axis, or (before, after) for each.
Padding = str | int | Sequence[int] | Sequence[tuple[int, int]]


class Images(Products[V]):
    """Convolution, pooling, resizing and norms over channels."""

    def _per_axis(self, name: str, counts: Counts, rank: int) -> tuple[int, ...]:
        """Return an int for each spatial axis, from one for all or from a list."""
        values = items_of(counts, f"{self.path}: {name}", "ints") if isinstance(counts, Iterable) else (counts,) * rank
        if not all(map(is_integer, values)):
            raise ShapeError(f"{self.path}: {name} is an int, or one for each spatial axis; got {shown(counts)}")
        return tuple(int(c) for c in values)

    def _padding_pairs(self, padding: Padding, rank: int) -> str | tuple[tuple[int, int], ...]:
        """Return padding as its name, or as a pair (before, after) for each spatial axis."""
        if isinstance(padding, str):
            return padding
        if not isinstance(padding, Iterable):
            return tuple((n, n) for n in self._per_axis("padding", padding, rank))
        pairs = [tuple(p) if isinstance(p, Iterable) else (p, p) for p in padding]
        if any(len(p) != 2 or not all(map(is_integer, p)) for p in pairs):
            raise ShapeError(f"{self.path}: padding is ints or (before, after) for each axis, got {shown(padding)}")
        return tuple((int(low), int(high)) for low, high in pairs)

    def _channel_weight(self, x: V, weight: V | str) -> V:
        """Return a weight `[C]` reshaped to broadcast with x `[N, C, …]`."""
        value, x_type = self.weight(weight), self.type_of(x)
        if self.type_of(value).rank != 1 or x_type.rank < 2:
            raise ShapeError(f"{self.path}: a weight of channels is [C] for x [N, C, …]; "
                             f"got {self.type_of(value)} and {x_type}")  # fmt: skip
        return self.expand_dims(value, range(1, x_type.rank - 1)) if x_type.rank > 2 else value

    def _affine(self, x: V, gamma: V | str | None, beta: V | str | None) -> V:
        """Return x ⊙ γ + β by channel; γ and β may be None."""
        x = x if gamma is None else self.mul(x, self._channel_weight(x, gamma))
        return x if beta is None else self.add(x, self._channel_weight(x, beta))

    # -- convolution -------------------------------------------------------------------------

    def conv(
        self, x: V, w: V | str, bias: V | str | None = None, *, window_strides: Counts = 1, padding: Padding = "VALID",
        rhs_dilation: Counts = 1, feature_group_count: int = 1,
    ) -> V:  # fmt: skip
        """Return the cross-correlation over 1 to 3 spatial axes: x `[N, C, S…]`, w `[O, C/groups, K…]`, bias `[O]`.

        The arguments are as in `lax.conv_general_dilated`: `rhs_dilation` is the step between entries of the window,
        and with `feature_group_count` C the convolution is depthwise.
        """
        rank = self.type_of(x).rank - 2
        op = Conv(
            self._per_axis("window_strides", window_strides, rank), self._padding_pairs(padding, rank),
            self._per_axis("rhs_dilation", rhs_dilation, rank), feature_group_count,
        )  # fmt: skip
        return self._affine(self.add_node(op, x, self.weight(w)), None, bias)

    conv1d = conv2d = conv3d = conv

    def conv_transpose(
        self, x: V, w: V | str, bias: V | str | None = None, *, strides: Counts = 1,
        padding: int | Sequence[int] | Sequence[tuple[int, int]] = 0, output_padding: Counts = 0,
        rhs_dilation: Counts = 1, feature_group_count: int = 1,
    ) -> V:  # fmt: skip
        """Return the transposed convolution: x `[N, C, S…]`, w `[C, O/groups, K…]`, bias `[O]`.

        The sizes are as in torch and ONNX:
        `S' = (S − 1) · stride − before − after + dilation · (K − 1) + 1 + output_padding`.
        """
        rank = self.type_of(x).rank - 2
        pairs: Any = self._padding_pairs(padding, rank)
        op = ConvTranspose(
            self._per_axis("strides", strides, rank), pairs, self._per_axis("output_padding", output_padding, rank),
            self._per_axis("rhs_dilation", rhs_dilation, rank), feature_group_count,
        )  # fmt: skip
        return self._affine(self.add_node(op, x, self.weight(w)), None, bias)

    # -- pooling -----------------------------------------------------------------------------

    def _pool(
        self, kind: str, x: V, window_dimensions: Counts, *, window_strides: Counts = 1, padding: Padding = "VALID",
        window_dilation: Counts = 1, ceil_mode: bool = False, count_include_pad: bool = False,
    ) -> V:  # fmt: skip
        """Return one kind of pooling over windows of the spatial axes: x `[N, C, S…]`.

        Args:
            ceil_mode: a last window may extend past the end.
            count_include_pad: zeros of the padding count for the mean; only for the kind mean.
        """
        if count_include_pad and kind != "mean":
            raise GraphError(f"{self.path}: {kind}_pool has no count_include_pad; it belongs to the kind mean")
        rank = self.type_of(x).rank - 2
        op = Pool(
            kind, self._per_axis("window_dimensions", window_dimensions, rank),
            self._per_axis("window_strides", window_strides, rank), self._padding_pairs(padding, rank),
            self._per_axis("window_dilation", window_dilation, rank), ceil_mode, count_include_pad,
        )  # fmt: skip
        return self.add_node(op, x)

    max_pool = bind_kind(
        _pool,
        "max",
        "The largest entry of each window: x `[N, C, S…]`. With `ceil_mode` a last window may reach over the end.",
    )
    avg_pool = bind_kind(
        _pool, "mean", "The mean of each window, without the padding, or with its zeros if `count_include_pad`."
    )

    def _spatial_axes(self, x: V) -> tuple[int, ...]:
        """Return the spatial axes of x, of which there must be at least one."""
        rank = self.type_of(x).rank
        if rank < 3:
            raise ShapeError(f"{self.path}: expected [N, C, spatial …], got {self.type_of(x)}")
        return tuple(range(2, rank))

    # -- other sizes -------------------------------------------------------------------------

    def resize(
        self, x: V, shape: Shape | None, method: str = "linear", *, antialias: bool = True,
        scales: Sequence[float] | None = None, coordinates: str = "half_pixel", a: float = -0.5,
        exclude_outside: bool = True, rounding: str = "round_prefer_ceil",
        roi: Sequence[tuple[float, float]] | None = None, extrapolation: float = 0.0,
    ) -> V:  # fmt: skip
        """Return x resized to another shape, as `jax.image.resize`: "nearest", "linear" or "cubic".

        `shape` has the size of every axis. If it is None, sizes are ⌊size · scale⌋ of `scales`, one for each axis. Axes
        that keep their size and have a scale of 1 are not resampled, and may be symbolic.

        The other arguments are ONNX's attributes: `coordinates`, `a` (−¾ in ONNX), `exclude_outside`, `rounding` for
        nearest, `roi` (start and end of each axis), `extrapolation`. torch's modes all have antialias=False: nearest is
        asymmetric with floor, bilinear is half_pixel or align_corners, and bicubic is the same with a = −¾ and
        exclude_outside=False. See `Resize` for the formulas.
        """
        x_type, where = self.type_of(x), f"{self.path}: resize"
        factors = None if scales is None else [float(s) for s in items_of(scales, where, "a scale for each axis")]
        if factors is not None and (len(factors) != x_type.rank or not all(0 < f < 2**31 for f in factors)):
            raise ShapeError(f"{where}: scales are {x_type.rank} numbers over 0, got {shown(scales)}")
        if shape is not None:
            dims = [as_dim(d, where) for d in items_of(shape, where, "a size for each axis")]
        elif factors is not None:
            dims = [
                d if f == 1 else int(d * f) if is_static(d) else d for d, f in zip(x_type.shape, factors, strict=True)
            ]
        else:
            raise ShapeError(f"{where}: a shape, or scales")
        if len(dims) != x_type.rank:
            raise ShapeError(f"{where}: {x_type} has {x_type.rank} axes, got {len(dims)} sizes")
        regions = None if roi is None else [(float(s), float(e)) for s, e in items_of(roi, where, "(start, end) pairs")]
        # Only this mode crops to `roi`, so that an axis of unchanged size may still be resampled.
        reads_all = coordinates != "tf_crop_and_resize"
        axes = [i for i, d in enumerate(dims) if d != x_type.shape[i] or (factors and factors[i] != 1)
                or not (reads_all or regions is None or regions[i] == (0, 1))]  # fmt: skip
        for i in axes:
            if not (is_static(dims[i]) and is_static(x_type.shape[i])):
                raise ShapeError(f"{where}: axis {i} of {x_type} and its new size {dims[i]} must be numbers")
        axis_scales = None if factors is None else tuple(factors[i] for i in axes)
        crop = None if regions is None else tuple(regions[i] for i in axes)
        sizes = tuple(int(dims[i]) for i in axes)
        op = Resize(
            tuple(axes), sizes, method, coordinates, axis_scales, antialias, float(a), exclude_outside, rounding, crop,
            float(extrapolation),
        )  # fmt: skip
        return self.add_node(op, x)

    def resize_nearest_2x(self, x: V) -> V:
        """Return each entry twice along the last two axes: `[N, C, H, W]` → `[N, C, 2H, 2W]`."""
        return self.repeat(self.repeat(x, 2, -2), 2, -1)

    def grid_sample(
        self, x: V, grid: V, method: str = "linear", *, padding: str = "zeros", align_corners: bool = False
    ) -> V:
        """Return x `[N, C, S…]` sampled at `grid` `[N, O…, d]` in −1 … 1, last axis first; see `GridSample`."""
        return self.add_node(GridSample(method, padding, align_corners), x, grid)

    # -- norms -------------------------------------------------------------------------------

    def standardize(self, x: V, axis: Axes = -1, epsilon: float = 1e-5, *, centre: bool = True) -> V:
        """Return `(x − mean)(var + ε)^(−1/2)` over `axis`, in f32; without `centre`, `x (mean x² + ε)^(−1/2)`."""
        return self.add_node(Standardize(self._axes(x, axis), epsilon, centre), x)

    def group_norm(
        self, x: V, groups: int, gamma: V | str | None = None, beta: V | str | None = None, eps: float = 1e-5
    ) -> V:
        """Return `standardize` over each of `groups` groups of channels and all later axes, then ⊙ γ + β by channel.

        x is `[N, C, …]`, γ and β are `[C]`.
        """
        x_type = self.type_of(x)
        channels = x_type.shape[1] if x_type.rank > 1 else 0
        check_integer(f"{self.path}: group_norm: groups", groups, error_class=ShapeError)
        if not is_static(channels) or not channels or channels % groups:
            raise ShapeError(f"{self.path}: group_norm: {groups} groups do not divide the channels of {x_type}")
        later_axes = tuple(AxisOf(i) for i in range(2, x_type.rank))
        split = self.add_node(Reshape((AxisOf(0), groups, channels // groups, *later_axes)), x)
        normalized = self.standardize(split, tuple(range(2, x_type.rank + 1)), eps)
        back = Reshape((AxisOf(0), channels, *(AxisOf(i + 1) for i in range(2, x_type.rank))))
        return self._affine(self.add_node(back, normalized), gamma, beta)

    def instance_norm(self, x: V, gamma: V | str | None = None, beta: V | str | None = None, eps: float = 1e-5) -> V:
        """Return `standardize` over each channel of each image, ⊙ γ + β by channel: x `[N, C, S…]`, γ and β `[C]`."""
        return self._affine(self.standardize(x, self._spatial_axes(x), eps), gamma, beta)

    def batch_norm(
        self, x: V, *, mean: V | str, var: V | str, gamma: V | str | None = None, beta: V | str | None = None,
        eps: float = 1e-5,
    ) -> V:  # fmt: skip
        """Return `(x − mean)(var + ε)^(−1/2) ⊙ γ + β` by channel with given statistics: x `[N, C, …]`, others `[C]`."""
        scale = self.rsqrt(self.add(self._channel_weight(x, var), eps))
        return self._affine(self.mul(self.sub(x, self._channel_weight(x, mean)), scale), gamma, beta)

    def layer_norm2d(self, x: V, gamma: V | str | None = None, beta: V | str | None = None, eps: float = 1e-5) -> V:
        """Return `standardize` over the channels of a pixel, ⊙ γ + β by channel: x `[N, C, H, W]`, γ and β `[C]`."""
        return self._affine(self.standardize(x, 1, eps), gamma, beta)
