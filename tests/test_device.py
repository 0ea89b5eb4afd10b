"""The device is an argument: a plan for a machine is the same wherever it is made."""

import ctypes
import mmap
import re
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import jax
import ml_dtypes
import numpy as np
import pytest

import rlx_jax as rlx
from rlx_jax import device
from rlx_jax.compiler import settings
from rlx_jax.compiler.executable import Executable
from rlx_jax.device import DEVICES, MIN_FLASH_CAPABILITY, Device, describe_device, named_device, running_device
from rlx_jax.errors import ProfileError, RlxWarning
from rlx_jax.lowering.lir import implementations
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs
from rlx_jax.profiles.schema import Target
from tests import small

CONFIG = small.TIED_LLAMA | {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8}
IDS = jax.ShapeDtypeStruct((1, 8), np.int32)


def jax_device(kind: str, platform: str = "gpu", version: str = "cuda 13000", **more: Any) -> Any:
    """What `describe_device` asks of a `jax.Device`."""
    return SimpleNamespace(
        device_kind=kind, platform=platform, client=SimpleNamespace(platform_version=version), **more
    )


SEEN = {
    "NVIDIA H200": (jax_device("NVIDIA H200"), DEVICES["h200"]),
    "NVIDIA A100-SXM4-80GB": (jax_device("NVIDIA A100-SXM4-80GB"), DEVICES["a100"]),
    "another A100": (
        jax_device("NVIDIA A100-SXM4-40GB", compute_capability="8.0"), replace(DEVICES["cuda"], capability=(8, 0)),
    ),
    "an old GPU": (
        jax_device("Tesla V100-SXM2-16GB", compute_capability="7.0"), Device("cuda", "cuda", capability=(7, 0)),
    ),
    "Tesla T4": (jax_device("Tesla T4"), DEVICES["t4"]),
    "NVIDIA GeForce RTX 4090": (jax_device("NVIDIA GeForce RTX 4090"), DEVICES["rtx4090"]),
    "AMD Instinct MI300X": (jax_device("AMD Instinct MI300X", version="rocm 60300"), DEVICES["mi300x"]),
    "TPU v5 lite": (jax_device("TPU v5 lite", "tpu"), DEVICES["tpu_v5e"]),
    "TPU v5": (jax_device("TPU v5", "tpu"), DEVICES["tpu_v5p"]),
    "TPU v4": (jax_device("TPU v4", "tpu"), DEVICES["tpu"]),
    "cpu": (jax_device("cpu", "cpu"), DEVICES["cpu"]),
    "another platform": (jax_device("METAL", "metal"), Device("metal", "metal")),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_what_is_known_of_a_running_device(name: str) -> None:
    """The facts of its product, and the memory that it says it has."""
    seen, expected = SEEN[name]
    seen.memory_stats = lambda: {"bytes_limit": 10**9}
    assert describe_device(seen) == replace(expected, memory=10**9)


def test_devices_by_name() -> None:
    here = running_device()
    assert (here.name, here.kind) == ("cpu", "cpu") and here.memory is not None and here.memory > 10**9
    assert {"auto", *DEVICES} == set(get_args(Target))
    for name, found in DEVICES.items():
        assert named_device(name) is found and found.name == name
        too_old = found.capability is not None and found.capability < MIN_FLASH_CAPABILITY
        assert (found.cudnn is None) == (found.kind != "cuda" or too_old)
        assert (found.memory is None) == (name == found.kind)
    assert str(DEVICES["h200"]) == "h200 (cuda, 141 GB, 4,800 GB/s, 989 TFLOP/s)" and str(DEVICES["tpu"]) == "tpu"
    with pytest.raises(ProfileError, match="'h20'.*'h200'"):
        named_device("h20")


def weights() -> dict[str, np.ndarray]:
    """In bf16, which a GPU computes in where it is told nothing."""
    rng = np.random.default_rng(0)
    specs = weight_specs(LlamaConfig.from_hf(CONFIG))
    return {key: rng.normal(0, 0.1, spec.shape).astype(ml_dtypes.bfloat16) for key, spec in specs.items()}


def planned(target: str = "auto", program: str = "forward") -> dict[str, str]:
    """Every text of a program that is planned for `target`, the fingerprint in the LIR included."""
    profile = rlx.CompileProfile().replace(fusion={"target": target}, layers={"roll": "unroll"})
    specs = {key: jax.ShapeDtypeStruct(w.shape, w.dtype) for key, w in weights().items()}
    model = rlx.compile(Llama32Flow.for_prefill(CONFIG), specs, profile=profile, program=program)
    named: dict[str, Any] = {}
    if program == "extend":
        named = {"lengths": np.ones(1, np.int32), "state": jax.eval_shape(lambda: model.init_state(1, 16))}
        return {"mir": model.text("mir"), "lir": model.text("lir", IDS.update(shape=(1, 1)), **named)}
    return {"mir": model.text("mir"), "lir": model.text("lir", IDS)}


@pytest.mark.parametrize("program", ["forward", "extend"])
def test_a_plan_for_an_h200_is_what_an_h200_plans(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Character by character; on this machine only the name of the device is known of it."""
    away, other = planned("h200", program), planned("cpu", program)
    assert other == planned("auto", program) != away and "cudnn (" not in other["lir"]
    mine = replace(DEVICES["h200"], memory=140 * 10**9)
    monkeypatch.setattr(settings, "running_device", lambda: mine)
    assert planned("auto", program) == away
    assert "plan: target=cuda" in away["lir"] and "bf16[" in away["mir"]
    assert "self_attn: cudnn (faster here" in away["lir"]
    assert ("row (one row: cuBLAS is slower; no kernel: " in away["lir"]) == (program == "extend")


def test_options_of_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA's options are set where they were measured, unless the profile or `XLA_FLAGS` sets them."""
    option = "xla_gpu_enable_triton_gemm"
    lirs = [planned(*case)["lir"] for case in (("h200", "train"), ("h200", "forward"), ("a100", "train"))]
    assert [f"{option}=False" in lir for lir in lirs] == [True, False, False]
    profile = rlx.CompileProfile().replace(
        fusion={"target": "h200"}, backend={"cuda": {"compiler_options": {option: True}}}
    )
    by_dtype = {"bf16": settings.TRAIN_OPTIONS | {option: True}, "f16": {option: True}, "f32": {option: True}}
    for compute, expected in by_dtype.items():
        chosen = profile.replace(precision={"compute": compute})
        model = rlx.compile(Llama32Flow.for_prefill(CONFIG), program="train", profile=chosen)
        assert model.settings.plan.compiler_options == expected
    for packing, expected in (("keep", by_dtype["bf16"]), ("int8", {option: True})):  # of the weights below adapters
        adapted = rlx.lora(Llama32Flow.for_prefill(CONFIG), "layers.*.self_attn.q_proj", rank=2)
        chosen = profile.replace(precision={"compute": "bf16", "weights": packing})
        model = rlx.compile(adapted, program="train", profile=chosen)
        assert model.settings.plan.compiler_options == expected
    monkeypatch.setenv("XLA_FLAGS", f"--xla_cpu_enable_fast_math=false --{option}")
    assert option not in planned("h200", "train")["lir"]


def test_loading_for_another_machine_merges_as_it_would_there() -> None:
    """And says that it runs on this one."""
    profile = rlx.CompileProfile().replace(fusion={"target": "h200"}, attention={"implementation": "xla"})
    with pytest.warns(RlxWarning, match="fusion.target.*'h200'.*'cpu'"):
        lm: Any = rlx.CausalLM(Llama32Flow.for_prefill(CONFIG), weights(), profile=profile)
    assert "model.layers.0.self_attn.{q,k,v}_proj.weight" in lm.model.param_specs()
    assert "planned for        h200 (cuda, 141 GB, 4,800 GB/s, 989 TFLOP/s)" in str(lm.report())


@pytest.mark.parametrize(("asked", "target", "found"), [
    ("auto", "cpu", {"5 by xla (as any other)"}),
    ("auto", "h200", {"5 by row (one row: cuBLAS is slower)"}),
    ("row", "cpu", {"5 by row (asked for)"}),
    ("xla", "h200", {"5 by xla (as any other)"}),
])  # fmt: skip
def test_products(asked: str, target: str, found: set[str]) -> None:
    """A setting of the backend; the report and the LIR tell."""
    kind = DEVICES[target].kind
    profile = rlx.CompileProfile().replace(
        fusion={"target": target}, backend={kind: {"products": asked, "merge": True}}, precision={"compute": "f32"}
    )
    model = rlx.compile(Llama32Flow.for_prefill(CONFIG), profile=profile, program="extend")
    state = jax.eval_shape(lambda: model.init_state(1, 16))
    text = model.text("lir", IDS.update(shape=(1, 1)), np.ones(1, np.int32), state=state)
    model.lower(IDS.update(shape=(1, 1)), np.ones(1, np.int32), state=state)
    rows, reported = (  # no JAX has kernels in f32
        {re.sub("; no kernel: .*", ")", row) for row in lines}
        for lines in (re.findall(r"^  products (.*)$", text, re.MULTILINE), model.report().products)
    )
    assert reported == found and rows == {row for row in found if "xla" not in row}


@pytest.mark.slow
def test_the_generating_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many tokens a dispatch, of a device with kernels two in an iteration, and the same tokens."""
    texts = list[Any]()
    loops = (2, False, True, 1), (4, True, True, 1), (4, False, True, 2), (3, False, True, 1), (4, False, False, 1)
    for steps, early, mosaic, joined in loops:
        tables = {} if early else {"steps_per_dispatch": steps, "stop_early": False}
        monkeypatch.setattr(Device, "has_kernels", len(texts) > 1)  # weights in f32 have none all the same
        monkeypatch.setattr(implementations, "has_mosaic", partial(bool, mosaic))
        profile = rlx.CompileProfile().replace(backend={"cpu": tables})
        lm: Any = rlx.CausalLM(Llama32Flow.for_prefill(CONFIG), weights(), profile=profile)
        texts.append([lm.generate([[1, 2, 3]], max_new_tokens=7), lm.generate([[1, 2], [3]], max_new_tokens=5)])
        found = {k.wrapper for k in lm.model.programs.executables if k.program == "extend"}
        assert {(k.steps, k.early_exit, k.joined) for k in found} == {(steps, early, joined)}
        assert f"{steps} steps a dispatch" in str(lm.report())
    assert all(text == texts[0] for text in texts)


def test_arguments_on_another_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are used where they stand. Whether that is it is asked of a call that failed, and of no other."""
    here, there = jax.devices()[:2]
    model = rlx.compile(rlx.ModelFlow("m").input("x", (1, 2)).linear("w"), {"w": np.ones((3, 2), np.float32)})
    x = np.ones((1, 2), np.float32)
    assert model(x).devices() == {here}
    fits, asked = Executable.accepts, list[Executable]()

    def noted(self: Executable, *arguments: Any) -> Any:
        asked.append(self)
        return fits(self, *arguments)

    monkeypatch.setattr(Executable, "accepts", noted)
    moved = model.replace(params=jax.device_put(model.params, there))
    assert moved(jax.device_put(x, there)).devices() == {there} and len(asked) == 1
    for given in (x, jax.device_put(x), jax.device_put(x, here)):
        assert model(given).devices() == {here}
    assert len(asked) == 1


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="this system has no large pages")
def test_the_table_of_a_starting_gpu_has_large_pages() -> None:
    """Memory that was there before it is no table."""
    facts: list[Any] = []

    def new_memory() -> mmap.mmap:
        return mmap.mmap(-1, 2**31 + 2**12, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def start() -> None:
        before = new_memory()
        others = device._parts_of_memory(2**31)
        asking = threading.Thread(target=device._ask_for_large_pages, args=(2**31, others))
        asking.start()
        asking.join(0.1)
        facts.append(asking.is_alive() and not before.closed)
        memory = new_memory()
        asking.join(10)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        _, _, own = Path("/proc/self/smaps").read_text().partition(f"{start:x}-")
        facts.append("hg" in own.partition("VmFlags:")[2].partition("\n")[0].split())

    starting = threading.Thread(target=start, name=device._STARTER)
    starting.start()
    starting.join()
    assert facts == [True, True]
