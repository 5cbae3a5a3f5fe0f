"""What of a run must survive: folder, checkpoints, ledger, signals, supervisor."""
