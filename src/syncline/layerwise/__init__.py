"""`Layerwise`: exchanges and optimizer steps layer by layer, in little memory."""
