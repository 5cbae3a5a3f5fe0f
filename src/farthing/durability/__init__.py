"""What must survive a machine that is taken away: files, checkpoints, run folder, ledger, store. No
torch at the top.
"""
