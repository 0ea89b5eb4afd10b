"""`CausalLM`: logits, and generation with a key/value cache, for any causal flow.

The class checks arguments and delegates. The compiler derives the cached programs from the forward program.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeVar, Unpack, overload

import jax
import numpy as np

from rlx_jax.errors import RequestError, RlxWarning, listing, suggest_keywords
from rlx_jax.generate.artifact_plan import language_model_plan
from rlx_jax.generate.conversation import Conversation, check_stream_options, open_conversation
from rlx_jax.generate.decode import RowTokens
from rlx_jax.generate.decode_state import DecodeState
from rlx_jax.generate.drafters import DRAFT_TOKENS, make_drafter
from rlx_jax.generate.explain import explain, profile, show
from rlx_jax.generate.generation import NewTokens, report_of_requests, stream_request
from rlx_jax.generate.many import generate_iter, prompt_options, run_prompts
from rlx_jax.generate.patching import patch
from rlx_jax.generate.prefill import capture, capture_request, check_request_captures, compute_logits, extend, prefill
from rlx_jax.generate.prefix_cache import PrefixCache, prefix_cache
from rlx_jax.generate.prefix_named import load_prefix, name_prefix, save_prefix
from rlx_jax.generate.request import (
    DecodingOptions,
    GenerateOptions,
    LanguageModel,
    Request,
    StreamOptions,
    check_request,
)
from rlx_jax.generate.request_inputs import Inputs
from rlx_jax.generate.row_options import Budgets, Samplers, StopLike
from rlx_jax.generate.sampler import SAMPLING, Sampler
from rlx_jax.generate.scoring import Score, mean_perplexity, perplexity_windows, score_items, scored_tokens
from rlx_jax.generate.warm_up import warm_all
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.program import Weights
from rlx_jax.runtime.inputs import check_flag
from rlx_jax.runtime.report import Report, RequestReport
from rlx_jax.text import token_model
from rlx_jax.text.chat import chat_prompt
from rlx_jax.text.request_checks import Prompts, check_buckets, classify_prompts, id_list, token_block
from rlx_jax.weights.format import CompileOptions, OpenOptions

IdPair = tuple[list[int], list[int]]
# `generate` returns the type of its prompts: text for strings, ids for ids.
PromptLike = TypeVar("PromptLike", str, list[str], list[int], list[list[int]])


class CausalLM(token_model.TaskModel):
    """A causal language model: `flow` maps token ids `[batch, seq]` to logits `[batch, seq, vocab]`.

    It generates text, scores it, and exposes the key/value cache; `rlx_jax.load` returns one for a checkpoint.

    Args:
        flow: a `ModelFlow` with the ids as first input, or a recipe; or a compiled model, to share its programs.
        weights: as in `rlx_jax.compile`; so are the options `profile`, `mesh`, `strict`, `missing` and `key`.
        tokenizer: the tokenizer that strings need, or the directory of its `tokenizer.json`. `rlx_jax.load` passes the
            tokenizer of the checkpoint.
        max_positions: the longest sequence the model supports, in tokens.
        eos_ids: end tokens; each ends its row.
        bos_id: the begin token, which starts an empty prompt; by default from the tokenizer.
        prefix_cache: bytes, such as "2GiB", for prefixes of prompts that are retained between calls; 0 to share none.
        options: also `progress`, a callback for loading and compiling; see `rlx_jax.compiler.executable.Progress`.
    """

    _methods = "logits(tokens) gives logits, generate(prompts) text or token ids, model(tokens) every output"

    @suggest_keywords(*CompileOptions.__annotations__)
    def __init__(
        self, flow: Any, weights: Weights = None, *, tokenizer: token_model.TokenizerLike | None = None,
        max_positions: int | None = None, eos_ids: int | Sequence[int] = (), bos_id: int | None = None,
        prefix_cache: int | str | None = None, **options: Unpack[CompileOptions],
    ) -> None:  # fmt: skip
        self.tokenizer = token_model.open_tokenizer(tokenizer)
        self.model, self.vocab_size = token_model.open_token_model(
            flow, weights, OpenOptions(**options), max_positions, programs=("forward", *CACHED_PROGRAMS), inputs=True
        )
        token_model.check_logits(self.model, self.vocab_size)
        self.max_positions = token_model.supported_positions(self.model)
        self.buckets = self.model.settings.buckets
        check_buckets(self.buckets, self.max_positions)
        self.prefix_cache = prefix_cache
        self._ids_input, self._input_decls = self.model.first_input, self.model.request_inputs
        self._unwarned_captures = self.model.built.captures  # emptied by the first warning, so that it comes once
        self._last_speculative: NewTokens | None = None
        self._last_call: tuple[Request, NewTokens] | RequestReport | None = None
        self.eos_ids = eos_ids
        if self.tokenizer and not self.eos_ids:
            self.eos_ids = self.tokenizer.eos_ids
        self.bos_id = self.tokenizer.bos_id if self.tokenizer else None
        if bos_id is not None:
            (self.bos_id,) = id_list([bos_id], self.vocab_size, "bos_id")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the end tokens, each of which ends its row. May be set, to ids or one id of the vocabulary."""
        return self._eos_ids

    @eos_ids.setter
    def eos_ids(self, ids: int | Sequence[int]) -> None:
        self._eos_ids = tuple(id_list([ids] if isinstance(ids, int | np.integer) else ids, self.vocab_size, "eos_ids"))

    def __repr__(self) -> str:
        return token_model.model_repr("CausalLM", self.model, self.vocab_size, self.max_positions)

    # -- programs ----------------------------------------------------------------------------

    @suggest_keywords()
    def logits(
        self, tokens: Any, lengths: Any = None, attention_mask: Any = None, *, inputs: Inputs = None
    ) -> jax.Array:
        """Return the logits of every position: tokens `[B, S]` ints → `[B, S, V]` float32, undefined at padding.

        Args:
            tokens: ids `[B, S]`.
            lengths: `[B]`, number of valid tokens in right-padded rows.
            attention_mask: `[B, S]`, 1 at the valid tokens of rows padded on the left or on the right; in place of
                `lengths`. Positions count valid tokens.
            inputs: other inputs of the flow by name, `{"image": pixels}`, with one row for each row of tokens.
        """
        self._warn_of_captures()
        return compute_logits(self._lm, tokens, lengths, attention_mask, inputs)

    @suggest_keywords()
    def prefill(
        self, tokens: Any, lengths: Any = None, max_len: int | None = None, logits: Literal["all", "last"] = "all",
        attention_mask: Any = None, *, inputs: Inputs = None, return_captures: bool = False,
    ) -> Any:  # fmt: skip
        """Prefill a new state: tokens `[B, S]` right-padded, `lengths` `[B]` ≥ 1 → (logits `[B, S, V]`, state).

        Args:
            max_len: capacity of a row in tokens; by default 256 more than the prompt, within the model's positions.
            logits: "last" returns the logits of each row's last token only, `[B, V]`.
            attention_mask: as in `logits`, for rows padded on the left.
            inputs: as in `logits`; the state caches what depends on them alone, so that `extend` needs none.
            return_captures: return (logits, state, captures), of all tokens, as `capture` returns them.
        """
        check_flag("return_captures", return_captures)
        if not return_captures:
            self._warn_of_captures()
        out = prefill(self._lm, tokens, lengths, max_len, logits, attention_mask, inputs, return_captures)
        return out if return_captures else out[:2]

    @suggest_keywords()
    def extend(
        self, state: DecodeState, tokens: Any, lengths: Any = None, logits: Literal["all", "last"] = "all"
    ) -> tuple[jax.Array, DecodeState]:
        """Extend a state by tokens `[B, S]` with `lengths` `[B]` (0 allowed) → (logits `[B, S, V]`, new state).

        The old state is consumed. Logits at positions from `lengths` on are undefined.

        Raises:
            SequenceLengthError: a row would not fit; the state is unchanged.
            SessionStateError: the state was consumed already.
        """
        return extend(self._lm, state, tokens, lengths, logits)

    @suggest_keywords()
    def capture(self, prompts: Any, *, inputs: Inputs = None) -> dict[str, jax.Array]:
        """Return the outputs of the blocks that `recipe.at(pattern).capture()` selects, and the flow's other side
        outputs: arrays by name, `{"layers.3.mlp": [B, S, hidden]}`. The head is not computed.

        The values of a prompt are those that `lm.model(ids)` returns for it alone. The first axis enumerates the
        prompts, also for a single one; with `stacked=True` the second axis does. Prompts are padded on the right to the
        longest: the entries after the end of a prompt are NaN, -1 in signed integers, False or 0 in others. A value
        without an axis of prompts, such as a table of positions, has the length of the longest prompt.

        Args:
            prompts: as in `generate`, strings or token ids of any lengths.
            inputs: as in `logits`, a row for each prompt.

        Raises:
            RequestError: the flow has no side outputs; or a value of several prompts cannot be split by prompt, as its
                rows and tokens share one axis. TokenIdError, SequenceLengthError: as `generate`.
        """
        return capture(self._lm, prompts, inputs)

    patch, generate_iter, artifact_plan = patch, generate_iter, language_model_plan
    prefix, load_prefix, save_prefix, prefix_cache = name_prefix, load_prefix, save_prefix, prefix_cache
    _prefixes: PrefixCache

    def _warn_of_captures(self, stacklevel: int = 5) -> None:
        """Warn once that requests return no captures."""
        names, self._unwarned_captures = self._unwarned_captures, ()
        if names:
            text = f"requests do not return the captures {listing(names, 4)}: lm.capture(prompts) returns them, and so"
            text += " do prefill and generate with return_captures=True"
            warnings.warn(text, RlxWarning, stacklevel=stacklevel - 1)

    # -- generation --------------------------------------------------------------------------

    @overload
    def generate(
        self, prompts: PromptLike, max_new_tokens: Budgets = 64, sampler: Samplers = None, stop: StopLike = (),
        seed: Any = None, attention_mask: Any = None, **options: Unpack[GenerateOptions],
    ) -> PromptLike: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Any, max_new_tokens: Budgets = 64, sampler: Samplers = None, stop: StopLike = (),
        seed: Any = None, attention_mask: Any = None, *, n: int | None = None, logprobs: int | None = None,
        return_captures: bool = False, **options: Unpack[GenerateOptions],
    ) -> Any: ...  # fmt: skip

    @suggest_keywords(*GenerateOptions.__annotations__)
    def generate(
        self, prompts: Any, max_new_tokens: Budgets = 64, sampler: Samplers = None, stop: StopLike = (),
        seed: Any = None, attention_mask: Any = None, *, n: int | None = None, logprobs: int | None = None,
        return_captures: bool = False, **options: Unpack[GenerateOptions],
    ) -> Any:  # fmt: skip
        """Continue prompts, and return the new tokens: text for strings, ids for ids, and one answer for one prompt.

        Args:
            prompts: a string, a list of strings, an id list, or a list of id lists, of any number and any lengths. An
                empty prompt starts from the begin token; without a begin token it is an error.
            max_new_tokens: at most this many new tokens per row; an end token ends its row and is its last id. This
                option and the next three have one value, or a list with one for each prompt.
            sampler: how tokens are chosen; greedy by default. See `Sampler`. Its fields may be passed in its place:
                `temperature=0.8, top_p=0.9`.
            stop: strings that end a row and are left out, or token ids that end it as an end token does; lists of them,
                one for each prompt. A row that is returned as ids ends with the token that completes a stop string.
            seed: seed of the random draws, below 2**64; by default a new one for each call, in `report().seed`. The
                draws of a row depend on the seed and its index in the request, not on the other rows. With a seed for
                each prompt they equal a call for that prompt alone.
            attention_mask: `[B, S]`, 1 at the tokens of prompts that are padded to `[B, S]`, on the left or the right.
            inputs: other inputs of the flow by name, `{"image": pixels}`, with one row for each prompt.
            speculative: the source of drafts for speculative decoding. A step verifies several drafts and accepts those
                that the model itself would choose. "prompt" is the n-gram (prompt lookup) drafter, "mtp" the
                multi-token prediction module of a Qwen 3.5 checkpoint, and another `CausalLM` of the same vocabulary
                is a draft model. `report().speculative` counts drafts and accepted drafts.
            draft_tokens: number of drafts per step.
            n: number of answers to each prompt, returned as a list; prefill runs once per prompt.
            logprobs: return a `Completion` in place of each answer, with the log-probabilities of its tokens and of
                this many likeliest ones at each step.
            state: a state of `prefill` or `extend` that the prompts continue, a row for each of them or one for all; or
                a `prefix`. It is copied, not consumed. Strings are then encoded without the tokenizer's special tokens.
            share_prefix: prefill what prompts begin with once, and copy its state. None does so in slots, where it
                saves time; True also with few prompts, for what all of them begin with.
            slots: number of rows that are decoded together while other prompts wait, for many prompts. By default few
                prompts run as one batch, and the device's memory limits the number of slots.
            progress: callback for many prompts; it gets a `BatchProgress` when answers end.
            return_captures: return (answers, captures), with the captures of each prompt and its new tokens, a row for
                each answer, as `capture` returns them: one forward pass computes them after the last token.

        Raises:
            RequestError: see `rlx_jax.errors`.
            NumericsError: logits of a row are not finite. The other rows were generated, and are in its `outputs`.
        """
        if attention_mask is not None:
            block, lengths, _ = token_block(prompts, self.vocab_size, mask=attention_mask, name="prompts")
            prompts = [row[:length].tolist() for row, length in zip(block, lengths, strict=True)]
        check_flag("return_captures", return_captures)
        self._unwarned_captures = () if return_captures else self._unwarned_captures
        batch = classify_prompts(prompts)
        request, new = self._make_request(batch, max_new_tokens, sampler, stop, seed, n=n, logprobs=logprobs, **options)
        if return_captures:
            check_request_captures(self._lm, request)
        outputs = run_prompts(self._lm, request, new)
        answers = outputs[0] if batch.is_single else outputs
        return (answers, capture_request(self._lm, request, new.rows)) if return_captures else answers

    @suggest_keywords(*StreamOptions.__annotations__)
    def stream(
        self, prompt: str | Sequence[int], max_new_tokens: int = 64, sampler: Sampler | None = None,
        stop: StopLike = (), seed: Any = None, *, n: int | None = None, logprobs: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> Iterator[Any]:  # fmt: skip
        """Generate for one prompt and yield the answer as it grows: text for a string, token ids for ids.

        The joined parts are what `generate` returns; arguments as there. Text that may still change is withheld.

        Raises:
            RequestError: `n` or `logprobs` are given, which a stream of one answer cannot return. Others as `generate`.
        """
        check_stream_options("stream", n, logprobs)
        batch = classify_prompts(prompt)
        if not batch.is_single:
            raise RequestError("stream: one prompt at a time; generate takes several")
        return stream_request(self._lm, *self._make_request(batch, max_new_tokens, sampler, stop, seed, **options))

    # -- scores ------------------------------------------------------------------------------

    @overload
    def score(self, texts: str | list[int] | tuple[str, str] | IdPair) -> Score: ...

    @overload
    def score(self, texts: list[str] | list[list[int]] | list[tuple[str, str]] | list[IdPair]) -> list[Score]: ...

    @overload
    def score(self, texts: Any) -> Any: ...

    @suggest_keywords()
    def score(self, texts: Any) -> Any:
        """Return the log-likelihood of texts: a `Score` for each, in order, or one for one; nothing is generated.

        Texts may be of all lengths: at most eight programs process them, sorted. A named prefix (`prefix`) with which a
        context begins is not read again.

        Args:
            texts: strings or id lists, where every token after the first is scored, or tuples `(context,
                continuation)` of either, where the continuation is scored. The tokenizer adds its special tokens to
                strings; an empty context is the begin token, or else the end token.

        Raises:
            RequestError, TokenIdError, SequenceLengthError: see `rlx_jax.errors`.
            DeriveError: tokens of the flow may see later tokens, or rows each other.
            NumericsError: logits of a text are not finite; `outputs` has the others.
        """
        items, single = scored_tokens(self._lm, texts)
        scores, self._last_call = score_items(self._lm, items, "score")
        return scores[0] if single else scores

    @suggest_keywords()
    def perplexity(self, text: str | Sequence[int], *, stride: int | None = None, context: int | None = None) -> float:
        """Return the perplexity of a text of any length, by windows of `context` tokens, `stride` apart.

        It is exp(−Σ wᵢ·mᵢ / Σ wᵢ), where mᵢ is the mean log-likelihood of the tokens of window i that no earlier window
        has, and wᵢ is their number less one, as on Hugging Face's page "Perplexity of fixed-length models".

        Args:
            text: a string, to which the tokenizer adds its special tokens, or ids; 2 tokens at least.
            stride: tokens between the starts of two windows; half of `context` by default.
            context: tokens of a window; by default as many as the model has positions.

        Raises:
            RequestError, SequenceLengthError, DeriveError, NumericsError: as `score`.
        """
        windows = perplexity_windows(self._lm, text, stride, context)
        scores, self._last_call = score_items(self._lm, windows, "perplexity")
        return mean_perplexity(windows, scores)

    # -- chat --------------------------------------------------------------------------------

    def chat(
        self, messages: Any, max_new_tokens: int = 64, sampler: Sampler | None = None, stop: StopLike = (),
        seed: Any = None, *, stream: bool = False, n: int | None = None, logprobs: int | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """Return the model's reply to messages, as text; with `stream` an iterator over the growing reply.

        Each call prefills all messages; `conversation` prefills only the new ones.

        Args:
            messages: `[{"role": "user", "content": "Hello"}, …]`, or a string: one message of the user.
            max_new_tokens, sampler, stop, seed, n, logprobs: as in `generate`; but `n` and `logprobs` are an error with
                `stream`. The checkpoint's end tokens end the reply.
            stream: yield the reply as it grows.
            options: `speculative`, `draft_tokens` and the fields of a sampler as in `generate`; `tools`,
                `chat_template`, `allow_special` and the template's variables as in `apply_chat_template`.

        Raises:
            RequestError, TokenizerError, LimitError: as `apply_chat_template` and `generate`.
        """
        check_flag("stream", stream)
        if stream:
            check_stream_options("chat(…, stream=True)", n, logprobs)
        turn_options = {name: options.pop(name) for name in DecodingOptions.__annotations__ if name in options}
        checked_prompts = Prompts(None, [self.apply_chat_template(messages, **options)], True)
        options_of_turn = {"text": True, "n": n, "logprobs": logprobs, **turn_options}
        request_args = self._make_request(checked_prompts, max_new_tokens, sampler, stop, seed, **options_of_turn)
        return stream_request(self._lm, *request_args) if stream else run_prompts(self._lm, *request_args)[0]

    def conversation(
        self, messages: Any = (), *, max_len: int | None = None, keep_copy: bool = True, **options: Any
    ) -> Conversation:
        """Start a conversation with its state on the device, so that each turn prefills only new tokens. It has
        the methods `.send("Hello")`, `.stream(…)` and `.fork()`, and its messages are `.messages`.

        Args:
            messages: the first messages, such as `[{"role": "system", "content": "Be brief."}]`.
            max_len: the most tokens of the conversation; the cache is then allocated for all of them at once. By
                default as many as the model has positions, in a cache that grows.
            keep_copy: also retain the ring buffers of sliding windows and the states of recurrent blocks from before
                the last reply, so that repeating a turn prefills next to nothing. False takes less memory, and
                prefills everything.
            options: `tools`, `chat_template`, `allow_special` and variables, as in `apply_chat_template`.

        Raises:
            RequestError, TokenizerError: as `apply_chat_template`.
        """
        return open_conversation(self, messages, max_len, keep_copy, options)

    def apply_chat_template(
        self, messages: Any, *, tools: Any = None, chat_template: str | None = None,
        add_generation_prompt: bool = True, tokenize: bool = True, allow_special: bool = False, **variables: Any,
    ) -> Any:  # fmt: skip
        """Render messages with the checkpoint's chat template: token ids to generate from, or the text.

        Args:
            messages: `[{"role": "user", "content": "Hello"}, …]`, or a string: one message of the user.
            tools: a list of JSON schemas of functions, for templates that describe them to the model.
            chat_template: the name of one of the checkpoint's templates, or a template to use in their place.
            add_generation_prompt: end with the beginning of a reply.
            tokenize: return ids; or else text, where control tokens appear by name, as user text may contain them too.
            allow_special: read the names of control tokens in the messages as these tokens, not as text.
            variables: other variables of the template, such as `enable_thinking=False`.

        Raises:
            RequestError: there is no template; it refuses the messages or turns their text into a control token; or
                the messages are malformed. The message names where.
            TokenizerError: the template is wrong, or does what the sandbox forbids.
            LimitError: it takes too long, too much memory, or writes too much; see `rlx_jax.text.chat_template`.
        """
        return chat_prompt(
            self._lm.require_tokenizer("chat needs", "generate from token ids"), messages, tools=tools,
            chat_template=chat_template, add_generation_prompt=add_generation_prompt, tokenize=tokenize,
            allow_special=allow_special, variables=variables, arguments=SAMPLING,
        )  # fmt: skip

    # -- warm-up -----------------------------------------------------------------------------

    @suggest_keywords()
    def warmup(
        self, max_new_tokens: int = 64, samplers: Sampler | Sequence[Sampler] | None = None, *,
        speculative: Any = None, draft_tokens: int = DRAFT_TOKENS, scoring: bool = False, n: int | None = None,
        logprobs: int | None = None, slots: int | None = None,
    ) -> None:  # fmt: skip
        """Run every program once that requests within the profile's buckets can need, so that no request compiles.

        `generate`, `stream` and `chat` are covered, and `prefill` and `extend` with `logits="last"`. A program that
        compiles later all the same is counted in `report().recompiles`; the profile's `buckets.on_recompile` decides
        whether that is an error.

        Args:
            max_new_tokens: the largest `max_new_tokens` of later requests, where the profile has no `buckets.context`.
            samplers: the samplers of later requests; None covers every kind without `bad_words` and functions.
            speculative, draft_tokens: options of later requests with drafts; requests without are covered too.
            scoring: cover `score` and `perplexity`, of texts that are no longer than the largest bucket for prompts.
            n: the largest `n` of later calls of `generate`.
            logprobs: the `logprobs` of later calls, besides none; 0, 1 to 8, 9 to 16 … are separate programs.
            slots: cover requests in so many slots, which then take their sizes from here.

        Raises:
            RequestError: the profile has no buckets for prompts and batches.
        """
        drafter = make_drafter(speculative, draft_tokens, self._lm)
        self.buckets = warm_all(self._lm, max_new_tokens, samplers, drafter, scoring, n, logprobs, slots)

    # -- a request ---------------------------------------------------------------------------

    @property
    def _lm(self) -> LanguageModel:
        """Return what requests need to know of the model; made anew, as `eos_ids` and the buckets may change."""
        return LanguageModel(
            self.model, self._ids_input, self.vocab_size, self.tokenizer, self.max_positions, self.buckets, self.bos_id,
            self._eos_ids, self._input_decls, self._prefixes,
        )  # fmt: skip

    def _make_request(
        self, prompts: Prompts, max_new_tokens: Any, sampler: Any, stop: Any, seed: Any, *,
        speculative: Any = None, draft_tokens: int = DRAFT_TOKENS, **options: Any,
    ) -> tuple[Request, NewTokens]:  # fmt: skip
        """Return a checked request, and the container for its new tokens; nothing has run yet.

        Args:
            options: fields of a sampler, and options of `check_request`.
        """
        if self._unwarned_captures:
            self._warn_of_captures(6)  # one frame deeper than the public methods that call it
        fields = {name: options.pop(name) for name in SAMPLING if name in options}
        lm = self._lm
        row_options = prompt_options(lm, prompts, options.get("n"), max_new_tokens, sampler, stop, seed, fields)
        drafts = speculative is not None or draft_tokens != DRAFT_TOKENS
        drafter = make_drafter(speculative, draft_tokens, lm) if drafts else None
        request = check_request(lm, prompts, row_options, drafter=drafter, **options)
        new = NewTokens([RowTokens() for _ in range(len(request.rows) * (request.n or 1))])
        self._last_call = request, new
        self._last_speculative = self._last_speculative if drafter is None else new
        return request, new

    def report(self, **sizes: int) -> Report:
        """Report the cost of compiling, and the needs of the program that ran last: forward, prefill or extend.

        With `sizes` (`batch=1, seq=128`) it reports `forward` at these sizes; see `CompiledModel.report`.
        """
        if sizes:
            return self.model.report(**sizes)
        return report_of_requests(self.model, self._last_speculative, self._last_call)

    explain, show, profile = explain, show, profile
