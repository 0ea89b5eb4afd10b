"""`rlx_jax.load`: a checkpoint directory as something to call."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlx_jax.errors import ConfigError, quote
from rlx_jax.executable import Progress
from rlx_jax.flow import ModelFlow, ModelRecipe
from rlx_jax.generate.causal import CausalLM
from rlx_jax.generate.encoder import Encoder
from rlx_jax.generate.json_files import read_optional
from rlx_jax.generate.sentence import load_pipeline
from rlx_jax.generate.tokenizer import load_tokenizer
from rlx_jax.ir.types import as_dtype, short_name
from rlx_jax.models.families import Pretrained, check_options, model_directory, open_pretrained, rebound
from rlx_jax.profiles import CompileProfile


def load(
    path: str | os.PathLike[str],
    *,
    profile: CompileProfile | None = None,
    mesh: Any = None,
    dtype: Any = None,
    strict: bool = True,
    recipe: ModelRecipe | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> Any:
    """A Hugging Face or sentence-transformers directory as a `CausalLM` or an `Encoder`; `config.json` decides.

    Args:
        profile: else `auto`.
        dtype: the compute dtype, `precision.compute` of the profile: "bf16", "bfloat16", `jnp.bfloat16` and so on.
        strict: weights that nothing reads are an error, not a warning.
        recipe: to use in place of the checkpoint's own: `rlx_jax.recipe_for(path)` with hooks, or one made from
            another checkpoint of the same config, or from the config alone. The weights are those of `path`.
        progress: told how far loading and compiling are: `progress("load", bytes read, bytes in all)` and
            `progress("compile prefill of batch 1, seq 16", 0, 1)`, then 1 of 1; see `rlx_jax.executable.Progress`.
        options: of `open_weights`: `on_nonfinite`, `links`, `max_bytes`, `verify`, `subtree`.

    Raises:
        ConfigError, UnsupportedError, WeightError, TokenizerError: see `rlx_jax.errors`.
    """
    check_options("load", options, ("profile", "mesh", "dtype", "strict", "recipe", "progress"))
    directory = model_directory(path)
    pipeline = load_pipeline(directory)
    root = directory / pipeline.transformer if pipeline else directory
    pretrained = open_pretrained(root, strict=strict, **options)
    own = pretrained.recipe
    flow = ModelFlow.from_recipe(own if recipe is None else rebound(recipe, own))
    if dtype is not None:
        dtype = dtype if dtype == "auto" else short_name(as_dtype(dtype))
        profile = (profile or flow.profile or CompileProfile()).replace(precision={"compute": dtype})
    common: dict[str, Any] = {"profile": profile, "mesh": mesh, "strict": strict, "progress": progress}
    if pretrained.kind == "encoder":
        tokenizer = load_tokenizer(root, lowercase=bool(pipeline and pipeline.do_lower_case))
        positions = pretrained.max_positions
        return Encoder(flow, tokenizer=tokenizer, pipeline=pipeline, max_positions=positions, **common)
    eos = special_ids(root, "eos_token_id", pretrained)
    bos = special_ids(root, "bos_token_id", pretrained)
    return CausalLM(
        flow,
        tokenizer=load_tokenizer(root),
        max_positions=pretrained.max_positions,
        eos_ids=eos,
        bos_id=bos[0] if bos else None,
        **common,
    )


def special_ids(directory: Path, field: str, pretrained: Pretrained) -> tuple[int, ...]:
    """Ids under `field` in `generation_config.json`, else in `config.json`; none if neither names one.

    Raises:
        ConfigError: not an id of the model's vocabulary, or a list of them.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_optional(directory, name).get(field)
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        for i in ids:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < pretrained.vocab_size:
                raise ConfigError(
                    f"{name}: field {field!r} is {quote(value)}; expected ids in [0, {pretrained.vocab_size})"
                )
        return tuple(ids)
    return ()
