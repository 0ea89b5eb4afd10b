"""`CausalLM`: logits, and generation with a key/value cache, for any causal flow.

The cached programs are derived from the flow's forward program; nothing here knows how.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar, Unpack, overload

import jax
import numpy as np

from rlx_jax.errors import RequestError, RlxWarning, listing, shown, suggests
from rlx_jax.generate.conversation import Conversation, open_conversation, refuse_in_stream
from rlx_jax.generate.decode_state import DecodeState
from rlx_jax.generate.drafters import DRAFT_TOKENS, drafter_of
from rlx_jax.generate.generation import NewTokens, answered, pieces
from rlx_jax.generate.prefill import capture, extend, logits_of, prefill
from rlx_jax.generate.request import (
    GenerateOptions,
    Inputs,
    LanguageModel,
    Request,
    StopLike,
    StreamOptions,
    TurnOptions,
    check_request,
    declared,
)
from rlx_jax.generate.sampler import SAMPLING, Sampler, one_sampler
from rlx_jax.generate.score_program import ScoredTokens, scored_tokens
from rlx_jax.generate.scoring import Score, perplexity_of, perplexity_windows, scores_of
from rlx_jax.generate.speculative import Drafter
from rlx_jax.generate.warm_up import warm_all
from rlx_jax.lowering.hir.derive import CACHED_PROGRAMS
from rlx_jax.program import Weights
from rlx_jax.runtime.block_times import BlockTimes, profile_run
from rlx_jax.runtime.report import Report, RequestReport
from rlx_jax.text.chat import chat_prompt
from rlx_jax.text.padding import check_buckets
from rlx_jax.text.request_checks import Prompts, id_list, split_prompts, token_block
from rlx_jax.text.token_model import (
    OpenedModel,
    TokenizerLike,
    check_logits,
    in_one_line,
    known_positions,
    open_token_model,
    open_tokenizer,
)
from rlx_jax.weights.format import CompileOptions, OpenOptions

IdPair = tuple[list[int], list[int]]
# Prompts whose answers have their type.
PromptLike = TypeVar("PromptLike", str, list[str], list[int], list[list[int]])


class CausalLM(OpenedModel):
    """A causal language model: `flow` maps token ids `[batch, seq]` to logits `[batch, seq, vocab]`.

    Args:
        flow: a `ModelFlow` whose first input is the ids, or a recipe; or a compiled model, whose programs it shares.
        weights: as in `rlx_jax.compile`; so are the options `profile`, `mesh`, `strict`, `missing` and `key`.
        tokenizer: for strings; or the directory of its `tokenizer.json`. `rlx_jax.load` brings the checkpoint's own.
        max_positions: the longest sequence the model knows, in tokens.
        eos_ids: tokens that end a row.
        options: also `progress`, told how far loading and compiling are; see `rlx_jax.compiler.executable.Progress`.
    """

    _methods = (
        "logits(tokens) gives logits, generate(prompts) text or token ids, model(tokens) every output of the flow"
    )

    @suggests(*CompileOptions.__annotations__)
    def __init__(
        self, flow: Any, weights: Weights = None, *, tokenizer: TokenizerLike | None = None,
        max_positions: int | None = None, eos_ids: int | Sequence[int] = (), bos_id: int | None = None,
        **options: Unpack[CompileOptions],
    ) -> None:  # fmt: skip
        self.tokenizer = open_tokenizer(tokenizer)
        self.model, self.vocab_size = open_token_model(
            flow, weights, OpenOptions(**options), max_positions, programs=("forward", *CACHED_PROGRAMS), inputs=True
        )
        check_logits(self.model, self.vocab_size)
        self.max_positions = known_positions(self.model)
        self.buckets = self.model.settings.buckets
        check_buckets(self.buckets, self.max_positions)
        self._inputs = declared(self.model)
        self._captures = self.model.built.captures  # until it is said that requests do not return them
        self._drafted: NewTokens | None = None
        self._last: tuple[Request, NewTokens] | RequestReport | None = None
        self.eos_ids = eos_ids
        if self.tokenizer and not self.eos_ids:
            self.eos_ids = self.tokenizer.eos_ids
        self.bos_id = self.tokenizer.bos_id if self.tokenizer else None
        if bos_id is not None:
            (self.bos_id,) = id_list([bos_id], self.vocab_size, "bos_id")

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a row. May be set, to ids or one id of the vocabulary."""
        return self._eos_ids

    @eos_ids.setter
    def eos_ids(self, ids: int | Sequence[int]) -> None:
        self._eos_ids = tuple(id_list([ids] if isinstance(ids, int | np.integer) else ids, self.vocab_size, "eos_ids"))

    def __repr__(self) -> str:
        return in_one_line("CausalLM", self.model, self.vocab_size, self.max_positions)

    # -- programs ----------------------------------------------------------------------------

    @suggests()
    def logits(
        self, tokens: Any, lengths: Any = None, attention_mask: Any = None, *, inputs: Inputs = None
    ) -> jax.Array:
        """Logits of every position: tokens `[B, S]` ints → `[B, S, V]` float32. At padding they mean nothing.

        Args:
            lengths: `[B]`, valid tokens of right-padded rows.
            attention_mask: `[B, S]`, 1 at the valid tokens of rows padded on the left or on the right; in place of
                `lengths`. Positions count valid tokens.
            inputs: what the flow reads beside tokens, by name: `{"image": pixels}`, a row for each of the tokens.
        """
        self._warn_of_captures()
        return logits_of(self._lm, tokens, lengths, attention_mask, inputs)

    @suggests()
    def prefill(
        self, tokens: Any, lengths: Any = None, max_len: int | None = None, logits: Literal["all", "last"] = "all",
        attention_mask: Any = None, *, inputs: Inputs = None,
    ) -> tuple[jax.Array, DecodeState]:  # fmt: skip
        """Read prompts into a new state: tokens `[B, S]` right-padded, `lengths` `[B]` ≥ 1 → (`[B, S, V]`, state).

        Args:
            max_len: tokens that a row may hold; by default room for 256 more, within the model's positions.
            logits: "last" gives those of each row's last token only, `[B, V]`.
            attention_mask: as in `logits`, for rows padded on the left.
            inputs: as in `logits`; what is computed of them alone is kept in the state, and `extend` needs none.
        """
        self._warn_of_captures()
        return prefill(self._lm, tokens, lengths, max_len, logits, attention_mask, inputs)

    @suggests()
    def extend(
        self, state: DecodeState, tokens: Any, lengths: Any = None, logits: Literal["all", "last"] = "all"
    ) -> tuple[jax.Array, DecodeState]:
        """Read more tokens after a state: tokens `[B, S]`, `lengths` `[B]` (0 allowed) → (`[B, S, V]`, new state).

        The old state is consumed. Positions at or behind `lengths` mean nothing.

        Raises:
            SequenceLengthError: a row would not fit; the state is unchanged.
            SessionStateError: the state was consumed already.
        """
        return extend(self._lm, state, tokens, lengths, logits)

    @suggests()
    def capture(self, prompts: Any, *, inputs: Inputs = None) -> dict[str, jax.Array]:
        """Return what the blocks of prompts give that `recipe.at(pattern).capture()` names, and the flow's other side
        outputs: arrays by name, `{"layers.3.mlp": [B, S, hidden]}`. The head is not computed.

        A prompt has the numbers that `lm.model(ids)` gives for it alone. The first axis is that of the prompts, also of
        one; with `stacked=True` the second. Prompts are padded on the right to the longest: the entries after the end
        of a prompt are NaN, -1 in signed integers, False or 0 in others. A value without an axis of prompts, such as a
        table of positions, is that of the longest prompt.

        Args:
            prompts: as in `generate`, strings or token ids of any lengths.
            inputs: as in `logits`, a row for each prompt.

        Raises:
            RequestError: the flow has no side outputs; or one of several prompts cannot be told from the others in a
                value, as its rows and tokens are one axis. TokenIdError, SequenceLengthError: as `generate`.
        """
        return capture(self._lm, prompts, inputs)

    def _warn_of_captures(self, stacklevel: int = 4) -> None:
        """Warn that requests return no captures, once."""
        if self._captures:
            told = f"nothing is returned of what the flow captures, {listing(self._captures, 4)}"
            warnings.warn(f"{told}: lm.capture(prompts) returns it", RlxWarning, stacklevel=stacklevel)
        self._captures = ()

    # -- generation --------------------------------------------------------------------------

    @overload
    def generate(
        self, prompts: PromptLike, max_new_tokens: int = 64, sampler: Sampler | None = None, stop: StopLike = (),
        seed: Any = None, attention_mask: Any = None, **options: Unpack[GenerateOptions],
    ) -> PromptLike: ...  # fmt: skip

    @overload
    def generate(
        self, prompts: Any, max_new_tokens: int = 64, sampler: Sampler | None = None, stop: StopLike = (),
        seed: Any = None, attention_mask: Any = None, *, n: int | None = None, logprobs: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any: ...  # fmt: skip

    @suggests(*GenerateOptions.__annotations__)
    def generate(
        self, prompts: Any, max_new_tokens: int = 64, sampler: Sampler | None = None, stop: StopLike = (),
        seed: Any = None, attention_mask: Any = None, *, n: int | None = None, logprobs: int | None = None,
        **options: Unpack[GenerateOptions],
    ) -> Any:  # fmt: skip
        """Continue prompts: strings give strings, id lists give id lists, one gives one; new tokens only.

        Args:
            prompts: a string, a list of strings, an id list, or a list of id lists; rows may differ in length. An empty
                one starts from the begin token; without a begin token it is an error.
            max_new_tokens: at most this many new tokens a row; an end token ends its row and is its last id.
            sampler: how tokens are chosen; greedy by default. See `Sampler`. Its fields may stand in place of one:
                `temperature=0.8, top_p=0.9`.
            stop: strings that end a row before them, or token ids that end it as an end token does. Ids that are asked
                for as ids end with the token that completes a stop string.
            seed: of the random draws, below 2**64; without one they differ each time, and `report().seed` is what they
                came from. A row draws from its place in the request, whoever shares the batch.
            attention_mask: `[B, S]`, 1 at the tokens of prompts that are padded to `[B, S]`, on the left or the right.
            inputs: what the flow reads beside tokens, by name: `{"image": pixels}`, a row for each prompt.
            speculative: read several tokens a step, of which those are kept that the model itself would choose:
                "prompt" drafts what followed the same words earlier in the text, "mtp" what the module of a Qwen 3.5
                checkpoint says that predicts several tokens, another `CausalLM` of the same
                vocabulary what it would say. What came of it is in `report().speculative`.
            draft_tokens: drafts a step.
            n: this many answers to each prompt, as a list in place of one; the prompt is read once.
            logprobs: a `Completion` in place of each answer, with log-probabilities of its tokens and of this many
                likeliest ones at each step.
            state: of `prefill` or `extend`, that the prompts are read behind: a row for each of them, or one for all.
                It is copied, not consumed. Strings come without the tokenizer's special tokens then.
            share_prefix: read the tokens that all prompts begin with once, and repeat their state.

        Raises:
            RequestError: see `rlx_jax.errors`.
            NumericsError: logits of a row are not finite. The other rows were generated, and are in its `outputs`.
        """
        if attention_mask is not None:
            block, lengths, _ = token_block(prompts, self.vocab_size, mask=attention_mask, what="prompts")
            prompts = [row[:length].tolist() for row, length in zip(block, lengths, strict=True)]
        asked = split_prompts(prompts)
        asking = self._request(asked, max_new_tokens, sampler, stop, seed, n=n, logprobs=logprobs, **options)
        outputs = answered(self._lm, *asking)
        return outputs[0] if asked.single else outputs

    @suggests(*StreamOptions.__annotations__)
    def stream(
        self, prompt: str | Sequence[int], max_new_tokens: int = 64, sampler: Sampler | None = None,
        stop: StopLike = (), seed: Any = None, *, n: int | None = None, logprobs: int | None = None,
        **options: Unpack[StreamOptions],
    ) -> Iterator[Any]:  # fmt: skip
        """As `generate` for one prompt, in pieces as they come: text of a string, token ids of ids.

        Joined together the pieces are what `generate` returns. Text is held back while it may still change: half of a
        character, or the beginning of a stop string.

        Raises:
            RequestError: `n` or `logprobs` are given, which pieces of one answer have no place for. Others as
                `generate`.
        """
        refuse_in_stream("stream", n, logprobs)
        asked = split_prompts(prompt)
        if not asked.single:
            raise RequestError("stream: one prompt at a time; generate takes several")
        return pieces(self._lm, *self._request(asked, max_new_tokens, sampler, stop, seed, **options))

    # -- scores ------------------------------------------------------------------------------

    @overload
    def score(self, texts: str | list[int] | tuple[str, str] | IdPair) -> Score: ...

    @overload
    def score(self, texts: list[str] | list[list[int]] | list[tuple[str, str]] | list[IdPair]) -> list[Score]: ...

    @overload
    def score(self, texts: Any) -> Any: ...

    @suggests()
    def score(self, texts: Any) -> Any:
        """How likely texts are: a `Score` for each, in order, or one for one; nothing is generated.

        Texts may be of all lengths: they are sorted, and read by at most eight programs.

        Args:
            texts: strings or id lists, of which every token behind the first is scored, and pairs `(context,
                continuation)` of either, tuples, of which the continuation is. A string has the special tokens around
                it that the tokenizer puts there; an empty context is the begin token, or else the end token.

        Raises:
            RequestError, TokenIdError, SequenceLengthError: see `rlx_jax.errors`.
            DeriveError: tokens of the flow may see those behind them, or rows each other.
            NumericsError: logits of a text are not finite; `outputs` has the others.
        """
        items, single = scored_tokens(self._lm, texts)
        scores = self._scored(items, "score")
        return scores[0] if single else scores

    @suggests()
    def perplexity(self, text: str | Sequence[int], *, stride: int | None = None, context: int | None = None) -> float:
        """The perplexity of a text of any length, by windows of `context` tokens, `stride` apart.

        exp(−Σ wᵢ·mᵢ / Σ wᵢ): mᵢ is the mean log-likelihood of window i over its tokens that no window before has, and
        wᵢ their number less one, as on Hugging Face's page "Perplexity of fixed-length models".

        Args:
            text: a string, with the special tokens that the tokenizer puts around it, or ids; 2 tokens at least.
            stride: half of `context` by default.
            context: as many tokens as the model has positions by default.

        Raises:
            RequestError, SequenceLengthError, DeriveError, NumericsError: as `score`.
        """
        if isinstance(text, list | tuple) and any(isinstance(part, str) for part in text):
            raise RequestError(f"perplexity: expected one string, or its ids, got {shown(text)}; score takes several")
        windows = perplexity_windows(self._lm, text, stride, context)
        return perplexity_of(windows, self._scored(windows, "perplexity"))

    def _scored(self, items: Sequence[ScoredTokens], what: str) -> list[Score]:
        scores, self._last = scores_of(self._lm, items, what)
        return scores

    # -- chat --------------------------------------------------------------------------------

    def chat(
        self, messages: Any, max_new_tokens: int = 64, sampler: Sampler | None = None, stop: StopLike = (),
        seed: Any = None, *, stream: bool = False, n: int | None = None, logprobs: int | None = None, **options: Any,
    ) -> Any:  # fmt: skip
        """The model's reply to messages, as text; with `stream` an iterator over its pieces as they come.

        Each call reads all messages; `conversation` reads those that are new.

        Args:
            messages: `[{"role": "user", "content": "Hello"}, …]`, or a string: one message of the user.
            max_new_tokens, sampler, stop, seed, n, logprobs: as in `generate`; but `n` and `logprobs` are refused with
                `stream`. The checkpoint's end tokens end the reply.
            options: `speculative`, `draft_tokens` and the fields of a sampler as in `generate`; `tools`,
                `chat_template`, `allow_special` and the template's variables as in `apply_chat_template`.

        Raises:
            RequestError, TokenizerError, LimitError: as `apply_chat_template` and `generate`.
        """
        if not isinstance(stream, bool):
            raise RequestError(f"stream is {shown(stream)}; expected True or False")
        if stream:
            refuse_in_stream("chat(…, stream=True)", n, logprobs)
        turn = {name: options.pop(name) for name in TurnOptions.__annotations__ if name in options}
        asked = Prompts(None, [self.apply_chat_template(messages, **options)], True)
        asking = self._request(asked, max_new_tokens, sampler, stop, seed, text=True, n=n, logprobs=logprobs, **turn)
        return pieces(self._lm, *asking) if stream else answered(self._lm, *asking)[0]

    def conversation(
        self, messages: Any = (), *, max_len: int | None = None, keep_copy: bool = True, **options: Any
    ) -> Conversation:
        """A conversation whose state stays on the device, so that each turn reads what is new: `.send("Hello")`,
        `.stream(…)`, `.messages`, `.fork()`.

        Args:
            messages: what it begins with, such as `[{"role": "system", "content": "Be brief."}]`.
            max_len: tokens that it may have; there is room for all of them at once then. By default as many as the
                model has positions, in a cache that grows.
            keep_copy: keep rings of windows and states of blocks as they were before the last reply, too, so that
                asking again reads next to nothing; False takes less memory, and reads all of it.
            options: `tools`, `chat_template`, `allow_special` and variables, as in `apply_chat_template`.

        Raises:
            RequestError, TokenizerError: as `apply_chat_template`.
        """
        return open_conversation(self, messages, max_len, keep_copy, options)

    def apply_chat_template(
        self, messages: Any, *, tools: Any = None, chat_template: str | None = None,
        add_generation_prompt: bool = True, tokenize: bool = True, allow_special: bool = False, **variables: Any,
    ) -> Any:  # fmt: skip
        """A conversation as the checkpoint's template writes it: token ids to generate from, or the text.

        Args:
            messages: `[{"role": "user", "content": "Hello"}, …]`, or a string: one message of the user.
            tools: a list of JSON schemas of functions, for templates that tell the model about them.
            chat_template: the name of one of the checkpoint's templates, or a template to use in their place.
            add_generation_prompt: end with what begins a reply.
            tokenize: ids; or else text, with the names of control tokens as people may have written them.
            allow_special: control tokens that stand in the messages are read as these tokens, not as text.
            variables: others that the template reads, such as `enable_thinking=False`.

        Raises:
            RequestError: there is no template, it refuses the messages or makes a control token of what they hold, or
                they are wrong; the place is named.
            TokenizerError: the template is wrong, or does what the sandbox forbids.
            LimitError: it takes too long, too much memory, or writes too much; see `rlx_jax.text.chat_template`.
        """
        return chat_prompt(
            self._lm.needed("chat needs", "generate from token ids"), messages, tools=tools,
            chat_template=chat_template, add_generation_prompt=add_generation_prompt, tokenize=tokenize,
            allow_special=allow_special, variables=variables,
        )  # fmt: skip

    # -- warm-up -----------------------------------------------------------------------------

    @suggests()
    def warmup(
        self, max_new_tokens: int = 64, samplers: Sampler | Sequence[Sampler] | None = None, *,
        speculative: Any = None, draft_tokens: int = DRAFT_TOKENS, scoring: bool = False, n: int | None = None,
        logprobs: int | None = None,
    ) -> None:  # fmt: skip
        """Run every program once that requests within the profile's buckets can need; then none of them compiles.

        `generate`, `stream` and `chat` are covered, and `prefill` and `extend` with `logits="last"`. What compiles
        later all the same is counted in `report().recompiles`, and is as the profile's `buckets.on_recompile` says.

        Args:
            max_new_tokens: what requests will ask for at most, where the profile has no `buckets.context`.
            samplers: those that requests will use; None stands for every kind.
            speculative, draft_tokens: what requests will ask for that draft; the others are covered too.
            scoring: cover `score` and `perplexity`, of texts that are no longer than the largest bucket for prompts.
            n: the most answers to a prompt that `generate` will be asked for.
            logprobs: as `generate` will be asked for, too; 0, 1 to 8, 9 to 16, 17 to 32 … are programs of their own.

        Raises:
            RequestError: the profile has no buckets for prompts and batches.
        """
        drafter = self._drafter(speculative, draft_tokens)
        self.buckets = warm_all(self._lm, max_new_tokens, samplers, drafter, scoring, n, logprobs)

    # -- a request ---------------------------------------------------------------------------

    @property
    def _lm(self) -> LanguageModel:
        return LanguageModel(
            self.model, self.vocab_size, self.tokenizer, self.max_positions, self.buckets, self.bos_id, self._eos_ids,
            self._inputs,
        )  # fmt: skip

    def _request(
        self, prompts: Prompts, max_new_tokens: int, sampler: Sampler | None, stop: StopLike, seed: Any, *,
        speculative: Any = None, draft_tokens: int = DRAFT_TOKENS, **options: Any,
    ) -> tuple[Request, NewTokens]:  # fmt: skip
        """A checked request, and where its new tokens go; nothing has run yet. `options`: the fields of a sampler, and
        as in `check_request`."""
        if self._captures:
            self._warn_of_captures(5)
        chosen = one_sampler(sampler, {name: options.pop(name) for name in SAMPLING if name in options})
        drafts = speculative is not None or draft_tokens != DRAFT_TOKENS
        drafter = self._drafter(speculative, draft_tokens) if drafts else None
        request = check_request(self._lm, prompts, max_new_tokens, chosen, stop, seed, drafter=drafter, **options)
        new = NewTokens([[] for _ in range(len(request.rows) * (request.n or 1))])
        self._last = request, new
        if drafter is not None:
            self._drafted = new
        return request, new

    def _drafter(self, speculative: Any, draft_tokens: int) -> Drafter | None:
        other = speculative._lm if isinstance(speculative, CausalLM) else speculative
        return drafter_of(other, draft_tokens, self._lm)

    def report(self, **sizes: int) -> Report:
        """What compiling cost, and the needs of the program that ran last: forward, prefill or extend.

        With `sizes` (`batch=1, seq=128`) those of `forward` at these; see `CompiledModel.report`.
        """
        if sizes:
            return self.model.report(**sizes)
        programs = ("forward", *CACHED_PROGRAMS)  # a model that was compiled before may have run others
        known = self.model.programs.executables
        used = [key for key in known if key.flow == self.model.name and key.program in programs]
        model = replace(self.model, program=used[-1].program, last=used[-1]) if used else self.model
        drafted = None if self._drafted is None else self._drafted.speculated
        seed, last = None, self._last
        if isinstance(last, tuple):
            seed, last = last[0].drawn_from, last[1].report
        return replace(model.report(), speculative=drafted, seed=seed, request=last)

    def profile(self, prompts: Any, max_new_tokens: int = 64, **asked: Any) -> BlockTimes:
        """Time by block of `generate(prompts, max_new_tokens, **asked)`, which runs twice: the second time under
        `jax.profiler`. The programs that read prompts and the loop that generates have their own rows."""
        draft = asked.get("speculative")
        models = [self.model.programs, *([draft.model.programs] if isinstance(draft, CausalLM) else [])]
        return profile_run(models, lambda: self.generate(prompts, max_new_tokens, **asked))
