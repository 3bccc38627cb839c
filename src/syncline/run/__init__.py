"""Run an unmodified training script, and follow every DistributedDataParallel model that it builds."""
