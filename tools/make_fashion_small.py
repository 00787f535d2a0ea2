"""Make the embedded default data set: the first 500 training and 250 test images of each class of Fashion-MNIST.

python tools/make_fashion_small.py FOLDER     (with the four original *-ubyte.gz files)
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from cocod_accel.tasks.data import read_idx

TARGET = Path(__file__).parents[1] / "cocod_accel/tasks/fashion_small.npz"


def main(folder: Path) -> None:
    arrays = {}
    for split, prefix, per_class in (("train", "train", 500), ("test", "t10k", 250)):
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
        chosen = np.sort(np.concatenate([np.flatnonzero(labels == label)[:per_class] for label in range(10)]))
        arrays[f"{split}_images"], arrays[f"{split}_labels"] = images[chosen], labels[chosen]
    np.savez_compressed(TARGET, **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
