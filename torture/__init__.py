"""An endless differential fuzzer: hostile inputs, every backend, and an oracle that owes nothing to the library."""
