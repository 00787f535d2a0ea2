"""A loader over this worker's shard, for an accelerate loop."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def pass_through(loader: DataLoader[Any], accelerator: Any) -> Any:
    """``loader`` as prepared by ``accelerator.prepare``, but without dealing its batches to the workers.

    Normally accelerate deals the batches of one common loader to the workers. A loader over this worker's shard only
    has to move batches to the device, to tell the accelerator when it ends (or gradient accumulation loses the last
    steps), and to count epochs for its sampler.
    """
    from accelerate.data_loader import prepare_data_loader

    passed = prepare_data_loader(
        loader, device=accelerator.device, num_processes=1, process_index=0, put_on_device=True, rng_types=None
    )
    # The mark of prepared loaders: a second ``prepare`` leaves the loader unchanged.
    passed._is_accelerate_prepared = True
    return passed
