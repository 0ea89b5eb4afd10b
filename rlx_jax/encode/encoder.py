"""Define `Encoder`, which computes hidden states and sentence embeddings.

Its model is a text encoder, or a decoder without its language-model head.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Unpack

import jax
import numpy as np

from rlx_jax.encode.artifact_plan import encoder_plan
from rlx_jax.encode.embedding import Batcher, PackedBatcher, Stream, embed_iter
from rlx_jax.encode.explain import explain as explain_texts
from rlx_jax.encode.explain import profile as profile_texts
from rlx_jax.encode.packing import Block, costs_on, sizes_for
from rlx_jax.encode.padded_rows import RowBatcher, read_mask_names, run_exact_rows
from rlx_jax.encode.pooled import POOLED, Vectors, check_finite, check_padding, pooled_width
from rlx_jax.encode.precision import OutputFormat
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.encode.sparse import embed_sparse, embed_tokens
from rlx_jax.encode.text_rows import Requests, TextReader
from rlx_jax.encode.token_selection import TokenSelection
from rlx_jax.encode.vector_layers import PlacedLayers, output_width
from rlx_jax.errors import DeriveError, RequestError, UnboundInputError, check_names, shown, suggest_keywords
from rlx_jax.lowering.hir.independence import why_rows_mix
from rlx_jax.lowering.hir.row_layouts import MASK
from rlx_jax.lowering.hir.rules import find_causal_block
from rlx_jax.program import Weights
from rlx_jax.runtime.arguments import refuse_consumed
from rlx_jax.runtime.explain import show as show_model
from rlx_jax.runtime.inputs import as_host_array, check_integer
from rlx_jax.runtime.report import Report, RequestReport
from rlx_jax.text.request_checks import (
    TYPES,
    Ids,
    TokenRows,
    check_buckets,
    check_has_buckets,
    crop_to,
    keep_mask,
    row_lengths,
    token_block,
)
from rlx_jax.text.token_model import (
    TaskModel,
    TokenizerLike,
    check_hidden_states,
    check_positions,
    model_repr,
    open_token_model,
    open_tokenizer,
    primary_output,
    supported_positions,
)
from rlx_jax.weights.format import CompileOptions, OpenOptions

# Number of texts from which `embed` shows progress by default, on a terminal.
PROGRESS_THRESHOLD = 10_000
# Maximum length of a text, in tokens, that is assumed for a model without a limit.
DEFAULT_MAX_POSITIONS = 2**20

_BUCKETS_ADVICE = (
    "Buckets pad blocks with tokens that it may read: leave out buckets.{} of the profile, and texts run at their own "
    "lengths"
)


class Encoder(TaskModel):
    """Compute hidden states and embeddings of texts.

    `flow` maps ids `[batch, seq]` to hidden states `[batch, seq, hidden]`. A decoder works without its head, as
    `dataclasses.replace(recipe, hidden_only=True)` makes it. The result for a text does not depend on the other texts
    of its batch: rows are padded or packed only where an analysis of the flow proves that no token reads padding or
    another text; otherwise each text runs at its own length. See `packing` and `own_lengths`.

    Args:
        flow: a `ModelFlow` with the ids as its first input, or a recipe; or a compiled model, to share its programs.
        tokenizer: for strings; or the directory of its `tokenizer.json`. `rlx_jax.load` passes the checkpoint's
            tokenizer.
        pipeline: prompt, truncation, pooling and normalization for `embed`; `rlx_jax.load` passes the checkpoint's.
            Without one, the vector of a text is the flow's side output `pooled` `[batch, width]`, or else the mean of
            its hidden states.
        padding: (tokens, id): pad each text to this number of tokens with this id, and let the model read the padding
            like any other token. None: no token reads padding.
        max_positions: the longest sequence that the model supports, in tokens.
        options: `profile`, `mesh`, `strict`, `missing` and `key` as in `rlx_jax.compile`; `progress`, a callback that
            reports loading and compiling: see `rlx_jax.compiler.executable.Progress`.
    """

    _methods = "embed(texts) returns vectors, hidden_states(tokens) one per token, model(tokens) every output"

    @suggest_keywords(*CompileOptions.__annotations__)
    def __init__(
        self, flow: Any, weights: Weights = None, *, tokenizer: TokenizerLike | None = None,
        pipeline: SentencePipeline | None = None, padding: tuple[int, int] | None = None,
        max_positions: int | None = None, **options: Unpack[CompileOptions],
    ) -> None:  # fmt: skip
        self.tokenizer = open_tokenizer(tokenizer)
        compile_options = OpenOptions(**options)
        self.model, self.vocab_size = open_token_model(flow, weights, compile_options, max_positions, ("forward",))
        check_hidden_states(self.model, self.vocab_size)
        self.max_positions = supported_positions(self.model)
        if not isinstance(pipeline, SentencePipeline | None):
            raise RequestError(f"pipeline is {shown(pipeline)}; expected a SentencePipeline")
        self._has_pooled_output = pipeline is None and POOLED in self.model.output_names
        self.pipeline = pipeline or SentencePipeline()
        self.buckets = self.model.settings.buckets
        check_buckets(self.buckets, self.max_positions)
        self.padding = check_padding(padding, self.vocab_size, self.max_positions)
        self.width = int(self.model.template().built.primary_shape[-1])
        self._placed: tuple[SentencePipeline, PlacedLayers] | None = None
        output_width(self.pipeline.layers, self._pooled_width, "pipeline")
        for layer in (self.pipeline.token_weight, *self.pipeline.token_layers[:1]):
            output_width([] if layer is None else [layer], self.width, "pipeline")
        self._last_request: RequestReport | None = None

    def __repr__(self) -> str:
        return model_repr("Encoder", self.model, self.vocab_size, self.max_positions)

    def hidden_states(self, tokens: Any, lengths: Any = None, **inputs: Any) -> jax.Array:
        """Return the last hidden state: tokens `[B, S]` ints → `[B, S, H]` float32.

        Args:
            tokens: ids `[B, S]`.
            lengths: `[B]`, the number of valid tokens of each right-padded row. Without it every token is valid.
            inputs: the flow's optional inputs, each `[B, S]`: `attention_mask` of 0 and 1 (instead of `lengths`),
                `token_type_ids`, `position_ids`.

        Raises:
            TokenIdError, SequenceLengthError: an id or a length is out of range.
            RequestError: one of `inputs` has another shape than the tokens; or the mask has other values than 0 and 1,
                or masks a token in front of a valid one although a stage carries a state past it.
        """
        block, _, _ = token_block(tokens, self.vocab_size)
        check_positions(block.shape[1], self.max_positions, "tokens")
        valid = row_lengths(lengths, block.shape, min_length=1)
        # A flow need not declare the mask: the derived `padded` program adds it.
        names = dict.fromkeys([*(d.name for d in self.model.flow._inputs), MASK])
        input_names = [*names, "lengths"]
        check_names(inputs, input_names, f"{self.model.name}: has no input", "; there are", UnboundInputError)
        inputs = {name: value for name, value in inputs.items() if value is not None}
        refuse_consumed({}, inputs)
        for name, value in inputs.items():
            shape = (value if isinstance(value, jax.Array) else as_host_array(name, value)).shape
            if shape != block.shape:
                raise RequestError(f"{name}: expected {list(block.shape)}, as the tokens, got {list(shape)}")
            if name == MASK and not isinstance(value, jax.Array):
                inputs[name] = keep_mask(value, block.shape)
        if lengths is not None and MASK in inputs:
            raise RequestError(f"lengths and {MASK} have the same meaning; pass one of them")
        has_buckets = bool(self.buckets.batch or self.buckets.prompt)
        # Without lengths, mask and buckets no token is padding, so the plain forward program runs.
        if lengths is None and MASK not in inputs and not has_buckets:
            return primary_output(self.model(block, **inputs))
        # With buckets the padded program also runs blocks that fill their bucket: one program per size.
        has_mask = MASK in inputs
        inputs = {MASK: np.arange(block.shape[1])[None] < valid[:, None], **inputs}
        batcher = self._row_batcher(frozenset(inputs))
        if batcher.exact:
            hidden = run_exact_rows(batcher, block, inputs, self._row_lengths(inputs[MASK], block.shape))
        else:
            # A stage that carries a state would carry masked tokens into the valid ones after them.
            if has_mask and self._left_context_reason:
                self._row_lengths(inputs[MASK], block.shape)
            sizes = batcher.sizes(*block.shape) if has_buckets else block.shape
            hidden = crop_to(self.model.programs, primary_output(batcher.outputs(block, inputs, *sizes)), *block.shape)
        self.model.last_key = batcher.model.last_key
        return hidden

    def _row_lengths(self, mask: Any, shape: tuple[int, ...]) -> list[int]:
        """Return the number of tokens of each row of a right-padding mask.

        It is called if rows run at their own lengths, or if a stage carries a state from left to right.

        Raises:
            RequestError: the mask is not ones followed by zeros in some row.
        """
        keep = keep_mask(mask, shape)
        valid = keep.sum(axis=1)
        is_misplaced = keep != (np.arange(shape[1])[None] < valid[:, None])
        for row in np.flatnonzero((valid == 0) | is_misplaced.any(axis=1))[:1]:
            why = f"is run at the length of each row: {self.own_lengths}"
            if not self.own_lengths:
                why = f"carries a state past masked tokens: {self._left_context_reason}; pad after the tokens"
            raise RequestError(f"attention_mask: row {row} is not ones followed by zeros, and {self.model.name} {why}")
        return [int(n) for n in valid]

    @suggest_keywords()
    def embed(
        self, texts: Any, *, prompt_name: str | None = None, prompt: str | None = None, truncate_dim: int | None = None,
        normalize: bool = False, precision: str = "float32", ranges: Any = None, max_tokens: int | None = None,
        show_progress: bool | None = None,
    ) -> np.ndarray[Any, Any]:  # fmt: skip
        """Return one vector for each text or id list: `[n, H]` float32; a single string gives `[H]`.

        Texts are tokenised, truncated, pooled and normalised as the checkpoint's files define. Several texts share a
        row of the program, without attending to each other, unless `packing` gives a reason against it.

        Args:
            texts: a string, or a list or an iterator of strings or of id lists. An iterator is consumed in chunks.
            prompt_name: one of the pipeline's `prompts`, put in front of each string. None: its default prompt, if it
                has one; id lists get none.
            prompt: the prompt itself, in place of `prompt_name`; `""` embeds without the default prompt.
            truncate_dim: return only this many numbers of each vector, for models that were trained for it. None: the
                pipeline's, or all.
            normalize: divide each vector by its length, after truncation. The pipeline's own normalization, if there is
                one, comes before truncation.
            precision: "float32", or "int8", "uint8", "binary", "ubinary": see `quantize_vectors`, as for `ranges`.
            ranges: the smallest and the largest value of each column, `[2, width]`, for "int8" and "uint8".
            max_tokens: maximum rows × width of one call, which has at least one row; None: the default for the device.
            show_progress: print one line on stderr; None: for 10,000 texts or more, if stderr is a terminal.

        Raises:
            RequestError: not strings or id lists; no such prompt, both ways to choose one, or one for id lists; no such
                precision, or too large a `truncate_dim`.
            TokenIdError: an id out of range.
            NumericsError: vectors that are not finite; its `rows` names them, and `outputs` has all vectors.
        """
        self.model.concrete_params("embed")
        if not isinstance(show_progress, bool | None):
            raise RequestError(f"show_progress is {shown(show_progress)}; expected True, False or None")
        output = OutputFormat.checked(self, truncate_dim, normalize, precision, ranges)
        requests = self.reader.read_prompted(texts, prompt_name, prompt)
        out = output(self.run(requests, max_tokens, show_progress))
        return out[0] if requests.is_single else out

    embed_sparse, embed_tokens = embed_sparse, embed_tokens

    @property
    def reader(self) -> TextReader:
        """How texts become rows of token ids."""
        return TextReader(
            self.tokenizer, self.pipeline, self.vocab_size, self.max_positions, self.padding, self.buckets,
            self._reads_types,
        )  # fmt: skip

    def run(
        self, requests: Requests, max_tokens: int | None = None, show_progress: bool | None = False
    ) -> np.ndarray[Any, Any]:
        """Return one vector for each text of a request, `[n, width]`; arguments and errors as in `embed`."""
        batcher = self._make_batcher(max_tokens, requests.prompt_tokens)
        out = self._run(requests, batcher, self._pooled_width, show_progress).finish()
        if self.pipeline.layers:
            out = self._placed_layers(out)
            check_finite(out, requests.label, requests.index)
        return out

    def run_tokens(self, requests: Requests, selection: TokenSelection, max_tokens: int | None = None) -> list[Vectors]:
        """Return the results of the selected tokens of each text, `[tokens, width]`; errors as in `embed`."""
        batcher = replace(self._make_batcher(max_tokens), selection=selection)
        return self._run(requests, batcher, selection.width(self.width), False).split()

    def _run(self, requests: Requests, batcher: Batcher, width: int, show_progress: bool | None) -> Stream:
        """Run a request, and return the stream with its results, which are finite."""
        total = requests.total
        if show_progress is None:
            show_progress = total is not None and total >= PROGRESS_THRESHOLD and sys.stderr.isatty()
        clock = self.model.programs.start_timer()
        stream = Stream(batcher, np.zeros((total or 0, width), np.float32))
        try:
            for token_rows, has_more in requests.chunks:
                stream.add(token_rows, has_more)
                if show_progress:
                    total_text = "" if total is None else f" of {total}"
                    line = f"\rembed: {len(stream.ids)}{total_text} texts"
                    print(line, end="" if has_more else "\n", file=sys.stderr, flush=True)
            self._check_vectors(stream, requests)
            return stream
        finally:
            stream.close()
            seconds, compiled = clock()
            num_tokens = sum(map(len, stream.ids))
            self._last_request = RequestReport("texts", len(stream.ids), num_tokens, seconds, compiled=compiled)
            self.model.last_key = batcher.model.last_key or self.model.last_key

    @property
    def _pooled_width(self) -> int:
        """Width of the vectors before the layers of the pipeline."""
        return pooled_width(self.model) if self._has_pooled_output else self.width * len(self.pipeline.pooling)

    @property
    def output_width(self) -> int:
        """Width of the vectors that `embed` returns, without truncation."""
        return output_width(self.pipeline.layers, self._pooled_width, "pipeline") or 0

    @property
    def _placed_layers(self) -> PlacedLayers:
        """The layers after the pooling, with their weights on the devices of the model."""
        if self._placed is None or self._placed[0] is not self.pipeline:
            layers = PlacedLayers.on(self.model.programs, self.pipeline.layers_after_pooling)
            self._placed = self.pipeline, layers
        return self._placed[1]

    @functools.cached_property
    def _reads_types(self) -> bool:
        """Whether the model has embeddings of several token types."""
        if TYPES not in (i.name for i in self.model.flow._inputs):
            return False
        key = self.model.key(frozenset({TYPES}))
        return self.model.programs.template(key).bounds.ids.get(TYPES, 0) > 1

    def _check_vectors(self, stream: Stream, requests: Requests) -> None:
        """Wait for the results of a stream of a request, and check that all are finite.

        A text with non-finite hidden states can spoil the other texts of its row. So all texts with failed vectors run
        again in rows of their own; then only the faulty texts fail.

        Raises:
            NumericsError: some vectors are not finite.
        """
        failed = np.flatnonzero(~np.isfinite(stream.finish()).all(axis=1))
        if failed.size:
            stream.rerun(sorted({*np.searchsorted(stream.ends, failed, side="right").tolist()}))
            out = stream.finish()
            results = out if stream.batcher.selection is None else stream.split()
            check_finite(results, requests.label, requests.index)

    @functools.cached_property
    def packing(self) -> str:
        """Reason why `embed` gives each text a row of its own; empty if texts share rows."""
        if self._has_pooled_output:
            return f"the flow's output {POOLED!r} is one vector for a row"
        if self.padding is not None:
            return "texts are padded, and the padding is read"
        if self.buckets.batch or self.buckets.prompt:
            return "the profile's buckets define the block sizes"
        return self._unavailable_reason("packed", read_mask_names(self.model))

    @functools.cached_property
    def own_lengths(self) -> str:
        """Reason why rows run at their own lengths; empty if they are padded, so that no token reads padding."""
        return self._unavailable_reason("padded", frozenset({MASK}))

    @functools.cached_property
    def _left_context_reason(self) -> str:
        """Description of what reads all preceding tokens, including padding in front; empty if nothing does."""
        return find_causal_block(self.model.template().hir)

    def _unavailable_reason(self, program: str, input_names: frozenset[str]) -> str:
        """Return the reason why the derived `program` is not available with these inputs; empty if it is."""
        return self.model.programs.derivation_error(self.model.name, program, input_names)

    def _row_batcher(self, input_names: frozenset[str] = frozenset({MASK})) -> RowBatcher:
        """Return the form that runs rows of different lengths.

        Args:
            input_names: names of the inputs that the request passes along with the tokens.

        Raises:
            DeriveError: the profile has buckets for lengths, but tokens may read the padding that buckets add.
        """
        reason = self._unavailable_reason("padded", input_names)
        if not reason:
            return RowBatcher(replace(self.model, program="padded", last_key=None), self.buckets, self.max_positions)
        if self.buckets.prompt:
            raise DeriveError(f"{reason}. {_BUCKETS_ADVICE.format('prompt')}")
        return self._exact_batcher(read_mask_names(self.model))

    def _exact_batcher(self, mask: frozenset[str]) -> RowBatcher:
        """Return the form that runs rows unpadded, one row per call if rows may influence each other."""
        template = self.model.template()
        reason = why_rows_mix(template.hir, template.types)
        if reason and self.buckets.batch:
            raise DeriveError(f"{reason}. {_BUCKETS_ADVICE.format('batch')}")
        return RowBatcher(self.model, self.buckets, exact=True, one_row_per_call=bool(reason), mask=mask)

    def _make_batcher(self, max_tokens: int | None, prompt_tokens: int = 0) -> Batcher:
        """Return how `embed` lays out and runs texts: packed rows, padded rows, or rows at their own lengths."""
        max_tokens = None if max_tokens is None else check_integer("max_tokens", max_tokens, 1)
        # The length is an input of the program, so that one program serves prompts of all lengths.
        skip = None if self.pipeline.include_prompt else prompt_tokens
        if self.packing:
            rows = self._row_batcher() if self.padding is None else self._exact_batcher(frozenset())
            pipeline = None if self._has_pooled_output else self.pipeline.pooling_only
            return replace(rows, pipeline=pipeline, tokens=max_tokens, skip=skip)
        settings = self.model.settings
        longest = self.max_positions or DEFAULT_MAX_POSITIONS
        sizes = sizes_for(costs_on(settings.target), longest, max_tokens, settings.buckets.row_multiple)
        model = replace(self.model, program="packed", last_key=None)
        return PackedBatcher(model, self.pipeline.pooling_only, sizes, skip)

    @suggest_keywords()
    def warmup(self) -> None:
        """Run every program once that `embed` can need, for any lengths and number of texts, so that none compiles
        later.

        With buckets `hidden_states` runs the same programs, unless it gets `token_type_ids` or `position_ids`. A
        program that compiles later all the same is counted in `report().recompiles` and handled as the profile's
        `buckets.on_recompile` requests.

        Raises:
            RequestError: each text has a row of its own, and the profile has no buckets for lengths and rows; or rows
                are not padded; or the model has no maximum length.
        """
        self.run_all_programs(None)

    def run_all_programs(self, selection: TokenSelection | None, of_pairs: Iterable[bool] = (False,)) -> None:
        """Run every program once that requests for vectors, or for the selected tokens, can need: see `warmup`.

        `of_pairs`: for texts, for pairs of texts, or for both.
        """
        batcher = replace(self._make_batcher(None), selection=selection)
        if isinstance(batcher, RowBatcher) and batcher.exact and self.padding is None:
            raise RequestError(f"warmup: each length of a text is a program of its own: {self.own_lengths}")
        if isinstance(batcher, PackedBatcher):
            if self.max_positions is None:
                raise RequestError(f"warmup: {self.model.name} has no maximum length: pass max_positions=")
            blocks = [Block(rows, width, batcher.sizes.slots(width), ((0,),)) for rows, width in batcher.sizes.blocks]
        else:
            check_has_buckets(self.buckets, ("prompt", "batch") if self.padding is None else ("batch",))
            widths = self.buckets.prompt if self.padding is None else self.padding[:1]
            sizes = [(rows, width) for rows in self.buckets.batch for width in widths]
            blocks = [Block(rows, width, 1, ((0,),) * rows) for rows, width in sizes]
        with self.model.programs.warm_up():
            kinds = dict.fromkeys(is_pair and self._reads_types for is_pair in of_pairs)
            for block, has_types in itertools.product(blocks, kinds):

                def run(block: Block, row: Ids, has_types: bool = has_types) -> None:
                    jax.block_until_ready(batcher.run(block, TokenRows([row], [0 * row] if has_types else [])))

                length, slots = (block.width,) * 2 if isinstance(batcher, RowBatcher) else (1, block.slots)
                token_id = None if selection is None else selection.token_id
                row = np.full(length, int(token_id == 0), np.int32)  # of tokens that are not selected
                run(block, row)
                if token_id is not None:  # as many tokens as a call returns results of
                    run(replace(block, texts=((0,),) * block.rows), np.full(slots, token_id, np.int32))
                elif isinstance(batcher, PackedBatcher) and batcher.takes_tokens:  # as many texts
                    run(replace(block, texts=((0,) * slots,) * block.rows), row)
            if self.pipeline.layers:
                self._placed_layers.warm_up(self._pooled_width)

    def report(self, **sizes: int) -> Report:
        """Return the cost of compiling and the requirements of the last program.

        With `sizes` it reports the requirements of `forward` at these sizes.
        """
        layout = self.packing or "several texts in a row"
        if self.packing and self.padding is None and self.own_lengths:
            layout = f"rows at their own lengths: {self.own_lengths}"
        return replace(self.model.report(**sizes), embedding=layout, request=self._last_request)

    explain, show, profile, artifact_plan = explain_texts, show_model, profile_texts, encoder_plan
    embed_iter = embed_iter

    def run_texts(self, texts: Any, max_tokens: int | None = None) -> Any:
        """Run the request that `explain` and `profile` describe: `embed` of texts or id lists."""
        return self.embed(texts, max_tokens=max_tokens)
