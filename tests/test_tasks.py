"""Data in every layout that is read, on small files made here; the models; the augmentation."""

from __future__ import annotations

import gzip
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from cocod_accel.config.loading import load_config
from cocod_accel.config.settings import Config, TaskConfig
from cocod_accel.config.strict import ConfigError
from cocod_accel.tasks import DATASETS, MODELS, TaskFacts, build_task, task_facts
from cocod_accel.tasks.data import Images, batches, crop_and_flip

CPU = torch.device("cpu")


def config(name: str, folder: Path | None = None, **options: object) -> Config:
    task = TaskConfig(name=name, data_dir=str(folder))
    for key, value in options.items():
        setattr(task, key, value)
    return Config(task=task)


def images(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 32, 32), dtype=np.uint8)


def in_memory(data: object) -> Images:
    assert isinstance(data, Images)
    return data


def test_cifar10_binary_and_torchvision_layouts_agree(tmp_path: Path) -> None:
    binary, pickled = tmp_path / "b" / "cifar-10-batches-bin", tmp_path / "p" / "cifar-10-batches-py"
    binary.mkdir(parents=True)
    pickled.mkdir(parents=True)
    for seed, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pixels, labels = images(4, seed), np.arange(4, dtype=np.uint8) + seed
        rows = np.concatenate([labels[:, None], pixels.reshape(4, -1)], axis=1)
        (binary / f"{name}.bin").write_bytes(rows.tobytes())
        (pickled / name).write_bytes(pickle.dumps({"data": pixels.reshape(4, -1), "labels": labels.tolist()}))
    first, second = (build_task(config("cifar10", tmp_path / folder)) for folder in ("b", "p"))
    assert (first.num_train, first.num_test, first.input_shape, first.num_classes) == (20, 4, (3, 32, 32), 10)
    for a, b in ((first.train, second.train), (first.test, second.test)):
        assert torch.equal(in_memory(a).inputs, in_memory(b).inputs)
        assert torch.equal(in_memory(a).labels, in_memory(b).labels)
    assert in_memory(first.train).augment
    assert not in_memory(first.test).augment
    (binary / "test_batch.bin").write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"5 bytes is not a multiple of the record size 3073"):
        build_task(config("cifar10", tmp_path / "b"))


def test_cifar100_binary_takes_the_fine_label(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name in ("train", "test"):
        rows = np.concatenate([np.full((3, 1), 7), np.array([[55], [99], [0]]), images(3, 0).reshape(3, -1)], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.astype(np.uint8).tobytes())
    task = build_task(config("cifar100", tmp_path))
    assert in_memory(task.train).labels.tolist() == [55, 99, 0]
    assert task.num_classes == 100


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST/raw"), ("fashion_mnist", "FashionMNIST/raw"), ("mnist", ".")])
def test_idx_files_gzipped_or_not(name: str, folder: str, tmp_path: Path) -> None:
    root = tmp_path / folder
    root.mkdir(parents=True, exist_ok=True)
    for prefix, count in (("train", 6), ("t10k", 3)):
        pixels, labels = np.arange(count * 784, dtype=np.uint32).astype(np.uint8), np.arange(count, dtype=np.uint8)
        header = b"\0\0\x08\x03" + b"".join(int(n).to_bytes(4, "big") for n in (count, 28, 28))
        (root / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(header + pixels.tobytes()))
        (root / f"{prefix}-labels-idx1-ubyte").write_bytes(b"\0\0\x08\x01" + count.to_bytes(4, "big") + labels.tobytes())
    task = build_task(config(name, tmp_path))
    assert (task.num_train, task.num_test, task.input_shape) == (6, 3, (1, 28, 28))
    assert in_memory(task.train).labels.tolist() == list(range(6))


def test_the_embedded_default_is_balanced_and_needs_no_folder() -> None:
    task = build_task(config("fashion_small"))
    assert (task.num_train, task.num_test) == (5000, 2500)
    assert in_memory(task.train).labels.bincount().tolist() == [500] * 10
    assert in_memory(task.test).labels.bincount().tolist() == [250] * 10
    assert task.num_test >= 2000


def test_limits_cut_both_sets() -> None:
    task = build_task(config("fashion_small", train_limit=100, test_limit=7))
    assert (task.num_train, task.num_test) == (100, 7)


def test_synthetic_data_is_seeded_and_refuses_unknown_arguments() -> None:
    first, again = (in_memory(build_task(config("synthetic")).train) for _ in range(2))
    assert torch.equal(first.inputs, again.inputs)
    for args, message in (({"sise": 3}, "takes num_train"), ({"size": 0}, "positive"), ({"size": 1.5}, "whole")):
        with pytest.raises(ConfigError, match=message):
            build_task(config("synthetic", args=args))


def test_every_batch_holds_what_its_indices_say() -> None:
    data = in_memory(build_task(config("fashion_small", train_limit=10)).train)
    indices = torch.tensor([3, 9, 1, 0, 5])
    got = list(batches(data, indices, 2, CPU))
    assert [len(labels) for _, labels in got] == [2, 2, 1]
    assert torch.cat([labels for _, labels in got]).tolist() == data.labels[indices].tolist()
    inputs = torch.cat([x for x, _ in got])
    expected = (data.inputs[indices].float() / 255 - 0.2860) / 0.3530
    assert torch.allclose(inputs, expected, atol=1e-5)


def test_the_augmentation_crops_and_flips() -> None:
    """Every augmented image is one of the 9 x 9 crops of its padded original, flipped or not."""
    batch = torch.randint(1, 256, (12, 3, 8, 8), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    out = crop_and_flip(batch, torch.Generator().manual_seed(1))
    padded = torch.nn.functional.pad(batch, (4, 4, 4, 4))
    flips = 0
    for index in range(12):
        crops = {
            (top, left, flip): padded[index, :, top : top + 8, left : left + 8].flip(2)
            if flip
            else padded[index, :, top : top + 8, left : left + 8]
            for top in range(9)
            for left in range(9)
            for flip in (False, True)
        }
        matches = [key for key, crop in crops.items() if torch.equal(crop, out[index])]
        assert matches
        flips += matches[0][2]
    assert 0 < flips < 12
    assert torch.equal(out, crop_and_flip(batch, torch.Generator().manual_seed(1)))


@pytest.mark.parametrize(("name", "parameters"), [("resnet18", 11_173_962), ("vgg16", 14_724_042), ("small_resnet", 77_754)])
def test_models_have_their_known_sizes(name: str, parameters: int) -> None:
    shape = (1, 28, 28) if name == "small_resnet" else (3, 32, 32)
    model = MODELS[name](shape, 10)
    assert sum(p.numel() for p in model.parameters()) == parameters
    model.eval()
    assert model(torch.zeros(2, *shape)).shape == (2, 10)


def test_every_task_says_what_it_is() -> None:
    assert all(make.__doc__ for make in DATASETS.values())


def test_what_is_known_without_data_is_what_the_data_says() -> None:
    for options in (
        ["task.name=fashion_small"],
        ["task.name=fashion_small", "task.train_limit=70", "task.test_limit=9000"],
        ["task.name=synthetic", "task.args={num_train: 96, size: 8, channels: 3, num_classes: 4}"],
        ["task.name=tests.own_code:make_tensors"],
    ):
        config = load_config(options)
        task = build_task(config)
        assert task_facts(config) == TaskFacts(task.num_train, task.num_test, task.input_shape, task.num_classes)


def test_the_sizes_of_data_that_is_not_here_are_those_of_its_authors() -> None:
    for name in ("mnist", "fashion_mnist", "cifar10", "cifar100"):
        facts = task_facts(load_config([f"task.name={name}"]))
        assert (facts.num_train, facts.num_test) == ((50_000, 10_000) if "cifar" in name else (60_000, 10_000))
        assert facts.input_shape == ((3, 32, 32) if "cifar" in name else (1, 28, 28))
        assert facts.num_classes == (100 if name == "cifar100" else 10)
    with pytest.raises(ConfigError, match=r"task.name=cifar11: unknown task; did you mean cifar10\?"):
        task_facts(load_config(["task.name=cifar11"]))
