"""What of the lines of Mooncake's processes is told."""

from moonshard.serving.store.words import REST_S, NativeWords

LOST = "E1128 18:11:48.337337 17908 real_client.cpp:4126] client_id=7803578302025082905-1, error=shm_not_mapped"
POKED = "E1128 18:14:51.517226 19698 real_client.cpp:6558] Failed to read IPC request type"
UNKNOWN = "E1128 18:14:53.589781 19698 real_client.cpp:6567] Unknown IPC request type: {}"


def test_lines_are_told_without_stamps_once_in_a_while_for_each_place_and_none_that_workers_tell():
    told, now_s = list[str](), 0.0
    words = NativeWords(told.append, clock=lambda: now_s)
    for line in (LOST, POKED, POKED, UNKNOWN.format(2), UNKNOWN.format(3), "terminate called", "terminate called"):
        words(line)
    at_first = [
        "Failed to read IPC request type",
        "Unknown IPC request type: 2",
        "terminate called",
        "terminate called",
    ]
    assert told == [f"Mooncake Store: {text}" for text in at_first]
    now_s = REST_S
    words(POKED)
    assert told[len(at_first) :] == ["Mooncake Store: Failed to read IPC request type"]
