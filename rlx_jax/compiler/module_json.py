"""A graph module as JSON and back: its graph, and beside it the level, the policy and the plan."""

from __future__ import annotations

import json
from types import NoneType

from rlx_jax.compiler.settings import FUSION_POLICIES
from rlx_jax.errors import FormatError, VersionMismatchError, shown
from rlx_jax.io.strict_json import parse_object
from rlx_jax.ir.graph import Graph, GraphStage, TypeCache
from rlx_jax.ir.serial import decode, decode_graph, encode, encode_graph, object_with, one_of
from rlx_jax.lowering.lir.plan import Plan

FORMAT, VERSION = "rlx_jax.graph", 1


def written(graph: Graph, stage: GraphStage, policy: str, plan: Plan | None) -> str:
    """The text of a module; the same one gives the same text.

    Raises:
        UnsupportedError: the graph calls a Python function of the user (`emit.jax`); the message names the block.
    """
    head = {
        "format": FORMAT,
        "version": VERSION,
        "level": str(stage),
        "policy": policy,
        "plan": None if plan is None else encode(plan),
        "graph": encode_graph(graph),
    }
    return json.dumps(head, ensure_ascii=False, allow_nan=False)


def read(text: str | bytes) -> tuple[Graph, GraphStage, TypeCache, str, Plan | None]:
    """The inverse of `written`: graph, level, the types that were inferred, policy and plan.

    Nothing in the text is trusted and nothing is imported; the graph is not verified yet.

    Raises:
        FormatError, GraphError: the text is not a valid module; the message names the place.
        VersionMismatchError: written by another version of the format.
    """
    if not isinstance(text, str | bytes):
        raise FormatError(f"graph JSON: expected to_json's text, got {type(text).__name__}")
    raw = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
    data = parse_object(raw, "graph JSON", FormatError)
    one_of("graph JSON: format", data.get("format"), (FORMAT,))
    if data.get("version") != VERSION or isinstance(data["version"], bool):
        found = shown(data.get("version"))
        raise VersionMismatchError(f"graph JSON: version is {found}; this release reads version {VERSION} alone")
    head = object_with({"format", "version", "level", "policy", "plan", "graph"}, data, "graph JSON")
    stage = GraphStage(one_of("graph JSON: level", head["level"], tuple(GraphStage)))
    policy = one_of("graph JSON: policy", head["policy"], FUSION_POLICIES)
    plan = decode(Plan if stage == GraphStage.LIR else NoneType, head["plan"], "plan")
    types = TypeCache()
    return decode_graph(head["graph"], types), stage, types, policy, plan
