"""Shared by all tests."""

from __future__ import annotations

import os

import torch

os.environ.pop("SYNCLINE_NO_NAMESPACES", None)
torch.set_num_threads(1)  # ranks are forked from this process: a pool of OpenMP threads would not survive that
