"""The launchers in launch/: what they would start, what they refuse, and Slurm's requeue with two real workers."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from cocod_accel import cli
from cocod_accel.config.loading import load_config
from cocod_accel.report import read_summary
from cocod_accel.trainer.launch import threads_of_each
from tests.test_faults import workers_of
from tests.test_trainer import BIN, ROOT, TINY

LAUNCH = ROOT / "launch"
SCRIPTS = sorted(path for path in LAUNCH.rglob("*") if path.suffix in (".sh", ".sbatch"))
CONFIG = "configs/quickstart.yaml"


def launch(script: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a launcher in the repository's folder, with nothing in its environment that it might take for a setting."""
    known = {"HOME": os.environ.get("HOME", "/"), "PATH": f"{BIN}:{os.environ['PATH']}"}
    line, environment = ["bash", f"launch/{script}", *arguments], {**known, **variables}
    return subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=30, check=False)


# ------------------------------------------------------------------------------------------------- dry runs

NODES = {"NNODES": "2", "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1"}
HOSTS = {"HOSTFILE": "launch/hostfile.example"}
PODS = {"IMAGE": "my/image:1", "NNODES": "4", "NPROC_PER_NODE": "2", "CLAIM": "runs"}
DRY_RUNS: list[tuple[str, dict[str, str], str]] = [
    (
        "torchrun_multinode.sh",
        NODES,
        "torchrun --nnodes 2 --node_rank 1 --nproc_per_node auto --master_addr 10.0.0.1 --master_port 29500 "
        "--shutdown_timeout 120 -m cocod_accel.train configs/quickstart.yaml seed=1",
    ),
    (
        "torchrun_multinode.sh",
        {**NODES, "NPROC_PER_NODE": "1", "MASTER_PORT": "4000", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0"},
        "GLOO_SOCKET_IFNAME=eth0 NCCL_SOCKET_IFNAME=ib0 torchrun --nnodes 2 --node_rank 1 --nproc_per_node 1 --master_addr "
        "10.0.0.1 --master_port 4000 --shutdown_timeout 120 -m cocod_accel.train configs/quickstart.yaml seed=1",
    ),
    ("slurm.sbatch", {}, "srun bash launch/slurm_worker.sh configs/quickstart.yaml seed=1"),
    (
        "slurm_heterogeneous.sbatch",
        {"SLURM_HET_SIZE": "2"},
        "srun --het-group=0-1 bash launch/slurm_worker.sh configs/quickstart.yaml seed=1",
    ),
    (
        "deepspeed_hostfile.sh",
        HOSTS,
        "deepspeed --hostfile launch/hostfile.example --master_port 29500 --module cocod_accel.train "
        "configs/quickstart.yaml seed=1 --deepspeed_config configs/deepspeed/stage0.json",
    ),
    (
        "deepspeed_hostfile.sh",
        {**HOSTS, "NODE_RANK": "1", "MASTER_ADDR": "10.0.0.1", "DEEPSPEED_CONFIG": "configs/deepspeed/stage0_bf16.json"},
        "deepspeed --hostfile launch/hostfile.example --master_port 29500 --master_addr 10.0.0.1 --no_ssh --node_rank 1 "
        "--module cocod_accel.train configs/quickstart.yaml seed=1 --deepspeed_config configs/deepspeed/stage0_bf16.json",
    ),
]


@pytest.mark.parametrize(("script", "variables", "line"), DRY_RUNS)
def test_a_dry_run_prints_what_would_be_started(script: str, variables: dict[str, str], line: str) -> None:
    done = launch(script, CONFIG, "seed=1", DRY_RUN="1", **variables)
    assert (done.returncode, done.stdout, done.stderr) == (0, line + "\n", "")


def test_arguments_come_through_as_they_are() -> None:
    arguments = [CONFIG, "algorithm.period=[[0, 1], [1, 5]]", "name=it's", "logging.trackers=[]"]
    done = launch("torchrun_multinode.sh", *arguments, DRY_RUN="1", **NODES)
    assert shlex.split(done.stdout)[-5:] == ["cocod_accel.train", *arguments]


BAD: list[tuple[str, list[str], dict[str, str], str]] = [
    *((script, [], {}, "no configuration; give YAML files and key=value, e.g. configs/quickstart.yaml")
      for script in ("torchrun_multinode.sh", "slurm.sbatch", "slurm_heterogeneous.sbatch", "deepspeed_hostfile.sh")),
    *((script, ["no.yaml"], {}, "no.yaml: no such file; give YAML files and key=value")
      for script in ("torchrun_multinode.sh", "slurm.sbatch", "slurm_heterogeneous.sbatch", "deepspeed_hostfile.sh")),
    ("torchrun_multinode.sh", [CONFIG, "--nnodes"], NODES, "--nnodes: is no YAML file and no key=value"),
    ("torchrun_multinode.sh", [CONFIG], {}, "NNODES is not set; how many machines, e.g. NNODES=2"),
    ("torchrun_multinode.sh", [CONFIG], {**NODES, "NNODES": "two"}, "NNODES=two: must be a whole number of at least 1"),
    ("torchrun_multinode.sh", [CONFIG], {"NNODES": "2"}, "NODE_RANK is not set; which machine this is, from 0"),
    ("torchrun_multinode.sh", [CONFIG], {**NODES, "NODE_RANK": "2"}, "NODE_RANK=2: must be less than NNODES=2"),
    ("torchrun_multinode.sh", [CONFIG], {**NODES, "MASTER_ADDR": ""}, "MASTER_ADDR is not set; the address of machine 0"),
    ("slurm.sbatch", [CONFIG], {}, "no Slurm job; submit it: sbatch launch/slurm.sbatch configs/quickstart.yaml"),
    ("deepspeed_hostfile.sh", [CONFIG], {}, "HOSTFILE is not set; a file with lines such as 'node1 slots=4'"),
    ("deepspeed_hostfile.sh", [CONFIG], {"HOSTFILE": "nohosts"}, "nohosts: no such file"),
    ("deepspeed_hostfile.sh", [CONFIG], {"HOSTFILE": "LICENSE"}, "LICENSE: holds no line such as 'node1 slots=4'"),
    ("deepspeed_hostfile.sh", [CONFIG], {**HOSTS, "DEEPSPEED_CONFIG": "no.json"}, "no.json: no such file"),
    ("deepspeed_hostfile.sh", [CONFIG], {**HOSTS, "NODE_RANK": "0"}, "MASTER_ADDR is not set; the address of the first"),
    ("kubernetes/submit.sh", [], PODS, "no configuration; give YAML files and key=value"),
    ("kubernetes/submit.sh", [CONFIG], {}, "IMAGE is not set"),
    ("kubernetes/submit.sh", [CONFIG], {**PODS, "CLAIM": ""}, "CLAIM is not set"),
    ("kubernetes/submit.sh", [CONFIG], {**PODS, "NNODES": "1"}, "NNODES=1: must be a whole number of at least"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "arguments", "variables", "message"), BAD)
def test_bad_input_is_one_line(script: str, arguments: list[str], variables: dict[str, str], message: str) -> None:
    done = launch(script, *arguments, **variables)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: {message}")
    assert done.stdout == ""


def test_slurm_is_submitted_from_the_folder_that_holds_launch(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", str(LAUNCH / "slurm.sbatch"), CONFIG], cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 2
    assert done.stderr == "error: launch/common.sh: no such file; submit from the folder that holds launch/\n"


# ------------------------------------------------------------------------------------------------ what they are


def test_shellcheck_finds_nothing() -> None:
    tool = shutil.which("shellcheck", path=f"{BIN}:{os.environ['PATH']}")
    if tool is None:
        pytest.skip("shellcheck is not installed")
    line = [tool, "--external-sources", *(str(path.relative_to(ROOT)) for path in SCRIPTS)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_no_launcher_has_hyper_parameters() -> None:
    keys = [key for key, value in vars(load_config([])).items() if hasattr(value, "__dataclass_fields__")]
    for path in SCRIPTS:
        code = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert not [line for line in code for key in keys if f"{key}." in line.replace("cocod_accel.", "")], path.name


@pytest.mark.parametrize("name", ["slurm.sbatch", "slurm_heterogeneous.sbatch"])
def test_slurm_is_told_of_requeue_and_of_a_warning_in_time(name: str) -> None:
    lines = (LAUNCH / name).read_text().splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    first_command = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    assert [line for line in lines[:first_command] if line.startswith("#SBATCH ")] == [f"#SBATCH {o}" for o in options]
    assert {"--requeue", "--open-mode=append"} < set(options)
    (warning,) = [option for option in options if option.startswith("--signal")]
    assert warning == "--signal=TERM@120", "to the workers: with B: it would go to the script"
    assert options.count("hetjob") == (name == "slurm_heterogeneous.sbatch")


# ------------------------------------------------------------------------------------------------ Kubernetes


def manifest(*arguments: str, **variables: str) -> list[Any]:
    done = launch("kubernetes/submit.sh", *arguments, DRY_RUN="1", **{**PODS, **variables})
    assert done.returncode == 0, done.stderr
    assert "${" not in done.stdout
    return [OmegaConf.to_container(OmegaConf.create(text)) for text in done.stdout.split("\n---\n")]


def test_an_indexed_job_and_the_service_that_names_its_pods() -> None:
    """Its schema is checked in tests/test_integrations.py."""
    arguments = [CONFIG, "algorithm.period=[[0, 1], [1, 5]]", 'name=a "b" \\c & d']
    service, job = manifest(*arguments)
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"] == service["spec"]["selector"]["job-name"]
    (container,) = spec["template"]["spec"]["containers"]
    assert container["args"] == arguments
    assert container["command"] == shlex.split(
        "torchrun --nnodes=4 --node_rank=$(JOB_COMPLETION_INDEX) --nproc_per_node=2 --master_addr=cocod-0.cocod "
        "--master_port=29500 --shutdown_timeout=120 -m cocod_accel.train"
    )
    assert container["resources"] == {"limits": {"nvidia.com/gpu": 2}}


# ------------------------------------------------------------------------- Slurm, its commands played by short scripts

#: Two tasks on this machine, as srun starts them; their highest exit code.
SRUN = """#!/usr/bin/env bash
code=0 tasks=()
for task in 0 1; do
    SLURM_PROCID=$task SLURM_LOCALID=$task SLURM_NTASKS=2 SLURM_STEP_TASKS_PER_NODE='2' "$@" & tasks+=($!)
done
for task in "${tasks[@]}"; do
    ended=0; wait "$task" || ended=$?
    [ "$ended" -le "$code" ] || code=$ended
done
exit "$code"
"""


def slurm_job(folder: Path, *overrides: str) -> subprocess.Popen[str]:
    tools = folder / "tools"
    tools.mkdir(exist_ok=True)
    for name, text in (("srun", SRUN), ("scontrol", f"#!/usr/bin/env bash\necho \"$*\" >> '{folder}/scontrol'\n")):
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    (tools / "hostname").write_text("#!/usr/bin/env bash\necho 127.0.0.1\n")
    (tools / "hostname").chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tools}:{BIN}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1",
        "SLURM_JOB_ID": str(os.getpid()),
    }  # fmt: skip
    line = ["bash", "launch/slurm.sbatch", CONFIG, *TINY, "logging.trackers=[]", f"output={folder}", "name=run", *overrides]
    return subprocess.Popen(
        line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


@pytest.mark.timeout(240)
def test_a_slurm_job_that_is_told_to_end_saves_is_requeued_and_goes_on(tmp_path: Path) -> None:
    process = slurm_job(tmp_path, "schedule.epochs=400")
    try:
        rows = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 90
        while not rows.is_file() or not rows.read_text():
            assert time.monotonic() < deadline, "training did not begin"
            assert process.poll() is None, process.communicate()
            time.sleep(0.02)
        for pid in workers_of(tmp_path).values():  # as Slurm does, at the warning and at pre-emption
            os.kill(pid, signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    finally:
        end(process)
    assert process.returncode == 143, err
    assert "the same command resumes from" in out
    assert out.endswith("stopped after a checkpoint; back in the queue\n")
    assert (tmp_path / "scontrol").read_text() == f"requeue {os.getpid()}\n"
    stopped = int(out.split("stopped at step ")[1].split(";")[0])
    epochs = stopped // 32 + 2  # it may change; the rest would take long
    process = slurm_job(tmp_path, f"schedule.epochs={epochs}")
    try:
        out, err = process.communicate(timeout=100)
    finally:
        end(process)
    assert process.returncode == 0, err
    assert read_summary(tmp_path / "run")["steps"] == 32 * epochs
    assert (tmp_path / "scontrol").read_text().count("\n") == 1, "an ended job is not put back"


@pytest.mark.slow
def test_a_slurm_job_that_fails_is_not_requeued(tmp_path: Path) -> None:
    process = slurm_job(tmp_path, "algorithm.nam=cocod")
    try:
        _, err = process.communicate(timeout=100)
    finally:
        end(process)
    assert process.returncode == 2
    assert "error: override algorithm.nam: unknown key algorithm.nam; did you mean algorithm.name?" in err.splitlines()
    assert not (tmp_path / "scontrol").exists()


def test_more_workers_than_a_machine_can_run_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "train",
        "task.name=synthetic",
        "task.args={num_train: 1000000, size: 4}",
        "model.name=mlp",
        "cluster.device=cpu",
    ]
    assert cli.main([*given, "cluster.num_workers=5000", "--dry-run"]) == 2
    assert re.fullmatch(
        r"error: cluster.num_workers=5000: is more than the \d+ workers that one machine can run; [^\n]+\n",
        capsys.readouterr().err,
    )
    assert cli.main([*given, "cluster.num_workers=16", "--dry-run"]) == 0


def test_threads_are_as_many_as_were_asked_for_or_as_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not as many as the machine has cores: others may have been given those."""
    allowed = os.sched_getaffinity(0)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert threads_of_each(1) == len(allowed)
    assert threads_of_each(2 * len(allowed)) == 1
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert threads_of_each(1) == 1
    finally:
        os.sched_setaffinity(0, allowed)
    for asked, expected in (("3", 3), ("1", 1), ("0", len(allowed)), ("many", len(allowed)), ("", len(allowed))):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert threads_of_each(1) == expected
