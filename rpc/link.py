"""What both ends of a `Link` must agree on beyond the messages themselves."""

PROTOCOL_VERSION = 8  # raised whenever an old peer would misunderstand a new one
REQUEST_ID_BYTES = 16  # random, made by the gateway
EPOCH_BYTES = 16  # random, drawn at process start
