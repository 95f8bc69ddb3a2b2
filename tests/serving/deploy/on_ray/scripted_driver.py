"""A driver without Ray: it obeys a script, and says what it was told. `python scripted_driver.py SCRIPT ...`.

c: it is connected, f: it is not and says why, s: it says nothing at all, x: it does not end with its orders. Its
processes listen at once, at an address that is another each time; a signal ends them, and for that of number 99 the
whole driver ends.
"""

import json
import os
import signal
import sys

script = sys.argv[1]
options = dict(zip(sys.argv[2::2], sys.argv[3::2], strict=True))


def tell(event: str, **fields: object) -> None:
    os.write(int(options["--status-fd"]), json.dumps({"event": event, **fields}).encode() + b"\n")


def say(number: int, event: str, **fields: object) -> None:
    tell("said", number=number, event_said=event, fields=fields)


if "f" in script:
    tell("failed", message="no Ray is reached", exit_code=2)
    sys.exit(2)
if "c" in script:
    tell("connected", nodes=[{"CPU": 2.0}, {"CPU": 1.0}])
for line in open(int(options["--orders-fd"])):  # noqa: SIM115  # until this process ends
    if "s" in script:
        continue
    order = json.loads(line)
    number = order["number"]
    if order["event"] == "start":
        tell("line", number=number, text=json.dumps({name: order[name] for name in order if name != "event"}))
        say(number, "listening", address=f"10.0.0.{number}:7000")
        say(number, "ready")
    elif order["signal"] == 99:
        sys.exit(3)
    else:
        tell("ended", number=number, code=-order["signal"])
while "x" in script:
    signal.pause()
