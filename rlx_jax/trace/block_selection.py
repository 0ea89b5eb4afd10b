"""Selectors of the blocks to edit: by a glob over block paths, or by the weights that the blocks read."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence

from rlx_jax.dataclasses import dataclass, replace
from rlx_jax.errors import GraphError, did_you_mean, listing, quote, shown
from rlx_jax.ir.graph import Boundary, Node, Param
from rlx_jax.ir.param import keys_of
from rlx_jax.ir.paths import Path, path_text


@dataclass(frozen=True)
class BlockPattern:
    """A glob over block paths: `*` and `?` match within one segment, `**` any number of segments, `{q,v}` one of
    several texts, `[0-3]` one character.

    >>> pattern = BlockPattern("layers.*.self_attn.{q,v}_proj")
    >>> pattern.matches(("layers", 3, "self_attn", "q_proj")), pattern.matches(("layers", 3, "self_attn"))
    (True, False)

    Attributes:
        method: the method that takes the pattern, for messages; patterns of `param` match checkpoint keys.
        optional: the pattern may match no block.

    Raises:
        GraphError: the text is no string, has an empty segment, or an unclosed bracket.
    """

    text: str
    method: str = "at"
    optional: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not all(self.text.split(".")):
            noun, text = (
                ("path of a block", "layers.*.self_attn.o_proj")
                if self.method == "at"
                else ("key of a weight", "**.self_attn.o_proj.weight")
            )
            raise GraphError(f"{self.method}: a pattern is the dotted {noun}, such as {text!r}; got {shown(self.text)}")
        _compile_glob(self.text, self.method)

    def matches(self, path: Path) -> bool:
        """Return whether the pattern matches a full block path."""
        return _compile_glob(self.text, self.method).fullmatch(path_text(path)) is not None

    def relax(self, other_parts: Sequence[str]) -> BlockPattern:
        """Return the pattern for a flow when other flows have `other_parts` of the model.

        A pattern that names one of the parts may match nothing in this flow. With the part "*", the same holds for a
        pattern that starts with a wildcard.
        """
        wildcard_part = "*" if self.text[0] in "*?[{" else ""
        return replace(self, optional=not set(other_parts).isdisjoint((wildcard_part, *re.findall(r"\w+", self.text))))

    def select(self, nodes: Sequence[Node], where: str) -> frozenset[Path]:
        """Return the blocks that match.

        Raises:
            GraphError: no block matches; the message suggests similar paths.
        """
        # The path of nodes outside of all blocks is the name of the flow. Only a boundary proves that it is a block.
        outside = (where,)
        paths = dict.fromkeys(
            n.origin.path for n in nodes if n.inputs and (n.origin.path != outside or isinstance(n.op, Boundary))
        )
        blocks = dict.fromkeys(path[:end] for path in paths for end in range(1, len(path) + 1))
        matches = frozenset(path for path in blocks if self.matches(path))
        if not matches and not self.optional:
            raise self._no_match_error(where, blocks)
        return matches

    def _no_match_error(self, where: str, paths: Iterable[Path]) -> GraphError:
        """Return the error of a pattern without a match; suggestions write layer numbers as `*`."""
        layers = re.compile(r"(?<=\.)\d+(?=\.|$)")
        known_texts = list(dict.fromkeys(layers.sub("*", path_text(path)) for path in paths))
        folded = layers.sub("*", self.text)
        same = [text for text in map(path_text, paths) if layers.sub("*", text) == folded]
        longer = [text for text in known_texts if text.endswith(f".{self.text}")]
        if same:
            suggestion = f"; there are {listing(same, 4)}"
        elif longer:
            suggestion = f"; did you mean {' or '.join(map(quote, longer[:3]))}?"
        else:
            suggestion = did_you_mean(folded, known_texts, cutoff=0.7)
        return GraphError(f"{where}: {self} matches no block{suggestion or f'; blocks are {listing(known_texts)}'}")

    def __str__(self) -> str:
        return f"at({self.text!r})"


@dataclass(frozen=True)
class BlocksByWeight:
    """The innermost blocks that read these checkpoint keys; `description` replaces the keys in messages."""

    keys: frozenset[str]
    description: str = ""
    optional: bool = False

    def relax(self, other_parts: Sequence[str]) -> BlocksByWeight:
        """Return the selector for a flow among several, where another flow may read the weights."""
        return replace(self, optional=True)

    def select(self, nodes: Sequence[Node], where: str) -> frozenset[Path]:
        """Return the selected blocks.

        Raises:
            GraphError: no block reads one of the weights.
        """
        readers = readers_of(nodes)
        if (unread := sorted(self.keys - set(readers))) and not self.optional:
            suggestion = did_you_mean(unread[0], readers, cutoff=0.8)
            hint = "; it belongs to another model" if self.description and not suggestion else ""
            raise GraphError(f"{where}: {self}: no block reads weights {listing(unread, 4)}{suggestion}{hint}")
        return frozenset(path for key in self.keys for path in readers.get(key, ()))

    def __str__(self) -> str:
        return self.description or f"blocks of {len(self.keys)} weights"


@dataclass(frozen=True)
class ProjectionPattern:
    """The blocks that a glob matches, where a block with a fused weight counts as its separate projections.

    Such a block has several products, each with a part of one weight; then the blocks of the products are selected.
    """

    pattern: BlockPattern

    def relax(self, other_parts: Sequence[str]) -> ProjectionPattern:
        """Return the selector with its pattern adapted to the other flows."""
        return replace(self, pattern=self.pattern.relax(other_parts))

    def select(self, nodes: Sequence[Node], where: str) -> frozenset[Path]:
        """Return the selected blocks.

        Raises:
            GraphError: the glob matches no block, or only some of the blocks that share a weight.
        """
        readers, selected = readers_of(nodes), set[Path]()
        blocks = self.pattern.select(nodes, where)
        for block in blocks:
            # The innermost blocks in it that read each weight; several if they have parts of it.
            inner_readers = [{p for p in paths if p[: len(block)] == block} for paths in readers.values()]
            products = next((paths for paths in inner_readers if len(paths) > 1), {block})
            is_split = all(any(p[: len(b)] == b for b in products) for paths in inner_readers for p in paths)
            selected |= products if is_split else {block}
        for key, blocks_of_key in readers.items():
            if len(blocks_of_key) > 1 and 0 < len(blocks_of_key & selected) < len(blocks_of_key):
                others = listing(sorted(map(path_text, blocks_of_key - selected)), 4)
                raise GraphError(
                    f"{where}: {self}: {others} read weight {quote(key)} too: select all of these blocks, or "
                    "none if one of them is no product, such as an embedding that is tied to the head"
                )
        return frozenset(selected)

    def __str__(self) -> str:
        return str(self.pattern)


def readers_of(nodes: Sequence[Node]) -> dict[str, set[Path]]:
    """Return the innermost blocks that read each weight, by checkpoint key."""
    readers: dict[str, set[Path]] = {}
    for node in nodes:
        if isinstance(node.op, Boundary):
            continue
        for op in (nodes[value.node].op for value in node.inputs):
            for key in (k for p in op.programs for k in keys_of(p)) if isinstance(op, Param) else ():
                readers.setdefault(key, set()).add(node.origin.path)
    return readers


# All kinds of selectors, which share their methods.
BlockSelector = BlockPattern | BlocksByWeight | ProjectionPattern


WILDCARDS = {"**": ".+", "*": "[^.]*", "?": "[^.]"}


@functools.lru_cache(maxsize=256)
def _compile_glob(text: str, method: str) -> re.Pattern[str]:
    """Return a glob as a regular expression over the dotted path.

    Raises:
        GraphError: a bracket is not closed, or a range is invalid.
    """
    parts, depth = list[str](), 0
    # `**` comes first, so that it is not read as two `*`.
    for token in re.findall(r"(?s)\*\*|\[[^\[\].]+\]|.", text):
        if token in WILDCARDS:
            parts.append(WILDCARDS[token])
        elif len(token) > 1:
            content = token[1:-1]
            # A glob negates a set with `!`, a regular expression with `^`. The `-` of a range stays unescaped.
            characters = re.escape(content.lstrip("!")).replace("\\-", "-")
            parts.append(f"[{'^' if content[0] == '!' else ''}{characters}]")
        elif token == "{" or (token in ",}" and depth):  # outside of braces, a comma is literal
            depth += {"{": 1, "}": -1}.get(token, 0)
            parts.append({"{": "(?:", "}": ")", ",": "|"}[token])
        elif token in "[]}":
            raise GraphError(f"{method}: {text!r}: the {token!r} has no partner")
        else:
            parts.append(re.escape(token))
    if depth:
        raise GraphError(f"{method}: {text!r}: a '{{' has no partner")
    try:
        return re.compile("".join(parts))
    except re.error as error:
        raise GraphError(
            f"{method}: {text!r}: '[…]' holds characters, [02], or a range that rises, [0-3]; numbers of two digits "
            "go in braces, {9,10}"
        ) from error
