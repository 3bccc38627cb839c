"""What `ddp` and `layerwise` share: the bucket runner, bucket policies, statistics, topology and checkpoints."""
