"""What can be learned: one file a task, and the register of them."""
