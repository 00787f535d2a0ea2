"""A Hugging Face Trainer with the callback: trained, evaluated, saved and resumed on real processes."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from cocod_accel import AsynLocalSGD, CoCoDSGD, LocalSGD, attach
from tests import loops
from tests.workers import preload, run_outcomes, run_workers

pytestmark = pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
STEPS = 12
preload("transformers.trainer", "transformers.models.bert.modeling_bert")


def as_launched(rank: int) -> None:
    os.environ.update(LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TOKENIZERS_PARALLELISM="false")


def make_model(dropout: float) -> Any:
    import transformers

    bert: Any = transformers
    torch.manual_seed(5)
    config = bert.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24, num_labels=2,
        max_position_embeddings=12, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return bert.BertForSequenceClassification(config)


def make_data(count: int) -> list[dict[str, Any]]:
    """Texts of twelve words; the label says whether the first half has the larger words."""
    generator = torch.Generator().manual_seed(count)
    rows = torch.randint(40, (count, 12), generator=generator)
    return [{"input_ids": row, "labels": int(row[:6].sum() > row[6:].sum())} for row in rows]


def make_trainer(folder: str, dropout: float = 0.1, stop: int | None = None, **settings: Any) -> Any:
    """``stop``: an exception in the step after this one, as if the power had gone."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == stop:
                raise KeyError("power")

    common: dict[str, Any] = {
        "output_dir": folder, "use_cpu": True, "per_device_train_batch_size": 4, "max_steps": STEPS, "report_to": [],
        "learning_rate": 1e-2, "save_strategy": "no", "logging_steps": 5, "disable_tqdm": True, "seed": 3,
        "optim": "adamw_torch",
    }  # fmt: skip
    args = TrainingArguments(**{**common, **settings})
    trainer = Trainer(model=make_model(dropout), args=args, train_dataset=make_data(40), eval_dataset=make_data(10))
    trainer.add_callback(Stop())
    return trainer


def train_with_callback(rank: int, folder: str, resumes: bool, settings: dict[str, Any], algorithm: Any = None) -> Any:
    as_launched(rank)
    from cocod_accel.hf import CoCoDCallback

    trainer = make_trainer(folder, **settings)
    callback = CoCoDCallback(trainer, period=3) if algorithm is None else CoCoDCallback(trainer, algorithm=algorithm)
    trainer.add_callback(callback)
    trainer.train(resume_from_checkpoint=resumes)
    assert callback.sync is not None
    assert callback.sync.stats().rounds == callback.sync.attempts // 3 if algorithm is None else 4
    with pytest.raises(RuntimeError, match="after detach"):
        callback.sync.finish()
    return loops.snapshot(trainer.model), trainer.state.log_history, trainer.args.average_tokens_across_devices


def by_hand(rank: int, folder: str) -> Any:
    """The loop a user would write with accelerate, on the Trainer's own batches."""
    as_launched(rank)
    from accelerate.accelerator import Accelerator
    from transformers import get_scheduler

    trainer = make_trainer(folder, dropout=0.0)
    loader = trainer.get_train_dataloader()
    accelerator = Accelerator(cpu=True)
    model = make_model(0.0)
    model, optimizer = accelerator.prepare(
        model, torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0, fused=False)
    )
    scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=STEPS)
    sync = attach(model, optimizer, CoCoDSGD(period=3))
    step = epoch = 0
    while step < STEPS:
        loader.set_epoch(epoch)
        for batch in loader:
            model.train()
            accelerator.backward(model(**batch).loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step == STEPS:
                break
        epoch += 1
    sync.finish()
    return loops.snapshot(model), sync.stats().rounds


def test_the_final_model_is_that_of_a_loop_written_by_hand(tmp_path: Path) -> None:
    trained = run_workers(2, train_with_callback, str(tmp_path), False, {"dropout": 0.0}, seconds=110)
    expected = run_workers(2, by_hand, str(tmp_path), seconds=110)
    assert [rounds for _, rounds in expected] == [4, 4]
    logged = [row for row in trained[0][1] if "loss" in row]
    assert [row["rounds"] for row in logged] == [1, 3]  # after 5 and 10 steps
    assert all(row["comm_hidden_seconds"] >= 0 <= row["comm_exposed_seconds"] for row in logged)
    assert [row["drift"] > 0 for row in logged] == [False, True]  # the first mean is known, and not sent
    start = loops.snapshot(make_model(0.0))
    for (found, _, averages_tokens), (wanted, _) in zip(trained, expected, strict=True):
        assert averages_tokens is False
        assert not torch.equal(found[0], start[0])
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)
    assert all(torch.equal(a, b) for a, b in zip(trained[0][0], trained[1][0], strict=True))


SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 5, "eval_strategy": "steps", "eval_steps": 4}


def stopped(num_workers: int, folder: Path, algorithm: Any = None) -> None:
    """Train, and fail in the middle of a round, two steps after a checkpoint."""
    settings = {**SAVING, "stop": 7}
    for outcome in run_outcomes(num_workers, train_with_callback, str(folder), False, settings, algorithm, seconds=110):
        assert outcome.error is not None
        assert outcome.error[0] == "KeyError"


@pytest.mark.parametrize("algorithm", [None, LocalSGD(4, optimizer_state="average")], ids=["cocod", "local"])
def test_a_resumed_run_is_the_run_that_never_stopped_bit_for_bit(algorithm: Any, tmp_path: Path) -> None:
    """With dropout: random numbers come back, too."""
    whole = run_workers(2, train_with_callback, str(tmp_path / "whole"), False, SAVING, algorithm, seconds=110)
    stopped(2, tmp_path / "parts", algorithm)
    assert sorted(path.name for path in (tmp_path / "parts").glob("checkpoint-*")) == ["checkpoint-5"]
    again = run_workers(2, train_with_callback, str(tmp_path / "parts"), True, SAVING, algorithm, seconds=110)
    for (expected, log, _), (found, log_too, _) in zip(whole, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
        evaluations = [[row["eval_loss"] for row in rows if "eval_loss" in row] for rows in (log, log_too)]
        assert evaluations[0] == evaluations[1]
        assert len(evaluations[0]) == 3


def evaluated(rank: int, folder: str) -> Any:
    """What an evaluation sees, what a checkpoint's model is, and the workers' own models at that step."""
    as_launched(rank)
    from safetensors.torch import load_file

    from cocod_accel.hf import CoCoDCallback

    trainer = make_trainer(folder, **{**SAVING, "max_steps": 5, "eval_steps": 5})
    callback = CoCoDCallback(trainer, period=3)
    seen: list[Any] = []
    own: list[Any] = []

    def look(prediction: Any) -> dict[str, float]:
        seen.append(loops.snapshot(trainer.model))
        return {}

    from transformers import TrainerCallback

    class Own(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if state.global_step == 5:
                own.append(loops.snapshot(trainer.model))

        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            own.append(loops.snapshot(trainer.model))

    trainer.compute_metrics = look
    trainer.add_callback(callback)
    trainer.add_callback(Own())
    trainer.train()
    torch.distributed.barrier()
    saved = load_file(Path(folder) / "checkpoint-5" / "model.safetensors")
    names = [name for name, _ in trainer.model.named_parameters()]
    return own, seen, [saved[name] for name in names]


def test_evaluation_and_checkpoints_have_the_averaged_model(tmp_path: Path) -> None:
    results = run_workers(2, evaluated, str(tmp_path), seconds=110)
    (mine, *_), (theirs, *_) = results[0][0], results[1][0]
    assert not torch.equal(mine[0], theirs[0])
    for own, seen, saved in results:
        assert all(torch.equal(a, b) for a, b in zip(own[0], own[1], strict=True)), "the local model comes back"
        for index, value in enumerate(seen[0]):
            torch.testing.assert_close(value, (mine[index] + theirs[index]) / 2)
            assert torch.equal(value, saved[index])


def best_model(rank: int, folder: str) -> Any:
    as_launched(rank)
    from safetensors.torch import load_file

    from cocod_accel.hf import CoCoDCallback

    best: dict[str, Any] = {"load_best_model_at_end": True, "save_steps": 4, "metric_for_best_model": "loss"}
    trainer = make_trainer(folder, **{**SAVING, **best})
    trainer.add_callback(CoCoDCallback(trainer, period=3))
    trainer.train()
    saved = load_file(Path(trainer.state.best_model_checkpoint) / "model.safetensors")
    return [torch.equal(value, saved[name]) for name, value in trainer.model.named_parameters()]


def test_the_best_model_stays_the_best_model(tmp_path: Path) -> None:
    assert all(all(equal) for equal in run_workers(2, best_model, str(tmp_path), seconds=110))


def other_workers(rank: int, folder: str) -> Any:
    """Saved by two workers, gone on by one."""
    return train_with_callback(rank, folder, True, SAVING)[0]


def test_another_number_of_workers_goes_on_from_the_mean(tmp_path: Path) -> None:
    stopped(2, tmp_path)
    run_workers(1, other_workers, str(tmp_path), seconds=110)


def with_several_data_sets(rank: int, folder: str) -> Any:
    as_launched(rank)
    from cocod_accel.hf import CoCoDCallback

    trainer = make_trainer(folder, eval_strategy="steps", eval_steps=6, include_num_input_tokens_seen="all")
    trainer.eval_dataset = {"a": make_data(6), "b": make_data(8)}
    trainer.add_callback(CoCoDCallback(trainer, period=3))
    trainer.train()
    keys = {key for row in trainer.state.log_history for key in row if key.endswith("_loss")}
    return keys, trainer.args.include_num_input_tokens_seen


def test_several_evaluation_sets_and_no_counting_of_tokens(tmp_path: Path) -> None:
    for keys, counting in run_workers(2, with_several_data_sets, str(tmp_path), seconds=110):
        assert keys >= {"eval_a_loss", "eval_b_loss"}
        assert counting == "no"


def with_nodes(rank: int, folder: str) -> Any:
    as_launched(rank)
    from cocod_accel.hf import CoCoDCallback

    inner, _ = torch.distributed.new_subgroups(2)
    trainer = make_trainer(folder, dropout=0.0, max_steps=4)
    trainer.add_callback(CoCoDCallback(trainer, period=2, inner=inner))
    trainer.train()
    return loops.snapshot(trainer.model)


def test_a_trainer_on_two_nodes_of_two(tmp_path: Path) -> None:
    results = run_workers(4, with_nodes, str(tmp_path), seconds=110)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize(("damage", "message"), [("stale", "states of different steps"), ("truncated", "rank 1: ")])
def test_workers_states_that_do_not_belong_together_are_refused_on_all(damage: str, message: str, tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    run_workers(2, train_with_callback, str(tmp_path), False, settings, seconds=110)
    one, other = (tmp_path / f"checkpoint-{step}" / "worker_1.safetensors" for step in (2, 4))
    other.write_bytes(one.read_bytes() if damage == "stale" else other.read_bytes()[:100])
    for outcome in run_outcomes(2, train_with_callback, str(tmp_path), True, {**settings, "max_steps": 6}, seconds=110):
        assert outcome.error is not None
        assert outcome.error[0] == "CheckpointError"
        assert message in outcome.error[1]


def foreign_checkpoint(rank: int, folder: str) -> None:
    as_launched(rank)
    from cocod_accel.hf import CoCoDCallback

    make_trainer(folder, save_strategy="steps", save_steps=5, max_steps=5).train()
    torch.distributed.barrier()
    trainer = make_trainer(folder)
    trainer.add_callback(CoCoDCallback(trainer, period=3))
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-5")


def test_a_checkpoint_of_a_run_without_the_callback_is_refused(tmp_path: Path) -> None:
    for outcome in run_outcomes(2, foreign_checkpoint, str(tmp_path), seconds=110):
        assert outcome.error is not None
        assert outcome.error[0] == "CheckpointError"
        assert "was not saved with CoCoDCallback; resume without it, or start a new run" in outcome.error[1]


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({}, "pass either period=5, for CoCoDSGD, or algorithm="),
    ({"period": 3, "algorithm": LocalSGD(3)}, "pass either period=5, for CoCoDSGD, or algorithm="),
    ({"algorithm": AsynLocalSGD(2)}, "Trainer gives every worker the same number of steps; use LocalSGD"),
    ({"period": 0}, "period=0: a period must be at least 1"),
]


def mistaken(rank: int, folder: str) -> list[str]:
    as_launched(rank)
    from cocod_accel.hf import CoCoDCallback

    trainer, said = make_trainer(folder), []
    for given, _ in MISTAKES:
        try:
            CoCoDCallback(trainer, **given)
        except (TypeError, ValueError) as error:
            said.append(str(error))
    return said


def test_mistakes_are_one_clear_line(tmp_path: Path) -> None:
    (said,) = run_workers(1, mistaken, str(tmp_path), seconds=110)
    for line, (_, message) in zip(said, MISTAKES, strict=True):
        assert message in line
        assert "\n" not in line
