"""A Hugging Face Trainer with CoCoD-SGD: a small BERT, from scratch, learns to tell Python code from English prose.

    accelerate launch --config_file configs/accelerate/cpu_2.yaml examples/hf_trainer.py
    accelerate launch --config_file configs/accelerate/cpu_2.yaml examples/hf_trainer.py --resume --epochs 6
    python examples/hf_trainer.py                                                                   # one process

Nothing is downloaded: the model is made from its configuration, and both kinds of text come with every Python. The
line with CoCoDCallback is all that was added. Evaluations and checkpoints have the mean model.
"""

from __future__ import annotations

import argparse
import inspect
import random
import typing
import zlib
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    EvalPrediction,
    Trainer,
    TrainingArguments,
    set_seed,
)

from cocod_accel import SSGD, CoCoDSGD, LocalSGD
from cocod_accel.hf import CoCoDCallback

LENGTH = 64


def make_data(count: int, is_train: bool) -> list[dict[str, Any]]:
    """Pieces of text as bytes; label 1: Python code. Tests are from the last fifth of both texts."""
    prose = "\n".join(topics[name] for name in sorted(topics)).encode()
    code = "\n".join(inspect.getsource(module) for module in (argparse, inspect, random, typing)).encode()
    generator = random.Random(is_train)
    rows = []
    for label in (index % 2 for index in range(count)):
        text = (prose, code)[label]
        border = len(text) * 4 // 5
        start = generator.randrange(border - LENGTH) if is_train else generator.randrange(border, len(text) - LENGTH)
        rows.append({"input_ids": list(text[start : start + LENGTH]), "labels": label})
    return rows


def accuracy(prediction: EvalPrediction) -> dict[str, float]:
    return {"accuracy": float((np.argmax(prediction.predictions, -1) == prediction.label_ids).mean())}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithm", choices=["ssgd", "local", "cocod"], default="cocod")
    parser.add_argument("--period", type=int, default=5, help="steps a round, of local and cocod")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4000)
    parser.add_argument("--batch-size", type=int, default=16, help="of each worker")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint")
    parser.add_argument("--output", default="runs/hf_trainer", metavar="FOLDER", help="gets checkpoints and the model")
    args = parser.parse_args()
    try:
        local, cocod = LocalSGD(args.period), CoCoDSGD(args.period)
    except ValueError as error:
        parser.error(str(error))
    if args.resume and not any(Path(args.output).glob("checkpoint-*")):
        parser.error(f"--resume: {args.output} holds no checkpoint; run it without first")
    args.method = {"ssgd": SSGD(), "local": local, "cocod": cocod}[args.algorithm]
    return args


def main() -> None:
    args = parse_arguments()
    set_seed(args.seed)
    config = BertConfig(
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=LENGTH,
    )
    model = BertForSequenceClassification(config)  # of two classes, unless told otherwise
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=args.output,
            use_cpu=not torch.cuda.is_available(),  # without it, workers on CPUs stay unconnected
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=100,
            learning_rate=args.learning_rate,
            eval_strategy="epoch",
            save_strategy="epoch",
            save_total_limit=1,
            logging_steps=50,  # workers meet here: Trainer gathers the loss
            average_tokens_across_devices=False,  # would make them meet in every step
            report_to="none",
            seed=args.seed,
        ),
        train_dataset=make_data(args.samples, is_train=True),
        eval_dataset=make_data(1000, is_train=False),
        compute_metrics=accuracy,
    )
    trainer.add_callback(CoCoDCallback(trainer, algorithm=args.method))  # with period=5 alone: CoCoDSGD(5)
    trainer.train(resume_from_checkpoint=args.resume)

    metrics = trainer.evaluate()  # every worker holds the mean model now
    trainer.save_model()
    checksum = zlib.crc32(b"".join(value.cpu().numpy().tobytes() for value in model.state_dict().values()))
    lines = gather_object([f"worker {trainer.args.process_index}: {trainer.state.global_step} steps, model {checksum:08x}"])
    if trainer.is_world_process_zero():
        print(f"end: loss {metrics['eval_loss']:.3f}, accuracy {metrics['eval_accuracy']:.1%}", *lines, sep="\n")
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
