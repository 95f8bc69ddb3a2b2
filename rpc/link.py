"""What both ends of a `Link` must agree on beyond the messages themselves, and how they are connected."""

PROTOCOL_VERSION = 10  # raised whenever an old peer would misunderstand a new one
REQUEST_ID_BYTES = 16  # random, made by the gateway
EPOCH_BYTES = 16  # random, drawn at process start
# Of gRPC, for streams between a gateway and a worker, whoever calls:
CHANNEL_OPTIONS = (
    ("grpc.keepalive_time_ms", 10_000),  # a peer that vanished without a FIN is noticed within 15 s
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # a fresh attempt must not inherit the last one's back-off
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),  # a proxy variable meant for the web must not swallow the peer's address
)
