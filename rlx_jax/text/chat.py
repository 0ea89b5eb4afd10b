"""Chat messages to token ids: checked, rendered by the checkpoint's template, encoded.

A template writes control tokens (`<|im_start|>`) around what people wrote. Where people wrote one themselves it is
spelt as plain text: before rendering, their control tokens are put between two marks; after it, what stands between
marks is encoded as text. transformers does so where it is told `sanitize_control_tokens=True`.

A template may also make one of what people wrote, by leaving something out of it or by writing two texts side by side.
So it renders the messages a second time, as a twin in which people's characters are others that mean nothing. A
control token that the twin has not is refused.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rlx_jax.errors import RequestError, did_you_mean, listing, quote, shown
from rlx_jax.io.strict_json import is_text
from rlx_jax.text.chat_template import choose_template, render, render_with_twin
from rlx_jax.text.tokenizer import Tokenizer

# What `CausalLM.chat` and `apply_chat_template` take, for suggestions.
ARGUMENTS = (
    "max_new_tokens", "sampler", "stop", "seed", "stream", "tools", "chat_template", "add_generation_prompt",
    "tokenize", "allow_special", "speculative", "draft_tokens", "temperature", "top_k", "top_p", "min_p",
    "repetition_penalty", "logit_bias", "n", "logprobs", "max_len",
)  # fmt: skip
# Lists and objects inside each other in a message or a tool.
MAX_NESTING = 32

# Roles that any template may get; others are taken where the template's own text names them.
ROLES = ("system", "user", "assistant", "tool", "developer")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # one thing, named differently by templates
_PRIVATE_USE = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))  # characters of Unicode that mean nothing
_LITERAL = re.compile(r"""(["'])((?:(?!\1).){1,200})\1""")  # of a template, all on one line


def chat_prompt(
    tokenizer: Tokenizer,
    messages: Any,
    *,
    tools: Any = None,
    chat_template: str | None = None,
    add_generation_prompt: bool = True,
    tokenize: bool = True,
    allow_special: bool = False,
    variables: Mapping[str, Any],
) -> Any:
    """The token ids of a conversation, or its text; see `CausalLM.apply_chat_template`."""
    for name, value in (
        ("add_generation_prompt", add_generation_prompt), ("tokenize", tokenize), ("allow_special", allow_special),
    ):  # fmt: skip
        if not isinstance(value, bool):
            raise RequestError(f"{name} is {shown(value)}; expected True or False")
    template = chosen_template(tokenizer, chat_template, tools is not None, variables)
    given = {name: _plain(value, name) for name, value in variables.items()}
    given["messages"] = check_messages(messages, template)
    given["tools"] = None if tools is None else _check_tools(tools)
    given.setdefault("documents", None)
    given["add_generation_prompt"] = add_generation_prompt
    if tokenize and not allow_special:
        return _spelt_out(tokenizer, template, given)
    text = render(template, {**tokenizer.special_tokens, **given})
    return tokenizer.encode(text, add_special_tokens=False) if tokenize else text


def chosen_template(tokenizer: Tokenizer, chat_template: str | None, tools: bool, variables: Iterable[str]) -> str:
    """The template of a conversation, which mentions all variables of the caller's.

    Raises:
        RequestError: there is none. TypeError: it does not mention one of the variables: a misspelt argument.
    """
    template = choose_template(tokenizer.chat_templates, chat_template, tools)
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            known = re.findall(r"\b[a-z_]{4,}\b", template)
            raise TypeError(
                f"unexpected keyword argument {quote(name)}: no argument, and no variable of the chat template"
                f"{did_you_mean(name, dict.fromkeys([*ARGUMENTS, *known]), 0.75)}"
            )
    return template


# -- messages ----------------------------------------------------------------------------------


def check_messages(messages: Any, template: str = "") -> list[dict[str, Any]]:
    """A conversation as plain JSON values; a string is one message of the user.

    Keys whose value is None are left out. Reasoning is there under each name that templates read it by.

    Raises:
        RequestError: not a list of messages, or one of them is wrong; the place is named.
    """
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    if not isinstance(messages, list | tuple):
        raise RequestError(
            f"messages: expected a string, or a list of {{'role': …, 'content': …}}, got {type(messages).__name__}"
        )
    if not messages:
        raise RequestError("messages: expected at least one message, got none")
    return [_check_message(message, f"messages[{i}]", template) for i, message in enumerate(messages)]


def _check_message(message: Any, where: str, template: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected {{'role': …, 'content': …}}, got {shown(message)}")
    plain: dict[str, Any] = {k: v for k, v in _plain(dict(message), where).items() if v is not None}
    role = plain.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{where}['role']: expected one of {', '.join(ROLES)}, got {shown(role)}")
    if role not in ROLES and not re.search(rf"""(["']){re.escape(role)}\1""", template):
        raise RequestError(
            f"{where}['role']: {quote(role)} is none of {listing(ROLES)}, and the chat template does not name it"
            f"{did_you_mean(role, ROLES)}"
        )
    _check_content(plain, where)
    for name in _REASONING:
        if name in plain:
            return {"thinking": plain[name], **plain, "reasoning_content": plain[name]}
    return plain


def _check_content(message: Mapping[str, Any], where: str) -> None:
    """Text, a list of parts with text, or nothing beside tool calls."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and (message.keys() & {"tool_calls", *_REASONING})):
        return
    if not isinstance(content, list):
        found = shown(content) if "content" in message else f"None; the message has {listing(message)}"
        raise RequestError(f"{where}['content']: expected text, got {found}")
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}['content'][{i}]: expected {{'type': 'text', 'text': …}}, as the model reads text only, got "
                f"{shown(part)}"
            )


def _check_tools(tools: Any) -> list[Any]:
    if not isinstance(tools, list | tuple):
        raise RequestError(f"tools: expected a list of JSON schemas, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{i}]: expected the JSON schema of a function, a dict, got {shown(tool)}")
    return [_plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _plain(value: Any, where: str, depth: int = 0) -> Any:
    """A copy of `value` in plain JSON values."""
    if depth > MAX_NESTING:
        raise RequestError(f"{where}: nested deeper than MAX_NESTING = {MAX_NESTING}")
    if isinstance(value, str):
        if not is_text(value):
            raise RequestError(f"{where}: half of a surrogate pair; it is no Unicode text")
        return str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**63:
        return int(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str):
                raise RequestError(f"{where}: expected names that are strings, got {shown(name)}")
            _plain(name, where)
        return {name: _plain(item, f"{where}[{quote(name)}]", depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise RequestError(f"{where}: expected text, numbers, lists and dicts, got {shown(value)}")


# -- control tokens in what people wrote -------------------------------------------------------


def _spelt_out(tokenizer: Tokenizer, template: str, given: dict[str, Any]) -> list[int]:
    """The ids of the rendered template, with control tokens that `given` holds as plain text.

    Those are special tokens and the added tokens that the template's own text names. The assistant's messages are
    the model's own text: special tokens are left out of it, and others (`</think>`) are meant.
    """
    added, written = tokenizer.added_tokens, list(_strings(given))
    control = {t for t in added if added[t].special or (t in template and not t.isspace())}
    names, twin = control, _twin(given, template, control, {t for t in control if not added[t].special})
    control = {t for t in control if any(t in text for text in written)}  # vocabularies have thousands
    special = {t for t in control if added[t].special}
    marks = _unused([template, *written])
    marked = {
        name: [_marked(m, special if m["role"] == "assistant" else control, marks) for m in value]
        if name == "messages"
        else _marked(value, control, marks)
        for name, value in given.items()
    }
    text, of_twin = render_with_twin(
        template, {**tokenizer.special_tokens, **marked}, {**tokenizer.special_tokens, **twin}
    )
    # One group: texts, and at odd places what stood between marks. A template that splits text may part two marks;
    # None is one alone, which is dropped, and nothing joins across it.
    between = re.compile(f"{marks[0]}({_any_of(control).pattern}){marks[1]}|[{marks[0]}{marks[1]}]")
    first, *pieces = between.split(text)
    _check_meant([first, *pieces[1::2]], of_twin, _any_of(names))
    newline = tokenizer.encode("\n", add_special_tokens=False)
    ids = tokenizer.encode(first, add_special_tokens=False)
    for i, piece in enumerate(pieces):
        if piece:
            ids += _inside(tokenizer, piece, i % 2 == 0, newline)
    return ids


def _check_meant(texts: list[str], of_twin: str | None, control: re.Pattern[str]) -> None:
    """Every control token in what is encoded as it is, `texts`, is the template's own: the twin has as many.

    Raises:
        RequestError: people's text takes part in one.
    """
    found = Counter(itertools.chain.from_iterable(map(control.findall, texts)))
    if found and of_twin is None:
        raise RequestError(
            "messages: the chat template renders them, and not others in their place, so it cannot be told whether its "
            "control tokens are its own; pass allow_special=True where people's words are trusted"
        )
    for token in found - Counter(control.findall(of_twin or "")):
        raise RequestError(
            f"messages: the chat template makes the control token {quote(token)} of what they hold, as it changes or "
            "joins texts; take it out, or pass allow_special=True"
        )


def _inside(tokenizer: Tokenizer, piece: str, plain: bool, newline: list[int]) -> list[int]:
    """The ids of a piece from within a text. SentencePiece puts a space before a text; not so behind a new line."""
    encode = tokenizer.encode_plain if plain else functools.partial(tokenizer.encode, add_special_tokens=False)
    ids = encode("\n" + piece)
    ids = ids[len(newline) :] if ids[: len(newline)] == newline else encode(piece)
    if plain and tokenizer.added_tokens[piece].id in ids:
        raise RequestError(
            f"messages: {quote(piece)} is a control token and nothing else in this vocabulary, so it cannot be spelt "
            "as text; take it out, or pass allow_special=True"
        )
    return ids


def _marked(value: Any, tokens: set[str], marks: tuple[str, str]) -> Any:
    """`value` with each of `tokens` between the marks wherever it stands in a string."""
    find = _any_of(tokens)
    mark = functools.partial(find.sub, lambda found: f"{marks[0]}{found[0]}{marks[1]}")
    return _each(value, mark, mark)


def _each(value: Any, change: Callable[[str], str], rename: Callable[[str], str]) -> Any:
    """`value` with every string in it changed, and every name of a member."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {rename(name): _each(item, change, rename) for name, item in value.items()}
    return [_each(item, change, rename) for item in value] if isinstance(value, list) else value


def _twin(given: Mapping[str, Any], template: str, control: set[str], meant: set[str]) -> dict[str, Any]:
    """`given` with other characters than people's, which take part in no control token; white space and lengths stay.

    What the template compares with stays too: roles, names that it reads, texts that it quotes. In the assistant's
    messages so do the control tokens that are `meant` there.
    """
    tokens = _any_of(control)
    quoted = {text for _, text in _LITERAL.findall(template) if not tokens.search(text)} | {*ROLES}
    read = quoted.union(re.findall(r"\w+", tokens.sub(" ", template)))
    within = {text for text in quoted if len(text) > 3 and not any(text in token for token in control)}
    written = set(itertools.chain.from_iterable(_strings(given)))
    fresh = (c for c in _PRIVATE_USE if chr(c) not in written)
    others = dict(zip((ord(c) for c in sorted(written) if not c.isspace()), fresh, strict=False))

    def disguised(text: str, whole: set[str], parts: set[str]) -> str:
        if text in whole:
            return text
        pieces = re.split(f"({_any_of(parts).pattern})", text)
        pieces[::2] = [piece.translate(others) for piece in pieces[::2]]
        return "".join(pieces)

    def twin(value: Any, parts: set[str]) -> Any:
        return _each(value, lambda text: disguised(text, quoted, parts), lambda name: disguised(name, read, set()))

    made = {name: twin(value, within) for name, value in given.items() if name != "messages"}
    turns = [twin(m, within | meant if m["role"] == "assistant" else within) for m in given["messages"]]
    return {**made, "messages": turns}


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    """Finds the longest of the tokens that stands at a place."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _unused(texts: Iterable[str]) -> tuple[str, str]:
    """Two characters that the texts have nowhere."""
    used = set(itertools.chain.from_iterable(texts))
    first, second = itertools.islice((chr(c) for c in _PRIVATE_USE if chr(c) not in used), 2)
    return first, second


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain(value, *map(_strings, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_strings, value))
