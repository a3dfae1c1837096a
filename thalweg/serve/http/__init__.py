"""HTTP below the API: a hardened protocol, TLS, limits."""
