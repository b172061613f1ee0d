"""Hugging Face model classes by kind: how each writes its sizes, and its defaults."""
