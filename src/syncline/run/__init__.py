"""An unmodified training script, with every DistributedDataParallel model that it builds followed."""
