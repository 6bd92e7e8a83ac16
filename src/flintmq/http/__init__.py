"""HTTP as all daemons serve it: routes, arguments, tokens, TLS."""
