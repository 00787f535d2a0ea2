"""The suite polices itself: a test that leaves a process, a thread, a process group or a changed environment fails.

Run by several pytest workers at once (``-n 2``), each has a working folder of its own, made of links to what the checkout
holds, so that a file left behind is seen by the test that left it. What commands leave in the checkout itself is seen at
the end of the session.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from tests.workers import kept_pids, stop_kept_ranks

settings.register_profile("repo", deadline=None, max_examples=60, derandomize=True, print_blob=True)
settings.load_profile("repo")
# As in every worker. The models are tiny: more threads only wait for each other, for most of a minute on a busy machine.
torch.set_num_threads(1)

# Importing wandb takes as long as a small run. Tests of what it is told take this away again.
os.environ["WANDB_MODE"] = "disabled"
# Else torchft's lighthouse reports every question. Read when the server of workers imports it.
os.environ["RUST_LOG"] = "error"

ROOT = Path(__file__).parents[1]
# The first torch optimizer imports inductor, which names its cache folder.
_OWN_CHANGES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}
_CACHES = {".pytest_cache", ".hypothesis", ".mypy_cache", ".ruff_cache", "__pycache__"}
# The longest files first: the pytest worker that takes the last one decides when the session ends.
_LONG = (
    "test_tutorials", "test_resume", "test_trainer", "test_reproduce", "test_examples", "test_deepspeed", "test_hf",
    "test_plan", "test_mixed", "test_learning", "test_bench", "test_release", "test_site", "test_payload", "test_launch",
)  # fmt: skip
_CHECKOUT = pytest.StashKey[set[str]]()


def _entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - _CACHES


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.stash[_CHECKOUT] = _entries(ROOT)


def pytest_sessionfinish(session: pytest.Session) -> None:
    before = session.config.stash.get(_CHECKOUT, None)
    left = _entries(ROOT) - before if before is not None else set()
    if left:
        reporter = session.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            reporter.write_line(f"the tests left files in the checkout: {sorted(left)}", red=True)
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    order = {name: number for number, name in enumerate(_LONG)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


@pytest.fixture(scope="session", autouse=True)
def _folder_of_its_own(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    if not hasattr(request.config, "workerinput"):
        yield
        return
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in _CACHES:
            (folder / path.name).symlink_to(path)
    before = Path.cwd()
    os.chdir(folder)
    yield
    os.chdir(before)


@pytest.fixture(scope="session", autouse=True)
def _kept_ranks_end_well() -> Iterator[None]:
    yield
    stop_kept_ranks()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    environment = dict(os.environ)
    folder = Path.cwd()
    entries = _entries(folder)
    threads = {thread.ident for thread in threading.enumerate()}
    torch.manual_seed(0)
    yield
    assert not dist.is_initialized(), "the test left a process group behind"
    left_processes = [child for child in multiprocessing.active_children() if child.pid not in kept_pids()]
    assert not left_processes, f"the test left a process behind: {left_processes}"
    new_threads = [thread for thread in threading.enumerate() if thread.ident not in threads and not thread.daemon]
    assert not new_threads, f"the test left threads behind: {new_threads}"
    changed = {
        name
        for name in environment.keys() | os.environ.keys()
        if environment.get(name) != os.environ.get(name) and name not in _OWN_CHANGES
    }
    assert not changed, f"the test left the environment changed: {sorted(changed)}"
    assert Path.cwd() == folder, "the test left another working directory"
    left = _entries(folder) - entries
    assert not left, f"the test left files in the working directory: {sorted(left)}"
