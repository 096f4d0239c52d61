"""Tools for models of `transformers`."""
