"""What `helm test` runs in a pod: is the gateway healthy, does it answer, does it count? Standard library only.

Right after an install models are still being loaded, so it asks again for as long as SECONDS says.
"""

import json
import os
import ssl
import sys
import time
import urllib.error
import urllib.request

base = f"{os.environ['SCHEME']}://{os.environ['GATEWAY']}:{os.environ.get('PORT', '8000')}"
metrics = os.environ.get("METRICS", f"http://{os.environ['GATEWAY']}-headless:9009/metrics")
until_s = time.monotonic() + float(os.environ.get("SECONDS", "240"))
# The certificate is of the name that clients ask for, which this is not.
unverified = urllib.request.HTTPSHandler(context=ssl._create_unverified_context())
# A proxy in the environment is for what leaves the cluster.
direct = urllib.request.build_opener(urllib.request.ProxyHandler({}), unverified)
NOT_YET = (404, 429, 502, 503)


def get(url: str, body: dict[str, object] | None = None) -> str:
    headers = {"content-type": "application/json"}
    if key := os.environ.get("API_KEY"):
        headers["authorization"] = f"Bearer {key}"
    data = json.dumps(body).encode() if body else None
    request = urllib.request.Request(url, data, headers)
    with direct.open(request, timeout=120) as response:
        return str(response.read().decode())


def answer(url: str, body: dict[str, object] | None = None) -> str:
    """Asks again while it is only too early."""
    while True:
        try:
            return get(url, body)
        except urllib.error.HTTPError as error:
            said = f"{url}: {error.code} {error.read().decode()[:500]}"
            if error.code in (401, 403):
                sys.exit(f"{said}\nAPI keys are required: name a secret with one in tests.apiKeySecret")
            if error.code not in NOT_YET:
                sys.exit(said)
        except OSError as error:
            said = f"{url}: {error}"
        if time.monotonic() > until_s:
            sys.exit(f"{said}\nIt was too early until the end: look at the pods")
        time.sleep(float(os.environ.get("PAUSE", "2")))


answer(f"{base}/health")
print("healthy")
question = {"role": "user", "content": "Why is the sky blue?"}
asked = {"model": os.environ["MODEL"], "messages": [question], "max_tokens": 8, "temperature": 0}
done = json.loads(answer(f"{base}/v1/chat/completions", asked))
assert done["usage"]["completion_tokens"] > 0, done
print(done["choices"][0]["message"]["content"])
assert "outrider_request_success_total" in answer(metrics)
print("counted")
