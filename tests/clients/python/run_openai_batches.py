"""OpenAI's own package, with files and batches."""

import io
import json
import sys
import time

import openai

ENDED = ("completed", "failed", "expired", "cancelled")


def line(custom_id: str, asked: dict, **changes: object) -> str:
    body = {"model": asked["model"], "messages": [{"role": "user", "content": asked["question"]}], **changes}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body})


def main() -> None:
    asked = json.loads(sys.argv[1])
    client = openai.OpenAI(base_url=asked["base_url"], api_key="none", max_retries=0)
    lines = "\n".join([line("good", asked), "no line", line("bad", asked, temperature=-1)])
    file = client.files.create(file=("lines.jsonl", io.BytesIO(lines.encode())), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"of": "a test"}
    )
    while (batch := client.batches.retrieve(batch.id)).status not in ENDED:
        time.sleep(0.05)
    output = [json.loads(row) for row in client.files.content(batch.output_file_id).text.splitlines()]
    errors = [json.loads(row) for row in client.files.content(batch.error_file_id).text.splitlines()]
    said = {
        "status": batch.status,
        "metadata": batch.metadata,
        "counts": batch.request_counts.to_dict(),
        "answers": [[row["custom_id"], row["response"]["body"]["choices"][0]["message"]["content"]] for row in output],
        "errors": [[row["custom_id"], (row["response"] or {}).get("status_code")] for row in errors],
        "listed": [each.id for each in client.batches.list(limit=1)] == [batch.id],
        "files": sorted(each.purpose for each in client.files.list(limit=2)),
        "cancelled": client.batches.cancel(batch.id).status,
        "deleted": client.files.delete(file.id).deleted,
    }
    print(json.dumps(said))


main()
