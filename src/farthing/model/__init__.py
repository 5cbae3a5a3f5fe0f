"""The workshop's bench: load a model, add adapters, take a loss. Sees plain values, never a job or
a run.
"""
