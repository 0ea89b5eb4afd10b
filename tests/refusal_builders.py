"""Flows, modules and configs that rows of `tests/golden/refusals/rows.md` are made of, beside `refusal_names`."""

# ruff: noqa: F401 (the expressions read the imported names)

import functools
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax.numpy as jnp
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax.encode.classifier import Reranker
from rlx_jax.encode.sentence import SentencePipeline
from rlx_jax.errors import RlxError
from rlx_jax.ir.checkpoint_tensor import BlockArray
from rlx_jax.ir.graph import TypeCache
from rlx_jax.ir.ops.fused import Step
from rlx_jax.ir.ops.linalg import MatMul
from rlx_jax.ir.ops.shape import AxisOf, SizeOf
from rlx_jax.ir.packed import PackedSpec
from rlx_jax.models.bert import BertConfig
from rlx_jax.models.config import Fields
from rlx_jax.models.decoder_config import DecoderConfig, layer_of
from rlx_jax.models.encoder import TOKEN
from rlx_jax.models.gemma import GemmaConfig
from rlx_jax.models.nomic import NomicVisionConfig
from rlx_jax.models.siglip import Siglip2VisionFlow
from rlx_jax.runtime.compile_flow import compile_together
from rlx_jax.text.tokenizer import load_tokenizer
from rlx_jax.weights.mapping import MappingSource
from rlx_jax.weights.quantized import with_mxfp4_weights
from tests import divided
from tests import test_attention as attention
from tests import test_cached_masks as masks
from tests import test_chat as chats
from tests import test_cross_attention as cross
from tests import test_decode_stages as stages
from tests import test_decoder_block as layers
from tests import test_explicit as explicit
from tests import test_flow_inputs as cuts
from tests import test_folder as folders
from tests import test_gpt_oss as gpt_oss
from tests import test_label_losses as heads
from tests import test_mesh_params as meshes
from tests import test_module as queries
from tests import test_packed as packing
from tests import test_packed_models as packed_models
from tests import test_padded as padded
from tests import test_param_programs as programs
from tests import test_patching as patching
from tests import test_plugins as extensions
from tests import test_programs as together
from tests import test_recurrences as gdn
from tests import test_self_attention as selves
from tests import test_siglip2 as naflex
from tests import test_spec_stage_forms as forms
from tests import test_vision as pictures
from tests.ops import o, operand
from tests.oracles import chat_templates
from tests.oracles.checkpoints import FIXTURES
from tests.refusal_names import IDS, LLAMA, World
from tests.small import Own

CLIP = FIXTURES / "vision" / "dual" / "clip"
IDS_FLOW = rlx.ModelFlow("m").input("input_ids", ("batch", "seq"), dtype="int32").embed("e", shape=(9, 8))
BIASED = rlx.ModelFlow("biased").input("tokens", ("batch", "seq"), dtype="int32").embed("e")


def on_inputs(call: Callable[..., Any], **inputs: tuple[Any, ...]) -> NoReturn:
    """Raise what `call` raises with a module and inputs of these shapes, as it does in a stage."""
    made, flow = rlx.GraphModule.hir("m"), rlx.ModelFlow("m")
    for name, shape in inputs.items():
        flow = flow.input(name, shape)
    with pytest.raises(RlxError) as in_stage:
        flow.custom(lambda emit, x: call(emit, *(emit.flow_input(name) for name in inputs))).build()
    values = [made.input(name, shape) for name, shape in inputs.items()]
    with pytest.raises(in_stage.type) as caught:
        call(made, *values)
    made.sin(values[0])  # what is written goes on as before
    raise caught.value


def quantized(call: Callable[..., Any]) -> Any:
    """The same with a packed weight, integer codes and their scales."""
    made = rlx.GraphModule.hir("m")
    x, w = made.input("x", (3, 40)), made.param("w", (6, 64), packed="gguf_q8_0")
    return call(made, x, w, made.input("q", (40, 6), "i8"), made.input("s", (3, 6)))


def built(edit: Callable[[Any], Any], weights: Any = None) -> Any:
    """Build a flow of x `[batch, seq, 8]` and a mask after a change."""
    flow = rlx.ModelFlow("m").input("x", ("batch", "seq", 8)).input("keep", ("batch", "seq"))
    return edit(flow).build(weights)


def of_weight(fn: Callable[[Any, Any], Any]) -> Any:
    """Build a stage over x `[batch, seq, 8]` that may read weights of several orientations."""
    shapes = {"w": (4, 8), "t": (8, 4), "b": (4,), "n": (5, 5)}
    return built(lambda flow: flow.custom(fn), {key: np.ones(shape, np.float32) for key, shape in shapes.items()})


def gemma(kind: str, **fields: Any) -> Any:
    """Read the config of a Gemma."""
    sizes = {"vocab_size": 61, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 8}
    return GemmaConfig.from_hf(
        sizes | {"model_type": kind, "num_attention_heads": 4, "num_key_value_heads": 2} | fields
    )


def by_scheme(setting: Any, program: str = "forward") -> Any:
    """Compile a product of x `[b, 128]` whose weight is packed as a profile has it."""
    flow = rlx.ModelFlow("m").input("x", ("b", 128)).linear("up")
    profile = rlx.CompileProfile().replace(precision={"weights": setting})
    return rlx.compile(flow, {"up": np.ones((128, 128), np.float32)}, program=program, profile=profile)


def two_layers() -> rlx.GraphModule:
    """A product of two layers with a symbolic number of rows."""
    made = rlx.GraphModule.hir("two")
    x = made.linear(made.input("x", ("batch", 8)), made.param("layers.0.w", (8, 8)))
    made.set_outputs([made.linear(x, made.param("layers.1.w", (8, 8)))])
    return made


def planned(**options: Any) -> Any:
    """Compile it for two rows."""
    return rlx.CompilePipeline(**options).compile_module(two_layers().bind(batch=2))


def rounded(record: Callable[[Any, Any], Any]) -> Any:
    """Round values of a module of floats and integers as a record says."""
    made = rlx.GraphModule.hir("m")
    x, ids = made.input("x", (3, 8)), made.input("ids", (3,), "i32")
    made.set_outputs([x])
    return rlx.quantization.insert_q_dq(made, record(x, ids))


def captured(prompts: Any, name: str = LLAMA.name) -> Any:
    """Capture what a layer makes of prompts."""
    recipe = rlx.recipe_for(LLAMA.parent / name).at("layers.0").capture()
    return rlx.load(LLAMA.parent / name, recipe=recipe).capture(prompts)


def nomic_vision(**fields: Any) -> Any:
    """Read the published config of Nomic's vision encoder after a change."""
    published = json.loads((FIXTURES / "published" / "nomic-embed-vision-v1.5.json").read_text("utf-8"))
    return NomicVisionConfig.from_hf({k: v for k, v in published.items() if k != "auto_map"} | fields)


def siglip2(**fields: Any) -> Any:
    """The flow of a SigLIP 2 vision tower after a change of its config."""
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "num_attention_heads": 3}
    config = sizes | {"model_type": "siglip2_vision_model", "patch_size": 5, "num_patches": 16, "num_channels": 3}
    return Siglip2VisionFlow.for_prefill(config | fields).assemble().build()


def inferred(op: Any, operands: str) -> Any:
    """Infer the types of an op."""
    return TypeCache().infer(op, tuple(map(operand, operands.split(";"))))


def attended(fn: Callable[[Any, Any], Any]) -> Any:
    """Build a stage that attends to inputs of many shapes."""
    return attention.flow().custom_named("mine", attention.with_inputs(fn)).build()


def stepped(flow: rlx.ModelFlow) -> Any:
    """Build an explicit decode flow."""
    weights = {key: np.ones(shape, np.float32) for key, shape in stages.LAYER.items()}
    return flow.build(weights | stages.ATTENTION_WEIGHTS | {"table": np.ones((9, stages.WIDTH), np.float32)})


def cut(fn: Callable[[Any, Any, Any], Any]) -> Any:
    """Build a stage over two sequences, with a size for each."""
    return cuts.flow(fn).build()


def patched(t: World, patches: Any, **options: Any) -> Any:
    """Patch prompts; nothing is compiled before it is refused."""
    before = patching.executables(t.lm)
    with pytest.raises(RlxError) as caught:
        t.lm.patch(**{"prompts": patching.PROMPTS, "patches": patches, **options})
    assert patching.executables(t.lm) == before
    raise caught.value


def explicitly(flow: rlx.ModelFlow) -> Any:
    """Compile the explicit program of a flow."""
    return rlx.compile(flow, explicit.read_by(flow), program="explicit").text("mir")


def layer(make: Callable[[], Any]) -> Any:
    """Build a flow of a layer."""
    stage = make()
    weights = layers.weights_of(layers.QWEN if "Qwen3Decoder(" in repr(stage) else layers.LLAMA)
    return layers.flow_of(stage, mask="custom").build(weights)


def classified(made: tuple[Any, Any], **arguments: Any) -> Any:
    """The loss of texts with labels."""
    model, params = made
    return rlx.losses.classification(model, params, heads.IDS, **arguments)


def as_gguf(t: World, name: str, **fields: Any) -> None:
    """Save a recorded checkpoint as GGUF; no file is there after a refusal."""
    model, path = t.load(name, **fields), t.here / "m.gguf"
    try:
        rlx.save(model, path)
    finally:
        assert not path.exists()


def extending(stage: Any) -> str:
    """The program `extend` of a flow of a stage over embedded tokens."""
    return rlx.compile(BIASED.custom(stage), {"e": np.ones((17, 6), np.float32)}, program="extend").text("mir")


def everywhere(inputs: Any) -> NoReturn:
    """Raise what each request of a model that reads inputs raises of these."""
    lm, told = cross.lm(), list[str]()
    for call, given in ((lm.generate, cross.PROMPTS), (lm.prefill, cross.TOKENS), (lm.logits, cross.TOKENS)):
        with pytest.raises(RlxError) as caught:
            call(given, inputs=inputs)
        told.append(str(caught.value))
    assert len(set(told)) == 1, told
    raise caught.value


def behind(t: World, prompts: Any, new: int = 7, **options: Any) -> None:
    """Continue a state of two rows; a refusal leaves it as it was."""
    _, state = t.lm.prefill(IDS)
    try:
        t.lm.generate(prompts, new, state=state, **options)
    finally:
        assert t.lm.generate([[1], [2]], 1, state=state) == t.lm.generate([[1, 1, 1, 1], [1, 1, 1, 2]], 1)


def attending(keys: Any, **options: Any) -> Any:
    """Build attention of eight heads without an output projection."""
    stage = rlx.blocks.SelfAttention(keys, None, selves.N, **{"head_dim": selves.D, **options})
    return rlx.ModelFlow("m").input("x", ("batch", "seq", selves.H)).stage(stage).build(selves.WEIGHTS)


TINY_CONFIG = {
    "vocab_size": 8, "hidden_size": 8, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 2,
}  # fmt: skip
TINY = DecoderConfig.from_hf(TINY_CONFIG)


def exported(t: World, **options: Any) -> None:
    """Export a model; no file is there after a refusal."""
    try:
        t.mlp.export(t.here / "x.rlxa", **options)
    finally:
        assert not any(t.here.iterdir())


def patches(edit: Callable[[Any], Any]) -> Any:
    """Embed what an image processor makes of images for NaFlex after a change."""
    return naflex.model_of().embed(edit(rlx.ImageProcessor(patch=5, max_patches=20)(naflex.IMAGES)))


@functools.cache
def chat_tokenizer() -> Any:
    """The tokenizer of the checkpoint with the format of ChatML."""
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(chat_templates.format_checkpoint(Path(folder) / "m", "qwen"))


def templated(*texts: str, template: str) -> Any:
    """Render what people wrote by a template."""
    messages = [{"role": "user", "content": text} for text in texts]
    return chats.prompt(chat_tokenizer(), messages, chat_template=template)


def template_of(t: World, stored: Any) -> Any:
    """Load a tokenizer whose settings have this template."""
    return load_tokenizer(chat_templates.checkpoint(t.here / "m", [], settings={"chat_template": stored}))


def pixels(fn: Callable[[Any, Any], Any]) -> rlx.ModelFlow:
    """A flow of pixels that has another input."""
    flow = rlx.ModelFlow("own").input("pixels", ("batch", 3, "height", "width"))
    return flow.input("more", ("batch", 1, 1, 1)).custom(fn)


def inlined(inputs: str, params: tuple[str, ...] | None = None) -> Any:
    """Put a module into another with these of its inputs and parameters bound."""
    m = rlx.Graph.hir("outer")
    given = (m.input("a", (3, 8)), m.input("b", (3, 6)), m.input("c", (3, 6)))
    bound = None if params is None else {name: m.param("o", (8, 6)) for name in params}
    return m.inline(queries.inner(), dict(zip(inputs, given, strict=False)), bound)


def with_parameter(value: Any) -> Any:
    """Compile a graph whose parameter of 64-bit integers has a value."""
    m = rlx.Graph.hir("m")
    m.set_outputs([m.mul(m.input("x", (2,)), m.cast(m.param("w", (2,), "i64"), "f32"))])
    return rlx.compile(m, {"w": value})


def mxfp4(edit: Callable[[Any], Any]) -> Any:
    """Look at a weight in MXFP4 after a change of its parts."""
    parts = {f"w{end}": array for end, array in gpt_oss.packed((2, 3, 64), 1).items()}
    return with_mxfp4_weights(MappingSource(edit(parts))).spec("w")
