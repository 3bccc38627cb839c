"""Find the best plan: which gradients form a bucket, and which lane and exchange each bucket uses."""
