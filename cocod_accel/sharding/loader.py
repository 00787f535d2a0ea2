"""A loader of this worker's own batches in an accelerate loop."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader


def pass_through(loader: DataLoader[Any], accelerator: Any) -> Any:
    """``loader`` as ``accelerator.prepare`` would make it, except that its batches are left as they are.

    Prepared the usual way, accelerate deals the batches of one common loader to the workers. A loader over this worker's
    own shard has nothing to be dealt: it is only to move batches to the device, to tell the accelerator when
    it ends (without which gradient accumulation loses the last steps), and to count epochs for its sampler.
    """
    from accelerate.data_loader import prepare_data_loader

    passed = prepare_data_loader(
        loader, device=accelerator.device, num_processes=1, process_index=0, put_on_device=True, rng_types=None
    )
    # What accelerate marks its own loaders with: given to ``prepare`` once more, the loader stays as it is.
    passed._is_accelerate_prepared = True
    return passed
