"""What is released: wheel and sdist are built, and the wheel is used where there is no checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf

import cocod_accel
from cocod_accel.report import read_summary
from tests.test_trainer import BIN, ROOT, TINY

VERSION = cocod_accel.__version__
LEFT_OUT = (".git", ".venv*", ".*_cache", ".hypothesis", "__pycache__", "*.egg-info", "dist")
#: What runs leave behind in the checkout; rooms of the package have the same names.
LEFT_AT_TOP = {"runs", "data", "wandb", "site", "report"}


def _left_out(folder: str, names: list[str]) -> set[str]:
    return shutil.ignore_patterns(*LEFT_OUT)(folder, names) | (LEFT_AT_TOP if Path(folder) == ROOT else set())


def run(*line: str, cwd: Path, seconds: float = 100) -> str:
    """Outside the checkout, and without its path; what it says on stdout."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(line, cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@dataclass(frozen=True)
class Built:
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """From a copy, because building leaves folders behind; the wheel is made of the sdist."""
    folder = tmp_path_factory.mktemp("release")
    shutil.copytree(ROOT, folder / "source", ignore=_left_out)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder / "dist"), cwd=folder / "source")
    ((wheel,), (sdist,)) = ((folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz"))
    return Built(wheel, sdist)


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an environment that holds the wheel alone, and sees our dependencies after it."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "--disable-pip-version-check", "--no-cache-dir"]
    run(*pip, "install", "--quiet", "--no-index", "--no-deps", str(built.wheel), cwd=folder)
    site = run(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder).strip()
    # A path in a .pth file comes after its folder, and the .pth files there (of our editable install) are not read.
    (Path(site) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_both_are_named_after_the_one_version(built: Built) -> None:
    assert built.wheel.name == f"cocod_accel-{VERSION}-py3-none-any.whl"
    assert built.sdist.name == f"cocod_accel-{VERSION}.tar.gz"
    for name in ("pyproject.toml", "CITATION.cff"):
        said = re.search(r"^version\s*[:=] *\"?\d", (ROOT / name).read_text(), re.MULTILINE)
        assert said is None, "the version stands in cocod_accel/__init__.py alone"


def test_the_wheel_holds_every_module_its_data_and_the_profiles_and_nothing_else(built: Built) -> None:
    kinds = {".py", ".typed", ".npz", ".LICENSE", ".js", ".css", ".html", ".json"}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "cocod_accel").rglob("*") if path.suffix in kinds}
    given = [path for path in (ROOT / "configs").rglob("*") if path.suffix in (".yaml", ".json")]
    profiles = {f"cocod_accel/{path.relative_to(ROOT)}" for path in given}
    with zipfile.ZipFile(built.wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == package | profiles
    rooms = {path.parent.name for path in (ROOT / "cocod_accel").glob("*/__init__.py")}
    assert {name.split("/")[1] for name in names if name.count("/") > 1} - {"configs"} == rooms
    assert {"cli", "comm", "averaging", "algorithms", "sync", "trainer", "simulator", "report"} < rooms
    assert {name.partition("/")[0] for name in names} == {"cocod_accel"}, "benchmarks and tests stay in the checkout"


def test_the_sdist_holds_what_a_wheel_is_made_of(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "configs/quickstart.yaml"}
    assert not [name for name in names if name.startswith("tests")]


def test_it_is_the_wheel_that_is_imported(installed: Path, tmp_path: Path) -> None:
    code = "import cocod_accel, torch; print(cocod_accel.__file__, cocod_accel.__version__, torch.__file__)"
    own, version, torch = run(str(installed / "python"), "-c", code, cwd=tmp_path).split()
    assert Path(own).is_relative_to(installed.parent)
    assert not Path(torch).is_relative_to(installed.parent)
    assert version == VERSION
    assert run(str(installed / "cocod"), "--version", cwd=tmp_path) == f"cocod {VERSION}\n"


def test_list_names_profiles_that_can_be_used_as_they_are_printed(installed: Path, tmp_path: Path) -> None:
    listed = run(str(installed / "cocod"), "list", cwd=tmp_path).partition("profiles:\n")[2]
    names = [line.split()[0] for line in listed.splitlines()]
    assert {"configs/quickstart.yaml", "configs/tasks/cifar10_vgg16.yaml", "configs/cluster/paper.yaml"} < set(names)
    line = run(str(installed / "cocod"), "train", "configs/quickstart.yaml", "--dry-run", cwd=tmp_path)
    assert re.fullmatch(
        rf"accelerate launch --config_file {installed.parent}/lib/\S+/cocod_accel/configs/accelerate/cpu_2.yaml "
        r"--num_processes 2 -m cocod_accel.train configs/quickstart.yaml\n",
        line,
    )


@pytest.mark.timeout(200)
def test_a_model_is_trained_and_a_page_written_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    """The embedded images, then the page's assets."""
    settings = [setting for setting in TINY if not setting.startswith("task.name")]
    limits = ["task.train_limit=256", "task.test_limit=64", "logging.trackers=[]", "name=run"]
    run(str(installed / "cocod"), "train", "configs/quickstart.yaml", *settings, *limits, cwd=tmp_path)
    summary = read_summary(tmp_path / "runs" / "run")
    assert (summary["num_workers"], summary["steps"]) == (2, 32)
    run(str(installed / "cocod"), "compare", "runs/run", "--out", "page", cwd=tmp_path)
    assert (tmp_path / "page" / "report.html").stat().st_size > 10_000


def test_the_citation_is_whole() -> None:
    cited = OmegaConf.to_container(OmegaConf.load(ROOT / "CITATION.cff"))
    assert isinstance(cited, dict)
    assert cited["cff-version"] == "1.2.0"
    assert cited["license"] == "Apache-2.0"
    assert [author["name"] for author in cited["authors"]] == ["The cocod_accel developers"]
    (paper,) = cited["references"]
    assert (paper["year"], paper["authors"][0]["family-names"], len(paper["authors"])) == (2019, "Shen", 5)


def test_commands_of_the_workflow_are_ours() -> None:
    """What GitHub runs is not run here; that it calls what is there, is."""
    workflow = OmegaConf.to_container(OmegaConf.create((ROOT / ".github/workflows/ci.yml").read_text()))
    assert isinstance(workflow, dict)
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    versions = yaml.safe_load((ROOT / ".github/workflows/torch.yml").read_text())
    (job,) = versions["jobs"].values()
    makefile = (ROOT / "Makefile").read_text()
    assert all(f"\n{target}: " in makefile for target in job["strategy"]["matrix"]["target"])
    assert "bash .ci/run" in commands
    assert (ROOT / ".ci/run").is_file()
    assert any("python -m build" in command for command in commands)
    assert (BIN / "cocod").is_file()


def test_the_oldest_versions_are_those_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = dict(re.findall(r"^(torch|accelerate)>=([\d.]+)", "\n".join(project["dependencies"]), re.MULTILINE))
    recipe = re.search(r"^\.venv-oldest/\.ready: WHAT := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert recipe is not None
    tested = dict(re.findall(r"(torch|accelerate)==([\d.]+)", recipe[1]))
    assert {name: version.removesuffix(".0") for name, version in tested.items()} == floors
    page = (ROOT / "docs/installing.md").read_text()
    assert all(f"{name} {version}" in page for name, version in tested.items())


def test_extras_cover_what_the_base_leaves_out() -> None:
    """The base is small, and every extra that the code names is there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {re.match(r"[\w-]+", requirement)[0] for requirement in project["dependencies"]}  # type: ignore[index]
    assert names == {"accelerate", "omegaconf", "safetensors", "torch", "tqdm"}
    named = set()
    for path in (ROOT / "cocod_accel").rglob("*.py"):
        named |= set(re.findall(r"""(?:missing|require)\("[\w_]+", "(\w+)\"""", path.read_text()))
        named |= set(re.findall(r"""install_command\(['"](\w+)['"]\)""", path.read_text()))
    assert {"vision", "report", "transformers", "lightning", "deepspeed"} <= named <= set(project["optional-dependencies"])
