"""Read and write PEFT's adapter files, `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx_jax.blocks.lora import rename_module
from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import ConfigError, RequestError, TargetExistsError, UnsupportedError, listing, quote, shown
from rlx_jax.io.atomic import atomic_directory, write_synced
from rlx_jax.io.folder import open_folder
from rlx_jax.models.config import Fields, finish_model
from rlx_jax.models.encoder import ANSWER, SEQUENCE, TOKEN
from rlx_jax.weights.format import Entry
from rlx_jax.weights.safetensors_format import SafetensorsSource, write_file
from rlx_jax.weights.source import WeightSource, open_weights
from rlx_jax.weights.views import RenamedSource

CONFIG, WEIGHTS, PREFIX = "adapter_config.json", "adapter_model.safetensors", "base_model.model."
# Files of a directory that PEFT writes. `save_lora` overwrites a directory only if it has no other file.
PEFT_FILES = {CONFIG, WEIGHTS, "README.md"}
TENSOR_SUFFIXES = (".lora_A.weight", ".lora_B.weight")

# The tasks whose head an adapter brings, in `modules_to_save`, by PEFT's task type.
HEAD_TASKS = {"SEQ_CLS": SEQUENCE, "TOKEN_CLS": TOKEN, "QUESTION_ANS": ANSWER}

# Fields that do not change the computation. The names of the tensors already define which modules have an adapter.
INERT = (
    "task_type auto_mapping peft_version base_model_name_or_path revision inference_mode target_modules "
    "exclude_modules fan_in_fan_out layers_to_transform layers_pattern megatron_core "
    "loftq_config qalora_group_size runtime_config"
).split()

# Fields of other methods than plain LoRA, with the values at which they are off.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        (
            "modules_to_save", "megatron_config", "trainable_token_indices", "eva_config", "corda_config",
            "arrow_config", "lora_ga_config", "velora_config", "alora_invocation_tokens", "monteclora_config",
            "layer_replication", "target_parameters", "use_bdlora", "kasa_config",
        ),
        (None, []),
    ),
    **dict.fromkeys(("use_dora", "use_qalora", "lora_bias", "ensure_weight_tying"), (False,)),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal"),  # others change the base model's weights
}  # fmt: skip


@dataclass(frozen=True)
class AdapterSizes:
    """The rank and the factor s of each module with an adapter.

    Attributes:
        modules: (rank, s) by module name.
        fan_in_fan_out: the adapted weights are stored `[in, out]`, which PEFT calls `fan_in_fan_out`.
        dropout: the dropout that the adapter was trained with.
        task: the task of the head that the adapter was trained for, as in `TaskHead`; empty if it has none.
        head_keys: keys of the weights of that head, which replace the weights of the base model.
    """

    modules: Mapping[str, tuple[int, float]]
    fan_in_fan_out: bool = False
    dropout: float = 0.0
    task: str = ""
    head_keys: tuple[str, ...] = ()

    def groups(self) -> dict[tuple[int, float], list[str]]:
        """Return the modules grouped by (rank, s)."""
        modules_by_size: dict[tuple[int, float], list[str]] = {}
        for module, size in self.modules.items():
            modules_by_size.setdefault(size, []).append(module)
        return modules_by_size


# -- reading -----------------------------------------------------------------------------------


def open_adapter(path: Any) -> tuple[AdapterSizes, WeightSource]:
    """Return the sizes of the adapter in a directory, and its weights under the keys that flows use.

    Raises:
        MissingFileError: a file is missing. ConfigError: the files contradict each other.
        UnsupportedError: a field or a tensor needs more than plain LoRA; the message names it.
    """
    folder = open_folder(path)
    fields = Fields(folder.required_json(CONFIG), folder.where(CONFIG))
    fields.choice("peft_type", "", {"LORA": ""})
    rank, alpha, rslora = fields.integer("r"), fields.real("lora_alpha"), fields.flag("use_rslora", False)
    ranks, alphas = (_read_pattern(fields, name) for name in ("rank_pattern", "alpha_pattern"))
    dropout = fields.real("lora_dropout", 0.0, exclusive=False)
    task = HEAD_TASKS.get(str(fields.raw("task_type")), "")
    finish_model(fields, [*INERT, *(["modules_to_save"] if task else [])], NEUTRAL)
    folder.fetch(WEIGHTS)
    source = open_weights(os.path.join(os.fspath(folder.path), WEIGHTS))
    head_keys = tuple(key.removeprefix(PREFIX) for key in source.keys() if task and _is_full_weight(key))
    module_ranks, where = _read_ranks(source, folder.where(WEIGHTS), head_keys), folder.where(CONFIG)
    sizes = {}
    for module, size in module_ranks.items():
        expected = _match_pattern(ranks, module, rank)
        if size != expected:
            raise ConfigError(f"{where}: the rank of {quote(module)} is {expected:g}, and its tensors have {size}")
        sizes[module] = size, _match_pattern(alphas, module, alpha) / (size**0.5 if rslora else size)
    names = {f"{module}{part}": f"{PREFIX}{module}{part}" for module in module_ranks for part in TENSOR_SUFFIXES}
    names |= {key: PREFIX + key for key in head_keys}
    return AdapterSizes(sizes, dropout=dropout, task=task, head_keys=head_keys), RenamedSource(source, names)


def _is_full_weight(key: str) -> bool:
    """Return whether a tensor of an adapter is a weight of a module that was trained in full."""
    is_weight = key.startswith(PREFIX) and key.endswith((".weight", ".bias"))
    return is_weight and ".lora_" not in key and ".base_layer." not in key


def rename_modules(
    sizes: AdapterSizes, source: WeightSource, renamed: Sequence[tuple[str, str]]
) -> tuple[AdapterSizes, WeightSource]:
    """Return an adapter with its modules renamed to the checkpoint's names.

    `renamed`: (checkpoint name, adapter name) pairs; see `ModuleNames.renamed`.
    """
    back = [(peft_name, name) for name, peft_name in renamed]
    stored = {module: rename_module(module, back) for module in sizes.modules}
    names = {f"{name}{part}": f"{module}{part}" for module, name in stored.items() for part in TENSOR_SUFFIXES}
    modules = {stored[module]: size for module, size in sizes.modules.items()}
    return replace(sizes, modules=modules), RenamedSource(source, names) if renamed else source


def _read_pattern(fields: Fields, name: str) -> dict[str, float]:
    """Return numbers by module name or suffix of a name (`rank_pattern`, `alpha_pattern`)."""
    numbers: dict[str, float] = {}
    group = fields.group(name) or Fields({}, fields.where)
    for key in group.values:
        if not re.fullmatch(r"\^?[\w.-]+", key):
            raise UnsupportedError(f"{group.where}: {quote(key)} is a regular expression; expected a module's name")
        numbers[key] = group.real(key)
    return numbers


def _match_pattern(pattern: Mapping[str, float], module: str, default: float) -> float:
    """Return the number of a module: the one of the first pattern that is its name or a suffix of it.

    A pattern with `^` matches the full name only. PEFT uses the names as regular expressions, so a dot matches any
    character; so does this function.
    """
    for key, value in pattern.items():
        if re.fullmatch(rf"(.*\.)?({key})", module):
            return value
    return default


def _read_ranks(source: WeightSource, where: str, head_keys: Sequence[str] = ()) -> dict[str, int]:
    """Return the rank of each module, from the shapes of its two tensors. `head_keys`: see `AdapterSizes`."""
    modules: dict[str, set[str]] = {}
    for key in source.keys():
        if key.removeprefix(PREFIX) in head_keys:
            continue
        part = next((part for part in TENSOR_SUFFIXES if key.endswith(part)), None)
        if part is None or not key.startswith(PREFIX):
            advice = "; PEFT leaves copies of embeddings out with save_pretrained(…, save_embedding_layers=False)"
            raise UnsupportedError(
                f"{where}: tensor {quote(key)} is not handled; expected {PREFIX}….lora_A.weight and lora_B"
                f"{advice if '.base_layer.' in key else ''}"
            )
        modules.setdefault(key.removeprefix(PREFIX).removesuffix(part), set()).add(part)
    if not modules:
        raise ConfigError(f"{where}: there is no adapter in it")
    ranks = {}
    for module, parts in modules.items():
        if len(parts) < len(TENSOR_SUFFIXES):
            raise ConfigError(f"{where}: {quote(module)} has only {parts.pop()[1:]}")
        shapes = [tuple(source.spec(f"{PREFIX}{module}{part}").shape) for part in TENSOR_SUFFIXES]
        if any(len(shape) != 2 for shape in shapes) or shapes[0][0] != shapes[1][1]:
            raise UnsupportedError(
                f"{where}: {quote(module)}: expected [r, in] and [out, r], got {shapes[0]} and {shapes[1]}"
            )
        ranks[module] = shapes[0][0]
    return ranks


# -- writing -----------------------------------------------------------------------------------

# PEFT's task type by the name of a model's output.
TASKS = {"logits": "CAUSAL_LM", "hidden_states": "FEATURE_EXTRACTION"}

# Directory of a model in the cache of the Hub: organisation, name and commit.
SNAPSHOT = re.compile(r".*/models--(.+?)--(.+)/snapshots/([0-9a-f]{40})")


@dataclass(frozen=True)
class BaseModel:
    """The base model of an adapter, as PEFT records it; None for unknown values.

    Attributes:
        name: a path, or the name of a model of the Hub.
        revision: its commit.
        task: PEFT's task type.
    """

    name: str | None = None
    revision: str | None = None
    task: str | None = None


def base_of(source: Any) -> BaseModel:
    """Return the checkpoint that a source of weights reads, without its task.

    If there are several sources, it is the first one's.
    """
    # Views such as RenamedSource wrap the source that reads the files.
    while source is not None and not isinstance(source, SafetensorsSource):
        source = getattr(source, "source", None)
    directory = "" if source is None else os.path.abspath(source.directory) if source.directory else ""
    if snapshot := SNAPSHOT.fullmatch(directory):
        organisation, name, commit = snapshot.groups()
        return BaseModel(f"{organisation}/{name}", commit)
    return BaseModel(directory if os.path.isfile(os.path.join(directory, "config.json")) else None)


def write_adapter(path: Any, sizes: AdapterSizes, arrays: Mapping[str, Any], overwrite: bool, base: BaseModel) -> None:
    """Write both files to a directory. Arguments and errors as in `rlx_jax.models.lora.save_lora`."""
    if not isinstance(path, str | os.PathLike):
        raise RequestError(f"save_lora: path is {shown(path)}; expected the path of a directory")
    ranks = {module: rank for module, (rank, _) in sizes.modules.items()}
    alphas = {module: scale * rank for module, (rank, scale) in sizes.modules.items()}
    # The most common values become the defaults; the patterns list the exceptions.
    (rank, _), *_ = Counter(ranks.values()).most_common()
    (alpha, _), *_ = Counter(alphas.values()).most_common()
    config = {
        "peft_type": "LORA",
        "task_type": base.task,
        "base_model_name_or_path": base.name,
        "revision": base.revision,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": _to_json_number(alpha),
        "rank_pattern": {module: r for module, r in ranks.items() if r != rank},
        "alpha_pattern": {module: _to_json_number(a) for module, a in alphas.items() if a != alpha},
        "use_rslora": False,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": sizes.fan_in_fan_out,
        "target_modules": sorted(ranks),
        "modules_to_save": sorted({key.partition(".")[0] for key in sizes.head_keys}) or None,
    }
    values = {key: np.asarray(array) for key, array in arrays.items()}
    entries = [Entry.from_array(f"{PREFIX}{key}", array) for key, array in values.items()]
    target = os.path.realpath(os.fspath(path))
    if overwrite and os.path.lexists(target):
        _check_only_adapter(target)
    with atomic_directory(target, overwrite, sum(array.nbytes for array in values.values())) as temporary:
        os.mkdir(temporary)
        write_file(os.path.join(temporary, WEIGHTS), entries)
        write_synced(os.path.join(temporary, CONFIG), (json.dumps(config, indent=2) + "\n").encode())


def _check_only_adapter(target: str) -> None:
    """Check that a directory has an adapter and no other files, which overwriting would delete.

    Raises:
        TargetExistsError: there is no adapter, or there are other files.
    """
    files = set(os.listdir(target)) if os.path.isdir(target) else set()
    if CONFIG not in files or files - PEFT_FILES:
        problem = f"holds {listing(sorted(files - PEFT_FILES), 4)} too" if CONFIG in files else f"has no {CONFIG}"
        raise TargetExistsError(f"{quote(target)} {problem}: it is not only an adapter; remove it, or save elsewhere")


def _to_json_number(number: float) -> int | float:
    """Return an integral number as an int, which JSON shows without a decimal point."""
    return int(number) if number == int(number) else number
