"""Which worker trains on which samples: batches from speeds, shards, samplers, loaders."""
