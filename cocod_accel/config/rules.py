"""What cannot be trained: values and combinations that are refused with one line, before any process waits for another."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cocod_accel.algorithms import ALGORITHMS, CoCoDSGD
from cocod_accel.config.settings import MEASURE, Config
from cocod_accel.config.strict import ConfigError, require, require_choice
from cocod_accel.sharding.plan import check_speeds, plan_workers
from cocod_accel.theory.hiding import AUTO


def validate(config: Config) -> None:
    """Refuse values and combinations that cannot be trained, with one line."""
    cluster, schedule, task = config.cluster, config.schedule, config.task
    require(config.name is None or "/" not in config.name, "name", config.name, "must not contain a slash")
    for key, value, least in (
        ("seed", config.seed, 0),
        ("batch_size", config.batch_size, 1),
        ("loader_workers", config.loader_workers, 0),
        ("schedule.epochs", schedule.epochs, 1),
        ("cluster.num_workers", cluster.num_workers, 1),
        ("cluster.workers_per_replica", cluster.workers_per_replica, 1),
        ("cluster.replan_epochs", cluster.replan_epochs, 1),
        ("evaluation.every_epochs", config.evaluation.every_epochs, 1),
        ("evaluation.batch_size", config.evaluation.batch_size, 1),
        ("logging.every_steps", config.logging.every_steps, 1),
        ("checkpoint.every_steps", config.checkpoint.every_steps, 1),
        ("checkpoint.every_epochs", config.checkpoint.every_epochs, 1),
        ("checkpoint.keep", config.checkpoint.keep, 1),
        ("task.train_limit", task.train_limit, 1),
        ("task.test_limit", task.test_limit, 1),
        ("task.shrink", task.shrink, 1),
    ):
        require(value is None or value >= least, key, value, f"must be at least {least}")
    rows: list[tuple[str, float, str, Callable[[float], bool]]] = [
        ("optimizer.learning_rate", config.optimizer.learning_rate, "must be positive", lambda v: v > 0),
        ("optimizer.momentum", config.optimizer.momentum, "must be in [0, 1)", lambda v: 0 <= v < 1),
        ("optimizer.weight_decay", config.optimizer.weight_decay, "must not be negative", lambda v: v >= 0),
        ("schedule.warmup_epochs", schedule.warmup_epochs, "must not be negative", lambda v: v >= 0),
        (
            "checkpoint.every_minutes",
            1.0 if config.checkpoint.every_minutes is None else config.checkpoint.every_minutes,
            "must be positive",
            lambda v: v > 0,
        ),
        ("cluster.dead_seconds", cluster.dead_seconds, "must be positive", lambda v: v > 0),
        ("cluster.frozen_seconds", cluster.frozen_seconds, "must be positive", lambda v: v > 0),
        ("cluster.measure_seconds", cluster.measure_seconds, "must not be negative", lambda v: v >= 0),
        ("schedule.decay_factor", schedule.decay_factor, "must be in (0, 1]", lambda v: 0 < v <= 1),
    ]
    rows += [
        (f"algorithm.{name}", value, "must be in [0, 1)", lambda v: 0 <= v < 1)
        for name, value in (
            ("pull_back", config.algorithm.pull_back),
            ("outer_momentum", config.algorithm.outer_momentum),
        )
    ]
    if task.label_skew is not None:
        rows.append(("task.label_skew", task.label_skew, "must be positive; null: shards alike", lambda v: v > 0))
        across = cluster.shuffle == "across"
        require(not across, "task.label_skew", task.label_skew, "needs shards that last; use cluster.shuffle=within")
    for key, number, rule, good in rows:
        require(math.isfinite(number) and good(number), key, number, rule)
    require(
        not config.optimizer.nesterov or config.optimizer.momentum > 0,
        "optimizer.nesterov",
        True,
        "needs optimizer.momentum above 0",
    )
    for key, text, choices in (
        ("algorithm.name", config.algorithm.name, list(ALGORITHMS)),
        ("optimizer.name", config.optimizer.name, ["sgd", "adam", "adamw"]),
        ("precision", config.precision, ["no", "bf16"]),
        ("cluster.device", cluster.device, ["auto", "cpu"]),
        ("cluster.shuffle", cluster.shuffle, ["within", "across"]),
        ("logging.wandb_mode", config.logging.wandb_mode, ["online", "offline", "disabled"]),
        *((f"logging.trackers[{i}]", t, ["wandb", "tensorboard"]) for i, t in enumerate(config.logging.trackers)),
    ):
        require_choice(text, key, choices)
    kind = ALGORITHMS[config.algorithm.name]
    for key, text, allowed in (
        ("algorithm.optimizer_state", config.algorithm.optimizer_state, kind.optimizer_policies),
        ("algorithm.payload", config.algorithm.payload, kind.payloads),
    ):
        require(text in allowed, key, text, f"is not for {config.algorithm.name}; choose from {', '.join(allowed)}")
    _validate_schedule(config)
    _validate_cluster(config)
    _validate_nodes(config)
    _validate_emulation(config)
    for index, target in enumerate(config.evaluation.targets):
        require(0 < target <= 1, f"evaluation.targets[{index}]", target, "must be a share in (0, 1], e.g. 0.85")
    require(
        config.evaluation.every_epochs <= schedule.epochs,
        "evaluation.every_epochs",
        config.evaluation.every_epochs,
        f"is more than schedule.epochs={schedule.epochs}, so nothing would ever be evaluated",
    )


def _validate_schedule(config: Config) -> None:
    epochs = config.schedule.epochs
    previous = 0
    for index, epoch in enumerate(config.schedule.decay_epochs):
        key = f"schedule.decay_epochs[{index}]"
        require(epoch > previous, key, epoch, "must be positive and in increasing order")
        kept = [value for value in config.schedule.decay_epochs if value < epochs]
        fix = f"schedule.decay_epochs={kept}".replace(" ", "")
        require(epoch < epochs, key, epoch, f"is after the last epoch, for schedule.epochs={epochs}; say {fix}")
        previous = epoch
    require(
        config.schedule.warmup_epochs <= epochs,
        "schedule.warmup_epochs",
        config.schedule.warmup_epochs,
        f"is more than schedule.epochs={epochs}",
    )
    name, given = config.algorithm.name, config.algorithm.period
    if config.has_auto_period:
        kind = ALGORITHMS[name]
        is_for = kind.same_period and not kind.reduces_gradients
        require(is_for, "algorithm.period", given, f"is for local and cocod, not {name}; give a number of steps")
    require(
        config.has_auto_period or not isinstance(given, str),
        "algorithm.period",
        given,
        f"must be a number of steps such as 5, pairs such as [[0, 1], [10, 5]], or {AUTO}",
    )
    try:
        pairs = config.period_by_epoch
    except (TypeError, ValueError) as error:
        message = (
            str(error).replace("step 0", "epoch 0").replace("first steps", "first epochs").replace("(200, 5)", "(10, 5)")
        )
        raise ConfigError(f"algorithm.{message}") from error
    _validate_merge(config)
    fragments = config.algorithm.fragments
    if fragments != 1:
        require(config.algorithm.name == "cocod", "algorithm.fragments", fragments, "is only for cocod; use 1")
        try:
            CoCoDSGD(pairs, payload=config.algorithm.payload, fragments=fragments)
        except ValueError as error:
            raise ConfigError(f"algorithm.{error}") from error
    for first, _ in pairs:
        fix = f"algorithm.period={pairs[-1][1]}"
        require(
            first < epochs,
            "algorithm.period",
            pairs,
            f"changes after the last epoch, for schedule.epochs={epochs}; say {fix}",
        )


def _validate_merge(config: Config) -> None:
    options = config.algorithm
    for key, value, of in (
        ("pull_back", options.pull_back, ("cocod",)),
        ("outer_momentum", options.outer_momentum, ("local", "cocod", "asynlocal")),
    ):
        if value:
            require(options.name in of, f"algorithm.{key}", value, f"is not for {options.name}; use 0, or {', '.join(of)}")
            require(options.payload == "fp32", f"algorithm.{key}", value, "goes with algorithm.payload=fp32 only")
            require(options.fragments == 1, f"algorithm.{key}", value, "goes with algorithm.fragments=1 only")


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
    workers, by_steps = cluster.num_workers, config.algorithm.name == "asynlocal"
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
            f"needs cluster.speeds: one relative speed for each of {workers} workers, or {MEASURE}",
        )
        require(
            not by_steps,
            "cluster.proportional",
            True,
            "does not go with asynlocal, which takes equal batches; set cluster.proportional=false",
        )
    require(
        cluster.replan_epochs is None or cluster.proportional,
        "cluster.replan_epochs",
        cluster.replan_epochs,
        "moves batches between workers, which needs cluster.proportional=true",
    )


def _validate_nodes(config: Config) -> None:
    cluster, name = config.cluster, config.algorithm.name
    size = cluster.workers_per_replica
    if size == 1:
        return
    key = "cluster.workers_per_replica"
    require(cluster.num_workers % size == 0, key, size, f"does not divide cluster.num_workers={cluster.num_workers}")
    require(
        not ALGORITHMS[name].reduces_gradients, key, size, f"is not for {name}, which sums gradients over all workers; use 1"
    )
    payload = config.algorithm.payload
    require(payload == "fp32", "algorithm.payload", payload, f"is not sent between nodes ({key}={size}); use fp32")
    if not ALGORITHMS[name].same_period:
        speeds = [] if cluster.speeds == MEASURE else config.speeds
        uneven = cluster.speeds == MEASURE or any(speed != speeds[i - i % size] for i, speed in enumerate(speeds))
        require(not uneven, key, size, f"with {name} needs cluster.speeds that are equal inside every node")


def _validate_emulation(config: Config) -> None:
    link, slowdown = config.emulate.link, config.emulate.slowdown
    if link.bandwidth_mbit is not None:
        good = math.isfinite(link.bandwidth_mbit) and link.bandwidth_mbit > 0
        require(good, "emulate.link.bandwidth_mbit", link.bandwidth_mbit, "must be positive; null: no limit")
    good = math.isfinite(link.latency_ms) and link.latency_ms >= 0
    require(good, "emulate.link.latency_ms", link.latency_ms, "must not be negative")
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
        require(in_order, key, entry, "must begin at epoch 0, and its epochs must increase")
        require(
            firsts[-1] < config.schedule.epochs, key, entry, f"changes after epoch {config.schedule.epochs - 1}, the last"
        )
        for _, factor in pairs:
            good = _is_number(factor) and math.isfinite(factor) and factor >= 1
            require(good, key, factor, "must be finite and at least 1; to emulate a faster worker, slow the others down")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _require_list(value: object, key: str, rule: str) -> None:
    require(isinstance(value, list), key, value, rule)


def _require_length(values: list[Any], key: str, num_workers: int) -> None:
    rule = f"has {len(values)} entries for cluster.num_workers={num_workers}; give one per worker"
    require(len(values) == num_workers, key, values, rule)
