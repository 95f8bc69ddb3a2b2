"""KV handoffs from the worker that prefills a request to the worker that decodes it, as each of the three sides decides
them.

`prefill`, `decode` and `gateway` are the rules of one side each. A worker does not drive the first two directly: it
drives `publications` and `reservations`, which also know whose a handoff is, when it may begin and when it is over. How
bytes travel belongs in `serving.transfer`, what a message looks like on the wire in `serving.wire`.
Begin with `messages`.
"""
