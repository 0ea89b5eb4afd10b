"""The programs and settings of the artifacts of encoders, models with a head and rerankers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlx_jax.encode.padded_rows import read_mask_names
from rlx_jax.errors import UnsupportedError
from rlx_jax.ir.serial import encode
from rlx_jax.lowering.hir.row_layouts import MASK
from rlx_jax.runtime.export_model import ArtifactPlan
from rlx_jax.runtime.program_key import ProgramKey
from rlx_jax.text.request_checks import TYPES
from rlx_jax.text.tokenizer import tokenizer_files


def encoder_plan(encoder: Any) -> ArtifactPlan:
    """Return the programs that `hidden_states` and `embed` run: `forward`, and rows that are packed or padded."""
    model, masks = encoder.model, read_mask_names(encoder.model)
    if encoder.pipeline.layers or encoder.pipeline.token_weight or encoder.pipeline.token_layers:
        raise UnsupportedError(f"export: {model.name}: artifacts have no layers after pooling or for tokens")
    types = frozenset({TYPES} & {d.name for d in model.flow._inputs})
    packed, padded = dict.fromkeys((masks, masks | types)), dict.fromkeys((frozenset({MASK}), types | {MASK}))
    derivations = (*(("packed", inputs) for inputs in packed), *(("padded", inputs) for inputs in padded))
    forwards = dict.fromkeys((frozenset[str](), types))
    if encoder.own_lengths or encoder.padding is not None:  # rows that run `forward` at their own lengths
        forwards |= packed
    keys = [ProgramKey(model.name, "forward", inputs) for inputs in forwards]
    for program, inputs in derivations:
        if not model.programs.derivation_error(model.name, program, inputs):
            outputs = model.output_names[:1] if program == "packed" else None
            keys.append(model.as_program(program).key(inputs, outputs))
    interfaces = (ProgramKey(model.name, "padded"),) if any(key.program == "padded" for key in keys) else ()
    pipeline = None if encoder._has_pooled_output else encode(encoder.pipeline)
    settings = {"pipeline": pipeline, "padding": encoder.padding and list(encoder.padding)}
    return ArtifactPlan("Encoder", tuple(keys), interfaces, settings, tokenizer_files(encoder.tokenizer))


def head_plan(model: Any) -> ArtifactPlan:
    """Return the plan of a model with a head: of its encoder, and its head."""
    plan = encoder_plan(model.encoder)
    head, max_seq_length = encode(replace(model.head, layers=())), model.encoder.pipeline.max_seq_length
    settings = {"head": head, "padding": plan.settings["padding"], "max_seq_length": max_seq_length}
    return replace(plan, kind=type(model).__name__, settings=settings)


def reranker_plan(reranker: Any) -> ArtifactPlan:
    """Return the plan of a reranker: of its classifier, and the activation."""
    if reranker.template is not None or any(reranker.prompts.prompts.values()):
        raise UnsupportedError(f"export: {reranker.model.name} has prompts or a template, which artifacts do not have")
    plan = head_plan(reranker.classifier)
    return replace(plan, kind="Reranker", settings={**plan.settings, "activation": reranker.activation})
