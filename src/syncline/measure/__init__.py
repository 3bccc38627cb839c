"""Measure a model's steps and a cluster's links.

- `backward`, `backward_watch`: when each gradient is ready, from steps run for that purpose or from the user's own.
- `overhead`: what DDP and the exchanges add to a step.
- `probe`: the links of a cluster. `sampling` times collectives; `fit` and `network_fit` turn samples into a network.
- `assumed_network`: a network from typical figures, without a measurement.
- `topology`: hosts and racks.
- `steps`, `step_timer`, `hooks`, `preserve_state`: parts that these share.
"""
