"""Several processes that share a run: how they meet, what they say, and how gradients are summed."""
