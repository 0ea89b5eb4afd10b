"""Load a tiny random checkpoint of every model type of the installed transformers, and compare its logits.

    python benchmarks/census.py                     every type of five tasks: counts, a table, and census.json
    python benchmarks/census.py --types bert albert of these model types
    python benchmarks/census.py --tasks MaskedLM    of one task
    python benchmarks/census.py --record FILE       also write the counts and the types that load, for docs/models.md

For each `AutoModelFor…` class of a task and each model type that it has, the script writes a config of small sizes and
loads it with `rlx_jax.load`. A type that is refused without its weights is refused with them too. For all others
transformers makes a checkpoint with random weights, whose logits are compared: of rows of different lengths in one
batch here, of each row alone there. Outcomes:

- compared: all logits within `TOLERANCE` of the largest one
- headless: loads without the head of the task, with a warning that names the weights of the head
- refused: an error of rlx_jax that names the model type, the architecture or a field
- wrong: other logits
- unnamed: any other error
- not made: transformers itself makes no model of this size

The exit status is 1 if a type is wrong or unnamed. Needs torch and transformers, no network and no GPU.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import re
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from report import table
from transformers.models.auto import modeling_auto

import rlx_jax as rlx

# The tasks: the name of an `AutoModelFor…` class, and of its table in transformers.
TASKS = {
    "MaskedLM": "MASKED_LM",
    "SequenceClassification": "SEQUENCE_CLASSIFICATION",
    "TokenClassification": "TOKEN_CLASSIFICATION",
    "ImageClassification": "IMAGE_CLASSIFICATION",
    "CausalLM": "CAUSAL_LM",
}
OUTCOMES = ("compared", "headless", "refused", "wrong", "unnamed", "not made")
TOLERANCE = 3e-5
LENGTHS = (7, 12, 3)
SECONDS = 240  # for one type
MAX_PARAMETERS = 30_000_000

# Small sizes by the name of the field; a config gets the fields that it has.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embed_dim"), 32),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "n_inner", "ffn_dim", "d_ff", "encoder_ffn_dim"), 40),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 64),
    "embedding_size": 16, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 99, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "image_size": 16, "patch_size": 4,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "num_labels": 3,
}  # fmt: skip
# Fields of types whose sizes depend on each other.
OVERRIDES: dict[str, dict[str, Any]] = {
    "albert": {"num_hidden_layers": 4, "num_hidden_groups": 2},
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "n_groups": 2, "state_size": 8, "layer_norm_epsilon": 1e-2},
    "gemma2": {"query_pre_attn_scalar": 8, "sliding_window": 5},
    "gemma3_text": {"query_pre_attn_scalar": 8, "sliding_window": 5},
    "mistral": {"sliding_window": 5},
    "qwen3_5_text": {"rms_norm_eps": 1e-2, "layer_types": ["linear_attention", "full_attention"]},
}

Outputs = list[np.ndarray[Any, Any]]


@dataclass
class Row:
    """The outcome of one model type and task.

    Attributes:
        task, type, architecture: what was loaded.
        outcome: one of `OUTCOMES`.
        detail: the message, or the class that `rlx_jax.load` returned.
        error: the largest difference, relative to the largest logit.
    """

    task: str
    type: str
    architecture: str
    outcome: str = ""
    detail: str = ""
    error: float | None = None


class TooLong(BaseException):
    """A type takes more than `SECONDS`."""


# -- tiny checkpoints --------------------------------------------------------------------------


def tiny_config(cls: Any, **fields: Any) -> Any:
    """Return a config with the small sizes of the fields that its class has, also in nested configs."""
    default = cls()
    names = {*default.to_dict(), *getattr(cls, "attribute_map", {})} | {"num_labels"}
    kind = cls.model_type
    sizes = {name: value for name, value in SIZES.items() if name in names} | OVERRIDES.get(kind, {})
    parts = {name: getattr(default, name, None) for name in getattr(cls, "sub_configs", {})}
    nested = {name: tiny_config(type(part)).to_dict() for name, part in parts.items() if hasattr(part, "to_dict")}
    return cls(**sizes | nested | fields)


def make_model(cls: Any, config: Any) -> Any:
    """Return a model with random weights in which no norm scales by 1 and no bias is 0."""
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in cls(config).parameters())
    if count > MAX_PARAMETERS:
        raise ValueError(f"{count} parameters")
    model = cls._from_config(config, attn_implementation="eager").float()
    if hasattr(model, "set_experts_implementation"):
        with contextlib.suppress(Exception):
            model.set_experts_implementation("eager")
    rng = np.random.default_rng(0)
    # Tables of sine waves, as of RoFormer, are weights of the checkpoint that no training changes.
    tables = (name for name, module in model.named_modules() if "Sinusoidal" in type(module).__name__)
    fixed = {f"{name}.weight" for name in tables}
    centre = 0.0 if config.model_type.startswith("gemma") else 1.0  # the norms of Gemma scale by 1 + w
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in fixed:
                continue
            shape = tuple(parameter.shape)
            if "norm" in name.lower() and name.endswith("weight") and len(shape) == 1:
                values = rng.uniform(centre - 0.5, centre + 0.5, shape)
            else:
                values = rng.normal(0.0, 0.3 if name.endswith("bias") else 0.2, shape)
                if not centre and "embed" in name:  # they are scaled by √H
                    values /= shape[-1] ** 0.5
            parameter.copy_(torch.from_numpy(values.astype(np.float32)))
    return model.eval()


def inputs_for(task: str, config: Any) -> Any:
    """Return pixel values `[2, C, H, W]`, or rows of ids of different lengths without special ids."""
    rng = np.random.default_rng(1)
    if task == "ImageClassification" and config.model_type == "siglip2":  # patches, of which images have some
        shapes, patch = np.array([[3, 4], [5, 2]]), config.vision_config.patch_size
        values = rng.normal(size=(2, 12, patch**2 * config.vision_config.num_channels)).astype(np.float32)
        mask = (np.arange(12) < shapes.prod(1)[:, None]).astype(np.int32)
        return {"pixel_values": values, "pixel_attention_mask": mask, "spatial_shapes": shapes}
    if task == "ImageClassification":
        size = getattr(config, "image_size", 16)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return rng.normal(size=(2, getattr(config, "num_channels", 3), height, width)).astype(np.float32)
    return [rng.integers(5, 98, length).tolist() for length in LENGTHS]


def reference(model: Any, inputs: Any) -> Outputs:
    """Return the logits of transformers, one array for each row or image."""
    with torch.no_grad():
        if isinstance(inputs, dict):
            return [*model(**{name: torch.from_numpy(value) for name, value in inputs.items()}).logits.numpy()]
        if isinstance(inputs, np.ndarray):
            return [*model(pixel_values=torch.from_numpy(inputs)).logits.numpy()]
        return [model(input_ids=torch.tensor([row])).logits[0].numpy() for row in inputs]


# -- rlx_jax -----------------------------------------------------------------------------------


def causal_logits(model: Any, rows: list[list[int]]) -> Outputs:
    """Return the logits of every token of right-padded rows."""
    block = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for i, row in enumerate(rows):
        block[i, : len(row)] = row
    logits = np.asarray(model.logits(block, lengths=[len(row) for row in rows]))
    return [values[: len(row)] for values, row in zip(logits, rows, strict=True)]


# How the classes of `rlx_jax.load` give logits: of a list of rows of ids, or of pixel values. A class with a method
# `logits(inputs)` that returns one array for each needs no entry.
LOGITS: dict[str, Callable[[Any, Any], Outputs]] = {
    "CausalLM": causal_logits,
    "Reranker": lambda model, rows: [*model.classifier.logits(rows)],
}


def names_something(error: BaseException, row: Row, config: dict[str, Any]) -> bool:
    """Return whether an error of rlx_jax names the type, the architecture or a field."""
    if not isinstance(error, rlx.errors.RlxError):
        return False
    text = str(error)
    fields = any(f"'{name}'" in text for name in config)
    return fields or row.type in text or row.architecture in text


def load(row: Row, directory: Path) -> tuple[Any, list[str]]:
    """Return what `rlx_jax.load` returns, and its warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = rlx.load(directory)
    return model, [str(w.message) for w in caught if issubclass(w.category, rlx.errors.RlxWarning)]


def examine(row: Row, directory: Path) -> None:
    """Fill in the outcome of a row."""
    cls = getattr(transformers, row.architecture, None)
    if cls is None:
        row.outcome, row.detail = "not made", "transformers has no such class"
        return
    config = make_config(row, cls.config_class)
    if config is None:
        fields = {"model_type": cls.config_class.model_type, "architectures": [row.architecture]}
        (directory / "config.json").write_text(json.dumps(fields), "utf-8")
    else:
        config.architectures = [row.architecture]
        config.save_pretrained(directory)
    if refuse_early(row, directory):
        return
    try:
        model = make_model(cls, config)
        model.save_pretrained(directory)
        inputs = inputs_for(row.task, config)
        expected = reference(model, inputs)
    except Exception as error:
        row.outcome, row.detail = "not made", row.detail or one_line(error)
        return
    compare(row, inputs, expected, directory)


def make_config(row: Row, config_class: Any) -> Any:
    """Return a small config, or the default one if the class refuses these sizes; None if it refuses both."""
    try:
        is_decoder = row.task == "CausalLM" and "is_decoder" in config_class().to_dict()
        return tiny_config(config_class, **({"is_decoder": True} if is_decoder else {}))
    except Exception as error:
        row.detail = one_line(error)
    try:
        return config_class()
    except Exception:
        return None


def refuse_early(row: Row, directory: Path) -> bool:
    """Return whether `rlx_jax.load` refuses the config alone, and fill in the outcome if it does."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    try:
        load(row, directory)
    except rlx.errors.MissingFileError:
        return False
    except Exception as error:
        row.outcome = "refused" if names_something(error, row, config) else "unnamed"
        row.detail = one_line(error)
        return True
    return False


def compare(row: Row, inputs: Any, expected: Outputs, directory: Path) -> None:
    """Load the checkpoint, and compare its logits with those of transformers."""
    config = json.loads((directory / "config.json").read_text("utf-8"))
    try:
        ours, messages = load(row, directory)
        row.detail = type(ours).__name__
        if any("head of its task" in message for message in messages):
            row.outcome = "headless"
            return
        logits = LOGITS.get(row.detail, lambda model, rows: [*model.logits(rows)])(ours, inputs)
    except Exception as error:
        row.outcome = "refused" if names_something(error, row, config) else "unnamed"
        row.detail = one_line(error)
        return
    scale = max(float(np.abs(values).max()) for values in expected)
    errors = [float(np.abs(a - b).max()) for a, b in zip(expected, map(np.asarray, logits), strict=True)]
    row.error = max(errors) / scale
    row.outcome = "compared" if row.error <= TOLERANCE else "wrong"  # a NaN is wrong


def one_line(error: BaseException) -> str:
    """Return the class and the message of an error."""
    return re.sub(r"\s+", " ", f"{type(error).__name__}: {error}")[:600]


# -- all types ---------------------------------------------------------------------------------


def rows_of(tasks: list[str], types: list[str]) -> Iterator[Row]:
    """Yield a row for every task and model type."""
    for task in tasks:
        names = getattr(modeling_auto, f"MODEL_FOR_{TASKS[task]}_MAPPING_NAMES")
        for kind, architecture in sorted(names.items()):
            if not types or kind in types:
                yield Row(task, kind, architecture if isinstance(architecture, str) else architecture[0])


def run(row: Row) -> None:
    """Fill in the outcome of a row, whatever happens, within `SECONDS`."""

    def stop(*_: Any) -> None:
        raise TooLong(f"more than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        with tempfile.TemporaryDirectory() as directory:
            examine(row, Path(directory))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # also SystemExit, and panics of Rust, which are no Exception
        row.outcome, row.detail = "unnamed", one_line(error)
    finally:
        signal.alarm(0)


def report(rows: list[Row]) -> str:
    """Return the counts of each task, then the types that were compared, then all that failed."""
    counts = {task: collections.Counter(row.outcome for row in rows if row.task == task) for task in TASKS}
    cells = [(task, sum(c.values()), *(c[outcome] for outcome in OUTCOMES)) for task, c in counts.items() if c]
    lines = [table(("task", "types", *OUTCOMES), cells)]
    for outcome in ("compared", "headless"):
        chosen = [row for row in rows if row.outcome == outcome]
        cells = [(row.type, row.task, row.detail, "" if row.error is None else f"{row.error:.1e}") for row in chosen]
        lines += ["", outcome, table(("type", "task", "class", "error"), cells)] if cells else []
    failures = [row for row in rows if row.outcome in ("wrong", "unnamed", "not made")]
    lines += ["", *(f"{row.outcome}: {row.task} {row.type}: {row.error or ''} {row.detail[:200]}" for row in failures)]
    return "\n".join(lines)


def record(rows: list[Row]) -> dict[str, Any]:
    """Return the counts by task and outcome, and what was compared, with errors of one digit."""
    counts = {task: dict(collections.Counter(row.outcome for row in rows if row.task == task)) for task in TASKS}
    loaded = [
        {"task": row.task, "type": row.type, "class": row.detail, "error": row.error and float(f"{row.error:.0e}")}
        for row in rows
        if row.outcome in ("compared", "headless")
    ]
    return {"transformers": transformers.__version__, "counts": counts, "loaded": loaded}


def main() -> None:
    """Run the census."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--types", nargs="+", default=[])
    parser.add_argument("--json", type=Path, default=Path("census.json"))
    parser.add_argument("--record", type=Path)
    parser.add_argument("--verbose", action="store_true", help="print each type with its message")
    options = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    logging.disable(logging.WARNING)
    rows, start = list[Row](), time.perf_counter()
    for row in rows_of(options.tasks, options.types):
        run(row)
        rows.append(row)
        if options.verbose:
            print(row.task, row.type, row.outcome, row.error or "", row.detail, flush=True)
        versions = {"transformers": transformers.__version__, "torch": torch.__version__, "rlx_jax": rlx.__version__}
        options.json.write_text(json.dumps({**versions, "rows": [asdict(r) for r in rows]}, indent=1) + "\n", "utf-8")
    if options.record:
        options.record.write_text(json.dumps(record(rows), indent=1) + "\n", "utf-8")
    print(report(rows))
    print(f"\n{len(rows)} checkpoints in {time.perf_counter() - start:.0f} s: {options.json}")
    sys.exit(any(row.outcome in ("wrong", "unnamed") for row in rows))


if __name__ == "__main__":
    main()
