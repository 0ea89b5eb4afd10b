"""`--input FILE --output FILE` of `generate`, `embed` and `score`: a line of JSON for each request and for each result.

Lines may be more than fit the memory, and a job that is killed can be resumed; see `rlx_jax.io.jsonl`.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax

import rlx_jax as rlx
from rlx_jax.cli.command import Session, json_line, peak_text
from rlx_jax.encode.embedding import chunks
from rlx_jax.errors import FormatError, NumericsError, RequestError, RlxError, check_names, listing, shown
from rlx_jax.generate.prefix_named import checksums
from rlx_jax.generate.request import check_sampler
from rlx_jax.generate.sampler import OPTIONS, SAMPLING
from rlx_jax.generate.scoring import Score, exp_or_inf
from rlx_jax.io.files import parse_object
from rlx_jax.io.jsonl import open_job
from rlx_jax.ir.serial import node_digest
from rlx_jax.text.tokenizer import tokenizer_files

# Fields of a line that its result repeats.
REPEATED = ("id", "metadata")
PROMPTS = ("prompt", "messages", "ids")
# A token id as a name in JSON: without leading zeros, so that no id has two names.
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")
# Texts that `embed` and `score` compute together. The results of a text depend on them by rounding.
LINES_PER_CALL = 1024

# Requests, or what is wrong with their lines, and results, with the indices of their lines.
JobLines = Iterator[tuple[int, Any]]
LineResults = Iterator[tuple[int, Mapping[str, Any] | RlxError]]


def add_files(parser: argparse.ArgumentParser, source: Any = None) -> None:
    """Add the options of files of requests, apart from the output.

    Args:
        source: the group of options that `--input` is one of; the parser by default.
    """
    text = "a request on each line, as JSON: see the page on many prompts"
    (source or parser).add_argument("--input", metavar="FILE.jsonl", help=text)
    text = "with --input, replace an output that exists, and do not resume it"
    parser.add_argument("--overwrite", action="store_true", help=text)


def check_files(args: argparse.Namespace, names: Sequence[str], others: Mapping[str, Any]) -> bool:
    """Return whether the requests are in a file.

    Args:
        names: options that need `--input`.
        others: options that do not go with it, by name, and their values.

    Raises:
        RequestError: an option is given that would have no effect; or there is no output.
    """
    if args.input is None:
        # `is`: 0 equals False, and --logprobs 0 is an option that is given.
        absent = (None, False)
        if misplaced := next((n for n in names if all(getattr(args, n) is not value for value in absent)), None):
            raise RequestError(f"--{misplaced} goes with --input FILE.jsonl")
        return False
    if misplaced := next((name for name, value in others.items() if value), None):
        raise RequestError(f"{misplaced} does not go with --input; leave one of them out")
    if args.output is None:
        raise RequestError("--input: where to write the results? pass --output FILE.jsonl")
    return True


def run_file(
    args: argparse.Namespace, session: Session, model: Any, settings: Mapping[str, Any], names: Sequence[str],
    read: Callable[[dict[str, Any]], Any], run: Callable[[JobLines, int], LineResults], unit: int = 1,
) -> Iterator[str]:  # fmt: skip
    """Write the results of a file of requests, and yield a summary.

    Args:
        settings: what the results depend on besides model and input.
        names: fields of a line, besides those that its result repeats.
        read: returns the request of the fields.
        run: returns the results of requests, given a random seed for the job.
        unit: as in `open_job`.
    """
    settings = {
        "command": args.command.name, "model": model_digest(model), "dtype": args.dtype, "profile": args.profile,
        **settings,
    }  # fmt: skip
    with open_job(args.input, args.output, settings, overwrite=args.overwrite, unit=unit) as job:
        repeated: dict[int, dict[str, Any]] = {}  # of lines in progress
        start, num_before, num_errors = time.perf_counter(), job.num_done, 0

        def write(index: int, result: Mapping[str, Any] | RlxError) -> None:
            nonlocal num_errors
            if isinstance(result, RlxError):
                num_errors += 1
                # One way to name a line in all messages, from 1 on as editors count, whoever found the error.
                line, message = f"line {index + 1}", str(result)
                for name in (f"prompts[{index}]", "texts[0]"):
                    message = message.replace(name, line)
                message = message if line in message else f"{line}: {message}"
                result = {"error": {"type": type(result).__name__, "message": message}}
            job.write(index, json_line({**repeated.pop(index), **result}))
            session.status(f"{job.num_done:,} of {job.total:,} lines", 0, 1)

        def requests() -> JobLines:
            for index, line in job.pending():
                repeated[index] = {}
                try:
                    fields = parse_object(line, f"line {index + 1}", FormatError)
                    repeated[index] = {name: fields.pop(name) for name in REPEATED if name in fields}
                    check_names(fields, names, f"line {index + 1}: there is no field", "; there are", RequestError)
                    yield index, read(fields)
                except RlxError as error:
                    # Results of a unit are in the order of its lines.
                    if unit > 1:
                        yield index, error
                    else:
                        write(index, error)

        for index, result in run(requests(), job.seed):
            write(index, result)
    session.status.clear()
    count, seconds = job.num_done - num_before, time.perf_counter() - start
    session.summary = f"{count:,} lines, {count / seconds:,.1f}/s, what was compiled included; {peak_text()}"
    figures = {"output": args.output, "lines": job.total, "resumed": num_before, "errors": num_errors}
    text = f"{args.output}: {job.total:,} lines, {num_before:,} of them from before, {num_errors:,} new errors\n"
    yield json_line(figures) if args.json else text


def in_units(call: Callable[[list[Any]], Sequence[Mapping[str, Any]]]) -> Callable[[JobLines, int], LineResults]:
    """Return a function for `run_file` that passes units of requests to `call`."""

    def each(requests: list[Any]) -> list[Mapping[str, Any] | RlxError]:
        """Return the results; a request that is refused is found by halving."""
        try:
            return [*call(requests)] if requests else []
        except (RequestError, NumericsError, FormatError) as error:
            half = len(requests) // 2
            return [*each(requests[:half]), *each(requests[half:])] if half else [error]

    def run(lines: JobLines, seed: int) -> LineResults:
        for _, unit in chunks(lines, LINES_PER_CALL):
            results = iter(each([request for _, request in unit if not isinstance(request, RlxError)]))
            for index, request in unit:
                yield index, request if isinstance(request, RlxError) else next(results)

    return run


# -- generate ----------------------------------------------------------------------------------


def generate_file(args: argparse.Namespace, session: Session, lm: rlx.CausalLM) -> Iterator[str]:
    """Write the answers to the prompts of a file; the options of a line replace the options of the command."""
    sampling = {name: getattr(args, name) for name in OPTIONS if getattr(args, name) is not None}
    settings = {name: getattr(args, name) for name in ("max_new_tokens", "stop", "seed", "logprobs")} | sampling
    line_sampling = [name for name in SAMPLING if name != "logits_processor"]  # a function

    def read(fields: dict[str, Any]) -> rlx.PromptRequest:
        kinds = [name for name in PROMPTS if fields.get(name) is not None]
        if len(kinds) != 1:
            raise RequestError(f"expected one of {listing(PROMPTS)}, got {listing(kinds) or 'none'}")
        kind, prompt = kinds[0], fields[kinds[0]]
        if isinstance(prompt, str) != (kind == "prompt"):
            raise RequestError(f"{kind} is {shown(prompt)}; expected a {'string' if kind == 'prompt' else 'list'}")
        own = {name: fields[name] for name in line_sampling if name in fields}
        if isinstance(bias := own.get("logit_bias"), dict):  # names in JSON are strings
            own["logit_bias"] = {int(i) if TOKEN_ID.fullmatch(i) else i: value for i, value in bias.items()}
        options = {name: fields[name] for name in ("max_new_tokens", "stop", "seed") if name in fields}
        sampler = check_sampler(None, None, sampling | own) if own else None
        return rlx.PromptRequest(sampler=sampler, **{"messages" if kind == "messages" else "prompt": prompt}, **options)

    def run(lines: JobLines, seed: int) -> LineResults:
        answers = lm.generate_iter(
            (replace(request, index=index) for index, request in lines), args.max_new_tokens, stop=args.stop,
            seed=seed if args.seed is None else args.seed, logprobs=args.logprobs, slots=args.slots, errors="return",
            details=True, **sampling,
        )  # fmt: skip
        for index, answer in answers:
            yield index, answer if isinstance(answer, RlxError) else answer_fields(answer, args.logprobs is not None)

    names = (*PROMPTS, "max_new_tokens", "stop", "seed", *line_sampling)
    yield from run_file(args, session, lm, settings, names, read, run)


def answer_fields(answer: rlx.Completion, has_logprobs: bool) -> dict[str, Any]:
    """Return the fields of an answer: text for text and messages, ids for ids, log-probabilities if requested."""
    fields: dict[str, Any] = {} if answer.text is None else {"text": answer.text}
    if answer.text is None or has_logprobs:
        fields["ids"] = answer.tokens
    fields |= {"new_tokens": len(answer.tokens), "finish_reason": answer.finish_reason}
    return fields | {"token_logprobs": answer.token_logprobs, "top": answer.top} if has_logprobs else fields


# -- embed and score ---------------------------------------------------------------------------


def embed_file(args: argparse.Namespace, session: Session, encoder: Any, prompt: Mapping[str, str]) -> Iterator[str]:
    """Write the vectors of the texts of a file; the encoder is an `Encoder` or `DualEncoder`."""

    def call(texts: list[str]) -> list[dict[str, Any]]:
        return [{"embedding": vector.tolist()} for vector in encoder.embed(texts, **prompt)]

    read = partial(read_text, name="text")
    yield from run_file(args, session, encoder, {"prompt": prompt}, ["text"], read, in_units(call), LINES_PER_CALL)


def score_file(args: argparse.Namespace, session: Session, lm: rlx.CausalLM) -> Iterator[str]:
    """Write the log-likelihoods of the texts of a file."""

    def read(fields: dict[str, Any]) -> Any:
        text, fields = read_text(fields, "text"), {"context": args.context} | fields
        return text if fields["context"] is None else (read_text(fields, "context"), text)

    run = in_units(lambda texts: [*map(score_fields, lm.score(texts))])
    yield from run_file(
        args, session, lm, {"context": args.context}, ["text", "context"], read, run, LINES_PER_CALL
    )  # fmt: skip


def read_text(fields: Mapping[str, Any], name: str) -> str:
    """Return a text of a line.

    Raises:
        RequestError: it is no string.
    """
    if not isinstance(text := fields.get(name), str):
        raise RequestError(f"{name} is {shown(text)}; expected a string")
    return text


def score_fields(score: Score) -> dict[str, Any]:
    """Return the fields of a score."""
    perplexity = exp_or_inf(-score.logprob / len(score.tokens))
    return {"logprob": score.logprob, "perplexity": perplexity, **vars(score)}


# -- the model of a job ------------------------------------------------------------------------


def model_digest(model: Any) -> str:
    """Return a digest of what a model computes: blocks, profile, parameters and tokenizer; against mistakes alone."""
    compiled = model.model
    hir = compiled.template().built.hir
    params = jax.tree_util.tree_leaves_with_path(compiled.params)
    texts = model.texts if isinstance(model, rlx.DualEncoder) else model
    parts = [
        [(node_digest(hir, node), [(v.node, v.index) for v in node.inputs]) for node in hir.nodes],
        compiled.settings.profile,
        [(str(path), array.shape, array.dtype.name) for path, array in params],
        compiled.programs.run_helper(checksums, [array for _, array in params]).tolist(),
        sorted(tokenizer_files(texts.tokenizer).items()),
        [getattr(texts, name, None) for name in ("eos_ids", "bos_id", "pipeline", "padding")],
    ]
    return hashlib.sha256(repr(parts).encode()).hexdigest()
