"""What users get wrong, and what they are told: class, place, what was expected and found, and what to do."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import pickle
import re
import struct
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import blocks, device, errors
from rlx_jax.errors import (
    ArtifactFormatError,
    BatchMismatchError,
    ConfigError,
    DeriveError,
    DTypeError,
    DuplicateWeightError,
    GraphError,
    LimitError,
    MaskShapeError,
    MissingFileError,
    MissingWeightError,
    NameCollisionError,
    NonFiniteWeightError,
    NumericsError,
    PathEscapeError,
    ProfileError,
    RequestError,
    RlxError,
    RlxNumericsWarning,
    RlxWarning,
    SafetensorsError,
    SamplingParamError,
    SequenceLengthError,
    SessionStateError,
    ShapeError,
    StorageError,
    TargetExistsError,
    TokenIdError,
    UnboundInputError,
    UnboundStreamError,
    UnexpectedWeightError,
    UnsupportedError,
    WeightDTypeError,
    WeightError,
    WeightShapeError,
)
from rlx_jax.io import limits as weight_limits
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.layer_stack import LayerStack
from rlx_jax.models.llama import Llama32Flow
from tests.oracles.checkpoints import FIXTURES, REMOVED, copy, edit_tensors, edited

LLAMA = FIXTURES / "llama" / "gqa_tied_llama3_v5"
BERT = FIXTURES / "bert" / "bare_v5"
SHARDED = FIXTURES / "bert" / "masked_lm_v4"
IDS = np.ones((2, 3), np.int32)
X = np.ones((2, 8), np.float32)
W = {"w": np.ones((4, 8), np.float32)}
LINEAR = blocks.Linear("w")
VOCAB = json.loads((LLAMA / "config.json").read_text("utf-8"))["vocab_size"]
WIDE = (3 * 2**20, 2**18)  # 3 TB of float32
THREE: Any = 3
NONE: Any = None
NAME: Any = "auto"
UP = "model.layers.1.mlp.up_proj.weight"


class Silent:
    """An array of some other library that does not convert, with an error of no words."""

    def __array__(self, *args: Any, **named: Any) -> Any:
        raise ValueError


class World:
    """What a row works with: models that are made once, and an empty directory."""

    def __init__(self) -> None:
        self.lm, self.enc = rlx.load(LLAMA), rlx.load(BERT)
        self.bert = rlx.compile(rlx.from_pretrained(BERT))
        self.prefill = rlx.compile(rlx.from_pretrained(LLAMA), program="prefill")
        self.mlp = rlx.compile(mlp(), W)
        self.here = Path()

    def llama(self, **fields: Any) -> Any:
        """Load the tiny Llama after a change of its config.json."""
        return rlx.load(edited(LLAMA, self.here / "llama", fields))

    def tensors(self, edit: Callable[[dict[str, Any]], Any]) -> Any:
        """Load it after a change of its tensors."""
        edit_tensors(copy(LLAMA, self.here / "llama"), edit)
        return rlx.load(self.here / "llama")

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.here / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def shard(self, name: str) -> Any:
        """Open a directory whose index names `name` as its shard."""
        self.file("model.safetensors.index.json", json.dumps({"weight_map": {"w": name}}))
        return rlx.open_weights(self.here)

    def state(self, batch: int = 2, context: int = 8) -> Any:
        return self.prefill.init_state(batch, context)


def mlp() -> rlx.ModelFlow:
    return rlx.ModelFlow("mlp").input("x", ("batch", 8)).linear("w")


def tokens(**widths: int) -> tuple[rlx.ModelFlow, dict[str, np.ndarray]]:
    """A flow ids → embedding → head, with 11 rows and `head` outputs."""
    flow = rlx.ModelFlow("tiny").input("ids", ("batch", "seq"), "int32").embed("e").linear("h")
    return flow, {"e": np.ones((11, 4), np.float32), "h": np.ones((widths.get("head", 11), 4), np.float32)}


def logits_of(dtype: str) -> Any:
    """A causal model whose logits have this dtype."""
    flow, given = tokens()
    return rlx.CausalLM(flow.custom_named("mine", lambda e, x: e.jax(lambda a: a.astype(dtype), x)), given)


def stage(fn: Any, **options: Any) -> Any:
    """Compile a flow of one custom stage, `mine`, over `[batch, seq, 8]`."""
    return rlx.compile(rlx.ModelFlow("m").input("x", ("batch", "seq", 8)).custom_named("mine", fn), **options)


def inside(fn: Callable[[Any], Any]) -> Any:
    """The same, with `fn` called through `emit.jax`."""
    return stage(lambda emit, x: emit.jax(fn, x))


def branch(x: Any) -> Any:
    return x if x.sum() > 0 else -x


def header(text: str, data: bytes = b"1234", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(text) if length is None else length) + text.encode() + data


def entry(shape: str = "[1]", dtype: str = "F32", offsets: str = "[0,4]") -> str:
    return f'{{"w":{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}}}'


def renamed(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace(UP, UP.replace("up_proj", "up_prj")): value for key, value in tensors.items()}


@dataclass(frozen=True)
class Row:
    """A mistake. `where` is the path, key or field that the message must name, `says` what else is in it."""

    call: Callable[[World], Any]
    error: type[RlxError]
    where: str
    says: tuple[str, ...] = ()


def row(call: Callable[[World], Any], error: type[RlxError], where: str, *says: str) -> Row:
    return Row(call, error, where, says)


def safetensors(raw: bytes, error: type[RlxError], *says: str) -> Row:
    return row(lambda t: rlx.open_weights(t.file("m.safetensors", raw)), error, "m.safetensors", *says)


def in_config(error: type[RlxError], field: str, value: Any, *says: str) -> Row:
    return row(lambda t: t.llama(**{field: value}), error, field, "config.json", *says)


def profile(toml: str, error: type[RlxError], where: str, *says: str) -> Row:
    return row(lambda t: rlx.CompileProfile.from_toml(t.file("p.rlx.toml", toml)), error, where, *says)


def request(call: Callable[[World], Any], error: type[RlxError], where: str, *says: str) -> Row:
    return row(call, error, where, *says)


def sent_gone(name: str, call: Callable[[World, Any], Any]) -> Row:
    """A call with an array that an earlier one consumed, which the message calls `name`."""
    return row(lambda t: call(t, gone()), SessionStateError, repr(name), "earlier call")


def sized(fn: Callable[[Any], Any]) -> Row:
    """Arithmetic of a size that is not known."""
    return row(
        lambda t: x_of(lambda m, x: fn(m.shape(x).shape[0])), ShapeError, "dimension batch", "//, %, divmod",
        "static size",
    )  # fmt: skip


WEIGHTS: dict[str, Row] = {
    "a missing weight": row(
        lambda t: t.tensors(renamed), MissingWeightError, UP, "/llama': ", "1 weights", "layers.1",
        "did you mean 'model.layers.1.mlp.up_prj.weight'",
    ),
    "all weights under a prefix": row(
        lambda t: t.tensors(lambda w: {f"base.{k}": v for k, v in w.items()}), MissingWeightError,
        "'model.norm.weight'", "20 weights", "did you mean 'base.model.embed_tokens.weight'",
    ),
    "a wrong shape": row(
        lambda t: t.tensors(lambda w: {**w, UP: np.ones((5, 32), np.float32)}), WeightShapeError, UP, "/llama': ",
        "layers.1: ", "(model.safetensors)", "expected [56, 32] by config.json (intermediate_size 56)", "got [5, 32]",
    ),
    "integers as weights": row(
        lambda t: t.tensors(lambda w: {**w, "model.norm.weight": np.ones(32, np.int32)}), WeightDTypeError,
        "'model.norm.weight'", "norm: ", "(model.safetensors)", "expected floats, got i32",
    ),
    "a weight of NaN": row(
        lambda t: t.tensors(lambda w: {**w, "model.norm.weight": np.full(32, np.nan, np.float32)}),
        NonFiniteWeightError, "'model.norm.weight'", "model.safetensors", "32 NaN of 32", "on_nonfinite=",
    ),
    "a weight that nothing reads": row(
        lambda t: t.tensors(lambda w: {**w, "more.bias": np.ones(3, np.float32)}), UnexpectedWeightError,
        "'more.bias'", "llama", "strict=False",
    ),
    "more bytes than allowed": row(
        lambda t: rlx.load(LLAMA, max_bytes=10), LimitError, "max_bytes = 10", "the size of all weights in bytes",
    ),
    "a missing weight in a mapping": row(
        lambda t: rlx.compile(mlp().linear("proj.wieght"), {**W, "proj.weight": W["w"]}), MissingWeightError,
        "'proj.wieght'", "did you mean 'proj.weight'",
    ),
    "no weights at all": row(lambda t: rlx.compile(mlp()), MissingWeightError, "'w'", "weights=", "ShapeDtypeStruct"),
    "a call without weights": row(
        lambda t: rlx.compile(mlp(), {"w": jax.ShapeDtypeStruct((4, 8), jnp.float32)})(X), MissingWeightError, "mlp",
        "weights=", "init",
    ),
    "a weight of another width": row(
        lambda t: rlx.compile(mlp(), t.file("m.safetensors", header(entry("[4,9]", offsets="[0,144]"), bytes(144)))),
        WeightShapeError, "w: ", "f32[batch,8]", "it reads weight 'w' (", "m.safetensors), which is f32[4,9]",
    ),
    "a weight of another width that is transposed": row(
        lambda t: stage(lambda e, x: x @ e.param("w").transpose(), weights={"w": np.ones((4, 9), np.float32)}),
        WeightShapeError, "mine: ", "f32[batch,seq,8]", "weight 'w' (mapping), which is f32[4,9]",
    ),
    "complex weights": row(
        lambda t: rlx.compile(mlp(), {"w": np.ones((4, 8), np.complex64)}), WeightDTypeError, "w: ",
        "weight 'w' (mapping) is c64[4,8]", "floats, integers or bools",
    ),
    "an integer out of range": row(
        lambda t: stage(lambda e, x: x + e.param("i").astype("f32"), weights={"i": np.full(8, 2**40)}),
        WeightDTypeError, "'i'", "1099511627776", "i32",
    ),
    "nested weights": row(lambda t: rlx.open_weights({"a": {"b": X}}), WeightDTypeError, "'a'", "'dict'", "flatten"),
    "a key that is no string": row(lambda t: rlx.open_weights({THREE: X}), WeightError, "'3'", "strings as keys"),
    "a key that is none": row(lambda t: rlx.open_weights(W).read(NONE), MissingWeightError, "mapping", "got None"),
    "a key of a file": row(
        lambda t: rlx.open_weights(LLAMA).read(NONE), MissingWeightError, "model.safetensors", "got None",
    ),
    "a key that has no hash": row(
        lambda t: rlx.open_weights(LLAMA).spec(cast(Any, [])), MissingWeightError, "model.safetensors", "got []",
    ),
    "a sparse file of 3 TB": row(
        lambda t: rlx.open_weights(sparse(t.here / "m.safetensors")).read("w"), LimitError, "m.safetensors",
        "'w'", "limits.MAX_MEMORY_PERCENT = 80", "3,298,534,883,328 bytes",
    ),
    "a model of 3 TB": row(
        lambda t: rlx.compile(wide(), sparse(t.here / "m.safetensors")), LimitError, "weights",
        "limits.MAX_MEMORY_PERCENT = 80",
    ),
    "a path of half a character": row(
        lambda t: rlx.save(t.mlp, t.here / "\ud800"), RequestError, "path", "expected the path of a directory",
    ),
    "a path that orbax cannot name": row(
        lambda t: rlx.save(t.mlp, t.here / "\udcff"), UnsupportedError, "UTF-8", "format='safetensors'",
    ),
    "weights that are no weights": row(lambda t: rlx.open_weights(THREE), WeightError, "weights", "a path, a mapping"),
    "an unknown choice": row(lambda t: rlx.load(LLAMA, links="folow"), WeightError, "links", "did you mean 'follow'"),
    "a misspelt leaf": row(
        lambda t: t.mlp.replace(params={"W": X}), WeightShapeError, "unknown leaves 'W'", "did you mean 'w'",
    ),
    "a weight in another case": row(
        lambda t: rlx.compile(mlp(), {"W": X}), MissingWeightError, "'w'", "did you mean 'W'",
    ),
    "leaves of rolled layers": row(
        lambda t: rlx.compile(mlp(), {"layers.{0..1}.w": X}), MissingWeightError, "'w'", "model.weights(params)",
    ),
    "a misspelt field of a config": row(
        lambda t: rlx.Llama32Flow.for_prefill({"hidden_sze": 8}), ConfigError, "'hidden_size'",
        "did you mean 'hidden_sze'",
    ),
    "leaves of another model": row(
        lambda t: t.mlp.weights({"a": X}), WeightShapeError, "params", "missing leaves 'w'", "unknown leaves 'a'",
    ),
    "leaves that are not there": row(lambda t: t.mlp.apply({}, X), WeightShapeError, "params", "missing leaves 'w'"),
    "a leaf of another dtype": row(
        lambda t: t.mlp.replace(params={"w": np.ones((4, 8))}), WeightShapeError, "'w'", "f32[4, 8]", "f64",
    ),
}  # fmt: skip

FILES: dict[str, Row] = {
    "a save onto a file": row(
        lambda t: rlx.save(t.mlp, t.file("w", "x")), TargetExistsError, "w' is a file", "remove it, or save elsewhere",
    ),
    "a save onto what others wrote": row(
        lambda t: rlx.save(t.mlp, t.file("w", "x").parent), TargetExistsError, "has no rlx_manifest.json", "elsewhere",
    ),
    "no such directory": row(
        lambda t: rlx.load("my/org/model"), MissingFileError, "'my/org/model'", "no such directory", "'org/name'",
    ),
    "a file in place of a directory": row(
        lambda t: rlx.load(LLAMA / "model.safetensors"), MissingFileError, "model.safetensors", "open_weights",
    ),
    "nowhere to save": row(lambda t: rlx.save(t.mlp, NONE), RequestError, "save: path", "None"),
    "a path with a zero byte": row(lambda t: rlx.save(t.mlp, "a\0b"), RequestError, "save: path", "x00"),
    "no path": row(lambda t: rlx.load(THREE), RequestError, "path", "got 3"),
    "an empty directory": row(lambda t: rlx.load(t.here), MissingFileError, "config.json", "no such file"),
    "an empty safetensors file": safetensors(b"", SafetensorsError, "0 bytes", "expected 8"),
    "a header longer than the file": safetensors(
        header(entry(), length=2**63), SafetensorsError, "header says 9223372036854775808 bytes", "file has",
    ),
    "a truncated file": safetensors(header(entry(), b"12"), SafetensorsError, "'w'", "ends at 4", "has 2 bytes"),
    "a truncated header": safetensors(header(entry()[:20]), SafetensorsError, "at byte"),
    "a shape of 2**62": safetensors(header(entry(f"[{2**62}]")), LimitError, "'w'", str(2**62), "2147483647"),
    "a shape that wraps": safetensors(header(entry(f"[{2**62 + 1}]")), LimitError, "'w'", str(2**62 + 1)),
    "a shape that lies": safetensors(header(entry("[7]")), SafetensorsError, "'w'", "takes 28 bytes", "give 4"),
    "an unknown dtype": safetensors(header(entry(dtype="F33")), UnsupportedError, "'w'", "'F33'", "BF16"),
    "a tensor given twice": safetensors(
        header(entry()[:-1] + "," + entry()[1:]), DuplicateWeightError, "'w' is given twice", "byte",
    ),
    "a header bomb": safetensors(header("[" * 100_000), SafetensorsError, "at byte 8"),
    "a shard outside": row(lambda t: t.shard("../m.safetensors"), PathEscapeError, "'../m.safetensors'", "inside"),
    "an absolute shard": row(lambda t: t.shard("/etc/passwd"), PathEscapeError, "'/etc/passwd'", "inside"),
    "a shard that is a device": row(lambda t: t.shard("NUL"), PathEscapeError, "'NUL'", "device"),
    "a pickled shard": row(lambda t: t.shard("m.bin"), UnsupportedError, "'m.bin'", "pickle", "save_file"),
    "a missing shard": row(
        lambda t: t.shard("m.safetensors"), MissingWeightError, "model.safetensors.index.json", "1 of 1 shards",
        "'m.safetensors'",
    ),
    "an empty index": row(
        lambda t: rlx.open_weights(t.file("model.safetensors.index.json", "{}").parent), ConfigError,
        "model.safetensors.index.json", "weight_map",
    ),
    "a file of another format": row(
        lambda t: rlx.open_weights(t.file("w.npz", b"x")), UnsupportedError, "w.npz", "numpy.load",
    ),
}  # fmt: skip

CONFIG: dict[str, Row] = {
    f"{field} {value!r}": in_config(error, field, value, *says)
    for field, value, error, says in [
        ("num_hidden_layers", 10**9, LimitError, ("1000000000", "limit is 1024")),
        ("num_hidden_layers", -1, ConfigError, ("'-1'", "at least 1")),
        ("num_hidden_layers", 2.5, ConfigError, ("'2.5'", "an integer")),
        ("num_hidden_layers", "32", ConfigError, ("'32'", "an integer")),
        ("num_hidden_layers", True, ConfigError, ("'True'", "an integer")),
        ("num_hidden_layers", None, ConfigError, ("null", "a value")),
        ("num_hidden_layers", REMOVED, ConfigError, ("missing", "an integer")),
        ("hidden_size", 0, ConfigError, ("'0'", "at least 1")),
        ("hidden_size", 10**60, LimitError, ("an integer of 200 bits", "limit is 16777216")),
        ("vocab_size", 10**9, LimitError, ("limit is 16777216",)),
        ("num_key_value_heads", 3, ConfigError, ("num_attention_heads 4", "multiple")),
        ("head_dim", 3, ConfigError, ("even",)),
        ("rope_theta", 0, ConfigError, ("over 0",)),
        ("rope_theta", "x", ConfigError, ("'x'", "a finite number")),
        ("rms_norm_eps", None, ConfigError, ("null",)),
        ("hidden_act", "relu", UnsupportedError, ("'relu'", "silu")),
        ("tie_word_embeddings", "yes", ConfigError, ("'yes'", "true or false")),
        ("rope_parameters", {"rope_type": "longrope"}, UnsupportedError, ("'longrope'", "yarn")),
        ("rope_parameters", {"rope_type": "yarn"}, ConfigError, ("factor", "missing")),
        ("sliding_window", 128, UnsupportedError, ("'128'", "not handled")),
        ("quantization_config", {"bits": 4}, UnsupportedError, ("not handled",)),
        ("a_new_field", 1, UnsupportedError, ("not handled",)),
        ("model_type", "lama", UnsupportedError, ("'lama'", "did you mean 'llama'")),
        ("model_type", "mamba", UnsupportedError, ("'mamba'", "known are llama, mistral")),
        ("model_type", REMOVED, ConfigError, ("missing",)),
        ("architectures", ["LlamaForSequenceClassification"], UnsupportedError, ("LlamaForCausalLM",)),
        ("architectures", "x", ConfigError, ("a list of strings",)),
    ]
}
CONFIG["architectures ['LlamaForSequenceClassification']"] = row(
    lambda t: t.llama(architectures=["LlamaForSequenceClassification"]), UnsupportedError, "architecture",
    "LlamaForSequenceClassification", "LlamaForCausalLM",
)  # fmt: skip
CONFIG["a directory"] = row(
    lambda t: Llama32Flow.for_prefill(cast(Any, "dir")), ConfigError, "config", "mapping", "got 'dir'"
)
CONFIG["twice"] = row(
    lambda t: rlx.load(t.file("config.json", '{"model_type": "llama", "model_type": "bert"}').parent), ConfigError,
    "config.json", "'model_type' is given twice",
)  # fmt: skip
CONFIG["no JSON"] = row(
    lambda t: rlx.load(t.file("config.json", '{"model_type": ').parent), ConfigError, "config.json", "at byte 15"
)

PROFILES: dict[str, Row] = {
    "an unknown key": profile("fusion.polcy = 'direct'", ProfileError, "'polcy'", "p.rlx.toml", "mean 'policy'"),
    "an unknown table": profile("[fuson]", ProfileError, "'fuson'", "did you mean 'fusion'"),
    "a wrong type": profile("passes.dce = 1", ProfileError, "passes.dce", "true or false", "the integer 1"),
    "an unknown value": profile(
        "precision.compute = 'fp32'", ProfileError, "precision.compute", "'bf16'", "'fp32'", "did you mean 'f32'"
    ),
    "no TOML": profile("[fusion\n", ProfileError, "p.rlx.toml", "line 1, column 8"),
    "nested too deep": profile("a = " + "[" * 40, ProfileError, "p.rlx.toml", "at most 32 nested brackets"),
    "too many dots": profile("a." * 40 + "a = 1", ProfileError, "p.rlx.toml", "at most 16 dots"),
    "too long": profile("#" * 70_000, ProfileError, "p.rlx.toml", "at most 65536 bytes"),
    "no such file": row(
        lambda t: rlx.CompileProfile.from_toml("none.rlx.toml"), MissingFileError, "none.rlx.toml", "preset(name)",
    ),
    "a directory": row(lambda t: rlx.CompileProfile.from_toml(t.here), StorageError, "profile", "a regular file"),
    "a path of a profile that is none": row(
        lambda t: rlx.CompileProfile.from_toml(NONE), ProfileError, "path is None", "*.rlx.toml", "CompileProfile()",
    ),
    "a profile near nothing": row(
        lambda t: rlx.CompileProfile.near(NONE, "a"), ProfileError, "weights is None", "path of a checkpoint",
    ),
    "a profile near, of no family": row(
        lambda t: rlx.CompileProfile.near(LLAMA, NONE), ProfileError, "family", "got 'None'",
    ),
    "a profile near, of another default": row(
        lambda t: rlx.CompileProfile.near(LLAMA, "a", THREE), ProfileError, "default is 3", "preset",
    ),
    "an unknown preset": row(
        lambda t: rlx.CompileProfile.preset("lama32_decode"), ProfileError, "'lama32_decode'", "mean 'llama32_decode'",
    ),
    "a number in place of a profile": row(
        lambda t: rlx.compile(mlp(), W, profile=THREE), ProfileError, "profile is 3", "preset('auto')",
    ),
    "the same on a flow": row(lambda t: mlp().with_profile(THREE), ProfileError, "profile is 3", "preset"),
    "a profile of no name": row(
        lambda t: rlx.compile(mlp(), W, profile="enoder"),
        ProfileError, "no preset 'enoder', and no file of that name", "mean 'encoder'",
    ),
    "an unknown dtype": row(lambda t: rlx.load(LLAMA, dtype="bf17"), DTypeError, "'bf17'", "did you mean 'bf16'"),
    "an option that XLA does not know": row(
        lambda t: rlx.compile(
            mlp(), W,
            profile=rlx.CompileProfile().replace(backend={"cpu": {"compiler_options": {"xla_nonsense": True}}}),
        )(X),
        ProfileError, "backend.cpu.compiler_options", "'xla_nonsense'",
    ),
}  # fmt: skip

BAD_IDS: dict[str, tuple[Any, str]] = {
    "-1": ([[1, -1]], "id -1 at (0, 1)"),
    "the vocabulary": ([[VOCAB, 0]], f"id {VOCAB} at (0, 0)"),
    "2**31": (np.array([[2**31]]), "id 2147483648"),
    "2**40 + 5": (np.array([[2**40 + 5]]), "id 1099511627781"),
    "2**63": ([[2**63, 1]], "id 9223372036854775808 at (0, 0)"),
    "2**64 - 1": (np.array([[2**64 - 1]], np.uint64), "id 18446744073709551615"),
    "10**5000": ([[10**5000]], "id an integer of 16610 bits at (0, 0)"),
    "floats": ([[1, 2.0]], "got 2.0 at (0, 1)"),
    "float arrays": (np.ones((1, 2), np.float32), "float32"),
    "bfloat16": (np.ones((1, 2), ml_dtypes.bfloat16), "bfloat16"),
    "NaN": ([[float("nan")]], "got nan"),
    "bools": ([[True, False]], "got True"),
    "strings": ([["a"]], "got 'a'"),
    "None": ([[None, 1]], "got None"),
    "ragged": ([[1, 2], [3]], "differ in length"),
    "masked": (np.ma.masked_array([[1, 2]], [[False, True]]), "masked"),
}
TOKENS: dict[str, Row] = {
    f"{name} of {what}": request(call, TokenIdError, word, says)
    for what, (ids, says) in BAD_IDS.items()
    for name, call, word in [
        ("logits", lambda t, ids=ids: t.lm.logits(ids), "tokens"),
        ("prefill", lambda t, ids=ids: t.lm.prefill(ids), "tokens"),
        ("a program", lambda t, ids=ids: t.prefill(ids, lengths=[1], state=t.state()), "input_ids"),
    ]
}

GONE: dict[str, Callable[[World, Any], Any]] = {
    "tokens": lambda t, x: t.lm.logits(x),
    "lengths": lambda t, x: t.lm.logits(IDS, lengths=x),
    "attention_mask": lambda t, x: t.enc.hidden_states(IDS, attention_mask=x),
    "token_type_ids": lambda t, x: t.enc.hidden_states(IDS, token_type_ids=x),
    "prompts": lambda t, x: t.lm.generate(x),
    "texts": lambda t, x: t.enc.embed(x),
    "stop": lambda t, x: t.lm.generate([1], stop=x),
}
"""Calls with an array that an earlier call consumed, by what they call it."""

REQUESTS: dict[str, Row] = {
    **{f"{name} that were consumed": sent_gone(name, call) for name, call in GONE.items()},
    **{
        f"{name} {ids!r}": request(call, TokenIdError, f"{what}[0][1]", says)
        for ids, says in [([1, -1], "id -1"), ([1, 10**9], "id 1000000000"), ([1, 2.0], "2.0"), ([1, True], "True")]
        for name, what, call in [
            ("generate", "prompts", lambda t, ids=ids: t.lm.generate([ids])),
            ("embed", "texts", lambda t, ids=ids: t.enc.embed([ids])),
        ]
    },
    "no prompt tokens": request(lambda t: rlx.CausalLM(*tokens()).generate([[]]), RequestError, "prompts[0]", "empty"),
    "an empty text": request(lambda t: t.enc.embed([[]]), RequestError, "texts[0]", "no token ids"),
    "a mix": request(lambda t: t.lm.generate(["a", [1]]), RequestError, "prompts[1]", "a string, as prompts[0]", "[1]"),
    "an id that is none": request(lambda t: t.lm.generate([5, None]), RequestError, "prompts[1]", "a token id", "None"),
    "no dimension": request(lambda t: t.lm.generate(np.array(5)), RequestError, "prompts", "ndarray"),
    "a mask with strings": request(
        lambda t: t.lm.generate(["a"], attention_mask=[[1]]), RequestError, "prompts", "goes with token ids",
    ),
    "a mask with rows of two lengths": request(
        lambda t: t.lm.generate([[1, 2], [3]], attention_mask=[[1, 1], [1, 0]]), TokenIdError, "prompts",
        "differ in length", "say where in attention_mask",
    ),
    "a mask of another number": request(
        lambda t: t.lm.generate([[1, 2]], attention_mask=[[1, -1]]), MaskShapeError, "attention_mask", "-1 at (0, 1)",
    ),
    "an id under a 1": request(
        lambda t: t.lm.generate([[-1, -1]], attention_mask=[[0, 1]]), TokenIdError, "prompts", "id -1 at (0, 1)",
    ),
    "no tokenizer": request(lambda t: rlx.CausalLM(*tokens()).generate("a"), RequestError, "strings need a tokenizer"),
    "several keys": request(
        lambda t: t.lm.generate([1], seed=jax.random.split(jax.random.key(0))), RequestError, "seed", "one key", "[2]",
    ),
    "a traced seed": request(lambda t: jax.jit(lambda s: t.lm.generate([1], seed=s))(3), RequestError, "seed"),
    "generate in jit": request(
        lambda t: jax.jit(lambda x: t.lm.generate([1], 2))(X), RequestError, "runs on the host", "outside jax.jit",
    ),
    "traced prompts": request(lambda t: jax.jit(t.lm.generate)(jnp.asarray(IDS)), RequestError, "prompts", "outside"),
    "traced ids": request(lambda t: jax.jit(t.lm.logits)(jnp.asarray(IDS)), RequestError, "tokens", "lm.model.apply"),
    "a traced mask": request(
        lambda t: jax.jit(lambda m: t.lm.logits(IDS, attention_mask=m))(jnp.asarray(IDS)), RequestError,
        "attention_mask", "traced",
    ),
    "a stop that is a dict": request(lambda t: t.lm.generate([1], stop={"a": 1}), RequestError, "stop", "'a'"),
    "an end token set later": request(
        lambda t: setattr(rlx.CausalLM(*tokens()), "eos_ids", 9999), TokenIdError, "eos_ids[0]", "9999", "[0, 11)",
    ),
    "a bias of no token": request(
        lambda t: t.lm.generate([1], sampler=rlx.Sampler(logit_bias={VOCAB: 1.0})), TokenIdError, "logit_bias",
        f"id {VOCAB} is",
    ),
    "no prompt": request(lambda t: t.lm.generate(None), RequestError, "prompts", "NoneType"),
    "strings without a tokenizer": request(lambda t: t.enc.embed("a"), RequestError, "tokenizer.json", "token ids"),
    "too long": request(lambda t: t.lm.logits(np.ones((1, 129), int)), SequenceLengthError, "tokens", "129", "128"),
    "too long with what is asked for": request(
        lambda t: t.lm.generate([[1, 2, 3]], max_new_tokens=126), SequenceLengthError, "prompts[0]", "3 tokens + 126",
        "128",
    ),
    "a text too long": request(lambda t: t.enc.embed([[1] * 41]), SequenceLengthError, "texts[0]", "41", "40"),
    "max_new_tokens": request(lambda t: t.lm.generate([1], max_new_tokens=-1), RequestError, "max_new_tokens", "-1"),
    "max_len": request(lambda t: t.lm.prefill(IDS, max_len=2), SequenceLengthError, "max_len=2", "3 tokens"),
    "max_new_tokens without a position limit": request(
        lambda t: rlx.CausalLM(*tokens()).generate([[1, 2]], max_new_tokens=2**30), SequenceLengthError, "prompts[0]",
        "2 tokens + 1073741824 new", "limit of 1073741824",
    ),
    "max_new_tokens over int32": request(
        lambda t: rlx.CausalLM(*tokens()).generate([[1, 2]], max_new_tokens=10**12), SequenceLengthError, "prompts[0]",
        "2 tokens + 1000000000000 new",
    ),
    "a stop of bytes": request(lambda t: t.lm.generate([1], stop=b"x"), RequestError, "stop", "b'x'", "a string"),
    "a seed of 65 bits": request(lambda t: t.lm.generate([1], seed=2**64), RequestError, "seed", "2**64 - 1"),
    "a negative seed": request(lambda t: t.lm.generate([1], seed=-1), RequestError, "seed", "from 0", "got -1"),
    "a stop that is none": request(lambda t: t.lm.generate([1], stop=None), RequestError, "stop", "None"),
    "an empty stop": request(lambda t: t.lm.generate([1], stop=""), RequestError, "stop", "empty"),
    "a stop id": request(lambda t: t.lm.generate([1], stop=[VOCAB]), TokenIdError, "stop[0]", f"[0, {VOCAB})"),
    "no sampler": request(lambda t: t.lm.generate([1], sampler="greedy"), RequestError, "sampler", "Sampler("),
    "a sampler and a field of one": request(
        lambda t: t.lm.generate([1], sampler=rlx.Sampler(1.0), top_k=3), RequestError, "sampler= and 'top_k'", "one of",
    ),
    "a filter of what is not drawn": request(
        lambda t: t.lm.generate([1], top_p=0.9), SamplingParamError, "top_p is 0.9", "nothing is drawn", "temperature=",
    ),
    "a field of a sampler": request(
        lambda t: t.lm.generate([1], temperature=-1), SamplingParamError, "temperature is -1", "number, 0 or more",
    ),
    "a number of NumPy": request(
        lambda t: rlx.Sampler(top_p=np.float64(1.5)), SamplingParamError, "top_p is 1.5; expected a number, above 0, ",
        "at most 1",
    ),
    "new tokens behind a prompt": request(
        lambda t: t.lm.generate([1] * 100, 100), SequenceLengthError, "the model knows 128; at most 28 new tokens fit",
    ),
    "a prompt that is too long": request(
        lambda t: t.lm.generate([1] * 128, 1), SequenceLengthError, "cut the prompt to 127 tokens or fewer",
    ),
    "a temperature": request(lambda t: rlx.Sampler(temperature=float("nan")), SamplingParamError, "temperature", "nan"),
    "a temperature below float32": request(
        lambda t: rlx.Sampler(temperature=1e-39), SamplingParamError, "temperature", "1e-39", "0, or from 1.18e-38",
    ),
    "a temperature above float32": request(
        lambda t: rlx.Sampler(temperature=1e39), SamplingParamError, "temperature", "1e+39", "3.4e+38",
    ),
    "a huge temperature": request(lambda t: rlx.Sampler(temperature=10**400), SamplingParamError, "an integer of 1329"),
    "a top_p below float32": request(lambda t: rlx.Sampler(top_p=1e-39), SamplingParamError, "top_p", "1.18e-38 to 1"),
    "a penalty below float32": request(
        lambda t: rlx.Sampler(repetition_penalty=1e-39), SamplingParamError, "repetition_penalty", "1.18e-38",
    ),
    "a penalty above float32": request(
        lambda t: rlx.Sampler(repetition_penalty=1e39), SamplingParamError, "repetition_penalty", "3.4e+38",
    ),
    "top_k": request(lambda t: rlx.Sampler(top_k=0), SamplingParamError, "top_k", "at least 1"),
    "top_p": request(lambda t: rlx.Sampler(top_p=1.5), SamplingParamError, "top_p", "1.5"),
    "logits of NaN": request(
        lambda t: rlx.CausalLM(tokens()[0], {**tokens()[1], "h": np.full((11, 4), 3e38, np.float32)}).generate([[1]]),
        NumericsError, "not finite of prompts[0]", "behind 0 new tokens",
    ),
    "logits of NaN, of several answers": request(
        lambda t: rlx.CausalLM(
            tokens()[0], {**tokens()[1], "h": np.full((11, 4), 3e38, np.float32)},
        ).generate([[1], [2]], n=2, temperature=1.0, seed=0),
        NumericsError, "prompts[0] (answer 0), prompts[0] (answer 1), prompts[1] (answer 0)", "behind 0 new tokens",
    ),
    "lengths": request(lambda t: t.lm.logits(IDS, lengths=[1, 4]), SequenceLengthError, "lengths", "1 to 3", "[1, 4]"),
    "lengths of another batch": request(
        lambda t: t.lm.prefill(IDS, lengths=[1]), BatchMismatchError, "lengths", "[2]", "got shape [1]",
    ),
    "lengths of floats": request(lambda t: t.lm.logits(IDS, lengths=[1.0, 2]), RequestError, "lengths", "f64"),
    "no state": request(lambda t: t.lm.extend(None, IDS), RequestError, "state", "prefill", "NoneType"),
    "a state of another batch": request(
        lambda t: t.lm.extend(t.lm.prefill(IDS)[1], IDS[:1]), BatchMismatchError, "state holds 2 rows", "1",
    ),
    "a state that is full": request(
        lambda t: t.lm.extend(t.lm.prefill(IDS, max_len=4)[1], IDS), SequenceLengthError, "row 0", "3 tokens",
        "4 slots",
    ),
    "a mask of another shape": request(
        lambda t: t.enc.hidden_states(IDS, attention_mask=np.ones((2, 4))), MaskShapeError, "attention_mask", "[2, 3]",
        "[2, 4]",
    ),
    "a mask of floats": request(
        lambda t: t.enc.hidden_states(IDS, attention_mask=np.ones((2, 3))), MaskShapeError, "attention_mask", "f64",
    ),
    "a prompt that is a view of one row": request(
        lambda t: t.lm.generate(np.broadcast_to(IDS[:1], (2**34, 3)), 1), LimitError, "prompts",
        "limits.MAX_MEMORY_PERCENT = 80",
    ),
    "tokens that are a view of one row": request(
        lambda t: t.lm.logits(np.broadcast_to(IDS[:1, :1], (2**30, 300))), LimitError, "tokens",
        "limits.MAX_MEMORY_PERCENT = 80",
    ),
    "more tokens than the context": request(
        lambda t: t.lm.model(np.ones((1, 129), np.int32)), SequenceLengthError, "129 tokens", "128",
    ),
    "more slots than the context": request(
        lambda t: replace(t.lm.model, program="extend").init_state(1, 129), SequenceLengthError, "129 tokens", "128",
    ),
    "two masks": request(
        lambda t: t.enc.hidden_states(IDS, [3, 3], attention_mask=IDS), RequestError, "attention_mask", "lengths",
    ),
    "a type id": request(
        lambda t: t.enc.hidden_states(IDS, token_type_ids=5 * IDS), TokenIdError, "token_type_ids", "id 5", "[0, 2)",
    ),
    "a position": request(lambda t: t.bert(IDS, position_ids=99 * IDS), TokenIdError, "position_ids", "[0, 40)"),
    "an input that an encoder does not have": request(
        lambda t: t.enc.hidden_states(IDS, atention_mask=IDS), UnboundInputError, "'atention_mask'",
        "did you mean 'attention_mask'",
    ),
    "an argument that is taken for an input": request(
        lambda t: t.enc.hidden_states(IDS, lenghts=[3, 3]), UnboundInputError, "no input 'lenghts'",
        "did you mean 'lengths'",
    ),
}  # fmt: skip

CALLS: dict[str, Row] = {
    "a width": row(lambda t: t.mlp(np.ones((2, 9), np.float32)), ShapeError, "input x", "f32[batch,8]", "axis 1 is 9"),
    "a rank": row(lambda t: t.mlp(X[0]), ShapeError, "input x", "f32[batch,8]", "rank 1"),
    "an empty batch": row(lambda t: t.mlp(X[:0]), ShapeError, "input x", "batch is 0"),
    "a name": row(lambda t: t.mlp(X=X), UnboundInputError, "'X'", "its inputs are 'x'"),
    "an input given twice": row(lambda t: t.mlp(X, x=X), UnboundInputError, "'x'", "by position and by name"),
    "no input": row(lambda t: t.mlp(), UnboundInputError, "'x'", "not given"),
    "too many inputs": row(lambda t: t.mlp(X, X), UnboundInputError, "mlp", "takes 1 input (x)", "got 2"),
    "sizes that differ": row(
        lambda t: t.bert(IDS, attention_mask=np.ones((2, 4), np.int32)), ShapeError, "attention_mask", "seq", "3", "4",
    ),
    "a dtype": row(lambda t: t.mlp(X.astype(np.int32)), DTypeError, "input x", "f32", "i32"),
    "a dtype on the device": row(lambda t: t.mlp(jnp.ones((2, 8), jnp.bfloat16)), DTypeError, "input x", "bf16"),
    "a number over float32": row(lambda t: t.mlp(np.full((2, 8), 1e300)), DTypeError, "input x", "1e+300", "f32"),
    "no array": row(lambda t: t.mlp("abc"), DTypeError, "input x", "numbers"),
    "an array without a reason": row(lambda t: t.mlp(Silent()), RequestError, "x", "cannot be read", "ValueError"),
    "ragged rows": row(lambda t: t.mlp([[1.0], [1.0, 2.0]]), ShapeError, "input x", "not an array"),
    "a state where there is none": row(lambda t: t.mlp(X, state=t.state()), GraphError, "forward", "state="),
    "no state": row(lambda t: t.prefill(IDS, lengths=[3, 3]), GraphError, "prefill", "init_state"),
    "a state of another model": row(
        lambda t: t.prefill(IDS, lengths=[3, 3], state=rlx.compile(*tokens(), program="prefill").init_state(2)),
        SessionStateError, "layers.0.self_attn", "another model",
    ),
    "a state with tokens in it": row(
        lambda t: t.prefill(IDS, lengths=[3, 3], state=t.lm.prefill(IDS)[1].state), SessionStateError, "prefill",
        "[3, 3]", "extend",
    ),
    "a state that was consumed": row(
        lambda t: t.lm.extend(used(t), IDS), SessionStateError, "state", "consumed by an earlier call",
    ),
    "a state of other rows": row(
        lambda t: t.prefill(IDS, lengths=[3, 3], state=t.state(3)), BatchMismatchError, "state holds 3 rows", "2",
    ),
    "more tokens than slots": row(
        lambda t: t.prefill(IDS, lengths=[3, 3], state=t.state(2, 2)), SequenceLengthError, "lengths", "2 slots",
    ),
    "tokens past the last slot": row(
        lambda t: rlx.compile(t.prefill.flow, program="extend")(
            IDS, lengths=[1, 3], state=t.prefill(IDS, lengths=[3, 2], state=t.state(2, 4))[1]
        ),
        SequenceLengthError, "row 1 holds 2 tokens", "3 more", "4 slots", "init_state",
    ),
    "init of a seed of 65 bits": row(lambda t: t.mlp.init(2**64), RequestError, "init", "2**64 - 1"),
    "init of a string": row(lambda t: t.mlp.init(NAME), RequestError, "init", "one key of jax.random", "got 'auto'"),
    "init of an array": row(lambda t: t.mlp.init(jnp.asarray(X)), RequestError, "init", "got f32 [2, 8]"),
    "a strict that is none": row(lambda t: rlx.compile(mlp(), W, strict=NAME), RequestError, "strict", "'auto'"),
    "a strict of load": row(lambda t: rlx.load(LLAMA, strict=NAME), WeightError, "strict", "'auto'"),
    "a batch": row(lambda t: t.state(2**40, 8), ShapeError, "batch", "1099511627776"),
    "a level": row(lambda t: t.mlp.text("hl"), GraphError, "text", "hlo", "'hl'"),
    "init of 3 TB": row(
        lambda t: rlx.compile(wide(), {"w": jax.ShapeDtypeStruct(WIDE, jnp.float32)}).init(0), LimitError,
        "wide: init", "limits.MAX_MEMORY_PERCENT = 80",
    ),
    "a batch that is a view of one row": row(
        lambda t: t.mlp(np.broadcast_to(X[:1], (2**34, 8))), LimitError, "input x", "limits.MAX_MEMORY_PERCENT = 80",
    ),
    "parameters with a leaf taken out": row(lambda t: in_place(lambda p: p.clear()), WeightShapeError, "params", "'w'"),
    "parameters of another shape": row(
        lambda t: in_place(lambda p: p.update(w=X)), WeightShapeError, "leaf 'w' is f32[4, 8]", "f32[2, 8]",
    ),
    "parameters of no type": row(lambda t: in_place(lambda p: p.update(w=NAME)), WeightShapeError, "leaf 'w'", "str"),
    "parameters of no type, saved": row(
        lambda t: in_place(lambda p: p.update(w=NAME), lambda m: rlx.save(m, t.here / "m")), WeightShapeError,
        "leaf 'w'",
    ),
    "parameters of no type, by key": row(
        lambda t: in_place(lambda p: p.update(w=NAME), lambda m: m.weights()), WeightShapeError, "leaf 'w'",
    ),
    "an input that is donated and read": row(lambda t: both(), RequestError, "input 'x'", "donated", "input 'y'"),
    "a state that is an input": row(
        lambda t: extended(lambda state: state.length), RequestError, "state 'length'", "donated", "input 'lengths'",
    ),
    "a parameter that apply finds consumed": row(
        lambda t: consumed(leaf=True, call=lambda m, x: m.apply(m.params, x)), WeightError, "leaf 'w'", "earlier call",
    ),
    "an input that apply finds consumed": row(
        lambda t: consumed(leaf=False, call=lambda m, x: m.apply(m.params, x)), SessionStateError, "input 'x'",
    ),
    "a parameter that grad finds consumed": row(
        lambda t: consumed(leaf=True, call=lambda m, x: jax.grad(lambda p: m.apply(p, x).sum())(m.params)), WeightError,
        "leaf 'w'", "earlier call",
    ),
    "an input that grad finds consumed": row(
        lambda t: consumed(leaf=False, call=lambda m, x: jax.grad(lambda x: m.apply(m.params, x).sum())(x)),
        SessionStateError, "input 'x'", "earlier call",
    ),
    "an input that vmap finds consumed": row(
        lambda t: jax.vmap(lambda ids: t.bert.apply(t.bert.params or {}, ids))(gone((1, 2, 3))), SessionStateError,
        "input 'input_ids'", "earlier call",
    ),
    "a parameter that jit finds consumed": row(
        lambda t: consumed(leaf=True, call=lambda m, x: jax.jit(m)(x)), WeightError, "leaf 'w'", "earlier call",
    ),
    "a parameter consumed, by key": row(
        lambda t: consumed(leaf=True, call=lambda m, x: m.weights()), WeightError, "leaf 'w'", "earlier call",
    ),
    "lengths that were consumed": row(
        lambda t: extended(lambda state: gone((2,))), SessionStateError, "'lengths'", "earlier call",
    ),
    "a seed that was consumed": row(lambda t: t.mlp.init(gone((2,))), SessionStateError, "'init'", "earlier call"),
    "a parameter that was consumed": row(lambda t: consumed(leaf=True), WeightError, "leaf 'w'", "earlier call"),
    "an input that was consumed": row(lambda t: consumed(leaf=False), SessionStateError, "input 'x'", "earlier call"),
    "a program": row(lambda t: rlx.compile(mlp(), W, program="decode"), DeriveError, "'decode'", "prefill"),
    "a misspelt program": row(
        lambda t: rlx.compile(mlp(), W, program="trian"), DeriveError, "'trian'", "did you mean 'train'",
    ),
    "a misspelt level": row(lambda t: t.mlp.text("lirr"), GraphError, "text", "did you mean 'lir'"),
    "a model that is compiled": row(lambda t: rlx.compile(t.mlp, W), GraphError, "compiled already", "replace"),
    "a flow without seq": row(lambda t: rlx.compile(mlp(), W, program="prefill"), DeriveError, "prefill", "seq"),
    "no flow": row(lambda t: rlx.compile(3), GraphError, "flow", "a ModelFlow", "int"),
    "logits of another width": row(
        lambda t: rlx.CausalLM(*tokens(head=7)), ShapeError, "tiny", "[batch, seq, 11]", "width 7",
    ),
    "complex logits": row(lambda t: logits_of("complex64"), DTypeError, "tiny", "floating", "c64"),
    "logits of bools": row(lambda t: logits_of("bool"), DTypeError, "tiny", "floating", "bool"),
    "whole logits": row(lambda t: logits_of("int32"), DTypeError, "tiny", "floating", "i32"),
    "a flow that needs more than ids": row(
        lambda t: rlx.CausalLM(
            tokens()[0].input("y", ("batch", 1, 1)).custom(lambda emit, x: emit.add(x, emit.flow_input("y"))),
            tokens()[1],
        ).generate([[1]]),
        RequestError, "the flow reads 'y'", "inputs={'y'",
    ),
    "a flow without an embedding": row(lambda t: rlx.CausalLM(mlp(), W), GraphError, "'x'", "embedding"),
    "an end token": row(lambda t: rlx.CausalLM(*tokens(), eos_ids=[99]), TokenIdError, "eos_ids[0]", "99", "[0, 11)"),
    "a begin token": row(lambda t: rlx.CausalLM(*tokens(), bos_id=-1), TokenIdError, "bos_id[0]", "-1"),
    "a tokenizer": row(lambda t: rlx.CausalLM(*tokens(), tokenizer=NAME), MissingFileError, "tokenizer: 'auto'"),
    "a model that is pickled": row(
        lambda t: pickle.dumps(t.lm), UnsupportedError, "llama", "rlx_jax.save", "weights=",
    ),
    "a model that is copied": row(lambda t: deepcopy(t.mlp), UnsupportedError, "mlp", "deep-copied", "rlx_jax.save"),
    "positions": row(lambda t: rlx.CausalLM(*tokens(), max_positions=0), RequestError, "max_positions", "at least 1"),
}  # fmt: skip

STAGES: dict[str, Row] = {
    "a value as a bool": row(lambda t: stage(lambda e, x: branch(x)), GraphError, "mine: ", "truth", "emit.where"),
    "a value in `and`": row(lambda t: stage(lambda e, x: x and x), GraphError, "mine: ", "truth value"),
    "a value as a number": row(lambda t: stage(lambda e, x: x * float(x)), GraphError, "mine: ", "emit.jax"),
    "a branch inside emit.jax": row(
        lambda t: inside(branch), GraphError, "mine: ", "jax(branch)", "f32[batch,seq,8]", "jax.lax.cond", "TracerBool",
    ),
    "a number inside emit.jax": row(lambda t: inside(lambda x: x * int(x.sum())), GraphError, "mine: ", "jnp.where"),
    "numpy inside emit.jax": row(lambda t: inside(np.sin), GraphError, "mine: ", "reads them", "TracerArrayConversion"),
    "a boolean index": row(lambda t: inside(lambda x: x[x > 0]), GraphError, "mine: ", "jnp.where"),
    "a size compared inside emit.jax": row(
        lambda t: inside(lambda x: x if x.shape[1] > 5 else -x), ShapeError, "mine: ", "symbolic size", "static size",
        "InconclusiveDimensionOperation",
    ),
    "a loop over a size": row(
        lambda t: inside(lambda x: sum(x[:, i] for i in range(x.shape[1]))), ShapeError, "mine: ", "static size",
    ),
    "a size compared": row(
        lambda t: stage(lambda e, x: x if x.shape[1] > 5 else -x), ShapeError, "mine: ", "seq", "5", "static size",
    ),
    "a size equal to a number": row(
        lambda t: stage(lambda e, x: x if x.shape[1] == 1 else -x), ShapeError, "mine: ", "seq", "static size",
    ),
    "a size as a bool": row(lambda t: stage(lambda e, x: x if x.shape[1] else -x), ShapeError, "mine: ", "seq"),
    "a size in range": row(lambda t: stage(lambda e, x: list(range(x.shape[1]))), ShapeError, "mine: ", "seq"),
    "a value compared with a size": row(lambda t: stage(lambda e, x: x < x.shape[1]), GraphError, "mine: ", "seq"),
    "a JAX function on a value": row(lambda t: stage(lambda e, x: jnp.sin(x)), ShapeError, "mine: ", "emit.jax"),
    "numpy on a value": row(lambda t: stage(lambda e, x: np.sin(x)), GraphError, "mine: ", "emit.jax"),
    "an array with a value": row(lambda t: stage(lambda e, x: x + X), GraphError, "mine: ", "ndarray", "emit.constant"),
    "shapes that do not fit": row(
        lambda t: stage(lambda e, x: x + x[:, :, :4]), ShapeError, "mine: ", "f32[batch,seq,8]", "f32[batch,seq,4]",
    ),
    "a result that is no value": row(lambda t: stage(lambda e, x: 3.0), GraphError, "mine: ", "FlowValue", "float"),
    "a dtype": row(lambda t: stage(lambda e, x: x.astype("flaot32")), DTypeError, "mine: ", "did you mean 'float32'"),
    "an index": row(lambda t: stage(lambda e, x: x[:, :, 8]), ShapeError, "mine: ", "index 8", "axis 2"),
    "an axis": row(lambda t: stage(lambda e, x: x.sum(axis=5)), ShapeError, "mine: ", "axis 5"),
    "an input that is not declared": row(
        lambda t: stage(lambda e, x: x + e.flow_input("y")), UnboundInputError, "mine: ", "'y'", "known: 'x'",
    ),
    "a register that nobody wrote": row(
        lambda t: stage(lambda e, x: x + e.named("y")), UnboundStreamError, "mine: ", "'y'",
    ),
    "an addition without a residual": row(
        lambda t: mlp().residual_add().build(W), GraphError, "mlp: ResidualAdd", "ResidualSave",
    ),
    "a stage after one that returns None": row(
        lambda t: mlp().custom_named("mine", lambda e, x: None).linear("w").build(W), GraphError, "Linear",
        "the stage mine before it returned None",
    ),
    "a key that is a number": row(lambda t: mlp().linear(THREE).build(W), GraphError, "3: ", "weight key", "got 3"),
    "a layer that is a stack": row(
        lambda t: mlp().layer("a", cast(Any, LayerStack.named("a"))), GraphError, "mlp: layer 'a'", "a function",
    ),
    "a layer that is built": row(
        lambda t: mlp().layer("a", cast(Any, LayerStack.build)), GraphError, "mlp: layer 'a'", "got Named",
    ),
    "layers that are one stage": row(
        lambda t: mlp().repeat_layers(3, cast(Any, LINEAR)).build(W), GraphError, "mlp: ", "index → stage", "Linear",
    ),
    "a sequence that is one stage": row(
        lambda t: mlp().sequence(cast(Any, LINEAR)), GraphError, "Sequence", "list of stages", "Linear",
    ),
    "a list that is one stage": row(
        lambda t: mlp().raw_stages(cast(Any, LINEAR)), GraphError, "mlp: ", "list of stages", "Linear",
    ),
    "a class as a stage": row(lambda t: mlp().stage(cast(Any, type(LINEAR))), GraphError, "mlp: ", "Linear is a class"),
    "a patch that returns nothing": row(
        lambda t: mlp().patch(cast(Any, lambda f: None)), GraphError, "mlp: patch", "ModelFlow", "NoneType",
    ),
    "a condition whose edit returns nothing": row(
        lambda t: mlp().when(True, cast(Any, lambda f: None)), GraphError, "mlp: patch", "ModelFlow", "NoneType",
    ),
    "a recipe that returns nothing": row(
        lambda t: rlx.ModelFlow.from_recipe(cast(Any, lambda: None)), GraphError, "from_recipe", "NoneType",
    ),
    "a stage that is none": row(lambda t: mlp().stage(THREE), GraphError, "mlp", "not a stage"),
    "an input declared twice": row(lambda t: mlp().input("x", (2,)), NameCollisionError, "'x'", "twice"),
    "a name that is none": row(lambda t: mlp().input("a b", (2,)), GraphError, "'a b'", "identifier"),
    "a dimension": row(lambda t: mlp().input("y", (0,)), ShapeError, "input y", "between 1 and 2147483647", "got 0"),
    "a huge dimension": row(lambda t: mlp().input("y", (10**5000,)), ShapeError, "input y", "an integer of 16610 bits"),
    "no dtype": row(lambda t: mlp().input("y", (2,), None), DTypeError, "'None'", "dtype"),
    "a binding": row(lambda t: mlp().bind(bacth=2), GraphError, "'bacth'", "did you mean 'batch'"),
    "stages 960 deep": row(lambda t: nested(blocks.Sequence), GraphError, "deep", "inside each other", "side by side"),
    "names 960 deep": row(lambda t: nested(lambda s: blocks.Named("n", s[0])), GraphError, "deep", "side by side"),
    "a name of 121 characters": row(lambda t: rlx.ModelFlow("x" * 121), GraphError, "a flow", "MAX_NAME = 120"),
    "a dimension of 121 characters": row(lambda t: mlp().input("y", ("x" * 121,)), GraphError, "MAX_NAME = 120"),
    "a stage that mixes tokens": row(
        lambda t: rlx.compile(
            tokens()[0].custom_named("mine", lambda e, x: e.jax(lambda a: jnp.cumsum(a, 1), x)), tokens()[1],
            program="prefill",
        ),
        DeriveError, "mine", "cumsum", "seq",
    ),
}  # fmt: skip

MODULES: dict[str, Row] = {
    "a value of another module": row(
        lambda t: module("a").relu(module("b").input("y", (4,))), GraphError, "a: ", "Value(", "called 'b'",
    ),
    "a constant of a module of the same name": row(
        lambda t: module("a").relu(module("a").constant(1.0)), GraphError, "a: ", "another module called 'a'",
    ),
    "an output of another module": row(
        lambda t: module("a").set_outputs([module("b").input("y", (4,))]), GraphError, "a: ", "called 'b'",
    ),
    "an output that stands alone": row(lambda t: outputs(one=True), GraphError, "set_outputs", "list", "[value]"),
    "too many names": row(lambda t: outputs(["a", "b"]), GraphError, "set_outputs", "1 values", "2 names"),
    "too few names": row(lambda t: outputs(["a"], 2), GraphError, "set_outputs", "2 values", "1 names"),
    "a name given twice": row(lambda t: outputs(["a", "a"], 2), NameCollisionError, "set_outputs", "'a'", "twice"),
    "names that are one string": row(lambda t: outputs("y"), GraphError, "set_outputs", "list of names", "got 'y'"),
    "a name that is empty": row(lambda t: outputs([""]), GraphError, "set_outputs", "printable", "got ''"),
    "a name of a module": row(lambda t: module("a\0"), GraphError, "a module", "printable"),
    "JSON that is no text": row(lambda t: rlx.GraphModule.from_json(NONE), ArtifactFormatError, "JSON", "NoneType"),
    "the name of a flow": row(lambda t: rlx.ModelFlow(THREE), GraphError, "a flow", "printable", "got '3'"),
    "an output without a name": row(lambda t: mlp().output(""), GraphError, "mlp: output", "printable", "got ''"),
    "an output that colours": row(lambda t: mlp().output("a\x1b[31mb"), GraphError, "mlp: output", "x1b"),
    "values that stand alone": row(lambda t: x_of(lambda m, x: m.concat(x, 0)), GraphError, "m: concat", "[a, b]"),
    "an order that is one axis": row(
        lambda t: x_of(lambda m, x: m.transpose_(x, 0)), GraphError, "m: transpose", "2 axes of f32[batch,4]", "got 0",
    ),
    "a function of None": row(lambda t: x_of(lambda m, x: m.activation(None, x)), GraphError, "function 'None'"),
    "half an axis": row(lambda t: x_of(lambda m, x: m.sum(x, 1.5)), ShapeError, "m: f32[batch,4]", "no axis 1.5"),
    "a shape that is one size": row(
        lambda t: x_of(lambda m, x: m.broadcast_to(x, 4)), GraphError, "m: broadcast_to", "list of sizes", "got 4",
    ),
    "a declared shape that is one size": row(
        lambda t: x_of(lambda m, x: m.add_node(Unary("tanh"), x, out_shape=4)), GraphError, "m: ", "out_shape", "got 4",
    ),
    "a parameter of one size": row(
        lambda t: x_of(lambda m, x: m.param("w", 4)), GraphError, "m: parameter 'w'", "list of sizes", "got 4",
    ),
    "a parameter without a key": row(lambda t: x_of(lambda m, x: m.param(THREE, (4,))), GraphError, "m: ", "key", "3"),
    "pieces that are not equal": row(lambda t: x_of(lambda m, x: m.split(x, 3)), ShapeError, "m: split", "3 equal"),
    "a scale that is none": row(
        lambda t: x_of(lambda m, x: m.fused_residual_rms_norm(x, x, m.param("g", (4,)), eps=NONE)), GraphError, "m: ",
        "eps is None", "expected float",
    ),
    "a transpose that is none": row(
        lambda t: x_of(lambda m, x: m.linear(x, m.param("w", (4, 4)), transpose=NAME)), GraphError, "m: transpose",
        "'auto'", "True, False or None",
    ),
    "a full that is no number": row(
        lambda t: x_of(lambda m, x: m.full_like(x, [1.0])), GraphError, "m: full_like", "a number",
    ),
    "a constant of 64 bits": row(
        lambda t: x_of(lambda m, x: m.constant([2**40], "i64")), DTypeError, "m: ", "1099511627776",
        "i64 are held in i32", "f32 holds large whole numbers",
    ),
    "a float of 64 bits": row(
        lambda t: x_of(lambda m, x: m.constant(1e300)), DTypeError, "m: ", "1e+300", "f64 are held in f32", "scale it",
    ),
    "a constant that was consumed": row(lambda t: x_of(lambda m, x: m.constant(gone())), GraphError, "m: ", "deleted"),
    "a captured array that was consumed": row(
        lambda t: inside(partial(lambda k, a: a + k.astype(a.dtype), gone(()))), GraphError, "mine: ",
        "earlier call consumed",
    ),
    "half a size": sized(lambda n: n / 2),
    "a part of a size": sized(lambda n: 2 / n),
    "a size as a power": sized(lambda n: 2**n),
    "a root of a size": sized(lambda n: n**0.5),
    "a size by 0": sized(lambda n: n // 0),
    "the rest of a size by 0": sized(lambda n: n % 0),
    "a size and a half": sized(lambda n: n + 0.5),
    "a size and a string": sized(lambda n: n * "a"),
    "side outputs that are none": row(lambda t: mlp().outputs(THREE), GraphError, "mlp: outputs", "list", "got 3"),
}  # fmt: skip

ROWS = {
    f"{table}: {what}": r
    for table, rows in {
        "weights": WEIGHTS, "files": FILES, "config": CONFIG, "profiles": PROFILES, "tokens": TOKENS,
        "requests": REQUESTS, "calls": CALLS, "stages": STAGES, "modules": MODULES,
    }.items()
    for what, r in rows.items()
}  # fmt: skip


def module(name: str) -> rlx.GraphModule:
    """A module of one input, `x`."""
    made = rlx.GraphModule.mir(name)
    made.input("x", (4,))
    return made


def x_of(fn: Callable[[Any, Any], Any]) -> Any:
    """What `fn` makes of a module and its input `[batch, 4]`."""
    made = rlx.GraphModule.hir("m")
    return fn(made, made.input("x", ("batch", 4)))


def outputs(names: Any = (), count: int = 1, one: bool = False) -> None:
    """Give a module `count` outputs, or one that is in no list."""
    made = rlx.GraphModule.mir("m")
    x: Any = made.input("x", (4,))
    made.set_outputs(x if one else [x] * count, names)


def used(t: World) -> Any:
    """A state that an earlier call took."""
    state = t.lm.prefill(IDS)[1]
    t.lm.extend(state, IDS)
    return state


def consumed(leaf: bool, call: Callable[[Any, Any], Any] = lambda model, x: model(x)) -> Any:
    """A call with a parameter, or an input, that a jitted call with donation has taken."""
    model, x = rlx.compile(mlp(), W), jnp.asarray(X)
    assert model.params is not None
    (model.params["w"] if leaf else x).delete()
    return call(model, x)


def gone(shape: tuple[int, ...] = (2, 3)) -> Any:
    """Whole numbers that a jitted call with donation has taken."""
    array = jnp.ones(shape, jnp.int32)
    array.delete()
    return array


def in_place(edit: Callable[[Any], Any], call: Callable[[Any], Any] = lambda model: model(X)) -> None:
    """A call with `params` that were edited after another call; and the same before any was compiled."""
    model = rlx.compile(mlp(), W)
    edit(model.params)
    with pytest.raises(WeightShapeError):
        call(model)
    model = rlx.compile(mlp(), W)
    model(X)
    edit(model.params)
    call(model)


def both() -> Any:
    """One array as an input that the profile donates and as another."""
    flow = rlx.ModelFlow("two").input("x", ("batch", 4)).input("y", ("batch", 4))
    profile = rlx.CompileProfile().replace(donation={"inputs": ["x"]})
    model = rlx.compile(flow.custom(lambda emit, x: x + emit.flow_input("y")), {}, profile=profile)
    x = jnp.ones((2, 4))
    return model(x, x)


def extended(lengths: Callable[[Any], Any]) -> Any:
    """A call of `extend` with lengths made of the state that it consumes."""
    model = rlx.compile(rlx.from_pretrained(LLAMA), program="extend")
    state = model.init_state(2, 8)
    return model(IDS[:, :1], lengths(state), state=state)


def sparse(path: Path) -> Path:
    """A file of zeros, `WIDE`, that takes no room on the disk."""
    nbytes = WIDE[0] * WIDE[1] * 4
    text = json.dumps({"w": {"dtype": "F32", "shape": WIDE, "data_offsets": [0, nbytes]}}).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + nbytes)
    return path


def nested(wrap: Callable[[list[Any]], Any]) -> Any:
    """Compile a stage inside 960 others."""
    stage: Any = LINEAR
    for _ in range(960):
        stage = wrap([stage])
    return rlx.compile(rlx.ModelFlow("deep").input("x", ("batch", 8)).stage(stage), W)


def wide() -> rlx.ModelFlow:
    """A flow with one weight, `WIDE`."""
    return rlx.ModelFlow("wide").input("x", ("batch", WIDE[1])).linear("w")


MISSPELT: dict[str, tuple[Callable[[World], Any], str]] = {
    "generate": (
        lambda t: t.lm.generate([1], max_token=3),
        "CausalLM.generate.*'max_token'; did you mean 'max_new_tok",
    ),
    "a field": (lambda t: t.lm.stream([1], temprature=1.0), "CausalLM.stream.*did you mean 'temperature'"),
    "prefill": (lambda t: t.lm.prefill(IDS, max_length=9), "did you mean 'max_len'"),
    "compile": (
        lambda t: rlx.compile(mlp(), W, profil="auto"),  # type: ignore[call-arg]
        "compile.*did you mean 'profile'",
    ),
    "load": (lambda t: rlx.load(LLAMA, dtpye="f32"), "load.*did you mean 'dtype'"),
    "a model": (
        lambda t: rlx.CausalLM(*tokens(), eos_id=1),  # type: ignore[call-arg]
        "CausalLM.__init__.*did you mean 'eos_ids'",
    ),
    "embed": (lambda t: t.enc.embed(["a"], max_token=3), "Encoder.embed.*did you mean 'max_tokens'"),
    "logits": (lambda t: t.lm.logits(IDS, lenght=[3, 3]), "CausalLM.logits.*did you mean 'lengths'"),
    "extend": (lambda t: t.lm.extend(None, IDS, logit="last"), "CausalLM.extend.*did you mean 'logits'"),
    "score": (lambda t: t.lm.score(text=["a"]), "CausalLM.score.*did you mean 'texts'"),
    "perplexity": (lambda t: t.lm.perplexity("a", strides=3), "CausalLM.perplexity.*did you mean 'stride'"),
    "time by block": (lambda t: t.enc.profile(["a"], max_token=3), "Encoder.profile.*did you mean 'max_tokens'"),
    "its tokens": (lambda t: t.lm.profile([1], max_new_token=3), "CausalLM.generate.*did you mean 'max_new_tokens'"),
    "images": (
        lambda t: rlx.VisionEncoder.hidden_states(t.enc, pixel_value=X),  # type: ignore[call-arg]
        "VisionEncoder.hidden_states.*did you mean 'pixel_values'",
    ),
    "unlike any": (lambda t: t.lm.generate([1], zzz=3), "keyword argument 'zzz'; it takes 'prompts', 'max_new_"),
}


@pytest.fixture(scope="module")
def world() -> World:
    return World()


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_keyword(world: World, name: str) -> None:
    """Python's own error, of the function that was called, with a suggestion."""
    call, message = MISSPELT[name]
    with pytest.raises(TypeError, match=message):
        call(world)


def test_a_context_that_does_not_fit_says_what_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The longest one of that batch, or the most rows of that context; it does fit."""
    model = rlx.compile(rlx.from_pretrained(LLAMA), program="prefill")
    sizes = [sum(a.nbytes for a in jax.tree.leaves(model.init_state(2, n))) for n in (64, 65)]
    here = replace(device.running_device(), memory=sizes[0])
    monkeypatch.setattr(device, "running_device", lambda: here)
    assert model.init_state(2, 64) is not None
    for batch, context, says in (
        (2, 100, "with a batch of 2 a context of 64 would"),
        (200, 64, "with a context of 64 a batch of 2 would"),
    ):
        with pytest.raises(errors.DeviceOutOfMemoryError, match=rf"the device has {sizes[0]:,}; .*{says}"):
            model.init_state(batch, context)
    assert sizes[1] > sizes[0]


@pytest.mark.parametrize("name", ROWS)
def test_what_a_user_is_told(world: World, tmp_path: Path, name: str) -> None:
    """The documented class; the message names the place, is printable and short."""
    wanted, world.here = ROWS[name], tmp_path
    with pytest.raises(RlxError) as caught:
        wanted.call(world)
    message = str(caught.value)
    assert type(caught.value) is wanted.error, message
    for part in (wanted.where, *wanted.says):
        assert part in message, (part, message)
    assert 10 < len(message) <= 2048
    assert message.isprintable()


# -- what is taken all the same ----------------------------------------------------------------


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64, ">i4", "device bool"])
def test_a_mask_may_have_any_whole_dtype(world: World, dtype: Any) -> None:
    """And lengths say the same as the mask that they make."""
    keep = np.array([[1, 1, 1], [1, 1, 0]])
    mask = jnp.asarray(keep, bool) if dtype == "device bool" else keep.astype(dtype)
    want = world.enc.hidden_states(IDS, [3, 2])
    np.testing.assert_array_equal(world.enc.hidden_states(IDS, attention_mask=mask), want)
    np.testing.assert_allclose(world.bert(IDS, attention_mask=mask), want, atol=1e-5)


def test_type_ids_of_an_encoder(world: World) -> None:
    """Optional inputs of the flow go through `hidden_states`."""
    other = world.enc.hidden_states(IDS, token_type_ids=IDS)
    np.testing.assert_allclose(other, world.bert(IDS, token_type_ids=IDS), atol=1e-5)
    assert not np.allclose(other, world.enc.hidden_states(IDS), atol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "bfloat16", jnp.bfloat16, np.dtype(ml_dtypes.bfloat16)])
def test_a_dtype_has_several_spellings(dtype: Any) -> None:
    """All of them are the short name of the profile."""
    assert rlx.load(LLAMA, dtype=dtype).model.settings.compute == ml_dtypes.bfloat16


def test_a_misspelt_option_is_that_of_the_function_that_got_it() -> None:
    """As Python says it, with a suggestion."""
    for call in (rlx.load, rlx.from_pretrained):
        with pytest.raises(TypeError, match=rf"^{call.__name__}\(\) got .* 'strct'; did you mean 'strict'\?"):
            call(LLAMA, strct=False)


def test_warnings_say_what_and_where(world: World, tmp_path: Path) -> None:
    """What is not wrong enough to stop: infinity, code that is not run, weights that nobody reads."""
    world.here = tmp_path
    with pytest.warns(RlxNumericsWarning, match=r"'w' \(mapping\): 32 of 32 values"):
        rlx.compile(mlp(), {"w": np.full((4, 8), 1e300)})
    with pytest.warns(RlxWarning, match=r"llama/config\.json': auto_map is ignored"):
        world.llama(auto_map={"AutoModel": "x.y"})
    with pytest.warns(RlxWarning, match=r"'v'"):
        rlx.compile(mlp(), W | {"v": X}, strict=False)
    with pytest.warns(RlxWarning, match=r"mlp: fusion\.target is 'tpu', and JAX runs on"):
        rlx.compile(mlp(), W, profile=rlx.CompileProfile().replace(fusion={"target": "tpu"}))
    with pytest.warns(RlxNumericsWarning, match=r"1 of 1 weights hold NaN.*'w'"):
        rlx.save(world.mlp.replace(params={"w": jnp.full((4, 8), jnp.nan)}), tmp_path / "nan", "safetensors")


@pytest.mark.parametrize("path", [LLAMA, SHARDED])
def test_a_recipe_can_be_pickled(path: Path) -> None:
    """With the checkpoint that it is bound to, which is opened again; a copy in depth too. And so can its flow."""
    recipe = rlx.recipe_for(path)
    want = rlx.compile(recipe)(IDS)
    flow = recipe.assemble()
    for other in (pickle.loads(pickle.dumps(recipe)), deepcopy(recipe), pickle.loads(pickle.dumps(flow))):
        np.testing.assert_array_equal(rlx.compile(other)(IDS), want)


def test_flows_can_be_keys() -> None:
    """A flow is a value: equal ones have one hash."""
    assert {rlx.ModelFlow("m").bind(): 1} == {rlx.ModelFlow("m"): 1}
    assert hash(mlp().bind(batch=2)) == hash(mlp().bind(batch=2))


# -- the tree ----------------------------------------------------------------------------------

TREE = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, RlxError)]
BUILT_INS = (ValueError, NotImplementedError, ArithmeticError, RuntimeError, OSError)


@pytest.mark.parametrize("error", [c for c in TREE if c is not RlxError], ids=lambda c: c.__name__)
def test_every_error_is_a_built_in_too(error: type[RlxError]) -> None:
    """So that code which does not know rlx_jax can catch it; and it says what it means."""
    assert issubclass(error, BUILT_INS) and error.__doc__


@pytest.mark.parametrize("text", ["a\x00b\x1b[31m\u202e", "\ud800", "é" * 5000, "\x00" * 5000])
def test_messages_are_printable_and_short(text: str) -> None:
    """Whatever a file has in its names."""
    for message in (str(RlxError(text)), errors.quote(text), errors.shown(text), errors.listing([text] * 50)):
        assert message.isprintable() and len(message) <= max(2048, 21 * 122)
    assert len(str(RlxError(text))) <= 2048
    assert errors.shown(10**5000) == errors.number(10**5000) == "an integer of 16610 bits"
    assert errors.quote(10**5000) == "'an integer of 16610 bits'"


def test_a_block_path_is_named_once() -> None:
    """The innermost; and the message stays short."""
    error = RlxError("x" * 3000)
    error.locate("")
    error.locate("layers.1")
    error.locate("layers")
    assert str(error).startswith("layers.1: xxx") and len(str(error)) == 2048
    inner = RlxError("layers.1.attn: no")
    inner.locate("layers.1")
    assert str(inner) == "layers.1.attn: no"


# -- docs/errors.md ----------------------------------------------------------------------------

PAGE = (Path(__file__).resolve().parents[1] / "docs" / "errors.md").read_text("utf-8")
LIMITED = [
    "generate.asking", "generate.drafting", "io.limits", "ir.ops.custom", "ir.types", "models.config", "profiles.check",
    "profiles.text", "text.chat", "text.chat_template", "text.tokenizer",
]  # fmt: skip


def test_every_limit_is_documented() -> None:
    """Under its name, with its default."""
    found = re.findall(r"^\| `(rlx_jax\.[\w.]+)` \| (\d+) \|", PAGE, re.MULTILINE)
    modules = [importlib.import_module(f"rlx_jax.{name}") for name in LIMITED]
    limits = {
        f"{m.__name__}.{name}": value for m in modules for name, value in vars(m).items() if name.startswith("MAX_")
    }
    assert {name: int(value) for name, value in found} == limits


def test_every_error_is_documented() -> None:
    """By name, in the table of the tree."""
    missing = [c.__name__ for c in TREE if f"`{c.__name__}`" not in PAGE and c is not RlxError]
    assert not missing


def test_the_page_prints_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text block is what the Python block before it prints."""
    copy(LLAMA, tmp_path / "path" / "to" / "llama")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(weight_limits, "MAX_TENSORS", weight_limits.MAX_TENSORS)
    namespace: dict[str, Any] = {}
    for code, text in re.findall(r"```python\n(.*?)```(?:\n\n```text\n(.*?)```)?", PAGE, re.DOTALL):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        assert printed.getvalue() == text
