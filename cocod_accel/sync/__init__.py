"""Attach an algorithm to a training loop: ``attach``, ``Sync``, and the adapters for DDP and DeepSpeed."""
