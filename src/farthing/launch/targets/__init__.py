"""Targets, one file each: what is written for it, and what ends its machines.

`render` is a pure function of an `Ask`, `check` of the files: both run offline, and so they do in a
dry run.
"""
