"""Connections of the HTTP front: how long they may wait, and what HTTP/1.0 and HTTP/1.1 ask beyond uvicorn.

What concerns requests and answers as such belongs in `http.edge`.
Begin with `protocol`.
"""
