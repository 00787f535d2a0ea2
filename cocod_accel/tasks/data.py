"""Data sets and batches.

The built-in image sets fit in memory: they are stored as bytes, and a batch takes one indexing, one vectorised
augmentation and one normalisation, so loading is never a bottleneck and needs no extra processes. A user's ``Dataset``
goes through torch's ``DataLoader``.
"""

from __future__ import annotations

import gzip
import math
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from cocod_accel.config.settings import Config
from cocod_accel.config.strict import ConfigError, first_line
from cocod_accel.extras import missing
from cocod_accel.tasks.cifar import read_cifar_binary, read_cifar_pickle
from cocod_accel.tasks.structure import to_device
from cocod_accel.tasks.text import NUM_BYTES, Sequences, read_text_of

#: Tensors in any structure (:mod:`cocod_accel.tasks.structure`); of what is held in memory, (inputs, labels).
Batch = Any


@dataclass(frozen=True)
class Images:
    """Images (or any tensors) and labels in memory; bytes are scaled to [0, 1] and normalised when a batch is made."""

    inputs: Tensor
    labels: Tensor
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augment: bool = False

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, indices: Tensor, device: torch.device, generator: torch.Generator | None) -> Batch:
        inputs, labels = self.inputs[indices], self.labels[indices]
        if self.augment and generator is not None:
            inputs = crop_and_flip(inputs, generator)
        if device.type == "cuda":  # from other memory, a copy waits for the device
            inputs, labels = inputs.pin_memory(), labels.pin_memory()
        inputs, labels = inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)
        if inputs.dtype == torch.uint8:
            mean, std = _bytes_on(self.mean, device), _bytes_on(self.std, device)
            inputs = inputs.float().sub_(mean).div_(std)
        return inputs, labels


@lru_cache(maxsize=16)
def _bytes_on(channels: tuple[float, ...], device: torch.device) -> Tensor:
    # Kept there: sending them with every batch would make the host wait for the device.
    return torch.tensor(channels, device=device).mul_(255).view(1, -1, 1, 1)


def crop_and_flip(images: Tensor, generator: torch.Generator) -> Tensor:
    """The standard CIFAR augmentation on a whole batch: pad by 4 of 32, crop at random, flip half of the images."""
    count, _, height, width = images.shape
    padding = max(1, round(height / 8))
    padded = torch.nn.functional.pad(images, (padding,) * 4)
    top = torch.randint(0, 2 * padding + 1, (count,), generator=generator)
    left = torch.randint(0, 2 * padding + 1, (count,), generator=generator)
    flipped = torch.rand(count, generator=generator) < 0.5
    rows = top[:, None] + torch.arange(height)
    columns = torch.arange(width).expand(count, width)
    columns = left[:, None] + torch.where(flipped[:, None], columns.flip(1), columns)
    index = torch.arange(count)[:, None, None]
    return padded.permute(0, 2, 3, 1)[index, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()


@dataclass(frozen=True)
class Task:
    """Training and test data, and what a model must know about them."""

    train: Images | Sequences | Dataset[Any]
    test: Images | Sequences | Dataset[Any]
    input_shape: tuple[int, ...]
    num_classes: int
    #: Of the data, where they are not always the same.
    digest: str | None = None

    @property
    def num_train(self) -> int:
        return len(cast(Sized, self.train))

    @property
    def num_test(self) -> int:
        return len(cast(Sized, self.test))


def _outlive_a_polite_end(worker: int) -> None:
    """A launcher sends SIGTERM to all processes; data loaders must survive it until the workers have saved."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def batches(
    data: Images | Sequences | Dataset[Any],
    indices: Tensor,
    batch_size: int,
    device: torch.device,
    *,
    generator: torch.Generator | None = None,
    loader_workers: int = 0,
) -> Iterator[Batch]:
    """The samples at ``indices`` in that order, in batches, on ``device``; augmented if a generator is given."""
    if isinstance(data, Images | Sequences):
        for chosen in indices.split(batch_size):
            yield data.batch(chosen, device, generator)
        return
    groups = [chosen.tolist() for chosen in indices.split(batch_size)]
    # The caller's generator also seeds the loader's processes; torch's default would differ after a resume.
    pin = device.type == "cuda"
    loader = DataLoader(
        data,
        batch_sampler=groups,
        num_workers=loader_workers,
        pin_memory=pin,
        generator=generator,
        worker_init_fn=_outlive_a_polite_end,
    )
    for batch in loader:
        yield to_device(batch, device)


# ------------------------------------------------------------------------------------------------ sources

_FASHION = ((0.2860,), (0.3530,))
_MNIST = ((0.1307,), (0.3081,))
_CIFAR10 = ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))
_CIFAR100 = ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762))


def _image_task(
    config: Config, train: tuple[Any, Any], test: tuple[Any, Any], statistics: Any, num_classes: int, augment: bool
) -> Task:
    choice = config.task.augment
    parts = []
    for (images, labels), is_train in ((train, True), (test, False)):
        inputs = torch.tensor(images)
        inputs = shrunk(inputs.unsqueeze(1) if inputs.dim() == 3 else inputs, config.task.shrink)
        part = Images(inputs, torch.tensor(labels).long(), *statistics)
        if (
            len(inputs) != len(part.labels)
            or not len(inputs)
            or not 0 <= part.labels.min() <= part.labels.max() < num_classes
        ):
            which = "training" if is_train else "test"
            raise ConfigError(
                f"task.name={config.task.name}: its {which} labels are not one of {num_classes} classes for each image; "
                f"is {config.task.data_dir} the right folder?"
            )
        parts.append(replace(part, augment=is_train and (augment if choice is None else choice)))
    return _limited(Task(parts[0], parts[1], tuple(parts[0].inputs.shape[1:]), num_classes), config)


def shrunk(images: Tensor, factor: int) -> Tensor:
    """Bytes, downscaled by ``factor`` per side: the mean of each square of pixels; remaining rows and columns are cut."""
    if factor == 1:
        return images
    if min(images.shape[-2:]) < factor:
        raise ConfigError(
            f"task.shrink={factor}: is larger than the images ({tuple(images.shape[-2:])}); use a smaller factor"
        )
    pieces = [torch.nn.functional.avg_pool2d(piece.float(), factor).round_().byte() for piece in images.split(4096)]
    return torch.cat(pieces)


def _limited(task: Task, config: Config) -> Task:
    def cut(data: Any, limit: int | None) -> Any:
        if limit is None or limit >= len(data):
            return data
        if isinstance(data, Images):
            return replace(data, inputs=data.inputs[:limit], labels=data.labels[:limit])
        return torch.utils.data.Subset(data, range(limit))

    return replace(task, train=cut(task.train, config.task.train_limit), test=cut(task.test, config.task.test_limit))


def fashion_small(config: Config) -> Task:
    """Embedded: 5,000 training and 2,500 test images of Fashion-MNIST, balanced; needs no network"""
    with resources.as_file(resources.files("cocod_accel.tasks") / "fashion_small.npz") as path, np.load(path) as arrays:
        train, test = ((arrays[f"{split}_images"], arrays[f"{split}_labels"]) for split in ("train", "test"))
    return _image_task(config, train, test, _FASHION, 10, augment=False)


def read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """An array in MNIST's idx format, gzipped or not."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        num_dims = data[3]
        shape = [int.from_bytes(data[4 + 4 * i : 8 + 4 * i], "big") for i in range(num_dims)]
        values = np.frombuffer(data, np.uint8, offset=4 + 4 * num_dims)
    except (OSError, EOFError, IndexError, ValueError, zlib.error) as error:
        raise ConfigError(f"{path}: is not in MNIST's format ({first_line(error)}); download it again") from error
    if values.size != math.prod(shape):
        raise ConfigError(f"{path}: has {values.size} values, but its header says {shape}; download it again")
    return values.reshape(shape)


def _idx_files(config: Config) -> list[Path]:
    """Where MNIST's or Fashion-MNIST's four files are: images and labels to train with, then to test with."""
    folder = _FOLDERS[config.task.name]
    root = Path(config.task.data_dir)
    files = []
    for name in (f"{prefix}-{kind}-ubyte" for prefix in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")):
        places = [place / f"{name}{end}" for place in (root / folder / "raw", root / folder, root) for end in ("", ".gz")]
        found = next((path for path in places if path.is_file()), None)
        if found is None:
            raise _missing(config, folder, f"{name}[.gz]")
        files.append(found)
    return files


def _idx_task(config: Config, statistics: Any) -> Task:
    images, labels, test_images, test_labels = (read_idx(path) for path in _files(config))
    return _image_task(config, (images, labels), (test_images, test_labels), statistics, 10, augment=False)


def _files(config: Config) -> list[Path]:
    """The files of a data set that is not embedded, downloaded if that was asked for."""
    if config.task.download:
        _download(config, _FOLDERS[config.task.name])
    return _FINDERS[config.task.name](config)


def check_files(config: Config) -> None:
    """Raise if a data set is not there, without reading or downloading it."""
    finder = _FINDERS.get(config.task.name)
    if finder is not None and not config.task.download:
        finder(config)


def _missing(config: Config, folder: str, name: str) -> ConfigError:
    return ConfigError(
        f"task.data_dir={config.task.data_dir}: {folder}/{name} not found; set task.data_dir, or task.download=true"
    )


def _download(config: Config, name: str) -> None:
    absent = missing("torchvision", "vision")
    if absent is not None:
        raise ConfigError(f"task.download=true: {absent}")
    import torchvision.datasets

    try:
        kind = getattr(torchvision.datasets, name)
        # Never its constructor: it also loads what it finds in the folder, which may unpickle it.
        data = kind.__new__(kind)
        data.root = config.task.data_dir
        data.download()
    except Exception as error:
        raise ConfigError(
            f"task.download=true: {name} cannot be downloaded ({type(error).__name__}); copy it to {config.task.data_dir}"
        ) from error


def fashion_mnist(config: Config) -> Task:
    """Fashion-MNIST: 60,000 + 10,000 grey images of 28x28, 10 classes"""
    return _idx_task(config, _FASHION)


def mnist(config: Config) -> Task:
    """MNIST: 60,000 + 10,000 grey images of 28x28, 10 digits"""
    return _idx_task(config, _MNIST)


def _joined(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def _cifar10_files(config: Config) -> list[Path]:
    """Five batches to train with, and one to test with."""
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return _cifar_files(config, "cifar-10-batches-bin", "cifar-10-batches-py", names)


def _cifar100_files(config: Config) -> list[Path]:
    return _cifar_files(config, "cifar-100-binary", "cifar-100-python", ["train", "test"])


def _cifar_files(config: Config, binary: str, pickled: str, names: list[str]) -> list[Path]:
    root = Path(config.task.data_dir)
    kinds = [[root / binary / f"{name}.bin" for name in names], [root / pickled / name for name in names]]
    files = next((files for files in kinds if files[-1].is_file()), kinds[0])
    for path in [files[-1], *files]:
        if not path.is_file():
            raise _missing(config, path.parent.name, path.name)
    return files


def _cifar_task(config: Config, statistics: Any, label_bytes: int, key: str, num_classes: int) -> Task:
    parts = [
        read_cifar_binary(path, label_bytes) if path.suffix == ".bin" else read_cifar_pickle(path, key)
        for path in _files(config)
    ]
    return _image_task(config, _joined(parts[:-1]), parts[-1], statistics, num_classes, augment=True)


def cifar10(config: Config) -> Task:
    """CIFAR-10: 50,000 + 10,000 colour images of 32x32, 10 classes; torchvision's files or cifar-10-batches-bin/"""
    return _cifar_task(config, _CIFAR10, 1, "labels", 10)


def cifar100(config: Config) -> Task:
    """CIFAR-100: 50,000 + 10,000 colour images of 32x32, 100 classes; torchvision's files or cifar-100-binary/"""
    return _cifar_task(config, _CIFAR100, 2, "fine_labels", 100)


#: Folders of the data sets that are not embedded, which are also torchvision's names for them.
_FOLDERS = {"mnist": "MNIST", "fashion_mnist": "FashionMNIST", "cifar10": "CIFAR10", "cifar100": "CIFAR100"}
_FINDERS: dict[str, Callable[[Config], list[Path]]] = {
    "mnist": _idx_files,
    "fashion_mnist": _idx_files,
    "cifar10": _cifar10_files,
    "cifar100": _cifar100_files,
}


#: Of all synthetic images together: 8 GB.
_MOST_PIXELS = 2_000_000_000


def synthetic_options(config: Config) -> dict[str, Any]:
    """``task.args`` of the synthetic task, checked and completed with defaults."""
    options: dict[str, Any] = {
        "num_train": 512,
        "num_test": 256,
        "num_classes": 10,
        "size": 16,
        "channels": 1,
        "noise": 1.0,
    }
    for key, value in config.task.args.items():
        if key not in options:
            raise ConfigError(
                f"task.args.{key}={value}: is not an option of the synthetic task; it takes {', '.join(options)}"
            )
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not number or (key != "noise" and not isinstance(value, int)):
            raise ConfigError(
                f"task.args.{key}={value}: must be a positive {'number' if key == 'noise' else 'whole number'}"
            )
        options[key] = value
    num_images = options["num_train"] + options["num_test"] + options["num_classes"]
    pixels = options["channels"] * options["size"] ** 2
    if num_images * pixels > _MOST_PIXELS or pixels > _MOST_PIXELS // 1000:
        raise ConfigError(
            f"task.args={options}: is too large to hold in memory; at most {_MOST_PIXELS:,} pixels, and a thousandth of "
            "that in one image"
        )
    return options


def synthetic(config: Config) -> Task:
    """Random but learnable: task.args = {num_train, num_test, num_classes, size, channels, noise}, seeded"""
    options = synthetic_options(config)
    generator = torch.Generator().manual_seed(config.seed)
    shape = (options["channels"], options["size"], options["size"])
    centres = torch.randn(options["num_classes"], *shape, generator=generator)
    parts = []
    for count in (options["num_train"], options["num_test"]):
        labels = torch.arange(count) % options["num_classes"]
        noise = torch.randn(count, *shape, generator=generator) * options["noise"]
        parts.append(Images(centres[labels] + noise, labels))
    return _limited(Task(parts[0], parts[1], shape, options["num_classes"]), config)


def text(config: Config) -> Task:
    """Bytes of files: task.args = {files, length, held_out}; default: the Python standard library's own sources"""
    found, task = read_text_of(config), config.task
    train, test = found.train.limited(task.train_limit), found.test.limited(task.test_limit)
    return Task(train, test, (train.length,), NUM_BYTES, found.digest)


def own_task(value: Any, config: Config) -> Task:
    """A task from a user's (train, test): two Datasets, or two pairs of tensors (inputs, labels)."""
    name = config.task.name
    if not (isinstance(value, tuple) and len(value) == 2):
        raise ConfigError(f"task.name={name}: must return (train, test), returned {type(value).__name__}")
    parts: list[Any] = []
    for part in value:
        if isinstance(part, tuple) and len(part) == 2 and all(isinstance(t, Tensor) for t in part):
            parts.append(Images(part[0], part[1]))
        elif hasattr(part, "__getitem__") and hasattr(part, "__len__"):
            parts.append(part)
        else:
            raise ConfigError(
                f"task.name={name}: returned a {type(part).__name__}; use a Dataset with a length or (inputs, labels)"
            )
    for part, which in zip(parts, ("train", "test"), strict=True):
        if len(part) == 0:
            raise ConfigError(f"task.name={name}: its {which} set is empty")
    if isinstance(parts[0], Images):
        shape, labels = tuple(parts[0].inputs.shape[1:]), parts[0].labels
        num_classes = int(labels.max()) + 1
    else:
        sample = parts[0][0]
        first = sample[0] if isinstance(sample, tuple | list) else sample
        shape, num_classes = () if isinstance(first, Mapping) else tuple(torch.as_tensor(first).shape), 0
    return _limited(Task(parts[0], parts[1], shape, num_classes), config)


DATASETS: dict[str, Callable[[Config], Task]] = {
    "fashion_small": fashion_small,
    "synthetic": synthetic,
    "text": text,
    "fashion_mnist": fashion_mnist,
    "mnist": mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
}
