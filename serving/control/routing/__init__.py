"""To which worker a request goes. Begin with `router`; a new policy is a function in `policies`,
an entry in its `policy_of`, and a name in `names`."""
