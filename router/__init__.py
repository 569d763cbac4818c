"""Routes requests over SGLang or vLLM workers: which worker serves this request, and which workers are healthy."""
