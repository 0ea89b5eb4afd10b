"""Which blocks are edited: those whose paths a glob matches, or those that read certain weights."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rlx_jax.errors import GraphError, did_you_mean, listing, quote, shown
from rlx_jax.ir.graph import Boundary, Node, Param
from rlx_jax.ir.param import keys_of
from rlx_jax.ir.paths import Path, path_text


@dataclass(frozen=True)
class BlockPattern:
    """A glob over block paths: `*` and `?` stay inside one segment, `**` is any number of segments, `{q,v}` one of
    several, `[0-3]` one character.

    >>> pattern = BlockPattern("layers.*.self_attn.{q,v}_proj")
    >>> pattern.matches(("layers", 3, "self_attn", "q_proj")), pattern.matches(("layers", 3, "self_attn"))
    (True, False)

    `method` is what messages say takes it; those of `param` are over the keys of weights. With `may_lack` it may match
    nothing.

    Raises:
        GraphError: it is no string, an empty one, or its brackets do not close.
    """

    text: str
    method: str = "at"
    may_lack: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not all(self.text.split(".")):
            what, such = (
                ("path of a block", "layers.*.self_attn.o_proj")
                if self.method == "at"
                else ("key of a weight", "**.self_attn.o_proj.weight")
            )
            raise GraphError(f"{self.method}: a pattern is the dotted {what}, such as {such!r}; got {shown(self.text)}")
        _compiled(self.text, self.method)

    def matches(self, path: Path) -> bool:
        """Whether it is the whole of a block path."""
        return _compiled(self.text, self.method).fullmatch(path_text(path)) is not None

    def beside(self, parts: Sequence[str]) -> BlockPattern:
        """In a flow beside others that hold these parts of a model: one that names a part may match nothing here, and
        beside "*" one that begins with a wildcard."""
        first = "*" if self.text[0] in "*?[{" else ""
        return replace(self, may_lack=not set(parts).isdisjoint((first, *re.findall(r"\w+", self.text))))

    def among(self, nodes: Sequence[Node], where: str) -> frozenset[Path]:
        """The blocks that are matched.

        Raises:
            GraphError: none; the message has those that are near.
        """
        # Outside of all blocks the path is the name of the flow, unless a stage has this name.
        outside = (where,)
        paths = dict.fromkeys(
            n.origin.path for n in nodes if n.inputs and (n.origin.path != outside or isinstance(n.op, Boundary))
        )
        known = dict.fromkeys(path[:end] for path in paths for end in range(1, len(path) + 1))
        found = frozenset(path for path in known if self.matches(path))
        if not found and not self.may_lack:
            raise self._nothing(where, known)
        return found

    def _nothing(self, where: str, paths: Iterable[Path]) -> GraphError:
        layers = re.compile(r"(?<=\.)\d+(?=\.|$)")
        known = list(dict.fromkeys(layers.sub("*", path_text(path)) for path in paths))
        folded = layers.sub("*", self.text)
        same = [text for text in map(path_text, paths) if layers.sub("*", text) == folded]
        ends = [text for text in known if text.endswith(f".{self.text}")]
        if same:
            near = f"; there are {listing(same, 4)}"
        elif ends:
            near = f"; did you mean {' or '.join(map(quote, ends[:3]))}?"
        else:
            near = did_you_mean(folded, known, alike=0.7)
        return GraphError(f"{where}: {self} matches no block{near or f'; blocks are {listing(known)}'}")

    def __str__(self) -> str:
        return f"at({self.text!r})"


@dataclass(frozen=True)
class BlocksReading:
    """The blocks that read the weights of these checkpoint keys themselves; `origin` says where the keys come from."""

    keys: frozenset[str]
    origin: str = ""
    may_lack: bool = False

    def beside(self, parts: Sequence[str]) -> BlocksReading:
        """In a flow beside others, which may read what this one does not."""
        return replace(self, may_lack=True)

    def among(self, nodes: Sequence[Node], where: str) -> frozenset[Path]:
        """The blocks.

        Raises:
            GraphError: nothing reads one of the weights.
        """
        readers = readers_of(nodes)
        if (unread := sorted(self.keys - set(readers))) and not self.may_lack:
            close = did_you_mean(unread[0], readers, alike=0.8)
            cure = "; it belongs to another model" if self.origin and not close else ""
            raise GraphError(f"{where}: {self}: nothing reads weights {listing(unread, 4)}{close}{cure}")
        return frozenset(path for key in self.keys for path in readers.get(key, ()))

    def __str__(self) -> str:
        return self.origin or f"blocks of {len(self.keys)} weights"


@dataclass(frozen=True)
class ProductsIn:
    """The products in blocks that a glob matches: of a block whose products are with parts of one weight each of them,
    else the block."""

    pattern: BlockPattern

    def beside(self, parts: Sequence[str]) -> ProductsIn:
        """As the pattern's."""
        return replace(self, pattern=self.pattern.beside(parts))

    def among(self, nodes: Sequence[Node], where: str) -> frozenset[Path]:
        """The blocks.

        Raises:
            GraphError: the glob matches none, or parts of a weight and not the others.
        """
        readers, found = readers_of(nodes), set[Path]()
        blocks = self.pattern.among(nodes, where)
        for block in blocks:
            inside = {key: {p for p in paths if p[: len(block)] == block} for key, paths in readers.items()}
            weights = {key: paths for key, paths in inside.items() if paths}
            parts = next((paths for paths in weights.values() if len(paths) > 1), None)
            apart = parts is not None and all(_below(path, parts) for paths in weights.values() for path in paths)
            found |= parts if parts is not None and apart else {block}
        for key, parts in readers.items():
            if len(parts) > 1 and 0 < len(parts & found) < len(parts):
                others = listing(sorted(map(path_text, parts - found)), 4)
                raise GraphError(
                    f"{where}: {self}: weight {quote(key)} is that of {others} too: select all of them, or, where one "
                    "is no product, as an embedding that is tied to the head, none"
                )
        return frozenset(found)

    def __str__(self) -> str:
        return str(self.pattern)


def readers_of(nodes: Sequence[Node]) -> dict[str, set[Path]]:
    """The blocks that read each weight themselves, by its key."""
    readers: dict[str, set[Path]] = {}
    for node in nodes:
        if isinstance(node.op, Boundary):
            continue
        for op in (nodes[value.node].op for value in node.inputs):
            for key in (k for p in op.programs for k in keys_of(p)) if isinstance(op, Param) else ():
                readers.setdefault(key, set()).add(node.origin.path)
    return readers


def _below(path: Path, blocks: Iterable[Path]) -> bool:
    """Whether it is that of one of the blocks, or of a part of it."""
    return any(path[: len(block)] == block for block in blocks)


# What blocks are selected by.
BlockSelector = BlockPattern | BlocksReading | ProductsIn


WILDCARDS = {"**": ".+", "*": "[^.]*", "?": "[^.]"}


@functools.lru_cache(maxsize=256)
def _compiled(text: str, method: str) -> re.Pattern[str]:
    """The pattern as a regular expression."""
    parts, depth = list[str](), 0
    for piece in re.findall(r"(?s)\*\*|\[[^\[\].]+\]|.", text):
        if piece in WILDCARDS:
            parts.append(WILDCARDS[piece])
        elif len(piece) > 1:
            inner = piece[1:-1]
            characters = re.escape(inner.lstrip("!")).replace("\\-", "-")
            parts.append(f"[{'^' if inner[0] == '!' else ''}{characters}]")
        elif piece == "{" or (piece in ",}" and depth):
            depth += {"{": 1, "}": -1}.get(piece, 0)
            parts.append({"{": "(?:", "}": ")", ",": "|"}[piece])
        elif piece in "[]}":
            raise GraphError(f"{method}: {text!r}: the {piece!r} has no partner")
        else:
            parts.append(re.escape(piece))
    if depth:
        raise GraphError(f"{method}: {text!r}: a '{{' has no partner")
    try:
        return re.compile("".join(parts))
    except re.error as error:
        raise GraphError(
            f"{method}: {text!r}: '[…]' holds characters, [02], or a range that rises, [0-3]; numbers of two digits "
            "go in braces, {9,10}"
        ) from error
