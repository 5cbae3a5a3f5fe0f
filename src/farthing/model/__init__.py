"""The model: loading, adapters, packing, attention, loss. Sees plain values, never a job or run."""
