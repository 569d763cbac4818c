"""A template's date: found in its source, and replaced by that of another day."""

from __future__ import annotations

from datetime import datetime

import pytest

from middleware_hub.templates.chat_template import ChatTemplate
from middleware_hub.templates.clock import at_time, tells_time

DAY = datetime(2025, 3, 4, 12).timestamp()
SAYS = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "written"),
    [
        ('{{ strftime_now("%Y-%m-%d") }}', "2025-03-04"),
        (
            "{%- if strftime_now is defined %}{%- set day = strftime_now ( '%d %b %Y' ) %}{%- endif %}{{ day }}",
            "04 Mar 2025",
        ),
        ("""{{ strftime_now("%d o'clock") }}""", "04 o'clock"),
        ("{{ strftime_now('%d') }}/{{ strftime_now('%m') }}", "04/03"),
    ],
)
def test_the_date_of_another_day(source: str, written: str) -> None:
    assert tells_time(source)
    assert (
        ChatTemplate(at_time(source, DAY) + SAYS, {}).whole([{"role": "user", "content": "!"}], None, {})
        == written + "!"
    )


@pytest.mark.parametrize(
    "source",
    [
        SAYS,
        "{% if strftime_now is defined %}{% endif %}",
        "{{ strftime_now(format) }}",
        "{{ strftime_now('%d') }}{{ strftime_now(format) }}",
    ],
)
def test_no_date_or_one_that_the_source_does_not_spell(source: str) -> None:
    assert not tells_time(source)


def test_other_days_only_and_each_once() -> None:
    template = ChatTemplate("{{ strftime_now('%Y-%m-%d') }}" + SAYS, {})
    now = datetime.now().timestamp()
    assert [*template.on_other_days([now])] == []
    (one,) = template.on_other_days([DAY, DAY + 60, now])
    assert [*template.on_other_days([DAY])] == [one]
    assert [*ChatTemplate(SAYS, {}).on_other_days([DAY])] == []
