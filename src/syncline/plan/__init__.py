"""Which gradients travel together, when, and through which exchange: searched against the prediction."""
