"""The configuration: strict, mergeable, reloadable; the paper's figures; and dozens of mistakes, one line each."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from cocod_accel import train
from cocod_accel.algorithms import ALGORITHMS
from cocod_accel.config.algorithms import build_algorithm, takes
from cocod_accel.config.fields import Affects
from cocod_accel.config.loading import flattened, load_config, merged_config, save_config
from cocod_accel.config.settings import Config, OuterConfig, may_differ
from cocod_accel.config.strict import ConfigError
from cocod_accel.simulator.cluster import load_cluster
from cocod_accel.simulator.simulate import configured
from cocod_accel.trainer.schedule import learning_rate
from cocod_accel.trainer.work import Work

CONFIGS = Path(__file__).parents[1] / "configs"


def test_files_are_merged_in_order_then_overrides(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 1\nbatch_size: 8\nschedule: {epochs: 3}\n")
    (tmp_path / "b.yaml").write_text("batch_size: 16\nschedule: {warmup_epochs: 2}\n")
    config = load_config([str(tmp_path / "a.yaml"), "seed=7", str(tmp_path / "b.yaml"), "schedule.warmup_epochs=0.5"])
    assert (config.seed, config.batch_size, config.schedule.epochs, config.schedule.warmup_epochs) == (7, 16, 3, 0.5)


def test_interpolation(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("seed: 3\nname: run-${seed}-${algorithm.name}\n")
    assert load_config([str(tmp_path / "a.yaml"), "algorithm.name=local"]).name == "run-3-local"


@pytest.mark.parametrize("profile", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_a_resolved_configuration_reloads_to_an_equal_one(profile: Path, tmp_path: Path) -> None:
    config = load_config([str(profile), "task.args={a: [1, x]}", "name=${seed}"])
    save_config(config, tmp_path / "config.yaml")
    assert load_config([str(tmp_path / "config.yaml")]) == config


@pytest.mark.parametrize("task", sorted((CONFIGS / "tasks").glob("*.yaml")), ids=lambda path: path.stem)
def test_the_profiles_are_the_papers_section_5(task: Path) -> None:
    """Every figure of section 5.1 to 5.3, derived from the resolved profiles."""
    data, model = task.stem.split("_")
    for profile, proportional in (("homogeneous_16gpu", False), ("heterogeneous_16gpu", True)):
        for algorithm in ALGORITHMS:
            overrides = [f"algorithm.name={algorithm}"]
            if algorithm == "asynlocal":
                overrides.append("cluster.proportional=false")
            config = load_config([str(CONFIGS / f"{profile}.yaml"), str(task), *overrides])
            assert (config.task.name, config.model.name) == (data, model)
            work = [Work.of(config, 50_000, rank) for rank in range(16)]
            sampled = proportional and algorithm != "asynlocal"
            assert [w.batch for w in work] == ([32] * 8 + [64] * 8 if sampled else [32] * 16)
            schedule, options = config.schedule, config.optimizer
            assert (options.momentum, options.weight_decay) == (0.9, 1e-4)
            assert schedule.epochs == 120
            scaled = options.learning_rate * work[0].plan.learning_rate_factor

            def rate(epoch: float, scaled: float = scaled, config: Config = config) -> float:
                s = config.schedule
                base = config.optimizer.learning_rate
                return learning_rate(epoch, base, scaled, s.warmup_epochs, s.decay_epochs, s.decay_factor)

            assert rate(0) == 0.01
            assert rate(5) == pytest.approx(0.24 if sampled else 0.16)
            assert rate(79.99) == rate(5)
            assert rate(80) == pytest.approx(rate(5) / 10)
            if algorithm in ("ssgd", "pipe"):
                continue
            for rank, w in enumerate(work):
                tenth = sum(w.steps[:10])
                faster = 2 if algorithm == "asynlocal" and proportional and rank >= 8 else 1
                assert w.algorithm.period.at(tenth - 1) == faster
                assert w.algorithm.period.at(tenth) == 5 * faster
            rounds = {w.steps[119] // w.algorithm.period.at(sum(w.steps[:119])) for w in work}
            assert len(rounds) == 1 or algorithm != "asynlocal"


MISTAKES: list[tuple[str, str]] = [
    # unknown keys
    ("sed=1", "unknown key sed; did you mean seed?"),
    ("batchsize=8", "unknown key batchsize; did you mean batch_size?"),
    ("schedule.epoch=3", "unknown key schedule.epoch; did you mean schedule.epochs?"),
    ("algoritm.name=cocod", "unknown key algoritm; did you mean algorithm?"),
    ("algorithm.perod=5", "unknown key algorithm.perod; did you mean algorithm.period?"),
    ("optimizer.lr=0.1", "unknown key optimizer.lr; known: name, learning_rate"),
    ("optimizer.momentun=0.1", "did you mean optimizer.momentum?"),
    ("epochs=3", "unknown key epochs; did you mean schedule.epochs?"),
    ("momentum=0.5", "unknown key momentum; did you mean optimizer.momentum?"),
    ("cluster.worker=2", "did you mean cluster.num_workers?"),
    ("cluster.num_worker=2", "did you mean cluster.num_workers?"),
    ("logging.traker=[]", "did you mean logging.trackers?"),
    ("evaluation.target=[0.5]", "did you mean evaluation.targets?"),
    ("task.data=x", "unknown key task.data; did you mean task.data_dir?"),
    ("zzz=1", "unknown key zzz; known: name, output, seed"),
    # nodes, optimizer state
    ("cluster.offload=gpu", "cluster.offload=gpu: "),
    ("cluster.ctas=0", "cluster.ctas=0: must be at least 1"),
    (
        "cluster.offload=cpu + algorithm.name=ssgd",
        "cluster.offload=cpu: requires an algorithm that averages models, not ssgd; set it to null",
    ),
    ("cluster.workers_per_replica=0", "cluster.workers_per_replica=0: must be at least 1"),
    ("cluster.workers_per_replica=3", "cluster.workers_per_replica=3: does not divide cluster.num_workers=2"),
    ("cluster.workers_per_replica=2 + algorithm.name=ssgd", "not supported by ssgd, which sums all gradients; use 1"),
    ("cluster.workers_per_replica=2 + algorithm.name=pipe", "is not supported by pipe"),
    (
        "cluster.workers_per_replica=2 + algorithm.name=asynlocal + cluster.speeds=[1,2]",
        "requires equal cluster.speeds",
    ),
    (
        "algorithm.optimizer_state=average",
        "average: is not supported by cocod; choose from keep, reset",
    ),
    (
        "algorithm.fragments=6 + algorithm.period=5",
        "algorithm.fragments=6 must be from 1 to 5, the shortest period; use 5 at most",
    ),
    ("algorithm.fragments=2 + algorithm.name=ssgd", "algorithm.fragments=2: is not an option of ssgd; set it to 1, or use"),
    ("algorithm.fragments=0", "algorithm.fragments=0: must be at least 1"),
    ("algorithm.own_share=1.5", "algorithm.own_share=1.5: must be in [0, 1]"),
    ("algorithm.own_share=0.5 + algorithm.name=local", "algorithm.own_share=0.5: is not an option of local; set it to 1.0"),
    ("algorithm.outer={rate: 0.7} + algorithm.name=pipe", "is not an option of pipe; set it to null"),
    ("algorithm.outer={rate: 0}", "algorithm.outer.rate=0.0: must be positive"),
    ("algorithm.outer.momentum=1", "algorithm.outer.momentum=1.0: must be in [0, 1)"),
    ("algorithm.outer={nesterov: true}", "algorithm.outer.nesterov=True: requires algorithm.outer.momentum above 0"),
    ("algorithm.outer={lr: 1}", "unknown key algorithm.outer.lr; known: rate, momentum, nesterov"),
    (
        "algorithm.pull_back=0.5",
        "algorithm.pull_back=0.5: was removed because it discarded progress; use algorithm",
    ),
    (
        "algorithm.payload=int5",
        "algorithm.payload='int5' is unknown; choose from fp32, bf16, int8, int4, ternary, topk:SHARE",
    ),
    ("algorithm.payload=topk:0", "algorithm.payload='topk:0': the share must be above 0 and at most 1; use e.g. topk:0.01"),
    ("algorithm.payload=topk:2", "algorithm.payload='topk:2': the share must be above 0 and at most 1; use e.g. topk:0.01"),
    ("algorithm.payload=qsgd:4", "algorithm.payload='qsgd:4' is for gradients (ssgd, pipe); choose from fp32"),
    (
        "algorithm.payload=qsgd:1 + algorithm.name=ssgd",
        "algorithm.payload='qsgd:1': the bits must be a whole number from 2 to 8",
    ),
    ("algorithm.period=5 + algorithm.delay=0", "algorithm.delay=0 must be from 1 to 5, the longest period; use 1"),
    ("algorithm.period=5 + algorithm.delay=6", "algorithm.delay=6 must be from 1 to 5, the longest period; use 5"),
    ("algorithm.delay=1.5", "algorithm.delay=1.5 is not an int; use delay=None to merge at the end of a round"),
    (
        "algorithm.delay=1 + algorithm.name=local",
        "algorithm.delay=1: is not an option of local; set it to null, or use cocod",
    ),
    ("algorithm.optimizer_state=reset + algorithm.name=ssgd", "is not supported by ssgd; choose from keep"),
    # an algorithm of one's own
    ("algorithm.name=nowhere:Mine", "algorithm.name=nowhere:Mine: cannot be imported (No module named 'nowhere')"),
    ("algorithm.name=tests.own_code:PuledSGD", "has no PuledSGD; did you mean tests.own_code:PulledSGD?"),
    ("algorithm.name=math:sqrt", "algorithm.name=math:sqrt: must be a subclass of cocod_accel.Algorithm"),
    (
        "algorithm.name=tests.own_code:PulledSGD + algorithm.args={pul: 1}",
        "algorithm.args={'pul': 1}: tests.own_code:PulledSGD does not accept them: got an unexpected keyword argument 'pul'",
    ),
    ("algorithm.args={pull: 1}", "algorithm.args={'pull': 1}: requires algorithm.name=module:Class"),
    (
        "algorithm.name=tests.own_code:PulledSGD + algorithm.args={period: 3}",
        "algorithm.args.period=3: has its own setting; use algorithm.period",
    ),
    (
        "algorithm.name=tests.own_code:PulledSGD + algorithm.payload=int8",
        "algorithm.payload=int8: is not an option of tests.own_code:PulledSGD",
    ),
    (
        "algorithm.name=tests.own_code:PulledSGD + algorithm.args={pull: 2}",
        "tests.own_code:PulledSGD: pull=2",
    ),
    # wrong types
    ("seed=one", "override seed: Value 'one' of type 'str' could not be converted"),
    ("seed=1.5", "seed"),
    ("batch_size=big", "batch_size"),
    ("batch_size=[1,2]", "batch_size"),
    ("schedule=5", "override schedule: must be a mapping, not 5"),
    ("schedule.epochs=ten", "schedule.epochs"),
    ("schedule.decay_epochs=5", "decay_epochs"),
    ("schedule.decay_epochs=[a]", "decay_epochs"),
    ("optimizer.learning_rate=fast", "learning_rate"),
    ("optimizer.nesterov=maybe", "nesterov"),
    ("cluster.speeds=2", "speeds"),
    ("task.args=3", "args"),
    ("task.download=perhaps", "download"),
    ("logging.trackers=wandb", "trackers"),
    ("evaluation.targets=0.8", "targets"),
    # impossible values
    ("seed=-1", "seed=-1: must be at least 0"),
    ("batch_size=0", "batch_size=0: must be at least 1"),
    ("loader_workers=-1", "loader_workers=-1: must be at least 0"),
    ("schedule.epochs=0", "schedule.epochs=0: must be at least 1"),
    ("schedule.warmup_epochs=-1", "schedule.warmup_epochs=-1.0: must not be negative"),
    ("schedule.warmup_epochs=99", "is more than schedule.epochs=8"),
    ("schedule.decay=linear", "schedule.decay=linear: unknown value; choose from epochs, cosine, wsd"),
    (
        "schedule.decay=cosine + schedule.decay_epochs=[3]",
        "schedule.decay_epochs=[3]: is not used with schedule.decay=cosine",
    ),
    ("schedule.decay_epochs=[8]", "schedule.decay_epochs[0]=8: is after the last epoch"),
    ("schedule.decay_epochs=[4,3]", "schedule.decay_epochs[1]=3: must be positive and in increasing order"),
    ("schedule.decay_epochs=[0]", "must be positive"),
    ("schedule.steps=0", "schedule.steps=0: must be at least 1"),
    ("schedule.steps=10", "schedule.steps=10: and schedule.epochs=8: use one of them, and null for the other"),
    (
        "schedule.steps=10 + schedule.epochs=null",
        "schedule.decay_epochs=[6]: is by epochs; with schedule.steps use cosine or wsd, and []",
    ),
    (
        "schedule.steps=10 + schedule.epochs=null + schedule.decay_epochs=[] + schedule.warmup_steps=11",
        "schedule.warmup_steps=11: is more than schedule.steps=10",
    ),
    (
        "schedule.steps=10 + schedule.epochs=null + schedule.decay_epochs=[] + algorithm.period=[[0, 1], [10, 2]]",
        "changes after the last step, with schedule.steps=10; use algorithm.period=2",
    ),
    (
        "schedule.steps=10 + schedule.epochs=null + schedule.decay_epochs=[] + algorithm.name=asynlocal",
        "schedule.steps=10: is not supported by asynlocal, whose workers take different steps; use epochs",
    ),
    ("schedule.warmup_steps=3", "schedule.warmup_steps=3: requires schedule.steps; use 0"),
    ("schedule.decay_share=0", "schedule.decay_share=0.0: must be in (0, 1]"),
    (
        "evaluation.every_steps=3 + evaluation.every_epochs=2",
        "evaluation.every_steps=3: and evaluation.every_epochs=2: use one of them, and 1 for the other",
    ),
    ("evaluation.every_steps=3 + algorithm.name=asynlocal", "evaluation.every_steps=3: is not supported by asynlocal"),
    ("optimizer.clip_norm=0", "optimizer.clip_norm=0.0: must be positive; null: as they are"),
    ("optimizer.accumulate=33", "optimizer.accumulate=33: is more than batch_size=32; use 32 at most"),
    ("schedule.decay_factor=0", "schedule.decay_factor=0.0: must be in (0, 1]"),
    ("optimizer.learning_rate=0", "optimizer.learning_rate=0.0: must be positive"),
    ("optimizer.learning_rate=nan", "optimizer.learning_rate=nan"),
    ("optimizer.momentum=1", "optimizer.momentum=1.0: must be in [0, 1)"),
    ("optimizer.weight_decay=-0.1", "must not be negative"),
    ("algorithm.name=cocodd", "algorithm.name=cocodd: unknown algorithm; did you mean cocod?"),
    ("algorithm.name=adam", "algorithm.name=adam: unknown algorithm; choose from ssgd, pipe"),
    ("algorithm.period=0", "algorithm.period=0: a period must be at least 1"),
    ("algorithm.period=2.5", "algorithm.period=2.5 is not an int"),
    ("algorithm.period=[[1,5]]", "algorithm.period=[[1, 5]]: the first pair must start at epoch 0"),
    ("algorithm.period=[[2,5]]", "or pairs such as period=[[0, 1], [10, 5]]"),
    ("algorithm.period=[[0,1],[8,5]]", "algorithm.period=[[0, 1], [8, 5]]: changes after the last epoch"),
    ("algorithm.period=[0,1]", "is not a pair of ints"),
    ("precision=fp8", "precision=fp8: unknown value"),
    ("cluster.num_workers=0", "cluster.num_workers=0: must be at least 1"),
    ("cluster.speeds=[1]", "has 1 entries for cluster.num_workers=2; give one per worker"),
    ("cluster.speeds=[1,0]", "cluster.speeds[1]=0.0 is not positive"),
    ("cluster.speeds=[1,-2]", "cluster.speeds[1]=-2.0 is not positive"),
    ("cluster.speeds=[1,nan]", "cluster.speeds[1]=nan"),
    ("cluster.proportional=true", "requires cluster.speeds"),
    ("cluster.speeds=[1,fast]", "cluster.speeds[1]=fast: is not a number"),
    ("cluster.speeds=meassure", "cluster.speeds=meassure: must be a list, measure, or the speeds.json of a run"),
    ("cluster.speeds=LICENSE", "cluster.speeds=LICENSE: must be a list, measure, or the speeds.json of a run"),
    ("cluster.speed=measure", "did you mean cluster.speeds?"),
    ("cluster.measure_seconds=-1", "cluster.measure_seconds=-1.0: must not be negative"),
    ("cluster.global_batch=1", "cluster.global_batch=1 is less than one sample for each of 2 workers; use 2"),
    ("cluster.global_batch=0", "cluster.global_batch=0 is less than one sample"),
    ("cluster.global_batch=9000", "cluster.global_batch=9000: 5000 training samples are fewer than the 9000"),
    ("cluster.replan_epochs=0", "cluster.replan_epochs=0: must be at least 1"),
    (
        "cluster.replan_epochs=1",
        "moves batches between workers, which requires cluster.proportional",
    ),
    ("cluster.shuffle=accross", "cluster.shuffle=accross: unknown value; did you mean across?"),
    ("emulate.slowdown=2", "emulate.slowdown=2: must be a list such as [1, 2]"),
    ("emulate.slowdown=[1,0.5]", "emulate.slowdown[1]=0.5: must be finite and at least 1"),
    ("emulate.slowdown=[1,nan]", "emulate.slowdown[1]=nan: must be finite and at least 1"),
    ("emulate.slowdown=[1,2,2]", "has 3 entries for cluster.num_workers=2; give one per worker"),
    ("emulate.slowdown=[1,[[1,2]]]", "must start at epoch 0"),
    ("emulate.slowdown=[1,[[0,1],[8,2]]]", "changes after epoch 7, the last"),
    ("emulate.slowdown=[1,[2]]", "must be a factor, or (first epoch, factor) pairs"),
    ("emulate.slowdown=[1,[]]", "must be a factor, or (first epoch, factor) pairs"),
    ("emulate.link.bandwidth_mbit=0", "emulate.link.bandwidth_mbit=0.0: must be positive"),
    ("emulate.link.latency_ms=-1", "emulate.link.latency_ms=-1.0: must not be negative"),
    ("emulate.link.bandwith=1", "did you mean emulate.link.bandwidth_mbit?"),
    ("latency_ms=1", "unknown key latency_ms; did you mean emulate.link.latency_ms?"),
    ("cluster.device=gpu9", "cluster.device=gpu9: unknown value"),
    ("checkpoint.every_steps=0", "checkpoint.every_steps=0: must be at least 1"),
    ("checkpoint.every_minutes=0", "checkpoint.every_minutes=0.0: must be positive"),
    ("checkpoint.keep=0", "checkpoint.keep=0: must be at least 1"),
    ("optimizer.name=sdg", "optimizer.name=sdg: unknown value; did you mean sgd?"),
    ("cluster.dead_seconds=0", "cluster.dead_seconds=0.0: must be positive"),
    ("evaluation.every_epochs=9", "so nothing would ever be evaluated"),
    ("evaluation.targets=[85]", "evaluation.targets[0]=85.0: must be a share in (0, 1]"),
    ("logging.every_steps=0", "logging.every_steps=0: must be at least 1"),
    ("logging.trackers=[wandv]", "logging.trackers[0]=wandv: unknown value; did you mean wandb?"),
    ("logging.wandb_mode=onlin", "logging.wandb_mode=onlin: unknown value; did you mean online?"),
    ("name=a/b", "name=a/b: must not contain a slash"),
    ("batch_size=4000", "5000 training samples are fewer than the 8000"),
    ("task.loss=cross_entrpy", "task.loss=cross_entrpy: unknown name; did you mean cross_entropy?"),
    ("task.metrics=[accurcy]", "task.metrics[0]=accurcy: unknown name; did you mean accuracy?"),
    ("task.metrics=[nowhere:error]", "task.metrics[0]=nowhere:error: cannot be imported"),
    ("task.metrics=[accuracy, accuracy]", "task.metrics=['accuracy', 'accuracy']: names a metric twice; give each once"),
    ("task.metrics=[loss] + evaluation.targets=[.nan]", "evaluation.targets[0]=nan: must be a finite number"),
    # things that are not there
    ("task.name=cifar", "task.name=cifar: unknown task; did you mean cifar10?"),
    ("task.name=cifar10", "cifar-10-batches-bin/test_batch.bin not found"),
    ("task.name=mnist", "MNIST/train-images-idx3-ubyte[.gz] not found"),
    ("task.name=nowhere:data", "task.name=nowhere:data: cannot be imported"),
    ("task.name=math:nothing", "task.name=math:nothing: cannot be imported"),
    ("task.name=math:sqrt", "task.args={}: math:sqrt does not accept them"),
    ("model.name=resnet19", "model.name=resnet19: unknown model; did you mean resnet18?"),
    ("model.name=os:getcwd", "returned a str, not a torch.nn.Module"),
    ("model.args={a: 1}", "requires model.name=module:callable"),
    ("task.name=${nothing}", "nothing"),
    ("nofile.yaml", "nofile.yaml: no such file"),
    ("configs/quikstart.yaml", "did you mean configs/quickstart.yaml?"),
    ("LICENSE", "LICENSE"),
]


@pytest.mark.parametrize(("mistake", "message"), MISTAKES, ids=[mistake for mistake, _ in MISTAKES])
def test_a_mistake_is_one_clear_line(
    mistake: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    arguments = [
        "configs/quickstart.yaml",
        f"output={tmp_path / 'runs'}",
        f"task.data_dir={tmp_path}",
        *mistake.split(" + "),
    ]
    assert train.main(arguments) == 2
    written = capsys.readouterr()
    lines = written.err.strip().splitlines()
    assert len(lines) == 1, written.err
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert not (tmp_path / "runs").exists(), "a run folder was made for a run that could not start"


def test_at_least_60_mistakes_are_covered() -> None:
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize("text", ["- a\n- b\n", "seed: [1\n", "seed: {\n", "a: b: c\n"])
def test_a_file_that_is_no_configuration(text: str, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml: .*") as caught:
        load_config([str(tmp_path / "bad.yaml")])
    assert "\n" not in str(caught.value)


def test_every_key_is_reached_by_an_override() -> None:
    config: Any = load_config(["cluster.speeds=[1, 2]", "cluster.proportional=true", "task.args={num_train: 8}"])
    assert config.speeds == [1, 2]
    assert config.task.args == {"num_train": 8}


# ------------------------------------------------------------------------------ what a change of a setting affects


def keys_that_may_differ(affected: Affects) -> set[str]:
    return {key for key in flattened(asdict(Config())) if may_differ(key, affected)}


def test_what_may_differ_between_runs() -> None:
    """The three sets, spelled out: the metadata of a field says which it is in."""
    keys = set(flattened(asdict(Config())))

    def in_sections(*sections: str) -> set[str]:
        return {key for key in keys if key.split(".")[0] in sections}

    nowhere = {"name", "output", "task.data_dir", "task.download"}
    assert keys_that_may_differ(Affects.RUN) == {
        *nowhere,
        *("loader_workers", "schedule.epochs", "schedule.steps"),
        *in_sections("cluster", "evaluation", "checkpoint", "logging"),
    }
    assert keys_that_may_differ(Affects.FIGURES) == {
        *nowhere,
        "seed",
        *("cluster.measure_seconds", "cluster.dead_seconds", "cluster.frozen_seconds"),
        *("evaluation.batch_size", "evaluation.targets", "evaluation.training_loss"),
        *("checkpoint.every_steps", "checkpoint.every_epochs", "checkpoint.every_minutes", "checkpoint.keep"),
        *in_sections("logging"),
    }
    assert keys_that_may_differ(Affects.CELL) == {
        *nowhere,
        *("evaluation.targets", "cluster.ctas", "cluster.offload"),
        *in_sections("logging", "checkpoint", "emulate"),
    }


def test_a_key_that_is_not_a_setting_affects_everything() -> None:
    for key in ("task.args.size", "algorithm.of_another_release", "nothing"):
        assert not any(may_differ(key, affected) for affected in (Affects.RUN, Affects.FIGURES, Affects.CELL))


# ------------------------------------------------------------------------------------------- keys of older releases


def test_merge_options_that_were_off_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("algorithm: {name: cocod, pull_back: 0.0, outer_momentum: 0.0}\n")
    assert load_config([str(tmp_path / "old.yaml")]) == load_config([])
    assert load_config(["algorithm.pull_back=0", "algorithm.outer_momentum=0"]) == load_config([])


def test_outer_momentum_becomes_an_outer_optimizer(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("algorithm: {outer_momentum: 0.5, period: 4}\n")
    for given in ([str(tmp_path / "old.yaml")], ["algorithm.outer_momentum=0.5", "algorithm.period=4"]):
        options = merged_config(given).algorithm
        assert options.outer == OuterConfig(rate=1.0, momentum=0.5, nesterov=False)
        assert options.period == 4
    assert merged_config([str(tmp_path / "old.yaml"), "algorithm.outer_momentum=0"]).algorithm.outer is None
    # Beside a key of today, the old one says nothing.
    assert merged_config(["algorithm={outer_momentum: 0.0, outer: {rate: 0.5}}"]).algorithm.outer == OuterConfig(rate=0.5)


def test_a_pull_is_refused_with_its_file(tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text("algorithm: {pull_back: 0.25}\n")
    with pytest.raises(ConfigError, match=r"old\.yaml: algorithm\.pull_back=0\.25: .*own_share") as caught:
        load_config([str(tmp_path / "old.yaml")])
    assert "\n" not in str(caught.value)


def test_an_outer_optimizer_saves_and_reloads(tmp_path: Path) -> None:
    config = merged_config(["algorithm.outer={rate: 0.7, momentum: 0.9, nesterov: true}", "algorithm.own_share=0.5"])
    save_config(config, tmp_path / "config.yaml")
    assert merged_config([str(tmp_path / "config.yaml")]) == config


def test_options_reach_the_constructors_that_take_them() -> None:
    """No list of options anywhere: a parameter of the same name is enough."""
    for name in ("local", "cocod", "asynlocal"):
        options = load_config([f"algorithm.name={name}", "algorithm.payload=bf16", "algorithm.optimizer_state=reset"])
        built = build_algorithm(options.algorithm, 5)
        assert (built.payload, built.optimizer_state) == ("bf16", "reset")
    built = build_algorithm(load_config(["algorithm.fragments=3"]).algorithm, 5)
    assert built.fragments == 3
    for option, names in (
        ("own_share", {"cocod"}),
        ("mix", {"streaming_diloco"}),
        ("outer", {"cocod", "local", "asynlocal", "diloco", "streaming_diloco"}),
    ):
        assert {name for name, kind in ALGORITHMS.items() if takes(kind, option)} == names


def test_merge_options_reach_the_constructors() -> None:
    from cocod_accel.averaging.rules import Outer

    given = ["algorithm.own_share=0.5", "algorithm.outer={rate: 0.7, momentum: 0.9, nesterov: true}"]
    built: Any = build_algorithm(load_config(given).algorithm, 5)
    assert built.own_share == 0.5
    assert built.outer == Outer(rate=0.7, momentum=0.9, nesterov=True)


def test_an_algorithm_of_ones_own() -> None:
    config = load_config(["algorithm.name=tests.own_code:PulledSGD", "algorithm.args={pull: 0.25}", "algorithm.period=3"])
    built: Any = Work.of(config, 500, 0).algorithm
    assert (type(built).__name__, built.pull, str(built.period)) == ("PulledSGD", 0.25, "3")
    assert config.run_name == "tests.own_code.PulledSGD-fashion_small-seed0"


def test_the_times_of_an_own_algorithm_are_not_simulated() -> None:
    cluster = load_cluster(CONFIGS / "cluster" / "office_1gbe.yaml")
    with pytest.raises(ConfigError, match=r"PulledSGD: pulled has no timing rule to simulate; choose from ssgd, pipe"):
        configured(cluster, ["algorithm.name=tests.own_code:PulledSGD"])


def test_a_reader_that_has_seen_enough_gets_no_traceback() -> None:
    """``cocod list | head -1``"""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "cocod_accel.cli", "list"], stdout=writing, stderr=subprocess.PIPE, timeout=60
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")
