"""GGUF files that are malformed, or say what no writer does: an error of this package, or a model that opens."""

import math
from pathlib import Path
from typing import Any

import gguf
import pytest

import rlx_jax as rlx
from rlx_jax.errors import (
    DuplicateWeightError,
    MissingFileError,
    RlxError,
)
from tests.oracles.gguf_files import write_gguf
from tests.test_gguf import directory


def test_links_that_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").symlink_to("blob")
    for call in (rlx.load, rlx.open_weights):
        with pytest.raises(MissingFileError, match="no such file: it is a link to 'blob'"):
            call(tmp_path / "m.gguf")


# Fields of each architecture; those of `llama` include the ones of all decoders and of no architecture.
FIELDS = {
    "llama/gqa_plain_attnbias_v5": """
        block_count embedding_length attention.head_count attention.head_count_kv expert_count attention.key_length
        attention.layer_norm_rms_epsilon rope.dimension_count rope.freq_base rope.scaling.type attention.value_length
        attention.causal context_length pooling_type general.type general.alignment tokenizer.ggml.model
        tokenizer.ggml.pre split.count split.no
        """,
    "qwen3_5_text/blocks_v5": """
        block_count ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size
        full_attention_interval nextn_predict_layers rope.dimension_count rope.dimension_sections
        """,
    "mamba2/groups_v5": """
        block_count embedding_length ssm.conv_kernel ssm.state_size ssm.group_count ssm.time_step_rank ssm.inner_size
        attention.layer_norm_rms_epsilon attention.head_count feed_forward_length
        """,
    "gpt_oss/window_v5": """
        expert_count expert_used_count expert_feed_forward_length attention.sliding_window rope.scaling.factor
        rope.scaling.yarn_beta_fast rope.scaling.yarn_beta_slow rope.scaling.original_context_length
        """,
    "nomic_bert/bare_v5": """
        block_count embedding_length attention.head_count attention.key_length attention.layer_norm_epsilon
        attention.causal pooling_type context_length rope.freq_base
        """,
}


@pytest.mark.parametrize("fixture", FIELDS)
@pytest.mark.parametrize("value", [
    ["a", "b"], math.nan, 2**31, 0,
    *(pytest.param(value, marks=pytest.mark.slow) for value in ([1, 2], "a", 2.5, True, -1)),
], ids=str)  # fmt: skip
def test_metadata_of_another_type(value: Any, fixture: str, tmp_path: Path) -> None:
    """In place of each value of the model's metadata: an error of this package, or a model that opens."""
    source = directory(tmp_path, fixture)
    array, unsigned = gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.UINT32
    kind = array if isinstance(value, list) else unsigned if value == 2**31 else gguf.GGUFValueType.get_type(value)
    for name in FIELDS[fixture].split():

        def more(writer: Any, name: str = name) -> None:
            is_general = name.partition(".")[0] in ("general", "tokenizer", "split")
            key = name if is_general else f"{writer.arch}.{name}"
            writer.kv_data[0].pop(key, None)
            writer.add_key_value(key, value, kind)

        write_gguf(source, tmp_path / "m.gguf", more=more)
        try:
            rlx.recipe_for(tmp_path / "m.gguf")
        except RlxError as error:
            assert len(str(error)) < 2048 and str(error).isprintable()


def test_two_tensors_of_one_weight(tmp_path: Path) -> None:
    tensors = write_gguf(directory(tmp_path, "mixtral/window_v5"), tmp_path / "m.gguf")
    tensors["blk.0.ffn_up.1.weight"] = tensors["blk.0.ffn_up_exps.weight"][0]
    write_gguf(tmp_path / "hf", tmp_path / "m.gguf", tensors=tensors)
    with pytest.raises(DuplicateWeightError, match="are the same weight"):
        rlx.open_weights(tmp_path / "m.gguf")
