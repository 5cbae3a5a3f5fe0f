"""The parts of bench/gpu.py. Never run on a GPU so far."""
