"""Start a sum over all workers, wait for it later."""
