"""Scores of texts: against recorded logits of `transformers`, themselves, and the harness's `hf` model."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors, eval
from rlx_jax.blocks import Custom, Embed, Linear
from rlx_jax.compiler.buckets import Buckets
from rlx_jax.encode.packing import plan_blocks
from rlx_jax.generate import score_program
from tests import divided
from tests.oracles import checkpoints, hugging_face, numpy_reference
from tests.oracles.comparing import TOLERANCE
from tests.oracles.op_formulas import log_softmax
from tests.oracles.recorded import load_record

TIED = checkpoints.FIXTURES / "llama" / "gqa_tied_llama3_v5"
RECURRENT = ["mamba2/groups_v5", "qwen3_5_text/blocks_v5"]
V, POSITIONS = 389, 128
RNG = np.random.default_rng(5)
ROWS = [RNG.integers(2, V, n).tolist() for n in (2, 41, 7, 64, 3)]


@pytest.fixture(scope="module", params=[{}, {"prompt": [64, 128], "batch": [8]}], ids=["shared", "alone"])
def lm(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The checkpoint with a tokenizer, texts in rows with others or in rows of their own; logits in pieces of 32
    tokens, where all of them would fit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(score_program.CHUNK_TOKENS, "cpu", 32)
        yield rlx.load(TIED, profile=rlx.CompileProfile().replace(buckets=request.param))


def close(got: Any, want: Any) -> None:
    """Scores, or their log-probabilities, but for rounding."""
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_scores_are_those_of_recorded_logits(lm: Any) -> None:
    """Log-softmax of the logits of `transformers`, token by token, of rows of different lengths."""
    check_recorded(lm, TIED, "forward" if lm.buckets.batch else "packed")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt_oss/window_v5", *RECURRENT])
def test_scores_of_other_families(name: str) -> None:
    """With experts and sinks and windows; in rows of their own with states."""
    directory = checkpoints.FIXTURES / name
    check_recorded(rlx.load(directory), directory, "forward" if name in RECURRENT else "packed")


def check_recorded(model: Any, directory: Path, program: str) -> None:
    """Scores of the recorded rows, by this program alone."""
    record = load_record(directory)
    rows = [row[:n] for row, n in zip(record["ragged_tokens"], record["ragged_lengths"], strict=True) if n > 1]
    logits = [x[:n] for x, n in zip(record["ragged_logits"], record["ragged_lengths"], strict=True) if n > 1]
    assert len(rows) >= 2
    for score, row, x in zip(model.score(rows), rows, logits, strict=True):
        want = log_softmax(x)[np.arange(len(row) - 1), row[1:]]
        np.testing.assert_allclose(score.token_logprobs, want, atol=TOLERANCE * max(1.0, np.abs(x).max()))
        assert score.tokens == tuple(row[1:].tolist())
        assert score.greedy == (x[:-1].argmax(-1) == row[1:]).all()
        close(score.logprob, sum(score.token_logprobs))
    assert {key.program for key in model.model.programs.executables} == {program}


def test_equalities(lm: Any) -> None:
    """Alone as in a batch, in the order given; a pair is the tail of what it is joined; both ways to say a text."""
    together = lm.score(ROWS)
    told = lm.report().request
    assert (told.kind, told.rows, told.prompt_tokens) == ("texts", len(ROWS), sum(len(row) - 1 for row in ROWS))
    assert told.prompt_seconds > 0 and told.new_tokens == 0 and lm.report().seed is None
    for row, score in zip(ROWS, together, strict=True):
        alone = lm.score(row)
        close(alone.token_logprobs, score.token_logprobs)
        assert alone.tokens == score.tokens == tuple(row[1:]) and alone.greedy is score.greedy
    cuts = [1, 17, 6, 63, 2]
    pairs = lm.score([(row[:n], np.array(row[n:])) for row, n in zip(ROWS, cuts, strict=True)])
    for pair, score, n in zip(pairs, together, cuts, strict=True):
        assert pair.tokens == score.tokens[n - 1 :]
        close(pair.token_logprobs, score.token_logprobs[n - 1 :])
        close(pair.logprob, sum(score.token_logprobs[n - 1 :]))
    assert lm.score([]) == []


def test_texts_that_differ_in_their_end_are_read_once(lm: Any) -> None:
    """With the numbers and flags that each has alone: wherever contexts end, the same twice, more of them than one row
    holds, many short ones, and among others."""
    context = ROWS[1]
    best = int(np.argmax(lm.logits([context])[0, -1]))
    ends = [best, *range(2, 3 + score_program.MAX_ALTERNATIVES), 5, best]
    texts = [(context, [end]) for end in ends] + [(context[:7], [*context[7:], 9]), ROWS[2], [*context, 11]]
    texts += [([word], [end]) for word in range(2, 12) for end in (7, 8, 9)]
    want = [lm.score(text) for text in texts]
    found = lm.score(texts)
    read = lm.report().request
    assert read.prompt_tokens - read.cached_tokens == 41 + 41 + 6 + 10  # 18 different ends are read twice
    for a, b in zip(found, want, strict=True):
        close(a.token_logprobs, b.token_logprobs)
        assert (a.tokens, a.greedy) == (b.tokens, b.greedy)
    assert [score.greedy for score in found[: len(ends)]] == [end == best for end in ends]


def test_strings(lm: Any) -> None:
    """Strings are their tokens: special ones as the tokenizer puts them, spaces with the continuation, and nothing is
    the begin token."""
    encode = lm.tokenizer.encode
    text, whole = lm.score("The sky is blue"), encode("The sky is blue")
    assert text.tokens == tuple(whole[1:])
    for context in ("The sky", "The sky "):
        pair, before = lm.score((context, " is blue" if context == "The sky" else "is blue")), encode("The sky")
        assert pair.tokens == tuple(whole[len(before) :])
        close(pair.token_logprobs, text.token_logprobs[len(before) - 1 :])
    bare = encode("blue", add_special_tokens=False)
    assert lm.bos_id == 0
    assert lm.score(("", "blue")) == lm.score(([0], bare)) == lm.score(([], bare))
    ended = replace_ids(lm, bos_id=None, eos_ids=(1,))
    assert ended.score(([], bare)) == lm.score(([1], bare)) != lm.score(([0], bare))


def replace_ids(lm: Any, **ids: Any) -> Any:
    """The same model with other begin and end tokens."""
    other = rlx.CausalLM(lm.model, eos_ids=ids["eos_ids"], bos_id=ids["bos_id"])
    other.max_positions = lm.max_positions
    return other


def test_logits_are_never_whole(lm: Any) -> None:
    """The compiled program holds those of a piece of 32 tokens, and has no array of all tokens and all words."""
    lm.score(ROWS)
    made = [(k, e) for k, e in lm.model.programs.executables.items() if k.headless]
    key, made = max(made, key=lambda found: dict(found[0].binding)["batch"])
    sizes, text = dict(key.binding), made.lowered.as_text()
    rows, width, piece = sizes["batch"], sizes["seq"], 32 // sizes["batch"]
    assert piece < width and f"{rows}x{piece}x{V}xf32" in text and f"{rows}x{width}x{V}xf32" not in text


@pytest.mark.parametrize("target", ["cpu", "cuda"])
@pytest.mark.parametrize("positions", [1, 64, 65, 2048, 9000, None])
def test_there_are_at_most_eight_programs(positions: int | None, target: str) -> None:
    """And every text has one row of one call, in a block that there is, wide enough."""
    sizes = score_program.score_sizes(target, Buckets(), positions, positions or 100_000)
    assert len(sizes.blocks) <= 8
    above, shared = score_program.shared_sizes(target, 1, positions, positions or 100_000)
    assert len(shared.blocks) + (len(above.blocks) if above else 0) <= 8
    assert shared.widths[-1] >= min(positions or 2048, 2048) and (above is None) == bool(
        positions and positions <= 2048
    )
    assert above is None or above.widths[0] > 2048 and above.widths[-1] >= (positions or 100_000)
    form = score_program.ScoreForm(SimpleNamespace(program="packed"), shared)  # type: ignore[arg-type]
    ended = score_program.SharedTokens((1,), list(range(1 + score_program.MAX_ALTERNATIVES)), [])
    for block in form.plan([ended] * 3):
        places = list(score_program.locate_texts(block, [ended] * 3))
        others = form.sizes.slots(block.width) if form.packed else score_program.MAX_ALTERNATIVES
        assert all(place.alternative_column + score_program.MAX_ALTERNATIVES <= others for place in places)
    longest = sizes.widths[-1]
    assert longest == positions if positions else longest >= 100_000
    widths = np.random.default_rng(0).integers(1, longest + 1, 333).tolist()
    widths += [min(longest, n) for n in range(1, 300)]
    calls = plan_blocks(widths, sizes)
    assert sorted(t for call in calls for (t,) in call.texts) == list(range(len(widths)))
    for call in calls:
        assert (call.rows, call.width) in sizes.blocks and len(call.texts) <= call.rows
        assert all(widths[t] <= call.width for (t,) in call.texts)


def test_buckets_are_honoured() -> None:
    """Their sizes and no others; over the largest is an error where the profile says so."""
    closed = Buckets((16, 32), (2, 4), (), "error")
    assert score_program.score_sizes("cpu", closed, 128, 20).blocks == ((2, 16), (2, 32), (4, 16), (4, 32))
    with pytest.raises(errors.RequestError, match=r"33 tokens, and buckets.prompt = \[16, 32\]"):
        score_program.score_sizes("cpu", closed, 128, 33)
    opened = score_program.score_sizes("cpu", replace(closed, on_recompile="allow"), 128, 33)
    assert max(opened.widths) == 128
    shared = score_program.score_sizes("cpu", Buckets(row_multiple=4), 128, 33)
    assert all(rows % 4 == 0 for rows, _ in shared.blocks)


def test_warm_up() -> None:
    """With `scoring` no text within the buckets compiles anything; without it the first one is refused."""
    buckets = {"prompt": [8], "batch": [2], "context": [9], "on_recompile": "error"}
    profile = rlx.CompileProfile().replace(buckets=buckets)
    texts = [[1, 2, 3], [4] * 9, [5, 6], [7] * 5, [8] * 6, [9, 10], [11, 12]]
    model = rlx.CausalLM(own(Linear("w", shape=(13, 4))), WEIGHTS, profile=profile)
    model.warmup(samplers=rlx.Sampler())
    with pytest.raises(errors.RequestError, match="length 8"):
        model.score(texts)
    model.warmup(samplers=rlx.Sampler(), scoring=True)
    for count in range(1, len(texts)):
        with jax.transfer_guard("disallow"):
            assert len(model.score(texts[:count])) == count
    assert model.report().recompiles == 0


def strided(ids: list[int], stride: int, context: int, loss: Any) -> float:
    """The loop of Hugging Face's page; `loss(ids, targets)` is the mean over targets that are not −100, of which the
    first token is none."""
    total, count, before = 0.0, 0, 0
    for begin in range(0, len(ids), stride):
        end = min(begin + context, len(ids))
        targets = np.array(ids[begin:end])
        targets[: len(targets) - (end - before)] = -100
        valid = int((targets != -100).sum()) - 1
        if valid:
            total, count = total + loss(ids[begin:end], targets) * valid, count + valid
        before = end
        if end == len(ids):
            break
    return float(np.exp(total / count))


def test_perplexity(lm: Any) -> None:
    """The strided definition over float64 logits, for every way that windows meet."""
    config, weights = numpy_reference.read_config(TIED), numpy_reference.read_weights(TIED)

    def loss(ids: list[int], targets: np.ndarray) -> float:
        logits = numpy_reference.llama_row(config, weights, ids)[1]
        at = np.flatnonzero(targets[1:] != -100)
        return -float(log_softmax(logits)[at, targets[1:][at]].mean())

    for stride, context in ((16, 40), (40, 40), (2, 12), (64, None), (None, 30)):
        text = np.random.default_rng(2).integers(2, V, 91 if stride != 2 else 20).tolist()
        want = strided(text, stride or 15, context or POSITIONS, loss)
        np.testing.assert_allclose(lm.perplexity(text, stride=stride, context=context), want, rtol=1e-5)


def own(*stages: Any) -> rlx.ModelFlow:
    """A flow of 13 words."""
    flow = rlx.ModelFlow("own").input("ids", ("batch", "seq"), dtype="int32").stage(Embed("e", (13, 4)))
    for stage in stages:
        flow = flow.stage(stage)
    return flow


WEIGHTS = {"e": RNG.normal(size=(13, 4)).astype("f4"), "w": RNG.normal(size=(13, 4)).astype("f4")}


@pytest.mark.parametrize("name", ["targets", "alternatives", "segments"])
def test_inputs_are_called_anything(name: str) -> None:
    """As what the programs of scores read too: tokens are told from it, or stand in rows of their own. Logits that are
    no product are taken whole: here less their mean, which each of them is made of."""
    flow = rlx.ModelFlow("own").input(name, ("batch", "seq"), dtype="int32").stage(Embed("e", (13, 4)))
    flow = flow.stage(Linear("w", shape=(13, 4)))
    if name == "alternatives":
        flow = flow.custom(lambda emit, x: emit.sub(x, emit.mean(x, axis=-1, keepdims=True)))
    row = [1, 2, 3, 12]
    want = log_softmax(WEIGHTS["e"][row[:-1]] @ WEIGHTS["w"].T)[np.arange(3), row[1:]]
    close(rlx.CausalLM(flow, WEIGHTS).score(row).token_logprobs, want)


def test_what_is_not_finite_stays_in_its_text() -> None:
    """Attention takes it along to the other texts of a row: those are read again."""
    weights = {key: np.array(value) for key, value in divided.weights("llama").items()}
    weights["model.embed_tokens.weight"][3] = np.nan
    model = rlx.CausalLM(divided.recipe("llama"), rlx.open_weights(weights, on_nonfinite="ignore"))
    texts = [[5, 6, 7, 8], ([9, 3], [7]), [10, 11, 12], ([9, 3], [8]), [13, 3]]
    told = r"not finite for texts\[1\] .*, texts\[3\] \(first after 2 tokens\); "
    with pytest.raises(errors.NumericsError, match=told) as failed:
        model.score(texts)
    assert failed.value.rows == {1: 0, 3: 0}
    for number in (0, 2, 4):
        alone, beside = model.score(texts[number]), failed.value.outputs[number]
        assert isinstance(beside, type(alone))
        close(beside.token_logprobs, alone.token_logprobs)
        assert np.isfinite(alone.token_logprobs).all()
    with pytest.raises(errors.NumericsError, match="first after 6 tokens"):
        model.perplexity([1, 2, 4, 5, 6, 3, 7], context=4, stride=2)  # the window behind the first, at its place


def test_an_input_that_no_output_reads() -> None:
    """Is not asked for, whichever request it is, and refused where it is given."""

    def told(emit: Any, x: Any) -> Any:
        emit.output("told", emit.add(x, emit.flow_input("beside")))
        return x

    flow = own(Custom(told), Linear("w", shape=(13, 4))).input("beside", ("batch", 1, 4))
    with pytest.raises(errors.RequestError, match="own reads 'beside' in addition to tokens"):
        rlx.CausalLM(flow, WEIGHTS).score([1, 2, 3])
    model, plain = (rlx.CausalLM(f, WEIGHTS) for f in (flow.outputs(["output"]), own(Linear("w", shape=(13, 4)))))
    assert model.score([1, 2, 3]) == plain.score([1, 2, 3])
    assert model.generate([[1, 2]], max_new_tokens=3) == plain.generate([[1, 2]], max_new_tokens=3)
    with pytest.raises(errors.RequestError, match="'beside'"):
        model.generate([[1, 2]], max_new_tokens=3, inputs={"beside": np.ones((1, 1, 4), np.float32)})


@pytest.mark.oracle
@pytest.mark.parametrize("kind", ["llama", "qwen3_5_text"])
def test_live_scores(kind: str, tmp_path: Path) -> None:
    """A random checkpoint: log-softmax, the flag and strided perplexity of `transformers`."""
    import torch

    directory = tmp_path / "checkpoint"
    hugging_face.write(hugging_face.RANDOM[kind](41), directory)
    theirs, ours = hugging_face.load(directory, "AutoModelForCausalLM"), rlx.load(directory)
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, theirs.config.vocab_size, n).tolist() for n in (2, 19, 33, 5)]
    for row, score in zip(rows, ours.score(rows), strict=True):
        with torch.no_grad():
            logits = theirs(torch.tensor([row]), use_cache=False).logits[0].double()
        want = torch.log_softmax(logits, -1)[torch.arange(len(row) - 1), torch.tensor(row[1:])]
        np.testing.assert_allclose(score.token_logprobs, want, atol=TOLERANCE * float(logits.abs().max()))
        assert score.greedy == bool((logits[:-1].argmax(-1) == torch.tensor(row[1:])).all())

    def loss(ids: list[int], targets: np.ndarray) -> float:
        with torch.no_grad():
            return float(theirs(torch.tensor([ids]), labels=torch.tensor(targets[None]), use_cache=False).loss)

    text = rng.integers(0, theirs.config.vocab_size, 70).tolist()
    np.testing.assert_allclose(ours.perplexity(text, stride=9, context=24), strided(text, 9, 24, loss), rtol=1e-5)


WORDS = "The sky is blue and the sea is deep green where old ships go down to sleep".split()


def test_without_lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to install is said where it is wanted."""
    monkeypatch.setattr(eval, "IMPORT_ERROR", ModuleNotFoundError("lm_eval", name="lm_eval"))
    with pytest.raises(errors.UnsupportedError, match=r"pip install 'rlx-jax\[eval\]'"):
        eval.LMEval(rlx.load(TIED))


def sentences(rng: np.random.Generator, count: int, longest: int) -> list[str]:
    """Of random words."""
    return [" ".join(rng.choice(WORDS, rng.integers(1, longest)).tolist()) for _ in range(count)]


def write_tasks(folder: Path) -> None:
    """Tasks that ask all three kinds of questions, with their data beside them."""
    rng = np.random.default_rng(3)
    questions: list[dict[str, Any]] = [
        {"q": q, "choices": sentences(rng, 3, 4), "label": int(rng.integers(3)), "text": t}
        for q, t in zip(sentences(rng, 3, 30), sentences(rng, 3, 90), strict=True)
    ]
    data = folder / "data.json"
    data.write_text("\n".join(json.dumps(question) for question in questions), "utf-8")
    data_files = {"data_files": {"test": str(data)}}
    common: dict[str, Any] = {"dataset_path": "json", "dataset_kwargs": data_files, "test_split": "test"}
    common |= {"num_fewshot": 0}
    tasks: dict[str, dict[str, Any]] = {
        "local_choice": {
            "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_target": "label",
            "doc_to_choice": "choices", "metric_list": [{"metric": "acc"}],
        },
        "local_rolling": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        "local_until": {
            "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "exact_match"}],
            "generation_kwargs": {"until": ["a", "\n"], "max_gen_toks": 12, "do_sample": False},
        },
    }  # fmt: skip
    for name, task in tasks.items():
        # JSON is YAML
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **common, **task}), "utf-8")


@pytest.mark.oracle
def test_it_answers_as_the_hf_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request and each metric; texts over the model's positions, empty contexts, flags, texts until a string."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    write_tasks(tmp_path)
    ours = eval.LMEval(rlx.load(TIED), batch_size=4)
    theirs = HFLM(pretrained=str(TIED), device="cpu", dtype="float32", batch_size=8)
    assert ours.max_length == theirs.max_length == 128
    assert (ours.eot_token_id, ours.prefix_token_id) == (theirs.eot_token_id, theirs.prefix_token_id)
    manager = TaskManager(include_path=str(tmp_path), include_defaults=False)
    names: list[Any] = ["local_choice", "local_rolling", "local_until"]
    mine, wanted = (
        lm_eval.simple_evaluate(model=model, tasks=names, task_manager=manager, bootstrap_iters=0, log_samples=True)
        for model in (ours, theirs)
    )
    for name in names:
        for metric, value in wanted["results"][name].items():
            if isinstance(value, float):
                np.testing.assert_allclose(mine["results"][name][metric], value, rtol=1e-4, err_msg=f"{name} {metric}")
        for a, b in zip(mine["samples"][name], wanted["samples"][name], strict=True):
            compare(a["resps"], b["resps"])

    letters = [("The sky is blue and", letter) for letter in (" a", " b", "c")]
    odd = [*letters, ("", "blue"), ("The sky ", "is"), ("sky " * 200, " blue"), ("The", " sky" * 30)]
    asked = [SimpleNamespace(args=pair) for pair in odd]
    compare(ours.loglikelihood(asked), theirs.loglikelihood(asked))  # greedy texts have the flag
    greedy = [
        SimpleNamespace(args=(q, theirs.generate_until([SimpleNamespace(args=(q, {"max_gen_toks": 5}))])[0]))
        for q in ("The sky", "blue")
    ]
    compare(ours.loglikelihood(greedy), theirs.loglikelihood(greedy))


@pytest.mark.oracle
def test_its_arguments() -> None:
    """Shorter rows as those of the `hf` model; default lengths, seeds and batches; what is refused is named."""
    from lm_eval.models.huggingface import HFLM

    lm = rlx.load(TIED)
    short = eval.LMEval(lm, batch_size=2, max_length=24, max_gen_toks=6, seed=1)
    theirs = HFLM(pretrained=str(TIED), device="cpu", dtype="float32", batch_size=8, max_length=24)
    text = [SimpleNamespace(args=(" ".join(WORDS * 4),))]
    compare(short.loglikelihood_rolling(text), theirs.loglikelihood_rolling(text))
    assert short.loglikelihood_rolling(text) != eval.LMEval(lm).loglikelihood_rolling(text)

    def ask(model: Any, **wanted: Any) -> list[str]:
        return model.generate_until([SimpleNamespace(args=(q, wanted)) for q in ("The sky", " ".join(WORDS * 2))])

    assert ask(short) == ask(short, max_gen_toks=6) == ask(theirs, max_gen_toks=6) != ask(short, max_gen_toks=3)
    drawn = {"do_sample": True, "temperature": 1.5, "top_p": 0.9, "max_gen_toks": 8}
    other = eval.LMEval(lm, batch_size=2, max_length=24, seed=2)
    assert ask(short, **drawn) != ask(other, **drawn)

    with pytest.raises(errors.RequestError, match="arguments of generation 'num_beams'"):
        ask(short, num_beams=2)
    with pytest.raises(errors.SequenceLengthError, match="24 new tokens, and a row has 24"):
        ask(short, max_gen_toks=24)
    with pytest.raises(errors.RequestError, match="cannot continue an assistant"):
        short.apply_chat_template([{"role": "assistant", "content": "a"}], add_generation_prompt=False)
    with pytest.raises(errors.SequenceLengthError, match="max_length is 129; the model has 128"):
        eval.LMEval(lm, max_length=129)
    with pytest.raises(errors.RequestError, match="got int"):
        eval.LMEval(3)  # type: ignore[arg-type]
    with pytest.raises(errors.RequestError, match="has no tokenizer"):
        eval.LMEval(rlx.CausalLM(lm.model, eos_ids=1))
    with pytest.raises(errors.RequestError, match="has no end token"):
        lm.eos_ids = ()
        eval.LMEval(lm)


def compare(mine: Any, wanted: Any) -> None:
    """Numbers within 1e-4, flags and texts equal, in lists of lists."""
    if isinstance(wanted, list | tuple):
        assert len(mine) == len(wanted)
        for a, b in zip(mine, wanted, strict=True):
            compare(a, b)
    elif isinstance(wanted, float):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4)
    else:
        assert mine == wanted
