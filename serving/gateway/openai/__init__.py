"""OpenAI's API: request bodies to what the pipeline takes, its events to response objects and stream chunks.

Routes belong in `gateway.http`, checks that gRPC needs too in `gateway.request`.
Begin with `requests`, where a field is added, but for a sampling parameter, which is added in
`control.sampling_parameters`; `responses` is the way back.
"""
