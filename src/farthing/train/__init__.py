"""One attempt at a job, from the examples to the receipt."""
