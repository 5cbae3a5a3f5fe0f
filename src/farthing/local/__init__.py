"""This machine, and what runs on it have measured."""
