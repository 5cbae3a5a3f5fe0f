"""A trained model for others: folders of transformers and peft, GGUF files of llama.cpp,
compressed-tensors folders.
"""
