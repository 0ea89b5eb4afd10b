"""Does the page of an inspection open fast, and do its parts work together?

    python benchmarks/page.py [--chromium /usr/bin/chromium] [--output DIR]

Writes the pages of a Llama of 1B parameters, compiled without weights, and of one of 64 unrolled layers, measured and
compared with a scan over its layers; opens them in headless Chromium, 1,440 and 400 pixels wide, light and dark; and
selects, searches and moves by keys as a reader does. With --output it keeps pages and screenshots. Exits with 1 if a
page takes longer than its goal, a check fails, or the console has an error.
"""

from __future__ import annotations

import argparse
import base64
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

import rlx_jax as rlx
from rlx_jax.inspection.page import Page
from rlx_jax.ir.text import TextTable
from rlx_jax.models.llama import Llama32Flow, LlamaConfig, weight_specs

GOALS = {"1b": 1.5, "64-layers": 2.0}  # seconds
SIZES, SCHEMES = {1440: 900, 400: 800}, ("light", "dark")


class Browser:
    """Chromium, driven over a pipe by the DevTools protocol. Use it as a context manager."""

    def __init__(self, program: str) -> None:
        self.home = tempfile.TemporaryDirectory(prefix="rlx-page-")
        (child_in, self.out), (self.into, child_out) = os.pipe(), os.pipe()
        flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
        # Chromium reads commands from descriptor 3 and writes answers to 4.
        command = f'exec "$@" 3<&{child_in} 4>&{child_out} 2>/dev/null'
        options = (*flags, f"--user-data-dir={self.home.name}", "--remote-debugging-pipe")
        self.process = subprocess.Popen(["bash", "-c", command, "-", program, *options], pass_fds=(child_in, child_out))
        os.close(child_in)
        os.close(child_out)
        self.numbers, self.data, self.session = itertools.count(1), b"", ""
        self.errors: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self.session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.send("Emulation.setScrollbarsHidden", hidden=True)  # in pictures they would hide the right border
        for domain in ("Page", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.home.cleanup()

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command, and return its result; errors of the page on the way are kept in `errors`."""
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": params}
        os.write(self.out, json.dumps(message | ({"sessionId": self.session} if self.session else {})).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result

    def receive(self) -> dict[str, Any]:
        """Return the next message of the browser."""
        while b"\0" not in self.data:
            part = os.read(self.into, 1 << 20)
            if not part:
                raise RuntimeError("Chromium ended")
            self.data += part
        text, _, self.data = self.data.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        if message.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Runtime.consoleAPICalled"):
            self.errors.append(json.dumps(message["params"])[:500])
        return message

    def run(self, script: str) -> Any:
        """Return the value of a JavaScript expression, awaited."""
        answer = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{script}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def key(self, key: str) -> None:
        """Press a key."""
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key)

    def open(self, url: str) -> float:
        """Open an address, and return the seconds until the page is drawn."""
        self.send("Page.navigate", url="about:blank")
        self.send("Page.navigate", url=url)
        drawn = "new Promise((done) => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            pass
        return float(self.run(drawn)) / 1000


# Checks: name, and a JavaScript expression of the page that is true.
ROWS = "(kind, mark) => [...document.querySelectorAll(`.row.${kind}${mark}`)].filter((row) => !row.hidden)"


def check(browser: Browser, url: str) -> list[str]:
    """Return the names of the checks that fail on a page."""
    failed: list[str] = []

    def expect(name: str, expression: str) -> None:
        # A frame later: sections are filled by an event.
        frame = "await new Promise(requestAnimationFrame)"
        if not browser.run(f"(async () => {{ {frame}; const rows = {ROWS}; return Boolean({expression}); }})()"):
            failed.append(name)

    selected = "rows('block', '.picked').length === 1"
    related = f"{selected} && rows('op', '.related').length && rows('kernel', '.related').length"
    expect("no wider than the window", "document.documentElement.scrollWidth <= innerWidth")
    expect(
        "sections are empty until opened", "!document.querySelector('#sections details:not([open]) > :not(summary)')"
    )
    browser.run(f"({ROWS})('block', '').find((row) => row.id.endsWith('.mlp')).click()")
    expect("a block marks its ops and kernels", related)
    expect("marked ops are the block's", "rows('op', '.related').every((row) => row.id.includes('.mlp'))")
    address = browser.run("location.href")
    browser.key("ArrowDown")
    expect("an arrow moves the selection", f"{selected} && location.href !== {json.dumps(address)}")
    browser.key("ArrowRight")
    expect("an arrow goes to the ops", "rows('op', '.picked').length && document.activeElement.ariaLabel === 'Ops'")
    expect("an op marks its block and kernels", "rows('block', '.related').length")
    browser.key("ArrowRight")
    expect("an arrow goes to the kernels", "rows('kernel', '.picked').length && rows('block', '.related').length")
    browser.key("Escape")
    expect("Escape clears", "!location.hash.slice(1) && !document.querySelector('.picked, .related')")
    browser.key("/")
    for letter in "norm":
        browser.key(letter)
    expect("/ searches", "rows('block', '').length && rows('block', '').every((row) => row.id.includes('norm'))")
    browser.key("Enter")
    expect("Enter selects the first result", f"{selected} && document.activeElement.ariaLabel === 'Blocks'")
    browser.open(address)
    expect("the address selects", f"rows('block', '.picked').length === 1 && ({related})")
    count = browser.run(f"({ROWS})('block', '').length")
    browser.run("document.querySelector('.list').focus()")
    browser.key("Enter")
    expect("Enter closes a block", f"rows('block', '').length < {count}")
    browser.run("document.querySelectorAll('#sections details').forEach((section) => { section.open = true; })")
    expect("sections open", "document.querySelectorAll('#sections details > :not(summary)').length >= 3")
    return failed


def llama(layers: int, hidden: int, inner: int, vocab: int, heads: int) -> LlamaConfig:
    return LlamaConfig.from_hf({
        "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "vocab_size": vocab, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 4),
        "rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 5e5, "hidden_act": "silu",
        "tie_word_embeddings": False,
    })  # fmt: skip


def pages() -> dict[str, Page]:
    """Return the pages by name."""
    config = llama(16, 2048, 8192, 128256, 32)
    specs = {key: jax.ShapeDtypeStruct(spec.shape, np.float32) for key, spec in weight_specs(config).items()}
    tokens = jax.ShapeDtypeStruct((1, 128), np.int32)
    small = llama(64, 64, 128, 512, 4)
    arrays = {key: np.full(spec.shape, 0.01, np.float32) for key, spec in weight_specs(small).items()}
    unrolled, scanned = (
        rlx.compile(Llama32Flow(small), arrays, profile=rlx.CompileProfile().replace(layers={"roll": roll}))
        for roll in ("unroll", "scan")
    )
    ids = np.ones((1, 32), np.int32)
    return {
        "1b": rlx.compile(Llama32Flow(config), specs).show(tokens),
        "64-layers": unrolled.show(ids, compare=[scanned.explain(ids)]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="the page of an inspection in Chromium")
    parser.add_argument("--chromium", default=os.environ.get("CHROMIUM", "/usr/bin/chromium"), help="$CHROMIUM")
    parser.add_argument("--output", metavar="DIR", help="keep the pages and screenshots here")
    args = parser.parse_args()
    rows, good = [], True
    with tempfile.TemporaryDirectory() as temporary, Browser(args.chromium) as browser:
        folder = Path(args.output or temporary).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        for (name, page), (width, height) in itertools.product(pages().items(), SIZES.items()):
            file = folder / f"{name}.html"
            page.save(file, overwrite=True)
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            browser.send("Emulation.setDeviceMetricsOverride", **size)
            seconds = sorted(browser.open(file.as_uri()) for _ in range(3))[1]
            failed = check(browser, file.as_uri())
            for scheme in SCHEMES:
                features = [{"name": "prefers-color-scheme", "value": scheme}]
                browser.send("Emulation.setEmulatedMedia", features=features)
                picture = browser.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
                (folder / f"{name}-{width}-{scheme}.png").write_bytes(base64.b64decode(picture))
            good &= seconds <= GOALS[name] and not failed and not browser.errors
            problems = "; ".join([*failed, *browser.errors]) or "none"
            rows.append((name, width, f"{len(page.html) / 1e3:,.0f} kB", f"{seconds:.2f} s", GOALS[name], problems))
    print(TextTable(rows, ("page", "pixels", "size", "opens in", "goal", "problems"), left=1))
    sys.exit(not good)


if __name__ == "__main__":
    main()
