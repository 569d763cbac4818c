"""How a generation ends and what is kept of it, with a scripted engine."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

import pytest

from middleware_hub.sessions import exchange
from middleware_hub.sessions.turn.generation import TurnGeneration
from middleware_hub.spans.chain import unpack_ids
from middleware_hub.spans.versions import FALL_AFTER
from tests.middleware_hub.sessions.in_process import Room, until

BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "Count"}], "max_tokens": 20}


class TestFailures:
    """A failure changes nothing."""

    def test_a_worker_that_breaks_off_a_stream(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            room.engine.says("one two three", breaks=2)
            status, events = await room.ask({**BODY, "stream": True}).answer()
            assert (status, "error" in events[-1]) == (200, True)
            assert len(room.engine.log[0][1]) == 2
            assert (room.session.samples, room.session.trie.nodes, room.session.tokens) == (0, 0, 0)
            assert room.metric("tito_session_replies_total", recorded="no", reason="no reply") == 1

        asyncio.run(work())

    def test_a_stream_that_is_refused_keeps_its_status(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            ways: list[tuple[dict[str, Any], int]] = [
                ({"refuses": 400}, 400),
                ({"refuses": 503}, 503),
                ({"refuses": 503, "breaks": 0}, 503),
                ({"status": 400}, 400),
                ({"aborts": 503, "breaks": 0}, 503),
                ({"aborts": 400, "breaks": 0}, 400),
            ]
            for says, status in ways:
                room.engine.says("one", **says)
                found, reply = await room.ask({**BODY, "stream": True}).answer()
                assert (found, reply["error"]["message"][-2:]) == (status, "no")
            assert room.session.trie.nodes == 0

        asyncio.run(work())

    @pytest.mark.parametrize("which", [0, 1, 2])
    @pytest.mark.parametrize("how", [{"breaks": 1}, {"refuses": 400}, {"status": 500}, {"aborts": 500, "breaks": 1}])
    def test_one_sample_that_fails_ends_none_of_the_others(self, which: int, how: dict[str, int]) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            for number in range(3):
                room.engine.says(f"Number {number}.", **(how if number == which else {}))
            status, events = await room.ask({**BODY, "n": 3, "stream": True}).answer()
            assert (status, events.pop()) == (200, b"[DONE]")
            told = dict.fromkeys(range(3), "")
            finished = set()
            for event in events:
                (choice,) = event["choices"]
                told[choice["index"]] += choice["delta"].get("content") or ""
                if choice["finish_reason"] == "stop":
                    finished.add(choice["index"])
            others = {0, 1, 2} - {which}
            assert finished == others
            assert all(told[number] == f"Number {number}." for number in others)
            assert room.session.samples == 2

        asyncio.run(work())

    def test_all_samples_fail(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            for code in (429, 500):
                room.engine.says("", refuses=code)
            status, _ = await room.ask({**BODY, "n": 2, "stream": True}).answer()
            assert (status, room.session.trie.nodes) == (429, 0)

        asyncio.run(work())


class TestOrphans:
    """What nobody asks for again is ended, and what was sampled of it stays."""

    @pytest.mark.parametrize("hung", [False, True])
    def test_a_worker_that_does_not_hand_over_in_time(self, monkeypatch: pytest.MonkeyPatch, hung: bool) -> None:
        """The call that aborts is within the same time: a hung worker does not answer that either."""
        monkeypatch.setattr(exchange, "HAND_OVER_SECONDS", 0.0)

        async def never(*_: object) -> None:
            await asyncio.Event().wait()

        if hung:
            monkeypatch.setattr(TurnGeneration, "abort", never)

        async def work() -> None:
            room = Room(orphan_grace=0.0)
            await room.open()
            room.engine.says("one two three four", hold=2, deaf=True)
            client = room.ask({**BODY, "stream": True})
            await room.engine.arrived()
            await client.leave()
            await until(lambda: not room.session.trie.in_flight)
            (sample,) = room.session.trie.checkpoints()
            assert list(unpack_ids(sample.span.ids)) == room.engine.log[0][1]
            assert (sample.finish, len(sample.span)) == ("abort", 2)
            _, found = await room.call("POST", "/sessions/s/finalize")
            (only,) = found["trajectories"]
            assert (only["response_mask"], only["messages"][-1]["content"]) == ([1, 1], "one two")

        asyncio.run(work())

    def test_a_worker_that_breaks_off_an_aborted_stream(self) -> None:
        async def work() -> None:
            room = Room(orphan_grace=0.0)
            await room.open()
            says = room.engine.says("one two three four", hold=2, deaf=True, breaks=3)
            client = room.ask({**BODY, "stream": True})
            await room.engine.arrived()
            await client.leave()
            (one,) = room.session._exchanges
            await until(lambda: one.generations[0]._aborting)
            says.go.set()
            await until(lambda: not room.session.trie.in_flight)
            (sample,) = room.session.trie.checkpoints()
            assert list(unpack_ids(sample.span.ids)) == room.engine.log[0][1]

        asyncio.run(work())

    def test_the_end_of_the_session_keeps_nothing(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            room.engine.says("one two three four", hold=2)
            client = room.ask({**BODY, "stream": True})
            await room.engine.arrived()
            _, found = await room.call("POST", "/sessions/s/finalize")
            _, events = await client.answer()
            assert (found["trajectories"], events[-1]["error"]["type"]) == ([], "session_over")

        asyncio.run(work())


class TestWhatIsKept:
    @pytest.mark.parametrize("stream", [False, True])
    def test_it_holds_nothing_of_the_reply_but_itself(self, stream: bool) -> None:
        """A slice of a reply would keep all of it: `Raw.copy` copies a slice's bytes, and returns what is no slice as it is."""

        async def work() -> None:
            room = Room()
            await room.open()
            room.engine.says("one", extra={"routed_experts": "x" * 100})
            status, _ = await room.ask({**BODY, "stream": stream}).answer()
            (sample,) = room.session.trie.checkpoints()
            assert (status, list(sample.extra)) == (200, ["routed_experts"])
            assert all(value.copy() is value for value in sample.extra.values())

        asyncio.run(work())


class TestLimits:
    """`min_tokens` beside a limit that is lower than what the client asked for."""

    @pytest.mark.parametrize(
        ("options", "body", "sent"),
        [
            ({"max_context": 64}, {"max_tokens": 500, "min_tokens": 400}, "all"),
            ({"max_context": 64}, {"min_tokens": 400}, "all"),
            ({"max_context": 64}, {"max_tokens": 5, "min_tokens": 4}, 4),
            ({}, {"max_tokens": 500, "min_tokens": 400}, 400),
            ({}, {"min_tokens": 400}, 400),
        ],
    )
    def test_it_is_no_higher_than_a_limit_that_was_lowered(
        self, options: dict[str, Any], body: dict[str, Any], sent: int | str
    ) -> None:
        async def work() -> None:
            room = Room(**options)
            await room.open()
            status, _ = await room.ask({"messages": BODY["messages"], **body}).answer()
            sampling = room.engine.log[0][0]["sampling_params"]
            assert status == 200
            assert sampling["min_new_tokens"] == (sampling["max_new_tokens"] if sent == "all" else sent)

        asyncio.run(work())

    def test_limits_that_never_fitted_are_left_to_the_worker(self) -> None:
        async def work() -> None:
            room = Room(max_context=64)
            await room.open(sampling_params={"max_new_tokens": 500})
            await room.ask({"messages": BODY["messages"], "min_tokens": 600}).answer()
            assert room.engine.log[0][0]["sampling_params"]["min_new_tokens"] == 600

        asyncio.run(work())

    def test_a_budget_lowers_the_limit(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open(response_budget=7)
            await room.ask({**BODY, "min_tokens": 10}).answer()
            sampling = room.engine.log[0][0]["sampling_params"]
            assert (sampling["min_new_tokens"], sampling["max_new_tokens"]) == (7, 7)

        asyncio.run(work())


class TestResponseBudget:
    """Tokens behind the first prompt of a branch: sampled ones and the context between them; the prompt costs nothing."""

    BUDGET = 60
    LONG: ClassVar[list[dict[str, Any]]] = [
        {"role": "system", "content": "You are a very patient helper. " * 40},
        {"role": "user", "content": "Count"},
    ]

    def test_the_first_prompt_is_free_and_all_behind_it_counts(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open(response_budget=self.BUDGET)
            messages, left = list(self.LONG), []
            for number in range(3):
                room.engine.says(f"one two {number}")
                status, reply = await room.ask({"messages": messages}).answer()
                assert status == 200
                messages += [reply["choices"][0]["message"], {"role": "user", "content": "And?"}]
            first = len(room.engine.log[0][0]["input_ids"])
            assert first > 2 * self.BUDGET
            for body, _ in room.engine.log:
                left.append(body["sampling_params"]["max_new_tokens"])
                assert left[-1] == self.BUDGET - (len(body["input_ids"]) - first)
            assert left[0] == self.BUDGET > left[1] > left[2] > 0

        asyncio.run(work())

    def test_every_branch_has_its_own(self) -> None:
        """A new conversation has all of it; a fork behind a turn has what was left there."""

        async def work() -> None:
            room = Room()
            await room.open(response_budget=self.BUDGET)
            room.engine.says("one two three")
            _, reply = await room.ask({"messages": self.LONG}).answer()
            echo = reply["choices"][0]["message"]
            for content in ("And?", "Or?"):
                await room.ask({"messages": [*self.LONG, echo, {"role": "user", "content": content}]}).answer()
            await room.ask({"messages": [{"role": "user", "content": "Hello"}]}).answer()
            sent = [(len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]) for body, _ in room.engine.log]
            behind = sent[1][0] - sent[0][0]
            assert [limit for _, limit in sent] == [
                self.BUDGET,
                self.BUDGET - behind,
                self.BUDGET - behind,
                self.BUDGET,
            ]

        asyncio.run(work())

    def test_a_request_may_ask_for_less_and_never_for_more(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open(response_budget=self.BUDGET)
            for asked, sent in ((self.BUDGET - 1, self.BUDGET - 1), (self.BUDGET + 1, self.BUDGET)):
                await room.ask({"messages": self.LONG, "max_tokens": asked}).answer()
                assert room.engine.log[-1][0]["sampling_params"]["max_new_tokens"] == sent

        asyncio.run(work())


class TestMetrics:
    def test_each_step_is_timed_and_gauges_show_what_is_held(self) -> None:
        async def work() -> None:
            room = Room()
            await room.open()
            room.engine.says("one", breaks=1)
            assert (await room.ask({**BODY, "stream": True}).answer())[0] == 200
            assert (await room.ask({**BODY, "n": 2}).answer())[0] == 200
            steps = {
                step: room.metric("tito_session_step_seconds_count", step=step)
                for step in ("prepare", "tokenize", "generate", "commit")
            }
            assert steps == {"prepare": 2, "tokenize": 2, "generate": 3, "commit": 2}
            names = ("tito_sessions_open", "tito_sessions_nodes", "tito_sessions_samples", "tito_sessions_tokens")
            assert [room.metric(name) for name in names] == [1, 2, 2, room.session.tokens]
            await room.call("DELETE", "/sessions/s")
            assert [room.metric(name) for name in names] == [0, 0, 0, 0]

        asyncio.run(work())

    def test_tokens_are_counted_by_what_became_of_them(self) -> None:
        """Each sample of a prompt reuses what was sampled before it; the rest of the prompt is encoded once for all."""

        async def work() -> None:
            room = Room()
            await room.open()
            _, first = await room.ask(BODY).answer()
            echo = first["choices"][0]["message"]
            body = {**BODY, "messages": [*BODY["messages"], echo, {"role": "user", "content": "More"}], "n": 2}
            assert (await room.ask(body).answer())[0] == 200
            (start, sampled), (whole, second), (_, third) = (
                (len(request["input_ids"]), len(ids)) for request, ids in room.engine.log
            )
            counts = [room.metric("tito_session_tokens_total", kind=kind) for kind in ("reused", "encoded", "sampled")]
            assert counts == [2 * (start + sampled), whole - sampled, sampled + second + third]
            kinds = [room.metric("tito_session_turns_total", kind=kind, reason="") for kind in ("first", "continued")]
            assert kinds == [1, 1]

        asyncio.run(work())


def test_late_replies_do_not_set_the_weight_version_back() -> None:
    """They were sent before the update. As many that are sent after it do, because then a run was resumed."""

    async def work() -> None:
        room = Room()
        await room.open()
        says = [room.engine.says("one", hold=0) for _ in range(FALL_AFTER)]
        late = [room.ask(BODY) for _ in says]
        await room.engine.arrived(len(late))
        room.hub.clock.set("2")
        for one in says:
            one.go.set()
        assert [(await one.answer())[0] for one in late] == [200] * FALL_AFTER
        assert room.hub.clock.current == "2"
        for _ in range(FALL_AFTER):
            assert (await room.ask(BODY).answer())[0] == 200
        assert room.hub.clock.current == "1"

    asyncio.run(work())
