"""The common form, SGLang's JSON, which all code speaks: requests, replies, streams, fleet calls. Pure, and used by the hub."""
