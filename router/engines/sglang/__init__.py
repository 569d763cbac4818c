"""SGLang's own. Its JSON is the common form: `router/engines/form`."""
