"""What only SGLang has. Its JSON is the common form: `router/engines/form`."""
