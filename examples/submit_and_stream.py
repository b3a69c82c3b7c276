"""Queue a prompt and print its tokens as they come. Usage: submit_and_stream.py [PROMPT] [REDIS_URL]"""

import sys

from headrace.clients import Client, Finished, Tokens

prompt = sys.argv[1] if len(sys.argv) > 1 else "Once upon a time"
url = sys.argv[2] if len(sys.argv) > 2 else "redis://localhost:6379/0"

with Client(url) as client:
    handle = client.submit(prompt, max_tokens=64, temperature=0.8)
    with handle.stream(timeout_s=60) as stream:
        for event in stream:
            if isinstance(event, Tokens | Finished):
                print(event.text, end="", flush=True)
print()
