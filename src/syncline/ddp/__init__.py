"""Exchanges for DistributedDataParallel models: the hook, `attach`, `wrap` and their handle."""
