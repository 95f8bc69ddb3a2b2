"""KV handoffs from the worker that prefills a request to the one that decodes it, as each of three sides decides them.

Begin with `messages`. `prefill`, `decode` and `gateway` are the sides' rules; around the first two, `publications` and
`reservations` know whose a handoff is, when it may begin and when it is over: a worker drives these. How bytes travel
and what a message looks like on the wire do not belong here."""
