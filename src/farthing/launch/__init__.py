"""Machines rented for a run, watched, and given back. Imports no torch and no vendor's library."""
