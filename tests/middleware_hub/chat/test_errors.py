"""What a worker's refusal is to a client of a chat or a completion."""

from __future__ import annotations

import msgspec
import pytest

from middleware_hub.chat.errors import ContextLengthError, refusal
from router.errors import BadRequestError


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (400, 400),
        (401, 401),
        (403, 403),
        (404, 502),
        (405, 502),
        (408, 504),
        (422, 400),
        (429, 429),
        (500, 502),
        (503, 503),
    ],
)
def test_a_requests_own_fault_stays_a_400_and_the_workers_is_a_5xx(status: int, told: int) -> None:
    error = refusal(status, b'{"error": {"message": "oops"}}')
    assert error.status == told
    assert "oops" in error.message


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"", "no reason given"),
        (b"null", "no reason given"),
        (b"{}", "no reason given"),
        (b'{"error": null}', "no reason given"),
        (b'{"error": {"code": 429}}', "no reason given"),
        (b'{"error": null, "message": "full"}', "full"),
        (b'{"detail": [{"loc": ["body", "n"], "msg": "too many"}]}', '[{"loc":["body","n"],"msg":"too many"}]'),
        (b"plain", "plain"),
    ],
)
def test_a_worker_without_words_is_never_quoted_as_none(body: bytes, told: str) -> None:
    assert refusal(429, body).message == told


@pytest.mark.parametrize(
    ("said", "prompt", "completion"),
    [
        # SGLang 0.5.23
        ("The input (90 tokens) is longer than the model's context length (64 tokens).", 90, None),
        (
            "Requested token count exceeds the model's maximum context length of 64 tokens. You requested a total of 68"
            " tokens: 60 tokens from the input messages and 8 tokens for the completion.",
            60,
            8,
        ),
        (
            "Requested token count exceeds the model's maximum context length of 64 tokens. You requested a total of 98"
            " tokens: 90 tokens from the input messages and 8 tokens for the completion.",
            90,
            None,
        ),
        ("Input length (90 tokens) exceeds the maximum allowed length (64 tokens).", 90, None),
        # vLLM 0.32, and its earlier versions
        ("The decoder prompt (length 90) is longer than the maximum model length of 64.", 90, None),
        ("max_tokens=80 cannot be greater than max_model_len=64. Please request fewer output tokens.", 20, 80),
        (
            "This model's maximum context length is 64 tokens. However, you requested 8 output tokens and your prompt"
            " contains at least 60 input tokens, for a total of at least 68 tokens. Please reduce the length.",
            60,
            8,
        ),
        (
            "'max_tokens' or 'max_completion_tokens' is too large: 8. This model's maximum context length is 64 tokens"
            " and your request has 60 input tokens (8 > 64 - 60).",
            60,
            8,
        ),
        ("This model's maximum context length is 64 tokens. However, your request has 90 input tokens.", 90, None),
        (
            "This model's maximum context length is 64 tokens. However, you requested 68 tokens (60 in the messages,"
            " 8 in the completion).",
            60,
            8,
        ),
        (
            "You passed 60 input tokens and requested 8 output tokens. However, the model's context length is only 64"
            " tokens, resulting in a maximum input length of 56 tokens.",
            60,
            8,
        ),
    ],
)
def test_what_does_not_fit_is_told_in_openais_words(said: str, prompt: int, completion: int | None) -> None:
    error = refusal(400, msgspec.json.encode({"error": {"message": said}}), 20)
    assert isinstance(error, ContextLengthError)
    assert (error.status, error.details["code"]) == (400, "context_length_exceeded")
    assert (error.context, error.prompt, error.completion) == (64, prompt, completion)
    assert error.message.startswith("This model's maximum context length is 64 tokens. However, ")
    if completion is None:
        assert f"your messages resulted in {prompt} tokens." in error.message
    else:
        assert f"({prompt} in the messages, {completion} in the completion)" in error.message


def test_other_words_for_it_keep_the_code() -> None:
    error = refusal(400, b'{"error": {"message": "the context length is exceeded"}}')
    assert isinstance(error, BadRequestError)
    assert (error.message, error.details["code"]) == ("the context length is exceeded", "context_length_exceeded")
