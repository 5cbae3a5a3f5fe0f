"""What a run cost and how it went, from the files of its folder alone. No torch."""
