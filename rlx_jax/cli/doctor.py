"""`rlx-jax doctor`: report installed versions and devices, and how to install what is missing."""

from __future__ import annotations

import argparse
import glob
import importlib.metadata
import platform
import re
from collections.abc import Iterator

import jax

import rlx_jax as rlx
from rlx_jax.cli.command import Command, Session, add_json, json_line, table
from rlx_jax.device import describe_device
from rlx_jax.ir.text import format_bytes

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_EXTRA = re.compile(r"""extra\s*==\s*["']([\w-]+)["']""")


def doctor(args: argparse.Namespace, session: Session) -> Iterator[str]:
    """Write versions, devices, and which extras are installed or missing. It downloads and changes nothing."""
    base, extras = requirements()
    versions: dict[str, str | None] = {"rlx-jax": rlx.__version__, "python": platform.python_version()}
    versions |= {name: installed_version(name) for name in base}
    devices = [
        {"kind": d.device_kind, "platform": d.platform, "id": d.id, "memory_bytes": describe_device(d).memory}
        for d in jax.devices()
    ]
    missing_by_extra = {extra: [n for n in names if installed_version(n) is None] for extra, names in extras.items()}
    advice = [
        *accelerator_advice(),
        *(f"{name} is missing: pip install {name}" for name in base if installed_version(name) is None),
    ]
    if args.json:
        yield json_line({"versions": versions, "devices": devices, "missing": missing_by_extra, "advice": advice})
        return
    yield from table({name: version or "missing" for name, version in versions.items()})
    yield "\n"
    for d in devices:
        memory = "memory not known" if d["memory_bytes"] is None else format_bytes(d["memory_bytes"])
        yield f"device  {d['kind']} ({d['platform']}:{d['id']}), {memory}\n"
    yield "\n"
    for extra, names in missing_by_extra.items():
        status = f"missing {', '.join(names)}: pip install 'rlx-jax[{extra}]'" if names else "installed"
        yield f"extra {extra:<8} {status}\n"
    yield from (f"\n{line}\n" for line in advice)


def requirements() -> tuple[list[str], dict[str, list[str]]]:
    """Return the names of the required packages, and of the packages of each extra, from the metadata of rlx-jax."""
    try:
        lines = importlib.metadata.requires("rlx-jax") or []
    except importlib.metadata.PackageNotFoundError:  # rlx_jax is imported from a checkout, without installation
        return ["jax", "jaxlib", "numpy", "safetensors", "tokenizers"], {}
    base: list[str] = []
    extras: dict[str, list[str]] = {}
    for line in lines:
        name_match, extra = _NAME.match(line), _EXTRA.search(line)
        if name_match is not None:
            (base if extra is None else extras.setdefault(extra[1], [])).append(name_match[0])
    return base, extras


def installed_version(name: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def accelerator_advice() -> list[str]:
    """Return advice if the machine has a GPU or a TPU that JAX does not use; [] otherwise."""
    if any(d.platform != "cpu" for d in jax.devices()):
        return []
    if glob.glob("/dev/nvidia[0-9]*"):
        return ["This machine has an NVIDIA GPU, and JAX runs on the CPU: pip install 'jax[cuda13]'"]
    if glob.glob("/dev/kfd"):
        return ["This machine has an AMD GPU, and JAX runs on the CPU: see JAX's page on installation for ROCm"]
    if glob.glob("/dev/accel[0-9]*"):
        return ["This machine has a TPU, and JAX runs on the CPU: pip install 'jax[tpu]'"]
    return []


DOCTOR = Command("doctor", "what is installed, and what is missing", (add_json,), doctor)
