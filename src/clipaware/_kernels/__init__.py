"""Compiled kernels: leaves that allocate, launch and return. No checks, no derivatives of derivatives."""
