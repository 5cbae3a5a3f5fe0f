"""What outlives a process: atomic files, checksummed logs, object stores, the lease."""
