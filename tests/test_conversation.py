"""Conversations: what a turn reads, and that its tokens are those of reading everything again.

The tokenizer has one token for each word, so that a reply is written as the tokens that it came in.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import pytest

import rlx_jax as rlx
from rlx_jax import errors
from rlx_jax.text.template_worker import render_answer
from rlx_jax.text.tokenizer import Tokenizer, load_tokenizer
from tests import divided

ROLES = ["system", "user", "assistant", "tool", "<end>"]
WORDS = [*ROLES, *(f"w{i}" for i in range(divided.V - len(ROLES)))]
END = WORDS.index("<end>")
PLAIN = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} <end> {% endfor %}"
    "{% if add_generation_prompt %}assistant{% endif %}"
)
SHORTENED = PLAIN.replace(
    "{{ m.content }}", "{{ m.content if m.role != 'assistant' or loop.last else m.content.split(' ')[-1] }}"
)
"""Of earlier replies the last word alone, as templates leave out what a model thought."""
BUCKETS = {"batch": [1], "prompt": [8], "context": [32, 96]}
SYSTEM = {"role": "system", "content": "w0 w1 w2"}
ASKED = ["w3 w4 w5", "w6", "w7 w8 w9 w10", "w11 w12"]
REPLY = 9


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Render templates in this process. Their process, which takes longer than a turn, is in test_chat.py."""

    def render_each(template: str, variables: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
        return [render_answer({"template": template, "output_chars": 10_000}, each) for each in variables]

    monkeypatch.setattr("rlx_jax.text.chat.render_each", render_each)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each word, and a template."""
    folder = tmp_path_factory.mktemp("words")
    vocab = {word: i for i, word in enumerate(WORDS)}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    document = {
        "version": "1.0", "truncation": None, "padding": None, "normalizer": None,
        "added_tokens": [{"id": END, "content": "<end>", "special": True, **flags}],
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocab, "unk_token": "w0"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(document), "utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": PLAIN}), "utf-8")
    found = load_tokenizer(folder)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> Any:
    """The model of a family, with two caches: a conversation outgrows the first."""

    @functools.cache
    def made(family: str) -> rlx.CausalLM:
        profile = rlx.CompileProfile().replace(buckets=BUCKETS)
        return rlx.CausalLM(
            divided.recipe(family), divided.weights(family), tokenizer=tokenizer, profile=profile, eos_ids=END,
            max_positions=256,
        )  # fmt: skip

    return made


def check_turns(lm: Any, chat: Any, asked: Sequence[str], **options: Any) -> list[Any]:
    """Each reply is that of `chat` to all messages; the reports."""
    reports = []
    for text in asked:
        reply = chat.send(text, REPLY, **options)
        reports.append(lm.report().request)
        *before, last = chat.messages
        assert last == {"role": "assistant", "content": reply}
        assert reply == lm.chat(before, REPLY, chat_template=chat.options.get("chat_template"), **options)
        assert lm.report().request.cached_tokens == 0
    return reports


def test_a_turn_reads_what_is_new(model: Any) -> None:
    """The tokens of the message, its role and end, and of the reply before the last token, which no step has read."""
    lm = model("mistral")
    chat = lm.conversation([SYSTEM])
    reports = check_turns(lm, chat, ASKED)
    length = unread = 0
    for text, report, reply in zip(ASKED, reports, chat.messages[2::2], strict=True):
        new = len(f"user {text} <end> assistant".split())
        words = len(reply["content"].split())  # its end token is no word
        prompt = (length or 5) + new
        assert report.prompt_tokens == prompt and report.reread == ""
        assert report.read_tokens == (prompt if not length else new + 1 + unread)
        length, unread = prompt + words + 1, 0 if words < REPLY else 1
    assert length > BUCKETS["context"][0] and "of them processed" in str(reports[-1])
    assert len(chat.messages) == 1 + 2 * len(ASKED)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mamba2", "llama"])
def test_a_template_that_writes_earlier_replies_otherwise(family: str, model: Any) -> None:
    """The first token that differs, or the place before it where the state was kept, is where reading begins."""
    lm = model(family)
    chat = lm.conversation([SYSTEM], chat_template=SHORTENED)
    _, *others = check_turns(lm, chat, ASKED)
    assert all(0 < report.cached_tokens < report.prompt_tokens for report in others)
    told = [report.reread for report in others if "the text differs at token" in report.reread]
    assert told and ("the copy of its state is at token" in told[0]) == (family != "llama")
    # the same, but that everything is read where the copy is of no use
    del chat.messages[1:3]
    reply = chat.send("w3", REPLY)
    report = lm.report().request
    assert reply == lm.chat(chat.messages[:-1], REPLY, chat_template=SHORTENED)
    if family == "llama":
        assert report.cached_tokens == 6  # the system's message and `user`
    else:
        assert report.cached_tokens == 0 and "cannot be rolled back" in report.reread


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mistral", "llama"])
def test_asking_again_reads_what_begins_a_reply(family: str, model: Any) -> None:
    """As often as one likes, whatever the template puts there, and behind a longer reply; all of it is read again
    where no copy is kept of what cannot be cut back."""
    lm = model(family)
    cut = family == "llama"  # its keys and values stay where they are
    drawn, plain = rlx.Sampler(1.0), rlx.Sampler()
    for template, samplers in ((PLAIN, (drawn, plain)), (PLAIN.replace("assistant", ""), (plain,))):
        chat = lm.conversation([SYSTEM], chat_template=template)
        check_turns(lm, chat, ASKED[:2])
        *asked, first = chat.messages
        for sampler in samplers:
            chat.messages.pop()
            reply = chat.send([], REPLY, sampler, seed=3)
            assert lm.report().request.read_tokens == 1 and lm.report().request.reread == ""
            assert chat.messages == [*asked, {"role": "assistant", "content": reply}]
            assert reply == lm.chat(asked, REPLY, sampler, seed=3, chat_template=template)
        assert reply == first["content"]
    check_turns(lm, chat, ASKED[2:3])
    chat = lm.conversation([SYSTEM], keep_copy=False)
    check_turns(lm, chat, ASKED[:2])
    assert (chat._text.snapshot is None) and chat.fork().keep_copy is False
    chat.messages.pop()
    chat.send([], REPLY)
    told = lm.report().request
    assert (told.read_tokens, bool(told.reread)) == ((1, False) if cut else (told.prompt_tokens, True))


@pytest.mark.slow
def test_asking_again_over_a_window(tokenizer: Tokenizer) -> None:
    """A ring that was not full yet has more slots afterwards, and one that needed no copy then may need one: replies
    are those of reading everything, and a copy that lacks a ring is not gone on from."""
    recipe = divided.recipe("mistral", sliding_window=24)
    lm = rlx.CausalLM(recipe, divided.weights("mistral"), tokenizer=tokenizer, max_positions=256)
    chat = lm.conversation([SYSTEM])
    chat.send(ASKED[0], 4)
    for budget in (40, 40):
        asked = chat.messages[:-1]
        chat.messages.pop()
        assert chat.send([], budget) == lm.chat(asked, budget)
    assert chat._text is not None and chat._text.snapshot is not None
    name, *others = chat._text.snapshot.arrays
    kept = replace(chat._text.snapshot, arrays={other: chat._text.snapshot.arrays[other] for other in others})
    chat._text = replace(chat._text, snapshot=kept)
    chat.messages.pop()
    reply = chat.send([], 40)
    told = lm.report().request
    assert told is not None and told.reread and name not in kept.arrays and reply == lm.chat(asked, 40)


@pytest.mark.slow
def test_forks_streams_and_failures(model: Any) -> None:
    """Ways on from one text do not disturb each other; what is left or fails was not said."""
    lm = model("mistral")
    chat = lm.conversation([SYSTEM], max_len=90)
    check_turns(lm, chat, ASKED[:1])
    assert chat._text.cache_len == BUCKETS["context"][1]  # the first turn runs in the cache that the last one needs
    other = chat.fork()
    check_turns(lm, chat, ["w20 w21"])
    check_turns(lm, other, ["w22"])
    assert lm.report() is not None and chat.messages[:3] == other.messages[:3] != chat.messages[-3:]
    said = list(chat.messages)
    left = chat.stream("w30", REPLY)
    next(left)
    left.close()
    assert chat.messages == said
    with pytest.raises(errors.RequestError):
        chat.send("w30", REPLY, stop=[divided.V])
    assert chat.messages == said
    assert "".join(chat.stream("w31", REPLY)) == chat.messages[-1]["content"] == lm.chat(chat.messages[:-1], REPLY)
    one, two = chat.stream("w32", REPLY), chat.stream("w33", REPLY)
    next(one)
    with pytest.raises(errors.SessionStateError, match="another turn has begun"):
        next(two)
    check_turns(lm, other, ["w34"])
    *_, last = one
    assert chat.messages[-1]["content"].endswith(last.strip())
    older = chat.stream("w35", REPLY)
    next(older)
    chat.send("w36", REPLY)
    with pytest.raises(errors.SessionStateError, match="read a stream to its end"):
        list(older)
    check_turns(lm, chat, ["w37"])


def test_refused(model: Any) -> None:
    """A full conversation says what to do. Other requests are in `golden/refusals/rows.md`."""
    lm = model("mistral")
    chat = lm.conversation([SYSTEM], max_len=24)
    told = "2 messages are 9 tokens, with 60 new ones more than max_len, 24; remove old"
    with pytest.raises(errors.RequestError, match=told):
        chat.send("w1", 60)
    with pytest.raises(TypeError, match="enable_thinkin"):
        lm.conversation(enable_thinkin=True)
    assert chat.messages == [SYSTEM]
    with pytest.raises(errors.SequenceLengthError, match="the model's positions, 256"):
        lm.conversation().send("w1", 300)


@pytest.mark.slow
def test_warmed_up(tokenizer: Tokenizer) -> None:
    """Then no turn compiles, whatever the template does to earlier ones, and nothing is sent unasked."""
    profile = rlx.CompileProfile().replace(buckets=BUCKETS | {"on_recompile": "error"})
    lm = rlx.CausalLM(divided.recipe("mistral"), divided.weights("mistral"), tokenizer=tokenizer, profile=profile)
    lm.warmup(samplers=rlx.Sampler())
    for template in (PLAIN, SHORTENED):
        with jax.transfer_guard("disallow"):
            check_turns(lm, lm.conversation([SYSTEM], chat_template=template), ASKED)
    assert lm.report().recompiles == 0


@pytest.mark.slow
def test_turns_with_drafts_and_without(model: Any, tokenizer: Tokenizer) -> None:
    """Rings have more slots where drafts may be taken back, and the state goes from one to the other; another model
    reads the whole text for its drafts."""
    lm = model("mistral")
    other = rlx.CausalLM(divided.recipe("llama"), divided.weights("llama"), tokenizer=tokenizer)
    chat = lm.conversation([SYSTEM])
    for text, drafts in zip(ASKED[:3], ("prompt", None, other), strict=True):
        reply = chat.send(text, REPLY, speculative=drafts)
        assert len(chat.messages) == 3 or lm.report().request.cached_tokens > 0
        assert reply == lm.chat(chat.messages[:-1], REPLY)
