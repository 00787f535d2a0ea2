"""Text by bytes and the small GPT: what is read and cut, written out here, and a run of two processes."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from cocod_accel.config.loading import load_config
from cocod_accel.config.strict import ConfigError
from cocod_accel.simulator.learning import Learning
from cocod_accel.tasks import build_model, build_task, task_facts
from cocod_accel.tasks.data import batches
from cocod_accel.tasks.metrics import METRICS
from cocod_accel.tasks.text import Sequences
from cocod_accel.trainer.steps import loss_of
from cocod_accel.trainer.work import Work
from tests import resume
from tests.workers import run_workers

CPU = torch.device("cpu")
GPT = ["model.name=gpt", "model.args={layers: 1, width: 16, heads: 2}"]
#: Nothing of the images that runs of these tests usually have.
IMAGES = ("task.name", "task.args", "task.augment", "model.name", "cluster.speeds")


def write_files(root: Path) -> list[str]:
    (root / "b").mkdir(parents=True)
    for name, text in {"b/two.txt": "def" * 9, "a.txt": "abc" * 9, "b/one.txt": "xyz" * 9, "c.txt": "0123" * 9}.items():
        (root / name).write_text(text)
    return [f"task.args={{files: {root}, length: 8, held_out: 2}}", "task.name=text"]


def test_files_are_joined_in_a_fixed_order_and_cut(tmp_path: Path) -> None:
    task = build_task(load_config([*write_files(tmp_path), *GPT]))
    train = "abc" * 9 + "\0" + "def" * 9 + "\0"  # of a.txt, b/one.txt, b/two.txt, c.txt the first and the third
    test = "xyz" * 9 + "\0" + "0123" * 9 + "\0"
    for data, text in ((task.train, train), (task.test, test)):
        found = list(batches(data, torch.arange((len(text) - 1) // 8), 2, CPU))
        inputs, targets = (torch.cat([batch[i] for batch in found]).flatten().tolist() for i in (0, 1))
        assert bytes(inputs).decode() == text[: len(inputs)]
        assert bytes(targets).decode() == text[1 : len(targets) + 1]
        assert len(inputs) == (len(text) - 1) // 8 * 8
    assert (task.input_shape, task.num_classes) == ((8,), 256)


def test_the_digest_is_of_content_and_of_what_is_held_out(tmp_path: Path) -> None:
    given = write_files(tmp_path)
    digest = build_task(load_config([*given, *GPT])).digest
    other = [argument.replace("held_out: 2", "held_out: 4") for argument in given]
    assert build_task(load_config([*other, *GPT])).digest != digest
    copied = tmp_path / "copied"
    assert build_task(load_config([*write_files(copied), *GPT])).digest == digest, "wherever the files are"


def test_limits_take_sequences_from_everywhere(tmp_path: Path) -> None:
    given = [*write_files(tmp_path), *GPT]
    limits = ["task.train_limit=3", "task.test_limit=2"]
    whole, few = build_task(load_config(given)), build_task(load_config([*given, *limits]))
    assert (whole.num_train, few.num_train, few.num_test) == (6, 3, 2)
    for index, place in enumerate((0, 2, 4)):
        mine, theirs = (next(iter(batches(t.train, torch.tensor([i]), 1, CPU))) for t, i in ((few, index), (whole, place)))
        assert torch.equal(mine[0], theirs[0])


def test_dealt_by_folder_no_worker_has_more_of_them_than_it_must(tmp_path: Path) -> None:
    config = load_config([*write_files(tmp_path), *GPT, "task.label_skew=0", "cluster.num_workers=2", "batch_size=1"])
    task = build_task(config)
    assert isinstance(task.train, Sequences)
    dealt = []
    for rank in range(2):
        work = Work.of(config, task.num_train, rank)
        generator = torch.Generator()
        supply = list(work.supply(config, task.train, 0, CPU, seed=0, generator=generator))
        dealt.append("".join(bytes(inputs.flatten().tolist()).decode() for inputs, _ in supply))
    assert set(dealt[0]) == set("abc"), "the first sequence that holds both begins in the first folder"
    assert set(dealt[1]) <= set("abcdef\0")
    assert "fde" in dealt[1]


def test_the_standard_library_is_there() -> None:
    config = load_config(["configs/language.yaml"])
    facts = task_facts(config)
    assert facts.num_train > 20_000
    assert facts.num_test == 512
    assert len(build_task(config).digest or "") == 32


def test_bits_per_byte_of_logits_written_out() -> None:
    logits, targets = torch.randn(2, 3, 5), torch.randint(0, 5, (2, 3))
    rows = logits.exp() / logits.exp().sum(-1, keepdim=True)
    expected = [-math.log2(rows[i, j, targets[i, j]].item()) for i in range(2) for j in range(3)]
    values = METRICS["bits_per_byte"].values
    assert values is not None
    assert values(logits, targets).tolist() == pytest.approx(expected, rel=1e-4)


def test_the_model_sees_only_what_came_before(tmp_path: Path) -> None:
    config = load_config([*write_files(tmp_path), *GPT])
    model = build_model(config, build_task(config))
    tokens = torch.randint(0, 256, (2, 8))
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 256
    before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])
    assert loss_of(model, (tokens, changed)).item() == pytest.approx(
        nn.functional.cross_entropy(before.transpose(1, 2), changed).item(), rel=1e-5
    )


def test_two_processes_train_as_the_simulator(tmp_path: Path) -> None:
    files = write_files(tmp_path / "files")
    case = resume.Case("cocod", False, "sgd", 0, False)
    more = [
        *files, *GPT, "batch_size=1", "schedule.epochs=null", "schedule.steps=9", "schedule.decay_epochs=[]",
        "evaluation.every_steps=4", "algorithm.period=2", "optimizer.name=adamw", "optimizer.clip_norm=1",
        "evaluation.targets=[7.9, 0.5]",
    ]  # fmt: skip
    given = [*(argument for argument in resume.arguments(case, tmp_path, "run") if not argument.startswith(IMAGES)), *more]
    assert run_workers(2, resume.worker, given, fresh=True) == [0, 0], resume.said(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    config = load_config(given)
    learning = Learning(config)
    learnt = [row.values["bits_per_byte"] for row in learning.rows() if row.kind == "eval"]
    assert [row["bits_per_byte"] for row in rows if row["kind"] == "eval"] == learnt
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["final_bits_per_byte"] == learnt[-1]
    assert summary["best_bits_per_byte"] == min(learnt)
    assert summary["model_digest"] == learning.outcome().model_digest
    assert summary["data_digest"] == build_task(config).digest
    last = [row for row in rows if row["kind"] == "eval"][-1]
    assert last["test_loss"] / math.log(2) == pytest.approx(last["bits_per_byte"], rel=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["task.args={file: x}"], "task.args.file=x: is not an option of the text task; it takes files, length, held_out"),
        (["task.args={length: 0}"], "task.args.length=0: must be a whole number of at least 1"),
        (["task.args={files: nowhere/*.txt}"], "task.args.files=nowhere/*.txt: matches no file"),
        (["task.args={files: configs/language.yaml}"], "task.args.held_out=20: of 1 files none would be held out"),
        (["task.args={files: configs, length: 10000000}"], "task.args.length=10000000: is more than all"),
        (["model.name=mlp"], "model.name=mlp: requires images, but the task has inputs of shape (128,); use model.name=gpt"),
        (["model.args={heads: 5}"], "model.args.heads=5 must divide width=96"),
        (["model.args={depth: 5}"], "model.args.depth=5: is not an option of gpt; it takes layers, width, heads"),
    ],
)
def test_mistakes(options: list[str], message: str) -> None:
    config = load_config(["task.name=text", "model.name=gpt", *options])
    with pytest.raises(ConfigError) as error:
        build_model(config, build_task(config))
    assert message in str(error.value)
    assert "\n" not in str(error.value)
