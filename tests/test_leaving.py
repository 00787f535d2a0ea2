"""A run that has done its work exits with 0, however late gloo's threads let go of their last collective."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
#: Keeps a thread of gloo busy for a while after it has woken the main thread, as a busy machine would.
SLOW_THREADS = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <time.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
int pthread_cond_broadcast(pthread_cond_t *condition) {
    int (*real)(pthread_cond_t *) = dlsym(RTLD_NEXT, "pthread_cond_broadcast");
    int result = real(condition);
    char name[17] = {0};
    prctl(PR_GET_NAME, name);
    if (!strcmp(name, "pt_gloo_runloop"))
        for (double end = now() + atof(getenv("SLOW_SECONDS")); now() < end;);
    return result;
}
"""
#: What a user's script does last: gather something, and end.
SCRIPT = """
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from cocod_accel import CoCoDSGD, attach

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(8, 8)
model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
attach(model, optimizer, CoCoDSGD(period=2))
print(gather_object([accelerator.process_index]))
accelerator.end_training()
"""


@pytest.mark.timeout(180)
@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
@pytest.mark.parametrize("seconds", ["0.005", pytest.param("0.01", marks=pytest.mark.slow)])
def test_threads_that_are_late_do_not_abort_it(seconds: str, tmp_path: Path) -> None:
    """Without the wait the process aborts, at 0.005 nearly always."""
    (tmp_path / "slow.c").write_text(SLOW_THREADS)
    (tmp_path / "script.py").write_text(SCRIPT)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "slow.so", tmp_path / "slow.c", "-ldl"], check=True)
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        str(tmp_path / "script.py"),
    ]
    environment = {
        **os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": str(tmp_path / "slow.so"), "SLOW_SECONDS": seconds,
    }  # fmt: skip
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(launch, env=environment, **pipes)
    try:
        out, err = process.communicate(timeout=35)
    except subprocess.TimeoutExpired:
        process.terminate()  # the launcher ends its workers
        process.communicate(timeout=40)
        raise
    assert process.returncode == 0, f"{seconds} s: {err}"
    assert out.count("[0, 1]") == 2
