"""OpenAI's older API of texts, `POST /v1/completions`, in front of `/generate`."""
