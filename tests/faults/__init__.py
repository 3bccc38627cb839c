"""Faults against phases of training, with real processes on emulated hosts: what is done, and what must hold then."""
