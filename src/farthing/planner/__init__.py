"""Decides before the start: memory, hours and dollars for every machine. No torch, no network."""
