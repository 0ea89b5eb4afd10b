"""`describe_checkpoint`: the metadata of a GGUF file for a checkpoint: its config, tokenizer and chat templates.

What metadata cannot express must not get lost in silence. So they are read back as those of a file are, and the model
and the tokenizer that they describe are compared with the checkpoint's.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rlx_jax.encode.checkpoint import Checkpoint, described_folder
from rlx_jax.errors import RlxError, RlxWarning, UnsupportedError, listing, quote, shown
from rlx_jax.io.folder import CONFIG
from rlx_jax.models.decoder_config import DecoderConfig
from rlx_jax.models.families import family_of, open_pretrained
from rlx_jax.text.gguf_tokenizer import tokenizer_metadata
from rlx_jax.text.tokenizer import Tokenizer, load_tokenizer, parse_document, read_tokenizer
from rlx_jax.weights.format import Entry
from rlx_jax.weights.gguf_config import gguf_config, gguf_metadata, rope_factors
from rlx_jax.weights.gguf_header import GgufHeader, GgufTensor, MetadataValue
from rlx_jax.weights.gguf_write import tensor_shapes
from rlx_jax.weights.mapping import MappingSource
from rlx_jax.weights.tensor_file import TensorInfo

_REMEDY = "save a Hugging Face directory, format='safetensors'"
# Texts that tokenizers split in different ways: spaces, digits, contractions, scripts, marks, punctuation.
_TEXTS = (
    "", " ", "Hello, world's 12345 end.\n\n  x", "ab  ab\tab", "\n \n\n\t \r\n", "1 22 333 4444 1.5e-3",
    "we'll WE'LL 's", "it's ein Test: é \U0001f600 e\u0301 \u00a0", "日本語 Русский عربي ไทย",
    "a_b-c/d==e!!! ...(x)", "   lead trail  ",
)  # fmt: skip
_NUM_TOKENS = 1000  # of the vocabulary, decoded as one more text


def describe_checkpoint(
    checkpoint: Checkpoint, entries: Sequence[Entry]
) -> tuple[dict[str, MetadataValue], list[Entry]]:
    """Return the metadata of a GGUF file for a checkpoint, and the weights to write.

    Args:
        checkpoint: its config and tokenizer.
        entries: the weights of the model under checkpoint keys.

    Raises:
        UnsupportedError: GGUF has no architecture for the model, or cannot express its config or its tokenizer.

    Warns:
        RlxWarning: a token that ends a row does not end it in the file's model.
    """
    recipe: Any = checkpoint.pretrained.recipe
    if checkpoint.pretrained.kind != "causal" or not isinstance(recipe.config, DecoderConfig):
        raise UnsupportedError(f"save: {recipe.name} is not written as GGUF, only decoders with a head; {_REMEDY}")
    config = checkpoint.folder.json(CONFIG) | {f.name: getattr(recipe.config, f.name) for f in fields(recipe.config)}
    metadata = gguf_metadata(config)
    factors = rope_factors(config)
    written = [*entries, *([] if factors is None else [Entry.from_array("rope_freqs.weight", factors)])]
    shapes = tensor_shapes(written, metadata)
    infos = {name: GgufTensor(TensorInfo(entries[0].type.dtype, s, 0, 0), s, None) for name, s in shapes.items()}
    try:
        described = gguf_config(GgufHeader(metadata, infos), lambda _: factors, "m.gguf")  # type: ignore[arg-type, return-value]
        _check_model(recipe.config, described, metadata, entries)
    except RlxError as cause:
        raise UnsupportedError(f"save: GGUF cannot express the model: {cause}; {_REMEDY}") from cause
    if (tokenizer := checkpoint.tokenizer) is not None:
        metadata = _with_tokenizer(checkpoint, tokenizer, described, metadata)
    return metadata, written


def _check_model(
    config: DecoderConfig, described: Mapping[str, Any], metadata: Mapping[str, MetadataValue], entries: Sequence[Entry]
) -> None:
    """Check that the model that metadata describe computes what the checkpoint's model does.

    Raises:
        UnsupportedError: names the first difference. Others: no family reads the metadata, or weights are missing.
    """
    folder = described_folder(Path("m.gguf"), described, metadata)
    source = MappingSource({entry.key: entry.type.spec for entry in entries})
    twin: Any = open_pretrained(folder, *family_of(folder), source).recipe
    # Configs of one family are equal if their fields are; those of two families have the layers in common.
    is_same_family = type(config) is type(twin.config)
    ours, theirs = (_computation(c, layers=not is_same_family) for c in (config, twin.config))
    # A tied embedding with a separate head in the checkpoint is a matter of storage.
    for name in sorted(ours.keys() & theirs.keys() - {"tie_word_embeddings"}):
        if ours[name] != theirs[name]:
            raise UnsupportedError(f"{name} is {shown(ours[name])}, the metadata of a file give {shown(theirs[name])}")


def _computation(config: DecoderConfig, layers: bool) -> dict[str, Any]:
    """Return what a config defines, by name: its fields, and if `layers` the specs of its stages."""
    values = {f.name: getattr(config, f.name) for f in fields(config)}
    if layers:
        values |= {f"layer {i}": config.layer_spec(i) for i in range(config.num_hidden_layers)}
        values["ends"] = config.ends()
    return values


def _with_tokenizer(
    checkpoint: Checkpoint, tokenizer: Tokenizer, described: Mapping[str, Any], metadata: Mapping[str, MetadataValue]
) -> dict[str, MetadataValue]:
    """Return the metadata of a model with those of its tokenizer.

    Raises:
        UnsupportedError: there are none with which texts have the same tokens.
    """
    raw = read_tokenizer(checkpoint.folder)
    assert raw is not None
    document = parse_document(raw, quote(checkpoint.folder.path))
    step = max(1, tokenizer.vocab_size // _NUM_TOKENS)
    texts = [*_TEXTS, tokenizer.decode(list(range(0, tokenizer.vocab_size, step)))]
    expected = tokenizer.encode_batch(texts)
    differing = ""
    for tokenizer_fields in tokenizer_metadata(document, tokenizer, described["vocab_size"]):
        candidate = {**metadata, **tokenizer_fields}
        twin = load_tokenizer(described_folder(Path("m.gguf"), described, candidate))
        assert twin is not None
        wrong = [text for text, a, b in zip(texts, expected, twin.encode_batch(texts), strict=True) if a != b]
        if not wrong:
            if lost := sorted(set(tokenizer.eos_ids) - set(twin.eos_ids)):
                warnings.warn(f"save: GGUF has no field for end tokens: {listing(lost)}", RlxWarning, stacklevel=4)
            return candidate
        differing = differing or wrong[0]
    raise UnsupportedError(
        f"save: GGUF cannot express the tokenizer: {quote(differing)} has other tokens with its metadata; {_REMEDY}"
    )
