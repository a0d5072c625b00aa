"""The clock of the running event loop, which all of its timers follow."""

import asyncio


def forward(seconds: float) -> None:
    """Move the clock forward. Timers whose time has come run in the loop's next turn."""
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds


def freeze() -> None:
    """Stop the clock, so that timers run only after forward()."""
    loop = asyncio.get_running_loop()
    now = loop.time()
    loop.time = lambda: now


async def turn(count: int = 3) -> None:
    """Let the loop run whatever is ready."""
    for _ in range(count):
        await asyncio.sleep(0)
