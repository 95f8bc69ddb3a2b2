"""Which worker a request goes to.

Which workers there are is in `control.members`, what is predicted of a request's time to first token in `control.ttft`.
What an attempt is and when it is tried again belongs in `control.dispatch`. A new policy is a function in `policies`,
an entry in its `policy_of`, and a name in `names`. Begin with `router`.
"""
