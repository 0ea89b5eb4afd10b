"""Search for the profile by which a model runs fastest on this machine, among those that compute the same numbers."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.encode.encoder import Encoder
from rlx_jax.errors import NumericsError, RlxError, RlxWarning, UnsupportedError, first_line
from rlx_jax.generate.causal import CausalLM
from rlx_jax.profiles import CompileProfile
from rlx_jax.profiles.profile import field_changes
from rlx_jax.runtime.inputs import check_integer

# A profile is kept if it takes at most this part of the time of the fastest one so far, and less time than it in three
# of four pairs of runs: a median of few runs alone often shows a gain that is the machine's noise.
KEPT_RATIO = 0.98
# Runs at the end are this many times as many, as each setting that noise got kept counts again there.
FINAL_RUNS = 3
# The error of a profile, in units of the largest output, may be this many times the error of the first one, or this.
ERROR_FACTOR, LEAST_ERROR = 1.5, 1e-5
# Tokens of the outputs that are compared.
COMPARED_TOKENS = 64

# The settings that are tried, in this order, each with its values; `{}` is the platform.
SETTINGS: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("precision.compute", ("bf16", "f32")),
    ("layers.roll", ("unroll", "scan")),
    ("attention.implementation", ("xla", "cudnn")),
    ("backend.{}.merge", (True, False)),
    ("backend.{}.weight_layout", ("out_in", "in_out")),
    ("backend.{}.products", ("row", "xla")),
    ("backend.{}.experts", ("dense", "gathered", "blocked", "looped", "ragged")),
    ("backend.{}.kernels", ("off",)),
    ("backend.{}.steps_per_dispatch", (8, 32)),
    ("backend.{}.stop_early", (True, False)),
)
# Options of XLA that are tried, by platform.
XLA_OPTIONS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "cpu": ({"xla_cpu_prefer_vector_width": 512}, {"xla_llvm_disable_expensive_passes": True}),
    "cuda": ({"xla_gpu_exhaustive_tiling_search": True}, {"xla_gpu_enable_triton_gemm": False}),
}


@dataclass(frozen=True)
class Workload:
    """What is timed: a call of `generate` for `batch` prompts, or of `embed` for so many texts.

    Attributes:
        batch, prompt_tokens, new_tokens: rows, tokens of each, and new tokens of each; the last only of a `CausalLM`.
        runs: calls of each profile, in turn with the fastest one so far.
    """

    batch: int = 1
    prompt_tokens: int = 128
    new_tokens: int = 32
    runs: int = 5

    def __post_init__(self) -> None:
        for name in ("batch", "prompt_tokens", "new_tokens", "runs"):
            check_integer(name, getattr(self, name), 1)

    def ids(self, model: Any) -> list[list[int]]:
        """Return random token ids `[batch, prompt_tokens]`, the same in every call."""
        rng = np.random.default_rng(0)
        return rng.integers(0, model.vocab_size, (self.batch, self.prompt_tokens)).tolist()  # type: ignore[no-any-return]

    def run(self, model: Any) -> None:
        """Run the model once."""
        if isinstance(model, Encoder):
            model.embed(self.ids(model))
        else:
            model.generate(self.ids(model), max_new_tokens=self.new_tokens)

    def outputs(self, model: Any) -> np.ndarray:
        """Return the outputs that profiles are compared by: embeddings, or logits of a prompt and of one step more."""
        ids = [row[:COMPARED_TOKENS] for row in self.ids(model)]
        if isinstance(model, Encoder):
            return np.asarray(model.embed(ids), np.float32)
        tokens = np.asarray(ids, np.int32)
        prompt, state = model.prefill(tokens, max_len=tokens.shape[1] + 1)
        step, _ = model.extend(state, tokens[:, :1])
        return np.concatenate([np.asarray(jax.device_get(x), np.float32) for x in (prompt, step)], axis=1)

    def ratios(self, model: Any, other: Any, runs: int) -> list[float]:
        """Return the times of a model as parts of those of another, in ascending order: pairs of calls, of which either
        model is first in turn, after one call each."""
        self.run(other)
        self.run(model)
        order = ("other", other), ("model", model)
        pairs = [{name: self.seconds(timed) for name, timed in order[:: (-1) ** i]} for i in range(runs)]
        return sorted(pair["model"] / pair["other"] for pair in pairs)

    def seconds(self, model: Any) -> float:
        """Return the time of one run in seconds."""
        start = time.perf_counter()
        self.run(model)
        return time.perf_counter() - start


def is_faster(ratios: Sequence[float]) -> bool:
    """Return whether times as parts of others, in ascending order, show a gain that is more than noise."""
    return statistics.median(ratios) <= KEPT_RATIO and ratios[(3 * len(ratios) - 1) // 4] < 1


@dataclass(frozen=True)
class Trial:
    """A profile that was tried.

    Attributes:
        change: what differs from the fastest profile so far.
        ratio: its time as a part of that profile's; None if it was not timed.
        error: its largest error in units of the largest output; None if it was not compared.
        kept: whether it is the fastest from then on.
        reason: why it was not timed, or not kept.
    """

    change: str
    ratio: float | None = None
    error: float | None = None
    kept: bool = False
    reason: str = ""

    def __str__(self) -> str:
        figures = [] if self.ratio is None else [f"{self.ratio:.3f} x the time"]
        figures += [] if self.error is None else [f"error {self.error:.1e}"]
        return f"{self.change}: {', '.join([*figures, self.reason or 'kept'])}"


@dataclass(frozen=True)
class Tuning:
    """The result of a search.

    Attributes:
        base, profile: the first and the fastest profile; equal if none was faster.
        ratio: the time of the fastest one as a part of the first one's, measured again at the end; 1 if they are equal.
        trials: all profiles that were tried.
        notes: the machine and the workload, as lines.
    """

    base: CompileProfile
    profile: CompileProfile
    ratio: float
    trials: tuple[Trial, ...]
    notes: tuple[str, ...]

    def to_toml(self) -> str:
        """Return the profile as TOML with the settings that differ from the defaults, and the figures as comments."""
        result = f"{self.ratio:.3f} x the time of {self.base.name!r}" if self.trials else "nothing was tried"
        lines = [f"# {line}" for line in (*self.notes, result, *map(str, self.trials))]
        return "\n".join([*lines, self.profile.replace(name="tuned").to_toml(defaults=False)])


def tune(
    open_model: Callable[[CompileProfile], Any], base: CompileProfile, workload: Workload, *,
    tolerance: float | None = None, on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Tuning:  # fmt: skip
    """Try settings one after the other, and keep those by which the model is faster and computes the same numbers.

    Each profile runs in turn with the fastest one so far, and at the end the result runs in turn with the first one:
    where that shows no gain, the first profile is the result. Up to three models are in memory at a time.

    Args:
        open_model: returns a `CausalLM` or an `Encoder` for a profile.
        base: the profile to begin with.
        workload: what is timed.
        tolerance: the largest error of outputs, in units of the largest one, against f32 with `matmul = "highest"`. By
            default 1.5 times the error of `base`, and at least 1e-5.
        on_trial: called with each trial as it ends.

    Raises:
        UnsupportedError: the model neither generates nor embeds. NumericsError: `base` has a larger error than
            `tolerance`. SequenceLengthError: the workload does not fit the model.
    """
    model = _open(open_model, base)
    if not isinstance(model, CausalLM | Encoder):
        raise UnsupportedError(f"tune: a {type(model).__name__}: profiles are compared by generate, or by embed")
    workload.run(model)  # what the model cannot do at all is an error here, not a reason against each profile
    exact_profile = base.replace(precision={"compute": "f32", "matmul": "highest"})
    exact = workload.outputs(_open(open_model, exact_profile))

    def error_of(candidate: Any) -> float:
        return float(np.abs(workload.outputs(candidate) - exact).max() / np.abs(exact).max())

    error = error_of(model)
    limit = max(ERROR_FACTOR * error, LEAST_ERROR) if tolerance is None else tolerance
    if not error <= limit:
        raise NumericsError(f"tune: the first profile has an error of {error:.1e}, over the tolerance of {limit:.1e}")
    fastest: Any = model
    profile, trials = base, list[Trial]()
    for change in changes_for(model.model.settings.target):
        new_profile = profile.replace(**change)
        if new_profile != profile:
            text = ", ".join(f"{c.name} = {c.theirs}" for c in field_changes(profile, new_profile))
            trial, candidate = _try(text, partial(_open, open_model, new_profile), fastest, workload, error_of, limit)
            trials.append(trial)
            on_trial(trial)
            if trial.kept:
                fastest, profile = candidate, new_profile
    ratios = [1.0] if profile == base else workload.ratios(fastest, model, FINAL_RUNS * workload.runs)
    if not is_faster(ratios):
        profile, ratios = base, [1.0]
    return Tuning(base, profile, statistics.median(ratios), tuple(trials), tuple(_notes(model, workload, error, limit)))


def _try(
    text: str, make: Callable[[], Any], fastest: Any, workload: Workload, error_of: Callable[[Any], float], limit: float
) -> tuple[Trial, Any]:
    """Return the trial of a profile against the fastest model so far, and its model; None if it could not be made."""
    trial, candidate = Trial(text), None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".* has no effect", category=RlxWarning)
            candidate = make()
        error = error_of(candidate)
        trial = replace(trial, error=error)
        if not error <= limit:  # also if it is NaN
            return replace(trial, reason=f"its error is over {limit:.1e}"), candidate
        ratios = workload.ratios(candidate, fastest, workload.runs)
    except (RlxError, RlxWarning) as cause:  # it does not apply to this model or device
        return replace(trial, reason=first_line(cause)), candidate
    trial = replace(trial, ratio=statistics.median(ratios), kept=is_faster(ratios))
    return replace(trial, reason="" if trial.kept else "not faster"), candidate


def changes_for(target: str) -> Iterator[dict[str, Any]]:
    """Yield the settings to try on a platform, as arguments of `CompileProfile.replace`."""
    for path, values in SETTINGS:
        for value in values:
            yield _nested(path.format(target).split("."), value)
    for options in XLA_OPTIONS.get(target, ()):
        yield _nested(["backend", target, "compiler_options"], dict(options))


def _nested(keys: Sequence[str], value: Any) -> dict[str, Any]:
    """Return a value in nested dicts."""
    return {keys[0]: _nested(keys[1:], value) if len(keys) > 1 else value}


def _open(open_model: Callable[[CompileProfile], Any], profile: CompileProfile) -> Any:
    """Return the model of a profile; generation ends no row early, so that every run has the same tokens."""
    model = open_model(profile)
    if isinstance(model, CausalLM):
        model.eos_ids = ()
    return model


def _notes(model: Any, workload: Workload, error: float, limit: float) -> Iterator[str]:
    """Yield what figures depend on, as lines."""
    yield f"{model.model.name} on {model.model.settings.device}, jax {jax.__version__}; rlx-jax tune"
    new = "" if isinstance(model, Encoder) else f", {workload.new_tokens} new ones"
    sizes = f"{workload.batch} x {workload.prompt_tokens} tokens{new}"
    yield f"{sizes}; median of {workload.runs} runs in turn; error at first {error:.1e}, at most {limit:.1e}"
