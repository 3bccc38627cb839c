"""Code shared by `ddp` and `layerwise`: the bucket runner, bucket policies, statistics, topology and checkpoints."""
