"""What can be asked for: the job file and its sections."""
