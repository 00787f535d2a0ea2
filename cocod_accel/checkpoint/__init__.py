"""Checkpoints of all workers together, in safetensors files."""
