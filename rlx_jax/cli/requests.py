"""Commands that run a model on texts: `generate`, `chat`, `embed` and `score`."""

from __future__ import annotations

import argparse
import functools
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

import rlx_jax as rlx
from rlx_jax.cli.command import (
    Command,
    Session,
    add_compute,
    add_json,
    add_model,
    json_line,
    load_kind,
    peak_memory,
    peak_text,
)
from rlx_jax.cli.files import add_files, check_files, embed_file, generate_file, score_fields, score_file
from rlx_jax.cli.terminal import is_interactive, read_line, read_stdin
from rlx_jax.errors import MissingFileError, RequestError, RlxError, SequenceLengthError, StorageError, quote
from rlx_jax.generate.drafters import SOURCES
from rlx_jax.generate.request import check_sampler
from rlx_jax.generate.sampler import OPTIONS
from rlx_jax.io.files import is_text
from rlx_jax.runtime.inputs import check_integer
from rlx_jax.runtime.report import Report
from rlx_jax.text.tokenizer import Tokenizer

# -- options, models and texts -----------------------------------------------------------------


def add_sampling(
    parser: argparse.ArgumentParser, max_new_tokens: int | None = 64, default_text: str = "%(default)s"
) -> None:
    """Add the options for sampling and for the number of new tokens.

    Args:
        max_new_tokens: default of `--max-new-tokens`.
        default_text: the default in words, for the help.
    """
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=max_new_tokens, metavar="N", help=f"at most this many ({default_text})")
    for name, rule in OPTIONS.items():
        kind: dict[str, Any] = {"type": int if rule.is_integer else float, "metavar": rule.metavar}
        kind = {"action": "store_true", "default": None} if rule.is_flag else kind
        add(f"--{name.replace('_', '-')}", help=rule.help, **kind)
    add("--seed", type=int, metavar="N", help="random seed of the sampler; by default a new one each time")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before this text; may be given several times")
    add(
        "--speculative", metavar="prompt|mtp|DIR",
        help="draft from the text, by the model's MTP module, or by a smaller checkpoint",
    )  # fmt: skip
    add("--draft-tokens", type=int, default=4, metavar="K", help="with --speculative, drafts a step (%(default)s)")


def load_language_model(args: argparse.Namespace, session: Session, directory: str | None = None) -> rlx.CausalLM:
    """Load a language model; arguments as in `load_model`.

    Raises:
        RequestError: the directory has another kind of model, or the directory of the command has no tokenizer.
    """
    lm: rlx.CausalLM = load_kind(
        args, session, rlx.CausalLM, ", which can neither generate nor score texts; use rlx-jax embed", directory
    )
    if directory is None:
        check_has_tokenizer(lm.tokenizer, args)
    return lm


def check_has_tokenizer(tokenizer: Tokenizer | None, args: argparse.Namespace) -> None:
    """Check that the checkpoint of a command has a tokenizer.

    Raises:
        RequestError: it has none.
    """
    if tokenizer is None:
        raise RequestError(
            f"{quote(args.directory)} has no tokenizer.json, which is required for texts; save_pretrained of "
            "transformers' AutoTokenizer writes one"
        )


def make_sampler(args: argparse.Namespace) -> rlx.Sampler:
    """Return the sampler of the options. Call it before loading, so that invalid options fail early."""
    return check_sampler(None, None, {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None})


def request_options(args: argparse.Namespace, session: Session, sampler: rlx.Sampler) -> dict[str, Any]:
    """Return the arguments for `CausalLM.stream`, `CausalLM.chat` and `Conversation.stream` other than the prompt.

    If `--speculative` is the directory of a draft model, it is loaded here, with the errors of `rlx_jax.load`.
    """
    source = args.speculative
    return {
        "max_new_tokens": args.max_new_tokens, "sampler": sampler, "stop": args.stop, "seed": args.seed,
        "speculative": source if source in (None, *SOURCES) else load_language_model(args, session, source),
        "draft_tokens": args.draft_tokens,
    }  # fmt: skip


def check_texts(texts: Mapping[str, Any]) -> None:
    """Check that options of the command line are valid UTF-8.

    Args:
        texts: values by option: a string, a list of strings, or None.

    Raises:
        RequestError: names the option that is not.
    """
    for option, value in texts.items():
        if not all(map(is_text, [value] if isinstance(value, str) else value or [])):
            raise RequestError(f"{option}: not UTF-8")


def decode_stdin(data: bytes, offset: int = 0) -> str:
    """Decode bytes of stdin.

    Args:
        offset: number of bytes that were read before, for the position in the error message.

    Raises:
        RequestError: they are not UTF-8.
    """
    try:
        return data.decode()
    except UnicodeDecodeError as cause:
        raise RequestError(f"stdin: not UTF-8 at byte {offset + cause.start}") from cause


def texts_or_stdin_lines(texts: list[str], session: Session) -> list[str]:
    """Return the texts of the command line, or the lines of stdin if there are none."""
    check_texts({"TEXT": texts})
    if texts:
        return texts
    return decode_stdin(session.interrupt.run_interruptible(lambda: read_stdin("a text on each line"))).splitlines()


# -- timing ------------------------------------------------------------------------------------


@dataclass
class TimedAnswer:
    """A streamed answer with its timing.

    Times are in seconds since the start of the request; they include the chat template and tokenization.

    Attributes:
        start_stream: function that starts the request and returns the pieces of its text.
        text: the answer so far.
        first_text_seconds: time until the first text.
        seconds: time until the end.
    """

    start_stream: Callable[[], Iterable[str]]
    text: str = ""
    first_text_seconds: float = 0.0
    seconds: float = 0.0

    def __iter__(self) -> Iterator[str]:
        start = time.perf_counter()
        for piece in self.start_stream():
            self.first_text_seconds = self.first_text_seconds or time.perf_counter() - start
            self.text += piece
            yield piece
        self.seconds = time.perf_counter() - start

    def figures(self, lm: rlx.CausalLM) -> dict[str, Any]:
        """Return the figures about the answer, by name."""
        report: Report = lm.report()
        return {
            "seconds_to_first_text": round(self.first_text_seconds, 4),
            "seconds": round(self.seconds, 4),
            **{
                name: None if report.request is None else round(getattr(report.request, field), 2)
                for name, field in REQUEST_FIGURES.items()
            },
            "peak_bytes": peak_memory(),
            "seed": report.seed,
        }


# The figures of a request in JSON, null for no new tokens, with the attributes of `RequestReport` that they come from.
REQUEST_FIGURES = {
    "prompt_tokens": "prompt_tokens", "cached_tokens": "cached_tokens", "prompt_tokens_per_second": "prompt_rate",
    "new_tokens": "new_tokens", "new_tokens_per_second": "answer_rate", "compiled": "compiled",
}  # fmt: skip


def summary_line(timed: TimedAnswer, lm: rlx.CausalLM, max_new_tokens: int = 0) -> str:
    """Return the figures as a line for stderr.

    Args:
        max_new_tokens: limit of new tokens; an answer that reaches it may be incomplete, which the line mentions.
    """
    report = lm.report()
    parts = [f"first text after {timed.first_text_seconds:.2f} s"]
    if (request := report.request) is not None:
        compile_note = f", {request.compiled} programs compiled in it" if request.compiled else ""
        limit_note = ", all that --max-new-tokens allows" if request.new_tokens == max_new_tokens else ""
        prefill_note = f", {request.read_tokens:,} of them read" if request.cached_tokens else ""
        parts = [
            f"prompt {request.prompt_tokens:,} tokens{prefill_note}, {request.prompt_rate:,.0f}/s",
            f"answer {request.new_tokens:,} tokens{limit_note}, {request.answer_rate:,.1f}/s",
            f"{parts[0]}{compile_note}",
        ]
    seed = [] if report.seed is None else [f"seed {report.seed}"]
    return "; ".join([*parts, peak_text(), *seed])


# -- generate ----------------------------------------------------------------------------------


def generate(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write the continuation of a prompt, token by token as they come; or the answers to a file of prompts."""
    sampler = make_sampler(args)
    check_texts({"--prompt": args.prompt or "", "--system": args.system or "", "--stop": args.stop})
    others = {"--chat": args.chat, "--system": args.system is not None, "--speculative": args.speculative}
    if check_files(args, ["output", "overwrite", "logprobs", "slots"], others):
        yield from generate_file(args, session, load_language_model(args, session))
        return
    prompt = args.prompt
    if prompt == "-":
        prompt = decode_stdin(session.interrupt.run_interruptible(lambda: read_stdin("the prompt")))
    lm = load_language_model(args, session)
    request = request_options(args, session, sampler)
    if args.chat or args.system is not None:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        timed = TimedAnswer(lambda: lm.chat([*system, {"role": "user", "content": prompt}], stream=True, **request))
    else:
        timed = TimedAnswer(lambda: lm.stream(prompt, **request))
    for piece in timed:
        session.interrupt.check()
        if not args.json:
            yield piece
    yield json_line({"prompt": prompt, "text": timed.text, **timed.figures(lm)}) if args.json else "\n"
    session.summary = summary_line(timed, lm)


def generate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `generate`."""
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", metavar="TEXT", help="the text to continue; - reads it from stdin")
    add_files(parser, source)
    add("--output", metavar="FILE.jsonl", help="with --input, the file of the answers, which is resumed if it exists")
    add("--logprobs", type=int, metavar="N", help="with --input, log-probabilities of the tokens and of N likeliest")
    add("--slots", type=int, metavar="N", help="with --input, the number of prompts that run at once")
    add("--chat", action="store_true", help="answer it as one message, by the checkpoint's chat template")
    add("--system", metavar="TEXT", help="a system message before it; means --chat")
    add_sampling(parser)


def add_prompt(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the prompt; `take_prompt` checks it."""
    parser.add_argument("text", nargs="*", metavar="TEXT", help="the same as --prompt")


GENERATE_OPTIONS = (generate_options, add_compute, add_json, add_model, add_prompt)
GENERATE = Command("generate", "continue a prompt, or answer it", GENERATE_OPTIONS, generate)


# Default limit of new tokens for an answer in `chat`.
DEFAULT_ANSWER_TOKENS = 512


# -- chat --------------------------------------------------------------------------------------


def chat(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Talk with a model: each line of stdin is a message, answered by the checkpoint's chat template. /new begins
    another conversation; the end of the input (Ctrl-D) ends the chat. Ctrl-C ends an answer, or between answers the
    chat."""
    sampler = make_sampler(args)
    check_texts({"--system": args.system or "", "--stop": args.stop})
    if args.max_new_tokens is not None:
        check_integer("--max-new-tokens", args.max_new_tokens, 1)
    lm = load_language_model(args, session)
    first_messages = [] if args.system is None else [{"role": "system", "content": args.system}]
    # Start the conversation before the first message is read, as it raises if there is no template.
    conversation, num_read = lm.conversation(first_messages), 0
    max_new_tokens = args.max_new_tokens or min(
        DEFAULT_ANSWER_TOKENS, max(1, (lm.max_positions or DEFAULT_ANSWER_TOKENS * 4) // 4)
    )
    request = request_options(args, session, sampler) | {"max_new_tokens": max_new_tokens}
    while line := _read_message(session):
        timed = None
        try:
            offset, num_read = num_read, num_read + len(line)
            message = decode_stdin(line, offset).strip()
            if message == "/new":
                conversation = lm.conversation(first_messages)
            if message in ("", "/new"):
                continue
            timed = TimedAnswer(functools.partial(conversation.stream, message, **request))
            for piece in timed:
                session.interrupt.check()
                if not args.json:
                    yield piece
        except (RlxError, KeyboardInterrupt) as error:
            if not is_interactive():  # a person can continue after an error, but a script should fail
                raise
            if timed is not None and timed.text and not args.json:
                yield "\n"
            _print_failure(session, error)
            continue
        yield json_line({"prompt": message, "text": timed.text, **timed.figures(lm)}) if args.json else "\n"
        session.summary = summary_line(timed, lm, max_new_tokens)
        session.print_summary()
        if is_interactive():
            session.interrupt.reset()  # a Ctrl-C during the last part of an answer must not end the chat


def _print_failure(session: Session, error: BaseException) -> None:
    """Print why a message has no answer; the conversation continues without it."""
    session.status.clear()
    session.interrupt.reset()
    if isinstance(error, KeyboardInterrupt):
        message = "interrupted; the conversation continues without this message"
    else:
        hint = "; /new begins another conversation" if isinstance(error, SequenceLengthError) else ""
        message = f"{type(error).__name__}: {error}{hint}"
    print(f"rlx-jax: {message}", file=sys.stderr)


def _read_message(session: Session) -> bytes:
    """Read the next message; empty at the end of the input."""
    session.status.clear()
    return session.interrupt.run_interruptible(lambda: read_line("> "))


def chat_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `chat`."""
    parser.add_argument("--system", metavar="TEXT", help="a system message before the conversation")
    add_sampling(parser, None, f"{DEFAULT_ANSWER_TOKENS}, or a quarter of the model's positions")


CHAT_OPTIONS = (chat_options, add_compute, add_json, add_model)
CHAT = Command("chat", "talk with a model, message by message", CHAT_OPTIONS, chat, handles_interrupt=True)


# `rlx-jax embed` and `rlx-jax score`: embedding vectors and log-likelihoods of texts.


def embed(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write a vector for each text: its numbers on a line, separated by spaces; or all vectors into a NumPy file; or
    the vectors of a file of texts into another."""
    has_files = check_files(args, ["overwrite"], {"TEXT": args.text})
    texts = [] if has_files else texts_or_stdin_lines(args.text, session)
    if args.output is not None and not os.path.isdir(folder := os.path.dirname(args.output) or "."):
        raise MissingFileError(f"--output {quote(args.output)}: there is no directory {quote(folder)}")
    encoder = load_kind(args, session, rlx.Encoder | rlx.DualEncoder, "; embed takes a text encoder")
    prompt = {"prompt_name": args.prompt_name, "prompt": args.prompt}
    prompt = {name: value for name, value in prompt.items() if value is not None}
    if prompt and isinstance(encoder, rlx.DualEncoder):
        raise RequestError(f"{quote(args.directory)} is a dual encoder, which has no prompts")
    check_has_tokenizer((encoder.texts if isinstance(encoder, rlx.DualEncoder) else encoder).tokenizer, args)
    if has_files:
        yield from embed_file(args, session, encoder, prompt)
        return
    start = time.perf_counter()
    vectors = np.asarray(encoder.embed(texts, **prompt))
    seconds = time.perf_counter() - start
    session.status.clear()
    session.summary = f"{len(texts):,} texts, {len(texts) / seconds:,.1f}/s, what was compiled included; {peak_text()}"
    if args.output is not None:
        save_array(args.output, vectors)
        yield json_line({"output": args.output, "shape": list(vectors.shape)}) if args.json else ""
        return
    for text, vector in zip(texts, vectors, strict=True):
        yield json_line({"text": text, "embedding": vector.tolist()}) if args.json else f"{vector_text(vector)}\n"


def vector_text(vector: np.ndarray[tuple[int], np.dtype[np.float32]]) -> str:
    """Return the numbers of a vector as text, each with as few digits as float32 needs.

    >>> vector_text(np.array([0.1, -2.0], np.float32))
    '0.1 -2.0'
    """
    return " ".join(map(str, vector.astype(np.float32)))


def save_array(path: str, array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> None:
    """Write a `.npy` file, which `numpy.load` reads.

    Raises:
        StorageError: it cannot be written.
    """
    try:
        with open(path, "wb") as file:
            np.save(file, array)
    except (OSError, ValueError) as cause:  # ValueError: a NUL in the path
        raise StorageError(f"--output {quote(path)}: {getattr(cause, 'strerror', None) or cause}") from cause


def add_texts(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the texts."""
    parser.add_argument("text", nargs="*", metavar="TEXT", help="texts; without any, the lines of stdin")


def embed_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `embed`."""
    parser.add_argument("--prompt-name", metavar="NAME", help="put this prompt of the checkpoint in front of each text")
    parser.add_argument("--prompt", metavar="TEXT", help='or this one; "" leaves out the default prompt')
    parser.add_argument(
        "--output", metavar="FILE",
        help="write all vectors into this .npy file, [texts, width] float32; with --input, the .jsonl file of the "
        "vectors, which is resumed if it exists",
    )  # fmt: skip
    add_files(parser)


EMBED = Command("embed", "vectors of texts", (add_compute, embed_options, add_json, add_model, add_texts), embed)


# -- score -------------------------------------------------------------------------------------


def score(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write how likely each text is: its log-likelihood, its perplexity by token, and the text, with tabs between; or
    the log-likelihoods of a file of texts into another."""
    has_files = check_files(args, ["output", "overwrite"], {"TEXT": args.text})
    texts = [] if has_files else texts_or_stdin_lines(args.text, session)
    check_texts({"--context": args.context or ""})
    lm = load_language_model(args, session)
    if has_files:
        yield from score_file(args, session, lm)
        return
    start = time.perf_counter()
    scores = lm.score([text if args.context is None else (args.context, text) for text in texts])
    seconds = time.perf_counter() - start
    session.status.clear()
    tokens = sum(len(s.tokens) for s in scores)
    session.summary = f"{tokens:,} tokens, {tokens / seconds:,.0f}/s, what was compiled included; {peak_text()}"
    for text, result in zip(texts, scores, strict=True):
        fields = score_fields(result)
        if args.json:
            yield json_line({"text": text, "context": args.context, **fields})
        else:
            yield f"{result.logprob:.4f}\t{fields['perplexity']:.4f}\t{text}\n"


def score_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of `score`."""
    parser.add_argument("--context", metavar="TEXT", help="text before each text, which is not scored itself")
    parser.add_argument("--output", metavar="FILE.jsonl", help="with --input, the results, resumed if the file exists")
    add_files(parser)


SCORE_OPTIONS = (add_compute, score_options, add_json, add_model, add_texts)
SCORE = Command("score", "how likely a model finds texts", SCORE_OPTIONS, score)
