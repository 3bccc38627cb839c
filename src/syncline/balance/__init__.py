"""Unequal batches for ranks of unequal speed: measure the ranks, divide a batch among them, and deal a dataset."""
