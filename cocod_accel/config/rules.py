"""Rules between several settings: combinations that are refused with one line, before any process waits for another.

A rule about a single setting is declared with its field in :mod:`cocod_accel.config.settings`.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch

from cocod_accel.config.algorithms import algorithm_class, build_algorithm, takes
from cocod_accel.config.fields import check_fields
from cocod_accel.config.settings import ACCURACY, MEASURE, Config
from cocod_accel.config.strict import ConfigError, require
from cocod_accel.sharding.plan import check_speeds, plan_workers
from cocod_accel.theory.hiding import AUTO

_LONGEST_NAME = 200
_LONGEST_PERIOD = 1_000_000_000


def validate(config: Config) -> None:
    """Refuse values and combinations that cannot be trained, with one line."""
    check_fields(config)
    _validate_name(config)
    _validate_momentum(config)
    _validate_schedule(config)
    _validate_algorithm(config)
    _validate_cluster(config)
    _validate_nodes(config)
    _validate_shard(config)
    _validate_server(config)
    _validate_slowdown(config)
    skew, across = config.task.label_skew, config.cluster.shuffle == "across"
    require(skew is None or not across, "task.label_skew", skew, "requires fixed shards; use cluster.shuffle=within")
    _validate_evaluation(config)


def _validate_evaluation(config: Config) -> None:
    epochs, steps = config.schedule.epochs, config.schedule.steps
    by_epochs, by_steps = config.evaluation.every_epochs, config.evaluation.every_steps
    if epochs is not None:
        rule = f"is more than schedule.epochs={epochs}, so nothing would ever be evaluated"
        require(by_epochs <= epochs, "evaluation.every_epochs", by_epochs, rule)
    for index, target in enumerate(config.evaluation.targets):
        key, is_share = f"evaluation.targets[{index}]", config.metrics[0] == ACCURACY
        require(not is_share or 0 < target <= 1, key, target, "must be a share in (0, 1], e.g. 0.85")
        require(math.isfinite(target), key, target, "must be a finite number")
    if by_steps is None:
        return
    key, name = "evaluation.every_steps", config.algorithm.name
    require(steps is None or by_steps <= steps, key, by_steps, f"is more than schedule.steps={steps}; use {steps}")
    require(by_epochs == 1, key, by_steps, f"and evaluation.every_epochs={by_epochs}: use one of them, and 1 for the other")
    same = algorithm_class(name).same_period
    require(same, key, by_steps, f"is not supported by {name}, whose workers take different steps; use every_epochs")


def _validate_name(config: Config) -> None:
    """The name of the run's folder, to which a number may be added."""
    size = len(config.run_name.encode("utf-8", "surrogateescape"))
    key = "name" if config.name else "task.name"
    given = config.name or config.task.name
    require(
        size <= _LONGEST_NAME, key, given, f"makes a folder's name of {size} bytes; give a name of {_LONGEST_NAME} at most"
    )


def _validate_momentum(config: Config) -> None:
    """Nesterov's rule without momentum is plain SGD."""
    sections = [("optimizer", config.optimizer.nesterov, config.optimizer.momentum)]
    if config.algorithm.outer is not None:
        sections.append(("algorithm.outer", config.algorithm.outer.nesterov, config.algorithm.outer.momentum))
    for section, nesterov, momentum in sections:
        require(not nesterov or momentum > 0, f"{section}.nesterov", True, f"requires {section}.momentum above 0")


def _validate_schedule(config: Config) -> None:
    schedule, name = config.schedule, config.algorithm.name
    epochs, steps, given = schedule.epochs, schedule.steps, schedule.decay_epochs
    pieces, batch = config.optimizer.accumulate, config.batch_size
    require(pieces <= batch, "optimizer.accumulate", pieces, f"is more than batch_size={batch}; use {batch} at most")
    is_used = schedule.decay == "epochs" or not given
    rule = f"is not used with schedule.decay={schedule.decay}; use schedule.decay_epochs=[]"
    require(is_used, "schedule.decay_epochs", given, rule)
    if steps is not None:
        rule = f"and schedule.epochs={epochs}: use one of them, and null for the other"
        require(epochs is None, "schedule.steps", steps, rule)
        same = algorithm_class(name).same_period
        require(same, "schedule.steps", steps, f"is not supported by {name}, whose workers take different steps; use epochs")
        require(not given, "schedule.decay_epochs", given, "is by epochs; with schedule.steps use cosine or wsd, and []")
        warm = schedule.warmup_steps
        require(warm <= steps, "schedule.warmup_steps", warm, f"is more than schedule.steps={steps}")
        return
    require(schedule.warmup_steps == 0, "schedule.warmup_steps", schedule.warmup_steps, "requires schedule.steps; use 0")
    require(epochs is not None, "schedule.epochs", None, "requires schedule.steps; state one of them")
    assert epochs is not None
    previous = 0
    for index, epoch in enumerate(config.schedule.decay_epochs):
        key = f"schedule.decay_epochs[{index}]"
        require(epoch > previous, key, epoch, "must be positive and in increasing order")
        kept = [value for value in config.schedule.decay_epochs if value < epochs]
        fix = f"schedule.decay_epochs={kept}".replace(" ", "")
        require(epoch < epochs, key, epoch, f"is after the last epoch, with schedule.epochs={epochs}; use {fix}")
        previous = epoch
    require(
        config.schedule.warmup_epochs <= epochs,
        "schedule.warmup_epochs",
        config.schedule.warmup_epochs,
        f"is more than schedule.epochs={epochs}",
    )


def _validate_algorithm(config: Config) -> None:
    """The period in epochs, and whatever the algorithm itself refuses."""
    options, schedule = config.algorithm, config.schedule
    unit, length = ("epoch", schedule.epochs) if schedule.steps is None else ("step", schedule.steps)
    assert length is not None
    name, given = options.name, options.period
    kind = algorithm_class(name)
    allowed, policy = kind.optimizer_policies, options.optimizer_state
    rule = f"is not supported by {name}; choose from {', '.join(allowed)}"
    require(policy in allowed, "algorithm.optimizer_state", policy, rule)
    muon = config.optimizer.name == "muon"
    rule = f"requires torch 2.9, this is {torch.__version__}; use adamw"
    require(not muon or hasattr(torch.optim, "Muon"), "optimizer.name", "muon", rule)
    rule = "is not supported with optimizer.name=muon, whose parameters have different states; use keep or reset"
    require(not muon or policy != "average", "algorithm.optimizer_state", policy, rule)
    require(not muon or config.cluster.shard is None, "optimizer.name", "muon", "requires whole matrices; use adamw")
    offload = config.cluster.offload
    rule = f"requires an algorithm that averages models, not {name}; set it to null"
    require(offload is None or not kind.reduces_gradients, "cluster.offload", offload, rule)
    is_supported = kind.same_period and not kind.reduces_gradients and not kind.is_served
    for key, value, fix in (("period", given, "give a number of steps"), ("payload", options.payload, "name a payload")):
        if value == AUTO:
            require(is_supported, f"algorithm.{key}", value, f"requires local or cocod, not {name}; {fix}")
    if options.delay == AUTO:
        require(takes(kind, "delay"), "algorithm.delay", AUTO, f"is not an option of {name}; set it to null, or use cocod")
    require(
        config.has_auto_period or not isinstance(given, str),
        "algorithm.period",
        given,
        f"must be a number of steps such as 5, pairs such as [[0, 1], [10, 5]], or {AUTO}",
    )
    try:
        pairs = config.period_by_epoch
    except (TypeError, ValueError) as error:
        message = str(error)
        if unit == "epoch":
            message = message.replace("step 0", "epoch 0").replace("first steps", "first epochs")
        message = message.replace("such as period=[[0, 1], [200, 5]]", "such as period=[[0, 1], [10, 5]]")
        raise ConfigError(f"algorithm.{message}") from error
    for _, steps in pairs:
        require(steps <= _LONGEST_PERIOD, "algorithm.period", given, f"must be at most {_LONGEST_PERIOD:,} steps")
    build_algorithm(options, pairs)
    for first, _ in pairs:
        fix = f"algorithm.period={pairs[-1][1]}"
        rule = f"changes after the last {unit}, with schedule.{unit}s={length}; use {fix}"
        require(first < length, "algorithm.period", [list(pair) for pair in pairs], rule)


def _validate_cluster(config: Config) -> None:
    cluster = config.cluster
    if cluster.speeds is not None and cluster.speeds != MEASURE:
        _require_list(cluster.speeds, "cluster.speeds", f"must be a list such as [1, 2], or {MEASURE}")
        _require_length(cluster.speeds, "cluster.speeds", cluster.num_workers)
        for index, speed in enumerate(cluster.speeds):
            require(_is_number(speed), f"cluster.speeds[{index}]", speed, "is not a number")
        cluster.speeds = [float(speed) for speed in cluster.speeds]
        try:
            check_speeds(cluster.speeds)
        except ValueError as error:
            raise ConfigError(f"cluster.{error}") from error
    workers, by_steps = cluster.num_workers, not algorithm_class(config.algorithm.name).same_period
    if cluster.global_batch is not None:
        try:
            plan_workers(
                config.speeds,
                num_samples=1 << 62,
                base_batch=config.batch_size,
                global_batch=cluster.global_batch,
                period=1 if by_steps else None,
            )
        except ValueError as error:
            raise ConfigError(f"cluster.{error}") from error
    if cluster.proportional:
        require(
            cluster.speeds is not None,
            "cluster.proportional",
            True,
            f"requires cluster.speeds: one relative speed for each of {workers} workers, or {MEASURE}",
        )
        require(
            not by_steps,
            "cluster.proportional",
            True,
            f"{config.algorithm.name} takes equal batches, and more steps on faster workers; set cluster.proportional=false",
        )
    require(
        cluster.replan_epochs is None or cluster.proportional,
        "cluster.replan_epochs",
        cluster.replan_epochs,
        "moves batches between workers, which requires cluster.proportional=true",
    )


def _validate_nodes(config: Config) -> None:
    cluster, name = config.cluster, config.algorithm.name
    size = cluster.workers_per_replica
    if size == 1:
        return
    key = "cluster.workers_per_replica"
    require(cluster.num_workers % size == 0, key, size, f"does not divide cluster.num_workers={cluster.num_workers}")
    kind = algorithm_class(name)
    # Gradients of all workers are summed in every step anyway: nodes would change nothing.
    require(not kind.reduces_gradients, key, size, f"is not supported by {name}, which sums all gradients; use 1")
    if not kind.same_period:
        # The workers of a node hold one model, so they end their rounds together.
        speeds = [] if cluster.speeds == MEASURE else config.speeds
        uneven = cluster.speeds == MEASURE or any(speed != speeds[i - i % size] for i, speed in enumerate(speeds))
        require(not uneven, key, size, f"with {name} requires equal cluster.speeds inside each node")


def _validate_shard(config: Config) -> None:
    cluster, key, shard = config.cluster, "cluster.shard", config.cluster.shard
    if shard is None:
        return
    size = cluster.workers_per_replica
    require(size > 1, key, shard, "shares a model between the workers of a node; set cluster.workers_per_replica above 1")
    # Both train whole models on one worker, to time it.
    require(cluster.speeds != MEASURE, key, shard, "models are not measured on one worker; give cluster.speeds as a list")
    require(not config.has_auto_code, key, shard, "requires a payload and a delay that are stated")
    clip, pieces = config.optimizer.clip_norm, config.optimizer.accumulate
    require(clip is None, "optimizer.clip_norm", clip, "is not supported with cluster.shard; use null")
    require(pieces == 1, "optimizer.accumulate", pieces, "is not supported with cluster.shard; use 1")
    state = config.algorithm.optimizer_state
    require(state != "average", "algorithm.optimizer_state", state, "is not averaged of sharded models; use keep or reset")
    speeds = config.speeds
    uneven = cluster.proportional and any(speed != speeds[i - i % size] for i, speed in enumerate(speeds))
    require(not uneven, key, shard, "requires equal batches, so equal cluster.speeds, inside each node")
    every = cluster.replan_epochs
    require(every is None, "cluster.replan_epochs", every, "is not supported with cluster.shard; use null")


def _validate_server(config: Config) -> None:
    """What algorithms with a server do without."""
    name, cluster = config.algorithm.name, config.cluster
    if not algorithm_class(name).is_served:
        return
    for key, value, usual, why in (
        (
            "cluster.workers_per_replica",
            cluster.workers_per_replica,
            1,
            "whose workers send gradients one by one; use 1",
        ),
        ("cluster.shard", cluster.shard, None, "which trains whole models; use null"),
        ("cluster.offload", cluster.offload, None, "which keeps no model of a round; use null"),
        ("cluster.replan_epochs", cluster.replan_epochs, None, "whose steps do not wait for each other; use null"),
        ("emulate.link", config.link, None, "which has no ring; use cocod simulate"),
    ):
        require(value == usual, key, value, f"is not supported by {name}, {why}")


def _validate_slowdown(config: Config) -> None:
    slowdown, epochs = config.emulate.slowdown, config.schedule.epochs
    if slowdown is None:
        return
    _require_list(slowdown, "emulate.slowdown", "must be a list such as [1, 2], one factor per worker")
    _require_length(slowdown, "emulate.slowdown", config.cluster.num_workers)
    for index, entry in enumerate(slowdown):
        key = f"emulate.slowdown[{index}]"
        pairs = entry if isinstance(entry, list) else [[0, entry]]
        shaped = bool(pairs) and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)
        require(shaped, key, entry, "must be a factor, or (first epoch, factor) pairs such as [[0, 1], [2, 4]]")
        firsts = [first for first, _ in pairs]
        in_order = all(type(first) is int for first in firsts) and firsts == sorted(set(firsts)) and firsts[0] == 0
        require(in_order, key, entry, "must start at epoch 0, with increasing epochs")
        if epochs is not None:
            require(firsts[-1] < epochs, key, entry, f"changes after epoch {epochs - 1}, the last")
        for _, factor in pairs:
            good = _is_number(factor) and math.isfinite(factor) and factor >= 1
            require(good, key, factor, "must be finite and at least 1; to emulate a faster worker, slow the others down")


def _is_number(value: object) -> bool:
    """Whether it is one that can be computed with: a whole number may be larger than any other."""
    return isinstance(value, int | float) and not isinstance(value, bool) and not abs(value) > sys.float_info.max


def _require_list(value: object, key: str, rule: str) -> None:
    require(isinstance(value, list), key, value, rule)


def _require_length(values: list[Any], key: str, num_workers: int) -> None:
    rule = f"has {len(values)} entries for cluster.num_workers={num_workers}; give one per worker"
    require(len(values) == num_workers, key, values, rule)
