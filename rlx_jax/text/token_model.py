"""Functions that `CausalLM` and `Encoder` share: compile a flow on token ids, and check its outputs and tokenizer."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

import jax

from rlx_jax import errors
from rlx_jax.errors import did_you_mean, integer_text, listing, quote, shown
from rlx_jax.io.folder import open_folder
from rlx_jax.ir.types import is_float, short_name
from rlx_jax.models.encoder import LABEL_LOGITS
from rlx_jax.program import Weights
from rlx_jax.runtime.checkpoint_origin import CheckpointOrigin
from rlx_jax.runtime.compile_flow import open_model
from rlx_jax.runtime.export_model import Artifact, ArtifactPlan, write_artifact
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.model import CompiledModel
from rlx_jax.runtime.report import Report
from rlx_jax.text.tokenizer import TOKENIZER, Tokenizer, load_tokenizer
from rlx_jax.weights.format import OpenOptions


def open_token_model(
    flow: Any, weights: Weights, options: OpenOptions, max_positions: int | None, programs: tuple[str, ...],
    inputs: bool = False,
) -> tuple[CompiledModel, int]:  # fmt: skip
    """Return the compiled model of a flow on token ids, as `open_model` does, and its vocabulary size.

    Args:
        flow: a flow, or a compiled model.
        weights, options: see `open_model`.
        max_positions: the requested limit for the tokens of a sequence, if any.
        programs: the programs that requests run.
        inputs: whether requests pass inputs in addition to tokens; then inputs without a `seq` axis may be required.

    Raises:
        RequestError: an argument that a compiled model already has.
        GraphError: the flow's first input does not index an embedding, it has other required inputs, or its output
            does not have one row for each token.
    """
    if max_positions is not None:
        max_positions = check_integer("max_positions", max_positions, 1)
    model = open_model(flow, weights, options, programs, max_positions)
    if model.program != "forward":
        model = replace(model, program="forward", last_key=None)
    ids = model.first_input
    rows = model.template().bounds.ids.get(ids)
    if rows is None:
        raise errors.GraphError(f"{model.name}: the first input, {ids!r}, does not index an embedding")
    required = [
        i.name for i in model.inputs
        if not i.optional and i.name != ids and not (inputs and "seq" not in i.type.symbols)
    ]  # fmt: skip
    if required:
        raise errors.GraphError(
            f"{model.name}: requests only provide token ids, but the flow also requires "
            f"{listing(required)}; give them a default, or call rlx_jax.compile(flow)"
        )
    shape = model.template().built.primary_shape
    if len(shape) != 3:
        raise errors.GraphError(f"{model.name}: expected an output [batch, seq, width], got {list(shape)}")
    return model, rows


def model_repr(kind: str, model: CompiledModel, vocab_size: int, max_positions: int | None) -> str:
    """Return the `repr` of a `CausalLM` or an `Encoder`."""
    positions = max_positions or "any number of"
    target = model.settings.target
    return f"{kind}({model.name}: vocabulary {vocab_size}, {positions} positions, target {target})"


def check_logits(model: CompiledModel, vocab_size: int) -> None:
    """Check that the output of a causal flow is logits: floating-point, one for each row of the embedding.

    Raises:
        ShapeError: another width. DTypeError: not floating-point.
    """
    flow, built = model.flow, model.template().built
    if (width := built.primary_shape[-1]) != vocab_size:
        raise errors.ShapeError(
            f"{flow.name}: a CausalLM's output is logits [batch, seq, {vocab_size}], one for each row of the "
            f"embedding; got width {width}"
        )
    dtype = built.hir.output_types[0].dtype
    if not is_float(dtype):
        raise errors.DTypeError(
            f"{flow.name}: a CausalLM's output is logits of a floating dtype; got {short_name(dtype)}"
        )


def check_hidden_states(model: CompiledModel, vocab_size: int) -> None:
    """Check that the output of an encoder is hidden states, and not the logits of a causal model's head.

    Raises:
        GraphError: it is logits; the message explains how to leave the head out.
    """
    name = model.output_names[0]
    if model.template().built.primary_shape[-1] != vocab_size or name == LABEL_LOGITS:
        return
    # Without a head they are hidden states whose width happens to be the size of the vocabulary.
    if name == "logits" or model.template().has_head:
        raise errors.GraphError(
            f"{model.name}: the output {quote(name)} is logits [batch, seq, {vocab_size}], but an Encoder takes hidden "
            "states [batch, seq, hidden]: leave the head out. For a recipe: rlx_jax.Encoder(dataclasses.replace("
            "recipe, hidden_only=True)); for a custom flow: remove its LmHead"
        )


# The classes that have a method, for the error of a model that lacks it. A method that all classes have is not here.
METHOD_CLASSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("generate", "stream", "prefill", "extend", "perplexity", "chat", "conversation"), ("CausalLM",)),
    "embed": ("Encoder", "VisionEncoder", "DualEncoder"), "hidden_states": ("Encoder", "VisionEncoder"),
    "score": ("CausalLM", "Reranker"),
    **dict.fromkeys(("embed_images", "similarity"), ("DualEncoder",)), "rank": ("Reranker",),
    "embed_tokens": ("Encoder", "MultiVectorEncoder"), "maxsim": ("MultiVectorEncoder",), "tag": ("TokenClassifier",),
    "classify": ("Classifier", "ImageClassifier"), "answer": ("QuestionAnswerer",), "fill": ("MaskedLM",),
    "logits": ("CausalLM", "Classifier", "TokenClassifier", "QuestionAnswerer", "MaskedLM", "ImageClassifier"),
}  # fmt: skip


class TaskModel:
    """Base class of `CausalLM`, `Encoder` and similar classes.

    They print as the blocks of their model, and cannot be called: `lm(tokens)` could mean logits, text or all outputs.
    """

    model: CompiledModel
    loaded_from: CheckpointOrigin | None = None  # the checkpoint, if `rlx_jax.load` loaded the model
    _methods: str

    def __call__(self, *args: Any, **named: Any) -> NoReturn:
        """Raise a RequestError that names the methods to call instead."""
        raise errors.RequestError(f"{type(self).__name__}: call one of its methods: {self._methods}")

    if not TYPE_CHECKING:  # a type checker would take every name for an attribute

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError that names the classes that have a method, and the methods of this one."""
            if hasattr(type(self), name):
                return object.__getattribute__(self, name)  # a property failed: raise its own AttributeError
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            if name in METHOD_CLASSES:
                classes = " or ".join(f"rlx_jax.{each}" for each in METHOD_CLASSES[name])
                message += f": it is a method of {classes}; this model has: {self._methods}"
            elif not name.startswith("_"):
                message += did_you_mean(name, (public for public in dir(self) if not public.startswith("_")))
            raise AttributeError(message)

    def export(
        self, path: str | os.PathLike[str], *, platforms: Sequence[str] | None = None,
        sizes: Sequence[Mapping[str, int]] | None = None, format: str = "rlxa", overwrite: bool = False,
    ) -> Artifact:  # fmt: skip
        """Export the model to one `.rlxa` file with tokenizer and settings, from which `rlx_jax.load` makes the same
        object without the checkpoint. The arguments are as for `CompiledModel.export`."""
        return write_artifact(self.model, path, self.artifact_plan(), platforms, sizes, format, overwrite)

    def artifact_plan(self) -> ArtifactPlan:
        """Return what an artifact of this class has.

        Raises:
            UnsupportedError: this class cannot be exported.
        """
        raise errors.UnsupportedError(
            f"export: a {type(self).__name__} cannot be exported; its .model can, without tokenizer and settings"
        )

    def __str__(self) -> str:
        return str(self.model)

    def _repr_html_(self) -> str:
        return self.model._repr_html_()


class EncoderModel(TaskModel):
    """A `TaskModel` that runs the model of its `encoder`, also after a new one is set."""

    encoder: Any

    def __repr__(self) -> str:
        return repr(self.encoder).replace(type(self.encoder).__name__, type(self).__name__, 1)

    @property
    def model(self) -> CompiledModel:
        """The compiled model."""
        return self.encoder.model  # type: ignore[no-any-return]

    @model.setter
    def model(self, model: CompiledModel) -> None:
        self.encoder.model = model.as_program("forward")  # it may have been compiled to train

    def warmup(self) -> None:
        """Run every program once that requests can need."""
        self.encoder.warmup()

    def report(self, **sizes: int) -> Report:
        """Return the cost of compiling and of the last program."""
        return self.encoder.report(**sizes)  # type: ignore[no-any-return]


@runtime_checkable
class FastTokenizer(Protocol):
    """A fast tokenizer of transformers, such as `AutoTokenizer.from_pretrained` returns."""

    @property
    def backend_tokenizer(self) -> Any: ...

    def save_pretrained(self, save_directory: str) -> Any: ...


# A tokenizer of this package or a fast one of transformers; or its path: a directory with a `tokenizer.json`, that
# file, or a model of the Hub.
TokenizerLike = Tokenizer | FastTokenizer | str | os.PathLike[str]


def open_tokenizer(tokenizer: TokenizerLike | None) -> Tokenizer | None:
    """Return a tokenizer unchanged, load it from its path, or convert one of transformers by saving and loading it.

    Raises:
        RequestError: another type. MissingFileError: there is no `tokenizer.json`. Others as `load_tokenizer` and
            `open_folder`.
    """
    if isinstance(tokenizer, Tokenizer | None):
        return tokenizer
    if isinstance(tokenizer, FastTokenizer) and not isinstance(tokenizer, type):
        with tempfile.TemporaryDirectory() as directory:
            tokenizer.save_pretrained(directory)
            return open_tokenizer(directory)
    name = os.fspath(tokenizer) if isinstance(tokenizer, str | os.PathLike) else ""
    path = Path(name)
    if not name or (path.is_file() and path.name != TOKENIZER):
        raise errors.RequestError(
            f"tokenizer is {shown(tokenizer)}; expected a directory with a {TOKENIZER}, that file, a fast tokenizer of "
            "transformers, or the result of rlx_jax.text.tokenizer.load_tokenizer(directory)"
        )
    try:
        folder = open_folder(path.parent if path.name == TOKENIZER else name)
    except errors.RlxError as error:
        error.locate("tokenizer")
        raise
    loaded = load_tokenizer(folder)
    if loaded is None:
        raise errors.MissingFileError(f"tokenizer: {folder.where(TOKENIZER)}: no such file")
    return loaded


def supported_positions(model: CompiledModel) -> int | None:
    """Return the longest sequence that the model and its position tables support; None without a limit."""
    positions: int | None = model.template("forward").bounds.positions
    return positions


def check_positions(tokens: int, max_positions: int | None, subject: str, prompt: int | None = None) -> None:
    """Check that a sequence of `tokens` fits the model.

    Args:
        prompt: the number of prompt tokens among them; the message then has the number of new tokens that fit.

    Raises:
        SequenceLengthError: it does not fit; the message has both numbers.
    """
    if max_positions is not None and tokens > max_positions:
        advice = "" if prompt is None else f"; at most {max_positions - prompt} new tokens fit"
        if prompt is not None and prompt >= max_positions:  # for all new tokens, if the model has room for them
            room = max_positions - (tokens - prompt)
            advice = f"; cut the prompt to {room if room > 0 else max_positions - 1} tokens or fewer"
        raise errors.SequenceLengthError(
            f"{subject}: {integer_text(tokens)} positions, the model has {max_positions}{advice}"
        )


def primary_output(outputs: Any) -> jax.Array:
    """Return the primary output of a flow; side outputs come after it in the dictionary."""
    output: jax.Array = next(iter(outputs.values())) if isinstance(outputs, dict) else outputs
    return output
