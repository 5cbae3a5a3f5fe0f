"""Models by their config.json alone: sizes, adapters, and how each family can be computed."""
