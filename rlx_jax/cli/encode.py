"""`rlx-jax embed` and `rlx-jax score`: embedding vectors and log-likelihoods of texts."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator

import numpy as np

import rlx_jax as rlx
from rlx_jax.cli.command import (
    Command,
    Session,
    add_compute,
    add_json,
    add_model,
    check_has_tokenizer,
    check_texts,
    json_line,
    kind_with_article,
    load_language_model,
    load_model,
    peak_text,
    texts_or_stdin_lines,
)
from rlx_jax.cli.files import add_files, check_files, embed_file, score_fields, score_file
from rlx_jax.errors import MissingFileError, RequestError, StorageError, quote


def embed(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write a vector for each text: its numbers on a line, separated by spaces; or all vectors into a NumPy file; or
    the vectors of a file of texts into another."""
    has_files = check_files(args, ["overwrite"], {"TEXT": args.text})
    texts = [] if has_files else texts_or_stdin_lines(args.text, session)
    if args.output is not None and not os.path.isdir(folder := os.path.dirname(args.output) or "."):
        raise MissingFileError(f"--output {quote(args.output)}: there is no directory {quote(folder)}")
    encoder = load_model(args, session)
    if not isinstance(encoder, rlx.Encoder | rlx.DualEncoder):
        raise RequestError(f"{quote(args.directory)} is {kind_with_article(encoder)}; embed takes a text encoder")
    prompt = {"prompt_name": args.prompt_name, "prompt": args.prompt}
    prompt = {name: value for name, value in prompt.items() if value is not None}
    if prompt and isinstance(encoder, rlx.DualEncoder):
        raise RequestError(f"{quote(args.directory)} is {kind_with_article(encoder)}, which has no prompts")
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
