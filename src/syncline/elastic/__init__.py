"""Train with replicas that come and go: a replica that dies is left out, and one that joins gets its state from a peer.

A replica is a process with a complete copy of the model. The lighthouse of torchft says which replicas are there.
"""

from syncline.elastic.manager import Manager
from syncline.elastic.stats import ElasticStats

__all__ = ["ElasticStats", "Manager"]
