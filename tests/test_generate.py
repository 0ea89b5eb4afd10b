"""Generation: greedy tokens against `transformers`, and the cached programs against the forward one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.generate.stopping import PART, settled, stopped_at
from rlx_jax.generate.stopping import cut as cut_text
from tests.oracles import checkpoints, hugging_face
from tests.oracles.comparing import assert_close
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
    return rlx.load(CHAT)


# -- sampling ----------------------------------------------------------------------------------

WARM = rlx.Sampler(temperature=1.5, top_k=20, top_p=0.95, repetition_penalty=1.1)


def test_draws_repeat_and_differ_by_seed(plain: Case) -> None:
    """The same seed gives the same tokens, another one others, alone too; no row is the greedy one at this temperature;
    a token of bias −inf does not come."""
    rows = [plain.lm.generate(plain.prompts, max_new_tokens=12, sampler=WARM, seed=s) for s in (3, 3, 4)]
    assert rows[0] == rows[1]
    assert all(a != b for a, b in zip(rows[0], rows[2], strict=True))
    assert all(row != want[:12] for row, want in zip(rows[0], plain.greedy, strict=True))
    assert plain.lm.generate(plain.prompts[:1], max_new_tokens=12, sampler=WARM, seed=3) == rows[0][:1]
    banned = rlx.Sampler(logit_bias={plain.greedy[0][0]: -np.inf})
    assert plain.greedy[0][0] not in plain.lm.generate(plain.prompts, max_new_tokens=12, sampler=banned)[0]


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
    with pytest.raises(errors.RequestError, match="one prompt"):
        plain.lm.stream(plain.prompts, max_new_tokens=7)


# -- end tokens --------------------------------------------------------------------------------


def cut(row: list[int], ends: list[int]) -> list[int]:
    """A row up to its first end token, which is kept."""
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


def test_end_tokens(plain: Case, tmp_path: Path) -> None:
    """An end token ends its row and is its last id; `generation_config.json` goes before `config.json`; and they may be
    any integers, set later too."""
    first, second = plain.greedy[0][5], plain.greedy[1][9]
    directory = checkpoints.edited(PLAIN, tmp_path / "it", {"eos_token_id": 0})
    checkpoints.edit_json(directory / "generation_config.json", {"eos_token_id": [first, second]})
    lm = rlx.load(directory)
    assert lm.generate(plain.prompts, max_new_tokens=24) == [cut(row, [first, second]) for row in plain.greedy]
    (directory / "generation_config.json").unlink()
    assert rlx.load(directory).eos_ids == (0,)
    lm.eos_ids = np.int64(first)
    assert lm.eos_ids == (first,)
    for options in ({}, {"stop": np.array([second])}):
        ends = [first, second] if options else [first]
        got = lm.generate(plain.prompts, max_new_tokens=24, **options)
        assert got == [cut(row, ends) for row in plain.greedy]


# -- strings -----------------------------------------------------------------------------------


def test_strings(chat: Any) -> None:
    """A list or an array of strings gives a list of them, one gives one, none gives none; the same as ids."""
    prompts, texts = ([example[key] for example in CASES] for key in ("prompt", "text"))
    for strings in (prompts, np.array(prompts), np.array(prompts, object)):
        assert chat.generate(strings, max_new_tokens=24) == texts
    assert chat.generate(prompts[0], max_new_tokens=24) == texts[0]
    assert chat.generate([], max_new_tokens=4) == []
    ids = [example["ids"] for example in CASES]
    assert chat.generate(ids, max_new_tokens=24) == [example["new"] for example in CASES]


def test_what_is_behind_a_stop_string_does_not_count(chat: Any) -> None:
    """Ids end with the token that completes it, whatever was computed ahead: more of them, and a failure."""

    def blow(emit: Any, x: Any) -> Any:
        return emit.jax(lambda t: jnp.where(t[..., 20:21] > 0, jnp.nan, t), x)  # behind token 20

    count = np.roll(np.eye(VOCABULARY, dtype=np.float32), 1, axis=0)  # token i + 1 follows token i
    flow = rlx.ModelFlow("count").input("tokens", ("batch", "seq"), dtype="int32").embed("e").custom(blow).linear("h")
    lm = rlx.CausalLM(flow, {"e": np.eye(VOCABULARY, dtype=np.float32), "h": count}, tokenizer=chat.tokenizer)
    stop = chat.tokenizer.decode([17])
    for _ in range(2):  # the loop compiled, and not
        assert lm.generate([[14], [30]], max_new_tokens=12, stop=stop) == [[15, 16, 17], [*range(31, 43)]]
        assert list(lm.stream([14], max_new_tokens=12, stop=stop)) == [15, 16, 17]
    assert lm.generate(chat.tokenizer.decode([14]), max_new_tokens=12, stop=stop) == chat.tokenizer.decode([15, 16])
    with pytest.raises(errors.NumericsError, match=r"prompts\[0\], first behind 6 new tokens;"):
        lm.generate([14], max_new_tokens=12)


def decode(ids: list[int]) -> str:
    """Bytes as text; those of a broken character as its sign."""
    return bytes(ids).decode("utf-8", "replace")


def test_half_of_a_character_is_no_stop_string() -> None:
    """Only once it can no longer become whole; what may become a stop string is held, what stands before one not."""
    assert settled("one two", ("wot", "oh")) == "one t"
    assert settled("one two", ("ne t", "x")) == "o"
    assert stopped_at(decode, [*b"one two"], 2, ("two",)) and not stopped_at(decode, [*b"one two"], 2, ())
    ids = list("né€😀".encode())
    for n in range(1, len(ids) + 1):
        assert not stopped_at(decode, ids[:n], 1, (PART,))
        assert "né€😀".startswith(settled(decode(ids[:n]), (PART,)))
    long = list("😀".encode()) * 80  # the last tokens begin within a character
    assert not stopped_at(decode, long, 1, (PART, "x"))
    broken = [*b"ab\xf0\x9f", *b"c"]
    assert stopped_at(decode, broken, 1, (PART,)) and not stopped_at(decode, broken[:-1], 1, (PART,))
    assert settled(decode(broken), (PART,)) == cut_text(decode(broken), (PART,)) == "ab"


def test_where_a_tokenizer_is(chat: Any) -> None:
    """A directory, or the file in it, with what the files beside it say."""
    given: Any
    for given in (str(CHAT), CHAT / "tokenizer.json"):
        lm = rlx.CausalLM(chat.model, tokenizer=given)
        assert lm.eos_ids == chat.tokenizer.eos_ids and lm.bos_id == chat.bos_id
        found = rlx.Encoder(dataclasses.replace(rlx.recipe_for(CHAT), hidden_only=True), tokenizer=given).tokenizer
        assert found is not None and found.encode(CASES[0]["prompt"]) == CASES[0]["ids"]


@pytest.mark.oracle
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


# -- errors ------------------------------------------------------------------------------------


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
    with pytest.raises(errors.SequenceLengthError):
        plain.lm.prefill(tokens, max_len=10)


def test_context_is_checked(tmp_path: Path, plain: Case) -> None:
    """A prompt, or prompt and new tokens, beyond the context are an error before anything runs."""
    lm = rlx.load(checkpoints.edited(PLAIN, tmp_path / "short", {"max_position_embeddings": 20}))
    for call in (
        lambda: lm.generate([[1] * 21], max_new_tokens=1), lambda: lm.generate(plain.prompts, max_new_tokens=24),
        lambda: lm.prefill(np.ones((1, 3), np.int32), max_len=21), lambda: lm.logits(np.zeros((1, 21), np.int32)),
    ):  # fmt: skip
        with pytest.raises(errors.SequenceLengthError, match="20"):
            call()
    assert lm.generate(plain.prompts, max_new_tokens=7) == [row[:7] for row in plain.greedy]  # 13 + 7 = 20


# -- live --------------------------------------------------------------------------------------


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
def test_live_generate_with_end_tokens(plain: Case, tmp_path: Path) -> None:
    """`transformers` stops where the library stops, for one end token and for several."""
    model = hugging_face.load(PLAIN, "AutoModelForCausalLM")
    for ends in ([plain.greedy[2][3]], [plain.greedy[0][1], plain.greedy[1][6]]):
        want = [hugging_face.generate(model, prompt, 24, eos=ends) for prompt in plain.prompts]
        directory = checkpoints.edited(PLAIN, tmp_path / str(ends), {"eos_token_id": ends})
        (directory / "generation_config.json").unlink(missing_ok=True)
        assert rlx.load(directory).generate(plain.prompts, max_new_tokens=24) == want


@pytest.mark.oracle
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(300, 303))
def test_live_splits(seed: int, tmp_path: Path) -> None:
    """Fresh random checkpoints: prefill and two ragged extends equal the forward pass of `transformers`."""
    directory = tmp_path / "checkpoint"
    hugging_face.write(hugging_face.random_llama(seed), directory)
    model, lm = hugging_face.load(directory, "AutoModelForCausalLM"), rlx.load(directory)
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
