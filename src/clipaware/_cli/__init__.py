"""The commands of the command line, a module each for what is more than a few lines."""
