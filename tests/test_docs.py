"""The code of README.md and of the pages in docs/ runs.

Every block fenced as ```python runs, in order, the blocks of one page in one namespace and in a directory of the
page's own. The paths that pages load from exist there: `path/to/llama` and `path/to/bert` are tiny random
checkpoints, `path/to/model.gguf` is one as a file, `path/to/awq` is quantised, `path/to/classifier`,
`path/to/reranker`, `path/to/tagger`, `path/to/answerer` and `path/to/masked` have a head, `path/to/minilm` is the real
encoder;
the first is also the model `HUB` of a hub on this machine. Blocks fenced otherwise (```text, ```sh) are not run.
"""

import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import jax
import pytest

from rlx_jax.demo import minilm_directory
from tests.hub_server import Hub, serving
from tests.oracles.checkpoints import FIXTURES, copy
from tests.oracles.gguf_files import write_gguf

ROOT = Path(__file__).parents[1]
QUICK = ("adding-a-pass", "checkpoints", "compile-steps", "errors", "fusion", "graph", "models", "plugins", "stages")
"""Pages of the default suite; the others compile many programs."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
HUB = "meta-llama/Llama-3.2-1B-Instruct"
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TINY = {"llama": FIXTURES / "llama" / "gqa_tied_llama3_v5", "bert": FIXTURES / "bert" / "bare_v5"}
TINY |= {"dinov2": FIXTURES / "vision" / "dinov2", "clip": FIXTURES / "vision" / "dual" / "clip"}


def python_blocks(page: str) -> Iterator[str]:
    """The code of a page, each block behind as many empty lines as stand before it: errors name the page's lines."""
    for block in FENCE.finditer(page):
        if block[1] == "python":
            yield "\n" * page.count("\n", 0, block.start(2)) + block[2]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_fences_are_known(page: Path) -> None:
    """A misspelt fence would hide code from the test below."""
    text = page.read_text("utf-8")
    assert text.count("```") == 2 * len(FENCE.findall(text)), "an indented or unclosed fence"
    assert {block[1] for block in FENCE.finditer(text)} <= {"python", "text", "sh", "toml", "json"}
    assert not re.findall(r"^(?:<{7}|>{7}) .*$", text, re.MULTILINE), "an unresolved merge conflict"


def test_index_links_every_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text("utf-8")
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\(([\w-]+\.md)\)", index)) == pages


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what pages load, of which each page has a copy."""
    here = tmp_path_factory.mktemp("pages")
    for name, fixture in TINY.items():
        copy(fixture, here / "path" / "to" / name)
    write_gguf(FIXTURES / "mistral" / "full_v4", here / "path" / "to" / "model.gguf")
    with zipfile.ZipFile(FIXTURES / "quantized.zip") as archive:
        names = [name for name in archive.namelist() if name.startswith("awq/")]
        archive.extractall(here / "path" / "to", names)
    with zipfile.ZipFile(FIXTURES / "classifiers.zip") as archive:
        archive.extractall(here / "classifiers")
    for name, recorded in (("classifier", "bert"), ("reranker", "rerank")):
        (here / "path" / "to" / name).symlink_to(Path("..", "..", "classifiers", recorded))
    with zipfile.ZipFile(FIXTURES / "text_heads.zip") as archive:
        archive.extractall(here / "text_heads")
    for name, recorded in (("tagger", "tags"), ("answerer", "answers"), ("masked", "masks")):
        (here / "path" / "to" / name).symlink_to(Path("..", "..", "text_heads", recorded))
    with zipfile.ZipFile(FIXTURES / "image_classifiers.zip") as archive:
        archive.extractall(here / "image_classifiers")
    (here / "path" / "to" / "vit-classifier").symlink_to(Path("..", "..", "image_classifiers", "vit"))
    (here / "path" / "to" / "minilm").symlink_to(minilm_directory())
    return here


@pytest.mark.parametrize("page", [
    pytest.param(page, marks=() if page.stem in QUICK else pytest.mark.slow, id=page.stem)
    for page in PAGES if "\n```python\n" in page.read_text("utf-8")
])  # fmt: skip
def test_code_runs(page: Path, checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page, from top to bottom."""
    shutil.copytree(checkpoints, tmp_path, symlinks=True, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    hub = Hub()
    hub.add(HUB, TINY["llama"])
    with serving(hub):
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
        run_page(page)
        huggingface_hub.close_session()


def run_page(page: Path) -> None:
    """The blocks, as a reader's JAX is set."""
    namespace: dict[str, object] = {"__name__": "__main__"}  # as where a reader runs it
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        for code in python_blocks(page.read_text("utf-8")):
            exec(compile(code, str(page), "exec", dont_inherit=True), namespace)
