"""What is measured, and the one runner that measures it: ``python -m benchmarks``."""
