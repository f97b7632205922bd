"""The engine: what to save, and how the forward and the backward pass run."""
