"""What the documentation site takes from the source at build time: every setting, the public interface, formulas.

A hook of mkdocs. Nothing of the package is imported: dataclasses, signatures, docstrings and ``#:`` comments are read as
text, so that a build needs neither torch nor a file that could be out of date.
"""

from __future__ import annotations

import ast
import html
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PACKAGE = Path(__file__).parents[1] / "cocod_accel"

#: Trees of settings: title, module, its root, how the page begins.
TREES = (
    (
        "A run",
        "config/settings",
        "Config",
        "Of `cocod train`, `cocod plan`, `cocod simulate` and `accelerate launch -m cocod_accel.train`: YAML files are "
        "merged in their order, then `key.sub=value` overrides. Unknown keys, wrong types and impossible combinations are "
        "one line and exit code 2. `${key.sub}` interpolates. What keys do together: [training](../training.md).",
    ),
    (
        "A cluster",
        "simulator/cluster",
        "Cluster",
        "The file that `cocod simulate` and `cocod plan --cluster` read and `cocod plan` writes: "
        "[simulating](../simulate.md#a-cluster-file).",
    ),
    (
        "A benchmark",
        "../benchmarks/links/settings",
        "BenchSettings",
        "Of `make bench`; `configs/bench/links.yaml` holds the defaults: [benchmarks](../benchmarks.md).",
    ),
)

#: The public interface in the order in which a reader meets it; the rest of ``cocod_accel.__all__`` would be an error.
API = {
    "Attaching": ("attach", "Sync", "Stats", "serve", "Served"),
    "Algorithms": (
        "Algorithm",
        "SSGD",
        "PipeSGD",
        "LocalSGD",
        "CoCoDSGD",
        "AsynLocalSGD",
        "DiLoCo",
        "StreamingDiLoCo",
        "ASGD",
        "Outer",
        "ALGORITHMS",
    ),
    "Workers that come and go": ("Members", "MembersError"),
    "Batches by speed": ("measure_speeds", "Measured", "plan_workers", "WorkPlan", "ShardSampler", "pass_through"),
    "Checkpoints": ("Checkpoints", "Resumed", "CheckpointError", "export_model"),
    "Sharded models": ("node_mpu", "node_parallelism", "zero_inside"),
}
#: What a loop calls of a class whose other methods are there for the trainer.
CALLS = {
    "Sync": (
        *("averaged", "finish", "reweight", "stats", "plan", "state_dict", "load_state_dict", "detach"),
        *("rank", "num_workers", "weight", "attempts", "is_round_start"),
    ),
    "Checkpoints": ("save", "resume", "all"),
}


# ---------------------------------------------------------------------------------------------- reading source


@dataclass(frozen=True)
class Module:
    """A source file: its statements, and its lines for the comments that these do not keep."""

    tree: ast.Module
    lines: list[str]

    @classmethod
    def read(cls, name: str) -> Module:
        text = (PACKAGE / f"{name}.py").read_text()
        return cls(ast.parse(text), text.splitlines())

    def find(self, name: str) -> Any:
        for node in self.tree.body:
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if getattr(node, "name", None) == name or any(getattr(target, "id", None) == name for target in targets):
                return node
        raise KeyError(name)

    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    def imported(self) -> dict[str, str]:
        """Names that come from elsewhere in the package, and the file they come from."""
        return {
            alias.name: node.module.removeprefix("cocod_accel.").replace(".", "/")
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.module is not None
            for alias in node.names
        }

    def comment(self, node: ast.stmt) -> str:
        """The ``#:`` lines right above a statement."""
        lines: list[str] = []
        for line in reversed(self.lines[: node.lineno - 1]):
            if not line.strip().startswith("#:"):
                break
            lines.insert(0, line.strip()[2:].strip())
        return " ".join(lines)


def fields_of(node: ast.ClassDef) -> Iterator[tuple[str, ast.AnnAssign]]:
    """The fields of a dataclass, by name."""
    for entry in node.body:
        if (
            isinstance(entry, ast.AnnAssign)
            and isinstance(entry.target, ast.Name)
            and "ClassVar" not in ast.unparse(entry.annotation)
        ):
            yield entry.target.id, entry


# ------------------------------------------------------------------------------------------ every setting


@dataclass(frozen=True)
class Setting:
    """A key of a tree of settings; with a path of its section."""

    section: str
    key: str
    #: Its type, in words.
    kind: str
    default: str
    meaning: str


def settings_of(module: Module, root: str, section: str = "") -> Iterator[tuple[str, str, list[Setting]]]:
    """Every section below a dataclass: its path, what it is for, its keys; the root first."""
    classes = module.classes()
    rows: list[Setting] = []
    below: list[tuple[str, str]] = []
    for name, entry in fields_of(classes[root]):
        kind = ast.unparse(entry.annotation)
        inside = next((word for word in re.findall(r"\w+", kind) if word in classes), None)
        path = f"{section}.{name}" if section else name
        if inside is not None:
            below.append((inside, f"{path}[i]" if kind.startswith("list") else path))
        if inside is None or module.comment(entry):
            rows.append(Setting(section, name, _kind_in_words(kind, inside), _default(entry.value), module.comment(entry)))
    yield section, ast.get_docstring(classes[root]) or "", rows
    for inside, path in below:
        yield from settings_of(module, inside, path)


def _kind_in_words(kind: str, inside: str | None) -> str:
    if inside is not None:
        kind = kind.replace(inside, "section")
    if kind == "Any":
        return "see the meaning"
    return kind.replace("dict[str, Any]", "dict").replace("None", "null").replace(" | ", " or ")


def _default(value: ast.expr | None) -> str:
    """A default as YAML would have it."""
    assert value is not None, "every setting has a default"
    if isinstance(value, ast.Call) and value.keywords:  # field(default_factory=...)
        factory = value.keywords[0].value
        if value.keywords[0].arg == "default":
            value = factory
        elif isinstance(factory, ast.Lambda):
            value = factory.body
        else:
            return {"list": "[]", "dict": "{}"}.get(ast.unparse(factory), "a section")
    try:
        plain = ast.literal_eval(value)
    except ValueError:
        return "all of them" if "EVERYBODY" in ast.unparse(value) else "see the section"
    if isinstance(plain, list):
        return f"[{', '.join(str(entry) for entry in plain)}]"
    if plain is None or isinstance(plain, bool):
        return {None: "null", True: "true", False: "false"}[plain]
    return str(plain) or '""'


def config_reference() -> str:
    """Every key, its type, its default and its meaning."""
    parts = [
        "# Configuration reference\n\nMade from the typed trees in the source when this site is built. A key of a section "
        "is written `section.key` on a command line.\n"
    ]
    for title, module, root, begin in TREES:
        parts.append(f"## {title}\n\n{begin}\n")
        for section, about, rows in settings_of(Module.read(module), root):
            if section:
                parts.append(f"### {section}\n\n{_text(about)}\n")
            parts.append("| key | type | default | meaning |\n| --- | --- | --- | --- |")
            parts += [f"| `{row.key}` | {row.kind} | {_cell(row.default)} | {_text(row.meaning)} |" for row in rows]
            parts.append("")
    return "\n".join(parts)


def _cell(default: str) -> str:
    return default if " them" in default or "section" in default else f"`{default}`"


# -------------------------------------------------------------------------------------- the public interface


def origins() -> dict[str, str]:
    """Every name of ``cocod_accel.__all__`` and the module that defines it."""
    top = Module.read("__init__")
    found: dict[str, str] = {}
    for name in ast.literal_eval(top.find("__all__").value):
        module = top.imported()[name]
        if (PACKAGE / module).is_dir():
            module = Module.read(f"{module}/__init__").imported().get(name, f"{module}/__init__")
        found[name] = module
    return found


def api_reference() -> str:
    """Every public name: its signature and what its docstring says."""
    places = origins()
    missing = set(places) - {name for names in API.values() for name in names}
    assert not missing, f"public, but not in API of {Path(__file__).name}: {sorted(missing)}"
    parts = [
        "# API reference\n\nMade from signatures and docstrings when this site is built. How the parts go together: "
        "[the library interface](../library.md).\n"
    ]
    for title, names in API.items():
        parts.append(f"## {title}\n")
        parts += [_described(Module.read(places[name]), name, "cocod_accel") for name in names]
    parts.append("## Hugging Face Trainer\n")
    parts.append(_described(Module.read("hf"), "CoCoDCallback", "cocod_accel.hf"))
    parts.append("## Lightning\n")
    parts.append(_described(Module.read("lightning"), "CoCoDCallback", "cocod_accel.lightning"))
    return "\n".join(parts)


def _described(module: Module, name: str, place: str) -> str:
    node = module.find(name)
    parts = [f"### {name}\n"]
    if isinstance(node, ast.FunctionDef):
        parts += [_code(_signature(node, f"{place}.{name}")), _prose(node)]
    elif isinstance(node, ast.ClassDef):
        made = None if name == "Sync" else _constructor(node)
        is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
        parts.append(_code(f"class {place}.{name}" if made is None else _signature(made, f"{place}.{name}")))
        parts.append(_prose(node))
        if is_dataclass:
            parts += ["| field | type | meaning |\n| --- | --- | --- |"]
            parts += [
                f"| `{name}` | `{ast.unparse(field.annotation).replace('|', 'or')}` | {_text(module.comment(field))} |"
                for name, field in fields_of(node)
            ]
            parts.append("")
        parts += [
            _method(entry, name) for entry in node.body if isinstance(entry, ast.FunctionDef) and _is_shown(entry, node)
        ]
    else:
        parts += [_code(ast.unparse(node)), "The algorithms by name.\n"]
    return "\n".join(parts)


def _constructor(node: ast.ClassDef) -> ast.FunctionDef | None:
    """Its own, or that of the public class it is made from."""
    for entry in node.body:
        if isinstance(entry, ast.FunctionDef) and entry.name == "__init__":
            return entry
    base = ast.unparse(node.bases[0]) if node.bases else ""
    places = origins()
    return _constructor(Module.read(places[base]).find(base)) if base in places else None


def _is_shown(method: ast.FunctionDef, owner: ast.ClassDef) -> bool:
    if owner.name in CALLS:
        return method.name in CALLS[owner.name]
    is_another = any(ast.unparse(base) in origins() for base in owner.bases)  # what it overrides is described there
    return not is_another and not method.name.startswith("_") and ast.get_docstring(method) is not None


def _method(node: ast.FunctionDef, owner: str) -> str:
    decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
    if "property" in decorators:
        shown = f"{node.name}: {ast.unparse(node.returns)}" if node.returns else node.name
    else:
        shown = _signature(node, node.name)
        shown = f"with {shown}:" if "contextmanager" in decorators else shown
    return f"#### {owner}.{node.name}\n\n{_code(shown)}\n{_prose(node)}"


def _signature(node: ast.FunctionDef, name: str) -> str:
    """On one line if it fits, else an argument a line."""
    given = node.args
    defaults: list[ast.expr | None] = [None] * (len(given.args) - len(given.defaults)) + list(given.defaults)
    shown = [
        _argument(arg, default) for arg, default in zip(given.args, defaults, strict=True) if arg.arg not in ("self", "cls")
    ]
    if given.kwonlyargs:
        shown.append("*")
        shown += [_argument(arg, default) for arg, default in zip(given.kwonlyargs, given.kw_defaults, strict=True)]
    returns = ast.unparse(node.returns) if node.returns is not None else "None"
    end = "" if returns == "None" else f" -> {returns.replace('Iterator[None]', 'context')}"
    end = "" if end == " -> context" else end
    line = f"{name}({', '.join(shown)}){end}"
    if len(line) <= 90:
        return line
    return f"{name}(\n" + "".join(f"    {entry},\n" for entry in shown) + f"){end}"


def _argument(arg: ast.arg, default: ast.expr | None) -> str:
    kind = f": {ast.unparse(arg.annotation)}" if arg.annotation is not None else ""
    return f"{arg.arg}{kind}" + ("" if default is None else f" = {ast.unparse(default)}")


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _prose(node: Any) -> str:
    """A docstring as Markdown: ``Args:`` become a list, indented examples after ``::`` become blocks of code."""
    lines = (ast.get_docstring(node) or "").splitlines()
    parts: list[str] = []
    while lines:
        line = lines.pop(0)
        if line.strip() == "Args:":
            block = _indented(lines)
            entries = re.split(r"\n(?=\S)", textwrap.dedent("\n".join(block)))
            parts += ["", *(f"* {_argument_line(' '.join(entry.split()))}" for entry in entries if entry.strip()), ""]
        elif line.rstrip().endswith("::"):
            example = textwrap.dedent("\n".join(_indented(lines))).strip("\n")
            parts += [_text(line.rstrip()[:-1]), "", "```text", example, "```", ""]
        else:
            parts.append(_text(line))
    return "\n".join(parts) + "\n"


def _indented(lines: list[str]) -> list[str]:
    """Take the lines that belong to what is above them."""
    taken: list[str] = []
    while lines and (not lines[0].strip() or lines[0].startswith("    ")):
        taken.append(lines.pop(0))
    return taken


def _argument_line(entry: str) -> str:
    names, _, meaning = entry.partition(":")
    return ", ".join(f"`{name.strip()}`" for name in names.split(",")) + f": {_text(meaning.strip())}"


def _text(text: str) -> str:
    """Prose of the source as Markdown: roles and double backticks are code, and nothing else is markup."""
    text = re.sub(r":\w+:`~?([^`]+)`", lambda match: f"`{match[1].rpartition('.')[2]}`", text.replace("``", "`"))
    pieces = re.split(r"(`[^`]*`)", text)
    escaped = [
        piece if index % 2 else re.sub(r"([*_|\[\]])", r"\\\1", piece.replace("<", "&lt;"))
        for index, piece in enumerate(pieces)
    ]
    return "".join(escaped).replace("\n", " ")


# ------------------------------------------------------------------------------------------------- mkdocs


PAGES = {"reference/config.md": config_reference, "reference/api.md": api_reference}


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made."""
    from mkdocs.structure.files import File

    for name, make in PAGES.items():
        files.append(File.generated(config, name, content=make()))
    return files


def on_page_content(content: str, **_: Any) -> str:
    """Formulas as MathML, which browsers draw by themselves: a page loads no script for it."""
    from latex2mathml.converter import convert

    def drawn(match: re.Match[str]) -> str:
        formula = html.unescape(match[1]).strip()
        return f'<div class="formula" tabindex="0">{convert(formula, display="block")}</div>'

    return re.sub(r'<div class="arithmatex">\s*\\\[(.*?)\\\]\s*</div>', drawn, content, flags=re.DOTALL)
