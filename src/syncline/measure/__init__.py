"""Measure a model's steps and a cluster's links. `backward` and `backward_watch` measure when each gradient is ready,
`overhead` what DDP and the exchanges add, `load` what computation and exchanges take from each other, and `probe` the
links of a cluster. `assumed_network` builds a network from typical figures, without a measurement."""
