"""What is run by hand to wear the library down: many threads for minutes, a million calls, damaged files."""
