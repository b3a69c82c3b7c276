"""Several prompts at once on one event loop. Usage: async_stream.py [REDIS_URL]"""

import asyncio
import sys

from headrace.clients import AsyncClient, Finished, Tokens


async def answer(client: AsyncClient, prompt: str) -> str:
    handle = await client.submit(prompt, max_tokens=32)
    async with handle.stream(timeout_s=60) as stream:
        parts = [event.text async for event in stream if isinstance(event, Tokens | Finished)]
    return prompt + "".join(parts)


async def main(url: str) -> None:
    prompts = ["The cat", "A long time ago", "In the morning"]
    async with AsyncClient(url) as client:
        for text in await asyncio.gather(*(answer(client, prompt) for prompt in prompts)):
            print(text)


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "redis://localhost:6379/0"))
