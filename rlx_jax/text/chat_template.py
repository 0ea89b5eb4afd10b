"""A checkpoint's chat templates: load them from its files, choose one, and render it.

A template is an untrusted program, so `template_worker.py` renders it in a separate process.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlx_jax.errors import (
    ConfigError,
    LimitError,
    RequestError,
    StorageError,
    TokenizerError,
    did_you_mean,
    listing,
    one_line,
    quote,
)
from rlx_jax.io import limits
from rlx_jax.io.files import is_text
from rlx_jax.io.folder import Folder

# Size of one chat template in UTF-8.
MAX_TEMPLATE_BYTES = 256 * 2**10
# Number of chat templates in one checkpoint.
MAX_TEMPLATES = 64
# Characters of the rendered text, in addition to the length of the messages.
MAX_RENDERED_CHARS = 2**20
# CPU time to render one conversation; a conversation and its twin together have twice that.
RENDER_SECONDS = 2.0
# Memory for rendering, in addition to 32 bytes for each byte of the messages. Only Linux enforces it.
RENDER_MEMORY = 256 * 2**20
# Wall-clock seconds after which the rendering process is stopped, however little CPU time it used.
RENDER_WAIT = 30.0

TEMPLATE_FILE, TEMPLATE_FOLDER = "chat_template.jinja", "additional_chat_templates"
DEFAULT, TOOL_USE = "default", "tool_use"
NO_TEMPLATE = (
    "the checkpoint has no chat template, as is usual for base models: put a chat_template.jinja next to the weights, "
    "or in Python pass chat_template=…, a Jinja template as in transformers; or generate from a prompt without chat"
)


def load_templates(folder: Folder, settings: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the chat templates of a model directory by name; empty if there are none. They are not parsed yet.

    They come from `chat_template.jinja` and `additional_chat_templates/*.jinja`, else from `chat_template` in
    `tokenizer_config.json`: one template, or a list of named ones.

    Args:
        folder: the model directory.
        settings: the content of `tokenizer_config.json`.
        where: the path of that file, for messages.

    Raises:
        ConfigError: `chat_template` has another type. TokenizerError: a file is not UTF-8.
        LimitError: a file is over `MAX_TEMPLATE_BYTES`, or there are more than `MAX_TEMPLATES`.
        PathEscapeError: a file is a link that leads out of the directory.
    """
    paths = template_files(folder)
    from_files = {name: text for name, path in paths.items() if (text := _read_template(folder, path)) is not None}
    if from_files:
        return from_files
    setting = settings.get("chat_template")
    if setting is None:
        return {}
    if isinstance(setting, str):
        return {DEFAULT: setting}
    items = setting if isinstance(setting, list) else [setting]
    pairs = [(t.get("name"), t.get("template")) if isinstance(t, dict) else (None, t) for t in items]
    pairs = list(setting.items()) if isinstance(setting, dict) else pairs  # templates by name
    named = {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
    if not pairs or len(named) < len(pairs):
        raise ConfigError(
            f"{where}: chat_template: expected a template, or a list of objects with a 'name' each and a 'template', "
            f"found {quote(setting)}"
        )
    return named


def template_files(folder: Folder) -> dict[str, str]:
    """Return the paths of template files by template name; the default's file need not exist.

    Raises:
        LimitError: more than `MAX_TEMPLATES`.
    """
    names = folder.names(TEMPLATE_FOLDER)
    paths = {DEFAULT: TEMPLATE_FILE}
    paths |= {n.removesuffix(".jinja"): f"{TEMPLATE_FOLDER}/{n}" for n in names if n.endswith(".jinja")}
    limits.check_limit(
        len(paths), (MAX_TEMPLATES, "MAX_TEMPLATES"), f"{folder.where(TEMPLATE_FOLDER)}: the number of chat templates"
    )
    return paths


def _read_template(folder: Folder, name: str) -> str | None:
    """Return the text of a template file; None if there is none."""
    raw = folder.read(name, (MAX_TEMPLATE_BYTES, "MAX_TEMPLATE_BYTES"), TokenizerError)
    try:
        return None if raw is None else raw.decode()
    except UnicodeDecodeError as cause:
        raise TokenizerError(f"{folder.where(name)}: not UTF-8 at byte {cause.start}") from cause


def choose_template(templates: Mapping[str, str], requested: str | None, has_tools: bool) -> str:
    """Return the template to use.

    Args:
        templates: the checkpoint's templates by name.
        requested: a name, or the template itself; None: the template for tools if `has_tools` and there is one, else
            the default.
        has_tools: whether the conversation has tools.

    Raises:
        RequestError: there is no template, or no default, or `requested` is neither a name nor a template.
        LimitError: the template is over `MAX_TEMPLATE_BYTES`.
    """
    if requested is not None and not isinstance(requested, str):
        raise RequestError(f"chat_template: expected a name or a template, got {type(requested).__name__}")
    if requested is not None:
        template = templates.get(requested, requested)
    elif has_tools and TOOL_USE in templates:
        template = templates[TOOL_USE]
    elif DEFAULT in templates:
        template = templates[DEFAULT]
    elif templates:
        raise RequestError(
            f"the checkpoint names no default template; pass chat_template=, one of {listing(templates)}"
        )
    else:
        raise RequestError(NO_TEMPLATE)
    size = len(template.encode(errors="surrogatepass"))
    limits.check_limit(size, (MAX_TEMPLATE_BYTES, "MAX_TEMPLATE_BYTES"), "the chat template: the size in bytes")
    if requested is None or requested in templates or any(mark in requested for mark in ("{{", "{%", "{#")):
        return template
    raise RequestError(
        f"chat_template: {quote(requested)} is not a template, as it has no '{{{{' and no '{{%', and not the name of "
        f"one: {listing(templates) or 'the checkpoint has none'}{did_you_mean(requested, templates)}"
    )


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Return the text that `template` renders for `variables`, which are plain JSON values.

    Raises:
        RequestError: the template refuses the messages; the message is the template's.
        TokenizerError: the template is invalid, or does something that the sandbox forbids; the message has the line.
        LimitError: over `RENDER_SECONDS`, `RENDER_WAIT`, `RENDER_MEMORY` or `MAX_RENDERED_CHARS`.
        StorageError: no process could be started.
    """
    return rendered_text(render_each(template, [variables])[0])


def render_each(template: str, variables: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Return the worker's answer for each of `variables`: an object with `text`, or with `error` and `message`.

    Raises:
        TokenizerError: the template ended the process. LimitError, StorageError: as `render`.
    """
    inputs = json.dumps(variables)
    request = {
        "template": template,
        "variables": variables,
        "seconds": RENDER_SECONDS * len(variables),
        "memory_bytes": RENDER_MEMORY + 32 * len(inputs),
        "output_chars": MAX_RENDERED_CHARS + len(inputs),
    }
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-S", "-X", "utf8", *_worker_arguments()],
            input=json.dumps(request).encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=RENDER_WAIT,
            start_new_session=True,  # Ctrl-C in a terminal must only reach this process, which then stops the worker
        )
    except subprocess.TimeoutExpired as cause:
        raise LimitError(f"the chat template: not rendered within RENDER_WAIT = {RENDER_WAIT:g} s") from cause
    except OSError as cause:
        raise StorageError(f"no process to render the chat template in: {quote(sys.executable)}: {cause}") from cause
    return _parse_answers(process)


def _parse_answers(process: subprocess.CompletedProcess[bytes]) -> list[dict[str, str]]:
    """Return the answers in a worker's output.

    Raises:
        LimitError: the worker ran out of CPU time. TokenizerError: it ended without answers.
    """
    if sys.platform != "win32" and process.returncode == -signal.SIGPROF:
        raise LimitError(f"the chat template: rendering takes more than RENDER_SECONDS = {RENDER_SECONDS:g} s")
    try:
        answers: list[dict[str, str]] = json.loads(process.stdout)
    except ValueError:
        status = f"signal {-process.returncode}" if process.returncode < 0 else f"exit status {process.returncode}"
        raise TokenizerError(f"the chat template ended the process that renders it: {status}") from None
    return answers


def rendered_text(answer: Mapping[str, str]) -> str:
    """Return the text of an answer, or raise the error that it describes; a template's message becomes one line."""
    if "text" in answer:
        if not is_text(answer["text"]):
            raise TokenizerError("the chat template writes half of a surrogate pair, which is not valid Unicode text")
        return answer["text"]
    message = one_line(answer["message"])
    match answer["error"]:
        case "refused":
            raise RequestError(f"the chat template refuses these messages: {message}")
        case "output":
            raise LimitError(
                f"the chat template: more than MAX_RENDERED_CHARS = {MAX_RENDERED_CHARS} characters beyond the messages"
            )
        case "memory":
            raise LimitError(f"the chat template: rendering takes more than RENDER_MEMORY = {RENDER_MEMORY} bytes")
        case _:
            raise TokenizerError(f"the chat template: {message}")


@functools.cache
def _worker_arguments() -> tuple[str, ...]:
    """Return the worker's file and the directories of jinja2 and markupsafe, as command-line arguments.

    The worker runs without site packages (`-S`), which keeps its start short, so it needs these directories.
    """
    directories = []
    for name in ("jinja2", "markupsafe"):
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise StorageError(f"chat templates need the package {name}: pip install jinja2")
        directories.append(os.fspath(Path(spec.origin).parent.parent))
    return (os.fspath(Path(__file__).with_name("template_worker.py")), *dict.fromkeys(directories))
