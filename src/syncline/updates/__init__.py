"""Exchange the changes of weights after each rank's own optimizer steps, instead of gradients before them."""
