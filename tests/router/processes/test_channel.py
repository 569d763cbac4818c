"""The socket pair between the parent and a process."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from router.processes.messages import (
    Failed,
    Heartbeat,
    HeartbeatReply,
    Message,
    MessageChannel,
    ProcessQuery,
    QueryResult,
    Start,
    receive_first,
    send_last,
)


class End:
    """One end, which answers a `ProcessQuery` after as many milliseconds as its path says, and a `Heartbeat` never."""

    def __init__(self, connection: socket.socket) -> None:
        self.heard: list[Message] = []
        self.channel = MessageChannel(connection, self._answer)

    async def _answer(self, message: Message) -> Message | None:
        self.heard.append(message)
        if isinstance(message, Start):
            raise ValueError("a fault")
        if not isinstance(message, ProcessQuery):
            return None
        await asyncio.sleep(int(message.path) / 1000)
        return QueryResult(1, 200, message.query or message.path.encode())


@contextlib.asynccontextmanager
async def pair() -> AsyncIterator[tuple[End, End]]:
    ends = [End(one) for one in socket.socketpair()]
    for end in ends:
        await end.channel.open()
    running = [asyncio.create_task(end.channel.run()) for end in ends]
    yield ends[0], ends[1]
    for task in running:
        task.cancel()
    await asyncio.gather(*running, return_exceptions=True)


def test_each_question_gets_its_own_answer() -> None:
    async def run() -> None:
        async with pair() as (one, other):
            paths = [str(number) for number in (30, 0, 20, 10)]
            questions = [one.channel.ask(ProcessQuery(path, b""), 10) for path in paths]
            back = [other.channel.ask(ProcessQuery(path, b""), 10) for path in paths]
            for answers in (await asyncio.gather(*questions), await asyncio.gather(*back)):
                assert [answer.body.decode() for answer in answers if isinstance(answer, QueryResult)] == paths

    asyncio.run(run())


def test_who_does_not_answer_costs_only_time() -> None:
    """An answer that comes too late belongs to nothing; a fault of the other end is not the end of the channel."""

    async def run() -> None:
        async with pair() as (one, other):
            assert await one.channel.ask(Heartbeat(), 0.01) is None
            assert await one.channel.ask(ProcessQuery("30", b""), 0.001) is None
            assert await one.channel.ask(Start(), 0.05) is None
            answer = await one.channel.ask(ProcessQuery("1", b""), 10)
            assert isinstance(answer, QueryResult)
            assert len(other.heard) == 4

    asyncio.run(run())


def test_the_end_of_the_other_one_ends_all_questions() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        end = End(ours)
        assert await end.channel.ask(Heartbeat(), 10) is None, "it is not open yet"
        await end.channel.open()
        running = asyncio.create_task(end.channel.run())
        question = asyncio.create_task(end.channel.ask(Heartbeat(), 10))
        await asyncio.sleep(0)
        theirs.close()
        assert await question is None
        await running
        end.channel.tell(Heartbeat())
        assert await end.channel.ask(Heartbeat(), 10) is None

    asyncio.run(run())


def test_the_first_and_the_last_message_need_no_loop() -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            end = End(ours)
            await end.channel.open()
            end.channel.tell_first(b"a" * 500_000)
            first = await asyncio.to_thread(receive_first, theirs)
            assert first == b"a" * 500_000
            send_last(theirs, Failed("no such folder"))
        await end.channel.run()
        await asyncio.sleep(0)
        assert end.heard == [Failed("no such folder")]

    asyncio.run(run())


def test_large_answers_arrive_whole() -> None:
    async def run() -> None:
        async with pair() as (one, _):
            one.channel.tell(HeartbeatReply([]))
            answer = await one.channel.ask(ProcessQuery("0", b"0" * 300_000), 10)
            assert isinstance(answer, QueryResult)
            assert answer.body == b"0" * 300_000

    asyncio.run(run())
