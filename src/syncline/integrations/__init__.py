"""Syncline in the frameworks people already have: one module for each, imported by whoever uses that framework.

from syncline.integrations.lightning import SynclineStrategy
from syncline.integrations.accelerate import SynclineKwargs
from syncline.integrations.transformers import SynclineTrainer
"""
