"""A collector of spans that reads what it is sent and forgets it: `-m moonshard.experiments.bench.costs.span_sink`.

It prints its port, and ends when its input does. OTLP over HTTP, as far as a sender looks at the answer.
"""

import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        del format, args


def main() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Handler) as server:
        server.daemon_threads = True
        Thread(target=server.serve_forever, daemon=True).start()
        sys.stdout.write(f"{server.server_address[1]}\n")
        sys.stdout.flush()
        sys.stdin.read()
        server.shutdown()


if __name__ == "__main__":
    main()
