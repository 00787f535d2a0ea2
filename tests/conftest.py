"""The suite polices itself: a test that leaves a process, a thread, a process group or a changed environment fails."""

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

# The first torch optimizer imports inductor, which names its cache folder.
_OWN_CHANGES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR"}


@pytest.fixture(scope="session", autouse=True)
def _kept_ranks_end_well() -> Iterator[None]:
    yield
    stop_kept_ranks()


@pytest.fixture(autouse=True)
def _leaves_nothing_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    environment = dict(os.environ)
    folder = Path.cwd()
    entries = set(folder.iterdir())
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
    caches = {".pytest_cache", ".hypothesis", "__pycache__"}
    left = {path.name for path in set(folder.iterdir()) - entries} - caches
    assert not left, f"the test left files in the working directory: {sorted(left)}"
