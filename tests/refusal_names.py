"""What the expressions of `tests/golden/refusals/rows.md` are made of."""

# ruff: noqa: F401 (the expressions read the imported names)

import json
import pickle
import struct
import zipfile
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import partial, reduce
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
from safetensors.numpy import load_file, save_file

import rlx_jax as rlx
from rlx_jax import blocks
from rlx_jax.blocks import ClampedGate, MoeSpec
from rlx_jax.encode.image_classifier import ImageClassifier
from rlx_jax.encode.images import load_processor
from rlx_jax.encode.sentence import load_pipeline
from rlx_jax.errors import RlxError, WeightShapeError
from rlx_jax.io.folder import Folder
from rlx_jax.ir.ops.custom import JaxFn
from rlx_jax.ir.ops.pointwise import Unary
from rlx_jax.layer_stack import LayerStack
from rlx_jax.models.dual import ClipConfig, ClipVisionConfig
from rlx_jax.models.llama import Llama32Flow
from rlx_jax.models.siglip import SiglipConfig
from rlx_jax.models.vit import Dinov2Config
from rlx_jax.text.chat import check_messages
from tests.gguf_bytes import ARCH, ONE, gguf_file, pair, string, tensor
from tests.oracles import fuzzing
from tests.oracles.adapters import ADAPTER, BASE
from tests.oracles.checkpoints import FIXTURES, REMOVED, copy, edit_json, edit_tensors, edited
from tests.shards import ENTRY, frame, one
from tests.test_quantized import STATE, read_file, write_tensors
from tests.test_quantized import V as V_PROJ
from tests.test_sentence_pipeline import modules, sentence
from tests.test_tokenizer import KINDS, changed, loaded, tiktoken

LLAMA = FIXTURES / "llama" / "gqa_tied_llama3_v5"
BERT = FIXTURES / "bert" / "bare_v5"
IDS = np.ones((2, 3), np.int32)
X = np.ones((2, 8), np.float32)
W = {"w": np.ones((4, 8), np.float32)}
LINEAR = blocks.Linear("w")
HEAD = blocks.Linear("h", shape=(11, 4))
BODY = {"name": "b", "inputs": [], "nodes": [], "outputs": [], "output_names": [], "writes": []}
VOCAB = json.loads((LLAMA / "config.json").read_text("utf-8"))["vocab_size"]
WIDE = (3 * 2**20, 2**18)  # 3 TB of float32
THREE: Any = 3
NONE: Any = None
NAME: Any = "auto"
YARN = {"rope_theta": 1e6, "rope_type": "yarn", "factor": 8.0}
SCALED = {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0}
ROPES = {"full_attention": SCALED, "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"}}
TREE = {"blocks": {"q": np.ones((3, 4, 5), np.float32), "e": np.ones((2, 3, 5), np.float32)}, "norm": np.ones(6)}
UP = "model.layers.1.mlp.up_proj.weight"


class Silent:
    """An array of some other library that does not convert, with an error of no words."""

    def __array__(self, *args: Any, **named: Any) -> Any:
        raise ValueError


class World:
    """What a row works with: models that are made once, and an empty directory."""

    def __init__(self) -> None:
        self.lm, self.enc = rlx.load(LLAMA), rlx.load(BERT, expect=rlx.Encoder)
        self.bert = rlx.compile(rlx.from_pretrained(BERT))
        self.prefill = rlx.compile(rlx.from_pretrained(LLAMA), program="prefill")
        self.mlp = rlx.compile(mlp(), W)
        self.models: dict[tuple[str, str], Any] = {}
        self.here = Path()

    def llama(self, **fields: Any) -> Any:
        """Load the tiny Llama after a change of its config.json."""
        return rlx.load(edited(LLAMA, self.here / "llama", fields))

    def load(self, name: str, **fields: Any) -> Any:
        """Load a recorded checkpoint after a change of its config.json."""
        return rlx.load(edited(FIXTURES / name, self.here / "edited", {"auto_map": REMOVED, **fields}))

    def stored(self, archive: str, name: str) -> Path:
        """Return a checkpoint of a recorded archive."""
        with zipfile.ZipFile(FIXTURES / f"{archive}.zip") as file:
            file.extractall(self.here, [member for member in file.namelist() if member.startswith(f"{name}/")])
        return self.here / name

    def model(self, archive: str, name: str) -> Any:
        """Return its model, which is loaded once."""
        if (archive, name) not in self.models:
            self.models[archive, name] = rlx.load(self.stored(archive, name))
        return self.models[archive, name]

    def altered(self, archive: str, name: str, file: str = "config.json", /, **fields: Any) -> Any:
        """Load it after a change of a file of JSON."""
        edit_json(self.stored(archive, name) / file, fields)
        return rlx.load(self.here / name)

    def requantized(self, name: str, changes: dict[str, Any], edit: Callable[[dict[str, Any]], Any] = len) -> Any:
        """Load a quantised checkpoint after a change of how it says that it is quantised, and of its tensors."""
        directory = self.stored("quantized", name)
        tensors = read_file(directory)
        edit(tensors)
        write_tensors(directory, tensors)
        config = json.loads((directory / "config.json").read_text("utf-8"))
        (directory / "edges.safetensors").unlink()
        edit_json(directory / "config.json", {"quantization_config": config["quantization_config"] | changes})
        return rlx.load(directory)

    def tensors(self, edit: Callable[[dict[str, Any]], Any]) -> Any:
        """Load it after a change of its tensors."""
        edit_tensors(copy(LLAMA, self.here / "llama"), edit)
        return rlx.load(self.here / "llama")

    def file(self, name: str, content: str | bytes) -> Path:
        path = self.here / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def opened(self, raw: bytes) -> Any:
        """Open a file of weights."""
        return rlx.open_weights(self.file("m.safetensors", raw))

    def processor(self, **settings: Any) -> Any:
        """Read an image processor after a change of its settings."""
        edit_json(copy(FIXTURES / "vision" / "dinov2", self.here / "it") / "preprocessor_config.json", settings)
        return load_processor(Folder(self.here / "it"), "Bit")

    def gguf(self, raw: bytes) -> Any:
        """Load a GGUF file; opening its weights fails as well."""
        path = self.file("m.gguf", raw)
        with pytest.raises(RlxError):
            rlx.open_weights(path)
        return rlx.load(path)

    def adapter(self, edit: Callable[[dict[str, Any]], Any] = dict, **fields: Any) -> Any:
        """Build a model with the recorded adapter after a change of its tensors and its config."""
        directory = copy(ADAPTER, self.here / "adapter")
        edit_json(directory / "adapter_config.json", fields)
        tensors = edit(load_file(directory / "adapter_model.safetensors"))
        save_file({k: np.ascontiguousarray(v) for k, v in tensors.items()}, directory / "adapter_model.safetensors")
        return adapted(adapter=directory)

    def index(self, content: str) -> Any:
        """Open a directory by its index."""
        return rlx.open_weights(self.file("model.safetensors.index.json", content).parent)

    def orbax(self, file: str, **changes: Any) -> Any:
        """Read the array of an orbax checkpoint after changes of one of its files of JSON."""
        path = self.here / "a"
        ocp.PyTreeCheckpointer(use_ocdbt=False).save(path, {"w": np.ones((3, 4), np.float32)})
        edit_json(path / file, changes)
        return rlx.open_weights(path, verify="metadata").read("w")

    def tokenizer(self, doc: Any = KINDS["word_level"], **contents: Any) -> Any:
        """Load a tokenizer.json and the files beside it."""
        return loaded(self.here, doc, **contents)

    def pipeline(self, **contents: Any) -> Any:
        """Read the files of a sentence encoder."""
        return load_pipeline(sentence(self.here, **contents))

    def shard(self, name: str) -> Any:
        """Open a directory whose index names `name` as its shard."""
        return self.index(json.dumps({"weight_map": {"w": name}}))

    def state(self, batch: int = 2, context: int = 8) -> Any:
        return self.prefill.init_state(batch, context)


def module_with(**fields: Any) -> list[dict[str, Any]]:
    """The modules of a sentence encoder, other fields in the second."""
    first, second, third = modules("Transformer", "Pooling", "Normalize")
    return [first, second | fields, third]


def leaf(name: str, kind: str = "np.ndarray") -> dict[str, Any]:
    """A leaf in orbax's list of a tree."""
    return {"key_metadata": [{"key": name, "key_type": 2}], "value_metadata": {"value_type": kind}}


def document() -> Any:
    """A small valid graph as JSON, as data."""
    made = rlx.GraphModule.hir("m")
    y = made.linear(made.input("x", ("batch", 8)), made.param("w", (8, 4)))
    made.set_outputs([made.add(y, made.constant(np.arange(4), "f32"))])
    return json.loads(made.to_json())


def graph(path: str, value: Any) -> Any:
    """Read that JSON with another value at a path."""
    data = document()
    *before, last = (int(key) if key.isdigit() else key for key in path.split("."))
    fuzzing.at(data, before)[last] = value
    return rlx.GraphModule.from_json(json.dumps(data))


def loss(*stages: Any, program: str = "train", **arguments: Any) -> Any:
    """The loss of an embedding and some stages."""
    flow = rlx.ModelFlow("own").input("ids", ("batch", "seq"), "int32").embed("e", shape=(11, 4)).stage(*stages)
    model = rlx.compile(flow, program=program)
    return rlx.losses.cross_entropy(model, model.init(0), **{"tokens": IDS, **arguments})


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


def module(name: str) -> rlx.GraphModule:
    """A module of one input, `x`."""
    made = rlx.GraphModule.mir(name)
    made.input("x", (4,))
    return made


def x_of(fn: Callable[[Any, Any], Any]) -> Any:
    """What `fn` makes of a module and its input `[batch, 4]`."""
    made = rlx.GraphModule.hir("m")
    return fn(made, made.input("x", ("batch", 4)))


def outputs(names: Any = (), count: int = 1, alone: bool = False) -> None:
    """Give a module `count` outputs, or one that is in no list."""
    made = rlx.GraphModule.mir("m")
    x: Any = made.input("x", (4,))
    made.set_outputs(x if alone else [x] * count, names)


def saved(state: Any, t: World) -> None:
    """Save a state of training, in a directory that stays away where that is refused."""
    with rlx.train.Checkpoints(t.here / "run") as checkpoints:
        try:
            checkpoints.save(1, state)
        finally:
            assert not (t.here / "run").exists()


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


def sized(fn: Callable[[Any], Any]) -> Any:
    """Arithmetic with a size that is not known."""
    return x_of(lambda m, x: fn(m.shape(x).shape[0]))


def adapted(*arguments: Any, name: str = BASE.name, **options: Any) -> Any:
    """Build a recorded Llama with an adapter."""
    return rlx.lora(rlx.recipe_for(BASE.parent / name), *arguments, **options).assemble().build()
