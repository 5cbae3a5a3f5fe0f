"""GPUs, what they can do, and what they cost: facts with their source and date."""
