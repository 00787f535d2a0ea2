"""Attach an algorithm to a training loop that stays as it is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from cocod_accel.algorithms import Algorithm
from cocod_accel.comm.agreement import exchange_reports
from cocod_accel.comm.groups import Channels, default_group, world_group
from cocod_accel.comm.shutdown import rest_before_exit
from cocod_accel.comm.star import channels_to_server
from cocod_accel.members.settings import Members
from cocod_accel.sync.membership import Membership, check_members
from cocod_accel.sync.nodes import Nodes
from cocod_accel.sync.preflight import (
    Report,
    Subject,
    check_agreement,
    group_of,
    raise_problems,
    start_equal,
)
from cocod_accel.sync.sync import Sync


def attach(
    model: nn.Module,
    optimizer: Any,
    algorithm: Algorithm,
    *,
    weight: float = 1,
    inner: Any = None,
    ctas: int | None = 4,
    offload: str | None = None,
    members: Members | None = None,
) -> Sync:
    """Train ``model`` with ``algorithm`` in a loop that stays as it is.

    Args:
        model: a ``DistributedDataParallel`` model, as ``accelerator.prepare`` or torch makes it; compiled or not. Or a
            model that ``fully_shard`` shares out over the workers of a node. With one process a bare module will do.
        optimizer: the optimizer that trains it, bare or prepared; or a list of them.
        algorithm: e.g. ``CoCoDSGD(period=5)``. The same on every worker.
        weight: this worker's batch size M_i; the mean model is sum_j M_j x_j / sum_j M_j.
        inner: the process group of the workers on this worker's node. They sum their gradients in every step, and the
            algorithm runs between nodes. Groups must be of equal size. Of a sharded model: the group or device mesh that
            it is sharded over, which can be left out.
        ctas: how many blocks of threads (CTAs) an average between nodes may occupy on a GPU, with NCCL; None: its choice.
        offload: "cpu": what only the end of a round needs waits in the host's memory, the model at its start and what a
            codec's rounding has dropped. On a GPU that memory is pinned.
        members: workers come and go: each is a process of its own, and whoever is there is averaged. A worker that comes
            later waits here, and has then the model of the others.

    Every worker must call this at the same point. What is wrong on one worker is raised on all of them.
    """
    problem: Exception | None = None
    subject: Subject | None = None
    try:
        subject = Subject.examine(model, optimizer, algorithm, weight, None if members else inner, ctas, offload)
        if members is not None:
            check_members(members, subject, algorithm, inner)
    except Exception as error:  # whatever it is, the other workers must hear of it before anybody waits
        problem = error
    is_served = isinstance(algorithm, Algorithm) and algorithm.is_served
    apparent = world_group() if is_served else group_of(model) if inner is None else default_group()
    group = apparent if subject is None or is_served else subject.group
    device = next((parameter.device for parameter in model.parameters()), None) if isinstance(model, nn.Module) else None
    what = "" if group is None else f"attach() with {torch.distributed.get_world_size(group)} workers"
    reports: list[Report] = exchange_reports(Report.of(subject, algorithm, weight, problem), group, device, what=what)
    raise_problems(reports, problem)
    assert subject is not None
    check_agreement(reports, algorithm)
    if is_served:
        return _attach_to_server(subject, algorithm, group, reports)

    rank = 0 if group is None else torch.distributed.get_rank(group)
    nodes = Nodes.of([report.node for report in reports], rank)
    channels = Channels.alone()
    if len(reports) > 1:
        router = subject.router
        assert router is not None
        if not all(report.has_channels for report in reports):  # the same answer on every worker
            _, exchanges, few = router.channels_of = subject.channels
            router.channels = Channels.open(
                group,
                nodes.node_ranks,
                nodes.peers,
                exchanges=exchanges,
                device=subject.device,
                ctas=few,
                sharded=subject.shards is not None,
            )
        assert router.channels is not None
        channels = router.channels
        rest_before_exit()
    membership = None if members is None else Membership(members, subject, algorithm, float(weight))
    return Sync(subject, algorithm, channels, nodes, reports, membership)


def _attach_to_server(subject: Subject, algorithm: Algorithm, group: Any, reports: Sequence[Report]) -> Sync:
    """Of an algorithm with a server, which has reported last and now serves."""
    rank = torch.distributed.get_rank(group)
    channels = channels_to_server(group)
    rest_before_exit()
    nodes = Nodes.of([() for _ in reports[:-1]], rank)
    subject = replace(subject, workers=(channels.everyone.group,))  # type: ignore[attr-defined]
    equal = start_equal(reports, Nodes.of([() for _ in reports], rank))
    return Sync(subject, algorithm, channels, nodes, reports[:-1], equal=equal)
