"""OpenAI's files and batches: requests by the thousand for whose answers nobody waits.

`store` keeps what must outlive a kill, `runner` gets it done by the routes of everybody else's requests, `api` has
the API. Begin with `runner`.
"""
