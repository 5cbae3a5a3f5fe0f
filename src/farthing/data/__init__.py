"""Rows in, token sets and batches out. No torch, no job, no run: plain values only."""
