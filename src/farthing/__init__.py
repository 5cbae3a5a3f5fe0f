"""farthing: fine-tune a language model for the fewest dollars."""

__version__ = "0.1.0"
