"""The process: how many workers there are, which one this is, seeds, set-up and teardown.

The only reader of the environment. ``accelerate launch`` can silently start one process where two were meant, or two that
do not know each other; :func:`start` compares what is there with what was meant, and refuses with the right command.
"""

from __future__ import annotations

import json
import os
import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from accelerate.accelerator import Accelerator
from accelerate.utils.dataclasses import DeepSpeedPlugin, InitProcessGroupKwargs
from torch._C._distributed_c10d import PrefixStore, TCPStore

import cocod_accel
from cocod_accel.comm.groups import set_workers
from cocod_accel.comm.shutdown import rest
from cocod_accel.comm.watchdog import end_after, is_gone
from cocod_accel.config.algorithms import num_processes
from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError, found
from cocod_accel.extras import install_command
from cocod_accel.sync.deepspeed import check_settings, prepare_for_cpu
from cocod_accel.trainer.launch import TRAINER, _local_workers, launch_command, threads_of_each
from cocod_accel.trainer.sharded import deepspeed_settings, stage_of

#: A worker that waits longer than this for the others gives up.
_TIMEOUT = timedelta(minutes=10)


def is_speaker() -> bool:
    """Whether this process speaks for its machine; known before anything is connected."""
    return int(os.environ.get("LOCAL_RANK", "0")) == 0


#: By which ``cocod train`` tells its workers which process it is.
LAUNCHER = "COCOD_ACCEL_LAUNCHER"


def end_without_launcher(code: int) -> None:
    """From here on, end this process if the one that started it ends: nobody else would end it, or restart it.

    Only where a launcher has started it that stays until its workers end: ``cocod``, ``torchrun`` (and so ``accelerate
    launch``) or ``deepspeed``.
    """
    known = os.environ.get(LAUNCHER)
    if known is None and not {"TORCHELASTIC_RUN_ID", "LOCAL_SIZE"} & os.environ.keys():
        return

    def is_over() -> bool:
        return os.getppid() != cocod_accel._parent or (known is not None and is_gone(known))

    end_after(is_over, "error: the process that started the workers has ended" if is_speaker() else None, code)


def speaks_of(lost: int) -> bool:
    """Whether this process speaks for its machine about a lost worker; the first one, or the next if it is the first."""
    rank, local_rank = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    return rank != lost and (local_rank == 0 or (local_rank == 1 and lost == rank - 1))


def without_launcher_arguments(arguments: list[str]) -> list[str]:
    """The trainer's part of a command line.

    The ``deepspeed`` launcher adds ``--local_rank=N``, and its users say ``--deepspeed_config FILE``. Both mean what an
    accelerate configuration with ``distributed_type: DEEPSPEED`` says through the environment.
    """
    left: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        name, has_value, value = argument.partition("=")
        if name == "--local-rank":  # what torch's own old launcher adds
            continue
        if name in ("--local_rank", "--deepspeed"):
            os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        elif name == "--deepspeed_config":
            file = value if has_value else next(rest, "")
            if not found(file).is_file():
                raise ConfigError(
                    f"--deepspeed_config={file}: no such file; give a JSON file such as configs/deepspeed/stage0.json"
                )
            os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_DEEPSPEED_CONFIG_FILE=str(found(file)))
        else:
            left.append(argument)
    if uses_deepspeed() and "ACCELERATE_DEEPSPEED_CONFIG_FILE" not in os.environ:
        os.environ.setdefault("ACCELERATE_DEEPSPEED_ZERO_STAGE", "0")  # where accelerate would take 2
        os.environ.setdefault("ACCELERATE_GRADIENT_CLIPPING", "0")
    return left


def uses_deepspeed() -> bool:
    """Whether accelerate's configuration, or the ``deepspeed`` launcher, asks for DeepSpeed."""
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


def _check_connected(accelerator: Accelerator, config: Config, arguments: list[str], module: str) -> None:
    meant, there = num_processes(config), accelerator.num_processes
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if there == meant:
        return
    command = " ".join(launch_command(meant, arguments, module=module))
    if there == 1 and started > 1:
        reason = f"{started} processes were started, but are not connected to each other"
    else:
        reason = f"{'only ' if there < meant else ''}{there} {'process was' if there == 1 else 'processes were'} started"
    workers = config.cluster.num_workers
    server = "" if meant == workers else f"{config.algorithm.name} needs {meant}, one more for its server, and "
    raise ConfigError(f"cluster.num_workers={workers}: {server}{reason}; run: {command}")


@contextmanager
def start(config: Config, arguments: list[str], module: str = TRAINER) -> Iterator[Accelerator]:
    """An Accelerator with the configured number of workers; everything is torn down on every path."""
    on_cpu = config.cluster.device == "cpu" or not torch.cuda.is_available()
    local_workers = _local_workers()
    if on_cpu:
        if int(os.environ.get("WORLD_SIZE", "1")) == local_workers:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # one machine: never leave it
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed, where it is imported, complains otherwise
        torch.set_num_threads(threads_of_each(local_workers))
    if os.environ.get("MASTER_PORT") == "0" and int(os.environ.get("WORLD_SIZE", "1")) > 1 and not dist.is_initialized():
        raise ConfigError(
            "main_process_port=0: this accelerate does not choose a free port (1.7 and later do); add "
            "--main_process_port 29500 to accelerate launch"
        )
    _connect_after_restart("gloo" if on_cpu else "nccl")
    if uses_deepspeed() or stage_of(config.cluster.shard):
        accelerator = _deepspeed_accelerator(config, on_cpu)
    else:
        handlers: list[Any] = [InitProcessGroupKwargs(timeout=_TIMEOUT)]
        accelerator = Accelerator(cpu=on_cpu, mixed_precision=config.precision, kwargs_handlers=handlers)
    _check_connected(accelerator, config, arguments, module)
    seed_everything(config.seed + accelerator.process_index)
    yield accelerator
    set_workers(None)
    # Only after a clean run: after an exception the others may be anywhere, and nothing may wait for them.
    if dist.is_initialized():
        accelerator.wait_for_everyone()
        accelerator.free_memory()
        rest()
        dist.destroy_process_group()


def is_server(config: Config, accelerator: Accelerator) -> bool:
    """Whether this process is the server of an algorithm that has one: the last. All processes call this, once.

    From here on workers meet without it.
    """
    num_workers = config.cluster.num_workers
    if num_processes(config) == num_workers:
        return False
    set_workers(range(num_workers))
    return bool(accelerator.process_index == num_workers)


def _deepspeed_accelerator(config: Config, on_cpu: bool) -> Accelerator:
    """An Accelerator that makes DeepSpeed engines; with ``cpu=True`` accelerate would silently drop DeepSpeed."""
    _check_deepspeed_file(os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none"))
    stage = stage_of(config.cluster.shard)
    if stage:
        if uses_deepspeed():
            raise ConfigError(
                f"cluster.shard={config.cluster.shard}: makes its own DeepSpeed configuration; start without another one"
            )
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    elif config.cluster.shard is not None:
        raise ConfigError(f"cluster.shard={config.cluster.shard}: needs no DeepSpeed; start without its configuration")
    if on_cpu:
        prepare_for_cpu()
    handlers: list[Any] = [InitProcessGroupKwargs(backend="gloo" if on_cpu else "nccl", timeout=_TIMEOUT)]
    try:
        # Not accelerate's mixed precision: it would be DeepSpeed's own bf16 engine, which trains copies of the parameters.
        plugin = DeepSpeedPlugin(hf_ds_config=deepspeed_settings(stage)) if stage else None
        accelerator = Accelerator(mixed_precision="no", kwargs_handlers=handlers, deepspeed_plugin=plugin)
    except (ImportError, ValueError) as error:
        hint = f"; {install_command('deepspeed')}" if isinstance(error, ImportError) else ""
        raise ConfigError(f"DeepSpeed: {' '.join(str(error).split())}{hint}") from error
    settings = accelerator.state.deepspeed_plugin.deepspeed_config
    is_on = {key: settings.get(key, {}).get("enabled") is True for key in ("fp16", "bf16")}
    try:
        if not stage:
            check_settings(int(accelerator.state.deepspeed_plugin.zero_stage), is_on["fp16"], is_on["bf16"])
    except ValueError as error:
        raise ConfigError(f"DeepSpeed: {error}") from error
    if config.precision == "bf16":
        settings["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
    accumulated = settings.get("gradient_accumulation_steps", 1)
    if accumulated not in (1, "auto"):
        raise ConfigError(
            f"gradient_accumulation_steps={accumulated}: the trainer steps after every batch; "
            "set it to 1 in the DeepSpeed configuration, and use batch_size"
        )
    batch = settings.get("train_micro_batch_size_per_gpu", "auto")
    if batch not in (config.batch_size, "auto"):
        raise ConfigError(
            f"train_micro_batch_size_per_gpu={batch}: differs from batch_size={config.batch_size}; "
            'set it to "auto" in the DeepSpeed configuration'
        )
    settings["train_micro_batch_size_per_gpu"], settings["train_batch_size"] = config.batch_size, "auto"
    return accelerator


def _check_deepspeed_file(file: str) -> None:
    """Refuse a file that is not a DeepSpeed configuration, before DeepSpeed fails on it."""
    if file == "none":
        return
    try:
        tree = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file}: cannot be read as JSON ({error}); see configs/deepspeed/stage0.json") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{file}: must be a JSON object; see configs/deepspeed/stage0.json")
    for key in ("zero_optimization", "fp16", "bf16", "torch_autocast"):
        if key in tree and not isinstance(tree[key], dict):
            raise ConfigError(f"{file}: {key}={tree[key]!r}: must be a JSON object; see configs/deepspeed/stage0.json")
    stage = tree.get("zero_optimization", {}).get("stage", 0)
    if isinstance(stage, bool) or not (isinstance(stage, int) or stage == "auto"):
        raise ConfigError(f"{file}: zero_optimization.stage={stage!r}: must be a number; use 0")


def _connect_after_restart(backend: str) -> None:
    """Connect workers that a launcher has restarted because one of them failed.

    Torch gives them the launcher's old store, in which the addresses of the processes before them still stand, and
    whoever comes first tries to reach those (seen with torch 2.15, gloo). So every start gets a corner of its own.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    if restarts == 0 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or dist.is_initialized():
        return
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    launchers = TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
    store = PrefixStore(f"cocod_accel/start_{restarts}", launchers)
    rank, num_workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(backend, store=store, rank=rank, world_size=num_workers, timeout=_TIMEOUT)


def seed_everything(seed: int) -> None:
    """Seed all random numbers that models, dropout and users' data may draw."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def is_restart() -> bool:
    """Whether a launcher has restarted these workers after a failure."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0


def started_by() -> str:
    """The process that started this one; a process id alone may be reused."""
    parent = os.getppid()
    try:
        begun = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        begun = "?"
    return f"{socket.gethostname()} {parent} {begun}"


def is_one_machine() -> bool:
    """Whether all workers were started on this machine."""
    local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE", "1")
    return os.environ.get("WORLD_SIZE", "1") == local
