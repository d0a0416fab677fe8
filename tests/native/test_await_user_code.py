"""Tests of awaiting user code that ignores its cancellation."""

from __future__ import annotations

import anyio

from gateway.await_user_code import MAX_CANCELLATIONS, await_user_code


async def test_code_that_goes_on_is_closed_by_the_hundredth_cancellation() -> None:
    went_on = 0

    async def go_on() -> None:
        nonlocal went_on
        while True:
            try:
                await anyio.sleep_forever()
            except anyio.get_cancelled_exc_class():
                went_on += 1

    with anyio.fail_after(60), anyio.CancelScope() as scope:
        scope.cancel()
        await await_user_code(go_on())
    assert scope.cancelled_caught and went_on == MAX_CANCELLATIONS - 1
