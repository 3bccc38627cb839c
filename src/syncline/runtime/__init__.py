"""Shared by all trainers: the bucket runner, bucket policies, statistics, logs and checkpoints."""
