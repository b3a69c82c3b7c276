"""Without any library of ours: one XADD, then read the stream. Usage: bare_xadd.py [REDIS_URL]"""

import json
import sys
import uuid

import redis

server = redis.Redis.from_url(sys.argv[1] if len(sys.argv) > 1 else "redis://localhost:6379/0")
request_id = uuid.uuid4().hex
server.xadd("headrace:{default}:jobs", {"id": request_id, "json": json.dumps({"prompt": "Hello", "max_tokens": 32})})

out, cursor, done = f"headrace:req:{{{request_id}}}:out", b"0-0", False
while not done:
    for _, entries in server.xread({out: cursor}, block=1000):
        for entry_id, fields in entries:
            event, cursor = json.loads(fields[b"json"]), entry_id
            print(event.get("x", ""), end="", flush=True)
            done = event.get("done", False)
print()
