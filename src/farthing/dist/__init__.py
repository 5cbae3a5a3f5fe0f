"""Several processes that share a run: how they meet, what they say, how gradients are summed."""
