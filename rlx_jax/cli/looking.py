"""`rlx-jax inspect`: what a checkpoint is and what it would take, from its headers alone."""

from __future__ import annotations

import argparse
import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax

import rlx_jax as rlx
from rlx_jax.cli.command import Command, Session, add_json, add_model, as_line, table
from rlx_jax.cli.terminal import in_bytes
from rlx_jax.compiler.pipeline import make_lir
from rlx_jax.device import running_device
from rlx_jax.encode.sentence import load_pipeline
from rlx_jax.errors import RequestError, quote
from rlx_jax.io.folder import open_folder
from rlx_jax.ir.packed import stored_bytes
from rlx_jax.ir.types import as_dtype, short_name
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.lowering.inspect.buffers import activation_bytes
from rlx_jax.models.families import Pretrained, bound, family_of
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.opening import open_programs
from rlx_jax.text.opening import check_positions
from rlx_jax.text.requests import whole_number
from rlx_jax.text.tokenizer import load_tokenizer
from rlx_jax.weights.source import open_headers


@dataclass(frozen=True)
class Needs:
    """Bytes that a model takes for a batch of this size and context: parameters as they are stored on the device, what
    is kept between calls (keys and values, rings of windows, recurrent states), and what the larger of its programs
    takes beside them: activations as planned, an estimate."""

    parameters: int
    state: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.parameters + self.state + self.activations


def inspect(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write what a checkpoint is: its config as it is understood, its weights, its tokenizer; with --batch or --context
    also what it takes in memory, and whether the device has that. Reads no weights."""
    folder = open_folder(args.directory, args.revision, progress=session.status)
    pipeline = load_pipeline(folder)
    folder = folder.below(pipeline.transformer) if pipeline else folder
    config_json, family = family_of(folder)
    source = open_headers(folder)
    pretrained = bound(folder, config_json, family, source)
    recipe: Any = pretrained.recipe
    specs = [source.spec(key) for key in source.keys()]
    tokenizer = load_tokenizer(folder)
    rows = {
        "recipe": f"{type(recipe).__name__}, {pretrained.kind}",
        "weights": f"{sum(spec.size for spec in specs):,} in {len(specs)} tensors, "
        f"{in_bytes(sum(map(stored_bytes, specs)))}",
        "dtypes": ", ".join(sorted({short_name(spec.dtype) for spec in specs})),
        "tokenizer": "none" if tokenizer is None else f"{tokenizer.vocab_size:,} tokens",
        "chat templates": ", ".join(tokenizer.chat_templates) if tokenizer and tokenizer.chat_templates else "none",
    }
    config = dict(vars(recipe.config))
    asked = any(given is not None for given in (args.batch, args.context, args.profile, args.dtype))
    needed = needs_rows(pretrained, args) if asked else {}
    session.status.clear()
    if args.json:
        needs = {"needs": needed} if needed else {}
        yield as_line({**rows, **needs, "config": config})
        return
    shown = {
        name: in_bytes(value) if isinstance(value, int) and not isinstance(value, bool) and "bytes" in name else value
        for name, value in needed.items()
    }
    yield from table({**rows, **config, **shown})


# -- what it takes -----------------------------------------------------------------------------


def needs_rows(pretrained: Pretrained, args: argparse.Namespace) -> dict[str, Any]:
    """What is said of memory, by name.

    Raises:
        RequestError: a model whose inputs are no tokens. SequenceLengthError: over its positions.
    """
    if pretrained.kind not in ("causal", "encoder"):
        raise RequestError(
            f"{quote(args.directory)} is of kind {pretrained.kind}: --batch and --context are for models of tokens"
        )
    batch = whole_number("--batch", 1 if args.batch is None else args.batch, 1)
    longest = pretrained.max_positions or 2048
    context = whole_number("--context", min(2048, longest) if args.context is None else args.context, 1)
    check_positions(context, pretrained.max_positions, "--context")
    model = without_weights(pretrained, args)
    found, memory = needs_of(model, batch, context), running_device().memory
    rows: dict[str, Any] = {
        "batch": batch, "context": context, "parameter bytes": found.parameters, "state bytes": found.state,
        "activation bytes, about": found.activations, "bytes in all, about": found.total,
    }  # fmt: skip
    if memory is not None:
        rows["bytes of the device"] = memory
        rows["fits"] = "yes" if found.total <= memory else "no" + fitting(model, batch, context, memory)
    return rows


def without_weights(pretrained: Pretrained, args: argparse.Namespace) -> CompiledModel:
    """The model as `rlx_jax.load` would open it, but for its weights: shapes are all that is read."""
    profile = rlx.CompileProfile.of(args.profile) if args.profile is not None else None
    if args.dtype is not None:
        profile = (profile or rlx.CompileProfile()).replace(
            precision={"compute": args.dtype if args.dtype == "auto" else short_name(as_dtype(args.dtype))}
        )
    flow = pretrained.recipe.assemble()
    causal = pretrained.kind == "causal"
    serves = ("forward", *CACHED_PROGRAMS) if causal else ("forward",)
    programs = open_programs(
        [flow], None, profile, True, merge=True, max_positions=pretrained.max_positions, serves=serves
    )
    return CompiledModel(programs, flow.name, "prefill" if causal else "forward")


def needs_of(model: CompiledModel, batch: int, context: int) -> Needs:
    """What a batch of prompts as long as the context takes; nothing is compiled."""
    state = 0
    if model.program == "prefill":
        kept = jax.eval_shape(functools.partial(model.init_state, batch, context))
        state = sum(math.prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(kept))
    sizes = {"batch": batch, "seq": context, **({"context": context} if model.program == "prefill" else {})}
    lir = make_lir(model.template(last_only=model.program == "prefill"), sizes, model.settings)
    parameters = sum(t.nbytes for t in model.programs.layout.types().values())
    return Needs(parameters, state, activation_bytes(lir.graph, lir.plan.donate_state, lir.plan.scan))


def fitting(model: CompiledModel, batch: int, context: int, memory: int) -> str:
    """The longest context, by halves, that would fit, or else the largest batch."""
    for name, halves in (
        ("context", [(batch, context >> i) for i in range(1, 30) if context >> i]),
        ("batch", [(batch >> i, context) for i in range(1, 30) if batch >> i]),
    ):
        for rows, tokens in halves:
            if needs_of(model, rows, tokens).total <= memory:
                return f"; a {name} of {tokens if name == 'context' else rows:,} would"
    return ""


def options(parser: argparse.ArgumentParser) -> None:
    """Of `inspect`."""
    add = parser.add_argument
    add("--batch", type=int, metavar="N", help="say what so many rows take in memory (1)")
    add("--context", type=int, metavar="N", help="of so many tokens each (2048, or as many as the model has positions)")
    add("--profile", metavar="NAME|FILE", help="as it would be compiled by this profile")
    add("--dtype", metavar="DTYPE", help="as it would be computed in bf16, f32 ...")
    add("--device", metavar="DEVICE", help="for this device: cpu, gpu, tpu, gpu:1")
    add_json(parser)
    add_model(parser)


INSPECT = Command("inspect", "what a checkpoint is, and what it takes", options, inspect)
