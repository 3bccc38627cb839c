"""Exchange the updates of the ranks' optimizers after their steps, instead of gradients before them."""
