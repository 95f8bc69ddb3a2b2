"""To which worker a request goes. Begin with `router`; a new policy is a class in `policies` and a name in `names`."""
