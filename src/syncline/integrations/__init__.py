"""Integrations with training frameworks. Each module imports its framework, so import only the one you use.

from syncline.integrations.lightning import SynclineStrategy
from syncline.integrations.accelerate import SynclineKwargs
from syncline.integrations.transformers import SynclineTrainer
"""
