"""Other libraries' names over Thalweg's rooms; each folder translates, and does no work of its own."""
