"""What every way to train shares: the bucket-running engine, bucket policies, statistics, logs and checkpoints."""
