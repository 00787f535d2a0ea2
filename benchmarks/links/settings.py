"""The settings of a benchmark, as a typed tree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from benchmarks.links.contenders import CONTENDERS
from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError, found

_ALL_CONTENDERS = list(CONTENDERS)


@dataclass
class StepSettings:
    """Time per step."""

    #: Links, each given as r_1: the time of one payload over that of a step without communication.
    ratios: list[float] = field(default_factory=lambda: [0.25, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0])
    #: Which contenders to time: names from `benchmarks/links/contenders.py`.
    contenders: list[str] = field(default_factory=lambda: list(_ALL_CONTENDERS))
    #: Larger than for accuracy, so that a step is long compared with the machine's noise.
    batch_size: int = 128
    #: Timed steps per block; a multiple of the period.
    steps: int = 10
    #: Blocks per contender and link.
    repeats: int = 5
    #: Contenders to measure more precisely: a few per cent from the limit would drown in the noise of so few blocks.
    closer: list[str] = field(default_factory=lambda: ["cocod", "cocod_ternary"])
    #: Additional blocks for those, per link.
    closer_repeats: int = 20
    #: Links that are also emulated, to check the emulation.
    emulated_ratios: list[float] = field(default_factory=lambda: [1.0, 3.0, 6.0])


@dataclass
class AccuracySettings:
    """Time to a target accuracy."""

    #: Links, as above.
    ratios: list[float] = field(default_factory=lambda: [2.0, 8.0])
    #: Those compared most are adjacent, because a machine's speed drifts. Equivalent ones are left out: ssgd is DDP,
    #: and with equal workers asynlocal is local.
    contenders: list[str] = field(
        default_factory=lambda: [
            "ddp",
            "cocod_ternary",
            "cocod",
            "local",
            "pipe",
            "cocod_int8",
            "ddp_fp16",
            "ddp_powersgd",
            "post_local",
            "accelerate_local",
            "torchft_local",
            "torchft_diloco",
        ]
    )
    #: The accuracy to reach.
    target: float = 0.8
    #: Runs per contender and link.
    num_seeds: int = 5
    #: Evaluations per epoch.
    looks: int = 4


@dataclass
class BenchSettings:
    """One benchmark."""

    #: The training configuration.
    config: str = "configs/quickstart.yaml"
    #: Each runs on its own host of the network lab.
    num_workers: int = 2
    #: Steps per round.
    period: int = 5
    steps: StepSettings = field(default_factory=StepSettings)
    accuracy: AccuracySettings = field(default_factory=AccuracySettings)


def load_settings(arguments: list[str]) -> BenchSettings:
    """Merge YAML files and ``key=value`` overrides, in that order, and check the whole."""
    tree: Any = OmegaConf.structured(BenchSettings)
    try:
        for argument in arguments:
            if "=" not in argument and not found(argument).is_file():
                raise ConfigError(f"{argument}: no such file; give a YAML file, e.g. configs/bench/links.yaml, or key=value")
            given = OmegaConf.from_dotlist([argument]) if "=" in argument else OmegaConf.load(found(argument))
            tree = OmegaConf.merge(tree, given)
        settings = OmegaConf.to_object(tree)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or argument}: {str(error).splitlines()[0]}") from error
    assert isinstance(settings, BenchSettings)
    _check(settings)
    return settings


def _check(settings: BenchSettings) -> None:
    load_config([settings.config])
    per_block = settings.steps.steps
    rules: list[tuple[str, object, bool, str]] = [
        ("num_workers", settings.num_workers, settings.num_workers >= 2, "must be at least 2"),
        ("period", settings.period, settings.period >= 1, "must be at least 1"),
        ("steps.steps", per_block, per_block % settings.period == 0, "must be a multiple of the period"),
        ("steps.repeats", settings.steps.repeats, settings.steps.repeats >= 1, "must be at least 1"),
        ("steps.closer_repeats", settings.steps.closer_repeats, settings.steps.closer_repeats >= 0, "must not be negative"),
        ("accuracy.target", settings.accuracy.target, 0 < settings.accuracy.target <= 1, "must be a share in (0, 1]"),
        ("accuracy.looks", settings.accuracy.looks, settings.accuracy.looks >= 1, "must be at least 1"),
    ]
    names = {"steps.closer": settings.steps.closer}
    for part, section in (("steps", settings.steps), ("accuracy", settings.accuracy)):
        names[f"{part}.contenders"] = section.contenders
        bad = [ratio for ratio in section.ratios if not 0 < ratio < 1000]
        rules.append((f"{part}.ratios", bad, not bad, "must be positive"))
    for key, given in names.items():
        unknown = [name for name in given if name not in CONTENDERS]
        rules.append((key, unknown, not unknown, f"unknown; choose from {', '.join(CONTENDERS)}"))
    for key, value, good, rule in rules:
        if not good:
            raise ConfigError(f"{key}={value}: {rule}")
