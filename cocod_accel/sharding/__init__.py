"""Who trains on which samples: speeds to batches, shards, samplers, loaders."""
