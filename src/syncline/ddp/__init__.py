"""Exchanges in a stock DistributedDataParallel: the hook, `attach`, `wrap` and the handle that they return."""
