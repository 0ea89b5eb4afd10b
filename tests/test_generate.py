"""Generation: greedy tokens against `transformers`, the cached programs, several answers and log-probabilities."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.generate.generation import LoopRun
from rlx_jax.generate.stop_strings import INCOMPLETE_CHAR, GrowingText, stable_prefix, stop_length, truncate_at_stop
from tests.opening import load, recipe_for
from tests.oracles import checkpoints, hugging_face, numpy_reference
from tests.oracles.comparing import assert_close
from tests.oracles.numpy_reference import Weights
from tests.oracles.op_formulas import log_softmax
from tests.oracles.recorded import Case, load_case

LLAMA = checkpoints.FIXTURES / "llama"
PLAIN = LLAMA / "gqa_plain_attnbias_v5"
CHAT = LLAMA / "gqa_tied_llama3_v5"
CASES: list[dict[str, Any]] = json.loads((LLAMA / "chat.json").read_text("utf-8"))
VOCABULARY = 67
CONTEXT = 16


@pytest.fixture(scope="module")
def plain() -> Case:
    """The checkpoint with the smallest vocabulary."""
    return load_case(PLAIN)


@pytest.fixture(scope="module")
def chat() -> Any:
    """The checkpoint with a tokenizer."""
    return load(CHAT)


WARM = rlx.Sampler(temperature=1.5, top_k=20, top_p=0.95, repetition_penalty=1.1)


def test_draws_repeat_and_differ_by_seed(plain: Case) -> None:
    """The same seed gives the same tokens, another one others, alone too; no row is the greedy one."""
    rows = [plain.lm.generate(plain.prompts, max_new_tokens=12, sampler=WARM, seed=s) for s in (3, 3, 4)]
    assert rows[0] == rows[1]
    assert all(a != b for a, b in zip(rows[0], rows[2], strict=True))
    assert all(row != want[:12] for row, want in zip(rows[0], plain.greedy, strict=True))
    assert plain.lm.generate(plain.prompts[:1], max_new_tokens=12, sampler=WARM, seed=3) == rows[0][:1]


def test_draws_without_a_seed_differ_and_say_theirs(plain: Case) -> None:
    """A seed of its own each time, which gives the same again; fields of a sampler stand for one."""
    fields: Any = {"temperature": 1.5, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}
    lm = plain.lm
    rows, seeds = [], []
    for _ in range(2):
        rows.append(lm.generate(plain.prompts, max_new_tokens=12, **fields))
        seeds.append(lm.report().seed)
    assert rows[0] != rows[1] and seeds[0] != seeds[1]
    assert f"\nseed               {seeds[1]}" in str(lm.report())
    assert lm.generate(plain.prompts, max_new_tokens=12, sampler=WARM, seed=seeds[0]) == rows[0]
    assert lm.report().seed == seeds[0]
    assert [*lm.stream(plain.prompts[0], 12, seed=seeds[1], **fields)] == rows[1][0]
    lm.generate(plain.prompts, max_new_tokens=2)
    assert lm.report().seed is None  # nothing was drawn


def test_other_values_compile_nothing(plain: Case) -> None:
    """Temperature, limits, penalty, seed, end tokens and the number of new tokens are operands."""
    lm = plain.lm
    lm.generate(plain.prompts, max_new_tokens=12, sampler=WARM, seed=0)
    compiled = lm.report().compiles
    other = rlx.Sampler(temperature=0.3, top_k=5, top_p=0.5, repetition_penalty=1.9)
    for count in (2, 10, 7):
        lm.generate(plain.prompts, max_new_tokens=count, sampler=other, seed=count, stop=[1, 2])
    assert lm.report().compiles == compiled


def test_stream_is_generate_in_pieces(chat: Any, plain: Case) -> None:
    """Text and ids, with a stop string and without."""
    for options in ({}, {"stop": CASES[0]["text"][3:5]}):
        prompt = CASES[0]["prompt"]
        want = chat.generate(prompt, max_new_tokens=10, **options)
        pieces = list(chat.stream(prompt, max_new_tokens=10, **options))
        assert "".join(pieces) == want
        assert all(pieces)
    assert list(plain.lm.stream(plain.prompts[1], max_new_tokens=7)) == plain.greedy[1][:7]


def cut(row: list[int], ends: list[int]) -> list[int]:
    """A row up to its first end token, which is kept."""
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


def test_a_stream_yields_each_token_after_one_step(plain: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """One dispatch of one step between two tokens, one step ahead; `generate` dispatches blocks."""
    widths: list[int] = []
    advance = LoopRun.advance
    want = plain.lm.generate(plain.prompts[0], max_new_tokens=9)
    assert list(plain.lm.stream(plain.prompts[0], max_new_tokens=9)) == want

    def counted(loop: LoopRun) -> Any:
        block = advance(loop)
        widths.append(block[0].shape[1])
        return block

    monkeypatch.setattr(LoopRun, "advance", counted)
    dispatches = [len(widths) for _ in plain.lm.stream(plain.prompts[0], max_new_tokens=9)]
    assert dispatches == [*range(1, 9), 8] and set(widths) == {1}
    assert plain.lm.generate(plain.prompts[0], max_new_tokens=9) == want
    assert widths[8:] == [plain.lm.model.settings.loop.steps] * 2
    pairs = load(PLAIN, profile=rlx.CompileProfile().replace(backend={"cpu": {"steps_per_dispatch": 16}}))
    for count in (9, 8):
        assert list(pairs.stream(plain.prompts[0], max_new_tokens=count)) == want[:count]
    assert widths[10:] == [2] * (4 + 4)


def test_end_tokens(plain: Case, tmp_path: Path) -> None:
    """An end token ends its row and is its last id; `generation_config.json` goes before `config.json`; and they may be
    any integers, set later too."""
    first, second = plain.greedy[0][5], plain.greedy[1][9]
    directory = checkpoints.edited(PLAIN, tmp_path / "it", {"eos_token_id": 0})
    checkpoints.edit_json(directory / "generation_config.json", {"eos_token_id": [first, second]})
    lm = load(directory)
    assert lm.generate(plain.prompts, max_new_tokens=24) == [cut(row, [first, second]) for row in plain.greedy]
    (directory / "generation_config.json").unlink()
    assert load(directory).eos_ids == (0,)
    lm.eos_ids = np.int64(first)
    assert lm.eos_ids == (first,)
    for options in ({}, {"stop": np.array([second])}):
        ends = [first, second] if options else [first]
        got = lm.generate(plain.prompts, max_new_tokens=24, **options)
        assert got == [cut(row, ends) for row in plain.greedy]


def test_strings(chat: Any) -> None:
    """A list or an array of strings gives a list of them, one gives one, none gives none; the same as ids."""
    prompts, texts = ([example[key] for example in CASES] for key in ("prompt", "text"))
    for strings in (prompts, np.array(prompts), np.array(prompts, object)):
        assert chat.generate(strings, max_new_tokens=24) == texts
    assert chat.generate(prompts[0], max_new_tokens=24) == texts[0]
    assert chat.generate([], max_new_tokens=4) == []
    ids = [example["ids"] for example in CASES]
    assert chat.generate(ids, max_new_tokens=24) == [example["new"] for example in CASES]


def test_what_is_behind_a_stop_string_does_not_count(chat: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ids end with the token that completes it, whatever was computed ahead: more of them, and a failure."""
    dispatched: list[LoopRun] = []
    advance = LoopRun.advance

    def counted(loop: LoopRun) -> Any:
        dispatched.append(loop)
        return advance(loop)

    monkeypatch.setattr(LoopRun, "advance", counted)

    def blow(emit: Any, x: Any) -> Any:
        return emit.jax(lambda t: jnp.where(t[..., 20:21] > 0, jnp.nan, t), x)  # behind token 20

    count = np.roll(np.eye(VOCABULARY, dtype=np.float32), 1, axis=0)  # token i + 1 follows token i
    flow = rlx.ModelFlow("count").input("tokens", ("batch", "seq"), dtype="int32").embed("e").custom(blow).linear("h")
    lm = rlx.CausalLM(flow, {"e": np.eye(VOCABULARY, dtype=np.float32), "h": count}, tokenizer=chat.tokenizer)
    stop = chat.tokenizer.decode([17])
    for _ in range(2):  # the loop compiled, and not
        assert lm.generate([[14], [30]], max_new_tokens=12, stop=stop) == [[15, 16, 17], [*range(31, 43)]]
        dispatched.clear()
        assert list(lm.stream([14], max_new_tokens=12, stop=stop)) == [15, 16, 17]
    assert len(dispatched) == 3  # two for the tokens, one ahead, and none after the end
    stream: Any = lm.stream([14], max_new_tokens=12)
    assert [next(stream), next(stream)] == [15, 16]
    stream.close()
    assert len(dispatched) == 3 + 2 and list(lm.stream([14], max_new_tokens=5)) == [*range(15, 20)]
    assert lm.generate(chat.tokenizer.decode([14]), max_new_tokens=12, stop=stop) == chat.tokenizer.decode([15, 16])
    with pytest.raises(errors.NumericsError, match=r"prompts\[0\], first after 6 new tokens;"):
        lm.generate([14], max_new_tokens=12)


def decode(ids: list[int]) -> str:
    """Bytes as text; those of a broken character as its sign."""
    return bytes(ids).decode("utf-8", "replace")


def test_half_of_a_character_is_no_stop_string() -> None:
    """Only once it can no longer become whole; what may become a stop string is held, what stands before one not."""
    assert stable_prefix("one two", ("wot", "oh")) == "one t"
    assert stable_prefix("one two", ("ne t", "x")) == "o"
    assert stop_length(decode, [*b"one two"], 2, ("two",)) and not stop_length(decode, [*b"one two"], 2, ())
    ids = list("né€😀".encode())
    for n in range(1, len(ids) + 1):
        assert not stop_length(decode, ids[:n], 1, (INCOMPLETE_CHAR,))
        assert "né€😀".startswith(stable_prefix(decode(ids[:n]), (INCOMPLETE_CHAR,)))
    long = list("😀".encode()) * 80  # the last tokens begin within a character
    assert not stop_length(decode, long, 1, (INCOMPLETE_CHAR, "x"))
    text = GrowingText(decode)
    assert all(text.update(long[:n]) == decode(long[:n]) for n in range(321)) and text.count > 128
    broken = [*b"ab\xf0\x9f", *b"c"]
    stops = (INCOMPLETE_CHAR,)
    assert stop_length(decode, broken, 1, stops) and not stop_length(decode, broken[:-1], 1, stops)
    assert stable_prefix(decode(broken), stops) == truncate_at_stop(decode(broken), stops) == "ab"


def test_where_a_tokenizer_is(chat: Any) -> None:
    """A directory, or the file in it, with what the files beside it say."""
    given: Any
    for given in (str(CHAT), CHAT / "tokenizer.json"):
        lm = rlx.CausalLM(chat.model, tokenizer=given)
        assert lm.eos_ids == chat.tokenizer.eos_ids and lm.bos_id == chat.bos_id
        found = rlx.Encoder(dataclasses.replace(recipe_for(CHAT), hidden_only=True), tokenizer=given).tokenizer
        assert found is not None and found.encode(CASES[0]["prompt"]) == CASES[0]["ids"]


@pytest.mark.oracle(warnings="error")
def test_a_tokenizer_of_transformers(chat: Any) -> None:
    """One that `AutoTokenizer` opened gives its own ids, its end token and its chat template."""
    import transformers

    theirs: Any = transformers.AutoTokenizer.from_pretrained(CHAT)
    theirs.chat_template = "{% for m in messages %}<{{ m.role }}> {{ m.content }}{% endfor %}"
    lm = rlx.CausalLM(chat.model, tokenizer=theirs)
    assert lm.tokenizer is not None
    for text in (*(case["prompt"] for case in CASES), "", "né <s> \U0001f600"):
        assert lm.tokenizer.encode(text) == theirs(text)["input_ids"]
    assert lm.eos_ids == (theirs.eos_token_id,) and lm.bos_id == theirs.bos_token_id
    messages = [{"role": "user", "content": "Hello"}]
    want = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert lm.apply_chat_template(messages, tokenize=False) == want


def test_a_refused_call_leaves_the_state(plain: Case) -> None:
    """Ids, a batch and lengths that are not its own; then it goes on, once, and what it returned goes on."""
    tokens, want, lm = plain.record["tokens"], plain.record["logits"], plain.lm
    _, state = lm.prefill(tokens[:, :8], max_len=CONTEXT)
    for error, arguments in (
        (errors.TokenIdError, (np.array([[1], [VOCABULARY]]),)), (errors.RequestError, (tokens[:1, 8:9],)),
        (errors.RequestError, (tokens[:, 8:9], np.array([1]))),
    ):  # fmt: skip
        with pytest.raises(error):
            lm.extend(state, *arguments)
    logits, after = lm.extend(state, tokens[:, 8:9])
    assert_close(logits, want[:, 8:9])
    with pytest.raises(errors.SessionStateError):
        lm.extend(state, tokens[:, 8:9])
    logits, _ = lm.extend(after, tokens[:, 9:10])
    assert_close(logits, want[:, 9:10])


def test_a_full_cache(plain: Case) -> None:
    """A cache may be filled to its last slot; one token more in any row is an error and leaves the state alive."""
    tokens, want = plain.record["tokens"], plain.record["logits"]
    _, state = plain.lm.prefill(tokens[:, :8], max_len=9)
    with pytest.raises(errors.SequenceLengthError):
        plain.lm.extend(state, tokens[:, 8:10], np.array([1, 2]))
    logits, state = plain.lm.extend(state, tokens[:, 8:10], np.array([1, 1]))
    assert_close(np.asarray(logits)[:, :1], want[:, 8:9])
    with pytest.raises(errors.SequenceLengthError):
        plain.lm.extend(state, tokens[:, 9:10])


SAMPLER = rlx.Sampler(0.8, top_k=30, repetition_penalty=1.3, logit_bias={7: 2.0, 9: -np.inf})
ASKED = [[5, 6, 7, 8, 9], [11]]


@pytest.fixture(scope="module")
def buckets() -> Any:
    """Programs of 2 and of 6 rows, so that few are compiled."""
    tables = {"batch": [2, 6], "prompt": [16], "context": [64]}
    return load(CHAT, profile=rlx.CompileProfile().replace(buckets=tables))


@pytest.fixture(scope="module")
def reference() -> tuple[dict[str, Any], Weights]:
    """The checkpoint for the reference."""
    return numpy_reference.read_config(CHAT), numpy_reference.read_weights(CHAT)


def check(prompt: Sequence[int], answer: rlx.Completion, k: int, reference: tuple[dict[str, Any], Weights]) -> None:
    """What is told is the log-softmax of the bare logits, in float64."""
    ids = [*prompt, *answer.tokens]
    found = log_softmax(numpy_reference.llama_row(*reference, ids)[1])[len(prompt) - 1 : -1]
    np.testing.assert_allclose(answer.token_logprobs, found[np.arange(len(answer.tokens)), answer.tokens], atol=3e-5)
    assert len(answer.top) == len(answer.tokens) and all(len(pairs) == k for pairs in answer.top)
    best = np.argsort(-found, axis=-1, kind="stable")[:, :k]
    told = np.array([[p for _, p in pairs] for pairs in answer.top]).reshape(len(answer.tokens), k)
    np.testing.assert_allclose(told, np.take_along_axis(found, best, axis=-1), atol=3e-5)
    assert [[i for i, _ in pairs] for pairs in answer.top] == best.tolist()


def test_log_probabilities_are_those_before_the_sampler(buckets: Any, reference: Any) -> None:
    """Temperature, filters, penalty and bias change what is chosen, and not what is told of it."""
    answers = buckets.generate(ASKED, max_new_tokens=9, sampler=SAMPLER, seed=3, n=3, logprobs=3)
    assert [len(of_prompt) for of_prompt in answers] == [3, 3]
    for prompt, of_prompt in zip(ASKED, answers, strict=True):
        assert len({answer.tokens for answer in of_prompt}) == 3
        for answer in of_prompt:
            check(prompt, answer, 3, reference)
            assert answer.text is None and 9 not in answer.tokens
    assert any(pairs[0][0] != i for a in answers[0] for i, pairs in zip(a.tokens, a.top, strict=True))


def test_answers_are_rows_and_the_prompt_is_read_once(buckets: Any) -> None:
    """n answers are those of n rows with the same prompt; the program that reads one prompt has the fewest rows."""
    answers = buckets.generate(ASKED[0], max_new_tokens=9, sampler=SAMPLER, seed=3, n=3, logprobs=1)
    read = {k for k in buckets.model.programs.executables if k.program == "prefill"}
    assert {dict(k.binding)["batch"] for k in read} == {2}
    rows = buckets.generate([ASKED[0]] * 3, max_new_tokens=9, sampler=SAMPLER, seed=3, logprobs=1)
    assert [a.tokens for a in answers] == [a.tokens for a in rows]
    np.testing.assert_allclose([a.token_logprobs for a in answers], [a.token_logprobs for a in rows], atol=1e-5)
    ready = len(buckets.model.programs.executables)
    buckets.generate(ASKED, max_new_tokens=4, sampler=rlx.Sampler(1.0, top_p=0.5), n=2, logprobs=5)  # the same programs
    buckets.generate([1, 2], max_new_tokens=7, sampler=rlx.Sampler(0.3, top_k=2), n=6, logprobs=8)
    assert len(buckets.model.programs.executables) == ready


def test_ends_and_strings(buckets: Any) -> None:
    """An end token is the last that is told of; a stop string cuts the text, and the tokens behind those it takes."""
    sampler = rlx.Sampler(1.0, top_k=60)

    def ask(**stop: Any) -> Any:
        return buckets.generate("The sky is", max_new_tokens=12, sampler=sampler, seed=1, n=3, logprobs=2, **stop)[0]

    long = ask()
    assert long.text == buckets.tokenizer.decode(long.tokens) and len(long.tokens) == len(long.token_logprobs) == 12
    end = next(at for at, i in enumerate(long.tokens) if at > 3 and i not in long.tokens[:at])
    short = ask(stop=long.tokens[end])
    assert short.tokens == long.tokens[: end + 1] and short.token_logprobs == long.token_logprobs[: end + 1]
    word = long.text[4:7]
    cut = ask(stop=word)
    assert cut.text == long.text[: long.text.index(word)]
    assert len(cut.tokens) == len(cut.token_logprobs) == len(cut.top) < 12
    assert cut.tokens == long.tokens[: len(cut.tokens)]
    nothing = buckets.generate("The sky is", max_new_tokens=0, sampler=sampler, n=2, logprobs=2)
    assert nothing == [rlx.Completion("", (), (), ())] * 2


@pytest.mark.slow
def test_warm_up_of_answers() -> None:
    """Then nothing compiles, whatever prompts there are, answers and tokens to tell of; without it the first is one."""
    buckets = {"batch": [1, 4], "prompt": [4], "context": [16], "on_recompile": "error"}
    lm = load(CHAT, profile=rlx.CompileProfile().replace(buckets=buckets))
    sampler = rlx.Sampler(1.0)
    lm.warmup(samplers=sampler)
    with pytest.raises(errors.RequestError):
        lm.generate([5], 4, sampler, logprobs=1)
    lm.warmup(samplers=sampler, n=4, logprobs=8)
    for prompts, n, k in ((1, 4, 8), (2, 2, 1), (1, 1, None), (2, 1, 3)):
        with jax.transfer_guard("disallow"):
            answers = lm.generate([[5, 6, 7]] * prompts, 4, sampler, n=n, logprobs=k)
        assert [len(of_prompt) for of_prompt in answers] == [n] * prompts
    assert lm.report().recompiles == 0


@pytest.mark.oracle
def test_live_generate_with_end_tokens(plain: Case, tmp_path: Path) -> None:
    """`transformers` stops where the library stops, for one end token and for several."""
    model = hugging_face.load(PLAIN, "AutoModelForCausalLM")
    for ends in ([plain.greedy[2][3]], [plain.greedy[0][1], plain.greedy[1][6]]):
        want = [hugging_face.generate(model, prompt, 24, eos=ends) for prompt in plain.prompts]
        directory = checkpoints.edited(PLAIN, tmp_path / str(ends), {"eos_token_id": ends})
        (directory / "generation_config.json").unlink(missing_ok=True)
        assert load(directory).generate(plain.prompts, max_new_tokens=24) == want


@pytest.mark.oracle
@pytest.mark.parametrize("seed", range(300, 303))
def test_live_splits(seed: int, tmp_path: Path) -> None:
    """Fresh random checkpoints: prefill and two ragged extends equal the forward pass of `transformers`."""
    directory = tmp_path / "checkpoint"
    hugging_face.write(hugging_face.RANDOM["llama"](seed), directory)
    model, lm = hugging_face.load(directory, "AutoModelForCausalLM"), load(directory)
    rng = np.random.default_rng(seed)
    steps = [rng.integers(1, 9, 3), rng.integers(0, 6, 3), rng.integers(0, 4, 3)]
    total = np.sum(steps, axis=0)
    rows = [rng.integers(0, model.config.vocab_size, n).tolist() for n in total]
    want = [logits for _, logits in hugging_face.llama_rows(model, rows)]
    begin, state = np.zeros(3, int), None
    for width, new in zip((8, 5, 3), steps, strict=True):
        block = np.zeros((3, width), np.int32)
        for b in range(3):
            block[b, : new[b]] = rows[b][begin[b] : begin[b] + new[b]]
        if state is None:
            logits, state = lm.prefill(block, new, max_len=CONTEXT)
        else:
            logits, state = lm.extend(state, block, new)
        for b in range(3):
            assert_close(np.asarray(logits)[b, : new[b]], want[b][begin[b] : begin[b] + new[b]])
        begin += new
