"""Which worker a request goes to, and what is predicted of its time to first token (TTFT).

What an attempt is and when it is tried again belongs in `control.dispatch`. A new policy is a function in `policies`,
an entry in its `policy_of`, and a name in `names`. Begin with `router`.
"""
