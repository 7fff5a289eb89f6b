"""What `helm test` runs in a pod: is the gateway healthy, does it answer, does it count? Standard library only."""

import json
import os
import ssl
import urllib.request

base = f"{os.environ['SCHEME']}://{os.environ['GATEWAY']}:8000"
# The certificate is of the name that clients ask for, which this is not.
unverified = ssl._create_unverified_context()


def get(url: str, body: dict[str, object] | None = None) -> str:
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    # Raises where the answer is no success.
    with urllib.request.urlopen(request, timeout=120, context=unverified) as response:
        return str(response.read().decode())


get(f"{base}/health")
print("healthy")
question = {"role": "user", "content": "Why is the sky blue?"}
asked = {"model": os.environ["MODEL"], "messages": [question], "max_tokens": 8, "temperature": 0}
answer = json.loads(get(f"{base}/v1/chat/completions", asked))
assert answer["usage"]["completion_tokens"] > 0, answer
print(answer["choices"][0]["message"]["content"])
assert "outrider_request_success_total" in get(f"http://{os.environ['GATEWAY']}-headless:9009/metrics")
print("counted")
