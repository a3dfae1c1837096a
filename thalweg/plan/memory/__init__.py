"""Memory of one rank, from a traced step."""
