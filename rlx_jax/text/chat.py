"""`chat_prompt`: check chat messages, render them with the checkpoint's template, and encode them.

A template writes control tokens (`<|im_start|>`) around the texts of messages. A control token inside such a text must
not work as one (prompt injection), so it is encoded as plain text: before rendering, it is put between two marker
characters; afterwards, the text between markers is encoded as plain text. transformers does the same with
`sanitize_control_tokens=True`.

A template may also create a control token from message texts, by dropping characters or by joining two texts. To detect
this, the template also renders a twin of the conversation, in which the characters of message texts are replaced by
meaningless ones. A control token that the rendered twin does not have comes from message texts, and is refused.
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
from rlx_jax.io.files import is_text
from rlx_jax.runtime.inputs import check_flag
from rlx_jax.text.chat_template import choose_template, render, render_each, rendered_text
from rlx_jax.text.tokenizer import Tokenizer

# Keyword arguments of `CausalLM.chat` and `apply_chat_template` for suggestions, without the fields of a sampler.
ARGUMENTS = (
    "max_new_tokens", "sampler", "stop", "seed", "stream", "tools", "chat_template", "add_generation_prompt",
    "tokenize", "allow_special", "speculative", "draft_tokens", "n", "logprobs", "max_len",
)  # fmt: skip
# Nesting depth of lists and objects in a message or a tool.
MAX_NESTING = 32

# Roles that are allowed with any template; another role is allowed where the template's source quotes it.
ROLES = ("system", "user", "assistant", "tool", "developer")
_REASONING = ("reasoning_content", "thinking", "reasoning")  # synonyms: each template reads one of them
_PRIVATE_USE_CHARS = (*range(0xF0000, 0xFFFFE), *range(0x100000, 0x10FFFE))  # code points of Unicode without a meaning
_LITERAL = re.compile(r"""(["'])((?:(?!\1).){1,200})\1""")  # a string literal in a template, on one line


def chat_prompt(
    tokenizer: Tokenizer, messages: Any, *, tools: Any = None, chat_template: str | None = None,
    add_generation_prompt: bool = True, tokenize: bool = True, allow_special: bool = False,
    variables: Mapping[str, Any], arguments: Iterable[str] = (),
) -> Any:  # fmt: skip
    """Return the token ids of a conversation, or its text without `tokenize`.

    Arguments as for `CausalLM.apply_chat_template`; `variables` are its additional arguments, for the template, and
    `arguments` names that a misspelled one may stand for, besides `ARGUMENTS`.
    """
    for name, value in (
        ("add_generation_prompt", add_generation_prompt), ("tokenize", tokenize), ("allow_special", allow_special),
    ):  # fmt: skip
        check_flag(name, value)
    template = choose_checked_template(tokenizer, chat_template, tools is not None, variables, arguments)
    template_vars = {name: _to_plain_json(value, name) for name, value in variables.items()}
    template_vars["messages"] = check_messages(messages, template)
    template_vars["tools"] = None if tools is None else _check_tools(tools)
    template_vars.setdefault("documents", None)
    template_vars["add_generation_prompt"] = add_generation_prompt
    if tokenize and not allow_special:
        return _encode_escaped(tokenizer, template, template_vars)
    text = render(template, {**tokenizer.special_tokens, **template_vars})
    return tokenizer.encode(text, add_special_tokens=False) if tokenize else text


def choose_checked_template(
    tokenizer: Tokenizer, chat_template: str | None, has_tools: bool, variables: Iterable[str],
    arguments: Iterable[str] = (),
) -> str:  # fmt: skip
    """Return the template of a conversation, after checking that it mentions each of the caller's variables.

    Raises:
        RequestError: there is none. TypeError: it does not mention a variable, so that is a misspelled argument.
    """
    template = choose_template(tokenizer.chat_templates, chat_template, has_tools)
    for name in variables:
        if not re.search(rf"\b{re.escape(name)}\b", template):
            words = re.findall(r"\b[a-z_]{4,}\b", template)
            raise TypeError(
                f"unexpected keyword argument {quote(name)}: neither an argument nor a variable of the chat template"
                f"{did_you_mean(name, dict.fromkeys([*ARGUMENTS, *arguments, *words]), 0.75)}"
            )
    return template


# -- messages ----------------------------------------------------------------------------------


def check_messages(messages: Any, template: str = "") -> list[dict[str, Any]]:
    """Return a conversation as a list of messages in plain JSON values; a string is one user message.

    Keys with the value None are left out. Reasoning is set under `thinking` and `reasoning_content`, as templates
    differ in which one they read.

    Raises:
        RequestError: not a list of messages, or one of them is invalid; the message names its position.
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
    """Return one message in plain JSON values, with its role and content checked."""
    if not isinstance(message, Mapping):
        raise RequestError(f"{where}: expected {{'role': …, 'content': …}}, got {shown(message)}")
    plain: dict[str, Any] = {k: v for k, v in _to_plain_json(dict(message), where).items() if v is not None}
    role = plain.get("role")
    if not isinstance(role, str):
        raise RequestError(f"{where}['role']: expected one of {', '.join(ROLES)}, got {shown(role)}")
    if role not in ROLES and not re.search(rf"""(["']){re.escape(role)}\1""", template):
        raise RequestError(
            f"{where}['role']: {quote(role)} is none of {listing(ROLES)}, and the chat template does not contain it"
            f"{did_you_mean(role, ROLES)}"
        )
    _check_content(plain, where)
    for name in _REASONING:
        if name in plain:
            return {"thinking": plain[name], **plain, "reasoning_content": plain[name]}
    return plain


def _check_content(message: Mapping[str, Any], where: str) -> None:
    """Check that the content is a text or a list of text parts; it may be None with tool calls or reasoning."""
    content = message.get("content")
    if isinstance(content, str) or (content is None and (message.keys() & {"tool_calls", *_REASONING})):
        return
    if not isinstance(content, list):
        description = shown(content) if "content" in message else f"None; the message has {listing(message)}"
        raise RequestError(f"{where}['content']: expected text, got {description}")
    for i, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(
                f"{where}['content'][{i}]: expected {{'type': 'text', 'text': …}}, as the model reads text only, got "
                f"{shown(part)}"
            )


def _check_tools(tools: Any) -> list[Any]:
    """Return a list of tool schemas as plain JSON values."""
    if not isinstance(tools, list | tuple):
        raise RequestError(f"tools: expected a list of JSON schemas, got {type(tools).__name__}")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{i}]: expected the JSON schema of a function, a dict, got {shown(tool)}")
    return [_to_plain_json(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _to_plain_json(value: Any, where: str, depth: int = 0) -> Any:
    """Return a copy of `value` in plain JSON values; subclasses of str, int and so on become the plain type."""
    if depth > MAX_NESTING:
        raise RequestError(f"{where}: nested deeper than MAX_NESTING = {MAX_NESTING}")
    if isinstance(value, str):
        if not is_text(value):
            raise RequestError(f"{where}: half of a surrogate pair, which is not valid Unicode text")
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
            _to_plain_json(name, where)
        return {name: _to_plain_json(item, f"{where}[{quote(name)}]", depth + 1) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_plain_json(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    raise RequestError(f"{where}: expected text, numbers, lists and dicts, got {shown(value)}")


# -- control tokens in the texts of messages ---------------------------------------------------


def _encode_escaped(tokenizer: Tokenizer, template: str, variables: dict[str, Any]) -> list[int]:
    """Return the ids of the rendered template, with control tokens in the values of `variables` encoded as plain text.

    Control tokens are special tokens, and added tokens that the template's source contains. Messages of the assistant
    are output of the model: decoding has left special tokens out, and other control tokens (`</think>`) are intended,
    so only special tokens are encoded as plain text there.
    """
    added, message_texts = tokenizer.added_tokens, list(_iter_strings(variables))
    control = {t for t in added if added[t].special or (t in template and not t.isspace())}
    all_control, twin = control, _make_twin(variables, template, control, {t for t in control if not added[t].special})
    # Vocabularies have thousands of control tokens: the regex of markers is built from those that occur.
    control = {t for t in control if any(t in text for text in message_texts)}
    special = {t for t in control if added[t].special}
    markers = _unused_chars([template, *message_texts])
    marked_vars = {
        name: [_add_marks(m, special if m["role"] == "assistant" else control, markers) for m in value]
        if name == "messages"
        else _add_marks(value, control, markers)
        for name, value in variables.items()
    }
    # The twin is rendered in the same process; the text is None if the template fails on it.
    answer, twin_answer = render_each(template, [{**tokenizer.special_tokens, **each} for each in (marked_vars, twin)])
    text, twin_text = rendered_text(answer), twin_answer.get("text")
    # With one group, `split` returns the texts, and at odd positions the tokens between markers. A template that splits
    # texts may separate two markers; a single marker gives None there: it is dropped, and nothing joins across it.
    marker_pattern = re.compile(f"{markers[0]}({_alternation(control).pattern}){markers[1]}|[{markers[0]}{markers[1]}]")
    first_text, *pieces = marker_pattern.split(text)
    _check_control_tokens([first_text, *pieces[1::2]], twin_text, _alternation(all_control))
    newline = tokenizer.encode("\n", add_special_tokens=False)
    ids = tokenizer.encode(first_text, add_special_tokens=False)
    for i, piece in enumerate(pieces):
        if piece:
            ids += _encode_middle(tokenizer, piece, i % 2 == 0, newline)
    return ids


def _check_control_tokens(texts: list[str], twin_text: str | None, control: re.Pattern[str]) -> None:
    """Check that every control token in `texts`, which are encoded as they are, comes from the template.

    It does if the rendered twin has at least as many of it.

    Raises:
        RequestError: a control token is formed from the text of messages.
    """
    counts = Counter(itertools.chain.from_iterable(map(control.findall, texts)))
    if counts and twin_text is None:
        raise RequestError(
            "messages: the chat template does not render other texts in their place, so that control tokens of the "
            "template cannot be distinguished from those in messages; pass allow_special=True if you trust the messages"
        )
    for token in counts - Counter(control.findall(twin_text or "")):
        raise RequestError(
            f"messages: the chat template forms the control token {quote(token)} from their texts, as it changes or "
            "joins texts; remove it, or pass allow_special=True"
        )


def _encode_middle(tokenizer: Tokenizer, piece: str, plain: bool, newline: list[int]) -> list[int]:
    """Return the ids of a piece from the middle of a text.

    SentencePiece puts a space at the start of a text, but not after a newline. So the piece is encoded after a newline,
    and the ids of that newline are removed.
    """
    encode = tokenizer.encode_plain if plain else functools.partial(tokenizer.encode, add_special_tokens=False)
    ids = encode("\n" + piece)
    ids = ids[len(newline) :] if ids[: len(newline)] == newline else encode(piece)
    if plain and tokenizer.added_tokens[piece].id in ids:
        raise RequestError(
            f"messages: {quote(piece)} can only be encoded as a control token in this vocabulary, not as text; remove "
            "it, or pass allow_special=True"
        )
    return ids


def _add_marks(value: Any, tokens: set[str], marks: tuple[str, str]) -> Any:
    """Return `value` with the marks around each occurrence of `tokens` in its strings."""
    pattern = _alternation(tokens)
    mark = functools.partial(pattern.sub, lambda match: f"{marks[0]}{match[0]}{marks[1]}")
    return _map_strings(value, mark, mark)


def _map_strings(value: Any, change: Callable[[str], str], rename: Callable[[str], str]) -> Any:
    """Return a JSON value with `change` applied to each string in it, and `rename` to each key of its objects."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {rename(name): _map_strings(item, change, rename) for name, item in value.items()}
    return [_map_strings(item, change, rename) for item in value] if isinstance(value, list) else value


def _make_twin(
    variables: Mapping[str, Any], template: str, control: set[str], allowed_tokens: set[str]
) -> dict[str, Any]:
    """Return a copy of `variables` with the characters of its texts replaced by ones that no control token contains.

    White space and lengths stay. So do the strings that the template may compare with: roles, keys that it reads and
    string literals in it, as otherwise it would take other branches than for the messages. In messages of the
    assistant, the control tokens in `allowed_tokens` stay too.
    """
    tokens = _alternation(control)
    literals = {text for _, text in _LITERAL.findall(template) if not tokens.search(text)} | {*ROLES}
    keys = literals.union(re.findall(r"\w+", tokens.sub(" ", template)))
    # Literals inside longer texts stay too, as a template may split texts at them. Exceptions: short literals, which
    # match by chance, and parts of control tokens.
    inner_literals = {text for text in literals if len(text) > 3 and not any(text in token for token in control)}
    used_chars = set(itertools.chain.from_iterable(_iter_strings(variables)))
    unused_chars = (c for c in _PRIVATE_USE_CHARS if chr(c) not in used_chars)
    replacements = dict(zip((ord(c) for c in sorted(used_chars) if not c.isspace()), unused_chars, strict=False))

    def replace_chars(text: str, exact_texts: set[str], substrings: set[str]) -> str:
        """Replace the characters of a text that is not in `exact_texts`, except for its `substrings`."""
        if text in exact_texts:
            return text
        pieces = re.split(f"({_alternation(substrings).pattern})", text)
        pieces[::2] = [piece.translate(replacements) for piece in pieces[::2]]
        return "".join(pieces)

    def twin(value: Any, substrings: set[str]) -> Any:
        """Replace the characters of all strings and keys in a JSON value."""
        return _map_strings(
            value, lambda text: replace_chars(text, literals, substrings), lambda name: replace_chars(name, keys, set())
        )

    other_vars = {name: twin(value, inner_literals) for name, value in variables.items() if name != "messages"}
    turns = [
        twin(m, inner_literals | allowed_tokens if m["role"] == "assistant" else inner_literals)
        for m in variables["messages"]
    ]
    return {**other_vars, "messages": turns}


def _alternation(tokens: set[str]) -> re.Pattern[str]:
    """Return a pattern that matches the longest of the tokens at a position; without tokens, one that never matches."""
    return re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))) or "(?!)")


def _unused_chars(texts: Iterable[str]) -> tuple[str, str]:
    """Return two private-use characters that do not occur in the texts."""
    used_chars = set(itertools.chain.from_iterable(texts))
    opening_mark, closing_mark = itertools.islice((chr(c) for c in _PRIVATE_USE_CHARS if chr(c) not in used_chars), 2)
    return opening_mark, closing_mark


def _iter_strings(value: Any) -> Iterator[str]:
    """Yield every string in a JSON value, keys of objects included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from itertools.chain(value, *map(_iter_strings, value.values()))
    elif isinstance(value, list):
        yield from itertools.chain.from_iterable(map(_iter_strings, value))
