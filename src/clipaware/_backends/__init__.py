"""One module per framework, with the same few function names in each."""
