"""`rlx-jax inspect`: what a checkpoint is and what it would take, from its headers alone."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from rlx_jax.cli.command import Command, Session, add_json, add_model, as_line, table
from rlx_jax.cli.terminal import in_bytes
from rlx_jax.compiler.pipeline import make_lir
from rlx_jax.device import running_device
from rlx_jax.encode.checkpoint import Checkpoint
from rlx_jax.errors import RequestError, quote
from rlx_jax.generate.load import computing_in
from rlx_jax.generate.request_plan import cache_sizes
from rlx_jax.io.folder import open_folder
from rlx_jax.ir.packed import stored_bytes
from rlx_jax.ir.types import short_name
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.lowering.inspect.buffers import activation_bytes
from rlx_jax.models.families import Pretrained
from rlx_jax.runtime.inputs import whole_number
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.model_setup import open_programs
from rlx_jax.text.token_model import check_positions
from rlx_jax.weights.format import OpenOptions
from rlx_jax.weights.mxfp4 import unpacked


def inspect(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write what a checkpoint is: its config as it is understood, its weights, its tokenizer; with --batch or --context
    also what it takes in memory, and whether the device has that. Reads no weights."""
    root = open_folder(args.directory, args.revision, progress=session.status)
    checkpoint = Checkpoint(root, ignore_fields=args.ignore_field, headers=True)
    pretrained, source, tokenizer = checkpoint.pretrained, checkpoint.weights, checkpoint.tokenizer
    recipe: Any = pretrained.recipe
    specs, numbers = [source.spec(key) for key in source.keys()], unpacked(source)
    found: dict[str, Any] = {
        "recipe": type(recipe).__name__,
        "kind": pretrained.kind,
        "parameters": sum(numbers.spec(key).size for key in numbers.keys()),
        "tensors": len(specs),
        "weight_bytes": sum(map(stored_bytes, specs)),
        "dtypes": sorted({short_name(spec.dtype) for spec in specs}),
        "tokenizer_tokens": None if tokenizer is None else tokenizer.vocab_size,
        "chat_templates": list(tokenizer.chat_templates) if tokenizer else [],
        "config": dict(vars(recipe.config)),
        "needs": None,
    }
    if any(given is not None for given in (args.batch, args.context, args.profile, args.dtype)):
        found["needs"] = needs_of_batch(pretrained, args)
    session.status.clear()
    yield from [as_line(found)] if args.json else table(to_read(found))


def to_read(found: dict[str, Any]) -> dict[str, Any]:
    """What `inspect --json` writes, in words."""
    tokens, size = found["tokenizer_tokens"], in_bytes(found["weight_bytes"])
    rows = {
        "recipe": f"{found['recipe']}, {found['kind']}",
        "weights": f"{found['parameters']:,} in {found['tensors']} tensors, {size}",
        "dtypes": ", ".join(found["dtypes"]),
        "tokenizer": "none" if tokens is None else f"{tokens:,} tokens",
        "chat templates": ", ".join(found["chat_templates"]) or "none",
        **found["config"],
    }
    needs = found["needs"]
    if needs is None:
        return rows
    longest, most = needs["context_that_fits"], needs["batch_that_fits"]
    other = f"a context of {longest:,}" if longest else f"a batch of {most:,}" if most else ""
    rows |= {"batch": needs["batch"], "context": needs["context"]}
    rows |= {
        "parameter bytes": in_bytes(needs["parameter_bytes"]), "state bytes": in_bytes(needs["state_bytes"]),
        "activation bytes, about": in_bytes(needs["activation_bytes"]),
        "bytes in all, about": in_bytes(needs["total_bytes"]),
    }  # fmt: skip
    if needs["fits"] is not None:
        rows["bytes of the device"] = in_bytes(needs["device_bytes"])
        rows["fits"] = "yes" if needs["fits"] else f"no; {other} would" if other else "no"
    return rows


# -- what it takes -----------------------------------------------------------------------------


def needs_of_batch(pretrained: Pretrained, args: argparse.Namespace) -> dict[str, Any]:
    """What `--batch` rows of `--context` tokens take, by name; whether they fit is None where the device does not say.

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
    needs, memory = needs_of(model, batch, context, pretrained.max_positions), running_device().memory
    total = sum(needs.values())
    fits = None if memory is None else total <= memory
    would = {} if fits or memory is None else fitting(model, batch, context, pretrained.max_positions, memory)
    return {
        "batch": batch, "context": context, **needs, "total_bytes": total, "device_bytes": memory, "fits": fits,
        "context_that_fits": would.get("context"), "batch_that_fits": would.get("batch"),
    }  # fmt: skip


def without_weights(pretrained: Pretrained, args: argparse.Namespace) -> CompiledModel:
    """The model as `rlx_jax.load` would open it, but for its weights: shapes are all that is read."""
    profile = args.profile if args.dtype is None else computing_in(args.dtype, args.profile)
    flow = pretrained.recipe.assemble()
    causal = pretrained.kind == "causal"
    serves = ("forward", *CACHED_PROGRAMS) if causal else ("forward",)
    programs = open_programs(
        [flow], None, OpenOptions(profile=profile), merge=True, max_positions=pretrained.max_positions, serves=serves
    )
    return CompiledModel(programs, flow.name, "prefill" if causal else "forward")


def needs_of(model: CompiledModel, batch: int, context: int, max_positions: int | None) -> dict[str, int]:
    """Bytes that a batch of prompts as long as the context takes, in the rows and slots that `generate` makes for it:
    parameters as they are stored on the device, what is kept between calls (keys and values, rings of windows,
    recurrent states), and what the larger of the programs takes beside them: activations as planned, an estimate.
    Nothing is compiled."""
    cached, buckets, state = model.program == "prefill", model.settings.buckets, 0
    template = model.template(last_only=cached)
    sizes = {"batch": buckets.rows(batch), "seq": context}
    if cached:
        sizes["batch"], sizes["context"] = cache_sizes(buckets, batch, context, max_positions)
        held = {**model.flow._binding, **sizes, **model.programs.ring_sizes(template, sizes["context"])}
        state = sum(kept.bind(held).nbytes for kept in template.state.values())
    lir = make_lir(template, sizes, model.settings)
    parameters = sum(t.nbytes for t in model.programs.layout.types().values())
    activations = activation_bytes(lir.graph, lir.plan.donate_state, lir.plan.scan)
    return {"parameter_bytes": parameters, "state_bytes": state, "activation_bytes": activations}


def fitting(model: CompiledModel, batch: int, context: int, longest: int | None, memory: int) -> dict[str, int]:
    """The longest context, by halves, that would fit, or else the largest batch; by name, empty if neither does."""
    for name, halves in (
        ("context", [(batch, context >> i) for i in range(1, 30) if context >> i]),
        ("batch", [(batch >> i, context) for i in range(1, 30) if batch >> i]),
    ):
        for rows, tokens in halves:
            if sum(needs_of(model, rows, tokens, longest).values()) <= memory:
                return {name: tokens if name == "context" else rows}
    return {}


def options(parser: argparse.ArgumentParser) -> None:
    """Of `inspect`."""
    add = parser.add_argument
    add("--batch", type=int, metavar="N", help="say what so many rows take in memory (1)")
    add("--context", type=int, metavar="N", help="of so many tokens each (2048, or as many as the model has positions)")
    add("--profile", metavar="NAME|FILE", help="as it would be compiled by this profile")
    add("--dtype", metavar="DTYPE", help="as it would be computed in bf16, f32 ...")
    add("--device", metavar="DEVICE", help="for this device: cpu, gpu, tpu, gpu:1")


INSPECT = Command("inspect", "what a checkpoint is, and what it takes", (options, add_json, add_model), inspect)
