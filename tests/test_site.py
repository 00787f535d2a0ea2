"""The documentation site: built strictly, whole, without anything from elsewhere, legible on a phone, true to the source."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from omegaconf import OmegaConf

import cocod_accel
from benchmarks.links.settings import BenchSettings
from cocod_accel.algorithms import NAMED
from cocod_accel.config.settings import Config
from cocod_accel.simulator.cluster import Cluster
from tests.browser import CHROMIUM, chromium

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"

needs_mkdocs = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("mkdocs", "material", "latex2mathml")),
    reason="mkdocs-material and latex2mathml are not installed: pip install 'cocod-accel[docs]'",
)


class Document(HTMLParser):
    """What a page refers to, and where in it one can be sent."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        #: (tag, address) of everything that is loaded with the page.
        self.loaded: list[tuple[str, str]] = []
        self.links: list[str] = []
        #: Text of paragraphs; code and formulas left out.
        self.paragraphs: list[str] = []
        self._open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._open.append(tag)
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loaded.append((tag, given.get("href", "")))
        elif "src" in given:
            self.loaded.append((tag, given["src"]))
        if tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if "p" in self._open and not {"code", "math", "script"} & set(self._open):
            self.paragraphs[-1] += data


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert built.returncode == 0, built.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def documents(site: Path) -> dict[Path, Document]:
    return {path: Document(path.read_text()) for path in sorted(site.rglob("*.html"))}


@pytest.fixture(scope="module")
def hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("site_hooks", ROOT / "tools" / "site_hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


# --------------------------------------------------------------------------------------------------- the built site


@needs_mkdocs
def test_nothing_on_a_page_leads_nowhere(site: Path, documents: dict[Path, Document]) -> None:
    assert len(documents) > 25
    broken = []
    for path, document in documents.items():
        if path.name == "404.html":  # its addresses are those of a server's root
            continue
        for address in [*document.links, *(address for _, address in document.loaded)]:
            parts = urlsplit(address)
            if parts.scheme or address.startswith("//"):
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            known = documents[target].anchors if target in documents else {parts.fragment}
            if not target.is_file() or (parts.fragment and unquote(parts.fragment) not in known):
                broken.append(f"{path.relative_to(site)} -> {address}")
    assert broken == []


@needs_mkdocs
def test_no_page_loads_anything_from_elsewhere(site: Path, documents: dict[Path, Document]) -> None:
    foreign = [
        (path.name, *loaded)
        for path, document in documents.items()
        for loaded in document.loaded
        if urlsplit(loaded[1]).scheme not in ("", "data") or loaded[1].startswith("//")
    ]
    assert foreign == []
    for sheet in site.rglob("*.css"):
        found = re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//[^)'\";]+", sheet.read_text())
        assert found == [], sheet.name


@needs_mkdocs
def test_markdown_is_understood_as_it_was_meant(documents: dict[Path, Document]) -> None:
    # A list or a table that follows a paragraph without a blank line would be one more line of it.
    for path, document in documents.items():
        for text in document.paragraphs:
            assert not re.search(r"^\s*([*-] |\d+\. |\|)", text, flags=re.MULTILINE), f"{path.name}: {text[:200]}"
            assert "$$" not in text, f"{path.name}: {text[:200]}"


@needs_mkdocs
def test_formulas_are_drawn(site: Path) -> None:
    source = (DOCS / "theory.md").read_text()
    built = (site / "theory.html").read_text()
    assert built.count('<div class="formula"') == source.count("$$") // 2 > 0
    assert "arithmatex" not in built


@needs_mkdocs
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
@pytest.mark.parametrize("width", [390, 1280])
def test_pages_fit_a_screen(site: Path, tmp_path: Path, width: int) -> None:
    with chromium(tmp_path / "profile") as page:
        for name in ("index", "algorithms/cocod", "reference/config", "features", "theory", "alternatives", "quickstart"):
            page.open(site / f"{name}.html", width=width, height=844)
            wide = page.run("document.documentElement.scrollWidth")
            assert wide <= width, f"{name}: {wide} px on a screen of {width}"
            assert page.run("document.images.length === [...document.images].filter(i => i.naturalWidth).length"), name
            sideways = "[...document.querySelectorAll('.md-content pre, .md-content table')].filter(e => {"
            sideways += "let b = e.getBoundingClientRect(); if (b.right <= innerWidth + 1) return false;"
            sideways += "for (let p = e; p && p !== document.body; p = p.parentElement)"
            sideways += "if (['auto', 'scroll'].includes(getComputedStyle(p).overflowX)) return false; return true}).length"
            assert page.run(sideways) == 0, f"{name}: something wide that does not scroll"
        assert page.complaints == []
        assert [address for address in page.requests if not address.startswith(("file:", "data:", "blob:"))] == []


@needs_mkdocs
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_search_works_from_a_disk(site: Path, tmp_path: Path) -> None:
    with chromium(tmp_path / "profile") as page:
        page.open(site / "index.html")
        page.run("document.querySelector('[data-md-component=search-query]').focus()")
        found = page.run(
            "new Promise((done, fail) => { const i = document.querySelector('[data-md-component=search-query]');"
            "i.value = 'interference'; i.dispatchEvent(new Event('keyup')); i.dispatchEvent(new Event('input'));"
            "const end = Date.now() + 20000; const look = () => {"
            "const n = document.querySelectorAll('.md-search-result__link').length;"
            "if (n || Date.now() > end) done(n); else requestAnimationFrame(look) }; look() })"
        )
        assert found > 0
        assert [address for address in page.requests if not address.startswith(("file:", "data:", "blob:"))] == []


# ------------------------------------------------------------------------------------------- what is made from source


def _keys(tree: Any, section: str = "") -> Iterator[tuple[str, str, Any]]:
    """(section, key, default) of every plain value below a dataclass."""
    for field in dataclasses.fields(tree):
        value = getattr(tree, field.name)
        path = f"{section}.{field.name}" if section else field.name
        if dataclasses.is_dataclass(value):
            yield from _keys(value, path)
        elif isinstance(value, list) and value and dataclasses.is_dataclass(value[0]):
            yield from _keys(value[0], f"{path}[i]")
        else:
            yield section, field.name, value


def test_the_config_reference_has_every_key(hooks: ModuleType) -> None:
    trees = {"Config": Config(), "Cluster": Cluster(), "BenchSettings": BenchSettings()}
    assert [root for _, _, root, _ in hooks.TREES] == list(trees)
    for _, module, root, _ in hooks.TREES:
        tree = trees[root]
        rows = {
            (row.section, row.key): row for _, _, rows in hooks.settings_of(hooks.Module.read(module), root) for row in rows
        }
        for section, key, default in _keys(tree):
            row = rows[section, key]
            assert row.meaning, f"{root}: {section}.{key} has no comment that says what it means"
            if row.default not in ("all of them", "see the section", "a section") and "[i]" not in section:
                read: Any = OmegaConf.to_container(OmegaConf.create(f"value: {row.default}"))
                shown = row.default if isinstance(default, str) and default else read["value"]
                assert (shown, type(shown)) == (default, type(default)), f"{section}.{key}"
    text = hooks.config_reference()
    for section, key, _ in _keys(Config()):
        begin = text.index(f"\n### {section}\n" if section else "\n## A run\n")
        part = text[begin : text.index("\n#", begin + 5)]
        assert f"| `{key}` |" in part, f"{section}.{key}"


def test_the_api_reference_has_every_public_name(hooks: ModuleType) -> None:
    text = hooks.api_reference()
    for name in [*cocod_accel.__all__, "CoCoDCallback"]:
        assert f"\n### {name}\n" in text
    for call in ("averaged", "finish", "reweight", "stats", "state_dict", "load_state_dict", "detach"):
        assert f"\n#### Sync.{call}\n" in text
    assert "Args:" not in text
    assert ":func:" not in text
    assert "weight: float = 1" in text


def test_every_algorithm_has_a_card() -> None:
    assert {path.stem for path in (DOCS / "algorithms").glob("*.md")} == set(NAMED)
    wanted = ["Rule", "Use", "Suggested settings", "When it helps, and when not", "Details", "Limits", "Attribution"]
    for name, kind in NAMED.items():
        text = (DOCS / "algorithms" / f"{name}.md").read_text()
        assert re.findall(r"^## (.*)$", text, flags=re.MULTILINE) == wanted, name
        assert f"{kind.__name__}(" in text
        assert f"algorithm.name={name}" in text


def test_quoted_messages_are_said_by_the_code() -> None:
    """Blocks marked ``text`` in troubleshooting are our own messages; ``…`` is what differs from case to case."""
    said: set[str] = set()
    for path in (ROOT / "cocod_accel").rglob("*.py"):
        tree = ast.parse(path.read_text())
        said |= {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    everything = "\n".join(re.sub(r"%[sd]", "\n", text) for text in said)
    blocks = re.findall(r"^```text\n(.*?)^```", (DOCS / "troubleshooting.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 10
    for line in [line for block in blocks for line in block.splitlines()]:
        for piece in re.split("…|; |: ", line):  # a line may be put together of several
            assert piece.strip() in everything, f"nobody says {piece!r}, quoted in: {line}"


def test_figures_of_the_alternatives_are_those_of_the_benchmark() -> None:
    lines = (DOCS / "benchmarks.md").read_text().splitlines()
    found = re.findall(r"^\| ([\w, ]+) \|((?: \d+\.\d\d \|)+)$", (DOCS / "alternatives.md").read_text(), flags=re.MULTILINE)
    assert len(found) > 5
    for label, figures in found:
        measured = [line[len(label) :] for line in lines if re.match(rf"{label}  ", line)]
        for figure in re.findall(r"\d+\.\d\d", figures):
            assert any(f" {figure} (" in line for line in measured), f"{label}: {figure} is not in benchmarks.md"


def test_links_of_the_readme_lead_somewhere() -> None:
    for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        text = re.sub(r"^```.*?^```", "", (ROOT / name).read_text(), flags=re.MULTILINE | re.DOTALL)
        for address in re.findall(r"\]\(([^)\s]+)\)", text):
            parts = urlsplit(address)
            if not parts.scheme and parts.path:
                assert (ROOT / parts.path).exists(), f"{name} -> {address}"


def test_prose_wraps_at_120_characters() -> None:
    """Tables and formulas cannot be wrapped, and code says what it says."""
    for path in [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), ROOT / "examples" / "README.md", ROOT / "launch" / "README.md"]:
        text = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)
        wide = [line for line in text.splitlines() if len(line) > 120 and not line.startswith(("|", "$$"))]
        assert wide == [], path.name
