"""Exchanges for models that are sharded with `fully_shard` (FSDP2): between replicas, or between the shards."""
