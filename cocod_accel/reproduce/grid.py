"""The paper's experiments, and some beyond it, as cells: one run each, named by its settings.

Parts: ``homogeneous`` (table 1, figures 2 and 3), ``scaling`` (figure 4), ``heterogeneous`` (table 2, figures 5 and 6),
``skew`` (label-skewed shards against the period), ``remedies`` (fixes for the worst of those), ``iterations`` (steps to
a loss against the number of workers, Remarks 1 and 2), ``length`` (shorter runs: when does CoCoD-SGD catch up?) and, if
asked for, ``learning`` (what every method gives up after equally many steps; :mod:`cocod_accel.reproduce.learning`),
``language`` (the same of a language model; :mod:`cocod_accel.reproduce.language`) and ``asgd`` (A-SGD where tables 1 and
2 are, which have no figures of it).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError, profiles, require_choice
from cocod_accel.simulator.cluster import Cluster, load_cluster

CONFIGS = profiles()
#: What is run unless other parts are asked for.
USUAL_PARTS = ("homogeneous", "scaling", "heterogeneous", "skew", "remedies", "iterations", "length")
PARTS = (*USUAL_PARTS, "learning", "language", "asgd")
SCALES = ("smoke", "small", "full")

#: The files in configs/variants, and the paper's names for them.
NAMES = {
    "ssgd": "S-SGD",
    "ssgd_ps": "S-SGD+PS",
    "pipe": "Pipe-SGD",
    "pipe_ps": "Pipe-SGD+PS",
    "local": "Local-SGD",
    "asynlocal": "AsynLocal-SGD",
    "cocod": "CoCoD-SGD",
}
#: What the paper names beside them, and has no figures of.
BEYOND = {"asgd": "A-SGD", "asgd_ps": "A-SGD+PS"}
HOMOGENEOUS = ("ssgd", "pipe", "local", "cocod")
HETEROGENEOUS = ("ssgd", "ssgd_ps", "pipe", "pipe_ps", "asynlocal", "cocod")
#: The paper's models, which the virtual clock is based on, and what is trained instead at smaller scales.
MODELS = {"resnet18": "small_resnet", "vgg16": "small_vgg"}
#: float32 parameters of the paper's models for 10 classes.
PAYLOAD_BYTES = {"resnet18": 4 * 11_173_962, "vgg16": 4 * 14_724_042}
WORKERS = (1, 2, 4, 8, 16)
PERIODS = (1, 5, 8, 24)
#: Dirichlet alphas; None: all shards have the same distribution.
ALPHAS = (None, 1.0, 0.1)
#: Half of the workers are twice as fast, with batches in proportion to speed.
MIXED = "mixed"
REMEDIES = {
    "own share 0.5": ("algorithm.own_share=0.5",),
    "outer 0.5": ("algorithm.outer.momentum=0.5",),
    "own share 0.5, outer 0.5": ("algorithm.own_share=0.5", "algorithm.outer.momentum=0.5"),
}


@dataclass(frozen=True)
class Cell:
    """One run."""

    part: str
    #: The paper's model, or gpt.
    model: str
    #: A key of NAMES, or of ``ALGORITHMS``.
    variant: str
    #: Other settings that distinguish it within its part, as shown in tables.
    setting: str
    num_workers: int
    seed: int
    arguments: tuple[str, ...]
    #: A file in configs/cluster.
    cluster: str
    #: False: simulate only the timeline.
    learns: bool = True

    @property
    def name(self) -> str:
        parts = [self.part, self.model, self.variant, *self.setting.replace(",", "").split(), f"n{self.num_workers}"]
        return "-".join(part for part in [*parts, f"seed{self.seed}"] if part).replace("=", "")

    def on(self, overrides: Sequence[str] = ()) -> Cluster:
        """The paper's cluster and this cell's batch size, with the payload of the paper's model, whatever is trained in its
        place.
        """
        cluster = load_cluster(CONFIGS / "cluster" / f"{self.cluster}.yaml")
        batch = load_config([*self.arguments, *overrides]).batch_size
        cluster = replace(cluster, payload_bytes=PAYLOAD_BYTES.get(self.model), batch_size=batch)
        return cluster if self.num_workers == cluster.num_workers else cluster.resized(self.num_workers)


@dataclass(frozen=True)
class Scale:
    """The size of the grid."""

    name: str
    seeds: tuple[int, ...]
    workers: tuple[int, ...]
    periods: tuple[int, ...]
    alphas: tuple[float | None, ...]
    #: (period, alpha) of the cells in which remedies are tried.
    worst: tuple[tuple[int, float | None], ...]
    #: Epochs of the shorter runs.
    lengths: tuple[int, ...]
    #: Data sets of tables 1 and 2, as the setting of their cells. "": the default of all other parts.
    data: tuple[str, ...] = ("",)

    def arguments(self, environment: str, model: str, *more: str, data: str = "") -> tuple[str, ...]:
        profile = str(CONFIGS / f"{environment}_16gpu.yaml")
        if self.name == "full":
            return (profile, str(CONFIGS / "tasks" / f"{data or 'cifar10'}_{model}.yaml"), *more)
        return (profile, str(CONFIGS / "reproduce" / f"{self.name}.yaml"), f"model.name={MODELS[model]}", *more)


_SMALL = Scale("small", (0, 1, 2), WORKERS, PERIODS, ALPHAS, worst=((8, 0.1), (24, 0.1)), lengths=(10, 20))
_SIZES = {
    "small": _SMALL,
    "smoke": replace(
        _SMALL,
        name="smoke",
        seeds=(0, 1),
        workers=(1, 4),
        periods=(1, 5),
        alphas=(None, 0.1),
        worst=((5, 0.1),),
        lengths=(1,),
    ),
    "full": replace(_SMALL, name="full", lengths=(30, 60), data=("", "cifar100")),
}


def scale_of(name: str) -> Scale:
    require_choice(name, "--scale", list(SCALES))
    return _SIZES[name]


def cells(scale: Scale, only: Sequence[str] = ()) -> list[Cell]:
    """All cells, or those of some parts; the first seed of all parts comes first, so a partial run covers them all."""
    for part in only:
        require_choice(part, "--only", list(PARTS))
    from cocod_accel.reproduce import language, learning  # they are made of this module's cells

    wanted = only or USUAL_PARTS
    makers = {
        "homogeneous": _homogeneous, "scaling": _scaling, "heterogeneous": _heterogeneous,
        "skew": _skew, "remedies": _remedies, "iterations": _iterations, "length": _length, "learning": learning.cells,
        "language": language.cells,
        "asgd": _asynchronous,
    }  # fmt: skip
    found = [cell for part in PARTS if part in wanted for cell in makers[part](scale)]
    found.sort(key=lambda cell: (cell.learns, cell.seed))
    names = [cell.name for cell in found]
    if len(set(names)) != len(names):
        raise ConfigError("two cells have the same name; this is a bug in the grid")
    return found


def _homogeneous(scale: Scale) -> Iterator[Cell]:
    for seed, data, model, variant in product(scale.seeds, scale.data, MODELS, HOMOGENEOUS):
        given = scale.arguments("homogeneous", model, f"algorithm.name={variant}", f"seed={seed}", data=data)
        yield Cell("homogeneous", model, variant, data, 16, seed, given, cluster_of(model))


def _scaling(scale: Scale) -> Iterator[Cell]:
    for model in MODELS:
        for variant in HOMOGENEOUS:
            for n in scale.workers:
                given = scale.arguments("homogeneous", model, f"algorithm.name={variant}", f"cluster.num_workers={n}")
                yield Cell("scaling", model, variant, "", n, 0, given, cluster_of(model), learns=False)


def _heterogeneous(scale: Scale) -> Iterator[Cell]:
    # 5,760 samples are whole rounds of AsynLocal-SGD (1,920) and whole steps with proportional sampling (384).
    size = ["task.train_limit=5760"] if scale.name == "small" else []
    for seed, data, model, variant in product(scale.seeds, scale.data, MODELS, HETEROGENEOUS):
        profile, *rest = scale.arguments("heterogeneous", model, f"seed={seed}", *size, data=data)
        given = (profile, str(CONFIGS / "variants" / f"{variant}.yaml"), *rest)
        yield Cell("heterogeneous", model, variant, data, 16, seed, given, f"{cluster_of(model)}_heterogeneous")


def _asynchronous(scale: Scale) -> Iterator[Cell]:
    """As in tables 1 and 2; with proportional sampling in the second, because all workers take equally many steps. Nothing
    at full scale, which is for GPUs.
    """
    if scale.name == "full":
        return
    size = ["task.train_limit=5760"] if scale.name == "small" else []
    for seed, model in product(scale.seeds, MODELS):
        given = scale.arguments("homogeneous", model, "algorithm.name=asgd", f"seed={seed}")
        yield Cell("asgd", model, "asgd", "homogeneous", 16, seed, given, cluster_of(model))
        for variant in BEYOND:
            own = ["algorithm.name=asgd", f"cluster.proportional={str(variant == 'asgd_ps').lower()}"]
            given = scale.arguments("heterogeneous", model, *own, f"seed={seed}", *size)
            yield Cell("asgd", model, variant, "heterogeneous", 16, seed, given, f"{cluster_of(model)}_heterogeneous")


def _skewed(scale: Scale, seed: int, period: int, alpha: float | None, variant: str, *more: str) -> tuple[str, ...]:
    given = [f"algorithm.name={variant}", f"seed={seed}", *more]
    given += [] if variant == "ssgd" else [f"algorithm.period={period}"]
    given += [] if alpha is None else [f"task.label_skew={alpha:g}"]
    return scale.arguments("homogeneous", "resnet18", *given)


def _alpha(alpha: float | None) -> str:
    return f"alpha={'inf' if alpha is None else f'{alpha:g}'}"


def _skew(scale: Scale) -> Iterator[Cell]:
    for seed in scale.seeds:
        for alpha in scale.alphas:
            given = _skewed(scale, seed, 1, alpha, "ssgd")
            yield Cell("skew", "resnet18", "ssgd", _alpha(alpha), 16, seed, given, "paper")
            for period in scale.periods:
                given = _skewed(scale, seed, period, alpha, "cocod")
                yield Cell("skew", "resnet18", "cocod", f"{_alpha(alpha)} k={period}", 16, seed, given, "paper")


def _remedies(scale: Scale) -> Iterator[Cell]:
    for seed in scale.seeds:
        for period, alpha in scale.worst:
            where = f"{_alpha(alpha)} k={period}"
            given = _skewed(scale, seed, period, alpha, "local")
            yield Cell("remedies", "resnet18", "local", where, 16, seed, given, "paper")
            for remedy, options in REMEDIES.items():
                given = _skewed(scale, seed, period, alpha, "cocod", *options)
                yield Cell("remedies", "resnet18", "cocod", f"{where} {remedy}", 16, seed, given, "paper")


def _iterations(scale: Scale) -> Iterator[Cell]:
    """Short epochs with less data, evaluated after each, to find the step that reaches a loss precisely. Except for
    ``full``, which has the paper's schedule and model, a low constant rate and no BatchNorm: theory is about the mean
    model, whose statistics are not the mean of the workers' statistics.
    """
    small = scale.name == "small"
    size = [] if scale.name == "full" else [
        f"task.train_limit={2560 if small else 160}", "task.test_limit=200", f"schedule.epochs={60 if small else 3}",
        "schedule.warmup_epochs=0", "schedule.decay_epochs=[]", "evaluation.every_epochs=1", "model.name=mlp",
        "optimizer.learning_rate=0.0005",
    ]  # fmt: skip
    size.append("evaluation.training_loss=true")
    for seed in scale.seeds:
        for variant in ("ssgd", "cocod"):
            for n in scale.workers:
                given = [f"algorithm.name={variant}", f"seed={seed}", f"cluster.num_workers={n}", *size]
                given += [] if scale.name == "full" else ["algorithm.period=5"]
                arguments = scale.arguments("homogeneous", "resnet18", *given)
                yield Cell("iterations", "resnet18", variant, "", n, seed, arguments, "paper")
        for n in scale.workers[1:]:
            speeds = ",".join(["1"] * (n // 2) + ["2"] * (n // 2))
            given = [f"seed={seed}", f"cluster.num_workers={n}", f"cluster.speeds=[{speeds}]", *size]
            given += [] if scale.name == "full" else ["algorithm.period=5"]
            arguments = scale.arguments("heterogeneous", "resnet18", *given)
            yield Cell("iterations", "resnet18", "cocod", MIXED, n, seed, arguments, "paper_heterogeneous")


def _length(scale: Scale) -> Iterator[Cell]:
    """The paper's schedule, compressed into fewer epochs."""
    for seed in scale.seeds:
        for epochs in scale.lengths:
            alone = round(epochs / 12)  # epochs with period 1, like the paper's 10 of 120
            period = f"[[0,1],[{alone},5]]" if alone else "5"
            size = [f"schedule.epochs={epochs}", f"schedule.warmup_epochs={epochs / 24:g}", f"algorithm.period={period}"]
            size.append(f"schedule.decay_epochs=[{round(epochs * 2 / 3)}]" if epochs > 2 else "schedule.decay_epochs=[]")
            for model in MODELS:
                for variant in ("ssgd", "cocod"):
                    given = scale.arguments("homogeneous", model, f"algorithm.name={variant}", f"seed={seed}", *size)
                    yield Cell("length", model, variant, f"epochs={epochs}", 16, seed, given, cluster_of(model))


def cluster_of(model: str) -> str:
    """The paper's cluster as a file of configs/cluster."""
    return "paper" if model == "resnet18" else f"paper_{model}"
