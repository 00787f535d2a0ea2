"""What travels in a run and what it takes: sizes of the real model's payloads, laid out by the code that sends them.

Tensors are on the meta device: they have sizes and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cocod_accel.algorithms import Algorithm
from cocod_accel.averaging.coder import coded_bytes, message_bytes
from cocod_accel.averaging.flat import FlatCopy, as_real, balanced_cuts
from cocod_accel.comm.handles import ring_bytes, shares
from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError
from cocod_accel.simulator.cluster import Cluster
from cocod_accel.simulator.fleet import Parcel
from cocod_accel.tasks import TaskFacts, build_model

#: A payload given in bytes is that of a model of so many equal parameters, so that it can be cut into fragments.
_PIECES = 256


@dataclass(frozen=True)
class Parcels:
    """Every transfer of a run."""

    #: Of a step, for algorithms that send gradients.
    gradients: Parcel
    #: Of a round, one for each part of the model.
    parts: tuple[Parcel, ...]
    #: The exact mean at the end.
    final: Parcel
    #: What the sum of a step's gradients inside a node takes.
    inside_seconds: float = 0.0
    #: What passes the link of a server, if there is one.
    server: ServerLink | None = None


@dataclass(frozen=True)
class ServerLink:
    """What passes a server's link: gradients in, models out."""

    gradient: Parcel
    model: Parcel
    #: Before a message's first byte.
    latency_seconds: float


def parcels_of(config: Config, cluster: Cluster, algorithm: Algorithm, facts: TaskFacts) -> Parcels:
    """What ``algorithm`` sends of the model of ``config``, and what that takes on ``cluster``."""
    parameters, buffers = _tensors(config, cluster, facts)
    sizes = [as_real(parameter).numel() for parameter in parameters]
    if algorithm.fragments > max(1, len(parameters)):
        raise ConfigError(
            f"algorithm.fragments={algorithm.fragments}: is more than the model's {len(parameters)} trainable parameters"
        )
    node_size, shard = config.cluster.workers_per_replica, config.cluster.shard
    num_nodes = cluster.num_workers // node_size
    num_states = _num_states(config) if algorithm.optimizer_state == "average" else 0

    def parcel(*collectives: Sequence[Tensor], coded: Sequence[Tensor] = ()) -> Parcel:
        payloads = [_bytes_of(tensors) for tensors in collectives]
        own = [[part for tensor in tensors for part in shares(tensor, 0, node_size)] for tensors in collectives]
        return Parcel(
            sum(cluster.between_seconds(size, node_size, gathers=shard is None) for size in payloads if size),
            sum(ring_bytes(tensors, num_nodes) for tensors in own),
            cluster.coding_seconds(algorithm.payload, sum(as_real(tensor).numel() for tensor in coded)),
        )

    gradients = Parcel(0.0, 0)
    parts: list[Parcel] = []
    if algorithm.is_served:
        link = _server_link(cluster, parameters, algorithm.payload)
        models = link.latency_seconds + cluster.num_workers * link.model.seconds
        return Parcels(gradients, (), Parcel(models, 0), server=link)
    if algorithm.reduces_gradients and algorithm.payload != "fp32":
        gradients = parcel(*_collectives(parameters, [], algorithm, cluster.num_workers), coded=parameters)
    elif algorithm.reduces_gradients:
        # S-SGD sends gradients as they are, Pipe-SGD a flat copy of them in float32 at least.
        flat = [p.detach() for p in parameters] if algorithm.name == "ssgd" else FlatCopy(parameters).buffers
        gradients = parcel(flat)
    else:
        for index, these in enumerate(balanced_cuts(sizes, algorithm.fragments)):
            own = parameters[these]
            extras: list[Tensor] = []
            if algorithm.sends_buffers:  # buffers belong to no parameter; they go with part 0
                extras = own * num_states + (buffers if index == 0 else [])
            parts.append(parcel(*_collectives(own, extras, algorithm, num_nodes, node_size), coded=own))
    final = parcel(FlatCopy(parameters, buffers + parameters * num_states).buffers)
    # Behind their backward, as those of S-SGD.
    inside = (1 - cluster.gradient_overlap) * cluster.inside_seconds(_bytes_of(parameters), node_size)
    if shard in ("fsdp", "zero3"):  # gathered for the forward and again for the backward; gradients are scattered
        inside *= 1.5
    return Parcels(gradients, tuple(parts), final, inside)


def _server_link(cluster: Cluster, parameters: Sequence[Tensor], payload: str) -> ServerLink:
    """Gradients as they are coded, and models in full; nothing is sent twice, as in a ring."""
    flat = FlatCopy(parameters)
    whole, coded = _bytes_of(flat.buffers), _bytes_of(flat.buffers)
    if payload != "fp32":
        coded = sum(message_bytes(payload, sum(own), sizes=own) for own in flat.core_sizes)
    latency, seconds = cluster.message_seconds(coded)
    coding = cluster.coding_seconds(payload, sum(as_real(parameter).numel() for parameter in parameters))
    return ServerLink(Parcel(seconds, coded, coding), Parcel(cluster.message_seconds(whole)[1], whole), latency)


def _bytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _collectives(
    parameters: list[Tensor], extras: list[Tensor], algorithm: Algorithm, num_workers: int, num_shards: int = 1
) -> list[list[Tensor]]:
    """One round's collectives, each as what it sums; a coded exchange sends as much as a ring that sums its bytes."""
    flat = FlatCopy(parameters, extras)
    if algorithm.payload == "fp32":
        return [flat.buffers]
    sizes = [coded_bytes(algorithm.payload, sum(own), num_workers, num_shards, sizes=own) for own in flat.core_sizes]
    return [flat.tails, [torch.empty(size, dtype=torch.uint8, device="meta") for size in sizes]]


def _tensors(config: Config, cluster: Cluster, facts: TaskFacts) -> tuple[list[Tensor], list[Tensor]]:
    """What is averaged: trainable parameters, and floating buffers."""
    if cluster.payload_bytes is not None:
        numel = math.ceil(cluster.payload_bytes / 4)
        whole = torch.empty(numel, dtype=torch.float32, device="meta")
        return list(whole.split(math.ceil(numel / _PIECES))), []
    model = _model(config, facts)
    trainable: list[Tensor] = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return trainable, [buffer for buffer in model.buffers() if buffer.is_floating_point()]


def _model(config: Config, facts: TaskFacts) -> nn.Module:
    if ":" in config.model.name:  # a user's own may not know how to be made without memory
        return build_model(config, facts).to("meta")
    with torch.device("meta"):
        return build_model(config, facts)


def _num_states(config: Config) -> int:
    """Tensors of a parameter's shape that the optimizer keeps for it."""
    if config.optimizer.name == "sgd":
        return int(config.optimizer.momentum > 0)
    return 2
