"""What the explorer's page is made of; `clipaware.explorer` puts it together."""
