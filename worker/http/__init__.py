"""SGLang's routes in front of the engine."""
