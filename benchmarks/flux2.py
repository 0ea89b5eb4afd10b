"""One double and one single block of FLUX.2's transformer in its real widths, beside diffusers' own on one GPU.

    python benchmarks/flux2.py                     4096 image and 512 text tokens (1024 x 1024 pixels), bf16
    python benchmarks/flux2.py --image 1024        fewer image tokens
    python benchmarks/flux2.py --tiny              everything small, in f32 on the CPU: checks this script, not a GPU

The whole model has 8 double and 48 single blocks of one width; embedders, modulation and head are in both programs.
Both sides have the same random weights: diffusers writes them, rlx_jax reads its directory. Times are medians of
interleaved calls in this one process, the device synchronised after every call; diffusers runs eagerly. Exits with 1
if the samples differ, relative to the largest value, by more than 3e-5 in f32, or in bf16 by more than 1.5 x what
diffusers' own bf16 differs from its f32. Needs torch and diffusers.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # torch needs memory on the same GPU
if "--tiny" in sys.argv:
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import torch
from diffusers import Flux2Transformer2DModel
from report import Goals, emit, interleaved, table

import rlx_jax as rlx

BLOCKS = {"both": (1, 1), "double": (2, 1), "single": (1, 2)}
"""Numbers of double and single blocks: the others show by their difference what one more block takes."""
TINY = {"attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 24, "in_channels": 8,
        "axes_dims_rope": [4, 4, 4, 4]}  # fmt: skip


def model(kind: str, tiny: bool) -> Any:
    """A random model in f32 on the CPU."""
    torch.manual_seed(0)
    double, single = BLOCKS[kind]
    return Flux2Transformer2DModel(num_layers=double, num_single_layers=single, **(TINY if tiny else {})).eval()


def inputs(config: Any, image: int, text: int) -> dict[str, torch.Tensor]:
    """One row, under the names of diffusers."""
    side = int(image**0.5)
    image_ids = torch.cartesian_prod(torch.arange(1), torch.arange(side), torch.arange(side), torch.arange(1))
    return {
        "hidden_states": torch.randn(1, side * side, config.in_channels),
        "encoder_hidden_states": torch.randn(1, text, config.joint_attention_dim),
        "timestep": torch.tensor([0.6]),
        "img_ids": image_ids,
        "txt_ids": torch.cartesian_prod(*[torch.arange(1)] * 3, torch.arange(text)),
        "guidance": torch.tensor([4.0]),
    }


def to_device(values: Mapping[str, torch.Tensor], device: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The inputs on a device, floats in `dtype`."""
    return {n: v.to(device, dtype if v.is_floating_point() else v.dtype) for n, v in values.items()}


def relative_error(got: Any, want: np.ndarray[Any, Any]) -> float:
    """The largest difference, relative to the largest value."""
    return float(np.abs(np.asarray(got, np.float32) - want).max() / np.abs(want).max())


def measure(kind: str, arguments: argparse.Namespace, goals: Goals) -> dict[str, float]:
    """Median milliseconds of both sides for one choice of blocks."""
    tiny = arguments.tiny
    device, dtype = ("cpu", torch.float32) if tiny else ("cuda", torch.bfloat16)
    reference = model(kind, tiny)
    tensors = inputs(reference.config, arguments.image, arguments.text)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        reference.to(dtype).save_pretrained(folder)
        reference.to(device)
        values = to_device(tensors, device, dtype)
        profile = rlx.CompileProfile().replace(precision={"compute": "f32" if tiny else "bf16"})
        ours = rlx.compile(rlx.from_pretrained(folder), profile=profile)
        arrays = {
            n: jax.device_put(v.numpy().astype(np.int32 if "ids" in n else np.float32)) for n, v in tensors.items()
        }
        theirs = reference(**values).sample.float().cpu().numpy()
        if tiny:
            goals.at_most(f"{kind}: error", relative_error(ours(**arrays), theirs), 3e-5)
        else:
            exact = reference.float()(**to_device(tensors, device, torch.float32)).sample.cpu().numpy()
            goals.at_most(
                f"{kind}: bf16 error", relative_error(ours(**arrays), exact), 1.5 * relative_error(theirs, exact)
            )
            reference.to(dtype)

        def torch_call() -> None:
            reference(**values)
            if device == "cuda":
                torch.cuda.synchronize()

        calls = {"rlx_jax": lambda: ours(**arrays).block_until_ready(), "diffusers": torch_call}
        for call in calls.values():
            call()
        times = interleaved(calls, arguments.rounds)
    return {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--image", type=int, default=4096, help="image tokens, a square")
    parser.add_argument("--text", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.image, arguments.text, arguments.rounds = 16, 5, 5
    goals, rows = Goals(), []
    ms_by_kind = {kind: measure(kind, arguments, goals) for kind in BLOCKS}
    ms_by_kind |= {
        f"one {kind} block": {name: ms_by_kind[kind][name] - ms_by_kind["both"][name] for name in ms_by_kind["both"]}
        for kind in ("double", "single")
    }
    for name, times in ms_by_kind.items():
        rows.append([name, *(f"{ms:.2f}" for ms in times.values()), f"{times['rlx_jax'] / times['diffusers']:.3f}"])
        emit(case=name, image=arguments.image, text=arguments.text, **times)
    print(table(["ms", "rlx_jax", "diffusers", "ratio"], rows))
    goals.exit()


if __name__ == "__main__":
    main()
