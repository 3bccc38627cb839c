"""`Layerwise`: exchange gradients and step the optimizer layer by layer, to save memory."""
